from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    WAIT_S,
    FaultyFileSystem,
    Gate,
    bring_back,
    eventually,
    expected,
    faulty_index,
    filled_slots,
    flip,
    in_thread,
    prompt_keys,
    put,
    segment_files,
    tiny_budget,
)

import kvtier
from kvtier import PutResult, StoreClosed, Tier
from kvtier.catalog import CopyState
from kvtier.tiers.base import BlockId, ReadResult

Open = Any


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a file system that fails on demand."""
    return FaultyFileSystem()


def loading_row(store: kvtier.Store, keys: kvtier.BlockKeys, block: int = 0) -> int:
    """Bring a stored block into the state in which a read lane gets it."""
    catalog = store._catalog
    name = BlockId(keys.namespace, keys[block])
    row = catalog.find(name)
    assert catalog.pin(row, Tier.SSD)
    catalog.begin(name, Tier.HOST, "load")
    return row


# -- host slots


def test_a_slot_that_is_given_back_wakes_who_waits(open_store: Open) -> None:
    """Whoever waits for a slot gets the next one that is freed."""
    store = open_store(host_bytes=0, staging_blocks_max=2, loads_inflight_max=1)
    mover = store._mover
    slots = [mover.take_slot() for _ in range(2)]
    waiting = in_thread(mover.take_slot)
    mover.free_slot(slots[0])
    assert waiting() == slots[0]
    for slot in slots:
        mover.free_slot(slot)
    assert store.check() == []


def test_waiting_for_a_slot_has_an_end(open_store: Open) -> None:
    """With every slot held, the wait ends in None."""
    store = open_store(
        host_bytes=0, staging_blocks_max=2, loads_inflight_max=1, slot_wait_s_max=0.01
    )
    slots = [store._mover.take_slot() for _ in range(2)]
    assert store._mover.take_slot() is None
    for slot in slots:
        store._mover.free_slot(slot)


def test_an_unpinned_copy_wakes_who_waits(open_store: Open) -> None:
    """A host copy that becomes evictable makes room for whoever waits."""
    store = open_store(host_bytes=2 * HOST_SLOT_BYTES, staging_blocks_max=2, loads_inflight_max=1)
    keys = prompt_keys(2)
    put(store, keys)
    store.flush()
    mover = store._mover
    with store.pin(keys):
        slots = [mover.take_slot() for _ in range(2)]
        waiting = in_thread(mover.take_slot)
    third = waiting()
    assert third is not None
    for slot in [*slots, third]:
        mover.free_slot(slot)
    assert store.stats()["counters"]["evicted_blocks_host"] >= 1


def test_a_slot_is_given_back_once(open_store: Open) -> None:
    """A slot given back twice raises instead of being handed out twice."""
    store = open_store()
    slot = store._mover.take_slot()
    store._mover.free_slot(slot)
    with pytest.raises(ValueError, match="twice"):
        store._mover.free_slot(slot)


def test_host_memory_stays_within_its_budget(open_store: Open) -> None:
    """Staging is for copies in flight: at rest host memory holds no more than its budget."""
    store = open_store(host_bytes=3 * HOST_SLOT_BYTES)
    for seed in range(4):
        put(store, prompt_keys(5, seed))
        store.flush()
        usage = store.stats()["tiers"]["host"]
        assert usage["ready"] <= 3
        assert usage["used_bytes"] <= usage["limit_bytes"]


# -- loads


def test_a_load_leaves_a_pinned_copy(open_store: Open) -> None:
    """After a load the block is READY in host memory, pinned once, its bytes right."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(2)
    put(store, keys)
    store.flush()
    row = loading_row(store, keys)
    assert store._mover.load(row) is ReadResult.OK
    assert store._catalog.state(row, Tier.HOST) is CopyState.READY
    assert bytes(store._mover.payload(row)) == expected(keys, 0)
    store._catalog.unpin(row, Tier.SSD)
    store._mover.unpin_host(row)
    assert store._catalog.state(row, Tier.HOST) is CopyState.ABSENT


