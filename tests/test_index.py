from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.errors import FormatError
from kvtier.tiers import index as index_module
from kvtier.tiers import keeper
from kvtier.tiers.base import BlockId
from kvtier.tiers.entries import ENTRY, id_at, table
from kvtier.tiers.index import Changes, LmdbIndex, LmdbIndexReader, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.tiers.entries import Entries

WAIT_S = 30.0
BYTES_MAX = 64 << 20
NAMESPACE = bytes(range(32))


def block(number: int) -> BlockId:
    """Return the id of a block; ids rise with their numbers."""
    return BlockId(NAMESPACE, number.to_bytes(32, "big"))


def entries_of(count: int, first: int = 0, segment: int = 0) -> list[bytes]:
    """Return consecutive packed entries, whose values depend on all arguments but the count."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    rows = np.zeros(count, dtype=ENTRY)
    rows["namespace"] = np.void(NAMESPACE)
    rows["hash"] = np.pad(numbers.astype(">u8").view("u1").reshape(-1, 8), ((0, 0), (24, 0))).view(
        "V32"
    )[:, 0]
    rows["version"] = 1
    rows["segment"] = segment
    rows["slot"] = numbers % 1000
    rows["position"] = numbers * np.uint64(0x9E3779B97F4A7C15)
    packed = rows.tobytes()
    return [packed[at : at + ENTRY.itemsize] for at in range(0, len(packed), ENTRY.itemsize)]


def entry(number: int, segment: int = 0) -> bytes:
    """Return a packed entry whose value depends on both arguments."""
    return entries_of(1, number, segment)[0]


def live(entries: Entries) -> dict[BlockId, bytes]:
    """Return what a table says, by block; no block is in it twice."""
    packed = entries.tobytes()
    rows = [packed[at : at + ENTRY.itemsize] for at in range(0, len(packed), ENTRY.itemsize)]
    result = {BlockId(row[:32], row[32:64]): row for row in rows}
    assert len(result) == len(entries)
    return result


def expected(*numbers: int) -> dict[BlockId, bytes]:
    """Return what a table of these entries says."""
    rows = entries_of(max(numbers) + 1)
    return {block(number): rows[number] for number in numbers}


@contextmanager
def opened(path: Path, bytes_max: int = BYTES_MAX, **arguments: Any) -> Iterator[LmdbIndex]:
    """Open the index in a directory for the length of a scope."""
    index = LmdbIndex(str(path), bytes_max, **arguments)
    try:
        yield index
    finally:
        index.close()


@contextmanager
def reading(path: Path) -> Iterator[LmdbIndexReader]:
    """Open a reader for the length of a scope."""
    reader = LmdbIndexReader(str(path))
    try:
        yield reader
    finally:
        reader.close()


def keeper_of(index: Any) -> int:
    """Return the process id of an index's keeper."""
    return int(index._link._process.pid)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"within {WAIT_S} s: {what}")


def gone(pid: int) -> bool:
    """Return whether a process that may not be our child has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def free(path: Path) -> bool:
    """Return whether nobody holds the flock on a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def descriptors() -> dict[str, str]:
    """Return this process's open descriptors and what they are."""
    gc.collect()
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: name for fd, name in found.items() if "/proc/" not in name}


def run_engine(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python process that owns an index, and wait for its first line."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


# -- what an index is


def test_what_was_put_is_there_after_a_reopen(tmp_path: Path) -> None:
    """Entries come back byte for byte, each once, from the same index and from the next."""
    with opened(tmp_path / "index") as index:
        assert len(index.entries()) == 0
        index.commit(entries_of(20_000), [])
        index.commit([entry(20_001)], [block(7)])
        wanted = {**expected(*range(20_000)), **expected(20_001)}
        del wanted[block(7)]
        assert live(index.entries()) == wanted
    with opened(tmp_path / "index") as index:
        assert live(index.entries()) == wanted
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "index" / "data.mdb").stat().st_mode & 0o777 == 0o600


def test_removals_come_before_entries_and_uses_last(tmp_path: Path) -> None:
    """One commit may replace an entry and count its use; uses of blocks that are gone are lost."""
    with opened(tmp_path) as index:
        index.commit([entry(1), entry(2)], [])
        uses = [Use(block(1), 3, 50), Use(block(2), 1, 60), Use(block(9), 1, 70)]
        index.commit([entry(1, segment=5)], [block(1), block(2)], uses)
        entries = index.entries()
        assert [id_at(entries, row) for row in range(len(entries))] == [block(1)]
        assert entries["segment"][0] == 5
        assert (entries["hits"][0], entries["last_use_ns"][0]) == (3, 50)


