"""The SSD tier: slab segments of fixed slots, an index, and one order of commits.

Bytes before pointers: data, fdatasync, (directory fsync for a new segment), index commit, visible.
``store`` writes data, several records at once; ``publish`` makes any number of them durable
and visible with one sync per touched segment and one index commit, while the next ones are being
written. ``write`` is both. All of it may be called from any thread.
"""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.tiers.base import BlockId, Location, ReadResult, Record, Usage
from kvtier.tiers.entries import Entries, entry_of, table
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.opening import reclaim, recover
from kvtier.tiers.record_io import (
    READS_INFLIGHT_MAX,
    WRITES_INFLIGHT_MAX,
    RecordIo,
    probe,
)
from kvtier.tiers.scan import find_segments, scan_headers
from kvtier.tiers.segment import encode_header, keyed_tag, part_digests, slot_bytes
from kvtier.tiers.slabs import Slabs
from kvtier.tiers.verify import read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.index import Index, Use

__all__ = ["SsdTier"]

log = logging.getLogger(__name__)

SEGMENTS_MAX: Final = 1 << 16
"""Segment files of one store."""
FREE_SLOTS_MAX: Final = 1 << 31
THREADS_PER_WRITE: Final = 2
"""Threads for each write that may be in flight: some compute checksums while others write."""


