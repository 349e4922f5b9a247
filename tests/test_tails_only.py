"""What is not worth keeping: the head that a plan recomputes anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    SPEC,
    prompt_keys,
    put,
    record_of,
    tiny_budget,
)
from test_planner import BLOCK_BYTES, BLOCK_TOKENS, costs_of, residency_of

import kvtier
from kvtier import PutResult, Tier, plan
from kvtier.metrics import Metrics
from kvtier.planner import recomputed_head
from kvtier.prices import Prices
from kvtier.ssd_room import SsdRoom
from kvtier.tiers.base import BlockId, Record
from kvtier.tiers.write_budget import WriteBudget
from kvtier.write_rule import PendingWrite, WriteRule

Open = Any


def head(blocks: int, costs: kvtier.CostModel, **how: Any) -> int:
    """Return the recomputed head of a prompt of the planner's test blocks."""
    return recomputed_head(blocks, costs, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, **how)


# -- the head


@given(
    blocks=st.integers(1, 90),
    block_s=st.floats(1e-4, 1e-1),
    rise=st.floats(0, 0.1),
    ssd_s=st.floats(1e-4, 1e-1),
    price=st.sampled_from([0.0, 0.3, 0.5, 1.0, 4.0]),
    step=st.integers(1, 4),
)
def test_the_head_is_what_a_plan_recomputes(
    blocks: int, block_s: float, rise: float, ssd_s: float, price: float, step: int
) -> None:
    """Of a prompt that is all on the SSD, exactly [0, head) is recomputed by the plan."""
    costs = costs_of(block_s, rise, ssd_s=ssd_s)
    made = plan(residency_of([Tier.SSD] * blocks), costs, compute_price=price, step_blocks_max=step)
    split = head(blocks, costs, compute_price=price, step_blocks_max=step)
    assert made.recompute == tuple(range(split))


def test_half_of_equal_costs_is_recomputed() -> None:
    """Where loading and recomputing take as long, half is recomputed, until compute has a price."""
    costs = costs_of(0.01, ssd_s=0.01)
    assert head(16, costs) == 8
    assert head(16, costs, compute_price=1.01) == 0


def test_dearer_compute_never_recomputes_more() -> None:
    """The head shrinks as the price of compute rises, down to nothing."""
    costs = costs_of(0.01, rise=0.05, ssd_s=0.02)
    heads = [head(64, costs, compute_price=price) for price in np.linspace(0.8, 3, 30)]
    assert heads == sorted(heads, reverse=True)
    assert heads[0] > 0 == heads[-1]


def test_without_costs_or_blocks_there_is_no_head() -> None:
    """Before the cost of recomputing is measured, everything is worth keeping."""
    assert head(16, kvtier.CostModel()) == 0
    assert head(0, costs_of(0.01, ssd_s=0.01)) == 0


# -- the rule


def write_of(number: int, *, priority: int = 0, **why: bool) -> PendingWrite:
    """Return a block that is offered to the SSD."""
    block = BlockId(bytes(32), number.to_bytes(32, "big"))
    record = Record(block, bytes(32), 0, bytes(32), (10,), (((1, 1),),), priority=priority)
    return PendingWrite(0, record, lambda _: None, **why)


def rule_of(limit: int | None) -> WriteRule:
    """Return a rule with a budget of so many bytes a day, in an hour that does not end."""
    return WriteRule(WriteBudget(limit, saved=b"", save=lambda _: None, now_ns=lambda: 10**18))


def test_only_a_full_ssd_declines_the_head() -> None:
    """With room, everything is written; without, the head only once it was asked for twice."""
    rule = rule_of(None)
    assert rule.admits(write_of(1, recomputed=True), 10, uses=1, value=1.0, full=False)
    assert rule.admits(write_of(2), 10, uses=1, value=1.0, full=True)
    assert not rule.admits(write_of(3, recomputed=True), 10, uses=1, value=1.0, full=True)
    assert rule.admits(write_of(3, recomputed=True), 10, uses=2, value=2.0, full=True)