def test_the_last_of_two_entries_wins(tmp_path: Path) -> None:
    """One commit with two entries for a block leaves the later one, whatever their values."""
    with opened(tmp_path) as index:
        index.commit([entry(1, segment=9), entry(0), entry(1, segment=4)], [])
        assert live(index.entries()) == {block(0): entry(0), block(1): entry(1, segment=4)}


def test_uses_add_up(tmp_path: Path) -> None:
    """Hits add up to the most that an entry can hold; the last use never goes back."""
    with opened(tmp_path) as index:
        index.commit([entry(1), entry(2)], [])
        index.commit([], [], [Use(block(1), 2, 80), Use(block(2), (1 << 32) - 2, 1)])
        index.commit([], [], [Use(block(1), 1, 70), Use(block(2), 7, 1)])
        entries = index.entries()
        assert list(entries["hits"]) == [3, (1 << 32) - 1]
        assert list(entries["last_use_ns"]) == [80, 1]
        for name in ("segment", "slot", "position", "version"):
            assert list(entries[name]) == list(table([entry(1), entry(2)])[name])


def test_a_commit_that_was_answered_survives_its_keeper(tmp_path: Path) -> None:
    """What commit returned for is there for the next keeper, however the first one ends."""
    with opened(tmp_path) as index:
        for number in range(5):
            index.commit([entry(number)], [])
            os.kill(keeper_of(index), signal.SIGKILL)
            index.reopen()
        assert live(index.entries()) == expected(*range(5))


def test_entries_of_another_size_are_refused(tmp_path: Path) -> None:
    """What would make the index unreadable does not get in."""
    with opened(tmp_path) as index:
        with pytest.raises(ValueError, match="204 bytes"):
            index.commit([entry(1)[:-1]], [])
        with pytest.raises(ValueError, match="a key 64"):
            index.commit([], [BlockId(b"short", b"")])
        assert index.healthy()


def test_a_table_outlives_its_index_and_stays_as_it_was(tmp_path: Path) -> None:
    """Later commits, walks and the end of the index leave a table alone."""
    with opened(tmp_path) as index:
        index.commit(entries_of(10), [])
        first = index.entries()
        index.commit([], [block(number) for number in range(10)])
        assert len(index.entries()) == 0
    assert live(first) == expected(*range(10))
    assert not first.flags.writeable


# -- how big it gets


def test_the_map_grows_with_the_index(tmp_path: Path) -> None:
    """An index holds more than its first map."""
    with opened(tmp_path, 1 << 30) as index:
        for first in range(0, 100_000, 25_000):
            index.commit(entries_of(25_000, first), [])
        assert (tmp_path / "data.mdb").stat().st_size > keeper.MAP_BYTES_FIRST
        assert len(index.entries()) == 100_000
    with opened(tmp_path, 1 << 30) as index:
        assert len(index.entries()) == 100_000


def test_a_full_index_says_so_and_takes_removals(tmp_path: Path) -> None:
    """What has no room within index_bytes_max is refused whole; removals make room again."""
    with opened(tmp_path, 1 << 20) as index:
        stored = 0

        def fill() -> None:
            nonlocal stored
            for _ in range(1000):
                index.commit(entries_of(100, stored), [])
                stored += 100

        with pytest.raises(OSError, match=f"index_bytes_max is {1 << 20}") as caught:
            fill()
        assert caught.value.errno == errno.EFBIG
        assert str(tmp_path) in str(caught.value)
        assert index.healthy()
        assert live(index.entries()) == expected(*range(stored))
        for first in range(0, stored, 200):
            index.commit([], [block(number) for number in range(first, first + 200)])
        for _ in range(4):  # what was freed is used again
            index.commit(entries_of(100), [])
        assert live(index.entries()) == expected(*range(100))
        assert (tmp_path / "data.mdb").stat().st_size <= 1 << 20


