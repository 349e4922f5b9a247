from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import BlockKeys, CostModel, Residency, RestorePlan, Tier, plan
from kvtier.cost import ComputeCost, LinkCost
from kvtier.planner import GAIN_MIN, split_one_tier
from kvtier.schedule import load_order

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 256
BLOCK_BYTES = 1_000_000
HOST, SSD = Tier.HOST, Tier.SSD


def residency_of(tiers: Sequence[Tier | None]) -> Residency:
    """Return a lookup's result with these tiers."""
    hashes = tuple(index.to_bytes(32, "big") for index in range(len(tiers)))
    keys = BlockKeys(b"n" * 32, BLOCK_TOKENS, b"r" * 32, b"t" * 32, hashes, b"")
    return Residency(keys, tuple(tiers), BLOCK_BYTES)


def costs_of(
    block_s: float, rise: float = 0.0, fixed: float = 0.0, *, host_s: float = 1e-9, ssd_s: float
) -> CostModel:
    """Costs in seconds per block; ``rise`` is each block's surcharge as a share of the first."""
    attention = block_s * rise / BLOCK_TOKENS**2
    token = block_s / BLOCK_TOKENS - attention * (BLOCK_TOKENS - 1) / 2
    return CostModel(
        ComputeCost(fixed, token, attention, samples=9),
        LinkCost(BLOCK_BYTES / host_s, 0.0, 9),
        LinkCost(BLOCK_BYTES / ssd_s, 0.0, 9),
    )


def schedule(tiers: Sequence[Tier | None], costs: CostModel, made: RestorePlan) -> float:
    """Seconds of a plan carried out literally: the SSD in load order, then one copy link for all.

    The copy link takes the ready block that comes first in load order and never idles while one is
    ready; compute takes its blocks in order, each after all blocks before it are in place.
    """
    read = 0.0
    pending: list[tuple[int, float]] = []
    for block in made.load:
        if tiers[block] is SSD:
            read += costs.ssd.seconds(BLOCK_BYTES)
        pending.append((block, read if tiers[block] is SSD else 0.0))
    arrival = [0.0] * len(tiers)
    copied = 0.0
    while pending:
        ready = [item for item in pending if item[1] <= copied]
        if not ready:
            copied = min(when for _, when in pending)
            continue
        pending.remove(ready[0])
        copied += costs.host.seconds(BLOCK_BYTES)
        arrival[ready[0][0]] = copied
    done, step = 0.0, 0
    for block in made.recompute:
        start = max([done, *arrival[:block]])
        # A step goes on with the next block, up to its limit, unless that one has to wait.
        goes_on = block - 1 in made.recompute and 0 < step < made.step_blocks_max and start <= done
        step = step + 1 if goes_on else 1
        fixed = costs.compute.fixed_s if goes_on else 0.0
        done = start + costs.compute.seconds(block * BLOCK_TOKENS, BLOCK_TOKENS) - fixed
    return max([done, *arrival])


SECONDS = st.floats(0.001, 1.0)
COSTS = st.builds(
    lambda block_s, rise, fixed, host_s, ssd_s: costs_of(
        block_s, rise, fixed, host_s=host_s, ssd_s=ssd_s
    ),
    SECONDS, st.floats(0, 1), st.floats(0, 0.1), SECONDS, SECONDS,
)  # fmt: skip
LAYOUTS = st.lists(st.sampled_from([HOST, SSD, None]), max_size=14)


# -- the exact split


