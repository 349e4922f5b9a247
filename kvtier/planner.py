"""Choose what to recompute and what to load: pure, from a residency and a cost model.

Recomputing gets dearer with position while loading does not, so of every source tier the earliest
blocks are recomputed and the rest is loaded: two numbers describe a plan (``schedule.Layout``). For
one run of one tier that is the familiar split (``split_one_tier``); for mixed tiers and holes it
recomputes the head of the *slow* runs, which the head of the prefix alone would not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

from kvtier.plan import RestorePlan, Tier, Times, runs
from kvtier.schedule import Choice, Layout, load_order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvtier.cost import CostModel
    from kvtier.plan import Residency

__all__ = ["GAIN_MIN", "Way", "plan", "plan_batch", "recomputed_head", "split_one_tier"]

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
    tokens, nbytes = residency.keys.block_tokens, residency.block_bytes
    layout = _layout(residency.tiers, costs, tokens, nbytes, resident, step_blocks_max)
    choice, times, reason = _choose(layout, costs, way, compute_price, deadline_s)
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
        predicted=times,
        reason=reason,
    )


def recomputed_head(
    blocks: int,
    costs: CostModel,
    *,
    block_tokens: int,
    block_bytes: int,
    step_blocks_max: int = 1,
    compute_price: float = 0.0,
) -> int:
    """Return how many leading blocks a plan recomputes of a prompt that is on the SSD as a whole.

    Storing them gains nothing as long as the costs and the price of compute hold. 0 while the cost
    of recomputing is not known.
    """
    if not blocks:
        return 0
    tiers = (Tier.SSD,) * blocks
    layout = _layout(tiers, costs, block_tokens, block_bytes, 0, step_blocks_max)
    choice, _, _ = _choose(layout, costs, "best", compute_price, None)
    return choice.ssd


def plan_batch(
    residencies: Sequence[Residency], costs: CostModel, *, step_blocks_max: int = 1
) -> list[RestorePlan]:
    """Decide for several prompts that are wanted at once and share the device and the links.

    One position decides for all of them: the cheapest blocks of the whole batch are recomputed, so
    that short prompts are recomputed whole and long ones load their tails. The plans keep to their
    lists (each alone would take the link for its own); ``predicted.planned`` is the batch's time.
    """
    pool = sorted(
        (block, index)
        for index, residency in enumerate(residencies)
        for block, tier in enumerate(residency.tiers)
        if tier in (Tier.SSD, Tier.HOST)
    )
    forced = [plan(r, costs, step_blocks_max=step_blocks_max, way="load") for r in residencies]
    threshold, seconds = _threshold(residencies, pool, forced, costs, step_blocks_max)
    chosen = set(pool[:threshold])
    plans = []
    for index, made in enumerate(forced):
        mine = {block for block, owner in chosen if owner == index}
        recompute = sorted({*made.recompute, *mine})
        load = [block for block in made.load if block not in mine]
        plans.append(
            replace(
                made,
                recompute=tuple(recompute),
                load=load_order(made.tiers, load, recompute),
                predicted=replace(made.predicted, planned=seconds),
                reason=f"one of {len(forced)} prompts that share compute and links",
            )
        )
    return plans


def _threshold(
    residencies: Sequence[Residency],
    pool: Sequence[tuple[int, int]],
    forced: Sequence[RestorePlan],
    costs: CostModel,
    step: int,
) -> tuple[int, float]:
    """Return how many of ``pool`` are best recomputed, and the batch's time then."""
    longest = max((len(r.tiers) for r in residencies), default=0)
    if not longest:
        return 0, 0.0
    tokens, nbytes = residencies[0].keys.block_tokens, residencies[0].block_bytes
    # Prompts of a batch share their steps, so each block bears its share of a full one.
    block_s = costs.block_seconds(tokens, 0, longest) + costs.compute.fixed_s / step
    block_s = block_s * (1 + costs.interference)
    holes = sum(float(block_s[list(made.recompute)].sum()) for made in forced)
    spent = holes + np.concatenate(([0.0], np.cumsum(block_s[[block for block, _ in pool]])))
    if not costs.compute.known:
        return 0, float(spent[0])
    ssd = np.array([residencies[owner].tiers[block] is Tier.SSD for block, owner in pool])
    left = np.arange(len(pool), -1, -1)
    left_ssd = np.concatenate((ssd[::-1].cumsum()[::-1], [0])) if len(pool) else np.zeros(1)
    ssd_s, host_s = (costs.load_seconds(tier, nbytes) for tier in (Tier.SSD, Tier.HOST))
    links = Layout((), block_s, ssd_s=ssd_s, host_s=host_s)
    times = np.maximum(spent, links.arrival(left_ssd, left - left_ssd))
    best = int(np.argmin(times))
    return best, float(times[best])


def _layout(
    tiers: Sequence[Tier | None],
    costs: CostModel,
    tokens: int,
    nbytes: int,
    resident: int,
    step: int,
) -> Layout:
    spans = [
        (tier, max(start, resident), stop)
        for tier, start, stop in runs(tiers)
        if stop > resident and tier is not Tier.DEVICE
    ]
    slowed = 1 + costs.interference
    return Layout(
        spans,
        costs.block_seconds(tokens, 0, len(tiers)) * slowed,
        step_s=costs.compute.fixed_s * slowed,
        step_blocks=step,
        ssd_s=costs.load_seconds(Tier.SSD, nbytes),
        host_s=costs.load_seconds(Tier.HOST, nbytes),
    )


def _choose(
    layout: Layout, costs: CostModel, way: Way, compute_price: float, deadline_s: float | None
) -> tuple[Choice, Times, str]:
    """Return the choice, the times of all three ways, and the reason."""
    least, everything = layout.choices((0, 0), (layout.counts[Tier.SSD], layout.counts[Tier.HOST]))
    # Nothing loads then, so nothing slows the steps down.
    everything = replace(everything, seconds=everything.seconds / (1 + costs.interference))
    limits = layout.worth(compute_price)
    if way != "best":
        choice, reason = (everything if way == "recompute" else least), f"{way} was asked for"
    elif not layout.counts[Tier.SSD] + layout.counts[Tier.HOST]:
        choice = everything
        reason = "no block is stored" if layout.runs else "every block is on the device already"
    elif not costs.compute.known:
        choice = least
        reason = "the cost of recomputing is not measured yet, so what is stored is loaded"
    elif deadline_s is not None and (best := layout.best(*limits)).seconds < deadline_s:
        choice = layout.cheapest(best, deadline_s)
        reason = f"the least compute that ends within {deadline_s:.3f} s"
    else:
        price = compute_price if limits != layout.worth(0.0) else 0.0
        choice, reason = _worthwhile(layout.best(*limits), least, everything, price)
    load_s = None if layout.counts[None] else least.seconds
    return choice, Times(choice.seconds, load_s, everything.seconds), reason


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
