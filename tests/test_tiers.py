from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from contracts.tier_contract import BLOCK_BYTES, TierContract, fetch, store_one
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    FaultyFileSystem,
    MemoryIndex,
    disk_bytes,
    flip,
    in_thread,
    payload,
    record_of,
)

from kvtier import LinkThrottle
from kvtier.tiers.base import BlockId, Location, ReadResult, Record, Usage
from kvtier.tiers.device_pool import DevicePool, device_slot_bytes
from kvtier.tiers.entries import id_at, location_at
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.host import HostTier
from kvtier.tiers.index import LmdbIndex
from kvtier.tiers.segment import PAGE_BYTES
from kvtier.tiers.ssd import SsdTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtier.tiers.index import Index

LIMIT = 2 << 20
SEGMENT = 20 * SLOT_BYTES + PAGE_BYTES


class DictTier:
    """The contract in its shortest form: a dict from slot to (id, bytes)."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._blocks: dict[int, tuple[BlockId, bytes]] = {}

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store blocks."""
        placed: list[Location | None] = []
        for record, data in zip(records, payloads, strict=True):
            free = next((n for n in range(self._slots) if n not in self._blocks), None)
            if free is None or data.nbytes != record.payload_bytes:
                placed.append(None)
                continue
            self._blocks[free] = (record.id, bytes(data))
            placed.append(Location(0, free, 0))
        return placed

    def read(
        self, ids: Sequence[BlockId], locations: Sequence[Location], into: Sequence[memoryview]
    ) -> list[ReadResult]:
        """Fetch blocks."""
        found = []
        for block, where, target in zip(ids, locations, into, strict=True):
            known, data = self._blocks.get(where.slot, (None, b""))
            right = known == block and len(data) == target.nbytes
            if right:
                target[:] = data
            found.append(ReadResult.OK if right else ReadResult.GONE)
        return found

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Forget blocks."""
        for block, where in zip(ids, locations, strict=True):
            if self._blocks.get(where.slot, (None,))[0] == block:
                del self._blocks[where.slot]

    def usage(self) -> Usage:
        """Return how full it is."""
        used = sum(len(data) for _, data in self._blocks.values())
        return Usage(len(self._blocks), used, self._slots * BLOCK_BYTES)

    def check(self) -> list[str]:
        """Return no problem."""
        return []

    def close(self) -> None:
        """Do nothing."""


class TestDictTier(TierContract):
    """The reference passes the contract, so the contract can be met."""

    blocks_at_most = 12

    def make(self, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
        """Give a dict of 12 slots."""
        return contextlib.nullcontext(DictTier(12))


class TestHostTier(TierContract):
    """Host memory passes the contract."""

    blocks_at_most = 12

    def make(self, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
        """Give an arena of 12 slots."""
        return contextlib.closing(HostTier(BLOCK_BYTES, 12, 12 * HOST_SLOT_BYTES))


class TestDevicePool(TierContract):
    """The device pool passes the contract, in CPU memory."""

    blocks_at_most = 12

    def make(self, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
        """Give a pool of 12 slots."""
        limit = 13 * device_slot_bytes(BLOCK_BYTES) - 1
        return contextlib.closing(DevicePool(BLOCK_BYTES, limit, "cpu"))


@contextlib.contextmanager
def ssd_tier(
    folder: Path,
    index: Index | None = None,
    fs: Any = None,
    *,
    limit: int = LIMIT,
    segment: int = SEGMENT,
    **options: Any,
) -> Iterator[SsdTier]:
    """Open an SSD tier in a folder, with a real index unless one is given."""
    os.makedirs(folder / "segments", exist_ok=True)
    directory = os.open(folder / "segments", os.O_RDONLY)
    index = index or LmdbIndex(str(folder / "index"), 16 << 20)
    try:
        tier = SsdTier(
            directory,
            index,
            fs or PosixFileSystem(),
            limit_bytes=limit,
            segment_bytes_max=segment,
            **options,
        )
        yield tier
        tier.close()
    finally:
        index.close()
        os.close(directory)


class TestSsdTier(TierContract):
    """The SSD tier passes the contract, on a real disk with a real index."""

    @property
    def blocks_at_most(self) -> int:
        """Fill a twin and count; that it keeps within its limit is tested elsewhere."""
        with self.make(self._path / "twin") as twin:
            return next(n for n in range(600) if store_one(twin, record_of(n + 10)) is None)

    @contextlib.contextmanager
    def make(self, tmp_path: Path) -> Iterator[SsdTier]:
        """Give a tier of 2 MiB."""
        self._path = tmp_path
        with ssd_tier(tmp_path) as tier:
            yield tier


class TestSsdTierInMemoryIndex(TestSsdTier):
    """The SSD tier passes the contract with any index."""

    @contextlib.contextmanager
    def make(self, tmp_path: Path) -> Iterator[SsdTier]:
        """Give a tier of 2 MiB with an index in memory."""
        self._path = tmp_path
        with ssd_tier(tmp_path, MemoryIndex()) as tier:
            yield tier


# -- host memory


def test_a_host_slot_given_back_twice_raises() -> None:
    """A double free is an error, not a slot handed out twice."""
    tier = HostTier(BLOCK_BYTES, 2, 2 * HOST_SLOT_BYTES)
    slot = tier.reserve()
    tier.release(slot)
    with pytest.raises(ValueError, match="twice"):
        tier.release(slot)
    assert {tier.reserve(), tier.reserve()} == {0, 1}
    assert tier.reserve() is None
    tier.close()


def test_a_host_slot_that_is_not_taken_has_no_buffer() -> None:
    """Nobody gets at the bytes of a slot that they do not hold."""
    tier = HostTier(BLOCK_BYTES, 2, 2 * HOST_SLOT_BYTES)
    with pytest.raises(ValueError, match="not taken"):
        tier.buffer(0)
    with pytest.raises(ValueError, match="not taken"):
        tier.label(0, record_of(0).id)
    tier.close()


def test_host_slots_are_whole_pages_and_do_not_overlap() -> None:
    """Each slot starts on a page, so that direct I/O can fill it, and is its holder's alone."""
    tier = HostTier(BLOCK_BYTES, 3, 3 * HOST_SLOT_BYTES)
    slots = [tier.reserve() for _ in range(3)]
    for number, slot in enumerate(slots):
        tier.buffer(slot)[:] = bytes([number]) * BLOCK_BYTES
    for number, slot in enumerate(slots):
        assert bytes(tier.buffer(slot)) == bytes([number]) * BLOCK_BYTES
    assert tier.usage() == Usage(3, 3 * HOST_SLOT_BYTES, 3 * HOST_SLOT_BYTES)
    tier.close()