def test_split_equals_brute_force() -> None:
    """Bisection finds the best of all splits, for rising, flat and zero costs, 2,000 times."""
    rng = np.random.default_rng(0)
    for case in range(2000):
        n = int(rng.integers(0, 40))
        compute = np.sort(rng.exponential(1.0, n)) * float(rng.choice([0.0, 0.1, 1.0, 10.0]))
        load = rng.exponential(1.0, n) if case % 2 else np.full(n, rng.exponential(1.0))
        latency = float(rng.choice([0.0, 0.5, 5.0]))
        wanted = min(
            max(compute[:k].sum(), (load[k:].sum() + latency) if k < n else 0.0)
            for k in range(n + 1)
        )
        k, seconds = split_one_tier(compute, load, latency)
        assert wanted == pytest.approx(seconds, rel=1e-9, abs=1e-12)
        assert 0 <= k <= n
        taken = max(compute[:k].sum(), (load[k:].sum() + latency) if k < n else 0.0)
        assert seconds == pytest.approx(taken, rel=1e-9, abs=1e-12)


def test_split_of_nothing() -> None:
    """No blocks take no time."""
    assert split_one_tier(np.zeros(0), np.zeros(0), 1.0) == (0, 0.0)


def test_equal_splits_recompute_less() -> None:
    """Of two equally fast splits the one with less recompute is taken."""
    assert split_one_tier(np.array([2.0, 0.0]), np.array([9.0, 2.0])) == (1, 2.0)


# -- every plan


@settings(max_examples=150, deadline=None)
@given(
    LAYOUTS,
    COSTS,
    st.sampled_from(["best", "best", "load", "recompute"]),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_every_plan_is_sound(
    tiers: list[Tier | None],
    costs: CostModel,
    way: str,
    step: int,
    known: bool,  # noqa: FBT001 - drawn by Hypothesis
    data: st.DataObject,
) -> None:
    """Lists tile [resident, n), holes are recomputed, only stored blocks load, times add up."""
    if not known:
        costs = replace(costs, compute=ComputeCost())
    n = len(tiers)
    resident = data.draw(st.integers(0, n))
    made = plan(residency_of(tiers), costs, resident=resident, step_blocks_max=step, way=way)  # type: ignore[arg-type]
    assert list(range(resident, n)) == sorted([*made.recompute, *made.load])
    assert sorted(made.recompute) == list(made.recompute)
    holes = {block for block in range(resident, n) if tiers[block] is None}
    assert holes <= set(made.recompute)
    assert (tuple(tiers), resident, step) == (made.tiers, made.resident, made.step_blocks_max)
    assert made.adaptive == (way == "best")
    assert made.reason
    if way == "load":
        assert holes == set(made.recompute)
    if way == "recompute":
        assert made.load == ()
    times = made.predicted
    assert (times.load is None) == bool(holes)
    assert times.planned == pytest.approx(schedule(tiers, costs, made), abs=1e-9)
    if way == "best" and known:
        assert times.planned <= times.recompute + 1e-9
        if times.load is not None:
            assert times.planned <= times.load + 1e-9
        forced = plan(
            residency_of(tiers), costs, resident=resident, step_blocks_max=step, way="load"
        )
        assert times.planned <= forced.predicted.planned + 1e-9


@settings(max_examples=80, deadline=None)
@given(LAYOUTS, COSTS, st.data())
def test_the_three_times_are_those_of_the_three_ways(
    tiers: list[Tier | None], costs: CostModel, data: st.DataObject
) -> None:
    """Each way's predicted time is the same in every plan, and the forced plans meet it."""
    resident = data.draw(st.integers(0, len(tiers)))
    best = plan(residency_of(tiers), costs, resident=resident)
    load = plan(residency_of(tiers), costs, resident=resident, way="load")
    recompute = plan(residency_of(tiers), costs, resident=resident, way="recompute")
    for made in (load, recompute):
        assert best.predicted.load == pytest.approx(made.predicted.load)
        assert best.predicted.recompute == pytest.approx(made.predicted.recompute)
    assert recompute.predicted.planned == pytest.approx(recompute.predicted.recompute)
    if None not in tiers[resident:]:
        assert load.predicted.planned == pytest.approx(load.predicted.load)


@settings(max_examples=80, deadline=None)
@given(LAYOUTS, COSTS)
def test_a_hybrid_gains_at_least_the_minimum(tiers: list[Tier | None], costs: CostModel) -> None:
    """A plan that recomputes a stored block and loads another beats both single ways clearly."""
    made = plan(residency_of(tiers), costs)
    holes = {block for block, tier in enumerate(tiers) if tier is None}
    if made.load and set(made.recompute) != holes:
        least = plan(residency_of(tiers), costs, way="load").predicted.planned
        single = min(least, made.predicted.recompute)
        assert made.predicted.planned <= (1 - GAIN_MIN) * single + 1e-9
        assert "faster" in made.reason


def test_a_gain_under_the_minimum_is_not_taken() -> None:
    """Where the best split gains 4 % the plan loads, where it gains 6 % it splits."""
    # 50 blocks load in 50 s; recomputing the first k takes 50 - 50 * gain at most.
    for gained, recomputed in ((2, ()), (3, (0, 1, 2))):
        costs = costs_of((50.0 - gained) / gained, ssd_s=1.0)
        made = plan(residency_of([SSD] * 50), costs)
        assert recomputed == made.recompute


def test_recompute_is_chosen_when_loading_gains_nothing() -> None:
    """A link slower than the whole recompute is left alone."""
    made = plan(residency_of([SSD] * 8), costs_of(0.1, ssd_s=1.0))
    assert tuple(range(8)) == made.recompute
    assert made.load == ()


def test_equal_times_halve() -> None:
    """Flat recompute as fast as loading: half and half, twice as fast."""
    made = plan(residency_of([SSD] * 16), costs_of(1.0, ssd_s=1.0))
    assert tuple(range(8)) == made.recompute
    assert tuple(range(15, 7, -1)) == made.load
    assert pytest.approx(
        (made.predicted.planned, made.predicted.load, made.predicted.recompute)
    ) == (8.0, 16.0, 16.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), COSTS, st.sampled_from([HOST, SSD]), st.floats(1.0, 4.0), st.data())
