"""Choose what to recompute and what to load: pure, from a residency and a cost model.

Recomputing gets dearer with position while loading does not, so heads are recomputed and tails are
loaded. For one run of one source tier the best split is where the two times cross or one block
before it: C(k) rises and L(k) falls in k, so prefix sums and bisection find it exactly. With
missing blocks or several source tiers every k is evaluated with the same list schedule that the
executor follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from kvtier.plan import RestorePlan, Tier, Times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cost import CostModel
    from kvtier.plan import Residency

__all__ = ["GAIN_MIN", "Way", "load_order", "plan", "split_one_tier"]

GAIN_MIN: Final = 0.05
"""A hybrid must beat the better single way by this share, or it is not worth its moving parts."""

Way = Literal["best", "load", "recompute"]


def split_one_tier(
    compute_s: np.ndarray[Any, Any], load_s: np.ndarray[Any, Any], latency_s: float = 0.0
) -> tuple[int, float]:
    """Return the exact split (k, seconds): recompute [0, k), load [k, n)."""
    n = len(compute_s)
    compute = np.concatenate(([0.0], np.cumsum(compute_s)))
    load = np.concatenate(([0.0], np.cumsum(load_s[::-1])))[::-1].copy()
    load[:n] += latency_s if n else 0.0
    # First k with C(k) >= L(k): C - L rises in k.
    crossing = int(np.searchsorted(compute - load, 0.0, side="left"))
    candidates = [k for k in (crossing - 1, crossing) if 0 <= k <= n]
    best = min(candidates, key=lambda k: (max(compute[k], load[k]), k))
    return best, float(max(compute[best], load[best]))


def load_order(
    tiers: Sequence[Tier | None], load: Sequence[int], recompute: Sequence[int]
) -> tuple[int, ...]:
    """Return ``load`` in the order in which loads start.

    Blocks that the compute front must pass come first, ascending; then host memory; then the SSD
    from the tail, so that whatever is late lies next to the front, which can still recompute it.
    """
    last = max(recompute, default=-1)
    ahead = [block for block in sorted(load) if block < last]
    host = [block for block in sorted(load) if block > last and tiers[block] is Tier.HOST]
    rest = set(load) - set(ahead) - set(host)
    return (*ahead, *host, *sorted(rest, reverse=True))


def plan(
    residency: Residency,
    costs: CostModel,
    *,
    resident: int = 0,
    step_blocks_max: int = 1,
    way: Way = "best",
) -> RestorePlan:
    """Decide how to bring back the full blocks of a prompt.

    ``resident``: leading blocks that the engine already holds. ``step_blocks_max``: the engine's
    chunk limit in blocks. ``way`` forces one single way ("load" still recomputes what is missing).
    """
    n = len(residency.tiers)
    if not 0 <= resident <= n:
        raise ValueError(f"resident: {resident} is not in [0, {n}]")
    if step_blocks_max < 1:
        raise ValueError(f"step_blocks_max: {step_blocks_max} is not positive")
    if way not in get_args(Way):
        raise ValueError(f"way: {way!r} is not one of {', '.join(get_args(Way))}")
    problem = _Problem.of(residency, costs, resident, step_blocks_max)
    recompute, times, reason = problem.choose(way, known=costs.compute.known)
    load = [block for block in range(resident, n) if block not in set(recompute)]
    return RestorePlan(
        namespace=residency.keys.namespace,
        hashes=residency.keys.hashes,
        tiers=residency.tiers,
        block_tokens=residency.keys.block_tokens,
        block_bytes=residency.block_bytes,
        resident=resident,
        recompute=tuple(recompute),
        load=load_order(residency.tiers, load, recompute),
        step_blocks_max=step_blocks_max,
        adaptive=way == "best",
        predicted=times,
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class _Problem:
    tiers: tuple[Tier | None, ...]
    resident: int
    compute_s: np.ndarray[Any, Any]  # per block, index 0 is block 0
    load_s: np.ndarray[Any, Any]
    latency_s: dict[Tier, float]

    @classmethod
    def of(cls, residency: Residency, costs: CostModel, resident: int, step: int) -> _Problem:
        tiers = residency.tiers
        load_s = np.array(
            [0.0 if t is None else costs.link(t).seconds(residency.block_bytes) for t in tiers]
        )
        return cls(
            tiers,
            resident,
            costs.block_seconds(residency.keys.block_tokens, 0, len(tiers), step),
            load_s,
            {tier: costs.link(tier).latency_s for tier in (Tier.HOST, Tier.SSD)},
        )

    @property
    def missing(self) -> list[int]:
        return [b for b in range(self.resident, len(self.tiers)) if self.tiers[b] is None]

    def recomputed(self, k: int) -> list[int]:
        """Return what is recomputed when the head up to ``k`` is: [resident, k) and every hole."""
        return [*range(self.resident, k), *(block for block in self.missing if block >= k)]

    def seconds(self, recompute: Sequence[int]) -> float:
        """Return the end of the list schedule.

        Each tier's link serves its blocks in load order; compute takes its blocks ascending, each
        one after all blocks before it are in place.
        """
        chosen = set(recompute)
        load = [b for b in range(self.resident, len(self.tiers)) if b not in chosen]
        arrival = np.zeros(len(self.tiers))
        free: dict[Tier, float] = {}
        for block in load_order(self.tiers, load, recompute):
            tier = self.tiers[block]
            if tier is None:
                raise ValueError(f"block {block} is missing and cannot be loaded")
            start = free.get(tier, self.latency_s.get(tier, 0.0))
            free[tier] = arrival[block] = start + self.load_s[block]
        ready = np.maximum.accumulate(arrival) if len(arrival) else arrival
        done = 0.0
        for block in recompute:
            wait = ready[block - 1] if block else 0.0
            done = max(done, wait) + self.compute_s[block]
        return float(max(done, ready[-1] if len(ready) else 0.0))

    def choose(self, way: Way, *, known: bool) -> tuple[list[int], Times, str]:
        """Return what is recomputed, the three times, and the reason."""
        everything = list(range(self.resident, len(self.tiers)))
        recompute_s = self.seconds(everything)
        load_s = None if self.missing else self.seconds([])
        if way == "recompute":
            recompute, reason = everything, "recompute was asked for"
        elif way == "load":
            recompute, reason = self.missing, "load was asked for"
        elif len(self.missing) == len(everything):
            recompute = everything
            reason = "no block is stored" if everything else "the engine holds every block"
        elif not known:
            recompute = self.missing
            reason = "the cost of recomputing is not measured yet, so what is stored is loaded"
        else:
            recompute, reason = self._best(everything, recompute_s)
        return recompute, Times(self.seconds(recompute), load_s, recompute_s), reason

    def _best(self, everything: list[int], recompute_s: float) -> tuple[list[int], str]:
        k, planned_s = self._best_split()
        least = self.missing
        least_s = self.seconds(least)
        if planned_s > (1 - GAIN_MIN) * least_s and least_s <= recompute_s:
            return least, f"recomputing a head as well would gain under {GAIN_MIN:.0%}"
        if planned_s > (1 - GAIN_MIN) * recompute_s:
            return everything, f"loading a tail as well would gain under {GAIN_MIN:.0%}"
        better = min(least_s, recompute_s)
        return self.recomputed(k), f"{better / planned_s:.2f}x faster than the better single way"

    def _best_split(self) -> tuple[int, float]:
        start, n = self.resident, len(self.tiers)
        sources = set(self.tiers[start:])
        if len(sources) == 1 and None not in sources:
            (tier,) = sources
            latency = self.latency_s.get(tier, 0.0) if tier else 0.0
            k, seconds = split_one_tier(self.compute_s[start:], self.load_s[start:], latency)
            return start + k, seconds
        best = min(range(start, n + 1), key=lambda k: (self.seconds(self.recomputed(k)), k))
        return best, self.seconds(self.recomputed(best))
