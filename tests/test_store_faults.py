from __future__ import annotations

import errno
import json
import os
import random
import shutil
from typing import Any

import numpy as np
import pytest
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    assert_sound,
    bring_back,
    disk_bytes,
    faulty_index,
    filled_slots,
    flip,
    in_thread,
    prompt_keys,
    put,
    random_bytes,
    run_python,
    segment_files,
    tiny_budget,
)

import kvtier
from kvtier import PutResult, StoreFailed, Tier, TransferFailed

Open = Any
PAGE = 4096


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a file system that fails on demand."""
    return FaultyFileSystem()


def on_disk(open_store: Open, blocks: int = 8, prompts: int = 1, **own: Any) -> kvtier.Store:
    """Store prompts (seeds 0, 1, ...) on the SSD alone; returns the store, closed."""
    store = open_store(host_bytes=0, **own)
    for seed in range(prompts):
        assert put(store, prompt_keys(blocks, seed)).stored == blocks
    store.close()
    return store


# -- a lost or damaged index


def damage(index: str, how: str) -> None:  # noqa: C901, PLR0912 - a table of cases
    """Damage a closed store's index."""
    data = os.path.join(index, "data.mdb")
    size = os.path.getsize(data)
    match how:
        case "deleted":
            os.unlink(data)
        case "folder deleted":
            shutil.rmtree(index)
        case "lock deleted":
            os.unlink(os.path.join(index, "lock.mdb"))
        case "lock garbage":
            with open(os.path.join(index, "lock.mdb"), "r+b") as file:
                file.write(random_bytes(3, 64))
        case "empty":
            os.truncate(data, 0)
        case "one page":
            os.truncate(data, PAGE)
        case "meta pages only":
            os.truncate(data, 2 * PAGE)
        case "half":
            os.truncate(data, size // 2 // PAGE * PAGE)
        case "last page":
            os.truncate(data, size - PAGE)
        case "last byte":
            os.truncate(data, size - 1)
        case "garbage":
            with open(data, "wb") as file:
                file.write(random_bytes(1, size))
        case "garbage pages":
            with open(data, "r+b") as file:
                file.seek(2 * PAGE)
                file.write(random_bytes(2, size - 2 * PAGE))
        case "zeros":
            with open(data, "wb") as file:
                file.write(bytes(size))
        case "zeroed pages":
            with open(data, "r+b") as file:
                file.seek(2 * PAGE)
                file.write(bytes(size - 2 * PAGE))


INTACT = ("lock deleted", "lock garbage")
DAMAGES = (
    *INTACT, "deleted", "folder deleted", "empty", "one page", "meta pages only", "half",
    "last page", "last byte", "garbage", "garbage pages", "zeros", "zeroed pages",
)  # fmt: skip
# Apart from the tests' own process: a bad index may kill whoever reads it.
REOPENS = 50
"""Damages that one process tries, so that a slow machine does not run into its time limit."""
REOPEN = """
import json, os, shutil, sys
import kvtier
from support import SPEC, assert_sound, bring_back, flip, prompt_keys, put
from test_store_faults import damage

def reopen(path):
    with kvtier.open(path, SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
        loaded = [bring_back(store, prompt_keys(8, seed)).loaded for seed in range(3)]
        put(store, prompt_keys(8, 9))
        assert_sound(store)
    with kvtier.open(path, SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
        loaded.append(bring_back(store, prompt_keys(8, 9)).loaded)
        again = [bring_back(store, prompt_keys(8, seed)).loaded for seed in range(3)]
        assert again == loaded[:3]
        assert_sound(store)
    return loaded

for what in json.loads(sys.argv[2]):
    print(json.dumps(what), flush=True)
    path = f"{sys.argv[1]}.work"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sys.argv[1], path)
    if isinstance(what, str):
        damage(path + "/index", what)
    else:
        flip(path + "/index/data.mdb", what, 1 << what % 8)
    try:
        result = reopen(path)
    except Exception as error:
        result = repr(error)
    print(json.dumps(result), flush=True)
"""


def reopen_damaged(path: str, damages: list[Any]) -> dict[Any, Any]:
    """Damage copies of a store's index and reopen each twice: loaded blocks, or what went wrong."""
    results: dict[Any, Any] = {}
    while left := [what for what in damages if what not in results]:
        done = run_python(REOPEN, path, json.dumps(left[:REOPENS]), check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        results |= dict(zip(lines[::2], lines[1::2], strict=False))
        if len(lines) % 2:
            results[lines[-1]] = f"the process ended with {done.returncode}: {done.stderr[-500:]}"
        assert lines, done.stderr
    return results


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Return what became of a store of 24 blocks after each kind of damage."""
    path = str(tmp_path_factory.mktemp("damaged") / "store")
    with kvtier.open(path, SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
        for seed in range(3):
            put(store, prompt_keys(8, seed))
    return reopen_damaged(path, list(DAMAGES))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_lost_index_is_rebuilt(damaged: dict[Any, Any], how: str) -> None:
    """Whatever becomes of the index, the store opens and finds every block by its header."""
    assert damaged[how] == [8, 8, 8, 8]


def test_flipped_bytes_of_the_index_are_never_wrong_bytes(open_store: Open) -> None:
    """Any flipped byte of the index costs at most blocks: no wrong bytes, no dead process."""
    store = on_disk(open_store, prompts=3)
    data = os.path.join(store.path, "index", "data.mdb")
    used = [page for page in range(os.path.getsize(data) // PAGE) if _page_used(data, page)]
    flips = random.Random(5)  # noqa: S311
    offsets = [
        page * PAGE + offset
        for page in used
        for offset in [0, 8, 10, 12, 14, 16, *(flips.randrange(PAGE) for _ in range(4))]
    ]
    results = reopen_damaged(store.path, sorted(set(offsets)))
    wrong = {what: result for what, result in results.items() if not isinstance(result, list)}
    assert wrong == {}


def _page_used(path: str, page: int) -> bool:
    with open(path, "rb") as file:
        file.seek(page * PAGE)
        return any(file.read(PAGE))


def test_entries_that_lie_are_never_wrong_bytes(open_store: Open) -> None:
    """An index whose entries point at each other's slots yields misses, not foreign bytes."""
    from kvtier.tiers.index import LmdbIndex

    store = on_disk(open_store, blocks=6)
    index = LmdbIndex(os.path.join(store.path, "index"), 1 << 30)
    moved = index.entries().copy()
    moved["slot"] = np.roll(moved["slot"], 1)
    index.commit([moved[row : row + 1].tobytes() for row in range(len(moved))], ())
    index.close()
    store = open_store(host_bytes=0)
    keys = prompt_keys(6)
    assert bring_back(store, keys).recomputed == list(range(6))
    assert store.stats()["counters"]["damaged_blocks"] == 6
    assert put(store, keys).stored == 6
    assert bring_back(store, keys).loaded == 6


def test_blocks_dropped_as_damaged_stay_dropped(open_store: Open) -> None:
    """A damaged block is out of the index for good: the next open does not show it again."""
    store = on_disk(open_store)
    flip(segment_files(store.path)[0], PAGE + PAGE + 100)
    store = open_store(host_bytes=0)
    assert bring_back(store, prompt_keys(8)).loaded == 7
    store.flush()
    store.close()
    store = open_store(host_bytes=0)
    assert store.lookup(prompt_keys(8)).stored == 7


# -- damaged segments


def test_a_deleted_segment_is_a_miss(open_store: Open) -> None:
    """Blocks whose segment was deleted while closed are misses; the others are served."""
    own = tiny_budget(40, per_segment=4)
    store = on_disk(open_store, prompts=3, **own)
    files = segment_files(store.path)
    assert len(files) == 6
    os.unlink(files[2])
    store = open_store(host_bytes=0, **own)
    found = [store.lookup(prompt_keys(8, seed)).stored for seed in range(3)]
    assert sum(found) == 20
    for seed in range(3):
        assert bring_back(store, prompt_keys(8, seed)).loaded == found[seed]


def test_a_segment_deleted_under_an_open_store_is_a_miss(open_store: Open) -> None:
    """A segment that vanishes while the store is open costs its blocks, not the store."""
    own = tiny_budget(40, per_segment=4)
    store = open_store(host_bytes=0, **own)
    for seed in range(3):
        put(store, prompt_keys(8, seed))
    store.flush()
    for path in segment_files(store.path)[:3]:
        os.unlink(path)
    loaded = sum(bring_back(store, prompt_keys(8, seed)).loaded for seed in range(3))
    assert loaded == 12
    store.flush()
    for seed in range(10, 13):
        put(store, prompt_keys(8, seed))
    assert store.check() == []


@pytest.mark.parametrize("left", [0, 1, PAGE - 1, PAGE, PAGE + 1, PAGE + SLOT_BYTES, -1])
def test_a_truncated_segment_is_a_miss(open_store: Open, left: int) -> None:
    """Blocks beyond the end of a segment are misses; those before it are right."""
    store = on_disk(open_store)
    (path,) = segment_files(store.path)
    os.truncate(path, left if left >= 0 else os.path.getsize(path) + left - PAGE)
    store = open_store(host_bytes=0)
    whole = max((os.path.getsize(path) - PAGE) // SLOT_BYTES, 0) if os.path.exists(path) else 0
    assert bring_back(store, prompt_keys(8)).loaded >= min(whole, 7)
    assert put(store, prompt_keys(8)).dropped == 0
    assert bring_back(store, prompt_keys(8)).loaded == 8


def test_every_flip_in_a_segment_is_a_miss_or_right(open_store: Open) -> None:
    """A byte flipped anywhere in a segment, while closed, costs at most blocks, and is counted."""
    store = on_disk(open_store, blocks=4)
    (path,) = segment_files(store.path)
    keep = store.path + ".keep"
    shutil.copytree(store.path, keep)
    flips = random.Random(1)  # noqa: S311
    offsets = [0, 9, 15, 33, *(flips.randrange(os.path.getsize(path)) for _ in range(40))]
    for offset in offsets:
        shutil.rmtree(store.path)
        shutil.copytree(keep, store.path)
        flip(path, offset, 1 << flips.randrange(8))
        again = open_store(host_bytes=0)
        keys = prompt_keys(4)
        stored = again.lookup(keys).stored
        back = bring_back(again, keys)
        counters = again.stats()["counters"]
        assert counters["damaged_blocks"] == stored - back.loaded
        slot, inside = divmod(offset - PAGE, SLOT_BYTES)
        hit = offset >= PAGE and inside < PAGE + SPEC.block_layout.block_bytes
        if hit:
            assert back.recomputed == [slot]
        elif offset >= PAGE:
            assert back.loaded == 4
        assert put(again, keys).dropped == 0
        assert bring_back(again, keys).loaded == 4
        again.close()


def test_a_flip_under_an_open_store_is_a_miss(open_store: Open) -> None:
    """Bit rot while the store is open: counted, dropped, stored anew by the next put."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    flip(segment_files(store.path)[0], PAGE + 2 * SLOT_BYTES + PAGE + 77)
    assert bring_back(store, keys).recomputed == [2]
    store.flush()
    counters = store.stats()["counters"]
    assert (counters["damaged_blocks"], counters["load_failures"]) == (1, 1)
    assert store.lookup(keys).stored == 5
    assert put(store, keys) == PutResult(1, 5, 0)
    assert bring_back(store, keys).loaded == 6


def test_an_unreadable_segment_does_not_break_the_budget(open_store: Open) -> None:
    """A segment whose header is damaged still takes disk: it is removed or counted."""
    own = {**tiny_budget(200, per_segment=170)}
    store = open_store(host_bytes=0, **own)
    for seed in range(16):
        put(store, prompt_keys(10, seed))
    store.close()
    flip(segment_files(store.path)[0], 40)
    store = open_store(host_bytes=0, **own)
    for seed in range(100, 120):
        put(store, prompt_keys(10, seed))
    store.flush()
    assert disk_bytes(store.path) <= own["ssd_bytes"]


def test_a_record_moved_to_another_slot_is_a_miss(open_store: Open) -> None:
    """Slots swapped on disk yield misses, never one block's bytes under another's name."""
    store = on_disk(open_store, blocks=4)
    (path,) = segment_files(store.path)
    with open(path, "r+b") as file:
        file.seek(PAGE)
        slots = [file.read(SLOT_BYTES) for _ in range(4)]
        file.seek(PAGE)
        file.write(b"".join([slots[1], slots[0], *slots[2:]]))
    store = open_store(host_bytes=0)
    assert bring_back(store, prompt_keys(4)).recomputed == [0, 1]


# -- a failing disk, on writing


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("operation", ["write", "sync", "open_file", "create", "sync_directory"])
def test_a_failed_write_is_dropped_and_counted(
    open_store: Open, fs: FaultyFileSystem, operation: str, error: int
) -> None:
    """A put that meets a full or failing disk drops and counts; later puts work; books balance."""
    store = open_store(host_bytes=0, fs=fs)
    if operation not in ("create", "sync_directory"):
        put(store, prompt_keys(3, seed=5))
        store.flush()
    keys = prompt_keys(6)
    fs.fail(operation, error)
    result = put(store, keys)
    assert (result.stored, result.dropped) == (0, 6)
    store.flush()
    assert store.lookup(keys).stored == 0
    counters = store.stats()["counters"]
    assert counters["put_blocks_dropped"] == 6
    assert counters["ssd_write_errors"] >= 1
    assert store.check() == []
    fs.heal()
    assert put(store, keys).stored == 6
    assert bring_back(store, keys).loaded == 6
    assert_sound(store)


@pytest.mark.parametrize("nth", range(1, 9))
def test_one_failed_write_among_many(open_store: Open, fs: FaultyFileSystem, nth: int) -> None:
    """Whichever write fails, what counts as stored is stored, and a restart agrees."""
    own = tiny_budget(60, per_segment=3)
    store = open_store(host_bytes=0, fs=fs, write_batch_blocks_max=4, **own)
    fs.fail("write", errno.EIO, nth=nth, times=1)
    keys = prompt_keys(8)
    result = put(store, keys)
    store.flush()
    fs.heal()
    stored = store.lookup(keys).stored
    assert stored == result.stored
    assert bring_back(store, keys).loaded == stored
    used = store.stats()["tiers"]["ssd"]["blocks"]
    assert_sound(store)
    store.close()
    store = open_store(host_bytes=0, **own)
    assert store.stats()["tiers"]["ssd"]["blocks"] == used
    assert bring_back(store, keys).loaded == stored
    assert put(store, keys).stored == 8 - stored


def test_memory_keeps_what_the_disk_refuses(open_store: Open, fs: FaultyFileSystem) -> None:
    """With host memory a block that could not be written is still served from there."""
    store = open_store(fs=fs)
    keys = prompt_keys(4)
    fs.fail("write", errno.ENOSPC)
    put(store, keys)
    store.flush()
    assert set(store.lookup(keys).tiers) == {Tier.HOST}
    assert bring_back(store, keys).loaded == 4


def test_a_failed_commit_is_dropped_and_counted(open_store: Open) -> None:
    """An index that does not commit: no block of the batch is stored, nothing leaks."""
    store = open_store(host_bytes=0)
    index = faulty_index(store)
    keys = prompt_keys(6)
    index.error = OSError(errno.ENOSPC, "no commit")
    assert put(store, keys) == PutResult(0, 0, 6)
    store.flush()
    assert store.lookup(keys).stored == 0
    assert store.stats()["counters"]["ssd_write_errors"] >= 1
    index.error = None
    assert put(store, keys) == PutResult(6, 0, 0)
    assert bring_back(store, keys).loaded == 6


def test_an_eviction_that_does_not_commit_is_undone(open_store: Open) -> None:
    """While the index does not commit nothing is evicted, and what is there is served."""
    store = open_store(host_bytes=0, **tiny_budget(15))
    old = prompt_keys(8)
    put(store, old)
    store.flush()
    index = faulty_index(store)
    index.error = OSError(errno.EIO, "no commit")
    put(store, prompt_keys(12, seed=1))
    store.flush()
    assert bring_back(store, old).loaded == 8
    assert store.check() == []
    index.error = None
    assert put(store, prompt_keys(12, seed=1)).dropped == 0
    assert bring_back(store, prompt_keys(12, seed=1)).loaded == 12


def test_a_damaged_block_that_cannot_be_dropped_is_not_leaked(open_store: Open) -> None:
    """If the index fails while a damaged block is dropped, its slot is still free in the end."""
    own = tiny_budget(12)
    store = open_store(host_bytes=0, **own)
    keys = prompt_keys(4)
    put(store, keys)
    store.flush()
    blocks = store.stats()["tiers"]["ssd"]["blocks"]
    flip(segment_files(store.path)[0], PAGE + PAGE + 9)
    index = faulty_index(store)
    index.error = OSError(errno.EIO, "no commit")
    assert bring_back(store, keys).recomputed == [0]
    store.flush()
    index.error = None
    assert put(store, keys).stored == 1
    store.flush()
    assert store.stats()["tiers"]["ssd"]["blocks"] == blocks
    assert bring_back(store, keys).loaded == 4


def test_a_full_index_is_a_full_disk(open_store: Open) -> None:
    """When the index's address space is used up, old blocks give way; nothing is wrong."""
    store = open_store(host_bytes=0, ssd_bytes="64MiB", index_bytes_max=1 << 20)
    stored = [put(store, prompt_keys(64, seed)).stored for seed in range(60)]
    store.flush()
    counters = store.stats()["counters"]
    assert counters["ssd_write_errors"] > 0
    assert counters["evicted_blocks_ssd"] > 0
    # It goes on storing: what found no room was dropped, and old blocks have made some since.
    assert sum(stored[30:]) > 64
    for seed in range(0, 60, 7):
        assert bring_back(store, prompt_keys(64, seed)).loaded == (
            store.lookup(prompt_keys(64, seed)).stored
        )
    assert store.check() == []


# -- a failing disk, on reading


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOENT, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("operation", ["read", "open_file"])
@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_failed_read_is_a_recompute(
    open_store: Open, fs: FaultyFileSystem, operation: str, error: int, nth: int
) -> None:
    """A block that cannot be read is recomputed; the restore ends, the others are loaded."""
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    fs.fail(operation, error, nth=nth, times=1, name=".seg")
    back = bring_back(store, keys)
    assert len(back.recomputed) == 1
    assert back.report.failed == 1
    fs.heal()
    store.flush()
    put(store, keys)
    assert bring_back(store, keys).loaded == 6


def test_short_reads_are_recomputes(open_store: Open, fs: FaultyFileSystem) -> None:
    """A read that ends early never hands out the memory that it did not fill."""
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(5)
    put(store, keys)
    store.flush()
    fs.shorten(100, times=5)
    assert bring_back(store, keys).recomputed == [0, 1, 2, 3, 4]


def test_a_disk_that_never_reads_is_no_cache(open_store: Open, fs: FaultyFileSystem) -> None:
    """With every read failing, request after request completes by recomputing."""
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(5)
    put(store, keys)
    store.flush()
    fs.fail("read", errno.EIO, name=".seg")
    for _ in range(3):
        assert bring_back(store, keys).recomputed == [0, 1, 2, 3, 4]
        put(store, keys)
        store.flush()


# -- the unexpected


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_an_unexpected_error_reaches_the_next_call(
    open_store: Open, fs: FaultyFileSystem, operation: str
) -> None:
    """A bug in the write lane is StoreFailed at the next call, its cause chained; nobody hangs."""
    store = open_store(host_bytes=0, fs=fs)
    bug = RuntimeError("a bug")
    fs.fail(operation, bug, name=".seg")
    keys = prompt_keys(3)
    transfer = store.put(keys, filled_slots(keys))
    with pytest.raises((TransferFailed, StoreFailed)):
        transfer.result(WAIT_S)
    with pytest.raises(StoreFailed, match="a bug") as info:
        store.lookup(keys)
    assert info.value.__cause__ is bug
    with pytest.raises(StoreFailed):
        in_thread(lambda: store.put(keys, filled_slots(keys)))()
    in_thread(store.close)()
    assert transfer.done()


def test_an_unexpected_error_wakes_a_flush(open_store: Open, fs: FaultyFileSystem) -> None:
    """A flush that waits when the write lane dies raises StoreFailed at once."""
    store = open_store(host_bytes=0, fs=fs, close_s_max=10 * WAIT_S)
    gate = fs.hold("write", name=".seg")
    fs.fail("write", RuntimeError("a bug"), name=".seg")
    keys = prompt_keys(3)
    store.put(keys, filled_slots(keys))
    gate.wait_reached()
    flushing = in_thread(store.flush)
    gate.open()
    with pytest.raises(StoreFailed, match="a bug"):
        flushing()


def test_an_unexpected_error_on_reading(open_store: Open, fs: FaultyFileSystem) -> None:
    """A bug in a read lane ends the restore in an error or a recompute, never in a hang."""
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(3)
    put(store, keys)
    store.flush()
    fs.fail("read", RuntimeError("a bug"), name=".seg")
    with pytest.raises((RuntimeError, StoreFailed), match="a bug"):
        bring_back(store, keys)
    with pytest.raises(StoreFailed, match="a bug"):
        store.lookup(keys)
    in_thread(store.close)()


def test_an_engine_event_that_fails(open_store: Open) -> None:
    """If waiting for the engine's event raises, that put fails and the next one works."""
    store = open_store()
    keys = prompt_keys(3)

    class Event:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    with pytest.raises(TransferFailed, match="device lost"):
        store.put(keys, filled_slots(keys), after=Event()).result(WAIT_S)
    assert store.lookup(keys).stored == 0
    assert put(store, keys).stored == 3


# -- memory


def test_no_host_slot_is_a_drop(open_store: Open, fs: FaultyFileSystem) -> None:
    """With every host slot held, a put waits as long as is allowed and then drops."""
    store = open_store(
        host_bytes=0, fs=fs, staging_blocks_max=3, loads_inflight_max=2, slot_wait_s_max=0.05
    )
    gate = fs.hold("write", name=".seg")
    first = store.put(prompt_keys(3), filled_slots(prompt_keys(3)))
    gate.wait_reached()
    second = prompt_keys(4, seed=1)
    transfer = store.put(second, filled_slots(second))
    assert transfer.result(WAIT_S) == PutResult(0, 0, 4)
    gate.open()
    assert first.result(WAIT_S).stored == 3
    assert put(store, second).stored == 4


def test_no_host_slot_is_a_recompute(open_store: Open, fs: FaultyFileSystem) -> None:
    """With every host slot held, a load fails in bounded time and its block is recomputed."""
    store = open_store(
        host_bytes=0, fs=fs, staging_blocks_max=3, loads_inflight_max=2, slot_wait_s_max=0.05
    )
    keys = prompt_keys(4)
    put(store, keys)
    store.flush()
    gate = fs.hold("write", name=".seg")
    held = store.put(prompt_keys(3, seed=1), filled_slots(prompt_keys(3, seed=1)))
    assert held.released.wait(WAIT_S)
    gate.wait_reached()
    assert bring_back(store, keys).recomputed == [0, 1, 2, 3]
    gate.open()
    assert held.result(WAIT_S).stored == 3
    assert bring_back(store, keys).loaded == 4


def test_pinned_host_memory_is_not_taken(open_store: Open) -> None:
    """Pinned host copies stay whatever is put; puts go through staging beside them."""
    store = open_store(host_bytes=6 * HOST_SLOT_BYTES, slot_wait_s_max=0.2)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    with store.pin(keys) as residency:
        assert set(residency.tiers) == {Tier.HOST}
        for seed in range(1, 5):
            assert put(store, prompt_keys(6, seed)).dropped == 0
            store.flush()
        assert set(store.lookup(keys).tiers) == {Tier.HOST}
    assert bring_back(store, prompt_keys(6, 4)).loaded == 6


KILLED = """
import mmap, os, sys
import kvtier
from support import FaultyFileSystem, SPEC, prompt_keys, put, tiny_budget

class Killing(FaultyFileSystem):
    left = 0

    def _count(self, operation, name):
        if operation in ("write", "sync", "rename", "unlink", "create", "sync_directory"):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), 9)
        return super()._count(operation, name)

    def write(self, fd, data, offset):
        if self.left == 0:  # torn: half of the bytes, then the end
            whole = b"".join(data)
            half = mmap.mmap(-1, max(len(whole) // 2 // 4096 * 4096, 4096))
            half[:] = whole[: len(half)].ljust(len(half))
            self.inner.write(fd, [memoryview(half)], offset)
        super().write(fd, data, offset)

def run(path, count):
    fs = Killing()
    fs.left = count
    store = kvtier.open(path, SPEC, host_bytes=0, fs=fs, **tiny_budget(14, 4))
    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT)
    for seed in range(100):
        put(store, prompt_keys(4, seed))
        store.flush()
        os.write(log, b".")

for count in range(0, 100, 4):
    child = os.fork()
    if child == 0:
        try:
            run(sys.argv[1] + str(count), count)
        finally:
            os._exit(1)
    print(count, os.waitpid(child, 0)[1], flush=True)
"""


def test_kill_at_any_operation(store_path: str, open_store: Open) -> None:
    """A process killed at any file operation leaves no wrong byte and loses nothing flushed."""
    for line in run_python(KILLED, store_path).stdout.splitlines():
        count, status = line.split()
        assert int(status) == 9
        path = store_path + count
        log = f"{path}.log"
        flushed = os.path.getsize(log) if os.path.exists(log) else 0
        store = open_store(path=path, host_bytes=0, **tiny_budget(14, 4))
        for seed in range(flushed + 1):
            back = bring_back(store, prompt_keys(4, seed))
            # There is room for three prompts, and the one being written takes from the oldest.
            assert back.loaded == 4 or not flushed - 2 <= seed < flushed
        assert_sound(store)
        store.close()