class SsdTier:
    """Blocks in the ``segments`` directory and ``index``, within ``limit_bytes`` on disk.

    Opening recovers: what is in doubt is dropped, segments that hold nothing are unlinked, and a
    store over its limit gives up its least recently used blocks. With ``integrity_key`` every
    record carries a keyed tag and only records with the right one are read. ``entries`` is what
    was there at open; ``io`` says how the disk is accessed ("direct" or "buffered"), ``writes`` is
    the gate that writes go through. ``failed`` is called for every write, sync or commit that
    fails; ``index_full`` says that a commit found no room and nothing was dropped since.
    """

    def __init__(
        self,
        segments: int,
        index: Index,
        fs: FileSystem,
        *,
        limit_bytes: int,
        segment_bytes_max: int,
        segments_max: int = SEGMENTS_MAX,
        reads_inflight_max: int = READS_INFLIGHT_MAX,
        writes_inflight_max: int = WRITES_INFLIGHT_MAX,
        integrity_key: bytes = b"",
        now_ns: Callable[[], int] = time.time_ns,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._count_failure = failed
        self._index = index
        self._key = integrity_key
        found, self._unused_bytes = find_segments(segments, fs)
        self._slabs = Slabs(
            found,
            limit_bytes=limit_bytes - self._unused_bytes,
            segment_bytes_max=segment_bytes_max,
            segments_max=segments_max,
            index_bytes=index.disk_bytes,
            now_ns=now_ns,
        )
        self._io = RecordIo(
            segments, fs, probe(segments, fs), reads_inflight_max, writes_inflight_max
        )
        self.io = self._io.abilities.io
        self.writes = self._io.writes
        self._closed = False
        self._placing = threading.Lock()
        self._counts = threading.Lock()
        self.data_write_bytes = 0
        self.index_full = False

        def scan(slots: Iterable[Location]) -> list[bytes]:
            return scan_headers(segments, fs, slots)

        self.entries: Entries = recover(found, index, self._slabs, self._io, scan)
        self._ledger = Ledger(index, self._slabs, scan)
        self._lane = concurrent.futures.ThreadPoolExecutor(
            THREADS_PER_WRITE * writes_inflight_max, thread_name_prefix="kvtier-ssd"
        )

    def take_entries(self) -> Entries:
        """Return ``entries`` and let go of them: a table of a million is 200 MB."""
        entries, self.entries = self.entries, table(b"")
        return entries

    # -- room

    @staticmethod
    def slot_bytes(record: Record) -> int:
        """Return the slot size that a record needs."""
        return slot_bytes(record)

    def room(self, size: int) -> int:
        """Return how many records of this slot size can be written before something must go."""
        return self._slabs.room(size)

    def limit_for(self, size: int, index_bytes: int = 0) -> int:
        """Return the least ``limit_bytes`` with which one record of this slot size can be held.

        With an index of at least ``index_bytes``.
        """
        return self._slabs.limit_for(size, index_bytes) + self._unused_bytes

    def fits(self, size: int) -> bool:
        """Whether a record of this slot size can be held, whatever must go for it."""
        return self._slabs.limit_for(size) <= self._slabs.limit_bytes

    def over_limit(self) -> bool:
        """Whether the next index commit might exceed the limit: the index has grown."""
        return not self._slabs.may_commit()

    def reclaim(self, size: int, count: int) -> None:
        """Give disk back, of slots of other sizes that hold nothing, so that ``count`` fit."""
        reclaim(self._slabs, self._io, lambda: self.room(size) >= count, other_than=size)

    def trim(self) -> None:
        """Give disk back, of any slots that hold nothing, until the limit holds."""
        reclaim(self._slabs, self._io, lambda: not self.over_limit())

    # -- blocks

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store blocks durably; None where there was no room or the disk failed."""
        for record, payload in zip(records, payloads, strict=True):
            _check_size(record, payload)
        places = self.place(records)
        started = [
            None if where is None else self.store(record, payload, where)
            for record, payload, where in zip(records, payloads, places, strict=True)
        ]
        written = [None if future is None else future.result() for future in started]
        return self.publish(records, written)[0]

    def place(self, records: Sequence[Record]) -> list[Location | None]:
        """Take a slot for each record, in order, so that a prompt's blocks lie side by side.

        None where there is no room. Every slot must be stored into.
        """
        return [self._take(slot_bytes(record)) for record in records]

    def store(
        self, record: Record, payload: memoryview, where: Location
    ) -> concurrent.futures.Future[Location | None]:
        """Write a block's bytes, soon; they are neither durable nor visible until ``publish``.

        The result is its place, or None if the disk failed, and the slot is free again.
        """
        _check_size(record, payload)
        return self._lane.submit(self._store_one, record, payload, where)

    def _store_one(self, record: Record, payload: memoryview, where: Location) -> Location | None:
        digests = part_digests(record.part_bytes, payload)
        header = encode_header(record, digests)
        if self._key:
            header = encode_header(record, digests, keyed_tag(self._key, header, payload))
        try:
            self._io.write(where, header, payload)
        except OSError as error:
            self._failed("write", where.segment, error)
            self._slabs.give_back(where)
            if error.errno == errno.ENOENT:  # somebody removed the file, and all that was in it
                self._slabs.forget(where.segment)
            return None
        with self._counts:
            self.data_write_bytes += where.slot_bytes
        return where

    def _take(self, size: int) -> Location | None:
        """Take a slot whose segment exists; None if there is no room."""
        with self._placing:  # nobody may take the second slot of a segment that is being made
            taken = self._slabs.take(size)
            if taken is None:
                return None
            where, new = taken
            if new:
                try:
                    self._io.create(self._slabs.header(where.segment))
                except OSError as error:
                    self._failed("segment", where.segment, error)
                    self._slabs.forget(where.segment)
                    with suppress(OSError):
                        self._io.unlink(where.segment)
                    return None
            return where

    def publish(
        self,
        records: Sequence[Record],
        placed: Sequence[Location | None],
        uses: Sequence[Use] = (),
        gone: Sequence[tuple[BlockId, Location]] = (),
    ) -> tuple[list[Location | None], bool]:
        """Make written blocks durable, then visible; None for those for which that failed.

        ``uses``, and the removal of the blocks that are ``gone``, go into the same index commit;
        False if it failed.
        """
        result = list(placed)
        for segment in dict.fromkeys(where.segment for where in placed if where is not None):
            try:
                self._io.sync(segment)
            except OSError as error:
                self._failed("sync", segment, error)
                self._give_back(result, segment)
        # The time of its put: blocks of one prompt are used at once, in whatever commits they come.
        entries = [
            entry_of(record, where, record.created_ns)
            for record, where in zip(records, result, strict=True)
            if where is not None
        ]
        try:
            if entries or uses or gone:
                self._ledger.commit(entries, [block for block, _ in gone], uses)
        except OSError as error:
            self.index_full = self.index_full or error.errno == errno.EFBIG
            self._failed("index commit", 0, error)
            self._give_back(result)
            return result, False
        for record, where in zip(records, result, strict=True):
            if where is not None:
                self._slabs.fill(record.id, where)
        for block, where in gone:
            self._slabs.empty(block, where)
        return result, True

    def _give_back(self, placed: list[Location | None], segment: int | None = None) -> None:
        """Free the slots of a failed write, in one segment or in all."""
        for index, where in enumerate(placed):
            if where is not None and segment in (None, where.segment):
                self._slabs.give_back(where)
                placed[index] = None

    def _failed(self, what: str, segment: int, error: OSError) -> None:
        self._count_failure()
        log.warning("SSD %s failed in segment %016x (block dropped): %s", what, segment, error)

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Fetch blocks; each is verified against its header and its parts' checksums."""
        return [
            self._read_one(block, where, target)
            for block, where, target in zip(ids, locations, into, strict=True)
        ]

    def _read_one(self, block: BlockId, where: Location, into: memoryview) -> ReadResult:
        result, fault = read_record(self._io, self._key, block, where, into)
        if fault:
            log.warning("block %s %s", block, fault)
        return result

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Take blocks out of the index, durably, then free their slots; or raise ``OSError``."""
        self._ledger.commit((), ids)
        self.index_full = False
        for block, where in zip(ids, locations, strict=True):
            self._slabs.empty(block, where)

    def destroy(self) -> int:
        """Make the bytes of all slots that hold no block unreadable for good; returns how many.

        Whatever was dropped before cannot be brought back by a rebuild. Raises ``OSError`` if the
        disk refuses; what was not destroyed is still free.
        """
        destroyed = 0
        free = self._slabs.take_free(FREE_SLOTS_MAX)
        holes = dict.fromkeys(free, False)
        try:
            for where in free:
                holes[where] = self._io.destroy(where)
                destroyed += where.slot_bytes
        finally:
            for where, hole in holes.items():
                self._slabs.give_back(where, hole=hole)
        # Of all segments: some may have holes that were punched, but not synced, before a crash.
        for segment in self._slabs.segments():
            self._io.sync(segment)
        return destroyed

    def usage(self) -> Usage:
        """Return how full the tier is: data, index and small files."""
        slabs = self._slabs
        return Usage(slabs.blocks(), slabs.used_bytes(), slabs.limit_bytes)

    def written_bytes(self) -> int:
        """Return what was written to the medium since open: slots and index."""
        return self.data_write_bytes + self._index.write_bytes()

    @property
    def index_repairs(self) -> int:
        """How often the index was repaired since open."""
        return self._ledger.repairs

    def check(self) -> list[str]:
        """Return what is wrong with the slots' books, in words."""
        return self._slabs.check()

    def close(self) -> None:
        """Close the index; idempotent."""
        if not self._closed:
            self._closed = True
            # A write that hangs must not hang the one who closes.
            self._lane.shutdown(wait=False, cancel_futures=True)
            self._index.close()


def _check_size(record: Record, payload: memoryview) -> None:
    if payload.nbytes != record.payload_bytes:
        raise ValueError(
            f"block {record.id}: {payload.nbytes} bytes, {record.payload_bytes} wanted"
        )