def test_a_view_outlives_a_closed_host_tier() -> None:
    """Closing while somebody still looks at a slot crashes nobody."""
    tier = HostTier(BLOCK_BYTES, 1, HOST_SLOT_BYTES)
    view = tier.buffer(tier.reserve())
    view[:] = b"\x07" * BLOCK_BYTES
    tier.close()
    assert bytes(view) == b"\x07" * BLOCK_BYTES


# -- the SSD


def test_a_reopened_ssd_tier_has_every_block(tmp_path: Path) -> None:
    """Blocks, locations and usage are the same after closing and opening."""
    records = [record_of(n) for n in range(30)]
    with ssd_tier(tmp_path) as tier:
        placed = tier.write(records, [payload(r) for r in records])
        used = tier.usage()
    with ssd_tier(tmp_path) as tier:
        assert {id_at(tier.entries, n): location_at(tier.entries, n) for n in range(30)} == {
            record.id: where for record, where in zip(records, placed, strict=True)
        }
        assert tier.usage() == used
        for record, where in zip(records, placed, strict=True):
            assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))
        assert tier.check() == []


def test_two_syncs_for_a_batch(tmp_path: Path) -> None:
    """A batch into one segment costs one data sync and one index commit, whatever its size."""
    fs = FaultyFileSystem()
    index = MemoryIndex()
    with ssd_tier(tmp_path, index, fs) as tier:
        store_one(tier, record_of(0))
        before = fs.counts["sync"]
        records = [record_of(n) for n in range(1, 17)]
        tier.write(records, [payload(r) for r in records])
        assert fs.counts["sync"] == before + 1


