"""Writing on demotion, and the relief of host memory between its two marks."""

from __future__ import annotations

import errno
import logging
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    WAIT_S,
    FaultyFileSystem,
    bring_back,
    eventually,
    expected,
    faulty_index,
    filled_slots,
    in_thread,
    prompt_keys,
    put,
    tiny_budget,
)

import kvtier
from kvtier import PutResult, StoreFailed, Tier, TransferFailed
from kvtier.config import POLICIES
from kvtier.mover import Unsaved
from kvtier.tiers.base import BlockId

if TYPE_CHECKING:
    from pathlib import Path

    from support import Gate

Open = Any
HOST_BLOCKS = 8


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a file system that fails on demand."""
    return FaultyFileSystem()


@pytest.fixture
def demoting(open_store: Open) -> Open:
    """Open stores that write on demotion, with room for 8 blocks in host memory."""

    def open_one(**own: Any) -> kvtier.Store:
        usual = {"write_policy": "demote", "host_bytes": HOST_BLOCKS * HOST_SLOT_BYTES}
        return open_store(**{**usual, **own})

    return open_one


def counters(store: kvtier.Store) -> dict[str, int]:
    """Return the store's counters."""
    return store.stats()["counters"]


def host(store: kvtier.Store) -> dict[str, int]:
    """Return how full host memory is."""
    return store.stats()["tiers"]["host"]


def is_relieved(store: kvtier.Store) -> bool:
    """Whether host memory is within its budget and nothing is being demoted."""
    return host(store)["ready"] <= HOST_BLOCKS and not store._demoter._writing


def on_ssd(store: kvtier.Store, keys: kvtier.BlockKeys) -> list[int]:
    """Return the blocks of a prompt that have a copy on the SSD, wherever else they are."""
    places = store._catalog.places(keys.namespace, keys.hashes)
    return [block for block, where in enumerate(places) if where is not None]


def stored(store: kvtier.Store, prompts: list[kvtier.BlockKeys]) -> int:
    """Return how many blocks of some prompts are found in any tier."""
    return sum(store.lookup(keys).stored for keys in prompts)


# -- when blocks are written


def test_a_put_stays_in_host_memory(demoting: Open, fs: FaultyFileSystem) -> None:
    """As long as host memory holds it, a put costs no write."""
    store = demoting(fs=fs)
    keys = prompt_keys(6)
    assert put(store, keys) == PutResult(6, 0, 0)
    assert store.lookup(keys).tiers == (Tier.HOST,) * 6
    assert fs.counts["write .seg"] == counters(store)["ssd_written_blocks"] == 0
    assert host(store)["unsaved"] == 6
    assert bring_back(store, keys).loaded == 6


def test_a_flush_writes_what_is_only_in_host(demoting: Open, open_store: Open) -> None:
    """After a flush the next process finds every block; the copies in host memory stay."""
    store = demoting()
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    assert on_ssd(store, keys) == list(range(6))
    assert store.lookup(keys).tiers == (Tier.HOST,) * 6
    assert host(store)["unsaved"] == 0
    copy = store.path + "-copy"
    shutil.copytree(store.path, copy)  # as a crash right after the flush would leave it
    assert bring_back(open_store(path=copy), keys).loaded == 6


def test_a_close_writes_what_is_only_in_host(demoting: Open) -> None:
    """A store that is closed and opened again has lost nothing."""
    store = demoting()
    put(store, prompt_keys(6))
    store.close()
    assert bring_back(demoting(), prompt_keys(6)).loaded == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_what_host_memory_lets_go_of_is_written(demoting: Open, policy: str) -> None:
    """Blocks beyond the host tier reach the SSD by themselves; none is lost."""
    store = demoting(policy=policy)
    prompts = [prompt_keys(6, seed) for seed in range(6)]
    for keys in prompts:
        assert put(store, keys).stored == 6
        assert host(store)["used_bytes"] <= (HOST_BLOCKS + 8) * HOST_SLOT_BYTES
    eventually(lambda: is_relieved(store))
    assert stored(store, prompts) == 36
    assert counters(store)["lost_blocks_host"] == 0
    assert counters(store)["ssd_written_blocks"] == 36 - host(store)["unsaved"]
    for keys in prompts:
        assert bring_back(store, keys).loaded == 6