def test_priority_is_admitted_but_does_not_lift_the_budget() -> None:
    """A put with priority is written the first time, as long as the day's bytes last."""
    rule = rule_of(100)
    assert rule.admits(write_of(1), 80, uses=1, value=1.0, full=False)
    assert not rule.admits(write_of(2), 10, uses=1, value=1.0, full=False)
    assert rule.admits(write_of(3, priority=1), 10, uses=1, value=1.0, full=False)
    assert not rule.admits(write_of(4, priority=1), 20, uses=1, value=1.0, full=False)
    assert not rule.admits(write_of(5), 20, uses=9, value=9.0, full=False)


# -- in a store


def taught(open_store: Open, *, compute_s: float, load_s: float, **own: Any) -> kvtier.Store:
    """Return a store that has learned what a block costs to recompute and to load."""
    store = open_store(**own)
    tokens = SPEC.block_tokens
    for start in (0, 4, 1, 7, 2, 3):
        store._profiler.computed(start * tokens, tokens, compute_s)
    store._profiler.loaded(Tier.SSD, SPEC.block_layout.block_bytes, load_s)
    store._profiler.loaded(Tier.HOST, SPEC.block_layout.block_bytes, 1e-9)
    return store


def on_ssd(store: kvtier.Store, keys: kvtier.BlockKeys) -> list[int]:
    """Return the blocks of a prompt that have a copy on the SSD."""
    places = store._catalog.places(keys.namespace, keys.hashes)
    return [block for block, where in enumerate(places) if where is not None]


def full_store(open_store: Open, **own: Any) -> kvtier.Store:
    """Return a store whose SSD is full and whose plans recompute 2 of 8 blocks."""
    usual = {"host_bytes": 0, "tails_only": True, **tiny_budget(24, per_segment=6)}
    store = taught(open_store, compute_s=0.025, load_s=0.01, **{**usual, **own})
    for seed in range(100, 104):
        put(store, prompt_keys(8, seed))
        store.flush()
    assert store.stats()["counters"]["evicted_blocks_ssd"] > 0
    return store


def test_a_full_store_keeps_tails(open_store: Open) -> None:
    """Without room the head that plans recompute is declined and counted, the tail stored."""
    store = full_store(open_store)
    assert store.plan(store.lookup(prompt_keys(8, 103))).recompute[:2] == (0, 1)
    before = store.stats()["counters"]
    assert put(store, prompt_keys(8, 1)) == PutResult(6, 0, 2)
    after = store.stats()["counters"]
    assert on_ssd(store, prompt_keys(8, 1)) == [2, 3, 4, 5, 6, 7]
    assert after["ssd_declined_blocks"] - before["ssd_declined_blocks"] == 2
    assert after["ssd_written_bytes"] - before["ssd_written_bytes"] == 6 * SLOT_BYTES


def test_a_busy_engine_refills_the_heads(open_store: Open) -> None:
    """At a higher price of compute nothing is recomputed, so the next put stores the heads too."""
    store = full_store(open_store)
    put(store, prompt_keys(8, 1))
    store.compute_price = 0.5
    before = store.stats()["counters"]["ssd_written_bytes"]
    assert put(store, prompt_keys(8, 1)) == PutResult(2, 6, 0)
    assert put(store, prompt_keys(8, 2)) == PutResult(8, 0, 0)
    assert store.stats()["counters"]["ssd_written_bytes"] - before == 10 * SLOT_BYTES
    assert on_ssd(store, prompt_keys(8, 1)) == list(range(8))


def test_a_head_that_comes_twice_is_kept(open_store: Open) -> None:
    """A head that is put a second time is shared or reused: it is stored at any price."""
    store = full_store(open_store)
    put(store, prompt_keys(8, 1))
    assert put(store, prompt_keys(8, 1)) == PutResult(2, 6, 0)


def test_with_room_heads_are_stored(open_store: Open) -> None:
    """While there is room, and budget, tails_only declines nothing."""
    store = taught(open_store, compute_s=0.025, load_s=0.01, host_bytes=0, tails_only=True)
    assert put(store, prompt_keys(8, 1)) == PutResult(8, 0, 0)