def test_a_full_disk_refuses_commits_and_keeps_the_index(tmp_path: Path) -> None:
    """A commit that finds no space on disk did not happen; the index is as before and goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # the keeper inherits it
    try:
        index = LmdbIndex(str(tmp_path), BYTES_MAX)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    stored = 0

    def fill() -> None:
        nonlocal stored
        for _ in range(1000):
            index.commit(entries_of(50, stored), [])
            stored += 50

    try:
        with pytest.raises(OSError, match=f"{tmp_path}.*mdb"):
            fill()
        assert index.healthy()
        assert live(index.entries()) == expected(*range(stored))
        for first in range(0, 1000, 20):
            index.commit([], [block(number) for number in range(first, first + 20)])
        index.commit(entries_of(50), [])
        assert live(index.entries()) == expected(*range(50), *range(1000, stored))
    finally:
        index.close()


def test_a_map_that_is_too_small_for_an_empty_index_is_an_error(tmp_path: Path) -> None:
    """A limit of two pages leaves room for nothing, which is no damage."""
    with opened(tmp_path, 8 << 10) as index, pytest.raises(OSError, match="index_bytes_max"):
        index.commit([entry(1)], [])


def test_what_it_occupies_and_wrote_is_known_without_asking(tmp_path: Path) -> None:
    """disk_bytes is what du says after each commit; write_bytes adds up over keepers."""
    with opened(tmp_path) as index:
        index.commit(entries_of(5000), [])
        blocks = sum((tmp_path / name).stat().st_blocks for name in keeper.FILES)
        assert index.disk_bytes() == 512 * blocks
        written = index.write_bytes()
        assert written > 5000 * ENTRY.itemsize
        os.kill(keeper_of(index), signal.SIGSTOP)
        assert index.disk_bytes() == 512 * blocks
        os.kill(keeper_of(index), signal.SIGCONT)
        index.reset()
        assert index.write_bytes() == written
        index.commit(entries_of(5000), [])
        assert index.write_bytes() > written + 5000 * ENTRY.itemsize


# -- damage


def flip(path: Path, rng: random.Random, count: int) -> None:
    """Flip bits of a file in place."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        for _ in range(count):
            at = rng.randrange(size)
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ rng.randrange(1, 256)]))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index file with several levels, free pages and a journal."""
    path = tmp_path_factory.mktemp("pristine")
    with opened(path) as index:
        index.commit(entries_of(1500), [])
        for first in range(0, 400, 40):
            numbers = range(first, first + 40)
            index.commit([entry(5000 + first)], [block(number) for number in numbers])
    return path / "data.mdb"


def try_everything(index: LmdbIndex, number: int) -> set[str]:
    """Read and commit; return how it ended, which is nothing but what the contract names."""
    ended = set()
    try:
        index.entries()
        ended.add("table")
    except FormatError:
        ended.add("unreadable")
    except OSError:
        ended.add("failed")
    try:
        index.commit([entry(number)], [block(number + 1)], [Use(block(number), 1, 1)])
        ended.add("commit")
    except OSError:
        ended.add("no commit")
    return ended


def test_damage_before_an_open_is_an_error_at_worst(tmp_path: Path, pristine: Path) -> None:
    """Whatever is flipped in the file, it is read, or unreadable; after a reset it is an index."""
    rng = random.Random(1)  # noqa: S311
    ended: set[str] = set()
    for number in range(48):
        shutil.copyfile(pristine, tmp_path / "data.mdb")
        flip(tmp_path / "data.mdb", rng, 1 << number % 8)
        with opened(tmp_path, reply_s_max=WAIT_S) as index:
            ended |= try_everything(index, number)
            if number % 10 == 0:
                index.reset()
                index.commit([entry(1)], [])
                assert live(index.entries()) == expected(1)
    assert {"table", "unreadable", "commit", "no commit"} <= ended


def test_damage_to_an_open_index_is_an_error_at_worst(tmp_path: Path, pristine: Path) -> None:
    """The process outlives flips between commits; what is found unreadable can be started over."""
    rng = random.Random(2)  # noqa: S311
    resets = 0
    shutil.copyfile(pristine, tmp_path / "data.mdb")
    with opened(tmp_path, reply_s_max=WAIT_S) as index:
        for number in range(80):
            flip(tmp_path / "data.mdb", rng, 4)
            try_everything(index, number)
            if not index.healthy():
                resets += 1
                index.reset()
                index.commit(entries_of(300), [])
                assert live(index.entries()) == expected(*range(300))
    assert resets


def old_layout(path: Path) -> None:
    """Make an index as it was before the journal: entries in the unnamed database."""
    script = (
        "import lmdb, sys\n"
        "with lmdb.open(sys.argv[1]) as env, env.begin(write=True) as t:\n"
        "    t.put(bytes(64), bytes(140))\n"
    )
    path.unlink()
    subprocess.run([sys.executable, "-c", script, str(path.parent)], check=True, timeout=WAIT_S)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: os.truncate(path, 0),
    "one page": lambda path: os.truncate(path, 4096),
    "two pages": lambda path: os.truncate(path, 8192),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all but a page": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "noise": lambda path: path.write_bytes(random.Random(3).randbytes(1 << 16)),  # noqa: S311
    "zeros": lambda path: path.write_bytes(bytes(1 << 16)),
    "text": lambda path: path.write_text("not an index"),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "symlink": lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "old layout": old_layout,
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_what_is_no_index_is_unreadable(tmp_path: Path, pristine: Path, damage: str) -> None:
    """A file that is no whole index is never taken for an empty one, and a reset mends it."""
    shutil.copyfile(pristine, tmp_path / "data.mdb")
    DAMAGE[damage](tmp_path / "data.mdb")
    with opened(tmp_path) as index:
        with pytest.raises(FormatError, match="cannot be read"):
            index.entries()
        assert not index.healthy()
        with pytest.raises(OSError, match="index"):
            index.commit([entry(1)], [])
        index.reset()
        assert index.healthy()
        index.commit([entry(1)], [])
        assert live(index.entries()) == expected(1)
    assert (tmp_path / "data.mdb").is_file()
    assert not (tmp_path / "data.mdb").is_symlink()


def test_an_index_removed_under_its_writer_takes_no_commits(tmp_path: Path) -> None:
    """Commits to a file that has no name any more would be lost; they fail until a reset."""
    path = tmp_path / "index"
    with opened(path) as index:
        index.commit([entry(1)], [])
        shutil.rmtree(path)
        with pytest.raises(OSError, match="replaced or removed"):
            index.commit([entry(2)], [])
        assert not index.healthy()
        index.reset()
        index.commit([entry(3)], [])
        assert live(index.entries()) == expected(3)


# -- a keeper that dies, hangs or is interrupted


def test_a_dead_keeper_is_an_error_that_names_its_end(tmp_path: Path) -> None:
    """Every request says how the keeper ended and where, until it is started again."""
    with opened(tmp_path) as index:
        index.commit([entry(1)], [])
        os.kill(keeper_of(index), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(OSError, match=f"{tmp_path}.*SIGKILL"):
                index.commit([entry(2)], [])
        assert not index.healthy()
        with pytest.raises(FormatError, match="SIGKILL"):
            index.entries()
        index.reopen()
        assert index.healthy()
        index.commit([entry(2)], [])
        assert live(index.entries()) == expected(1, 2)


def test_a_keeper_killed_at_any_moment_leaves_whole_commits(tmp_path: Path) -> None:
    """After a kill amid commits each of them is there or not, those that returned for certain."""
    rng = random.Random(4)  # noqa: S311
    returned: set[int] = set()
    with opened(tmp_path) as index:
        index.entries()
        number = 0
        for _ in range(25):
            killer = threading.Timer(
                rng.random() * 0.02, os.kill, (keeper_of(index), signal.SIGKILL)
            )
            killer.start()
            with suppress(OSError):
                while True:
                    number += 1
                    index.commit([entry(2 * number), entry(2 * number + 1)], [])
                    returned.add(number)
            killer.join()
            assert not index.healthy()
            index.reopen()
        found = set(live(index.entries()))
    for commit in range(1, number + 1):
        pair = {block(2 * commit), block(2 * commit + 1)}
        assert pair <= found or (commit not in returned and not pair & found)


def test_a_keeper_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    """A request returns after its deadline, and the index can be opened again."""
    with opened(tmp_path, reply_s_max=0.2) as index:
        index._reply_s_max = WAIT_S  # the next keepers have time
        with suppress(FormatError, OSError):
            index.commit([entry(1)], [])
        index.reopen()
        index.commit([entry(1)], [])
        index._link._reply_s_max = 0.2
        os.kill(keeper_of(index), signal.SIGSTOP)
        with pytest.raises(OSError, match="did not answer within") as caught:
            index.commit([entry(2)], [])
        assert caught.value.errno == errno.ETIMEDOUT
        assert not index.healthy()
        index.reopen()
        assert live(index.entries()) == expected(1)


def test_an_interrupted_request_ends_its_keeper(tmp_path: Path) -> None:
    """An exception amid a request passes on, and no later answer is taken for another one's."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_arguments: object) -> None:
        raise Interrupt

    with opened(tmp_path) as index:
        index.commit([entry(1)], [])
        os.kill(keeper_of(index), signal.SIGSTOP)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Interrupt):
                index.entries()
        finally:
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(OSError, match="interrupted"):
            index.commit([entry(2)], [])
        index.reopen()
        assert live(index.entries()) == expected(1)


