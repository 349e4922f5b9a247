from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import (
    HOST_SLOT_BYTES,
    POISON,
    SPEC,
    WAIT_S,
    assert_sound,
    bring_back,
    expected,
    flip,
    in_thread,
    is_right,
    payload,
    poisoned_slots,
    prompt_keys,
    put,
    read_slots,
    record_of,
    segment_files,
    variant,
)

import kvtier
from kvtier import Tier
from kvtier.catalog import Catalog, CopyState
from kvtier.metrics import Metrics
from kvtier.policy import Lru
from kvtier.promoter import Promoter
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.device_pool import DevicePool, device_slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Open = Callable[..., kvtier.Store]

BLOCK_BYTES = SPEC.block_layout.block_bytes
SLOT_BYTES = device_slot_bytes(BLOCK_BYTES)
D, H, S = Tier.DEVICE, Tier.HOST, Tier.SSD


@pytest.fixture
def store(open_store: Open) -> kvtier.Store:
    """Open a store with room for four blocks on the device."""
    return open_store(device_bytes=4 * SLOT_BYTES)


def promote(store: kvtier.Store, keys: kvtier.BlockKeys) -> int:
    """Promote a prompt to the device; returns how many blocks came to be there."""
    return store.prefetch(keys, tier="device").result(WAIT_S)


def stored(store: kvtier.Store, blocks: int, seed: int = 0) -> kvtier.BlockKeys:
    """Store a prompt durably."""
    keys = prompt_keys(blocks, seed)
    put(store, keys)
    store.flush()
    return keys


def leave_tier(store: kvtier.Store, keys: Sequence[bytes], tier: Tier) -> None:
    """Take blocks out of one tier, as an eviction would."""
    catalog = store._catalog
    rows = [catalog.find(BlockId(SPEC.namespace, digest)) for digest in keys]
    if tier is Tier.DEVICE:
        store._promoter.purge(lambda: rows)
    elif tier is Tier.HOST:
        store._mover.purge_host(lambda: rows)
    else:
        store._writer.purge(lambda: rows).result(WAIT_S)


def counters(store: kvtier.Store) -> dict[str, int]:
    """Return the store's counters."""
    return dict(store.stats()["counters"])


# -- what is on the device is restored from there


def test_what_was_promoted_is_restored_from_the_device(store: kvtier.Store) -> None:
    """A prefetch to the device shows there, and its bytes come from there and nowhere else."""
    keys = stored(store, 4)
    assert promote(store, keys) == 4
    assert store.lookup(keys).tiers == (D,) * 4
    for tier in (H, S):
        leave_tier(store, keys.hashes, tier)
    assert store.lookup(keys).tiers == (D,) * 4
    back = bring_back(store, keys)
    assert (back.loaded, back.recomputed) == (4, [])
    assert back.report.loaded_bytes == 4 * BLOCK_BYTES
    seen = counters(store)
    assert seen["loaded_blocks_device"] == seen["device_written_blocks"] == 4
    assert seen["loaded_bytes_device"] == 4 * BLOCK_BYTES
    assert seen["loaded_blocks_host"] == seen["loaded_blocks_ssd"] == 0
    usage = store.stats()["tiers"]["device"]
    assert usage == {
        "blocks": 4, "ready": 4, "used_bytes": 4 * SLOT_BYTES, "limit_bytes": 4 * SLOT_BYTES,
    }  # fmt: skip