def test_room_that_a_purge_made_is_room(open_store: Open) -> None:
    """A store that was full once is not full for good."""
    store = full_store(open_store)
    store.purge(tenant="")
    assert put(store, prompt_keys(8, 1)) == PutResult(8, 0, 0)


def test_heads_are_kept_unless_asked_for(open_store: Open) -> None:
    """Without tails_only a full store takes whole prompts."""
    store = full_store(open_store, tails_only=False)
    assert put(store, prompt_keys(8, 1)) == PutResult(8, 0, 0)


def test_demotion_keeps_tails_too(open_store: Open) -> None:
    """On demotion the rule is the same: heads of a full store go without a write."""
    store = full_store(open_store, write_policy="demote", host_bytes=32 * HOST_SLOT_BYTES)
    put(store, prompt_keys(8, 1))
    store.flush()
    assert on_ssd(store, prompt_keys(8, 1)) == [2, 3, 4, 5, 6, 7]
    store.compute_price = 0.5
    assert put(store, prompt_keys(8, 1)) == PutResult(0, 8, 0)
    store.flush()
    assert on_ssd(store, prompt_keys(8, 1)) == list(range(8))


# -- a batch that does not fit


@pytest.mark.parametrize("policy", ["priced", "prefix-closed"])
@pytest.mark.parametrize("lifted", [None, 2])
def test_of_a_batch_without_room_the_most_valuable_gets_it(
    open_store: Open, policy: str, lifted: int | None
) -> None:
    """Where nothing may go for a prompt, its tail gets what room there is, after what has priority.

    Of a policy for contiguous prefixes its head does.
    """
    own = {"host_bytes": 0, "policy": policy, **tiny_budget(24, per_segment=6)}
    store = taught(open_store, compute_s=0.025, load_s=0.01, **own)
    catalog = store._catalog
    catalog.reprice(Prices(last=tuple(range(1, 99))))
    keys = prompt_keys(40)
    priorities = [int(at == lifted) for at in range(len(keys))]
    rows = catalog.begin_all(
        keys.namespace, keys.hashes, Tier.SSD, "write", positions=range(len(keys))
    )
    writes = [
        PendingWrite(row, record_of(at, priority=priorities[at]), lambda _: None)
        for at, row in enumerate(rows)
    ]
    places = SsdRoom(catalog, store._ssd, Metrics()).place(writes)
    placed = [at for at, where in enumerate(places) if where is not None]
    for where in places:
        if where is not None:
            store._ssd._slabs.give_back(where)
    catalog.end_all(rows, Tier.SSD, "abort")
    room = len(placed)
    assert 3 < room < len(keys)
    if policy == "prefix-closed":
        assert placed == list(range(room))
    elif lifted is None:
        assert placed == list(range(len(keys) - room, len(keys)))
    else:
        assert placed == [lifted, *range(len(keys) - room + 1, len(keys))]


# -- the price of compute


def test_plans_follow_the_stores_price(open_store: Open) -> None:
    """A plan without a price of its own has the store's, and one with its own keeps it."""
    store = taught(open_store, compute_s=0.025, load_s=0.01, host_bytes=0)
    put(store, prompt_keys(8))
    residency = store.lookup(prompt_keys(8))
    assert store.compute_price == 0.0
    assert store.plan(residency).recompute == (0, 1)
    store.compute_price = 0.5
    made = store.plan(residency)
    assert (made.recompute, made.compute_price) == ((), 0.5)
    assert store.plan(residency, compute_price=0.0).recompute == (0, 1)
    relaxed = store.plan(residency, compute_price=0.0, deadline_s=1.0)
    assert relaxed.recompute == ()


@pytest.mark.parametrize("price", [-0.1, float("nan"), float("inf")])
def test_a_price_is_a_number_of_zero_or_more(open_store: Open, price: float) -> None:
    """A price that is none is refused by name, and the old one stays."""
    store = open_store()
    with pytest.raises(ValueError, match="compute_price"):
        store.compute_price = price
    assert store.compute_price == 0.0
