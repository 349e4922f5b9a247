from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier import CostModel, Tier
from kvtier.cost import ASSUMED, ComputeCost, LinkCost, Profiler

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST, SSD = Tier.HOST, Tier.SSD
TRUTHS = [
    ComputeCost(0.0, 4e-4, 4e-8),  # attention adds as much as the rest at 10K tokens
    ComputeCost(0.0, 1e-5, 1e-8),
    ComputeCost(0.0, 2e-3, 2e-7),
]


def feed(
    profiler: Profiler,
    truth: ComputeCost,
    steps: Iterable[tuple[int, int]],
    noise: float,
    seed: int,
) -> None:
    """Let the profiler see steps of (start, tokens) with relative noise."""
    rng = np.random.default_rng(seed)
    for start, tokens in steps:
        seconds = truth.seconds(start, tokens) * float(np.exp(noise * rng.standard_normal()))
        profiler.computed(start, tokens, seconds)


def prompts(times: int, tokens: int = 256, end: int = 8192) -> list[tuple[int, int]]:
    """Return the steps of so many prompts of ``end`` tokens in steps of one size."""
    return [(start, tokens) for _ in range(times) for start in range(0, end, tokens)]


def record_of(profiler: Profiler) -> dict[str, Any]:
    """Return the record as a file gives it back."""
    value = msgpack.unpackb(msgpack.packb(profiler.to_record()))
    assert isinstance(value, dict)
    return value


# -- what a step costs


def test_seconds_of_a_step_is_the_sum_over_its_tokens() -> None:
    """A step's attention term is that of each token at its own position."""
    cost = ComputeCost(0.5, 0.25, 0.125, 3)
    one_by_one = sum(0.25 + 0.125 * position for position in range(100, 116))
    assert cost.seconds(100, 16) == pytest.approx(0.5 + one_by_one)
    whole = cost.seconds(0, 64) - 0.5
    assert whole == pytest.approx(sum(cost.seconds(s, 16) - 0.5 for s in range(0, 64, 16)))


def test_block_seconds_are_steps_without_their_fixed_cost() -> None:
    """A block costs what a step of it alone costs, less what every step costs."""
    model = CostModel(ComputeCost(0.5, 0.001, 1e-6, samples=5))
    blocks = model.block_seconds(16, 2, 6)
    for index, seconds in enumerate(blocks):
        assert seconds == pytest.approx(model.compute.seconds((2 + index) * 16, 16) - 0.5)


def test_links() -> None:
    """A link's time is bytes over rate, and each tier has its own."""
    model = CostModel(host=LinkCost(100.0), ssd=LinkCost(10.0))
    assert model.link(HOST).seconds(50) == 0.5
    assert model.link(SSD).seconds(50) == 5.0


# -- learning what recomputing costs


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_one_step_size_recovers_both_terms(truth: ComputeCost, seed: int) -> None:
    """Noisy steps of one size over 0..8K tokens give predictions within a few percent anywhere."""
    profiler = Profiler()
    feed(profiler, truth, prompts(3), noise=0.05, seed=seed)
    cost = profiler.costs.compute
    assert cost.known
    for start in range(0, 8192, 512):
        assert cost.seconds(start, 256) == pytest.approx(truth.seconds(start, 256), rel=0.05)
    # With one size the fixed part cannot be told from the part per token.
    assert cost.token_s + cost.fixed_s / 256 == pytest.approx(truth.token_s, rel=0.06)
    assert cost.attention_s == pytest.approx(truth.attention_s, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_exact_steps_recover_the_terms_exactly(seed: int) -> None:
    """Without noise both terms are found to a percent."""
    profiler = Profiler()
    feed(profiler, TRUTHS[0], prompts(4), noise=0.0, seed=seed)
    cost = profiler.costs.compute
    assert cost.token_s + cost.fixed_s / 256 == pytest.approx(TRUTHS[0].token_s, rel=0.01)
    assert cost.attention_s == pytest.approx(TRUTHS[0].attention_s, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.2, 1.0, 3.0])