def test_a_block_is_written_once(demoting: Open) -> None:
    """What was written and comes back to host memory goes again without a write."""
    store = demoting()
    prompts = [prompt_keys(6, seed) for seed in range(4)]
    for keys in prompts:
        put(store, keys)
    for _ in range(3):
        for keys in prompts:
            assert bring_back(store, keys).loaded == 6
    store.flush()
    assert counters(store)["ssd_written_blocks"] == 24


def test_a_flush_does_not_bring_back_what_the_ssd_evicted(demoting: Open) -> None:
    """A block that the SSD had and evicted is not written by every flush from then on."""
    store = demoting(host_bytes=20 * HOST_SLOT_BYTES, **tiny_budget(8, per_segment=4))
    for seed in range(3):
        put(store, prompt_keys(6, seed))
        store.flush()
    assert on_ssd(store, prompt_keys(6, 0)) == []
    assert counters(store)["ssd_written_blocks"] == 18
    store.flush()
    assert counters(store)["ssd_written_blocks"] == 18


def test_a_block_put_again_after_its_eviction_is_saved_again(demoting: Open) -> None:
    """A block that is in host memory alone because the SSD evicted it is durable once put anew."""
    store = demoting(host_bytes=20 * HOST_SLOT_BYTES, **tiny_budget(8, per_segment=4))
    for seed in range(3):
        put(store, prompt_keys(6, seed))
        store.flush()
    assert on_ssd(store, prompt_keys(6, 0)) == []
    assert put(store, prompt_keys(6, 0)) == PutResult(0, 6, 0)
    store.flush()
    assert on_ssd(store, prompt_keys(6, 0)) == list(range(6))


def test_without_host_memory_there_is_nothing_to_demote(
    open_store: Open, store_path: str, tmp_path: Path
) -> None:
    """Demotion with a host tier that holds no block is refused by name, before anything is made."""
    for nbytes in (0, HOST_SLOT_BYTES - 1):
        with pytest.raises(ValueError, match=f"host_bytes.*{HOST_SLOT_BYTES}.*write_policy"):
            open_store(write_policy="demote", host_bytes=nbytes)
    assert list(tmp_path.iterdir()) == []
    assert store_path


def test_without_an_ssd_host_memory_is_all_there_is(demoting: Open) -> None:
    """With ssd_bytes=0 what host memory lets go of is lost, counted, and holds nothing up."""
    store = demoting(ssd_bytes=0)
    for seed in range(5):
        assert put(store, prompt_keys(6, seed)).stored == 6
    store.flush()
    eventually(lambda: is_relieved(store))
    assert host(store)["ready"] == HOST_BLOCKS
    assert counters(store)["lost_blocks_host"] == 30 - HOST_BLOCKS


# -- never neither


def test_a_block_is_in_host_until_it_is_durable(demoting: Open, fs: FaultyFileSystem) -> None:
    """While its write is under way a demoted block is found, pinned, in host memory."""
    store = demoting(fs=fs)
    gate = fs.hold("sync", name=".seg")
    prompts = [prompt_keys(6, seed) for seed in range(2)]
    for keys in prompts:
        put(store, keys)
    gate.wait_reached()
    pinned = store._catalog.pins(Tier.HOST)
    assert pinned == 12 - HOST_BLOCKS
    assert [store.lookup(keys).tiers for keys in prompts] == [(Tier.HOST,) * 6] * 2
    assert bring_back(store, prompts[0]).loaded == 6
    gate.open()
    eventually(lambda: is_relieved(store))
    assert stored(store, prompts) == 12


def test_no_instant_shows_a_block_nowhere(demoting: Open) -> None:
    """Of all changes that demotion makes, none takes a block out of every tier."""
    store = demoting()
    since = store.changes(0).sequence
    prompts = [prompt_keys(6, seed) for seed in range(6)]
    for keys in prompts:
        put(store, keys)
    store.flush()
    eventually(lambda: is_relieved(store))
    log = store._catalog._changes
    seen = list(log.since(since).blocks)
    assert len({digest for _, digest, _ in seen}) == 36
    gone = [digest for _, digest, tiers in seen if tiers == ()]
    assert gone == []