def test_a_broken_pipe_does_not_end_the_engine(tmp_path: Path) -> None:
    """An engine that restored SIGPIPE's default outlives a dead keeper."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with opened(tmp_path) as index:
            index.commit([entry(1)], [])
            pid = keeper_of(index)
            os.kill(pid, signal.SIGKILL)
            until(lambda: gone(pid), "the keeper is dead")
            with pytest.raises(OSError, match="SIGKILL"):
                index.commit([entry(2)], [])
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_the_keeper_is_not_in_the_engines_group(tmp_path: Path) -> None:
    """Ctrl-C, which goes to a whole process group, does not reach the keeper."""
    with opened(tmp_path) as index:
        assert os.getpgid(keeper_of(index)) != os.getpgid(0)


def test_a_closed_index_refuses(tmp_path: Path) -> None:
    """Closing twice is once; afterwards every request is an error."""
    index = LmdbIndex(str(tmp_path), BYTES_MAX)
    index.commit([entry(1)], [])
    index.close()
    index.close()
    assert not index.healthy()
    for call in (index.entries, index.reset, index.reopen, lambda: index.commit([entry(2)], [])):
        with pytest.raises(OSError, match="closed"):
            call()
    with opened(tmp_path) as again:
        assert live(again.entries()) == expected(1)


# -- nothing left behind


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Opens, deaths, resets, tables and readers leave no descriptor and no child."""
    with opened(tmp_path) as index:
        index.commit(entries_of(3), [])
    before = descriptors()
    pids = []
    for number in range(6):
        with opened(tmp_path) as index, reading(tmp_path) as reader:
            index.entries()
            pids.append(keeper_of(index))
            if number % 2:
                os.kill(keeper_of(index), signal.SIGKILL)
                with pytest.raises(FormatError):
                    index.entries()
                index.reopen()
                pids.append(keeper_of(index))
            index.commit([entry(number)], [])
            reader.snapshot()
            pids.append(keeper_of(reader))
            if number == 4:
                index.reset()
                pids.append(keeper_of(index))
    assert descriptors() == before
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_table_is_a_mapping_that_goes_with_it(tmp_path: Path) -> None:
    """A table of many entries is not a copy, and holds its file no longer than it lives."""
    with opened(tmp_path) as index:
        index.commit(entries_of(20_000), [])
        before = descriptors()
        entries = index.entries()
        assert [name for name in descriptors().values() if "kvtier-index" in name]
        assert len(entries) == 20_000
        del entries
        assert descriptors() == before