@pytest.mark.parametrize("way", ["load", "best", "recompute"])
def test_three_tiers_and_a_hole(open_store: Open, way: str) -> None:
    """Blocks of every tier and of none are put together, each byte as it was stored."""
    store = open_store(device_bytes=16 * SLOT_BYTES)
    keys = stored(store, 12)
    leave_tier(store, keys.hashes, H)
    for tier, part in ((D, keys.hashes[::3]), (H, keys.hashes[1::3])):
        wanted = [BlockId(keys.namespace, digest) for digest in part]
        assert store._prefetcher.prefetch(wanted, tier=tier).result(WAIT_S) == 4
    leave_tier(store, keys.hashes[5:6], S)
    leave_tier(store, keys.hashes[::3], H)
    assert store.lookup(keys).tiers == (D, H, S, D, H, None, D, H, S, D, H, S)
    back = bring_back(store, keys, way=way)
    assert set(back.recomputed).isdisjoint({0, 3, 6, 9}), "what is on the device is copied"
    assert 5 in back.recomputed
    assert counters(store)["loaded_blocks_device"] == 4
    if way == "load":
        assert back.recomputed == [5]
        assert counters(store)["loaded_blocks_host"] == 4
        assert counters(store)["loaded_blocks_ssd"] == 3


def test_the_copies_come_first(store: kvtier.Store) -> None:
    """When the scope is entered what is on the device is in the slots; nothing else need be."""
    keys = stored(store, 4)
    promote(store, keys)
    slots = poisoned_slots(4)
    with store.restore(store.plan(store.lookup(keys)), into=slots) as session:
        assert all(is_right(slots, keys, block) for block in range(4))
        assert session.poll_step() is None
        assert session.report.loaded == 4


def test_blocks_that_the_engine_holds_are_not_copied(store: kvtier.Store) -> None:
    """``resident`` keeps its meaning: those slots are the engine's, whatever is on the device."""
    keys = stored(store, 4)
    promote(store, keys)
    slots = poisoned_slots(4)
    plan = store.plan(store.lookup(keys), resident=2)
    assert plan.on_device == [2, 3]
    with store.restore(plan, into=slots) as session:
        assert session.next_step(WAIT_S) is None
        assert session.report.loaded == 2
    assert read_slots(slots, 0) == read_slots(slots, 1) == POISON
    assert is_right(slots, keys, 2)
    assert is_right(slots, keys, 3)


def test_a_plan_says_what_is_on_the_device(store: kvtier.Store) -> None:
    """It is neither loaded nor recomputed, costs nothing, and is shown; also serialised."""
    keys = stored(store, 4)
    promote(store, keys)
    plan = store.plan(store.lookup(keys))
    assert (plan.recompute, plan.load, plan.on_device) == ((), (), [0, 1, 2, 3])
    assert plan.predicted.planned == 0
    assert "on device 4 blocks [0, 4)" in plan.explain()
    assert "on the device already" in plan.reason
    plan = kvtier.RestorePlan.from_json(plan.to_json())
    assert bring_back(store, keys, plan=plan).loaded == 4


def test_without_host_memory(open_store: Open) -> None:
    """The device is reached through staging, and is a tier of its own."""
    store = open_store(host_bytes=0, device_bytes=4 * SLOT_BYTES)
    keys = stored(store, 6)
    assert promote(store, keys) == 4
    assert store.lookup(keys).tiers == (S, S, D, D, D, D)
    assert bring_back(store, keys).loaded == 6
    assert store.stats()["tiers"]["host"]["blocks"] == 0


# -- bounded, and evicted by an order of its own


def test_without_device_memory_nothing_is_promoted(open_store: Open) -> None:
    """``device_bytes`` is 0 unless asked for: a prefetch to the device is nothing then."""
    store = open_store()
    keys = stored(store, 4)
    assert promote(store, keys) == 0
    assert store.lookup(keys).tiers == (H,) * 4
    assert store.stats()["tiers"]["device"] == {
        "blocks": 0, "ready": 0, "used_bytes": 0, "limit_bytes": 0,
    }  # fmt: skip


@pytest.mark.parametrize("tier", ["ssd", "moon", Tier.SSD])
def test_a_tier_that_nothing_is_promoted_to(store: kvtier.Store, tier: Any) -> None:
    """Only host memory and the device are promoted to."""
    with pytest.raises(ValueError, match=r"tier|Tier"):
        store.prefetch(prompt_keys(1), tier=tier)