def test_a_damaged_block_is_dropped(open_store: Open) -> None:
    """A block that is gone for good leaves the catalog, the index and its slot."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(2)
    put(store, keys)
    store.flush()
    flip(segment_files(store.path)[0], 4096 + 10)
    row = loading_row(store, keys)
    assert store._mover.load(row) is ReadResult.GONE
    store._catalog.unpin(row, Tier.SSD)
    assert store.lookup(keys).tiers == (None, Tier.SSD)
    assert put(store, keys) == PutResult(1, 1, 0)
    store.flush()
    assert store.stats()["tiers"]["ssd"]["blocks"] == 2
    assert bring_back(store, keys).loaded == 2


def test_a_block_stored_anew_while_its_damaged_copy_goes(open_store: Open) -> None:
    """A put between the miss and the removal of the damaged copy is not removed with it."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(2)
    put(store, keys)
    store.flush()
    flip(segment_files(store.path)[0], 4096 + 10)
    writeback, catalog = store._writeback, store._catalog
    stored: list[PutResult] = []

    class Between:
        """The mover's condition, with a put before the read lane gets hold of it."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __enter__(self) -> Any:
            dropped = catalog.find(BlockId(keys.namespace, keys[0]))
            gone = dropped is None or catalog.state(dropped, Tier.SSD) is CopyState.ABSENT
            reading = threading.current_thread().name.startswith("kvtier-read")
            if reading and gone and not stored and not catalog.changed._is_owned():
                stored.append(PutResult(0, 0, 0))
                stored[0] = put(store, keys)
            return self._inner.__enter__()

        def __exit__(self, *error: object) -> Any:
            return self._inner.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    writeback._work = Between(writeback._work)
    bring_back(store, keys)
    store.flush()
    put(store, keys)
    store.flush()
    store.close()
    assert open_store(host_bytes=0).lookup(keys).stored == 2


def test_a_block_that_could_not_be_read_stays(open_store: Open, fs: FaultyFileSystem) -> None:
    """If the medium did not answer this time, the block is still there the next time."""
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(2)
    put(store, keys)
    store.flush()
    fs.fail("open_file", errno.EMFILE, times=1)
    row = loading_row(store, keys)
    assert store._mover.load(row) is ReadResult.FAILED
    store._catalog.unpin(row, Tier.SSD)
    assert store.lookup(keys).stored == 2
    assert bring_back(store, keys).loaded == 2


# -- puts


def test_a_batch_shares_its_syncs(open_store: Open, fs: FaultyFileSystem) -> None:
    """Blocks that queued up while the disk was busy are made durable by one sync, not one each."""
    store = open_store(fs=fs, write_batch_blocks_max=16)
    put(store, prompt_keys(1, seed=9))
    store.flush()
    gate = fs.hold("sync", name=".seg")
    first = store.put(prompt_keys(1), filled_slots(prompt_keys(1)))
    gate.wait_reached()
    before = fs.counts["sync"]
    keys = prompt_keys(16, seed=1)
    transfer = store.put(keys, filled_slots(keys))
    eventually(lambda: store._ssd.data_write_bytes == 18 * SLOT_BYTES)
    gate.open()
    assert first.result(WAIT_S).stored == 1
    assert transfer.result(WAIT_S).stored == 16
    assert fs.counts["sync"] - before == 1


def test_blocks_are_visible_only_when_they_are_there(
    open_store: Open, fs: FaultyFileSystem
) -> None:
    """While a block is being written it is shown in host memory, not on the SSD."""
    store = open_store(fs=fs)
    gate = fs.hold("sync", name=".seg")
    keys = prompt_keys(2)
    transfer = store.put(keys, filled_slots(keys))
    gate.wait_reached()
    assert transfer.released.wait(WAIT_S)
    assert store.lookup(keys).tiers == (Tier.HOST, Tier.HOST)
    assert not transfer.done()
    ssd = [
        store._catalog.state(store._catalog.find(BlockId(keys.namespace, digest)), Tier.SSD)
        for digest in keys
    ]
    assert ssd[0] is CopyState.WRITING
    assert CopyState.READY not in ssd
    assert bring_back(store, keys).loaded == 2
    gate.open()
    assert transfer.result(WAIT_S).stored == 2


def test_a_block_being_written_counts_as_present(open_store: Open, fs: FaultyFileSystem) -> None:
    """A second put of blocks that are on their way does not copy them again."""
    store = open_store(host_bytes=0, fs=fs)
    gate = fs.hold("write", name=".seg")
    keys = prompt_keys(3)
    first = store.put(keys, filled_slots(keys))
    gate.wait_reached()
    assert put(store, keys) == PutResult(0, 3, 0)
    gate.open()
    assert first.result(WAIT_S) == PutResult(3, 0, 0)


def test_puts_keep_their_order(open_store: Open) -> None:
    """Transfers of many puts all end, each with its own counts."""
    store = open_store(host_bytes=0)
    transfers = []
    for seed in range(20):
        keys = prompt_keys(1 + seed % 4, seed)
        transfers.append((len(keys), store.put(keys, filled_slots(keys))))
    for count, transfer in transfers:
        assert transfer.result(WAIT_S) == PutResult(count, 0, 0)
        assert transfer.released.is_set()


def test_nothing_is_accepted_once_closing(open_store: Open) -> None:
    """A put that comes while the store closes raises StoreClosed and leaves no row behind."""
    store = open_store()
    store._writeback.close()
    keys = prompt_keys(3)
    with pytest.raises(StoreClosed):
        store.put(keys, filled_slots(keys))
    assert store.lookup(keys).stored == 0
    assert store._catalog.find(BlockId(keys.namespace, keys[0])) is None
    store._writeback._closing = False  # so that the fixture's flush does not wait for a closed lane
    assert store.check() == []


def test_what_is_queued_at_the_end_is_dropped(open_store: Open, fs: FaultyFileSystem) -> None:
    """Closing the lanes answers every transfer: written, or dropped."""
    store = open_store(host_bytes=0, fs=fs, write_batch_blocks_max=1)
    gate = fs.hold("write", name=".seg")
    transfers = []
    for seed in range(4):
        keys = prompt_keys(2, seed)
        transfers.append(store.put(keys, filled_slots(keys)))
    gate.wait_reached()
    closing = in_thread(store._writeback.close)
    gate.open()
    closing()
    results = [transfer.result(WAIT_S) for transfer in transfers]
    assert all(result.stored + result.dropped == 2 for result in results)
    counters = store.stats()["counters"]
    assert counters["put_blocks_stored"] == sum(result.stored for result in results)
    assert counters["put_blocks_dropped"] == sum(result.dropped for result in results)
    store._prefetcher.close()
    store._failure = store._failure or StoreClosed("closed by hand")
    store.close()


def test_eviction_frees_slots_only_after_its_commit(open_store: Open, fs: FaultyFileSystem) -> None:
    """A slot is not written over before the removal of its block is durable."""
    store = open_store(host_bytes=0, fs=fs, **tiny_budget(8, per_segment=8))
    for seed in range(6):
        put(store, prompt_keys(4, seed))
    store.flush()
    assert store.stats()["counters"]["evicted_blocks_ssd"] > 0
    gate = Gate()
    index = faulty_index(store, gate)
    before = fs.counts["write"]
    keys = prompt_keys(4, seed=50)
    transfer = store.put(keys, filled_slots(keys))
    gate.wait_reached()
    assert transfer.released.wait(WAIT_S)
    assert fs.counts["write"] == before
    gate.open()
    assert transfer.result(WAIT_S).stored == 4
    assert index.commits >= 2
    assert bring_back(store, keys).loaded == 4


def test_a_spec_of_one_byte_blocks(open_store: Open) -> None:
    """The smallest block there can be goes all the way."""
    spec = kvtier.KVSpec(
        model="m", weights="w", dtype="uint8", layers=1, kv_heads=1, head_dim=1, block_tokens=1
    )
    store = open_store(spec=spec, host_bytes=0)
    keys = prompt_keys(20, spec=spec)
    assert put(store, keys).stored == 20
    assert bring_back(store, keys).loaded == 20
