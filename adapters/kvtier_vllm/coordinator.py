"""The scheduler's side: which requests are restored and saved, and what every rank is to do.

Owns everything that the scheduler's process knows about blocks: the mirror of what is stored, the
restores and saves under way, the pages that are held for them. It is told what vLLM's scheduler
does, in its order, and knows nothing of vLLM.

::

    lookup -> admitted -> (step_begins -> restoring -> orders -> report -> step_done)* -> finished
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import kvtier
from kvtier import BlockKeys
from kvtier_vllm.asked import NOTHING_ASKED, Asked
from kvtier_vllm.holds import Holds, Pages
from kvtier_vllm.messages import Hint, Orders
from kvtier_vllm.mirror import Mirror
from kvtier_vllm.planning import Limits, plan_restore
from kvtier_vllm.saves import Saves
from kvtier_vllm.steps import Steps
from kvtier_vllm.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvtier import CatalogChanges, KVSpec
    from kvtier_vllm.messages import Hello, RankReport
    from kvtier_vllm.restores import Restore

__all__ = ["DEFER_S_MAX", "HINTS_MAX", "Announcements", "Coordinator", "EngineRequest"]

DEFER_S_MAX: Final = 60.0
"""A request waits so long for another one's restore to bring its blocks, then plans its own."""
HINTS_MAX: Final = 64
"""Waiting requests for which blocks are prefetched at once."""
RESTORE: Final = "restore"


class EngineRequest(Protocol):
    """What is consumed of vLLM's request."""

    request_id: str
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    prefill_stats: Any

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was accepted of the answer."""


class Announcements(Protocol):
    """Who tells others what is stored."""

    def note(self, request: Any, hashes: Sequence[bytes], blocks: Iterable[int]) -> None:
        """Take in that a request holds blocks of a prompt with these hashes."""

    def moved(self, hashes: Iterable[bytes]) -> None:
        """Take in that blocks may be stored elsewhere by now."""

    def cleared(self) -> None:
        """Take in that nothing is stored any more."""


@dataclass(slots=True)
class _Tracked:
    """A request that has not finished."""

    request: EngineRequest
    tenant: str
    adapter: str
    refused: str
    asked: Asked
    admitted: bool = False
    counted: bool = False
    keys: BlockKeys | None = None
    saved: int = 0
    """Blocks before it are stored, on their way, or were given up."""
    stale: bool = False
    """Computed under weights that are not loaded any more: not to be stored."""
    deferred_at: float | None = None
    hint: int | None = None
    planned: Restore | None = None
    restore: Restore | None = None
    local: int = 0
    """Tokens that the engine held at admission."""


@dataclass(slots=True)
class _Ending:
    restore: Restore
    waiting: set[int]
    owes: bool
    """The engine keeps an aborted request's pages until it hears that the load is over."""