@pytest.mark.parametrize("where", ["write", "sync", "commit"])
def test_a_crash_before_the_durable_write(
    demoting: Open, open_store: Open, fs: FaultyFileSystem, where: str
) -> None:
    """Stopped between decision and commit: the host copy is there, and no wrong byte on disk."""
    store = demoting(fs=fs)
    first = prompt_keys(6, seed=1)
    put(store, first)
    store.flush()
    gate = _hold(store, fs, where)
    prompts = [prompt_keys(6, seed) for seed in (2, 3)]
    for keys in prompts:
        put(store, keys)
    gate.wait_reached()
    assert stored(store, [first, *prompts]) == 18
    copy = store.path + "-copy"
    shutil.copytree(store.path, copy)
    gate.open()
    after = open_store(path=copy)
    assert bring_back(after, first).loaded == 6  # a flush had confirmed it
    for keys in prompts:
        bring_back(after, keys)  # whatever is found has its own bytes


def _hold(store: kvtier.Store, fs: FaultyFileSystem, where: str) -> Gate:
    from support import Gate

    if where != "commit":
        return fs.hold(where, name=".seg")
    gate = Gate()
    faulty_index(store, gate)
    return gate


# -- disks that fail


@pytest.mark.parametrize(
    ("operation", "error"),
    [("write", errno.ENOSPC), ("write", errno.EIO), ("sync", errno.EIO), ("create", errno.ENOSPC)],
)
def test_a_failing_disk_does_not_fill_host_memory(
    demoting: Open, fs: FaultyFileSystem, operation: str, error: int
) -> None:
    """What the disk refuses goes and is counted; puts go on, and reach the disk once it is well."""
    store = demoting(fs=fs)
    fs.fail(operation, error, name=".seg")
    for seed in range(6):
        assert put(store, prompt_keys(6, seed)) == PutResult(6, 0, 0)
    eventually(lambda: is_relieved(store))
    assert counters(store)["lost_blocks_host"] == 36 - HOST_BLOCKS
    assert counters(store)["ssd_write_errors"] > 0
    kept = host(store)["ready"]
    fs.heal()
    store.flush()
    assert store.stats()["tiers"]["ssd"]["blocks"] == kept


def test_a_flush_offers_again_what_was_refused(demoting: Open, fs: FaultyFileSystem) -> None:
    """A block that a flush could not write stays in host memory, and the next flush writes it."""
    store = demoting(fs=fs)
    keys = prompt_keys(4)
    put(store, keys)
    fs.fail("write", errno.EIO, name=".seg")
    store.flush()
    assert on_ssd(store, keys) == []
    assert store.lookup(keys).tiers == (Tier.HOST,) * 4
    fs.heal()
    store.flush()
    assert on_ssd(store, keys) == list(range(4))


def test_a_hanging_disk_holds_nobody_up(demoting: Open, fs: FaultyFileSystem) -> None:
    """Puts end in time, dropped and counted; what is in host memory is served; then all is well."""
    store = demoting(fs=fs, slot_wait_s_max=0.05)
    gate = fs.hold("write", name=".seg")
    results = {seed: put(store, prompt_keys(4, seed)) for seed in range(6)}
    assert sum(result.dropped for result in results.values()) == 24 - HOST_BLOCKS - 8
    assert counters(store)["put_blocks_dropped"] == 24 - HOST_BLOCKS - 8
    prompts = [prompt_keys(4, seed) for seed in results]
    held = stored(store, prompts)
    assert held == HOST_BLOCKS + 8
    assert bring_back(store, prompt_keys(4, 0)).loaded == 4
    with pytest.raises(TransferFailed, match=f"{held} blocks"):
        store.flush(0.05)
    gate.open()
    store.flush()
    assert stored(store, prompts) == held
    assert store.stats()["tiers"]["ssd"]["blocks"] == held


