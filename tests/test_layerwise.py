from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    SPEC,
    WAIT_S,
    Gate,
    HeldSlots,
    fill_slots,
    is_right,
    poisoned_slots,
    prompt_keys,
    put,
    settle,
)

import kvtier
from kvtier import LinkThrottle, StoreFailed, Tier
from kvtier.layerwise import host_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

Open = Any
LAYERS = SPEC.layers
HOST, SSD = Tier.HOST, Tier.SSD


class LayerLink(LinkThrottle):
    """A link that lets the first ``layers`` transfers through and the next ones never."""

    def __init__(self, layers: int) -> None:
        super().__init__(1e12)
        self.left = layers

    def reserve(self, now: float, nbytes: int) -> float:
        """Return when a transfer ends."""
        assert nbytes > 0
        self.left -= 1
        return now if self.left >= 0 else now + 1e6


@pytest.fixture
def keys() -> kvtier.BlockKeys:
    """Return the keys of a prompt of six blocks."""
    return prompt_keys(6)


def opened(open_store: Open, keys: kvtier.BlockKeys, link: LinkThrottle | None = None) -> Any:
    """Return a store that has the prompt in host memory, behind ``link``."""
    store = open_store(links={} if link is None else {HOST: link})
    put(store, keys)
    store.flush()
    return store


def layer_is_right(slots: Any, keys: kvtier.BlockKeys, layer: int) -> bool:
    """Whether one layer of every block has the bytes that were stored."""
    wanted = poisoned_slots(len(keys))
    fill_slots(wanted, keys, range(len(keys)))
    return all(
        slots.tensors[tensor].view(torch.uint8).equal(wanted.tensors[tensor].view(torch.uint8))
        for tensor in range(2 * layer, 2 * layer + 2)
    )


def load_all(store: Any, keys: kvtier.BlockKeys) -> kvtier.RestorePlan:
    """Plan to load everything."""
    plan: kvtier.RestorePlan = store.plan(store.lookup(keys), way="load")
    return plan


