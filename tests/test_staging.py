"""Staging has a bound of its own, so that a store without a host tier works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support import (
    HOST_SLOT_BYTES,
    WAIT_S,
    bring_back,
    fill_slots,
    filled_slots,
    in_thread,
    is_right,
    poisoned_slots,
    prompt_keys,
    put,
)

import kvtier
from kvtier.tiers.device import TensorSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Open = Callable[..., kvtier.Store]

STAGING = 3
OPTIONS = {"host_bytes": 0, "staging_blocks_max": STAGING, "loads_inflight_max": 2}


class WatchedSlots(TensorSlots):
    """Slots that note how much host memory is in use whenever a copy is at them."""

    def __init__(self, slots: TensorSlots, store: kvtier.Store) -> None:
        super().__init__(slots.layout, slots.tensors)
        self._store = store
        self.seen: list[int] = []

    def arrays(self, block: int) -> Sequence[Any] | None:
        """Return the block's arrays."""
        self.seen.append(self._store._host.usage().used_bytes)
        return super().arrays(block)


def test_everything_works_on_staging_alone(open_store: Open) -> None:
    """With no host memory of its own a store puts, restores and prefetches, within staging."""
    store = open_store(**OPTIONS)
    keys = prompt_keys(30)
    source = WatchedSlots(filled_slots(keys), store)
    result = store.put(keys, source).result(WAIT_S)
    assert result == kvtier.PutResult(30, 0, 0)
    store.flush()
    assert store.prefetch(keys).result(WAIT_S) == 0, "there is nowhere to keep it"
    into = WatchedSlots(poisoned_slots(30), store)
    with store.restore(store.plan(store.lookup(keys), way="load"), into=into) as session:
        assert session.next_step(WAIT_S) is None
    assert all(is_right(into, keys, block) for block in range(30))
    assert len(source.seen) == len(into.seen) == 30
    assert 0 < max(source.seen + into.seen) <= STAGING * HOST_SLOT_BYTES
    usage = store.stats()["tiers"]["host"]
    assert (usage["blocks"], usage["used_bytes"], usage["limit_bytes"]) == (0, 0, 0)


def test_many_at_once_share_staging(open_store: Open) -> None:
    """Puts and restores at once wait for each other's slots, and every byte is right."""
    store = open_store(**OPTIONS)
    for seed in range(4):
        put(store, prompt_keys(8, seed))
    store.flush()
    work = [in_thread(lambda seed=seed: bring_back(store, prompt_keys(8, seed))) for seed in (0, 1)]
    work += [in_thread(lambda seed=seed: put(store, prompt_keys(8, seed))) for seed in (8, 9)]
    for each in work:
        each()


def test_used_up_staging_is_a_recompute(open_store: Open) -> None:
    """A pool that is used up midway hands out no unread buffer, hangs nobody and heals.

    What was loaded stays, the rest is recomputed, and a put is dropped and counted.
    """
    keys = prompt_keys(6)
    store = open_store(**OPTIONS)
    put(store, keys)
    store.close()
    store = open_store(**OPTIONS, slot_wait_s_max=0.01)
    held: list[int] = []

    class Greedy(TensorSlots):
        """Slots whose first copy takes all that is left of staging."""

        def arrays(self, block: int) -> Sequence[Any] | None:
            if not held:
                held.extend(iter(store._host.reserve, None))
            return super().arrays(block)

    empty = poisoned_slots(6)
    slots = Greedy(empty.layout, empty.tensors)
    with store.restore(store.plan(store.lookup(keys), way="load"), into=slots) as session:
        while step := session.next_step(WAIT_S):
            fill_slots(slots, keys, step.blocks)
            session.computed(step)
        report = session.report
    assert all(is_right(slots, keys, block) for block in range(6))
    assert report.loaded + report.recomputed == 6
    taken = list(iter(store._host.reserve, None))
    assert held, "the pool was never used up"
    assert put(store, prompt_keys(4, seed=9)) == kvtier.PutResult(0, 0, 4)
    for slot in held + taken:
        store._host.release(slot)
    store.close()
    store = open_store(**OPTIONS)
    assert bring_back(store, keys).loaded == 6
    assert put(store, prompt_keys(4, seed=9)).stored == 4


@pytest.mark.parametrize("staging", [2, 5])
def test_staging_is_counted_by_blocks(open_store: Open, staging: int) -> None:
    """``staging_blocks_max`` is the number of slots, to the block."""
    store = open_store(host_bytes=0, staging_blocks_max=staging, loads_inflight_max=1)
    slots = list(iter(store._host.reserve, None))
    assert slots == list(range(staging))
    for slot in slots:
        store._host.release(slot)
