from __future__ import annotations

import asyncio
import errno
import threading
import time
from typing import Any

import pytest
from support import (
    HOST_SLOT_BYTES,
    POISON,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    bring_back,
    eventually,
    filled_slots,
    flip,
    in_thread,
    poisoned_slots,
    prompt_keys,
    put,
    read_slots,
    segment_files,
)

import kvtier
from kvtier import Tier, TransferFailed
from kvtier.ticket import LoadTicket
from kvtier.tiers.base import BlockId

Open = Any


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a file system that fails on demand."""
    return FaultyFileSystem()


@pytest.fixture
def reopened(open_store: Open, fs: FaultyFileSystem) -> Any:
    """Return a function that stores prompts of six blocks and reopens the store without copies."""

    def reopen(prompts: int = 1, **own: Any) -> kvtier.Store:
        store = open_store(host_bytes=0)
        for seed in range(prompts):
            put(store, prompt_keys(6, seed))
        store.close()
        return open_store(fs=fs, **own)

    return reopen


def in_host(store: kvtier.Store, seed: int = 0) -> list[int]:
    """Return which of a prompt's blocks are in host memory."""
    tiers = store.lookup(prompt_keys(6, seed)).tiers
    return [block for block, tier in enumerate(tiers) if tier is Tier.HOST]


def test_a_prefetch_brings_blocks_to_host_memory(reopened: Any, fs: FaultyFileSystem) -> None:
    """After it the blocks are there, each read once, and nothing is pinned."""
    store = reopened()
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 6
    assert in_host(store) == list(range(6))
    assert fs.reads() == 6 + 1  # and the segment's own header, at open
    assert store.stats()["pins"] == 0


def test_what_is_there_is_not_read_again(reopened: Any, fs: FaultyFileSystem) -> None:
    """A second prefetch of the same prompt does nothing."""
    store = reopened()
    store.prefetch(prompt_keys(6)).result(WAIT_S)
    before = fs.reads()
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 0
    assert fs.reads() == before


def test_a_prefetch_of_nothing(reopened: Any) -> None:
    """A prompt that is not stored, or has no block, is prefetched at once."""
    store = reopened()
    assert store.prefetch(prompt_keys(4, seed=77)).result(WAIT_S) == 0
    assert store.prefetch(prompt_keys(0)).result(WAIT_S) == 0


def test_without_host_memory_nothing_is_prefetched(reopened: Any, fs: FaultyFileSystem) -> None:
    """With ``host_bytes=0`` there is nowhere to promote to, so nothing is read."""
    store = reopened(host_bytes=0)
    before = fs.reads()
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 0
    assert fs.reads() == before


def test_the_tail_is_kept_if_there_is_no_room_for_all(reopened: Any) -> None:
    """The head is what a plan recomputes, so the tail is what is promoted."""
    store = reopened(host_bytes=4 * HOST_SLOT_BYTES)
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 4
    assert in_host(store) == [2, 3, 4, 5]


def test_a_prefetch_replaces_older_copies(reopened: Any) -> None:
    """The most recent hint wins; host memory stays within its budget."""
    store = reopened(prompts=3, host_bytes=6 * HOST_SLOT_BYTES)
    for seed in range(3):
        assert store.prefetch(prompt_keys(6, seed)).result(WAIT_S) == 6
        assert in_host(store, seed) == list(range(6))
    assert store.stats()["tiers"]["host"]["ready"] == 6


def test_many_prefetches_at_once_all_end(reopened: Any) -> None:
    """Hints that host memory has no room for are declined and counted, and nobody waits for them.

    However many there are, what follows is loaded, and they leave nothing behind.
    """
    store = reopened(prompts=8, host_bytes=6 * HOST_SLOT_BYTES, slot_wait_s_max=2.0)
    transfers = [store.prefetch(prompt_keys(6, seed)) for seed in range(8)]
    found = [transfer.result(WAIT_S) for transfer in transfers]
    counters = store.stats()["counters"]
    assert found[0] == 6
    assert sum(found) == counters["prefetched_blocks"]
    assert sum(found) + counters["prefetch_declined_blocks"] == 48
    for seed in range(8):
        assert bring_back(store, prompt_keys(6, seed)).report.failed == 0
    assert store.stats()["prefetch"]["held_blocks"] == 0


