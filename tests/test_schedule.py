"""The choice of what to recompute, against exhaustive search; prices, deadlines, batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from test_planner import BLOCK_BYTES, BLOCK_TOKENS, HOST, SSD, costs_of, residency_of

from kvtier import Tier, plan, plan_batch
from kvtier.plan import runs
from kvtier.planner import GAIN_MIN
from kvtier.schedule import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEVICE = Tier.DEVICE


def in_order(
    tiers: Sequence[Tier | None], recompute: set[int], order: Sequence[int], costs: Sequence[float],
    ssd_s: float, host_s: float, latency_s: float,
) -> float:  # fmt: skip
    """Seconds of one set and one order of loads, by events: the model stated anew."""
    read, ready = latency_s, {}
    for block in order:
        read += ssd_s if tiers[block] is SSD else 0.0
        ready[block] = read if tiers[block] is SSD else 0.0
    arrival = [0.0 if tier is DEVICE else math.inf for tier in tiers]
    waiting, now = list(order), 0.0
    while waiting:
        first = next((block for block in waiting if ready[block] <= now + 1e-15), None)
        if first is None:
            now = min(ready[block] for block in waiting)
            continue
        waiting.remove(first)
        now += host_s
        arrival[first] = now
    done = 0.0
    for block in sorted(recompute):
        done = max([done, *arrival[:block]]) + costs[block]
        arrival[block] = done
    return max(arrival, default=0.0)


def exhaustive(
    tiers: Sequence[Tier | None], costs: Sequence[float], ssd_s: float, host_s: float,
    latency_s: float,
) -> float:  # fmt: skip
    """Return the least time over all sets of recomputed blocks and all orders of loads."""
    holes = {block for block, tier in enumerate(tiers) if tier is None}
    stored = [block for block, tier in enumerate(tiers) if tier in (SSD, HOST)]
    best = math.inf
    for count in range(len(stored) + 1):
        for chosen in itertools.combinations(stored, count):
            rest = [block for block in stored if block not in chosen]
            for order in itertools.permutations(rest):
                best = min(
                    best,
                    in_order(tiers, holes | set(chosen), order, costs, ssd_s, host_s, latency_s),
                )
    return best


Case = tuple[list[Tier | None], list[float], float, float, float]


def cases(count: int, seed: int) -> Iterator[Case]:
    """Layouts of 5 to 7 blocks in any mix of tiers and holes, rising or flat recompute costs."""
    rng = np.random.default_rng(seed)
    while count:
        shares = rng.dirichlet([1.0, 2.0, 3.0, 1.0])
        kinds = rng.choice(4, int(rng.integers(5, 8)), p=shares)
        tiers = [(DEVICE, HOST, SSD, None)[kind] for kind in kinds]
        if sum(tier in (SSD, HOST) for tier in tiers) > 6:
            continue  # 7! orders of 2^7 sets take too long
        ssd_s = float(rng.uniform(0.5, 3.0))
        first, rise = float(rng.uniform(0.1, 6.0)), float(rng.choice([0.0, 0.05, 0.15, 0.5]))
        costs = [first * (1 + rise * block) for block in range(len(tiers))]
        yield (
            tiers,
            costs,
            ssd_s,
            ssd_s * float(rng.uniform(0.02, 1.5)),
            float(rng.choice([0, 0.3])),
        )
        count -= 1


def test_the_choice_equals_exhaustive_search() -> None:
    """No set and no order of loads is faster, in 2,000 layouts: all tier orders, with holes."""
    for tiers, costs, ssd_s, host_s, latency_s in cases(2000, seed=20):
        spans = [(tier, block, block + 1) for block, tier in enumerate(tiers) if tier is not DEVICE]
        layout = Layout(spans, np.array(costs), ssd_s=ssd_s, host_s=host_s, latency_s=latency_s)
        wanted = exhaustive(tiers, costs, ssd_s, host_s, latency_s)
        assert layout.best().seconds == pytest.approx(wanted), (tiers, costs, ssd_s, host_s)


def test_long_layouts_are_within_two_percent_of_the_full_grid() -> None:
    """Where choices are searched from coarse to fine, at most 2 % is lost, on average nothing."""
    rng = np.random.default_rng(3)
    ratios = []
    for _ in range(60):
        tiers: list[Tier | None] = []
        while len(tiers) < 160:
            kind = (DEVICE, HOST, SSD, None)[int(rng.choice(4, p=[0.1, 0.4, 0.45, 0.05]))]
            tiers += [kind] * int(rng.integers(1, 40))
        spans = [span for span in runs(tiers) if span[0] is not DEVICE]
        ssd_s = float(rng.uniform(0.5, 3.0))
        costs = float(rng.uniform(0.1, 6.0)) * (1 + 0.015 * np.arange(len(tiers)))
        layout = Layout(spans, costs, ssd_s=ssd_s, host_s=ssd_s * float(rng.uniform(0.02, 1.0)))
        ssd, host = np.meshgrid(
            np.arange(layout.counts[SSD] + 1), np.arange(layout.counts[HOST] + 1)
        )
        least = float(layout.closed_form(ssd.ravel(), host.ravel()).min())
        ratios.append(layout.best().seconds / least)
    assert max(ratios) <= 1.02
    assert np.mean(ratios) <= 1.002


def test_the_head_of_the_slow_run_is_recomputed() -> None:
    """Head in host memory, tail on the SSD: not the prefix's head is recomputed, but the SSD's."""
    costs = costs_of(0.02, rise=0.005, host_s=0.0007, ssd_s=0.005)
    made = plan(residency_of([HOST] * 64 + [SSD] * 64), costs)
    assert made.predicted.load is not None
    assert made.predicted.planned < 0.9 * made.predicted.load
    assert set(made.recompute) <= set(range(64, 128))
    assert min(made.recompute) == 64


# -- prices, deadlines, shares


def test_a_busy_engine_loads_everything() -> None:
    """As the price of compute rises less is recomputed, until nothing is; never more."""
    costs = costs_of(1.0, rise=0.01, ssd_s=1.0)
    counts = [
        len(plan(residency_of([SSD] * 64), costs, compute_price=price).recompute)
        for price in (0.0, 0.5, 0.8, 0.95, 1.0, 1.5)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 20
    assert counts[-1] == 0


def test_a_block_is_recomputed_only_while_it_is_worth_its_price() -> None:
    """Each recomputed block costs at most its load over the price."""
    costs = costs_of(0.5, rise=0.1, ssd_s=1.0)
    made = plan(residency_of([SSD] * 32), costs, compute_price=1.0)
    seconds = costs.block_seconds(BLOCK_TOKENS, 0, 32) + costs.compute.fixed_s
    assert made.recompute
    assert all(seconds[block] <= costs.ssd.seconds(BLOCK_BYTES) for block in made.recompute)


def test_a_deadline_saves_compute() -> None:
    """With time to spare the plan recomputes as little as still ends in time."""
    costs = costs_of(1.0, ssd_s=1.0)
    fastest = plan(residency_of([SSD] * 32), costs)
    relaxed = plan(residency_of([SSD] * 32), costs, deadline_s=24.5)
    late = plan(residency_of([SSD] * 32), costs, deadline_s=1.0)
    assert len(relaxed.recompute) == 8
    assert relaxed.predicted.planned <= 24.5
    assert late.recompute == fastest.recompute


def test_a_share_scales_every_cost() -> None:
    """A quarter of the device and half of the link take four times and twice as long."""
    costs = costs_of(1.0, rise=0.1, fixed=0.2, host_s=0.1, ssd_s=0.5)
    part = costs.shared(compute=0.25, links=0.5)
    assert part.compute.seconds(1000, 256) == pytest.approx(4 * costs.compute.seconds(1000, 256))
    assert part.ssd.seconds(BLOCK_BYTES) == pytest.approx(1.0)
    assert part.host.seconds(BLOCK_BYTES) == pytest.approx(0.2)
    for wrong in ({"compute": 0.0}, {"links": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            costs.shared(**wrong)


def test_interference_makes_overlap_dearer_but_not_recompute_alone() -> None:
    """Steps slower beside loads: less is recomputed, and recompute alone costs the same."""
    quiet = costs_of(1.0, ssd_s=1.0)
    noisy = replace(quiet, interference=1.0)
    a, b = plan(residency_of([SSD] * 32), quiet), plan(residency_of([SSD] * 32), noisy)
    assert len(b.recompute) < len(a.recompute)
    assert b.predicted.recompute == pytest.approx(a.predicted.recompute)


# -- batches


def test_a_batch_is_never_slower_than_any_splits_of_its_prompts() -> None:
    """One position for all: no combination of one head per prompt ends the batch sooner."""
    rng = np.random.default_rng(4)
    for _ in range(60):
        lengths = [int(n) for n in rng.integers(1, 7, 3)]
        costs = costs_of(1.0, rise=0.25, ssd_s=float(rng.uniform(0.4, 4.0)))
        plans = plan_batch([residency_of([SSD] * n) for n in lengths], costs)
        seconds = costs.block_seconds(BLOCK_TOKENS, 0, 8) + costs.compute.fixed_s
        load = costs.ssd.seconds(BLOCK_BYTES)
        best = min(
            max(
                sum(float(seconds[:k].sum()) for k in heads),
                load * sum(n - k for n, k in zip(lengths, heads, strict=True)),
            )
            for heads in itertools.product(*(range(n + 1) for n in lengths))
        )
        spent = sum(float(seconds[list(made.recompute)].sum()) for made in plans)
        loaded = load * sum(len(made.load) for made in plans)
        assert max(spent, loaded) <= best + 1e-6
        assert plans[0].predicted.planned == pytest.approx(max(spent, loaded), abs=1e-6)


def test_a_batch_recomputes_short_prompts_whole() -> None:
    """Short prompts are recomputed, long ones load their tails; every list tiles its prompt."""
    costs = costs_of(1.0, rise=0.05, ssd_s=1.0)
    short, long = [SSD] * 4, [HOST] * 2 + [None] + [SSD] * 61
    plans = plan_batch([residency_of(t) for t in (short, long, short)], costs)
    assert plans[0].recompute == plans[2].recompute == (0, 1, 2, 3)
    assert 2 in plans[1].recompute
    assert plans[1].load
    for made, tiers in zip(plans, (short, long, short), strict=True):
        assert sorted([*made.recompute, *made.load]) == list(range(len(tiers)))
        assert not made.adaptive


def test_a_batch_of_nothing() -> None:
    """No prompts, or empty ones, have plans that do nothing."""
    costs = costs_of(1.0, ssd_s=1.0)
    assert plan_batch([], costs) == []
    assert plan_batch([residency_of([])], costs)[0].predicted.planned == 0.0


def test_gain_is_what_the_reason_says() -> None:
    """A hybrid's reason names its gain, which is at least the minimum."""
    made = plan(residency_of([SSD] * 16), costs_of(1.0, ssd_s=1.0))
    assert float(made.reason.partition("x")[0]) >= 1 / (1 - GAIN_MIN)