def test_several_step_sizes_recover_the_fixed_term(share: float, seed: int) -> None:
    """Steps of 1 to 8 blocks tell the fixed part from the part per token."""
    truth = ComputeCost(share * 256 * 4e-4, 4e-4, 4e-8)
    steps = [step for size in (256, 1024, 512, 2048) * 3 for step in prompts(1, size)]
    np.random.default_rng(seed).shuffle(steps)
    profiler = Profiler()
    feed(profiler, truth, [(int(a), int(b)) for a, b in steps], noise=0.03, seed=seed)
    cost = profiler.costs.compute
    assert cost.fixed_s == pytest.approx(truth.fixed_s, rel=0.15)
    assert cost.token_s == pytest.approx(truth.token_s, rel=0.06)
    for start, tokens in ((0, 256), (0, 2048), (4096, 512), (7936, 256)):
        assert cost.seconds(start, tokens) == pytest.approx(truth.seconds(start, tokens), rel=0.05)


def test_two_steps_are_enough_to_plan_by() -> None:
    """After one step the cost is not known, after two it predicts the next within a tenth."""
    profiler = Profiler()
    truth = TRUTHS[0]
    assert not profiler.costs.compute.known
    feed(profiler, truth, [(0, 256)], noise=0.0, seed=0)
    assert not profiler.costs.compute.known
    feed(profiler, truth, [(256, 256)], noise=0.0, seed=0)
    cost = profiler.costs.compute
    assert cost.known
    assert cost.seconds(512, 256) == pytest.approx(truth.seconds(512, 256), rel=0.1)


@pytest.mark.parametrize("place", [0, 8, 31])
@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_an_outlier_moves_little(factor: float, place: int) -> None:
    """One step 10 x off moves a well-fed fit's predictions by at most a fifth."""
    profiler = Profiler()
    truth = TRUTHS[0]
    feed(profiler, truth, prompts(3), noise=0.03, seed=1)
    before = profiler.costs.compute
    start = place * 256
    profiler.computed(start, 256, factor * truth.seconds(start, 256))
    after = profiler.costs.compute
    for position in range(0, 8192, 512):
        assert after.seconds(position, 256) == pytest.approx(before.seconds(position, 256), rel=0.2)