def test_a_block_is_held_no_longer_than_its_own_read(reopened: Any, fs: FaultyFileSystem) -> None:
    """Blocks that a prefetch has brought are evictable although its last one is still on its way.

    Prefetches that hold on to what they have while they wait for slots would wait for each other.
    """
    store = reopened()
    gate = fs.hold("read", nth=6, name=".seg")
    transfer = store.prefetch(prompt_keys(6))
    gate.wait_reached()
    catalog = store._catalog
    try:
        with catalog.changed:
            assert catalog.changed.wait_for(lambda: catalog.ready(Tier.HOST) == 5, WAIT_S)
            assert catalog.changed.wait_for(lambda: not catalog.pins(Tier.HOST), 1.0)
    finally:
        gate.open()
    assert transfer.result(WAIT_S) == 6


def test_two_prefetches_read_once(reopened: Any, fs: FaultyFileSystem) -> None:
    """Whoever hints at a block that is being read joins that read."""
    store = reopened()
    before = fs.reads()
    gate = fs.hold("read", name=".seg")
    first = store.prefetch(prompt_keys(6))
    gate.wait_reached()
    second = store.prefetch(prompt_keys(6))
    gate.open()
    assert first.result(WAIT_S) == 6
    assert second.result(WAIT_S) <= 6
    assert fs.reads() - before == 6


def test_a_restore_joins_a_prefetch(reopened: Any, fs: FaultyFileSystem) -> None:
    """A restore of blocks that are being prefetched waits for those reads, not for new ones."""
    store = reopened()
    before = fs.reads()
    gate = fs.hold("read", name=".seg")
    transfer = store.prefetch(prompt_keys(6))
    gate.wait_reached()
    restoring = in_thread(lambda: bring_back(store, prompt_keys(6)))
    gate.open()
    assert restoring().loaded == 6
    assert transfer.result(WAIT_S) == 6
    assert fs.reads() - before == 6


def test_a_failed_read_costs_one_block(reopened: Any, fs: FaultyFileSystem) -> None:
    """A prefetch counts what arrived; what could not be read is left where it is or dropped."""
    store = reopened()
    fs.fail("open_file", errno.EMFILE, times=1, name=".seg")
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 5
    assert len(in_host(store)) == 5
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 1
    assert bring_back(store, prompt_keys(6)).loaded == 6


def test_a_damaged_block_is_not_prefetched(reopened: Any) -> None:
    """A damaged block never reaches host memory."""
    store = reopened()
    flip(segment_files(store.path)[0], 4096 + 4096 + 50)
    assert store.prefetch(prompt_keys(6)).result(WAIT_S) == 5
    assert store.lookup(prompt_keys(6)).stored == 5
    assert store.stats()["counters"]["damaged_blocks"] == 1


async def test_cancelling_a_waiter_leaves_the_prefetch(reopened: Any, fs: FaultyFileSystem) -> None:
    """A cancelled coroutine does not take the promotion back."""
    store = reopened()
    gate = fs.hold("read", name=".seg")
    transfer = store.prefetch(prompt_keys(6))

    async def wait() -> int:
        return await transfer

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    assert await transfer == 6
    assert in_host(store) == list(range(6))


def test_a_ticket_is_claimed_once() -> None:
    """Of the copy and the cancellation one wins."""
    block = BlockId(bytes(32), bytes(32))
    ticket = LoadTicket(block, Tier.SSD, poisoned_slots(1), 0, lambda position, error: None)
    assert ticket.claim()
    assert not ticket.claim()


def test_a_claimed_ticket_is_not_copied(reopened: Any) -> None:
    """A cancelled load writes nothing and answers nothing."""
    store = reopened()
    keys = prompt_keys(6)
    slots = poisoned_slots(6)
    answers: list[Any] = []
    name = BlockId(keys.namespace, keys[0])
    ticket = LoadTicket(name, Tier.SSD, slots, 0, lambda *answer: answers.append(answer))
    assert ticket.claim()
    store._prefetcher.load(ticket)
    store._prefetcher.close()
    assert answers == []
    assert read_slots(slots, 0) == POISON


def test_a_load_of_an_unknown_block_is_answered(reopened: Any) -> None:
    """A block that is nowhere is an error for its ticket alone."""
    store = reopened()
    answers: list[Any] = []
    name = BlockId(bytes(32), bytes(32))
    store._prefetcher.load(
        LoadTicket(name, Tier.SSD, poisoned_slots(1), 3, lambda *answer: answers.append(answer))
    )
    store._prefetcher.close()
    ((position, error),) = answers
    assert position == 3
    assert isinstance(error, TransferFailed)