def test_the_tail_goes_to_the_device_if_there_is_no_room_for_all(store: kvtier.Store) -> None:
    """The head is what a plan recomputes; a second hint changes nothing."""
    keys = stored(store, 6)
    assert promote(store, keys) == 4
    assert store.lookup(keys).tiers == (H, H, D, D, D, D)
    assert promote(store, keys) == 0
    assert store.lookup(keys).tiers == (H, H, D, D, D, D)


def test_a_second_hint_for_host_memory_changes_nothing(open_store: Open) -> None:
    """What host memory has no room for does not take the place of the tail that it has."""
    store = open_store(host_bytes=4 * HOST_SLOT_BYTES)
    keys = stored(store, 6)
    leave_tier(store, keys.hashes, H)
    assert store.prefetch(keys).result(WAIT_S) == 4
    assert store.lookup(keys).tiers == (S, S, H, H, H, H)
    assert store.prefetch(keys).result(WAIT_S) == 0
    assert store.lookup(keys).tiers == (S, S, H, H, H, H)


def test_what_was_used_least_recently_makes_room(store: kvtier.Store) -> None:
    """The device evicts by use, apart from what the other tiers do."""
    first, second, third = (stored(store, 2, seed) for seed in (1, 2, 3))
    assert [promote(store, keys) for keys in (first, second)] == [2, 2]
    bring_back(store, first)
    assert promote(store, third) == 2
    assert store.lookup(first).tiers == (D, D)
    assert store.lookup(second).tiers == (H, H), "evicted from the device, not from the store"
    assert store.lookup(third).tiers == (D, D)
    assert counters(store)["evicted_blocks_device"] == 2
    assert store.stats()["tiers"]["device"]["used_bytes"] <= 4 * SLOT_BYTES


def test_what_a_restore_uses_is_not_replaced(store: kvtier.Store) -> None:
    """Pinned while it is in use: a hint that finds no room is declined, and waits for nobody."""
    keys, other = stored(store, 4, 1), stored(store, 4, 2)
    promote(store, keys)
    slots = poisoned_slots(4)
    with store.restore(store.plan(store.lookup(keys)), into=slots):
        assert promote(store, other) == 0
        assert store.lookup(other).tiers == (H,) * 4
    assert promote(store, other) == 4
    assert store.lookup(keys).tiers == (H,) * 4


# -- what is gone by then


def test_gone_from_the_device_is_loaded_from_elsewhere(store: kvtier.Store) -> None:
    """A device copy that was evicted after the plan is loaded from where the block still is."""
    keys = stored(store, 4)
    promote(store, keys)
    plan = store.plan(store.lookup(keys), way="load")
    leave_tier(store, keys.hashes[:2], D)
    leave_tier(store, keys.hashes[:1], H)
    back = bring_back(store, keys, plan=plan)
    assert (back.loaded, back.recomputed) == (4, [])
    seen = counters(store)
    assert [seen[f"loaded_blocks_{tier}"] for tier in (D, H, S)] == [2, 1, 1]


@pytest.mark.parametrize("way", ["load", "best"])
def test_gone_from_everywhere_is_a_hole(store: kvtier.Store, way: str) -> None:
    """A block that no tier has any more is recomputed."""
    keys = stored(store, 4)
    promote(store, keys)
    plan = store.plan(store.lookup(keys), way=way)
    for tier in (D, H, S):
        leave_tier(store, keys.hashes[1:2], tier)
    assert bring_back(store, keys, plan=plan).recomputed == [1]


@pytest.mark.parametrize("way", ["load", "best"])
def test_planned_from_below_and_only_on_the_device(store: kvtier.Store, way: str) -> None:
    """A block that only the device has when the restore begins is copied from there."""
    keys = stored(store, 4)
    plan = store.plan(store.lookup(keys), way=way)
    promote(store, keys)
    for tier in (H, S):
        leave_tier(store, keys.hashes[2:3], tier)
    back = bring_back(store, keys, plan=plan)
    assert (back.loaded, back.recomputed) == (4, [])
    assert counters(store)["loaded_blocks_device"] == 1