def test_a_forked_child_neither_uses_nor_disturbs_it(tmp_path: Path) -> None:
    """In a forked child every call is an error, its end changes nothing, it holds nothing."""
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit([entry(1)], [])
        reader.snapshot()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
            pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (index.entries, index.reset, index.reopen, reader.snapshot):
                try:
                    call()
                except OSError as error:
                    refused += "parent" in str(error)
            held = [name for name in descriptors().values() if "mdb" in name]
            index.close()
            reader.close()
            os._exit(0 if refused == 4 and not held else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        index.commit([entry(2)], [])
        assert live(reader.snapshot()[1]) == live(index.entries()) == expected(1, 2)


ENGINE = """
import fcntl, os, sys
from kvtier.tiers.index import LmdbIndex
lock = os.open(sys.argv[1] + "/LOCK", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
index = LmdbIndex(sys.argv[1] + "/index", 1 << 24, lock_fd=lock)
index.entries()
child = os.fork() if sys.argv[2] == "fork" else -1
if child == 0:
    os.close(lock)
    sys.stdin.readline()  # a worker that lives on
    os._exit(0)
print(index._link._process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("forked", ["fork", "no"])
def test_the_keeper_of_a_killed_engine_ends_and_holds_the_lock_until_then(
    tmp_path: Path, forked: str
) -> None:
    """The store stays locked while its dead engine's keeper may still commit, and no longer."""
    engine = run_engine(ENGINE, str(tmp_path), forked)
    assert engine.stdin is not None
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    try:
        os.kill(pid, signal.SIGSTOP)
        engine.kill()
        engine.wait(WAIT_S)
        assert not free(tmp_path / "LOCK")
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: gone(pid), "the keeper ended")
    until(lambda: free(tmp_path / "LOCK"), "the lock is free")
    with suppress(BrokenPipeError):
        engine.stdin.close()
    engine.stdout.close()


