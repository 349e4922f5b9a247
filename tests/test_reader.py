from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import (
    HOST_SLOT_BYTES,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    Gate,
    bring_back,
    eventually,
    flip,
    in_thread,
    poisoned_slots,
    prompt_keys,
    put,
    record_of,
    run_python,
    segment_files,
    tiny_budget,
    variant,
)

import kvtier
from kvtier import FormatError, StoreClosed, StoreFailed, Tier
from kvtier import follower as follower_module
from kvtier.catalog import Catalog
from kvtier.config import StoreConfig
from kvtier.follower import IN_USE_S, RETRY_S_MAX, Follower
from kvtier.policy import Lru
from kvtier.reader import StoreReader
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import entry_of, table
from kvtier.tiers.index import Changes, LmdbIndexReader
from kvtier.tiers.keeper import CHANGES_KEPT, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tiers.entries import Entries

Open = Any
HEADER_BYTES = 4096


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


class CountedIndex:
    """The real index, which counts what it is asked."""

    def __init__(self, path: str) -> None:
        self.inner = LmdbIndexReader(path)
        self.requests = 0

    def snapshot(self) -> tuple[int, Entries]:
        """Return all entries."""
        self.requests += 1
        return self.inner.snapshot()

    def since(self, sequence: int) -> Changes | None:
        """Return what changed."""
        self.requests += 1
        return self.inner.since(sequence)

    def close(self) -> None:
        """Close it."""
        self.inner.close()


@pytest.fixture
def open_reader(store_path: str) -> Iterator[Callable[..., StoreReader]]:
    """Open readers of the tiny spec; they must be sound in the end, then are closed."""
    opened: list[StoreReader] = []

    def open_one(path: str = store_path, spec: kvtier.KVSpec = SPEC, **own: Any) -> StoreReader:
        opened.append(kvtier.open_reader(path, spec, **{"host_bytes": "1MiB", **own}))
        return opened[-1]

    yield open_one
    for reader in opened:
        problems = [] if reader._closed else reader.check()
        reader.close()
        assert problems == []


def reader_with(path: str, clock: Callable[[], float], index: Any = None, **own: Any) -> Any:
    """Open a reader with seams: its clock and its index."""
    config = StoreConfig(**{"host_bytes": 1 << 20, "ssd_bytes": 0, **own})
    return StoreReader(path, SPEC, config, "cpu", {}, clock=clock, index=index)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that happens by itself; the deadline is a safety net."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"within {WAIT_S} s: {what}"
        pause.wait(0.01)


def wait_for(reader: kvtier.StoreReader, keys: kvtier.BlockKeys, stored: int) -> None:
    """Look a prompt up until so many of its blocks are found."""
    until(lambda: reader.lookup(keys).stored == stored, f"{stored} blocks are found")