class Coordinator:
    """One engine's restores and saves; everything on the scheduler's thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.tally = Tally()
        self._say = say
        self._clock = clock
        self._mirror = Mirror(limits.ranks)
        self._holds = Holds()
        self._saves = Saves(
            self._holds,
            limits.ranks,
            dropped=lambda blocks: self.tally.add("save_blocks_dropped", blocks),
        )
        self._steps = Steps(clock)
        self._requests: dict[str, _Tracked] = {}
        self._ending: dict[int, _Ending] = {}
        self._bringing: dict[bytes, Restore] = {}
        self._numbers = 0
        self._hints = 0
        self._resets = 0
        self._ends: list[int] = []
        self._unhints: list[int] = []
        self._received: list[str] = []
        self._spare: Callable[[], int] | None = None
        self._events: Announcements | None = None
        self._cache_cleared = True
        self._suspect = False
        self._changed = False
        self._introduced = False

    # -- whom it works with

    def bind(self, pages: Pages) -> None:
        """Learn where the engine's pages are kept."""
        self._holds.bind(pages)

    def drive(self, spare: Callable[[], int]) -> None:
        """Be driven by a hybrid scheduler; ``spare``: pages that nobody counts on."""
        self._spare = spare

    def announce(self, events: Announcements) -> None:
        """Tell ``events`` from now on what may have changed; they ask ``stored_in``."""
        self._events = events

    def stored_in(self, digest: bytes) -> tuple[kvtier.Tier, ...]:
        """Return the tier from which every rank could load a block; none if one lacks it."""
        (tier,) = self._mirror.tiers((digest,)) if self._mirror.ready else (None,)
        return () if tier is None else (tier,)

    def hello(self, hello: Hello) -> None:
        """Take a rank's account of its store, and its weights."""
        self._changed |= self._mirror.hello(hello)
        self._moved(hello.stored)
        if self._mirror.ready and self._changed:
            self._weights_changed()
        if self._mirror.ready and not self._introduced:
            self._introduced = True
            spec = self._mirror.spec
            self._say(
                f"kvtier: {self.limits.describe()}; blocks of {spec.block_tokens} tokens, "
                f"{self._mirror.block_bytes} bytes on each of {self.limits.ranks} rank(s); "
                f"namespace {spec.namespace.hex()[:16]}"
            )

    # -- requests, as vLLM's scheduler takes them up

    def arrived(
        self,
        request: EngineRequest,
        *,
        tenant: str = "",
        adapter: str = "",
        refused: str = "",
        asked: Asked = NOTHING_ASKED,
    ) -> None:
        """Follow a request; ``refused``: why it is neither restored nor saved."""
        self._requests[request.request_id] = _Tracked(request, tenant, adapter, refused, asked)

    def lookup(self, request_id: str, local: int) -> tuple[int | None, bool]:
        """Plan a request of which the engine holds ``local`` tokens.

        Returns what ``get_num_new_matched_tokens`` does. Nothing is begun until ``admitted``.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.restore is not None or not tracked.asked.restore:
            return 0, False
        tracked.planned = None
        tracked.local = local
        keys = self._keys(tracked) if self.limits.restore and not self._suspect else None
        if keys is None:
            return 0, False
        now = self._clock()
        planned = plan_restore(
            tracked.request,
            keys,
            local,
            limits=self.limits,
            mirror=self._mirror,
            busy=self._others(tracked),
            now=now,
            cover_s=self._steps.cover_s,
        )
        self.tally.observe("lookup_seconds", self._clock() - now)
        if planned is None:
            return 0, False
        if self._defers(tracked, planned, now):
            return None, False
        tracked.planned = planned
        return (planned.end - local, True) if planned.waits else (0, False)

    def admitted(self, request_id: str) -> None:
        """Begin the restore that was planned: the engine has given the request its pages."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.admitted = True
        if not tracked.asked.prefetch:
            self._unhint(tracked)
        self._note(tracked)
        planned, tracked.planned = tracked.planned, None
        if not tracked.counted:
            self._count_sources(tracked, planned)
        if planned is None or not self._give_pages(planned):
            return
        planned.start(self._numbers, self._holds.engine.of(request_id), self._pages_per_block)
        self._numbers += 1
        first_page = planned.first_loadable * self._pages_per_block
        pages = self._holds.engine.of(request_id)[first_page : planned.end // self._page_tokens]
        self._holds.take(RESTORE, planned.number, pages)
        self._bringing.update(dict.fromkeys(planned.plan.hashes, planned))
        tracked.restore = planned

    def preempted(self, request_id: str) -> None:
        """Leave a request's restore: its pages are taken from it, and it will be planned anew."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        self._leave(tracked)
        tracked.admitted = False
        tracked.saved = 0
        tracked.stale = False  # it will be computed anew, under the weights as they are

    def finished(self, request_id: str) -> None:
        """Save what is left of a request and leave its restore; its pages are taken from it."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        request = tracked.request
        done = min(request.num_computed_tokens, request.num_tokens - 1)
        if tracked.restore is not None:
            done = min(done, tracked.restore.position)
        self._save(tracked, done)
        # Only a plain load is always parked: the engine then keeps the pages until it is told.
        self._leave(tracked, owes=not self.limits.hybrid)
        self._unhint(tracked)
        del self._requests[request_id]

    # -- one engine step

    def restoring(self, request_id: str) -> Restore | None:
        """Return a request's restore, if it has one."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.restore

    def restores(self) -> Iterator[tuple[EngineRequest, Restore]]:
        """Yield requests that are being restored, by the costs as they are now."""
        costs = self._mirror.costs if self._bringing and self._mirror.ready else None
        for tracked in list(self._requests.values()):
            if tracked.restore is not None:
                if costs is not None:
                    tracked.restore.recosted(costs)
                yield tracked.request, tracked.restore

    def over(self, request_id: str) -> None:
        """End a restore of which everything is in place."""
        tracked = self._requests[request_id]
        restore = tracked.restore
        if restore is None:
            return
        spent = self._clock() - restore.begun
        way = "hybrid" if restore.loaded and restore.plan.recompute else "load"
        self.tally.add(f"restores_{way if restore.loaded else 'recompute'}")
        self.tally.observe("restore_seconds", spent)
        if restore.plan.predicted.planned > 0:
            ratio = spent / restore.plan.predicted.planned
            self.tally.observe("restore_predicted_ratio", ratio)
        self._note_cached(tracked, restore)
        self._end(tracked, owes=False)

    def cap(self, request_id: str) -> int | None:
        """Return the token that a request's prefill must not pass; None if there is none."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return None
        restore = tracked.restore or tracked.planned
        return None if restore is None else restore.cap

    def now(self) -> float:
        """Return the time, on the clock of everything in here."""
        return self._clock()

    def orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return what every rank is to do with a step that computes so many tokens of each."""
        chunks = []
        for request_id, tokens in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            start = request.num_computed_tokens
            self._save(tracked, min(start + tokens, request.num_tokens))
            chunks.append((start, tokens))
        loads, cancels = [], []
        for tracked in self._requests.values():
            if tracked.restore is not None:
                begun, stopped = tracked.restore.take_orders()
                loads += begun
                cancels += stopped
        self._steps.began(chunks, loading=bool(self._bringing))
        ends, self._ends = tuple(self._ends), []
        hints = tuple(self._hint_waiting())
        unhints, self._unhints = tuple(self._unhints), []
        return Orders(
            loads=tuple(loads),
            cancels=tuple(cancels),
            ends=ends,
            saves=self._saves.take(),
            hints=hints,
            unhints=unhints,
            measured=self._steps.take(),
            resets=self._resets,
        )

    def report(self, rank: int, report: RankReport) -> None:
        """Take what a rank says has happened."""
        now = self._clock()
        if report.hello is not None:
            self.hello(report.hello)
        if report.stale and self._mirror.ready:
            self.reset()
        if report.changes is not None:
            self._mirror.changed(rank, report.changes)
            self._moved(report.changes)
        if report.costs is not None:
            self._mirror.recosted(rank, report.costs)
        self.tally.rank(rank, report.stats)
        active = {t.restore.number: t.restore for t in self._requests.values() if t.restore}
        answers = [(each, True) for each in report.landed] + [(e, False) for e in report.failed]
        for (number, block), landed in answers:
            if (restore := active.get(number)) is not None:
                restore.answered(rank, block, now, landed=landed)
        self.tally.add("load_failures", len(report.failed))
        for number in report.ended:
            self._ended(rank, number)
        for number in report.released:
            self.tally.add("save_blocks_released", self._saves.released(rank, number))

    def step_done(self) -> None:
        """Note that the output of the oldest step that is out has been processed."""
        self._steps.ended(loading=bool(self._bringing))

    def received(self) -> list[str]:
        """Return the requests that a plain load kept, and that may go on.

        Where the hybrid scheduler drives, it does this by itself.
        """
        if not self.limits.hybrid:
            for request, restore in self.restores():
                self._settle_plain(request, restore)
        received, self._received = self._received, []
        return received

    @property
    def expects_answers(self) -> bool:
        """Whether ranks have something to do or to answer."""
        return bool(
            self._saves or self._ending or self._ends or self._unhints or not self._mirror.heard
        )

    @property
    def frees_pages(self) -> bool:
        """Whether pages that the engine lacks are only kept until ranks have answered."""
        return bool(self._saves or self._ending) and self._holds.any_unshared

    # -- resets

    def reset(self) -> None:
        """Have every rank forget what is stored, and take its weights' fingerprint again."""
        self._resets += 1
        self.tally.add("cache_resets")
        self._mirror.reset(self._resets)
        if self._events is not None:
            self._events.cleared()
        self._cache_cleared = self._holds.engine.prefix_cache_empty
        self._saves.forget_queued()
        now = self._clock()
        for tracked in self._requests.values():
            tracked.keys = tracked.planned = None
            if tracked.restore is not None:
                tracked.restore.expire(now)

    def cleared(self) -> None:
        """Note that the engine's own prefix cache was emptied."""
        self._suspect = False

    def lent(self) -> Any:
        """Hold no page within this scope, so that the engine may empty its prefix cache."""
        return self._holds.lent()

    def _weights_changed(self) -> None:
        """What was computed under other weights must not be stored under these."""
        for tracked in self._requests.values():
            tracked.keys = tracked.planned = None
            tracked.stale = tracked.request.num_computed_tokens > 0
        if not self._cache_cleared and not self._suspect:
            self._suspect = True
            self._say(
                "kvtier: the weights changed, but vLLM's own prefix cache was not emptied: nothing "
                "is stored or restored until reset_prefix_cache() succeeds"
            )
        self._changed = False
        self._cache_cleared = False  # of what comes from now on, until it is reset again

    # -- inside

    @property
    def _page_tokens(self) -> int:
        return self.limits.page_tokens

    @property
    def _pages_per_block(self) -> int:
        return self._mirror.spec.block_tokens // self.limits.page_tokens

    def _keys(self, tracked: _Tracked) -> BlockKeys | None:
        """Return the keys of all known tokens; None where nothing may be looked up or stored."""
        if tracked.refused or not self._mirror.ready:
            return None
        spec: KVSpec = self._mirror.spec
        known, request = tracked.keys, tracked.request
        if known is None:
            tokens = list(request.all_token_ids)
            known = BlockKeys.of(spec, tokens, tenant=tracked.tenant, adapter=tracked.adapter)
        elif request.num_tokens - known.num_tokens >= spec.block_tokens:
            known = known.extend(list(request.all_token_ids[known.num_tokens :]))
        tracked.keys = known
        return known

    def _others(self, tracked: _Tracked) -> int:
        """Return how many other requests a second of compute delays."""
        return sum(
            other is not tracked and (other.restore is None or not other.restore.waits)
            for other in self._requests.values()
        )

    def _defers(self, tracked: _Tracked, planned: Restore, now: float) -> bool:
        """Whether another restore is bringing blocks that this one would load."""
        hashes = planned.plan.hashes
        brought = ((block, self._bringing.get(hashes[block])) for block in planned.plan.load)
        comes = any(other is not None and other.front <= block for block, other in brought)
        if not comes or not self.limits.prefix_caching:
            return False
        if tracked.deferred_at is None:
            tracked.deferred_at = now
            self.tally.add("requests_deferred")
        return now - tracked.deferred_at < DEFER_S_MAX

    def _give_pages(self, planned: Restore) -> bool:
        """Give the request pages for all that is restored; False if others count on them."""
        engine = self._holds.engine
        missing = planned.end // self._page_tokens - len(engine.of(planned.request_id))
        if missing <= 0:
            return True
        if self._spare is None or missing > self._spare():
            return False
        return engine.extend(planned.request_id, planned.end)

    def _save(self, tracked: _Tracked, done: int) -> None:
        """Order saves of a request's blocks that are full at ``done`` tokens and not stored."""
        if not self.limits.save or tracked.stale or self._suspect:
            return
        spec_known = self._mirror.ready and not tracked.refused
        if not spec_known or done // self._mirror.spec.block_tokens <= tracked.saved:
            return
        keys = self._keys(tracked)
        if keys is None:
            return
        stop = min(done // keys.block_tokens, len(keys))
        start, tracked.saved = tracked.saved, max(stop, tracked.saved)
        tiers = self._mirror.tiers(keys.hashes[start:stop])
        wanted = [
            block
            for block, tier in zip(range(start, stop), tiers, strict=True)
            if tier is None and not self._saves.under_way(keys.hashes[block])
        ]
        per_block = self._pages_per_block
        pages = self._holds.engine.of(tracked.request.request_id)
        for first, last in _runs(wanted):
            if not self._saves.room((last - first) * per_block):
                tracked.saved = first  # again with the next step
                return
            mine = pages[first * per_block : last * per_block]
            self._saves.order(_confirmed(keys, last), first, last, mine)
        if self._events is not None:
            self._events.note(tracked.request, keys.hashes, range(start, stop))

    def _leave(self, tracked: _Tracked, *, owes: bool = False) -> None:
        tracked.planned = None
        if tracked.restore is not None:
            self.tally.add("restores_left")
            self._end(tracked, owes=owes)

    def _end(self, tracked: _Tracked, *, owes: bool) -> None:
        restore, tracked.restore = tracked.restore, None
        if restore is None:
            return
        for digest in restore.plan.hashes:
            if self._bringing.get(digest) is restore:
                del self._bringing[digest]
        ranks = set(range(self.limits.ranks))
        self._ending[restore.number] = _Ending(restore, ranks, owes)
        self._ends.append(restore.number)

    def _ended(self, rank: int, number: int) -> None:
        ending = self._ending.get(number)
        if ending is None:
            return
        ending.waiting.discard(rank)
        if not ending.waiting:
            del self._ending[number]
            self._holds.drop(RESTORE, number)
            if ending.owes:
                self._received.append(ending.restore.request_id)

    def _settle_plain(self, request: EngineRequest, restore: Restore) -> None:
        """Let a request go on once its plain load is over, as far as that came."""
        now = self._clock()
        restore.woke(now)
        if restore.failed and not restore.finished:
            restore.expire(now)  # the rest is recomputed: nothing may load over it
        if restore.loads_under_way or restore.waits:
            return
        request.num_computed_tokens = restore.position
        if not restore.position:
            # The engine looks such a request up again, as a new one.
            self._holds.engine.give_up(request.request_id)
        self._received.append(request.request_id)
        self.over(request.request_id)

    def _hint_waiting(self) -> Iterator[Hint]:
        room = HINTS_MAX - sum(each.hint is not None for each in self._requests.values())
        for tracked in self._requests.values():
            if room <= 0:
                return
            waits = not tracked.admitted or tracked.asked.prefetch
            if not waits or tracked.hint is not None or not self.limits.restore:
                continue
            keys = self._wanted(tracked)
            if keys is None or kvtier.Tier.SSD not in self._mirror.tiers(keys.hashes):
                continue
            tracked.hint, room = self._hints, room - 1
            self._hints += 1
            yield Hint(tracked.hint, _confirmed(keys, len(keys)))

    def _wanted(self, tracked: _Tracked) -> BlockKeys | None:
        """Return the keys of what is to be prefetched for a request."""
        keys = self._keys(tracked)
        if keys is None or not tracked.asked.prefetch:
            return keys
        return BlockKeys.of(
            self._mirror.spec,
            tracked.asked.prefetch,
            tenant=tracked.tenant,
            adapter=tracked.adapter,
        )

    def _unhint(self, tracked: _Tracked) -> None:
        if tracked.hint is not None:
            self._unhints.append(tracked.hint)
            tracked.hint = None

    def _moved(self, changes: CatalogChanges) -> None:
        if self._events is not None:
            self._events.moved([digest for _, digest, _ in changes.blocks])

    def _note(self, tracked: _Tracked) -> None:
        """Let blocks that were stored before be announced, now that a request names them."""
        if self._events is not None and tracked.keys is not None:
            self._events.note(tracked.request, tracked.keys.hashes, range(len(tracked.keys)))

    def _count_sources(self, tracked: _Tracked, planned: Restore | None) -> None:
        keys = tracked.keys
        if keys is None:
            return
        tracked.counted = True
        local = tracked.local // keys.block_tokens
        tiers = self._mirror.tiers(keys.hashes)
        load = set() if planned is None else set(planned.plan.load)
        self.tally.add("prompt_blocks_local", local)
        for block in range(local, len(keys)):
            tier = tiers[block]
            source = "missing" if tier is None else str(tier) if block in load else "recomputed"
            self.tally.add(f"prompt_blocks_{source}")

    def _note_cached(self, tracked: _Tracked, restore: Restore) -> None:
        stats = tracked.request.prefill_stats
        if stats is not None and stats.num_prompt_tokens:
            external = restore.loaded * restore.plan.block_tokens
            stats.set(
                num_prompt_tokens=stats.num_prompt_tokens,
                num_local_cached_tokens=tracked.local,
                num_external_cached_tokens=min(external, stats.num_prompt_tokens - tracked.local),
            )


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive blocks as (first, last + 1)."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[start], blocks[index - 1] + 1
            start = index


def _confirmed(keys: BlockKeys, blocks: int) -> BlockKeys:
    """Return the keys of the first blocks alone, without the tokens of an unfinished one."""
    return BlockKeys(
        keys.namespace,
        keys.block_tokens,
        keys.root,
        keys.tenant_digest,
        keys.hashes[:blocks],
        b"",
    )
