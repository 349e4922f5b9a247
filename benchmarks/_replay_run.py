"""Replaying a trace against a cache: what was hit, what was saved, what was moved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from _replay_caches import Clairvoyant, Infinite, Stored
from _replay_traces import trace
from _replay_ttft import HOLES, Hardware, Ttft, Way

from kvtier.plan import Tier
from kvtier.policies import POLICY
from kvtier.prices import Prices

if TYPE_CHECKING:
    from _replay_caches import Admission, Cache
    from _replay_traces import Trace

    from kvtier.history import History

TIERS: Final = (Tier.HOST, Tier.SSD)
BARS_ON: Final = Hardware()
"""What the bars are for: an 8B model on an H100, an SSD of 7 GB/s."""
REFERENCES: Final = ("infinite", "belady")
"""Caches that no store can be."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to replay; ``blocks`` of host and SSD are what each may hold."""

    trace: str
    policy: str
    way: Way
    ssd_blocks: int
    host_blocks: int = 0
    hardware: Hardware = BARS_ON


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one case."""

    case: Case
    hit_rate: float
    """Blocks found over blocks asked for, whether the way could use them or not."""
    saved_s: float
    recompute_s: float
    """TTFT of all requests without a cache."""
    compute_s: float
    """Seconds of compute that were spent all the same."""
    written: dict[str, int]
    loaded: dict[str, int]
    evicted: dict[str, int]
    block_bytes: int
    catalog_s: float
    asked: int

    @property
    def ssd_written_bytes(self) -> int:
        """What went to the SSD."""
        return self.written["ssd"] * self.block_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        case, way = self.case, self.case.way
        return {
            "trace": case.trace,
            "policy": case.policy,
            "way": {"holes": way.holes, "hybrid": way.hybrid, "price": way.price},
            "blocks": {"host": case.host_blocks, "ssd": case.ssd_blocks},
            "model": case.hardware.model,
            "device": case.hardware.device,
            "ssd": case.hardware.ssd,
            "block_bytes": self.block_bytes,
            "hit_rate": self.hit_rate,
            "saved_s": self.saved_s,
            "recompute_s": self.recompute_s,
            "compute_s": self.compute_s,
            "written_blocks": self.written,
            "loaded_blocks": self.loaded,
            "evicted_blocks": self.evicted,
            "ssd_written_bytes": self.ssd_written_bytes,
            "events_per_s": self.asked / self.catalog_s,
        }


@cache
def ttft(hardware: Hardware, way: Way, block_tokens: int, longest: int) -> Ttft:
    """Return the arithmetic of a setting; it remembers outcomes, so one serves all cases."""
    return Ttft(
        hardware.costs(block_tokens),
        way,
        block_tokens=block_tokens,
        block_bytes=hardware.block_bytes(block_tokens),
        longest=longest,
    )


@cache
def prices(hardware: Hardware, block_tokens: int) -> Prices:
    """Return the prices by which a store on this hardware weighs blocks."""
    costs = hardware.costs(block_tokens)
    return Prices.of(costs, block_tokens, hardware.block_bytes(block_tokens))


def make(
    case: Case,
    found: Trace,
    *,
    priced: Prices | None = None,
    history: History | None = None,
    admission: Admission | None = None,
) -> Cache:
    """Return a case's cache, empty."""
    if case.policy == "infinite":
        return Infinite(found)
    if case.policy == "belady":
        return Clairvoyant(found, case.ssd_blocks)
    return Stored(
        found,
        POLICY[case.policy],
        {Tier.HOST: case.host_blocks, Tier.SSD: case.ssd_blocks},
        prices=priced or prices(case.hardware, found.block_tokens),
        history=history,
        admission=admission,
    )


def replay(case: Case, cached: Cache | None = None, requests: int | None = None) -> Row:
    """Ask for a trace's prompts one after the other, each restored and stored before the next."""
    found = trace(case.trace)
    found = found if requests is None else found.first(requests)
    cached = cached or make(case, found)
    plans = ttft(case.hardware, case.way, found.block_tokens, found.longest)
    hits, saved_s, recompute_s, compute_s, catalog_s = 0, 0.0, 0.0, 0.0, 0.0
    for number in range(len(found.requests)):
        begun = time.perf_counter()
        tiers = cached.tiers(number)
        looked = time.perf_counter()
        outcome = plans.of(tiers)
        planned = time.perf_counter()
        cached.use(number, tiers, outcome)
        catalog_s += (looked - begun) + (time.perf_counter() - planned)
        hits += len(tiers) - tiers.count(None)
        saved_s += outcome.saved_s
        recompute_s += outcome.recompute_s
        compute_s += outcome.compute_s
    moved, asked = cached.moved, found.asked
    written, loaded, evicted = (
        {str(tier): counts[tier] for tier in TIERS}
        for counts in (moved.written, moved.loaded, moved.evicted)
    )
    return Row(
        case, hits / asked, saved_s, recompute_s, compute_s, written, loaded, evicted,
        case.hardware.block_bytes(found.block_tokens), catalog_s, asked,
    )  # fmt: skip


def infinite(case: Case) -> Case:
    """Return the same case with a cache that never forgets, used in the best way."""
    return Case(case.trace, "infinite", HOLES, 0, 0, case.hardware)