# -- readers


def applied(before: dict[BlockId, bytes], changes: Changes) -> dict[BlockId, bytes]:
    """Return what a reader knows after changes."""
    after = before | live(changes.put)
    assert not set(live(changes.put)) & set(changes.removed)
    return {key: value for key, value in after.items() if key not in changes.removed}


def test_a_reader_follows(tmp_path: Path) -> None:
    """Changes on top of a snapshot are the index, each block once and as it is now."""
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit(entries_of(10), [])
        sequence, entries = reader.snapshot()
        assert (sequence, live(entries)) == (10, expected(*range(10)))
        nothing = reader.since(sequence)
        assert nothing is not None
        assert (nothing.sequence, len(nothing.put), nothing.removed) == (10, 0, [])
        index.commit([entry(3, segment=1), entry(20)], [block(4)])
        index.commit([entry(3, segment=2), entry(4, segment=2)], [block(20), block(5)])
        index.commit([], [], [Use(block(1), 1, 1)])
        changes = reader.since(sequence)
        assert changes is not None
        assert changes.sequence == 17
        assert live(changes.put) == {
            block(3): entry(3, segment=2),
            block(4): entry(4, segment=2),
        }
        assert sorted(changes.removed, key=lambda id_: id_.hash) == [block(5), block(20)]


def test_the_journal_goes_on_after_a_reopen(tmp_path: Path) -> None:
    """Sequence numbers are never used twice, also when the index was empty in between."""
    with reading(tmp_path) as reader:
        with opened(tmp_path) as index:
            index.commit([entry(1)], [])
            sequence, entries = reader.snapshot()
        with opened(tmp_path) as index:
            index.commit([], [block(1)])
        with opened(tmp_path) as index:
            index.commit([entry(2)], [])
        changes = reader.since(sequence)
        assert changes is not None
        assert changes.sequence == 3
        assert applied(live(entries), changes) == expected(2)


def test_a_reader_that_is_too_far_behind_takes_a_snapshot(tmp_path: Path) -> None:
    """The journal keeps so many changes, from one commit or many; none of the kept ones is lost."""
    kept = keeper.CHANGES_KEPT
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit([entry(1)], [])
        sequence, _ = reader.snapshot()
        for first in range(0, kept, 512):
            index.commit(entries_of(512, first), [])
        full = reader.since(sequence)
        assert full is not None
        assert live(full.put) == expected(*range(kept))
        index.commit([], [block(0)])
        assert reader.since(sequence) is None
        assert reader.since(sequence + 1) is not None
        assert reader.since(kept + 3) is None
        index.commit(entries_of(3 * kept), [])
        last, entries = reader.snapshot()
        assert last == 2 + 4 * kept
        assert live(entries) == expected(*range(3 * kept))
        newest = reader.since(last - kept)
        assert newest is not None
        assert live(newest.put) == expected(*range(2 * kept, 3 * kept))
        assert reader.since(last - kept - 1) is None


def test_a_small_index_keeps_a_short_journal(tmp_path: Path) -> None:
    """The journal does not crowd out the entries of an index whose limit is small."""
    with opened(tmp_path, 256 << 10) as index, reading(tmp_path) as reader:
        for number in range(1000):
            index.commit([entry(number % 20, segment=number)], [])
        sequence, entries = reader.snapshot()
        assert (sequence, len(entries)) == (1000, 20)
        assert reader.since(1000 - 256) is not None
        assert reader.since(1000 - 257) is None


def test_a_reader_finds_the_index_that_replaced_its_own(tmp_path: Path) -> None:
    """After a reset old sequence numbers mean nothing, though the new ones pass them."""
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit(entries_of(5), [])
        sequence, _ = reader.snapshot()
        index.reset()
        index.commit(entries_of(9, 100), [])
        assert reader.since(sequence) is None
        last, entries = reader.snapshot()
        assert (last, live(entries)) == (9, expected(*range(100, 109)))
        changes = reader.since(sequence)
        assert changes is not None
        assert len(changes.put) == 4


def test_a_reader_without_an_index(tmp_path: Path) -> None:
    """Before there is an index there is nothing to follow; later the same reader finds it."""
    with reading(tmp_path) as reader:
        assert reader.since(0) is None
        with pytest.raises(FormatError, match="cannot be read"):
            reader.snapshot()
        assert not os.listdir(tmp_path)
        with opened(tmp_path) as index:
            index.commit([entry(1)], [])
            assert live(reader.snapshot()[1]) == expected(1)


