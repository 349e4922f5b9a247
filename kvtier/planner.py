"""Choose what to recompute and what to load: pure, from a residency and a cost model.

Recomputing gets dearer with position while loading does not, so of every source tier the earliest
blocks are recomputed and the rest is loaded: two numbers describe a plan (``schedule.Layout``). For
one run of one tier that is the familiar split, exact by prefix sums and bisection; for mixed tiers
and holes it recomputes the head of the *slow* runs, which the head of the prefix alone would not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

from kvtier.plan import RestorePlan, Tier, Times, runs
from kvtier.schedule import Choice, Layout, load_order

if TYPE_CHECKING:
    from typing import Any

    from kvtier.cost import CostModel
    from kvtier.plan import Residency

__all__ = ["GAIN_MIN", "Way", "plan", "split_one_tier"]

GAIN_MIN: Final = 0.05
"""A hybrid must beat the better single way by this share, or it is not worth its moving parts."""

Way = Literal["best", "load", "recompute"]


def split_one_tier(
    compute_s: np.ndarray[Any, Any], load_s: np.ndarray[Any, Any], latency_s: float = 0.0
) -> tuple[int, float]:
    """Return the exact split (k, seconds): recompute [0, k), load [k, n).

    C(k) rises and L(k) falls in k, so the best k is the first with C(k) >= L(k) or the one before:
    prefix sums once, then O(log n).
    """
    n = len(compute_s)
    compute = np.concatenate(([0.0], np.cumsum(compute_s)))
    load = np.concatenate(([0.0], np.cumsum(load_s[::-1])))[::-1].copy()
    load[:n] += latency_s if n else 0.0
    crossing = int(np.searchsorted(compute - load, 0.0, side="left"))
    candidates = [k for k in (crossing - 1, crossing) if 0 <= k <= n]
    best = min(candidates, key=lambda k: (max(compute[k], load[k]), k))
    return best, float(max(compute[best], load[best]))


def plan(
    residency: Residency,
    costs: CostModel,
    *,
    resident: int = 0,
    step_blocks_max: int = 1,
    way: Way = "best",
    compute_price: float = 0.0,
    deadline_s: float | None = None,
) -> RestorePlan:
    """Decide how to bring back the full blocks of a prompt.

    ``resident``: leading blocks that the engine already holds. ``step_blocks_max``: the engine's
    chunk limit in blocks. ``way`` forces one single way ("load" still recomputes what is missing).
    ``compute_price``: what a second of compute is worth in seconds of waiting; a block is
    recomputed only while that costs less than loading it, so a busy engine loads everything.
    ``deadline_s``: a plan that ends by then with less compute is preferred to the fastest one.
    """
    n = len(residency.tiers)
    if not 0 <= resident <= n:
        raise ValueError(f"resident: {resident} is not in [0, {n}]")
    if step_blocks_max < 1:
        raise ValueError(f"step_blocks_max: {step_blocks_max} is not positive")
    if way not in get_args(Way):
        raise ValueError(f"way: {way!r} is not one of {', '.join(get_args(Way))}")
    if not compute_price >= 0:
        raise ValueError(f"compute_price: {compute_price} is negative")
    layout = _layout(residency, costs, resident, step_blocks_max)
    choice, reason = _choose(layout, way, compute_price, deadline_s, known=costs.compute.known)
    recompute = layout.recomputed(choice)
    chosen = set(recompute)
    load = [
        block
        for block in range(resident, n)
        if block not in chosen and residency.tiers[block] is not Tier.DEVICE
    ]
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
        compute_price=compute_price,
        predicted=Times(
            choice.seconds,
            None if layout.counts[None] else layout.seconds(0, 0),
            layout.seconds(layout.counts[Tier.SSD], layout.counts[Tier.HOST]),
        ),
        reason=reason,
    )


def _layout(residency: Residency, costs: CostModel, resident: int, step: int) -> Layout:
    tiers = residency.tiers
    spans = [
        (tier, max(start, resident), stop)
        for tier, start, stop in runs(tiers)
        if stop > resident and tier is not Tier.DEVICE
    ]
    return Layout(
        spans,
        costs.block_seconds(residency.keys.block_tokens, 0, len(tiers), step),
        ssd_s=costs.ssd.seconds(residency.block_bytes),
        host_s=costs.host.seconds(residency.block_bytes),
        latency_s=costs.ssd.latency_s,
    )


def _choose(
    layout: Layout, way: Way, price: float, deadline_s: float | None, *, known: bool
) -> tuple[Choice, str]:
    stored = layout.counts[Tier.SSD] + layout.counts[Tier.HOST]
    everything = _choice(layout, layout.counts[Tier.SSD], layout.counts[Tier.HOST])
    least = _choice(layout, 0, 0)
    if way != "best":
        return (everything if way == "recompute" else least), f"{way} was asked for"
    if not stored:
        return least, "no block is stored" if layout.runs else "the engine holds every block"
    if not known:
        return least, "the cost of recomputing is not measured yet, so what is stored is loaded"
    limits = layout.worth(price)
    best = layout.best(*limits)
    if deadline_s is not None and best.seconds < deadline_s:
        reason = f"the least compute that ends within {deadline_s:.3f} s"
        return layout.cheapest(best, deadline_s), reason
    return _worthwhile(best, least, everything, price if limits != layout.worth(0.0) else 0.0)


def _worthwhile(
    best: Choice, least: Choice, everything: Choice, price: float
) -> tuple[Choice, str]:
    """Take a single way if the best choice gains too little over it; ``price`` if it limits."""
    enough = 1 - GAIN_MIN
    if best.seconds > enough * least.seconds and (price or least.seconds <= everything.seconds):
        if price:
            return least, f"at a compute price of {price:g} recomputing more is not worth it"
        return least, f"recomputing a head as well would gain under {GAIN_MIN:.0%}"
    if not price and best.seconds > enough * everything.seconds:
        return everything, f"loading a tail as well would gain under {GAIN_MIN:.0%}"
    gain = min(least.seconds, everything.seconds) / best.seconds
    return best, f"{gain:.2f}x faster than the better single way"


def _choice(layout: Layout, ssd: int, host: int) -> Choice:
    return Choice(ssd, host, layout.seconds(ssd, host))