def test_the_first_layer_is_there_before_the_last_and_leaving_stops_the_copy(
    open_store: Open, keys: kvtier.BlockKeys
) -> None:
    """With the link held up after one layer, that one can be used; giving up waits for no link."""
    store = opened(open_store, keys, LayerLink(1))
    slots = poisoned_slots(6)
    session = store.restore(load_all(store, keys), into=slots, layerwise=True)

    def use_and_give_up() -> None:
        with session:
            assert session.next_step(WAIT_S) is None
            session.wait_layer(0, WAIT_S)
            assert layer_is_right(slots, keys, 0)
            with pytest.raises(StoreFailed, match="layer 1"):
                session.wait_layer(1, 0.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_and_give_up()
    settle(store)
    assert not layer_is_right(slots, keys, 1)
    assert session.report.loaded == 0


def test_every_layer_comes_and_counts(open_store: Open, keys: kvtier.BlockKeys) -> None:
    """After the last layer everything is in place, and the report and the books say so."""
    store = opened(open_store, keys)
    slots = poisoned_slots(6)
    with store.restore(load_all(store, keys), into=slots, layerwise=True) as session:
        assert session.next_step(WAIT_S) is None
        for layer in range(LAYERS):
            session.wait_layer(layer, WAIT_S)
            assert layer_is_right(slots, keys, layer)
    assert all(is_right(slots, keys, block) for block in range(6))
    assert (session.report.loaded, session.report.recomputed) == (6, 0)
    assert session.report.measured_s is not None
    assert store.stats()["counters"]["loaded_blocks_host"] == 6
    settle(store)


def test_leaving_without_waiting_leaves_everything_in_place(
    open_store: Open, keys: kvtier.BlockKeys
) -> None:
    """A scope that ends after the last step has all bytes there, whoever waited for layers."""
    store = opened(open_store, keys)
    slots = poisoned_slots(6)
    with store.restore(load_all(store, keys), into=slots, layerwise=True) as session:
        while session.next_step(WAIT_S):
            pass
    assert all(is_right(slots, keys, block) for block in range(6))


def test_what_the_slots_raise_reaches_the_engine(open_store: Open, keys: kvtier.BlockKeys) -> None:
    """Slots that end before the prompt: the one who waits for a layer is told."""
    store = opened(open_store, keys)
    session = store.restore(load_all(store, keys), into=poisoned_slots(4), layerwise=True)

    def use() -> None:
        with session:
            assert session.next_step(WAIT_S) is None
            with pytest.raises(kvtier.SpecMismatch, match="block 4"):
                session.wait_layer(LAYERS - 1, WAIT_S)
            # And again on leaving: nobody may go on as if the prompt were in place.

    with pytest.raises(kvtier.SpecMismatch, match="block 4"):
        use()
    settle(store)


def test_layers_are_for_after_the_steps(open_store: Open, keys: kvtier.BlockKeys) -> None:
    """While something is left to recompute, no layer can be waited for."""
    store = opened(open_store, keys)
    longer = prompt_keys(7)
    slots = poisoned_slots(7)
    residency = replace(store.lookup(longer), tiers=(None, *[HOST] * 5, None))
    plan = store.plan(residency, way="load")
    with store.restore(plan, into=slots, layerwise=True) as session:
        with pytest.raises(ValueError, match="steps left"):
            session.wait_layer(0)
        while step := session.next_step(WAIT_S):
            fill_slots(slots, longer, step.blocks)
            session.computed(step)
        session.wait_layer(0, WAIT_S)
    assert all(is_right(slots, longer, block) for block in range(7))


def test_a_tail_that_left_host_memory_is_loaded_whole(
    open_store: Open, keys: kvtier.BlockKeys
) -> None:
    """A block evicted since the plan was made comes from the SSD; all layers wait for it."""
    store = opened(open_store, keys)
    plan = load_all(store, keys)
    with store._catalog.changed:
        store._mover.let_go(1)
    slots = poisoned_slots(6)
    with store.restore(plan, into=slots, layerwise=True) as session:
        assert session.next_step(WAIT_S) is None
        session.wait_layer(LAYERS - 1, WAIT_S)
        assert all(is_right(slots, keys, block) for block in range(6))
    assert session.report.loaded == 6
    settle(store)


def test_closing_meanwhile_ends_the_session(open_store: Open, keys: kvtier.BlockKeys) -> None:
    """A store that closes lets the layers under way end, or the waiter knows."""
    gate = Gate()
    store = opened(open_store, keys)
    slots = poisoned_slots(6)
    with store.restore(
        load_all(store, keys), into=HeldSlots(slots, gate), layerwise=True
    ) as session:
        closing = threading.Thread(target=store.close)
        closing.start()
        gate.open()
        session.wait_layer(LAYERS - 1, WAIT_S)
        closing.join(WAIT_S)
        assert not closing.is_alive()
    assert all(is_right(slots, keys, block) for block in range(6))


@given(st.lists(st.sampled_from([None, HOST, SSD]), max_size=12), st.integers(0, 12))
def test_the_tail_is_what_only_host_memory_brings(
    tiers: Sequence[Tier | None], resident: int
) -> None:
    """Every block of it is loaded from host memory, nothing after it is anything else."""
    n = len(tiers)
    keys = prompt_keys(n)
    residency = kvtier.Residency(keys, tuple(tiers), 1000)
    plan = kvtier.plan(residency, kvtier.CostModel(), resident=min(resident, n), way="load")
    tail = host_tail(plan)
    assert tail.stop == n
    assert len(tail) != 1
    assert all(tiers[block] is HOST and block in plan.load for block in tail)
    if tail.start > plan.resident and len(tail):
        assert tiers[tail.start - 1] is not HOST