def test_a_block_that_only_the_device_has_can_be_put_again(store: kvtier.Store) -> None:
    """The device keeps nothing for good: a put brings the block to the other tiers."""
    keys = stored(store, 4)
    promote(store, keys)
    for tier in (H, S):
        leave_tier(store, keys.hashes, tier)
    assert put(store, keys) == kvtier.PutResult(4, 0, 0)
    leave_tier(store, keys.hashes, D)
    assert bring_back(store, keys).loaded == 4


def test_a_restart_forgets_the_device(store: kvtier.Store, open_store: Open) -> None:
    """The device's bytes die with the store; the SSD's do not."""
    keys = stored(store, 4)
    promote(store, keys)
    store.close()
    store = open_store(device_bytes=4 * SLOT_BYTES)
    assert store.lookup(keys).tiers == (S,) * 4
    assert promote(store, keys) == 4


# -- purged, damaged, another model's


def test_a_purge_reaches_the_device(store: kvtier.Store) -> None:
    """Purged blocks are found nowhere, and their slots are free."""
    keys = stored(store, 4)
    promote(store, keys)
    for tier in (H, S):
        leave_tier(store, keys.hashes[:2], tier)
    result = store.purge(tenant="")
    assert (result.blocks, result.left) == (4, 0)
    assert store.lookup(keys).stored == 0
    assert store.stats()["tiers"]["device"]["blocks"] == 0
    assert bring_back(store, keys).recomputed == [0, 1, 2, 3]


def test_a_purge_waits_for_the_device_too(store: kvtier.Store) -> None:
    """A device copy that a restore holds is purged once the restore lets go of it."""
    keys = stored(store, 4)
    promote(store, keys)
    slots = poisoned_slots(4)
    with store.restore(store.plan(store.lookup(keys)), into=slots):
        assert store.purge(tenant="", timeout=0.01).left == 4
        purging = in_thread(lambda: store.purge(tenant=""))
    assert purging().left == 0
    assert store.stats()["tiers"]["device"]["blocks"] == 0


def test_damage_below_does_not_reach_the_device(open_store: Open) -> None:
    """A record that is damaged afterwards is dropped; the verified copy above it stays right."""
    store = open_store(device_bytes=4 * SLOT_BYTES, host_bytes=0)
    keys = stored(store, 4)
    promote(store, keys)
    for path in segment_files(store.path):
        for offset in range(4096, 4096 + 4 * 12288, 12288):
            flip(path, offset + 5000)
    assert bring_back(store, keys).loaded == 4
    leave_tier(store, keys.hashes, D)
    assert bring_back(store, keys).recomputed == [0, 1, 2, 3]


@pytest.mark.parametrize("change", [{"weights": "sha256:1"}, {"dtype": "float64"}])
def test_other_weights_are_a_miss(store: kvtier.Store, open_store: Open, change: Any) -> None:
    """What was computed with other weights, or kept in another form, is not found."""
    keys = stored(store, 4)
    promote(store, keys)
    other = variant(**change)
    assert store.lookup(prompt_keys(4, spec=other)).stored == 0
    store.close()
    store = open_store(spec=other, device_bytes=8 * SLOT_BYTES)
    same_prompt = prompt_keys(4, spec=other)
    assert store.lookup(same_prompt).stored == 0
    assert promote(store, same_prompt) == 0


# -- what goes wrong


class Raising:
    """Slots that raise at one block."""

    def __init__(self, slots: kvtier.TensorSlots, at: int) -> None:
        self._slots = slots
        self._at = at
        self.layout = slots.layout
        self.device = slots.device

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Return the block's tensors, or raise."""
        if block == self._at:
            raise RuntimeError("the engine's own")
        return self._slots.parts(block)


@pytest.mark.parametrize("way", ["load", "best"])
def test_slots_that_raise(store: kvtier.Store, way: str) -> None:
    """The engine's exception comes out of next_step, as after a load, and nothing stays pinned."""
    keys = stored(store, 4)
    promote(store, keys)
    slots = Raising(poisoned_slots(4), at=2)
    with (
        store.restore(store.plan(store.lookup(keys), way=way), into=slots) as session,
        pytest.raises(RuntimeError, match="the engine's own"),
    ):
        session.next_step(WAIT_S)
    assert_sound(store)
    assert bring_back(store, keys).loaded == 4