def test_more_bandwidth_never_recomputes_more(
    n: int, costs: CostModel, tier: Tier, factor: float, data: st.DataObject
) -> None:
    """On one tier a faster link never raises the number of recomputed blocks."""
    resident = data.draw(st.integers(0, n))
    faster = replace(
        costs,
        host=replace(costs.host, bytes_per_s=costs.host.bytes_per_s * factor),
        ssd=replace(costs.ssd, bytes_per_s=costs.ssd.bytes_per_s * factor),
    )
    slow, fast = (
        plan(residency_of([tier] * n), c, resident=resident).recompute for c in (costs, faster)
    )
    assert len(fast) <= len(slow)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), COSTS)
def test_one_tier_is_split_exactly(n: int, costs: CostModel) -> None:
    """On one tier no other head would have been faster, beyond the minimum gain."""
    made = plan(residency_of([SSD] * n), costs)
    seconds = costs.block_seconds(BLOCK_TOKENS, 0, n) + costs.compute.fixed_s
    load, copy = costs.ssd.seconds(BLOCK_BYTES), costs.host.seconds(BLOCK_BYTES)

    def loaded(blocks: int) -> float:
        """Read and copy of a pipeline, the slower one all the way, the faster one once."""
        return blocks * max(load, copy) + min(load, copy) if blocks else 0.0

    best = min(max(float(seconds[:k].sum()), loaded(n - k)) for k in range(n + 1))
    assert best - 1e-9 <= made.predicted.planned <= best / (1 - GAIN_MIN) + 1e-9


# -- edges


@pytest.mark.parametrize("way", ["best", "load", "recompute"])
def test_no_blocks(way: str) -> None:
    """An empty prompt has an empty plan that takes no time."""
    made = plan(residency_of([]), costs_of(1.0, ssd_s=1.0), way=way)  # type: ignore[arg-type]
    assert (made.recompute, made.load) == ((), ())
    assert 0.0 == made.predicted.planned == made.predicted.load == made.predicted.recompute