def durable(store: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """Store a prompt's known bytes on the SSD."""
    put(store, keys)
    store.flush()


def ssd(reader: kvtier.StoreReader) -> dict[str, Any]:
    """Return what a reader says of the SSD."""
    return dict(reader.stats()["tiers"]["ssd"])


def counter(reader: kvtier.StoreReader, name: str) -> int:
    """Return a counter of a reader."""
    return int(reader.stats()["counters"][name])


def move(store: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """Store a prompt again in other slots: it is evicted, its slots go to others first."""
    old = {block: where_of(store, block_id(keys, block)) for block in range(len(keys))}
    number = 500
    while any(where_of(store, block_id(keys, block)) == old[block] for block in old):
        durable(store, prompt_keys(4, seed=number))
        if not any(store._catalog.places(keys.namespace, keys.hashes)):
            durable(store, keys)
        number += 1
        assert number < 600, "the blocks were never evicted"


def block_id(keys: kvtier.BlockKeys, block: int) -> BlockId:
    """Return the id of one block of a prompt."""
    return BlockId(keys.namespace, keys[block])


def where_of(view: Any, block: BlockId) -> Location | None:
    """Return where a view has a block on the SSD."""
    place: Location | None = view._catalog.places(block.namespace, [block.hash])[0]
    return place


# -- what a reader sees


def test_a_closed_store_is_read(open_store: Open, open_reader: Open, tmp_path: Path) -> None:
    """Every block of a store that nobody has open is found and restored, bit for bit."""
    store = open_store()
    keys = prompt_keys(12)
    durable(store, keys)
    store.close()
    reader = open_reader()
    assert reader.lookup(keys).tiers == (Tier.SSD,) * 12
    assert bring_back(reader, keys).loaded == 12
    assert reader.lookup(keys).tiers == (Tier.HOST,) * 12
    assert bring_back(reader, keys).loaded == 12
    assert counter(reader, "ssd_read_blocks") == 12
    assert ssd(reader)["index"] == "following"
    assert ssd(reader)["io"] in ("direct", "buffered")


def test_a_live_store_is_followed(open_store: Open, open_reader: Open) -> None:
    """What a writer stores becomes visible to a reader in use, by itself, and can be restored."""
    store, keys = open_store(), prompt_keys(6)
    reader = open_reader()
    assert reader.lookup(keys).stored == 0
    for seed in range(4):
        keys = prompt_keys(6, seed)
        durable(store, keys)
        wait_for(reader, keys, 6)
        assert bring_back(reader, keys).loaded == 6


def test_a_reader_in_another_process(open_store: Open, store_path: str) -> None:
    """A process of its own follows and restores while this one writes."""
    store = open_store()
    durable(store, prompt_keys(4))
    code = """
import sys
import kvtier
from support import SPEC, bring_back, prompt_keys
from test_reader import wait_for
with kvtier.open_reader(sys.argv[1], SPEC) as reader:
    assert bring_back(reader, prompt_keys(4)).loaded == 4
    print("ready", flush=True)
    wait_for(reader, prompt_keys(5, seed=1), 5)
    print(bring_back(reader, prompt_keys(5, seed=1)).loaded)
"""
    process = start(code, store_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    durable(store, prompt_keys(5, seed=1))
    assert process.communicate(timeout=WAIT_S)[0] == "5\n"
    assert process.returncode == 0


def start(code: str, *args: str) -> subprocess.Popen[str]:
    """Start code in a fresh interpreter that can import ``support``."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def test_two_readers(open_store: Open, open_reader: Open) -> None:
    """Readers do not disturb each other."""
    store, keys = open_store(), prompt_keys(8)
    durable(store, keys)
    readers = [open_reader(), open_reader()]
    running = [in_thread(lambda reader=reader: bring_back(reader, keys)) for reader in readers]
    assert [result().loaded for result in running] == [8, 8]


def test_prefetch_and_pin(open_store: Open, open_reader: Open) -> None:
    """A prefetch copies into the reader's own memory, and a pin keeps it there."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    reader = open_reader(host_bytes=4 * HOST_SLOT_BYTES)
    assert reader.prefetch(keys).result(WAIT_S) == 4
    durable(store, prompt_keys(8, seed=1))
    wait_for(reader, prompt_keys(8, seed=1), 8)
    with reader.pin(keys) as pinned:
        assert set(pinned.tiers) == {Tier.HOST}
        bring_back(reader, prompt_keys(8, seed=1))
        assert set(reader.lookup(keys).tiers) == {Tier.HOST}


def test_another_spec_sees_only_misses(open_store: Open, open_reader: Open) -> None:
    """A reader of a spec that the store never held opens and finds nothing."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    other = variant(weights="sha256:1")
    reader = open_reader(spec=other)
    assert reader.lookup(keys).stored == 0
    assert reader.lookup(prompt_keys(4, spec=other)).stored == 0
    assert ssd(reader)["ready"] == 0


def test_changes_are_followed(open_store: Open, open_reader: Open) -> None:
    """``changes`` of a reader tells what came and went, to somebody who asks nothing else."""
    store, keys = open_store(), prompt_keys(3)
    reader = open_reader()
    sequence = reader.changes().sequence
    durable(store, keys)
    until(lambda: len(reader.changes(sequence).blocks) == 3, "the blocks are told")
    sequence = reader.changes(sequence).sequence
    store.purge(namespace=SPEC.namespace)
    until(lambda: len(reader.changes(sequence).blocks) == 3, "their end is told")
    assert {tiers for _, _, tiers in reader.changes(sequence).blocks} == {()}


def test_costs_are_read_and_never_written(open_store: Open, open_reader: Open) -> None:
    """A reader plans with what the writer learned, and leaves the file as it is."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    bring_back(store, keys)
    store.close()
    file = Path(store.path, "costs.msgpack")
    before = file.read_bytes()
    reader = open_reader()
    assert reader.costs == store.costs
    bring_back(reader, keys)
    reader.close()
    assert file.read_bytes() == before


# -- what the writer does meanwhile


def test_a_purge_is_a_miss_in_the_reader(open_store: Open, open_reader: Open) -> None:
    """What is purged disappears from a reader's view and memory, also what it has copied."""
    store, keys = open_store(), prompt_keys(6)
    durable(store, keys)
    reader = open_reader()
    assert bring_back(reader, keys).loaded == 6
    store.purge(namespace=SPEC.namespace)
    wait_for(reader, keys, 0)
    assert bring_back(reader, keys, way="best").recomputed == [0, 1, 2, 3, 4, 5]
    assert reader._host.usage().blocks == 0


def test_a_pinned_copy_of_a_purged_block_goes_with_its_pin(
    open_store: Open, open_reader: Open
) -> None:
    """A copy that a restore or a pin holds stays right until it ends, and not longer."""
    store, keys = open_store(), prompt_keys(3)
    durable(store, keys)
    reader = open_reader()
    reader.prefetch(keys).result(WAIT_S)
    with reader.pin(keys):
        store.purge(namespace=SPEC.namespace)
        until(lambda: reader.lookup(keys).stored == 3 and not ssd(reader)["ready"], "it knows")
        assert bring_back(reader, keys).loaded == 3
    wait_for(reader, keys, 0)
    assert reader._host.usage().blocks == 0


def test_purged_bytes_are_not_loaded_before_the_reader_knows(
    open_store: Open, store_path: str
) -> None:
    """A reader that has not heard of a purge recomputes: a load finds no record, no damage."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    reader = reader_with(store_path, Clock())
    plan = reader.plan(reader.lookup(keys), way="load")
    store.purge(namespace=SPEC.namespace)
    assert bring_back(reader, keys, plan=plan).recomputed == [0, 1, 2, 3]
    assert counter(reader, "damaged_blocks") == 0
    assert reader.check() == []
    reader.close()


def test_a_block_that_moved_is_read_where_it_is(open_store: Open, store_path: str) -> None:
    """A reader that is behind reads a reused slot, asks the index, and restores from elsewhere."""
    store, keys = open_store(host_bytes=0, **tiny_budget(12)), prompt_keys(3)
    durable(store, keys)
    reader = reader_with(store_path, Clock())
    plan = reader.plan(reader.lookup(keys), way="load")
    old = where_of(reader, block_id(keys, 0))
    move(store, keys)
    assert where_of(reader, block_id(keys, 0)) == old != where_of(store, block_id(keys, 0))
    assert bring_back(reader, keys, plan=plan).loaded == 3
    assert where_of(reader, block_id(keys, 0)) == where_of(store, block_id(keys, 0))
    assert counter(reader, "damaged_blocks") == 0
    reader.close()


def test_right_bytes_or_recompute_while_the_writer_goes_on(
    open_store: Open, open_reader: Open
) -> None:
    """Amid evictions, reused slots and purges a restore has right bytes, and never an error."""
    store = open_store(host_bytes=0, **tiny_budget(20))
    reader = open_reader(host_bytes=0)
    prompts = [prompt_keys(5, seed) for seed in range(8)]
    stop = threading.Event()

    def write() -> int:
        rounds = 0
        while not stop.is_set():
            durable(store, prompts[rounds % len(prompts)])
            rounds += 1
            if rounds % 7 == 0:
                store.purge(namespace=SPEC.namespace)
        return rounds

    writing = in_thread(write)
    loaded = recomputed = 0
    for number in range(400):
        done = bring_back(reader, prompts[number * 5 % len(prompts)])
        loaded, recomputed = loaded + done.loaded, recomputed + len(done.recomputed)
    stop.set()
    assert writing() > 7
    assert loaded > 0
    assert recomputed > 0
    assert counter(reader, "damaged_blocks") == 0
    store.flush()

    def agree() -> bool:
        return all(reader.lookup(keys).tiers == store.lookup(keys).tiers for keys in prompts)

    until(agree, "reader and writer agree")


def test_a_damaged_block_is_a_miss_and_stays_one(
    open_store: Open, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage is counted once; neither following nor a snapshot brings the block back."""
    store, keys = open_store(), prompt_keys(2)
    durable(store, keys)
    where = where_of(store, block_id(keys, 1))
    assert where is not None
    flip(segment_files(store_path)[0], HEADER_BYTES + where.slot * where.slot_bytes + 5000)
    reader = reader_with(store_path, Clock())
    with caplog.at_level(logging.ERROR):
        assert bring_back(reader, keys).recomputed == [1]
    assert counter(reader, "damaged_blocks") == 1
    assert reader.lookup(keys).tiers == (Tier.HOST, None)
    reader._follower._sequence = None
    assert reader._follower.look()
    assert reader.lookup(keys).tiers == (Tier.HOST, None)
    reader.close()


def test_records_of_another_key_are_misses(open_store: Open, open_reader: Open) -> None:
    """With another integrity_key nothing is loaded; with the right one everything is."""
    store, keys = open_store(integrity_key=b"k" * 16), prompt_keys(3)
    durable(store, keys)
    assert bring_back(open_reader(integrity_key=b"x" * 16), keys).recomputed == [0, 1, 2]
    assert bring_back(open_reader(integrity_key=b"k" * 16), keys).loaded == 3


@pytest.mark.parametrize("what", ["segments", "store"])
def test_what_is_removed_under_a_reader_is_a_miss(
    open_store: Open, open_reader: Open, what: str
) -> None:
    """Without its segments, or the whole directory, a reader goes on with misses."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    store.close()
    reader = open_reader()
    plan = reader.plan(reader.lookup(keys), way="load")
    if what == "store":
        shutil.rmtree(store.path)
    else:
        for path in segment_files(store.path):
            os.unlink(path)
    assert bring_back(reader, keys, plan=plan).recomputed == [0, 1, 2, 3]
    wait_for(reader, keys, 0)
    assert ("unreadable" in ssd(reader)["index"]) == (what == "store")


# -- the index


def test_an_idle_reader_asks_nothing(open_store: Open, store_path: str) -> None:
    """After ``IN_USE_S`` without a use the index is not asked any more; a lookup resumes that."""
    store, clock, made = open_store(), Clock(), []

    def index(path: str) -> CountedIndex:
        made.append(CountedIndex(path))
        return made[0]

    reader = reader_with(store_path, clock, index)
    assert made[0].requests == 1
    until(lambda: reader._follower._asleep, "it is asleep before its first use")
    for _ in range(3):
        asked = made[0].requests
        clock.now += 100 * IN_USE_S
        reader.lookup(prompt_keys(1))
        until(lambda asked=asked: made[0].requests > asked, "a use wakes it")
        until(lambda: not reader._follower._turn.locked(), "it has its answer")
        clock.now += IN_USE_S
        reader._follower._wake.acquire()
        reader._follower._wake.notify_all()
        reader._follower._wake.release()
        until(lambda: reader._follower._asleep, "it is asleep again")
        asked = made[0].requests
        durable(store, prompt_keys(1, seed=asked))
        assert made[0].requests == asked
    reader.close()


def test_a_dead_index_process_is_replaced(open_store: Open, open_reader: Open) -> None:
    """Killing the process that reads the index costs nothing but a new one."""
    store, keys = open_store(), prompt_keys(3)
    durable(store, keys)
    reader = open_reader()
    for seed in range(1, 4):
        os.kill(reader._follower._index._link._process.pid, signal.SIGKILL)
        assert bring_back(reader, keys).loaded == 3
        keys = prompt_keys(3, seed)
        durable(store, keys)
        wait_for(reader, keys, 3)
        until(lambda: ssd(reader)["index"] == "following", "it follows again")


def test_a_damaged_index_opens_with_misses_and_recovers(
    open_store: Open, open_reader: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader is never why an engine does not start: it finds what a writer repairs later."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    store.close()
    Path(store.path, "index", "data.mdb").write_bytes(b"no index" * 4096)
    reader = open_reader()
    assert "cannot be read" in caplog.text
    assert ssd(reader)["index"].startswith("unreadable: ")
    assert reader.lookup(keys).stored == 0
    assert bring_back(reader, keys).recomputed == [0, 1, 2, 3]
    open_store()
    wait_for(reader, keys, 4)
    assert ssd(reader)["index"] == "following"
    assert bring_back(reader, keys).loaded == 4


def test_a_rebuilt_index_is_followed(open_store: Open, open_reader: Open) -> None:
    """An index that its writer made anew is taken as it is: what it lacks is gone."""
    store, keys = open_store(), prompt_keys(4)
    durable(store, keys)
    reader = open_reader()
    wait_for(reader, keys, 4)
    store.close()
    os.unlink(os.path.join(store.path, "index", "data.mdb"))
    for path in segment_files(store.path):
        os.unlink(path)
    store = open_store()
    wait_for(reader, keys, 0)
    durable(store, keys)
    wait_for(reader, keys, 4)
    assert bring_back(reader, keys).loaded == 4


KILLED = """
import sys
import kvtier
from support import SPEC, bring_back, prompt_keys
reader = kvtier.open_reader(sys.argv[1], SPEC, host_bytes=0)
print("ready", flush=True)
while True:
    for seed in range(6):
        bring_back(reader, prompt_keys(4, seed))
"""


def test_killed_readers_neither_block_the_writer_nor_grow_the_index(
    open_store: Open, store_path: str
) -> None:
    """Readers die by SIGKILL in the middle of it; hundreds of commits later the index is small."""
    store = open_store(host_bytes=0, **tiny_budget(16))
    data = Path(store_path, "index", "data.mdb")
    commits = 0

    def commit(count: int) -> None:
        nonlocal commits
        for _ in range(count):
            durable(store, prompt_keys(4, seed=commits % 12))
            commits += 1

    commit(12)
    readers = [start(KILLED, store_path) for _ in range(3)]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        commit(30)
        reader.kill()
        reader.communicate(timeout=WAIT_S)
    commit(60)
    # Had a reader pinned its pages, every commit would have added some 40 KB.
    assert data.stat().st_size <= 2 * CHANGES_KEPT * RECORD_BYTES
    assert store.stats()["counters"]["ssd_write_errors"] == 0


class ScriptedIndex:
    """An index that says what a test wants; ``error`` makes it unreadable."""

    def __init__(self) -> None:
        self.sequence = 1
        self.stored = table([])
        self.changes: Changes | None = None
        self.error: Exception | None = None
        self.requests = 0

    def snapshot(self) -> tuple[int, Entries]:
        """Return what is stored."""
        self.requests += 1
        if self.error is not None:
            raise self.error
        return self.sequence, self.stored

    def since(self, sequence: int) -> Changes | None:
        """Return the changes that were set."""
        return None if self.error is not None else self.changes

    def close(self) -> None:
        """Close it."""


class NoCopies:
    """Stands for a mover whose host memory is empty."""

    def purge_host(self, select: Callable[[], list[int]]) -> list[BlockId]:
        """Drop nothing."""
        return []


def following(index: ScriptedIndex, clock: Callable[[], float]) -> tuple[Follower, Catalog]:
    """Return a follower that asks only when it is told to, and its catalog."""
    catalog = Catalog(Lru)
    follower = Follower(index, catalog, SPEC.namespace, clock=clock, failed=pytest.fail)
    follower._mover = NoCopies()  # type: ignore[assignment]
    return follower, catalog


def entries_at(keys: kvtier.BlockKeys, slots: list[int]) -> Entries:
    """Return entries of a prompt's blocks in these slots; a negative one is left out."""
    rows = []
    for block, slot in enumerate(slots):
        if slot >= 0:
            record = record_of(block, id=block_id(keys, block))
            rows.append(entry_of(record, Location(7, slot, 12288), 1))
    return table(rows)


def slots_of(catalog: Catalog, keys: kvtier.BlockKeys) -> list[int]:
    """Return the slot of each block of a prompt, -1 for those that are not there."""
    places = catalog.places(keys.namespace, keys.hashes)
    return [-1 if place is None else place.slot for place in places]


@pytest.mark.parametrize("pins", [0, 3])
def test_a_snapshot_is_applied_as_a_difference(pins: int) -> None:
    """Moved blocks move, new ones come, missing ones go, also while they are pinned."""
    index, keys, other = ScriptedIndex(), prompt_keys(5), prompt_keys(2, seed=1)
    follower, catalog = following(index, time.monotonic)
    index.stored = np.concatenate([entries_at(keys, [0, 1, 2, -1, -1]), entries_at(other, [8, 9])])
    assert follower.look()
    assert slots_of(catalog, keys) == [0, 1, 2, -1, -1]
    rows = [catalog.find(block_id(keys, block)) for block in range(pins)]
    assert all(row is not None and catalog.pin(row, Tier.SSD) for row in rows)
    index.stored = np.concatenate(
        [entries_at(keys, [0, -1, 20, 21, -1]), entries_at(other, [8, 9])]
    )
    assert follower.look()
    assert slots_of(catalog, keys) == [0, -1, 20, 21, -1]
    assert slots_of(catalog, other) == [8, 9]
    assert catalog.pins() == len(rows)
    index.stored = entries_at(keys, [0, 1, 2, 3, 4])
    assert follower.look()
    assert slots_of(catalog, keys) == [0, 1, 2, 3, 4]
    for row in rows:
        catalog.unpin(row, Tier.SSD)
    assert catalog.check() == []


def test_changes_are_applied() -> None:
    """Puts, moves and removals of the journal are applied; other namespaces are left out."""
    index, keys = ScriptedIndex(), prompt_keys(4)
    follower, catalog = following(index, time.monotonic)
    index.stored = entries_at(keys, [0, 1, 2])
    assert follower.look()
    foreign = prompt_keys(1, spec=variant(weights="sha256:1"))
    put_ = np.concatenate([entries_at(keys, [5, -1, -1, 6]), entries_at(foreign, [7])])
    index.changes = Changes(9, put_, [block_id(keys, 1), block_id(foreign, 0)])
    assert follower.look()
    assert slots_of(catalog, keys) == [5, -1, 2, 6]
    assert slots_of(catalog, foreign) == [-1]
    assert catalog.ready(Tier.SSD) == 3
    assert index.requests == 1


def test_an_unreadable_index_is_asked_ever_less_often() -> None:
    """The pause between tries doubles up to ``RETRY_S_MAX``; what is known stays."""
    index, keys, clock = ScriptedIndex(), prompt_keys(3), Clock()
    follower, catalog = following(index, clock)
    index.stored = entries_at(keys, [0, 1, 2])
    assert follower.look()
    index.error = FormatError("damaged")
    tries = []
    for _ in range(600):
        clock.now += 0.1
        before = index.requests
        assert not follower.look()
        if index.requests > before:
            tries.append(clock.now)
    pauses = np.diff(tries)
    assert (np.diff(pauses) > -0.11).all()
    assert pauses[-1] == pytest.approx(RETRY_S_MAX, abs=0.11)
    assert follower.state == "unreadable: damaged"
    assert slots_of(catalog, keys) == [0, 1, 2]
    index.error = None
    clock.now += RETRY_S_MAX
    assert follower.look()
    assert follower.state == "following"


def test_one_answer_serves_all_who_waited_for_it() -> None:
    """Of reads that fail together one asks, and then one for those that began after that."""
    gate, times = Gate(), itertools.count(1)

    class Slow(ScriptedIndex):
        def snapshot(self) -> tuple[int, Entries]:
            gate.pass_through()
            return super().snapshot()

    def clock() -> float:
        now = next(times)
        if now == 8 + 1:  # all have begun, and one has asked
            gate.open()
        return now

    index = Slow()
    follower, _ = following(index, clock)
    waiting = [in_thread(follower.look) for _ in range(8)]
    assert all(result() for result in waiting)
    assert index.requests <= 2


def test_what_is_lost_comes_back_if_the_index_still_has_it() -> None:
    """A block that was not found while the index was unreadable is there again with the index."""
    index, keys, clock = ScriptedIndex(), prompt_keys(3), Clock()
    follower, catalog = following(index, clock)
    index.stored = entries_at(keys, [0, 1, 2])
    assert follower.look()
    follower.lose(block_id(keys, 1), Location(7, 99, 12288))
    assert slots_of(catalog, keys) == [0, 1, 2]
    follower.lose(block_id(keys, 1), Location(7, 1, 12288))
    assert slots_of(catalog, keys) == [0, -1, 2]
    index.changes = Changes(2, table([]), [])
    clock.now += 1
    assert follower.look()
    assert slots_of(catalog, keys) == [0, 1, 2]


def test_only_so_many_damaged_blocks_are_remembered() -> None:
    """The memory of damage is bounded; the oldest is forgotten, and found again."""
    index, clock = ScriptedIndex(), Clock()
    follower, _ = following(index, clock)
    count = follower_module.DAMAGED_KEPT + 5
    for number in range(count):
        follower.forget(BlockId(SPEC.namespace, number.to_bytes(32, "big")), Location(0, 0, 0))
    assert len(follower._damaged) == follower_module.DAMAGED_KEPT


def test_a_follower_that_fails_is_heard_of(open_store: Open, store_path: str) -> None:
    """What goes wrong in the background, other than an index, reaches the next call."""

    class Broken(ScriptedIndex):
        def since(self, sequence: int) -> Changes | None:
            raise RuntimeError("a bug")

    open_store()
    reader = reader_with(store_path, time.monotonic, lambda _path: Broken())

    def failed() -> bool:
        try:
            reader.lookup(prompt_keys(1))
        except StoreFailed as error:
            return "a bug" in str(error)
        return False

    until(failed, "the failure is told")
    reader.close()


def test_only_a_ready_copy_can_move() -> None:
    """A block that has no copy on the SSD has no place there to change."""
    catalog, where = Catalog(Lru), Location(1, 2, 12288)
    row = catalog.begin(block_id(prompt_keys(1), 0), Tier.SSD, "write")
    with pytest.raises(ValueError, match="READY"):
        catalog.relocate(row, where)
    catalog.commit(row, Tier.SSD, where)
    catalog.relocate(row, Location(3, 4, 12288))
    assert catalog.location(row, Tier.SSD) == Location(3, 4, 12288)


# -- the directory


def looks(path: str) -> dict[str, tuple[int, int, int]]:
    """Return size, mode and time of change of every file and folder, except LMDB's lock."""
    found = {}
    for each in [Path(path), *sorted(Path(path).rglob("*"))]:
        name = str(each.relative_to(path))
        if name != os.path.join("index", "lock.mdb"):
            status = each.lstat()
            found[name] = (status.st_size, status.st_mode, status.st_mtime_ns)
    return found


def test_a_reader_changes_nothing(open_store: Open, store_path: str) -> None:
    """Names, sizes, modes and times are the same after a reader opened, restored and closed."""
    store, keys = open_store(), prompt_keys(6)
    durable(store, keys)
    store.close()
    before, fs = looks(store_path), FaultyFileSystem()
    with kvtier.open_reader(store_path, SPEC, fs=fs) as reader:
        assert bring_back(reader, keys).loaded == 6
        reader.prefetch(keys).result(WAIT_S)
    assert looks(store_path) == before
    asked = {name.partition(" ")[0] for name in fs.counts}
    changing = {"create", "write", "sync", "punch", "rename", "unlink", "lock", "sync_directory"}
    assert asked & (changing | {"open_directory", "open_subdirectory"}) == set()


def test_a_reader_does_not_keep_a_writer_out(open_store: Open, open_reader: Open) -> None:
    """A store can be opened for writing while readers have it, and the other way round."""
    store, keys = open_store(), prompt_keys(3)
    durable(store, keys)
    store.close()
    reader = open_reader()
    assert open_store().lookup(keys).stored == 3
    assert bring_back(reader, keys).loaded == 3


def test_where_direct_reads_fail_the_page_cache_serves(open_store: Open, open_reader: Open) -> None:
    """A file system that cannot open files directly is read through the page cache."""

    class Indirect(FaultyFileSystem):
        def open_file(self, directory: int, name: str, **how: Any) -> int:
            if how.get("direct"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().open_file(directory, name, **how)

    store, keys = open_store(), prompt_keys(3)
    durable(store, keys)
    reader = open_reader(fs=Indirect())
    assert bring_back(reader, keys).loaded == 3
    assert ssd(reader)["io"] == "buffered"


def test_a_read_that_fails_this_time_takes_nothing_out(open_store: Open, open_reader: Open) -> None:
    """Without a descriptor a block is recomputed, and found again the next time."""
    store, keys = open_store(), prompt_keys(3)
    durable(store, keys)
    fs = FaultyFileSystem()
    reader = open_reader(fs=fs, host_bytes=0)
    for _ in range(2):  # before it is known how to read, and afterwards
        fs.fail("open_file", errno.EMFILE, name=".seg")
        assert bring_back(reader, keys).recomputed == [0, 1, 2]
        fs.heal()
        assert bring_back(reader, keys).loaded == 3
    assert counter(reader, "damaged_blocks") == 0


def test_a_missing_path_is_named_and_not_made(tmp_path: Path) -> None:
    """There is nothing to read where nothing is, and nothing is made there."""
    with pytest.raises(StoreFailed, match=r"nowhere.*No such file"):
        kvtier.open_reader(tmp_path / "nowhere" / "store", SPEC)
    assert os.listdir(tmp_path) == []


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    """A directory without FORMAT, a file, and a store without its folders are named."""
    with pytest.raises(FormatError, match=f"{tmp_path}.*no FORMAT"):
        kvtier.open_reader(tmp_path, SPEC)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FormatError, match=r"file.*no directory"):
        kvtier.open_reader(tmp_path / "file", SPEC)
    (tmp_path / "FORMAT").write_bytes(b"kvtier store, format 1\n")
    with pytest.raises(StoreFailed, match="cannot be opened for reading"):
        kvtier.open_reader(tmp_path, SPEC)
    (tmp_path / "FORMAT").write_bytes(b"something else\n")
    with pytest.raises(FormatError, match="does not say"):
        kvtier.open_reader(tmp_path, SPEC)


def test_a_newer_format_is_refused_with_both_versions(open_store: Open, store_path: str) -> None:
    """A store of a later format is not read."""
    open_store().close()
    Path(store_path, "FORMAT").write_bytes(b"kvtier store, format 2\n")
    with pytest.raises(FormatError, match="format 2; this kvtier reads 1"):
        kvtier.open_reader(store_path, SPEC)


@pytest.mark.parametrize("name", ["segments", "index"])
def test_links_in_a_store_are_not_followed(open_store: Open, store_path: str, name: str) -> None:
    """A folder of the store that is a link to another one is refused."""
    open_store().close()
    os.rename(os.path.join(store_path, name), store_path + "-elsewhere")
    os.symlink(store_path + "-elsewhere", os.path.join(store_path, name))
    with pytest.raises(FormatError, match="no directory"):
        kvtier.open_reader(store_path, SPEC)


# -- its end


CALLS: dict[str, Callable[[Any], object]] = {
    "lookup": lambda reader: reader.lookup(prompt_keys(2)),
    "prefetch": lambda reader: reader.prefetch(prompt_keys(2)),
    "pin": lambda reader: reader.pin(prompt_keys(2)).__enter__(),
    "restore": lambda reader: reader.restore(
        reader.plan(kvtier.Residency(prompt_keys(2), (None, None), 1)), poisoned_slots(2)
    ),
    "changes": lambda reader: reader.changes(),
    "stats": lambda reader: reader.stats(),
    "check": lambda reader: reader.check(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_reader_refuses(open_store: Open, open_reader: Open, name: str) -> None:
    """Closing twice is once; afterwards every verb raises StoreClosed."""
    open_store()
    reader = open_reader()
    reader.close()
    reader.close()
    with pytest.raises(StoreClosed):
        CALLS[name](reader)


def test_a_forked_child_has_no_reader(open_store: Open, store_path: str) -> None:
    """In a forked child every verb raises StoreClosed, close does nothing, the parent goes on."""
    store = open_store()
    durable(store, prompt_keys(3))
    code = """
import os, sys, warnings
import kvtier
from support import SPEC, bring_back, prompt_keys
from test_reader import CALLS
warnings.simplefilter("ignore", DeprecationWarning)
reader = kvtier.open_reader(sys.argv[1], SPEC)
child = os.fork()
if child == 0:
    wrong = 0
    for call in CALLS.values():
        try:
            call(reader)
            wrong += 1
        except kvtier.StoreClosed:
            pass
    reader.close()
    os._exit(wrong)
assert os.waitpid(child, 0)[1] == 0
assert bring_back(reader, prompt_keys(3)).loaded == 3
reader.close()
print("good")
"""
    assert run_python(code, store_path).stdout == "good\n"


def test_nothing_is_left_behind(open_store: Open, store_path: str) -> None:
    """Opening, failing to open and closing leave no thread and no descriptor."""
    store, keys = open_store(), prompt_keys(2)
    durable(store, keys)
    threads = threading.active_count()
    with kvtier.open_reader(store_path, SPEC) as reader:
        bring_back(reader, keys)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with kvtier.open_reader(store_path, SPEC) as reader:
            bring_back(reader, keys)
        with pytest.raises(FormatError):
            kvtier.open_reader(os.path.dirname(store_path), SPEC)
    # The threads that read are told to end, not waited for: one that hangs must not hang a close.
    eventually(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) == files


def test_it_closes_while_it_loads(open_store: Open, store_path: str) -> None:
    """A reader that is closed amid a restore ends it: the rest is recomputed or raises."""
    store, keys = open_store(), prompt_keys(6)
    durable(store, keys)
    fs = FaultyFileSystem()
    reader = kvtier.open_reader(store_path, SPEC, fs=fs)
    bring_back(reader, prompt_keys(1, seed=9))
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(6)
    with reader.restore(reader.plan(reader.lookup(keys), way="load"), slots) as session:
        gate.wait_reached()
        closing = in_thread(reader.close)
        gate.open()
        closing()
        while session.poll_step() == kvtier.PENDING:
            time.sleep(0.001)