def test_bytes_before_pointers(tmp_path: Path) -> None:
    """No entry is committed before its data was written and synced, and its segment's name too."""
    events = []
    index = MemoryIndex()
    commit = index.commit

    class Recording(FaultyFileSystem):
        def sync(self, fd: int) -> None:
            events.append("sync")
            super().sync(fd)

        def sync_directory(self, directory: int) -> None:
            events.append("sync directory")
            self.inner.sync_directory(directory)

        def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
            events.append("write")
            super().write(fd, data, offset)

    def recording(put: Any, remove: Any, uses: Any = ()) -> None:
        events.append("commit")
        commit(put, remove, uses)

    index.commit = recording
    with ssd_tier(tmp_path, index, Recording()) as tier:
        store_one(tier, record_of(0))
    first = events[: events.index("commit") + 1]
    assert first[-1] == "commit"
    assert first.index("sync") > max(n for n, what in enumerate(first) if what == "write")
    assert "sync directory" in first


@pytest.mark.parametrize("operation", ["open_file", "write", "sync", "sync_directory", "create"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_disk_drops_the_write_and_nothing_else(
    tmp_path: Path, operation: str, error: int, nth: int
) -> None:
    """After any failed operation the books balance, what was there is right, later writes work."""
    fs = FaultyFileSystem()
    with ssd_tier(tmp_path, MemoryIndex(), fs, segment=3 * SLOT_BYTES + PAGE_BYTES) as tier:
        kept = {n: store_one(tier, record_of(n)) for n in range(2)}
        room = tier.room(SLOT_BYTES)
        fs.fail(operation, error, nth=nth)
        records = [record_of(n) for n in range(2, 8)]
        placed = tier.write(records, [payload(r) for r in records])
        fs.heal()
        kept |= {2 + n: where for n, where in enumerate(placed) if where is not None}
        assert tier.check() == []
        assert tier.usage().blocks == len(kept)
        for number, where in kept.items():
            record = record_of(number)
            assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))
        assert tier.room(SLOT_BYTES) >= room - len(records)
        assert store_one(tier, record_of(100)) is not None


def test_a_failed_commit_stores_nothing(tmp_path: Path) -> None:
    """If the index does not commit, no block of the batch is stored and its slots are free."""
    index = MemoryIndex()
    failures: list[int] = []
    with ssd_tier(tmp_path, index, failed=lambda: failures.append(1)) as tier:
        index.error = OSError(errno.EIO, "no commit")
        records = [record_of(n) for n in range(4)]
        assert tier.write(records, [payload(r) for r in records]) == [None] * 4
        assert failures == [1]
        index.error = None
        assert tier.check() == []
        assert tier.usage().blocks == 0
        assert None not in tier.write(records, [payload(r) for r in records])


def test_a_failed_drop_frees_nothing(tmp_path: Path) -> None:
    """A block whose removal is not durable keeps its slot: it could come back after a crash."""
    index = MemoryIndex()
    with ssd_tier(tmp_path, index) as tier:
        record = record_of(1)
        where = store_one(tier, record)
        index.error = OSError(errno.ENOSPC, "no commit")
        with pytest.raises(OSError, match="no commit"):
            tier.drop([record.id], [where])
        index.error = None
        assert fetch(tier, record, where)[0] is ReadResult.OK
        assert store_one(tier, record_of(2)) != where
        assert tier.check() == []


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOENT, errno.ELOOP])
def test_a_read_error_is_an_answer(tmp_path: Path, error: int) -> None:
    """An error of the disk on reading is a result, never an exception."""
    fs = FaultyFileSystem()
    with ssd_tier(tmp_path, MemoryIndex(), fs) as tier:
        record = record_of(1)
        where = store_one(tier, record)
        fs.fail("read", error, times=1)
        assert fetch(tier, record, where)[0] is not ReadResult.OK