def test_a_reader_of_a_damaged_index(tmp_path: Path, pristine: Path) -> None:
    """Flips make a reader's snapshot an error at worst, and its changes None."""
    rng = random.Random(5)  # noqa: S311
    ended = set()
    with opened(tmp_path):
        pass
    with reading(tmp_path) as reader:
        for number in range(24):
            shutil.copyfile(pristine, tmp_path / "data.mdb")
            flip(tmp_path / "data.mdb", rng, 1 << number % 8)
            try:
                reader.since(reader.snapshot()[0])
                ended.add("table")
            except FormatError:
                ended.add("unreadable")
    assert ended == {"table", "unreadable"}


def test_a_snapshot_amid_commits_is_one_moment(tmp_path: Path) -> None:
    """Every snapshot and all changes after it show whole commits, and none twice."""
    stop = threading.Event()
    mass = 20_000
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit([*entries_of(mass, 10), entry(0, segment=1)], [])

        def replace() -> None:
            moves = 1
            while not stop.is_set():
                # The one entry that moves is before the mass, amid it, or behind it.
                places = [block(0), block(1_000_000)]
                moves += 1
                index.commit([entry(moves % 2 * 1_000_000, segment=moves)], places)

        writer = threading.Thread(target=replace)
        writer.start()
        try:
            for _ in range(10):
                sequence, entries = reader.snapshot()
                known = live(entries)
                assert len(known) == mass + 1
                changes = reader.since(sequence)
                assert changes is not None
                assert len(applied(known, changes)) == mass + 1
        finally:
            stop.set()
            writer.join(WAIT_S)


def test_a_large_index_is_merged_with_what_changed_meanwhile() -> None:
    """Changes apply to a table that has all, some or none of them."""
    entries = table(entries_of(50))
    changes = Changes(1, table([entry(7, segment=3), entry(60)]), [block(8), block(99)])
    merged = live(index_module._merged(entries, changes))
    wanted = {**expected(*range(50)), **expected(60), block(7): entry(7, segment=3)}
    del wanted[block(8)]
    assert merged == wanted
    assert live(index_module._merged(table([]), changes)) == live(changes.put)


READER_IN_TRANSACTION = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=2)
entries = env.open_db(b"entries", create=False)
transaction = env.begin(entries)
print(transaction.stat(entries)["entries"], flush=True)
sys.stdin.readline()
"""


def churn(index: LmdbIndex, commits: int) -> int:
    """Rewrite an index's entries again and again; return the size it ends with."""
    for number in range(commits):
        index.commit([entry(n, segment=number) for n in range(0, 600, 20)], [])
    return index.disk_bytes()


def test_a_reader_that_dies_amid_a_transaction_pins_nothing(tmp_path: Path) -> None:
    """A killed reader does not block the writer, and the pages that it pinned are used again."""
    with opened(tmp_path) as index:
        index.commit(entries_of(600), [])
        churn(index, 10)
        reader = run_engine(READER_IN_TRANSACTION, str(tmp_path))
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == 600
        grown = churn(index, 20)
        reader.kill()
        reader.wait(WAIT_S)
        assert churn(index, 60) <= grown + (256 << 10)
        reader.stdin.close()
        reader.stdout.close()


def test_a_reader_that_polls_does_not_make_the_index_grow(tmp_path: Path) -> None:
    """Readers hold no transaction between their requests, so freed pages are used again."""
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit(entries_of(600), [])
        settled = churn(index, 20)
        sequence, entries = reader.snapshot()
        known = live(entries)
        for number in range(40):
            churn(index, 5)
            if number % 10 == 0:
                sequence, entries = reader.snapshot()
                known = live(entries)
            changes = reader.since(sequence)
            assert changes is not None
            known = applied(known, changes)
            sequence = changes.sequence
        assert known == live(index.entries())
        assert index.disk_bytes() <= 2 * settled


def test_a_reader_whose_keeper_died_starts_another(tmp_path: Path) -> None:
    """A reader's keeper may be killed at any time: the next call has a new one."""
    with opened(tmp_path) as index, reading(tmp_path) as reader:
        index.commit([entry(1)], [])
        sequence, _ = reader.snapshot()
        os.kill(keeper_of(reader), signal.SIGKILL)
        assert reader.since(sequence) is None
        index.commit([entry(2)], [])
        changes = reader.since(sequence)
        assert changes is not None
        assert live(changes.put) == expected(2)
        os.kill(keeper_of(reader), signal.SIGKILL)
        with pytest.raises(FormatError, match="SIGKILL"):
            reader.snapshot()
        assert live(reader.snapshot()[1]) == expected(1, 2)
    with pytest.raises(OSError, match="closed"):
        reader.snapshot()


