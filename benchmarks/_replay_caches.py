"""What holds blocks while a trace is replayed: the real catalog over tiers without bytes.

And two that no store can be: one that never forgets, and one that knows what will be asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.catalog import Catalog
from kvtier.plan import Tier
from kvtier.tiers.base import Location

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from _replay_traces import Request, Trace
    from _replay_ttft import Outcome

    from kvtier.history import History
    from kvtier.policy import MakePolicy
    from kvtier.prices import Prices

SPACE: Final = bytes(32)
"""The one namespace of a replay."""
NOWHERE: Final = Location(0, 0, 0)

Tiers = tuple[Tier | None, ...]


@dataclass(slots=True)
class Moved:
    """Blocks moved so far, by tier: ``written`` into it, ``loaded`` from it, ``evicted``."""

    written: Counter[Tier] = field(default_factory=Counter)
    loaded: Counter[Tier] = field(default_factory=Counter)
    evicted: Counter[Tier] = field(default_factory=Counter)


class Admission(Protocol):
    """Which missing blocks are written to the SSD."""

    def admitted(self, number: int, missing: Sequence[int], outcome: Outcome) -> list[int]:
        """Return those of a request's missing blocks, head first, that are worth a write."""


class Cache(Protocol):
    """What a replay asks for each request."""

    moved: Moved

    def tiers(self, number: int) -> Tiers:
        """Return where the blocks of a request are."""

    def use(self, number: int, tiers: Tiers, outcome: Outcome) -> None:
        """Note that a request was restored, and store what was missing."""


class Stored:
    """The real catalog and policy; its owner here has no bytes, so that every move is instant.

    It does what a store does: a restore touches its prompt, and what it loads from the SSD is in
    host memory afterwards. What was missing is put into host memory and written through to the SSD,
    if ``admission`` admits it; what the policy finds worth less than what it would displace is not.
    """

    def __init__(
        self,
        trace: Trace,
        policy: MakePolicy,
        blocks: Mapping[Tier, int],
        *,
        prices: Prices,
        history: History | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.moved = Moved()
        self.catalog = Catalog(
            policy, prices=prices, changes_kept=1, uses_kept=0, history=history, now_ns=lambda: 0
        )
        self._requests = trace.requests
        self._blocks = {tier: blocks.get(tier, 0) for tier in (Tier.HOST, Tier.SSD)}
        self._admission = admission

    def tiers(self, number: int) -> Tiers:
        """Return where the blocks of a request are."""
        return self.catalog.residency(SPACE, self._requests[number].hashes)

    def use(self, number: int, tiers: Tiers, outcome: Outcome) -> None:
        """Note that a request was restored, and store what was missing."""
        request, moved = self._requests[number], self.moved
        self.catalog.touch(SPACE, request.hashes, int(request.at_s * 1e9))
        missing = [at for at, tier in enumerate(tiers) if tier is None]
        loaded = [at for at, tier in enumerate(tiers) if tier and at not in outcome.recomputed]
        moved.loaded.update(tiers[at] for at in loaded)
        if self._blocks[Tier.HOST]:
            cold = [at for at in loaded if tiers[at] is not Tier.HOST]
            self._put(Tier.HOST, "load", request, cold)
            self._put(Tier.HOST, "write", request, missing)
        if self._admission is not None:
            missing = self._admission.admitted(number, missing, outcome)
        self._put(Tier.SSD, "write", request, missing)

    def _put(self, tier: Tier, what: str, request: Request, blocks: Sequence[int]) -> None:
        """Bring blocks of a prompt, head first, into a tier, as far as there is room for them."""
        if not blocks:
            return
        catalog, moved, hashes = self.catalog, self.moved, request.hashes
        now_ns = int(request.at_s * 1e9)
        named = [hashes[at] for at in blocks]
        rows = catalog.begin_all(SPACE, named, tier, what, positions=blocks, now_ns=now_ns)
        catalog.announce(SPACE, hashes, rows, (tier,))
        over = catalog.ready(tier) + len(rows) - self._blocks[tier]
        if over > 0:
            victims = catalog.evict(tier, over)
            catalog.end_all(victims, tier, "evicted")
            moved.evicted[tier] += len(victims)
            fitting = len(rows) - (over - len(victims))
            # A declined tail leaves its head in place.
            catalog.end_all(rows[fitting:], tier, "decline" if what == "write" else "abort")
            rows = rows[:fitting]
        catalog.commit_all(rows, tier, [NOWHERE] * len(rows))
        moved.written[tier] += len(rows)


class Infinite:
    """Everything ever asked for, on the SSD."""

    def __init__(self, trace: Trace) -> None:
        self.moved = Moved()
        self._requests = trace.requests
        self._seen: set[bytes] = set()

    def tiers(self, number: int) -> Tiers:
        """Return where the blocks of a request are."""
        seen = self._seen
        hashes = self._requests[number].hashes
        return tuple([Tier.SSD if digest in seen else None for digest in hashes])

    def use(self, number: int, tiers: Tiers, outcome: Outcome) -> None:
        """Note that a request was restored, and store what was missing."""
        self.moved.loaded[Tier.SSD] += outcome.ssd
        self.moved.written[Tier.SSD] += tiers.count(None)
        self._seen.update(self._requests[number].hashes)


class Clairvoyant:
    """Belady's rule on one tier: what is asked for again last, or never, goes first.

    Most hits of all, but not most seconds: it does not know that blocks differ in cost.
    """

    def __init__(self, trace: Trace, blocks: int) -> None:
        self.moved = Moved()
        self._requests = trace.requests
        self._blocks = blocks
        self._next_use = list(next_uses(trace))
        self._due: dict[bytes, float] = {}
        self._order: list[tuple[float, bytes]] = []

    def tiers(self, number: int) -> Tiers:
        """Return where the blocks of a request are."""
        due, hashes = self._due, self._requests[number].hashes
        return tuple([Tier.SSD if digest in due else None for digest in hashes])

    def use(self, number: int, tiers: Tiers, outcome: Outcome) -> None:
        """Note that a request was restored, and store what was missing."""
        self.moved.loaded[Tier.SSD] += outcome.ssd
        self.moved.written[Tier.SSD] += tiers.count(None)
        for digest, due in zip(self._requests[number].hashes, self._next_use[number], strict=True):
            self._due[digest] = due
            heappush(self._order, (-due, digest))
        while len(self._due) > self._blocks:
            due, digest = heappop(self._order)
            if self._due.get(digest) == -due:  # else it was asked for since
                del self._due[digest]
                self.moved.evicted[Tier.SSD] += 1


def next_uses(trace: Trace) -> Iterator[list[float]]:
    """Yield for each request when each of its blocks is asked for again; infinity is never."""
    later: dict[bytes, float] = {}
    result = []
    for number in range(len(trace.requests) - 1, -1, -1):
        hashes = trace.requests[number].hashes
        result.append([later.get(digest, math.inf) for digest in hashes])
        later.update(dict.fromkeys(hashes, number))
    return reversed(result)