def test_out_of_descriptors_is_not_damage(tmp_path: Path) -> None:
    """A block that could not be opened for want of descriptors is still there."""
    fs = FaultyFileSystem()
    with ssd_tier(tmp_path, MemoryIndex(), fs) as tier:
        record = record_of(1)
        where = store_one(tier, record)
        fs.fail("open_file", errno.EMFILE, times=1)
        assert fetch(tier, record, where)[0] is ReadResult.FAILED
        assert fetch(tier, record, where)[0] is ReadResult.OK


@pytest.mark.parametrize("missing", [1, 4096, BLOCK_BYTES, SLOT_BYTES])
def test_a_short_read_is_never_ok(tmp_path: Path, missing: int) -> None:
    """A read that ends early does not pass for a block."""
    fs = FaultyFileSystem()
    with ssd_tier(tmp_path, MemoryIndex(), fs) as tier:
        record = record_of(1)
        where = store_one(tier, record)
        fs.shorten(missing)
        assert fetch(tier, record, where)[0] is not ReadResult.OK


def test_every_flipped_byte_of_a_record_is_a_miss(tmp_path: Path) -> None:
    """No byte of a record, header or payload, can change without the read noticing."""
    with ssd_tier(tmp_path, MemoryIndex()) as tier:
        record = record_of(1)
        where = store_one(tier, record)
        (name,) = os.listdir(tmp_path / "segments")
        path = tmp_path / "segments" / name
        start = PAGE_BYTES + where.slot * where.slot_bytes
        for offset in range(0, PAGE_BYTES + BLOCK_BYTES, 37):
            flip(path, start + offset, 1 << offset % 8)
            assert fetch(tier, record, where)[0] is ReadResult.GONE, f"byte {offset}"
            flip(path, start + offset, 1 << offset % 8)
        assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))


def test_an_empty_segment_is_unlinked_at_open(tmp_path: Path) -> None:
    """A segment that holds nothing gives its bytes back at an open, and its id is not reused."""
    index = MemoryIndex()
    seen: set[int] = set()
    one_slot = SLOT_BYTES + PAGE_BYTES
    for number in range(3):
        with ssd_tier(tmp_path, index, segment=one_slot) as tier:
            records = [record_of(2 * number), record_of(2 * number + 1)]
            placed = tier.write(records, [payload(record) for record in records])
            segments = {where.segment for where in placed}
            assert len(segments) == 2
            assert not segments & seen
            seen |= segments
            tier.drop([records[0].id], [placed[0]])
        with ssd_tier(tmp_path, index, segment=one_slot) as tier:
            assert len(os.listdir(tmp_path / "segments")) == tier.usage().blocks == number + 1


def test_what_is_not_a_segment_is_left_alone(tmp_path: Path) -> None:
    """A stranger's file in the folder is neither read nor removed."""
    os.makedirs(tmp_path / "segments")
    for name in ("notes.txt", "00.seg", "0000000000000001.SEG"):
        (tmp_path / "segments" / name).write_bytes(b"mine")
    with ssd_tier(tmp_path) as tier:
        assert store_one(tier, record_of(1)) is not None
    for name in ("notes.txt", "00.seg", "0000000000000001.SEG"):
        assert (tmp_path / "segments" / name).read_bytes() == b"mine"


def test_reads_run_beside_a_writer(tmp_path: Path) -> None:
    """Blocks that are not touched stay right while others are written and dropped."""
    with ssd_tier(tmp_path) as tier:
        fixed = [(record_of(n), store_one(tier, record_of(n))) for n in range(4)]

        def read_all() -> int:
            for _ in range(10):
                for record, where in fixed:
                    assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))
            return 10

        readers = [in_thread(read_all) for _ in range(2)]
        for number in range(100, 120):
            where = store_one(tier, record_of(number))
            tier.drop([record_of(number).id], [where])
        assert [reader() for reader in readers] == [10, 10]