@pytest.mark.parametrize(("factor", "times"), [(0.5, 4), (2.0, 4), (3.2, 8)])
def test_a_lasting_change_is_learned(factor: float, times: int) -> None:
    """When the device becomes slower or faster for good, predictions follow, outliers or not."""
    profiler = Profiler()
    truth = TRUTHS[0]
    feed(profiler, truth, prompts(4), noise=0.03, seed=1)
    changed = ComputeCost(0.0, truth.token_s * factor, truth.attention_s * factor)
    feed(profiler, changed, prompts(times), noise=0.03, seed=2)
    cost = profiler.costs.compute
    for start in range(0, 8192, 1024):
        assert cost.seconds(start, 256) == pytest.approx(changed.seconds(start, 256), rel=0.2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("end", [256, 2048, 8192])
def test_long_use_stays_stable(end: int, seed: int) -> None:
    """After thousands of steps at the heads of prompts, predictions there are still right.

    Heads are what a restore recomputes, so an engine may see nothing else for days.
    """
    profiler = Profiler()
    truth = TRUTHS[0]
    feed(profiler, truth, prompts(1), noise=0.05, seed=100 + seed)
    feed(profiler, truth, prompts(2400 * 256 // end, end=end), noise=0.05, seed=seed)
    cost = profiler.costs.compute
    for start in range(0, end, 256):
        assert cost.seconds(start, 256) == pytest.approx(truth.seconds(start, 256), rel=0.1)
    # Positions not seen for long are predicted from what was seen of them once.
    assert cost.seconds(7936, 256) == pytest.approx(truth.seconds(7936, 256), rel=0.5)


@pytest.mark.parametrize("end", [256, 2048, 8192])
def test_the_fit_keeps_a_covariance(end: int) -> None:
    """Whatever is forgotten, the fit's covariance has no negative direction."""
    profiler = Profiler()
    feed(profiler, TRUTHS[0], prompts(2400 * 256 // end, end=end), noise=0.05, seed=0)
    covariance = np.array(profiler.to_record()["compute"]["covariance"]).reshape(3, 3)
    values = np.linalg.eigvalsh(covariance)
    assert values.min() >= -1e-9 * values.max()
    assert covariance == pytest.approx(covariance.T)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(1, 4096), st.floats(1e-7, 1e3)),
        min_size=1,
        max_size=30,
    )
)
def test_costs_never_fall_with_position(steps: list[tuple[int, int, float]]) -> None:
    """Whatever was seen, terms are finite and not negative, so predictions rise with position."""
    profiler = Profiler()
    for start, tokens, seconds in steps:
        profiler.computed(start, tokens, seconds)
        cost = profiler.costs.compute
        for term in (cost.fixed_s, cost.token_s, cost.attention_s):
            assert 0.0 <= term < np.inf
        assert cost.seconds(0, 256) <= cost.seconds(256, 256) <= cost.seconds(1 << 17, 256)
    assert len(steps) == profiler.costs.compute.samples
    Profiler.from_record(record_of(profiler))


def test_nonsense_is_not_learned() -> None:
    """Steps of no tokens or no time, and loads of no bytes or no time, teach nothing."""
    profiler = Profiler()
    before = profiler.costs
    profiler.computed(0, 0, 1.0)
    profiler.computed(0, 256, 0.0)
    profiler.computed(0, 256, -1.0)
    profiler.loaded(SSD, 0, 1.0)
    profiler.loaded(SSD, 100, 0.0)
    profiler.loaded(SSD, 100, -1.0)
    assert before == profiler.costs


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_times_that_are_no_numbers_are_not_learned(wrong: float) -> None:
    """An engine's own clock that says NaN or infinity cannot spoil the costs for good."""
    profiler = Profiler()
    feed(profiler, TRUTHS[0], prompts(1), noise=0.0, seed=0)
    profiler.loaded(SSD, 100, 1.0)
    before = profiler.costs
    profiler.computed(0, 256, wrong)
    profiler.loaded(SSD, 100, wrong)
    assert before == profiler.costs


# -- learning what loading costs


@pytest.mark.parametrize("tier", [HOST, SSD])
def test_the_first_load_replaces_the_guess(tier: Tier) -> None:
    """One observation counts for all of the assumed rate, and only for its own tier."""
    profiler = Profiler()
    profiler.loaded(tier, 1_000_000, 0.5)
    costs = profiler.costs
    assert costs.link(tier).bytes_per_s == pytest.approx(2e6)
    assert costs.link(tier).samples == 1
    other = SSD if tier is HOST else HOST
    assert ASSUMED[other] == costs.link(other)


@pytest.mark.parametrize("factor", [0.1, 0.25, 4.0, 10.0])
def test_a_new_rate_is_learned_in_ten_loads(factor: float) -> None:
    """Ten loads at a new rate close all but a twentieth of the gap to it."""
    profiler = Profiler()
    for _ in range(50):
        profiler.loaded(SSD, 1_000_000, 0.01)
    for _ in range(10):
        profiler.loaded(SSD, 1_000_000, 0.01 / factor)
    seconds = profiler.costs.ssd.seconds(1_000_000)
    change = abs(0.01 / factor - 0.01)
    assert abs(seconds - 0.01 / factor) <= 0.05 * change
    if factor < 4:
        assert seconds == pytest.approx(0.01 / factor, rel=0.1)


def test_latency_is_part_of_the_rate() -> None:
    """Loads that each pay a latency are predicted by their whole time."""
    profiler = Profiler()
    for _ in range(20):
        profiler.loaded(SSD, 1_000_000, 0.003 + 0.01)
    link = profiler.costs.ssd
    assert link.latency_s + link.seconds(1_000_000) == pytest.approx(0.013)


# -- keeping what was learned


def learned() -> Profiler:
    """Return a profiler that has seen something of everything."""
    profiler = Profiler()
    feed(profiler, TRUTHS[0], prompts(1), noise=0.05, seed=4)
    for _ in range(4):
        profiler.loaded(SSD, 1_000_000, 0.01)
        profiler.loaded(HOST, 1_000_000, 0.001)
    return profiler


@pytest.mark.parametrize("through", [msgpack, json], ids=["msgpack", "json"])
def test_record_round_trip(through: Any) -> None:
    """A profiler read back from its record predicts and learns like the one that wrote it."""
    profiler = learned()
    if through is json:
        record = json.loads(json.dumps(profiler.to_record()))
    else:
        record = record_of(profiler)
    again = Profiler.from_record(record)
    assert profiler.costs == again.costs
    for one in (profiler, again):
        one.computed(512, 256, 0.2)
        one.loaded(SSD, 1_000_000, 0.02)
    assert profiler.costs == again.costs


def test_record_of_nothing_learned() -> None:
    """A fresh profiler's record is a fresh profiler."""
    assert Profiler().costs == Profiler.from_record(record_of(Profiler())).costs


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a record."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, item in value.items():
            found += paths(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths(item, (*path, index))
    return found


RECORD = record_of(learned())
JUNK: list[Any] = [
    None, "x", b"x", -1, -1.0, float("nan"), float("inf"), [], [1.0], {}, {"x": 1}, 1 << 70, True,
    [[1.0] * 3] * 9, "1e5", 1e308,
]  # fmt: skip


def check_hostile(record: Any) -> None:
    """Decode; what is accepted must predict in finite numbers and go on learning."""
    try:
        profiler = Profiler.from_record(record)
    except ValueError:
        return
    with np.errstate(all="ignore"):
        for seconds in (0.1, 0.1, 0.1):
            profiler.computed(0, 256, seconds)
            profiler.loaded(SSD, 1_000_000, 0.01)
            profiler.loaded(HOST, 1_000_000, 0.01)
    costs = profiler.costs
    for number in (costs.compute.fixed_s, costs.compute.token_s, costs.compute.attention_s):
        assert 0.0 <= number < np.inf
    for link in (costs.host, costs.ssd):
        assert 0.0 < link.bytes_per_s < np.inf
        assert 0.0 <= link.latency_s < np.inf


@pytest.mark.parametrize("path", paths(RECORD), ids=str)
def test_hostile_record_is_a_value_error(path: tuple[Any, ...]) -> None:
    """Any value in the place of any other is refused with ValueError or harmless."""
    for junk in JUNK:
        record = copy.deepcopy(RECORD)
        inner = record
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = junk
        check_hostile(record)


@pytest.mark.parametrize("record", [None, 1, "x", b"x", [], [1], (), 1.5], ids=repr)
def test_what_is_no_record_is_a_value_error(record: Any) -> None:
    """What is not a mapping is refused with ValueError."""
    with pytest.raises(ValueError, match="record"):
        Profiler.from_record(record)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(width=64), min_size=3, max_size=3),
    st.lists(st.floats(width=64), min_size=9, max_size=9),
    st.integers(-5, 1 << 40),
)
def test_hostile_numbers_do_not_poison_the_fit(
    theta: list[float], covariance: list[float], samples: int
) -> None:
    """A damaged calibration is refused, or learns its way back: predictions stay finite."""
    record = copy.deepcopy(RECORD)
    record["compute"] = {"theta": theta, "covariance": covariance, "samples": samples}
    check_hostile(record)


# -- interference and accuracy


def test_what_loads_cost_a_step_is_learned_apart() -> None:
    """Steps that take half as long again beside loads raise the interference, not the fit."""
    profiler = Profiler()
    for start in range(0, 4096, 256):
        profiler.computed(start, 256, 0.5)
    alone = profiler.costs.compute.seconds(0, 256)
    for _ in range(60):
        profiler.computed(0, 256, 0.75, overlap=1.0)
    assert profiler.costs.interference == pytest.approx(0.5, abs=0.1)
    assert profiler.costs.compute.seconds(0, 256) == pytest.approx(alone, rel=0.1)


def test_steps_that_loads_do_not_slow_leave_no_interference() -> None:
    """Noise around the prediction is not taken for interference."""
    profiler = Profiler()
    rng = np.random.default_rng(0)
    for n in range(200):
        profiler.computed(n % 8 * 256, 256, 0.5 * float(rng.normal(1, 0.05)), overlap=n % 2)
    assert profiler.costs.interference <= 0.03


def test_accuracy_says_how_far_predictions_were_off() -> None:
    """The mean ratio of measured to predicted time, its distance from 1, and their number."""
    profiler = Profiler()
    for _ in range(50):
        profiler.restored(1.0, 1.2)
    assert profiler.accuracy.restores == 50
    assert profiler.accuracy.ratio == pytest.approx(1.2)
    assert profiler.accuracy.error == pytest.approx(0.2)
    profiler.restored(0.0, 1.0)
    profiler.restored(1.0, float("nan"))
    assert profiler.accuracy.restores == 50


def test_interference_and_accuracy_are_kept() -> None:
    """A record brings both back."""
    profiler = Profiler()
    for start in range(0, 2048, 256):
        profiler.computed(start, 256, 0.5)
    profiler.computed(0, 256, 1.0, overlap=1.0)
    profiler.restored(1.0, 1.1)
    again = Profiler.from_record(profiler.to_record())
    assert again.costs == profiler.costs
    assert again.accuracy == profiler.accuracy


@pytest.mark.parametrize("factor", [0.05, 10.0, 70.0])
def test_a_pace_that_changes_for_good_is_believed_after_three_steps(factor: float) -> None:
    """One or two steps far off are outliers; a third in a row is what steps cost from now on."""
    profiler = Profiler()
    truth = ComputeCost(0.0, 1e-4, 1e-8, samples=9)
    for start in range(0, 8192, 256):
        profiler.computed(start, 256, truth.seconds(start, 256))
    for count in range(3):
        before = profiler.costs.compute.seconds(1024, 256)
        assert before == pytest.approx(truth.seconds(1024, 256), rel=0.5), count
        profiler.computed(1024, 256, factor * truth.seconds(1024, 256))
    after = profiler.costs.compute
    for start in (0, 1024, 8192):
        assert after.seconds(start, 256) == pytest.approx(
            factor * truth.seconds(start, 256), rel=0.5
        )


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(0, 1)), min_size=1, max_size=60))
def test_whatever_was_learned_can_be_read_again(steps: list[tuple[float, float]]) -> None:
    """No series of steps leads to a record that the next process refuses."""
    profiler = Profiler()
    for index, (seconds, overlap) in enumerate(steps):
        profiler.computed(index * 16, 16, seconds, overlap)
    for _ in range(30):  # faster than predicted, while little is loaded
        profiler.computed(16, 16, 1e-5, 0.05)
    assert Profiler.from_record(profiler.to_record()).costs == profiler.costs


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 16), st.sampled_from([20, 64, 256, 512]), st.floats(1 / 8, 8)),
        min_size=1,
        max_size=16,
    )
)
@example(  # a fit with a term below zero, and then a step of few tokens, which that cancels out
    steps=[(0, 256, 6.0), (1, 256, 0.4), (2, 256, 0.5), (3, 256, 0.8), (4, 256, 1.1), (5, 20, 0.9)]
)
def test_noise_of_any_kind_stays_within_what_was_seen(steps: list[tuple[int, int, float]]) -> None:
    """Steps up to eight times too fast or slow, of any sizes: a block is not predicted absurdly."""
    truth = ComputeCost(0.05, 1.6e-3, 8e-7)
    profiler = Profiler()
    slowest = 0.0
    for block, tokens, factor in steps:
        seconds = truth.seconds(block * 256, tokens) * factor
        profiler.computed(block * 256, tokens, seconds)
        slowest = max(slowest, seconds * 256 / tokens)
    assert profiler.costs.compute.seconds(0, 256) <= 10 * slowest
