from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import BlockKeys, CostModel, FormatError, Residency, RestorePlan, Step, Tier, plan
from kvtier.cost import ComputeCost, LinkCost
from kvtier.plan import Times, runs

HOST, SSD = Tier.HOST, Tier.SSD
COSTS = CostModel(ComputeCost(0.0, 0.001, 1e-7, 9), LinkCost(1e8, 0.0, 9), LinkCost(1e7, 0.0, 9))


def residency_of(tiers: list[Tier | None]) -> Residency:
    """Return a lookup's result with these tiers."""
    hashes = tuple(bytes([index]) * 32 for index in range(len(tiers)))
    keys = BlockKeys(b"n" * 32, 256, b"r" * 32, b"t" * 32, hashes, b"\x78\x56\x34\x12" * 3)
    return Residency(keys, tuple(tiers), 1_000_000)


PLAN = plan(residency_of([HOST, SSD, SSD, None, SSD]), COSTS, resident=1, step_blocks_max=2)


def test_runs() -> None:
    """Runs are maximal, in order, and cover everything."""
    assert runs([]) == []
    assert runs([None] * 3) == [(None, 0, 3)]
    assert runs([HOST, HOST, None, SSD, SSD, HOST]) == [
        (HOST, 0, 2),
        (None, 2, 3),
        (SSD, 3, 5),
        (HOST, 5, 6),
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*Tier, None]), max_size=20))
def test_runs_tile_the_tiers(tiers: list[Tier | None]) -> None:
    """Written out again, runs give the tiers; neighbours differ."""
    spans = runs(tiers)
    assert tiers == [tier for tier, start, stop in spans for _ in range(start, stop)]
    assert all(a[0] != b[0] and a[2] == b[1] for a, b in pairwise(spans))


def test_step_knows_its_blocks_and_tokens() -> None:
    """A step's tokens are those of its blocks."""
    step = Step(3, 5, 256)
    assert range(3, 5) == step.blocks
    assert range(768, 1280) == step.tokens


def test_residency_speaks() -> None:
    """A residency counts what is stored and says where."""
    residency = residency_of([SSD, SSD, None, HOST])
    assert residency.stored == 3
    assert str(residency) == "3 of 4 blocks stored: ssd [0, 2), missing [2, 3), host [3, 4)"
    assert str(residency_of([])) == "0 of 0 blocks stored: no full block"


def test_explain_names_the_three_times() -> None:
    """The explanation holds each way's time, both lists and the reason."""
    times = Times(planned=1.25, load=2.5, recompute=3.75)
    text = replace(PLAN, predicted=times, reason="so it is").explain()
    for part in ("1.250 s planned", "2.500 s load only", "3.750 s recompute only", "so it is"):
        assert part in text
    assert "5 blocks (1 already in place)" in text
    assert "recompute" in text
    assert "load" in text


def test_explain_says_when_loading_alone_cannot_do_it() -> None:
    """With a block missing there is no load-only time, and no number stands for it."""
    assert PLAN.predicted.load is None
    assert "- load only" in PLAN.explain()


def test_explain_lists_ranges_not_blocks() -> None:
    """A long plan's explanation stays short."""
    made = plan(residency_of([SSD] * 200), COSTS)
    assert made.load
    assert made.recompute
    assert len(made.explain()) < 400


def test_plans_and_residencies_show_no_token_ids() -> None:
    """What is printed or sent of a plan holds hashes, never the prompt's tokens."""
    residency = residency_of([SSD, None])
    made = plan(residency, COSTS)
    for text in (repr(made), str(made), made.explain(), made.to_json(), repr(residency)):
        assert str(0x12345678) not in text
        assert "xV4" not in text
        assert "12345678" not in text
        assert "78563412" not in text


TIERS = st.lists(st.sampled_from([*Tier, None]), max_size=10)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*Tier, None]), min_size=1, max_size=12),
    st.sampled_from(["best", "load"]), st.data(),
)  # fmt: skip
def test_a_plan_by_now(tiers: list[Tier | None], way: Any, data: st.DataObject) -> None:
    """Whatever happened since, every block is in place, recomputed or loaded from where it is.

    Gone is what the plan counts on and nobody has; it is a plan as good as any other.
    """
    resident = data.draw(st.integers(0, len(tiers)))
    before = plan(residency_of(tiers), COSTS, resident=resident, way=way)
    pinned = [tier and data.draw(st.sampled_from([tier, *Tier, None])) for tier in tiers]
    now, gone = before.by_now(pinned)
    assert RestorePlan.from_json(now.to_json()) == now
    assert now.recompute == before.recompute
    assert now.load[: len(before.load)] == before.load
    for block in range(resident, len(tiers)):
        if tiers[block] is Tier.DEVICE and pinned[block] in (HOST, SSD):
            assert block in now.load
            assert now.tiers[block] is pinned[block]
        else:
            assert now.tiers[block] is tiers[block]
    counted_on = {*now.load, *now.on_device}
    if before.adaptive:
        counted_on |= {block for block in range(resident, len(tiers)) if tiers[block]}
    assert set(gone) == {block for block in counted_on if pinned[block] is None}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([HOST, SSD, None]), max_size=10), st.data())