# -- an onlooker: a reader that nobody knows of


@contextmanager
def looking(path: Path) -> Iterator[LmdbIndexReader]:
    """Open a reader that changes no file for the length of a scope."""
    reader = LmdbIndexReader(str(path), onlooker=True)
    try:
        yield reader
    finally:
        reader.close()


def test_an_onlooker_changes_no_file(tmp_path: Path) -> None:
    """It reads all there is, needs no lock file, and leaves none and no trace in one."""
    with opened(tmp_path) as index:
        index.commit(entries_of(20_000), [])
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with looking(tmp_path) as onlooker:
            assert live(onlooker.snapshot()[1]) == expected(*range(20_000))
            assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "lock.mdb").unlink()
    with looking(tmp_path) as onlooker:
        assert live(onlooker.snapshot()[1]) == expected(*range(20_000))
    assert {path.name for path in tmp_path.iterdir()} == {"data.mdb"}


@pytest.mark.parametrize("commits", [0, 1, 2, 5])
def test_what_an_onlooker_read_counts_only_if_it_was_still_there(
    tmp_path: Path, commits: int
) -> None:
    """One commit frees pages but writes over none that a transaction before it needs; two may."""
    with opened(tmp_path) as index:
        index.commit(entries_of(1000), [])
        onlooker = keeper.Index(str(tmp_path), keeper.ONLOOKER)
        attempts: list[int] = []

        def read(transaction: Any, attempt: int) -> int:
            attempts.append(attempt)
            if attempt == 0:
                for number in range(commits):
                    index.commit([entry(number, segment=9)], [])
            return int(transaction.id())

        read_in = onlooker._read(read)
        onlooker.close()
    assert attempts == ([0] if commits < 2 else [0, 1])
    assert read_in == 2 + (commits if commits >= 2 else 0)


def test_an_onlooker_of_an_index_that_never_rests_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not try for ever, and what fails because pages were written over is no fault."""
    monkeypatch.setattr(keeper, "ONLOOKER_TRIES_MAX", 5)
    with opened(tmp_path) as index:
        index.commit(entries_of(100), [])
        onlooker = keeper.Index(str(tmp_path), keeper.ONLOOKER)
        attempts: list[int] = []

        def read(_transaction: Any, attempt: int) -> None:
            attempts.append(attempt)
            for _ in range(2):
                index.commit([entry(1, segment=attempt)], [])
            raise keeper.Unreadable("torn")

        with pytest.raises(keeper.Unreadable, match="changes faster"):
            onlooker._read(read)
        onlooker.close()
    assert attempts == [0, 1, 2, 3, 4]


def test_an_onlooker_sees_whole_states_of_an_index_that_changes_all_the_time(
    tmp_path: Path,
) -> None:
    """Each snapshot beside a busy writer is what one of its commits left, to the last entry."""
    width = 20_000
    with opened(tmp_path) as index, looking(tmp_path) as onlooker:
        index.commit(entries_of(width), [])
        done = threading.Event()
        last = 0

        def write() -> None:
            nonlocal last
            while not done.is_set():
                index.commit([entry(last + width)], [block(last)])
                last += 1

        writer = threading.Thread(target=write)
        writer.start()
        firsts = []
        try:
            for _ in range(15):
                entries = onlooker.snapshot()[1]
                first = int.from_bytes(id_at(entries, 0).hash, "big")
                assert entries.tobytes() == b"".join(entries_of(width, first))
                firsts.append(first)
        finally:
            done.set()
            writer.join(WAIT_S)
    assert firsts == sorted(firsts)
    assert 0 < firsts[-1] <= last


def test_an_onlooker_that_is_stopped_does_not_make_the_index_grow(tmp_path: Path) -> None:
    """However long it takes over its answer, it keeps nobody from using freed pages again."""
    with opened(tmp_path) as index, looking(tmp_path) as onlooker:
        index.commit(entries_of(600), [])
        settled = churn(index, 20)
        onlooker.snapshot()
        os.kill(keeper_of(onlooker), signal.SIGSTOP)
        try:
            churn(index, 100)
            assert index.disk_bytes() <= 2 * settled
        finally:
            os.kill(keeper_of(onlooker), signal.SIGCONT)