def test_an_interrupt_while_copying_leaves_no_pin(store: kvtier.Store) -> None:
    """A scope that was not entered, because a signal came, holds nothing."""
    keys = stored(store, 4)
    promote(store, keys)

    class Interrupted(Raising):
        def parts(self, block: int) -> Sequence[torch.Tensor]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.restore(
            store.plan(store.lookup(keys)), into=Interrupted(poisoned_slots(4), 0)
        ).__enter__()
    assert store.stats()["pins"] == 0


class FailingPool(DevicePool):
    """A device that refuses copies."""

    def fill(self, slot: int, block: BlockId, payload: memoryview) -> None:
        """Refuse."""
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_device_that_fails_costs_a_hint() -> None:
    """A copy that fails leaves neither a slot nor a state behind, and is counted."""
    catalog, metrics = Catalog(Lru), Metrics()
    pool = FailingPool(BLOCK_BYTES, 2 * SLOT_BYTES, "cpu")
    promoter = Promoter(catalog, pool, metrics)
    record = record_of(1)
    row = catalog.begin(record.id, Tier.HOST, "write")
    catalog.commit(row, Tier.HOST, Location(0, 0, 0), pinned=True)
    for _ in range(3):
        assert promoter.promote(row, payload(record)) is False
    assert metrics.snapshot()["device_write_errors"] == 3
    assert catalog.state(row, Tier.DEVICE) is CopyState.ABSENT
    assert pool.usage().blocks == 0
    assert promoter.check() == []


def test_books_that_do_not_agree_are_noticed(store: kvtier.Store) -> None:
    """A slot that no block has is a fault that check finds."""
    slot = store._memory.pool.reserve()
    assert store.check() == ["device: 1 slots taken, 0 blocks ready and 0 loading"]
    store._memory.pool.release(slot)


def test_many_at_once(open_store: Open) -> None:
    """Hints, restores and purges at once on few slots: no wrong byte, and the books balance."""
    store = open_store(device_bytes=5 * SLOT_BYTES, host_bytes=6 * HOST_SLOT_BYTES)
    prompts = [stored(store, 4, seed) for seed in range(4)]

    def hint(keys: kvtier.BlockKeys) -> None:
        for _ in range(10):
            promote(store, keys)

    def restore(keys: kvtier.BlockKeys) -> None:
        for _ in range(10):
            bring_back(store, keys)

    work = [in_thread(lambda keys=keys: hint(keys)) for keys in prompts]
    work += [in_thread(lambda keys=keys: restore(keys)) for keys in prompts * 2]
    for each in work:
        each()
    store.purge(tenant="")
    assert store.stats()["tiers"]["device"]["blocks"] == 0
    assert counters(store)["loaded_blocks_device"] > 0


def test_changes_tell_of_the_device(store: kvtier.Store) -> None:
    """Who mirrors the residency learns what came to the device and what left it."""
    keys = stored(store, 2)
    before = store.changes().sequence
    promote(store, keys)
    came = store.changes(before)
    assert {digest: tiers for _, digest, tiers in came.blocks} == {
        keys[0]: (D, H, S),
        keys[1]: (D, H, S),
    }
    leave_tier(store, keys.hashes, D)
    left = store.changes(came.sequence)
    assert {tiers for _, _, tiers in left.blocks} == {(H, S)}


def test_a_reader_has_a_device_tier_of_its_own(store: kvtier.Store) -> None:
    """A reader promotes and restores from its own device memory, and a purge reaches that."""
    keys = stored(store, 4)
    with kvtier.open_reader(store.path, SPEC, device_bytes=4 * SLOT_BYTES) as reader:
        assert reader.prefetch(keys, tier="device").result(WAIT_S) == 4
        assert reader.lookup(keys).tiers == (D,) * 4
        assert bring_back(reader, keys).loaded == 4
        store.purge(tenant="")
        reader._follower.look()
        assert reader.lookup(keys).stored == 0
        assert reader.stats()["tiers"]["device"]["blocks"] == 0
        assert reader.check() == []