def test_writes_of_a_flush_are_bounded(demoting: Open, fs: FaultyFileSystem) -> None:
    """However much is in host memory, only so many blocks are handed to the writer at once."""
    store = demoting(fs=fs, host_bytes=40 * HOST_SLOT_BYTES, write_batch_blocks_max=2)
    for seed in range(4):
        put(store, prompt_keys(8, seed))
    gate = fs.hold("write", name=".seg")
    flushing = in_thread(store.flush)
    gate.wait_reached()
    eventually(lambda: len(store._demoter._writing) == 4)
    assert store._catalog.pins(Tier.HOST) == 4
    gate.open()
    flushing()
    assert store.stats()["tiers"]["ssd"]["blocks"] == 32


def test_a_close_during_demotion_finishes_it(demoting: Open, fs: FaultyFileSystem) -> None:
    """A store that is closed while it demotes ends in good order and has every block."""
    store = demoting(fs=fs)
    prompts = [prompt_keys(6, seed) for seed in range(2)]
    gate = fs.hold("write", name=".seg")
    for keys in prompts:
        put(store, keys)
    gate.wait_reached()
    closing = in_thread(store.close)
    gate.open()
    closing()
    store = demoting()
    assert [bring_back(store, keys).loaded for keys in prompts] == [6, 6]