def test_the_disk_never_holds_more_than_the_limit(tmp_path: Path) -> None:
    """Filled to the brim and turned over, the tier stays within its bytes as du counts them."""
    with ssd_tier(tmp_path, limit=3 << 20) as tier:
        stored = []
        for number in range(600):
            where = store_one(tier, record_of(number))
            if where is None:
                record, old = stored.pop(0)
                tier.drop([record.id], [old])
                where = store_one(tier, record_of(number))
            stored.append((record_of(number), where))
            if number % 50 == 0:
                assert disk_bytes(tmp_path) <= 3 << 20
        assert disk_bytes(tmp_path) <= tier.usage().used_bytes <= 3 << 20


def test_room_is_what_can_be_written(tmp_path: Path) -> None:
    """``room`` promises no more than ``write`` then takes."""
    for segment in (1, 5, 20, 10_000):
        folder = tmp_path / str(segment)
        size = segment * SLOT_BYTES + PAGE_BYTES
        with ssd_tier(folder, MemoryIndex(), segment=size) as tier:
            room = tier.room(SLOT_BYTES)
            records = [record_of(n) for n in range(room)]
            assert None not in tier.write(records, [payload(r) for r in records])


# -- files and links


def test_the_file_system_reads_and_writes_any_buffers(tmp_path: Path) -> None:
    """Positional reads and writes fill every buffer, and report fewer bytes only at the end."""
    fs = PosixFileSystem()
    directory = fs.open_directory(str(tmp_path / "d"))
    fd = fs.open_file(directory, "f", write=True, create=True)
    fs.write(fd, [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")], 2)
    into = [memoryview(bytearray(4)), memoryview(bytearray(0)), memoryview(bytearray(10))]
    assert fs.read(fd, into, 2) == 7
    assert bytes(into[0]) + bytes(into[2]) == b"abcdefg" + bytes(7)
    assert fs.size(fd) == 9
    fs.close(fd)
    fs.close(directory)


def test_a_file_is_not_created_over_another(tmp_path: Path) -> None:
    """Creating fails if the name exists, even as a dangling link."""
    fs = PosixFileSystem()
    directory = fs.open_directory(str(tmp_path))
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "l").symlink_to(tmp_path / "nowhere")
    for name in ("f", "l"):
        with pytest.raises(FileExistsError):
            fs.open_file(directory, name, write=True, create=True)
    assert not (tmp_path / "nowhere").exists()
    fs.close(directory)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """Links, pipes and folders are refused at once, whatever they lead to."""
    fs = PosixFileSystem()
    (tmp_path / "real").write_bytes(b"x")
    match kind:
        case "link":
            (tmp_path / "name").symlink_to("real")
        case "fifo":
            os.mkfifo(tmp_path / "name")
        case _:
            (tmp_path / "name").mkdir()
    directory = fs.open_directory(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for write in (False, True):
        with pytest.raises(OSError, match=r".*"):
            fs.open_file(directory, "name", write=write, create=False)
    assert len(os.listdir("/proc/self/fd")) == before
    fs.close(directory)


def test_a_throttled_link_is_one_queue() -> None:
    """A transfer ends at max(now, busy until) + latency + bytes / rate."""
    link = LinkThrottle(1000.0, latency_s=0.5)
    assert link.reserve(10.0, 1000) == 11.5
    assert link.reserve(10.0, 500) == 12.5
    assert link.reserve(100.0, 0) == 100.5


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_a_link_needs_a_rate(rate: float, latency: float) -> None:
    """A link without a positive rate, or with a negative latency, is refused."""
    with pytest.raises(ValueError, match=r"bytes_per_s|latency_s"):
        LinkThrottle(rate, latency)


def test_not_a_number_is_not_a_rate() -> None:
    """NaN does not pass for a rate or a latency."""
    with pytest.raises(ValueError, match="bytes_per_s"):
        LinkThrottle(float("nan"))
    with pytest.raises(ValueError, match="latency_s"):
        LinkThrottle(1.0, float("nan"))