# -- against a model


class PoolModel(RuleBasedStateMachine):
    """A promoter against a list of blocks in the order of their use."""

    @initialize(slots=st.integers(0, 4))
    def start(self, slots: int) -> None:
        """Make a catalog of six blocks on the SSD, and a pool."""
        self.slots = slots
        self.catalog = Catalog(Lru)
        self.pool = DevicePool(BLOCK_BYTES, slots * SLOT_BYTES, "cpu")
        self.promoter = Promoter(self.catalog, self.pool, Metrics())
        self.keys = prompt_keys(6)
        self.rows = []
        for digest in self.keys.hashes:
            row = self.catalog.begin(BlockId(SPEC.namespace, digest), Tier.SSD, "write")
            self.catalog.commit(row, Tier.SSD, Location(0, row, 0), pinned=True)
            self.rows.append(row)
        self.order: list[int] = []
        self.pins: dict[int, int] = {}

    @rule(block=st.integers(0, 5))
    def promote(self, block: int) -> None:
        """Promote a block; the one used least recently that nobody holds makes room."""
        data = memoryview(bytearray(expected(self.keys, block)))
        there = self.promoter.promote(self.rows[block], data)
        if block not in self.order:
            if len(self.order) == self.slots:
                victim = next((b for b in self.order if not self.pins.get(b)), None)
                if victim is not None:
                    self.order.remove(victim)
            if len(self.order) < self.slots:
                self.order.append(block)
        assert there == (block in self.order)

    @rule(block=st.integers(0, 5))
    def touch(self, block: int) -> None:
        """Use a block."""
        self.catalog.touch(SPEC.namespace, [self.keys[block]], 1)
        if block in self.order:
            self.order.remove(block)
            self.order.append(block)

    @rule(block=st.integers(0, 5))
    def pin(self, block: int) -> None:
        """Hold a block on the device, if it is there."""
        took = self.catalog.pin(self.rows[block], Tier.DEVICE)
        assert took == (block in self.order)
        self.pins[block] = self.pins.get(block, 0) + took

    @rule(block=st.integers(0, 5))
    def unpin(self, block: int) -> None:
        """Let go of a block."""
        if self.pins.get(block):
            self.catalog.unpin(self.rows[block], Tier.DEVICE)
            self.pins[block] -= 1

    @rule(blocks=st.sets(st.integers(0, 5)))
    def purge(self, blocks: set[int]) -> None:
        """Purge blocks; those that somebody holds stay."""
        gone = [b for b in self.order if b in blocks and not self.pins.get(b)]
        purged = self.promoter.purge(lambda: [self.rows[b] for b in sorted(blocks)])
        assert {block.hash for block in purged} == {self.keys[b] for b in gone}
        self.order = [b for b in self.order if b not in gone]

    @rule(blocks=st.sets(st.integers(0, 5)))
    def place(self, blocks: set[int]) -> None:
        """Copy blocks out: exactly what is there arrives, bit for bit."""
        slots = poisoned_slots(6)
        names = [(b, BlockId(SPEC.namespace, self.keys[b])) for b in sorted(blocks)]
        placed = self.promoter.place(names, slots)
        assert placed == [b for b in sorted(blocks) if b in self.order]
        for block in range(6):
            if block in placed:
                assert is_right(slots, self.keys, block)
            else:
                assert read_slots(slots, block) == POISON

    @invariant()
    def same(self) -> None:
        """Both know the same, and the pool is within its bound."""
        if not hasattr(self, "rows"):
            return
        shown = self.catalog.residency(SPEC.namespace, self.keys.hashes, (Tier.DEVICE,))
        assert {b for b, tier in enumerate(shown) if tier} == set(self.order)
        assert self.pool.usage().blocks == len(self.order) <= self.slots
        assert [*self.promoter.check(), *self.catalog.check()] == []


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=30)