@pytest.mark.parametrize("way", ["best", "load", "recompute"])
def test_all_missing(way: str) -> None:
    """Nothing stored: everything is recomputed, and loading alone has no time."""
    made = plan(residency_of([None] * 4), costs_of(1.0, ssd_s=1.0), way=way)  # type: ignore[arg-type]
    assert (made.recompute, made.load) == ((0, 1, 2, 3), ())
    assert made.predicted.load is None
    assert made.predicted.planned == pytest.approx(4.0)


def test_resident_blocks_are_left_alone() -> None:
    """What the engine holds is neither loaded nor recomputed, and takes no time."""
    tiers = [None, SSD, HOST, SSD, SSD, SSD]
    for way in ("best", "load", "recompute"):
        made = plan(residency_of(tiers), costs_of(1.0, ssd_s=1.0), resident=3, way=way)
        assert {3, 4, 5} == {*made.recompute, *made.load}
    assert made.predicted.recompute == pytest.approx(3.0)
    assert made.predicted.load == pytest.approx(3.0)


def test_everything_resident() -> None:
    """A prompt that the engine holds needs nothing."""
    made = plan(residency_of([SSD, None]), costs_of(1.0, ssd_s=1.0), resident=2)
    assert (made.recompute, made.load, made.predicted.planned) == ((), (), 0.0)


@pytest.mark.parametrize("samples", [0, 1])
def test_uncalibrated_compute_loads_what_is_stored(samples: int) -> None:
    """Without a measured recompute cost every stored block is loaded and every hole recomputed."""
    costs = replace(costs_of(1e-6, ssd_s=100.0), compute=ComputeCost(0, 1e-9, 0, samples))
    made = plan(residency_of([SSD, None, HOST, SSD]), costs)
    assert made.recompute == (1,)
    assert {0, 2, 3} == set(made.load)
    assert "not measured" in made.reason


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"resident": -1}, "resident"),
        ({"resident": 3}, "resident"),
        ({"step_blocks_max": 0}, "step_blocks_max"),
        ({"step_blocks_max": -4}, "step_blocks_max"),
        ({"way": "fastest"}, "way"),
        ({"way": None}, "way"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], name: str) -> None:
    """An argument that makes no sense is refused by name."""
    with pytest.raises((ValueError, TypeError), match=name):
        plan(residency_of([SSD, SSD]), costs_of(1.0, ssd_s=1.0), **arguments)  # type: ignore[arg-type]


def test_larger_steps_share_the_fixed_cost() -> None:
    """An engine that takes larger steps is predicted to recompute faster."""
    costs = costs_of(1.0, fixed=1.0, ssd_s=1.0)
    times = [
        plan(residency_of([SSD] * 8), costs, step_blocks_max=step).predicted.recompute
        for step in (1, 2, 4)
    ]
    assert pytest.approx(times) == [16.0, 12.0, 10.0]


# -- the order of loads


def test_loads_that_the_front_must_pass_come_first() -> None:
    """Blocks before the last recomputed one, then host memory, then the SSD from its tail."""
    tiers = [SSD, HOST, None, HOST, SSD, SSD, HOST]
    assert load_order(tiers, [0, 1, 3, 4, 5, 6], [2]) == (0, 1, 3, 6, 5, 4)
    assert load_order(tiers, [0, 1, 3, 4, 5, 6], []) == (1, 3, 6, 5, 4, 0)
    assert load_order(tiers, [], [2]) == ()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([HOST, SSD]), max_size=14), st.data())
def test_load_order_keeps_every_load(tiers: list[Tier], data: st.DataObject) -> None:
    """The order holds each load once, whatever is recomputed."""
    flags = data.draw(st.lists(st.booleans(), min_size=len(tiers), max_size=len(tiers)))
    load = [block for block, flag in enumerate(flags) if flag]
    recompute = [block for block, flag in enumerate(flags) if not flag]
    order = load_order(tiers, load, recompute)
    assert load == sorted(order)
    ahead = [block for block in order if block < max(recompute, default=-1)]
    assert sorted(ahead) == list(order[: len(ahead)])