def test_after_closing_everything_is_answered(reopened: Any) -> None:
    """What comes too late is answered at once: nobody waits for a loop that has ended."""
    store = reopened()
    prefetcher = store._prefetcher
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(TransferFailed):
        store.prefetch(prompt_keys(6)).result(WAIT_S)
    back = in_thread(lambda: bring_back(store, prompt_keys(6)))()
    assert back.recomputed == list(range(6))


def test_closing_waits_for_reads_under_way(reopened: Any, fs: FaultyFileSystem) -> None:
    """Reads that have begun end before close returns, and their transfers are answered."""
    store = reopened()
    gate = fs.hold("read", name=".seg")
    transfer = store.prefetch(prompt_keys(6))
    gate.wait_reached()
    closing = in_thread(store.close)
    gate.open()
    closing()
    assert transfer.done()


def test_a_rate_is_learned_once_per_transfer(reopened: Any) -> None:
    """What other tiers or other waiters brought is not put down to the SSD: one sample per read."""
    store = reopened(host_bytes="1MiB")
    keys = prompt_keys(4)
    before = store.costs
    plans = [store.plan(store.lookup(keys), way="load") for _ in range(2)]
    slots = [filled_slots(keys) for _ in range(2)]
    with store.restore(plans[0], into=slots[0]) as a, store.restore(plans[1], into=slots[1]) as b:
        assert a.next_step(WAIT_S) is None
        assert b.next_step(WAIT_S) is None
    reads = store.stats()["counters"]["ssd_read_blocks"]
    assert store.costs.ssd.samples - before.ssd.samples == reads
    assert store.costs.host.samples - before.host.samples == 8


# -- deadlines, bounds and the end, through the store


def test_a_prefetch_is_not_undone_by_the_next_puts(reopened: Any) -> None:
    """Until its deadline what it brought stays, whatever is put; puts go on meanwhile."""
    store = reopened(host_bytes=6 * HOST_SLOT_BYTES, slot_wait_s_max=WAIT_S, policy="lru")
    transfer = store.prefetch(prompt_keys(6), deadline_s=100.0)
    assert transfer.result(WAIT_S) == 6
    for seed in range(20, 24):
        assert put(store, prompt_keys(6, seed)).stored == 6
    store.flush()
    assert in_host(store) == list(range(6))
    assert all(store.lookup(prompt_keys(6, seed)).stored == 6 for seed in range(20, 24))
    assert bring_back(store, prompt_keys(6)).loaded == 6
    eventually(lambda: store.stats()["prefetch"]["held_blocks"] == 0)
    assert put(store, prompt_keys(6, 25)).stored == 6
    assert in_host(store) == []


def test_a_hint_that_was_taken_back_keeps_nothing(reopened: Any) -> None:
    """Its blocks are evictable again."""
    store = reopened(host_bytes=6 * HOST_SLOT_BYTES)
    transfer = store.prefetch(prompt_keys(6), deadline_s=100.0)
    assert transfer.result(WAIT_S) == 6
    transfer.cancel()
    eventually(lambda: store.stats()["pins"] == 0)
    put(store, prompt_keys(6, 20))
    assert in_host(store) == []


def test_a_purge_does_not_wait_for_what_is_kept(reopened: Any) -> None:
    """What a prefetch keeps for later is purged like everything else."""
    store = reopened()
    assert store.prefetch(prompt_keys(6), deadline_s=100.0).result(WAIT_S) == 6
    result = store.purge(namespace=SPEC.namespace)
    assert (result.blocks, result.left) == (6, 0)
    assert store.stats()["prefetch"]["held_blocks"] == 0


def test_a_prefetch_knows_no_deadline_that_is_none(reopened: Any) -> None:
    """What is no number of seconds is refused by name, and nothing is read."""
    store = reopened()
    with pytest.raises(ValueError, match="deadline_s"):
        store.prefetch(prompt_keys(6), deadline_s=-1)
    assert in_host(store) == []


def test_a_lane_that_fails_ends_a_prefetch(reopened: Any, fs: FaultyFileSystem) -> None:
    """What no disk raises fails the prefetch, then the next call: nobody waits, nothing is lost."""
    store = reopened()
    fs.fail("read", RuntimeError("a bug"), name=".seg", nth=3)
    with pytest.raises(TransferFailed, match="a bug"):
        store.prefetch(prompt_keys(6), deadline_s=100.0).result(WAIT_S)
    with pytest.raises(kvtier.StoreFailed, match="a bug"):
        store.prefetch(prompt_keys(6))