def test_a_close_that_runs_out_of_time(
    demoting: Open, fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """close() ends after close_s_max, and says how many blocks it did not write."""
    store = demoting(fs=fs, close_s_max=0.05)
    gate = fs.hold("write", name=".seg")
    put(store, prompt_keys(6))
    with caplog.at_level(logging.WARNING):
        closing = in_thread(store.close)
        gate.wait_reached()
        eventually(lambda: "closed with 6 blocks not written" in caplog.text)
        gate.open()
        closing()


def test_a_lane_that_dies_wakes_a_flush(demoting: Open) -> None:
    """A flush under way ends with the failure instead of waiting for an answer."""
    store = demoting()
    put(store, prompt_keys(6))
    faulty_index(store).error = RuntimeError("a fault of our own")
    flushing = in_thread(store.flush)  # which fails the test if it does not come back
    with pytest.raises(StoreFailed, match="a fault of our own"):
        flushing()


# -- what is asked for again


def declining(demoting: Open, **own: Any) -> kvtier.Store:
    """Return a store whose write budget is short: only what is asked for twice is written."""
    store = demoting(ssd_write_bytes_per_day=40 * SLOT_BYTES, **own)
    store._budget.spend(31 * SLOT_BYTES)
    return store


def test_a_short_budget_declines_what_came_once(demoting: Open) -> None:
    """A block that was put once and never used is let go of without a write, and counted."""
    store = declining(demoting)
    prompts = [prompt_keys(6, seed) for seed in range(3)]
    for keys in prompts:
        put(store, keys)
    eventually(lambda: is_relieved(store))
    lost = 18 - HOST_BLOCKS
    assert counters(store)["ssd_declined_blocks"] == counters(store)["lost_blocks_host"] == lost
    assert counters(store)["ssd_written_blocks"] == 0


@pytest.mark.parametrize("how", ["put", "restored"])
def test_a_short_budget_writes_what_was_asked_for_again(demoting: Open, how: str) -> None:
    """A second put, or a restore, of a block in host memory counts as a second access."""
    store = declining(demoting)
    twice = prompt_keys(4)
    put(store, twice)
    if how == "put":
        assert put(store, twice) == PutResult(0, 4, 0)
    else:
        bring_back(store, twice)
    for seed in (1, 2):
        put(store, prompt_keys(8, seed))
    store.flush()  # whichever of them host memory let go of before
    assert on_ssd(store, twice) == list(range(4))
    assert counters(store)["ssd_written_blocks"] == 4


# -- purge


def test_a_purge_of_host_memory_writes_nothing(demoting: Open) -> None:
    """What is only in host memory is gone after a purge, and never was on the disk."""
    store = demoting()
    put(store, prompt_keys(6))
    assert store.purge(tenant="").blocks == 6
    assert store.lookup(prompt_keys(6)).stored == 0
    assert counters(store)["ssd_written_blocks"] == 0
    assert host(store)["unsaved"] == 0
    store.close()
    assert demoting().lookup(prompt_keys(6)).stored == 0


def test_a_purge_reaches_what_is_being_demoted(demoting: Open, fs: FaultyFileSystem) -> None:
    """A demotion under way while a purge runs does not bring its block back."""
    store = demoting(fs=fs)
    prompts = [prompt_keys(6, seed) for seed in range(2)]
    gate = fs.hold("sync", name=".seg")
    for keys in prompts:
        put(store, keys)
    gate.wait_reached()
    purging = in_thread(lambda: store.purge(tenant=""))
    gate.open()
    assert purging().left == 0
    store.close()
    assert stored(demoting(), prompts) == 0


# -- between the marks


@pytest.mark.parametrize("policy", ["through", "demote"])
def test_host_memory_is_relieved_to_the_low_mark(open_store: Open, policy: str) -> None:
    """Above the high mark copies go, in the background, down to the low mark and no further."""
    store = open_store(
        write_policy=policy,
        host_bytes=20 * HOST_SLOT_BYTES,
        host_high_water=0.8,
        host_low_water=0.5,
    )
    put(store, prompt_keys(16, seed=1))
    store.flush()
    assert host(store)["ready"] == 16
    assert counters(store)["evicted_blocks_host"] == 0
    put(store, prompt_keys(1, seed=2))
    eventually(lambda: host(store)["ready"] <= 10)
    store.flush()
    assert host(store)["ready"] == 10
    assert counters(store)["evicted_blocks_host"] == 7
    assert stored(store, [prompt_keys(16, seed=1), prompt_keys(1, seed=2)]) == 17


def test_a_put_after_relief_finds_free_slots(open_store: Open, fs: FaultyFileSystem) -> None:
    """A put that fits between low mark and budget waits for no write: a dead disk goes unseen."""
    store = open_store(
        write_policy="demote",
        host_bytes=20 * HOST_SLOT_BYTES,
        host_high_water=0.8,
        host_low_water=0.5,
        fs=fs,
    )
    put(store, prompt_keys(17, seed=1))
    eventually(lambda: host(store)["ready"] == 10)
    gate = fs.hold("write", name=".seg")
    assert put(store, prompt_keys(10, seed=2)) == PutResult(10, 0, 0)
    gate.open()


def test_pinned_copies_stay_whatever_the_marks_say(open_store: Open) -> None:
    """Relief passes over what is pinned and takes what is not."""
    store = open_store(host_bytes=20 * HOST_SLOT_BYTES, host_high_water=0.5, host_low_water=0.1)
    kept = prompt_keys(8, seed=1)
    put(store, kept)
    store.flush()
    with store.pin(kept):
        put(store, prompt_keys(6, seed=2))
        store.flush()
        eventually(lambda: host(store)["ready"] == 8)
        assert store.lookup(kept).tiers == (Tier.HOST,) * 8
        put(store, prompt_keys(3, seed=3))
        store.flush()
        assert store.lookup(kept).tiers == (Tier.HOST,) * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a_burst_larger_than_host_memory_goes_at_the_disks_speed(
    demoting: Open, policy: str
) -> None:
    """One put of many times the host tier is stored whole: it waits, within its bound."""
    store = demoting(policy=policy)
    keys = prompt_keys(80)
    assert put(store, keys) == PutResult(80, 0, 0)
    eventually(lambda: is_relieved(store))
    assert bring_back(store, keys).loaded == 80
    assert counters(store)["lost_blocks_host"] == 0


# -- the mover's side


def test_who_waits_for_a_slot_gets_one_that_needs_no_write(
    demoting: Open, fs: FaultyFileSystem
) -> None:
    """With the disk busy, a copy that the SSD has goes before an older one that it has not."""
    store = demoting(fs=fs, staging_blocks_max=5)
    put(store, prompt_keys(4, seed=1))
    saved = prompt_keys(4, seed=2)
    put(store, saved)
    for row, unsaved in store._mover.unsaved().items():
        if unsaved.record.id.hash in saved.hashes:
            store._demoter._save(row, unsaved)
    eventually(lambda: not store._demoter._writing)
    gate = fs.hold("write", name=".seg")
    put(store, prompt_keys(5, seed=3))
    gate.wait_reached()
    assert put(store, prompt_keys(1, seed=4)) == PutResult(1, 0, 0)
    assert store.lookup(prompt_keys(4, seed=1)).tiers == (Tier.HOST,) * 4
    assert Tier.SSD in store.lookup(saved).tiers
    gate.open()


def test_an_answer_for_a_row_that_is_another_block_now(demoting: Open) -> None:
    """What is saved is told by the copy, not by its row: a stale snapshot begins no write."""
    store = demoting()
    keys = prompt_keys(1)
    put(store, keys)
    row = store._catalog.find(BlockId(keys.namespace, keys[0]))
    (old,) = store._mover.unsaved().values()
    store._mover.unsave(row, Unsaved(old.record, recomputed=True))
    store._demoter._save(row, old)
    assert store._demoter._writing == set()
    assert bytes(store._mover.payload(row)) == expected(keys, 0)


def test_books_of_unsaved_copies_are_checked(demoting: Open) -> None:
    """A row that is to be written although it has no host copy is reported."""
    store = demoting()
    put(store, prompt_keys(1))
    ((row, unsaved),) = store._mover.unsaved().items()
    store.flush()
    store._mover.purge_host(lambda: [row])
    store._mover.unsave(row, unsaved)
    assert any("not READY" in problem for problem in store._mover.check())
    store._mover._unsaved.clear()
    store._failure = RuntimeError("its books were bent")


def test_puts_through_keep_nothing_to_be_written(open_store: Open) -> None:
    """With write-through a host copy may always go: its block has been offered to the SSD."""
    store = open_store()
    source = filled_slots(prompt_keys(4))
    store.put(prompt_keys(4), source).result(WAIT_S)
    assert host(store)["unsaved"] == 0


# -- retention


def test_a_demoted_record_carries_the_retention_as_it_is_then(demoting: Open) -> None:
    """What was raised after the put is what is written, and what the next process finds."""
    store = demoting()
    keys = prompt_keys(3)
    put(store, keys)
    assert put(store, keys, retention=kvtier.Retention(priority=5)).present == 3
    put(store, keys)
    store.close()
    catalog = demoting()._catalog
    rows = [catalog.find(BlockId(keys.namespace, digest)) for digest in keys]
    assert [catalog.retention(row) for row in rows] == [(5, 0)] * 3


def test_what_has_expired_goes_without_a_write(demoting: Open) -> None:
    """A block past its time is worth no write: not when host memory is full, nor on a flush."""
    store = demoting()
    keys = prompt_keys(4)
    put(store, keys, retention=kvtier.Retention(ttl_s=0.001))
    eventually(lambda: store.lookup(keys).stored == 0)
    store.flush()
    assert counters(store)["ssd_written_blocks"] == 0
    lasting = [prompt_keys(4, seed) for seed in (1, 2)]
    for each in lasting:
        put(store, each)
    eventually(lambda: is_relieved(store))
    assert counters(store)["ssd_written_blocks"] == 0
    assert stored(store, lasting) == 8


def test_priority_is_written_from_a_short_budget(demoting: Open) -> None:
    """A put with priority is written although nobody asked for its blocks again."""
    store = declining(demoting)
    put(store, prompt_keys(2, 1))
    put(store, prompt_keys(2, 2), retention=kvtier.Retention(priority=1))
    store.flush()
    assert on_ssd(store, prompt_keys(2, 1)) == []
    assert on_ssd(store, prompt_keys(2, 2)) == [0, 1]


def test_without_a_host_tier_restores_do_not_wake_the_lane(open_store: Open) -> None:
    """Copies in passing are let go by who used them: there is nothing to relieve."""
    with open_store(host_bytes=0) as store:
        keys = prompt_keys(4, seed=1)
        put(store, keys)
        store.flush()
        store._demoter.stop()  # a nudge stays where nobody takes it
        store._demoter._nudged = False
        bring_back(store, keys)
        assert not store._demoter._nudged