def test_json_round_trip(tiers: list[Tier | None], data: st.DataObject) -> None:
    """A plan that was sent as JSON is the plan that arrives."""
    made = plan(
        residency_of(tiers),
        COSTS,
        resident=data.draw(st.integers(0, len(tiers))),
        step_blocks_max=data.draw(st.integers(1, 4)),
        way=data.draw(st.sampled_from(["best", "load", "recompute"])),
    )
    arrived = RestorePlan.from_json(made.to_json())
    assert made == arrived
    assert made.to_json() == arrived.to_json()
    assert all(tier is None or type(tier) is Tier for tier in arrived.tiers)


def check_hostile(text: Any) -> None:
    """Decode; what is accepted must be a plan whose parts all make sense."""
    try:
        made = RestorePlan.from_json(text)
    except FormatError:
        return
    n = len(made.hashes)
    assert len(made.namespace) == 32
    assert all(len(digest) == 32 for digest in made.hashes)
    assert n == len(made.tiers)
    for number in (made.resident, made.step_blocks_max, made.block_tokens, made.block_bytes):
        assert type(number) is int
    assert 0 <= made.resident <= n
    assert made.step_blocks_max >= 1
    assert made.block_tokens >= 1
    assert made.block_bytes >= 0
    assert all(type(block) is int for block in (*made.recompute, *made.load))
    assert list(range(made.resident, n)) == sorted([*made.recompute, *made.load])
    assert sorted(made.recompute) == list(made.recompute)
    assert None not in [made.tiers[block] for block in made.load]
    assert type(made.adaptive) is bool
    assert type(made.reason) is str
    made.explain()
    assert made == RestorePlan.from_json(made.to_json())


BASE: dict[str, Any] = json.loads(PLAN.to_json())
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False)
    | st.text(max_size=3) | st.sampled_from(["ssd", "00" * 32]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(BASE)), JUNK)
def test_junk_in_a_field_is_a_format_error(name: str, junk: object) -> None:
    """Any JSON value in the place of any field is refused, or makes another sound plan."""
    check_hostile(json.dumps({**BASE, name: junk}))


HOSTILE: list[dict[str, Any]] = [
    {"namespace": "00"},
    {"namespace": "zz" * 32},
    {"namespace": None},
    {"hashes": ["00"] * 5},
    {"hashes": "00" * 5},
    {"hashes": [1, 2, 3, 4, 5]},
    {"tiers": ["host", "ssd", "ssd", "tape", "ssd"]},
    {"tiers": ["host", "ssd", "ssd", "", "ssd"]},
    {"tiers": ["host", "ssd", "ssd", 0, "ssd"]},
    {"tiers": ["host"]},
    {"tiers": [None] * 5},
    {"resident": -1, "recompute": [-1, 0, 1, 2, 3, 4], "load": []},
    {"resident": -(1 << 61)},
    {"resident": "1"},
    {"resident": 1.0},
    {"resident": None},
    {"resident": True},
    {"resident": 1 << 80},
    {"recompute": ["a"]},
    {"recompute": [None]},
    {"recompute": [[1]]},
    {"recompute": [1.0, 2.0, 3.0, 4.0], "load": []},
    {"recompute": [True, 2, 3, 4], "load": []},
    {"recompute": [4, 3, 2, 1], "load": []},
    {"recompute": [1, 2, 3, 4], "load": [4]},
    {"recompute": [], "load": [1, 2, 3, 4]},
    {"recompute": "1234", "load": []},
    {"step_blocks_max": 0},
    {"step_blocks_max": -1},
    {"step_blocks_max": "2"},
    {"step_blocks_max": 1.5},
    {"block_tokens": 0},
    {"block_tokens": "256"},
    {"block_bytes": -1},
    {"block_bytes": None},
    {"adaptive": "yes"},
    {"adaptive": None},
    {"predicted": None},
    {"predicted": {"planned": "x", "load": None, "recompute": 1.0}},
    {"predicted": {"planned": None, "load": None, "recompute": 1.0}},
    {"predicted": {"planned": 1.0}},
    {"predicted": {"planned": 1.0, "load": 1.0, "recompute": 1.0, "more": 1.0}},
    {"reason": None},
    {"reason": 5},
    {"extra_field": 1},
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda value: json.dumps(value)[:60])
def test_hostile_plan_is_a_format_error(change: dict[str, Any]) -> None:
    """A plan with one impossible part is refused before anybody acts on it."""
    with pytest.raises(FormatError):
        RestorePlan.from_json(json.dumps({**BASE, **change}))


@pytest.mark.parametrize("name", sorted(BASE))
def test_missing_field_is_a_format_error(name: str) -> None:
    """A plan without one of its fields is refused."""
    with pytest.raises(FormatError):
        RestorePlan.from_json(json.dumps({k: v for k, v in BASE.items() if k != name}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", '"x"', "{}", "NaN", "[" * 100_000, '{"a":' * 100_000, "\ud800"],
    ids=lambda text: repr(text)[:12],
)
def test_other_text_is_a_format_error(text: str) -> None:
    """What is not JSON, or not an object, or nested beyond reason, is refused."""
    with pytest.raises(FormatError):
        RestorePlan.from_json(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=50))
def test_random_text_is_a_format_error(text: str) -> None:
    """Noise is refused with FormatError and nothing else."""
    with pytest.raises(FormatError):
        RestorePlan.from_json(text)