def test_closing_with_prefetches_queued(reopened: Any, fs: FaultyFileSystem) -> None:
    """Everybody is answered at once, whatever waits; what is being read ends first."""
    store = reopened(prompts=4, loads_inflight_max=1)
    gate = fs.hold("read", name=".seg")
    first = store.prefetch(prompt_keys(6, 0))
    gate.wait_reached()
    rest = [store.prefetch(prompt_keys(6, seed), deadline_s=100.0) for seed in range(1, 4)]
    closing = in_thread(store.close)
    for transfer in rest:
        with pytest.raises(TransferFailed, match="closing"):
            transfer.result(WAIT_S)
    gate.open()
    closing()
    assert first.done()


def test_64_restores_of_one_prefix_read_it_once(open_store: Open, fs: FaultyFileSystem) -> None:
    """8,192 tokens of 256-token blocks: 32 blocks, 32 reads, 64 times the right bytes."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(32)
    put(store, keys)
    store.close()
    store = open_store(fs=fs, host_bytes=32 * HOST_SLOT_BYTES)
    before = fs.reads()
    gate = fs.hold("read", name=".seg")
    restores = [in_thread(lambda: bring_back(store, keys).loaded) for _ in range(64)]
    gate.wait_reached()
    gate.open()
    assert [restore() for restore in restores] == [32] * 64
    assert fs.reads() - before == 32
    assert store.stats()["counters"]["ssd_read_blocks"] == 32


class CountingWrites(FaultyFileSystem):
    """Counts how many slots are being written at once, from ``count`` on."""

    def start(self) -> None:
        """Begin to count."""
        self.under_way = self.most = 0
        self.counting = threading.Lock()

    def write(self, fd: int, data: Any, offset: int) -> None:
        """Write, slowly enough for others to come."""
        if not hasattr(self, "counting") or not self._name(fd).endswith(".seg"):
            super().write(fd, data, offset)
            return
        with self.counting:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        super().write(fd, data, offset)
        time.sleep(0.002)
        with self.counting:
            self.under_way -= 1


@pytest.mark.parametrize("restoring", [False, True])
def test_writes_give_way_to_a_restore(open_store: Open, restoring: bool) -> None:  # noqa: FBT001
    """While a restore waits for a read, one slot is written at a time, and all are in the end."""
    fs = CountingWrites()
    store = open_store(host_bytes=0, fs=fs, writes_inflight_max=4)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    gate = fs.hold("read", name=".seg")
    back = in_thread(lambda: bring_back(store, keys)) if restoring else lambda: None
    if restoring:
        gate.wait_reached()
    fs.start()
    put(store, prompt_keys(60, seed=9))
    store.flush()
    assert store.lookup(prompt_keys(60, seed=9)).stored == 60
    assert fs.most == 1 if restoring else fs.most > 1
    gate.open()
    back()
    fs.start()
    put(store, prompt_keys(60, seed=10))
    store.flush()
    assert fs.most > 1


def test_an_idle_store_uses_no_cpu(open_store: Open, fs: FaultyFileSystem) -> None:
    """Nothing polls: in a second without work no thread of it, nor its child, wakes up."""
    store = open_store(fs=fs)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    assert store.prefetch(keys, deadline_s=1000.0).result(WAIT_S) == 0
    bring_back(store, keys)
    assert store._prefetcher.usage()["held_blocks"] == 0

    def wakes() -> dict[str, int]:
        threads = {
            each.name: each.native_id
            for each in threading.enumerate()
            if each.name.startswith("kvtier")
        }
        assert {name.rstrip("_0123456789") for name in threads} >= {"kvtier-loop", "kvtier-copy"}
        child = store._ssd._index._link._process.pid
        paths = {name: f"/proc/self/task/{tid}/status" for name, tid in threads.items()}
        paths["index"] = f"/proc/{child}/status"
        found = {}
        for name, path in paths.items():
            with open(path, encoding="ascii") as file:
                lines = dict(line.split(":", 1) for line in file)
            found[name] = int(lines["voluntary_ctxt_switches"])
        return found

    for _ in range(20):  # what the last calls left to do is soon over
        before = wakes()
        time.sleep(0.1)
        if wakes() == before:
            break
    time.sleep(1.0)
    assert wakes() == before
