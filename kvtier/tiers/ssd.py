"""The SSD tier: slab segments of fixed slots, an index, and one order of commits.

Bytes before pointers: data, fdatasync, (directory fsync for a new segment), index commit, visible.
All of a batch shares one sync per touched segment and one index commit. ``write`` and ``drop`` are
called from one thread; ``read`` from any number.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location, ReadResult, Record, Usage
from kvtier.tiers.recovery import FoundSegment, plan_repairs
from kvtier.tiers.scan import (
    entry_of,
    find_segments,
    record_offset,
    scan_headers,
    segment_name,
)
from kvtier.tiers.segment import (
    PAGE_BYTES,
    decode_header,
    encode_header,
    encode_segment,
    part_digests,
    slot_bytes,
)
from kvtier.tiers.slabs import Slabs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.index import Entry, Index

__all__ = ["SsdTier"]

log = logging.getLogger(__name__)


class SsdTier:
    """Blocks in the ``segments`` directory and ``index``, within ``limit_bytes`` on disk.

    Opening recovers: what is in doubt is dropped, segments that hold nothing are unlinked, and a
    store over its limit gives up whole segments until it fits. ``entries`` lists what is there.
    """

    def __init__(
        self,
        segments: int,
        index: Index,
        fs: FileSystem,
        *,
        limit_bytes: int,
        segment_bytes_max: int,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._directory = segments
        self._index = index
        self._fs = fs
        self._now_ns = now_ns
        found, unused_bytes = find_segments(segments, fs)
        self._slabs = Slabs(
            found,
            limit_bytes=limit_bytes - unused_bytes,
            segment_bytes_max=segment_bytes_max,
            index_bytes=index.disk_bytes,
            now_ns=now_ns,
        )
        self._closed = False
        self.write_errors = 0
        self.entries = self._recover(found)

    # -- opening

    def _recover(self, found: dict[int, FoundSegment]) -> tuple[Entry, ...]:
        try:
            entries = tuple(self._index.entries())
        except FormatError as error:
            log.warning("%s; it is rebuilt from the records' headers", error)
            self._index.reset()
            entries = ()
        if found and not entries:
            entries = tuple(scan_headers(self._directory, self._fs, found))
            self._index.commit(entries, ())
        repairs = plan_repairs(entries, found)
        for block, reason in repairs.remove:
            log.warning("block %s dropped: %s", block, reason)
        if repairs.remove:
            self._index.commit((), [block for block, _ in repairs.remove])
        for segment in repairs.unlink:
            self._fs.unlink(self._directory, segment_name(segment))
            self._slabs.forget(segment)
        keep = self._shrink(repairs.keep)
        self._slabs.settle((entry.id, entry.location) for entry in keep)
        return keep

    def _shrink(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Unlink whole segments, least recently used first, until the tier fits its limit."""
        last_use = dict.fromkeys(self._slabs.segments(), 0)
        for entry in entries:
            where = entry.location.segment
            last_use[where] = max(last_use[where], entry.last_use_ns, entry.created_ns)
        gone: set[int] = set()
        for segment in sorted(last_use, key=lambda segment: (last_use[segment], segment)):
            if self._slabs.fits():
                break
            self._index.commit(
                (), [entry.id for entry in entries if entry.location.segment == segment]
            )
            self._fs.unlink(self._directory, segment_name(segment))
            self._slabs.forget(segment)
            gone.add(segment)
        if gone:
            log.warning("%d segments given up to fit the SSD budget", len(gone))
        return tuple(entry for entry in entries if entry.location.segment not in gone)

    @staticmethod
    def slot_bytes(record: Record) -> int:
        """Return the slot size that a record needs."""
        return slot_bytes(record)

    def room(self, record: Record) -> int:
        """Return how many records of this size can be written before something must go."""
        return self._slabs.room(slot_bytes(record))

    def empty_segments(self, record: Record) -> list[int]:
        """Return segments of other slot sizes that hold nothing, whose disk this one could use."""
        return self._slabs.empty_segments(slot_bytes(record))

    def unlink(self, segments: Sequence[int]) -> None:
        """Remove segments that hold nothing."""
        for segment in segments:
            self._slabs.forget(segment)
            self._discard(segment)

    # -- blocks

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store blocks; None where there was no room or the disk failed."""
        for record, payload in zip(records, payloads, strict=True):
            if payload.nbytes != record.payload_bytes:
                raise ValueError(
                    f"block {record.id}: {payload.nbytes} bytes, {record.payload_bytes} wanted"
                )
        placed: list[Location | None] = []
        touched: dict[int, list[int]] = defaultdict(list)
        for index, (record, payload) in enumerate(zip(records, payloads, strict=True)):
            where = self._write_one(record, payload)
            placed.append(where)
            if where is not None:
                touched[where.segment].append(index)
        for segment, indices in touched.items():
            if not self._sync(segment):
                for index in indices:
                    where = placed[index]
                    placed[index] = None
                    if where is not None:
                        self._slabs.give_back(where)
        return self._publish(records, placed)

    def _write_one(self, record: Record, payload: memoryview) -> Location | None:
        taken = self._slabs.take(slot_bytes(record))
        if taken is None:
            return None
        where, new = taken
        digests = part_digests(record.part_bytes, payload)
        header = encode_header(record, digests)
        try:
            if new:
                self._create(where.segment)
            fd = self._fs.open_file(
                self._directory, segment_name(where.segment), write=True, create=False
            )
            try:
                self._fs.write(fd, [memoryview(header), payload], record_offset(where))
            finally:
                self._fs.close(fd)
        except OSError as error:
            self._failed("write", where.segment, error)
            if new:
                self._slabs.forget(where.segment)
                self._discard(where.segment)
            else:
                self._slabs.give_back(where)
            return None
        return where

    def _create(self, segment: int) -> None:
        page = encode_segment(self._slabs.header(segment))
        fd = self._fs.open_file(self._directory, segment_name(segment), write=True, create=True)
        try:
            self._fs.write(fd, [memoryview(page)], 0)
        finally:
            self._fs.close(fd)
        self._fs.sync_directory(self._directory)

    def _discard(self, segment: int) -> None:
        try:
            self._fs.unlink(self._directory, segment_name(segment))
        except OSError as error:
            log.warning("segment %d could not be removed: %s", segment, error)

    def _sync(self, segment: int) -> bool:
        try:
            fd = self._fs.open_file(
                self._directory, segment_name(segment), write=True, create=False
            )
            try:
                self._fs.sync(fd)
            finally:
                self._fs.close(fd)
        except OSError as error:
            self._failed("sync", segment, error)
            return False
        return True

    def _publish(
        self, records: Sequence[Record], placed: list[Location | None]
    ) -> list[Location | None]:
        entries = [
            entry_of(record, where, self._now_ns())
            for record, where in zip(records, placed, strict=True)
            if where is not None
        ]
        try:
            if entries:
                self._index.commit(entries, ())
        except OSError as error:
            self._failed("index commit", 0, error)
            for entry in entries:
                self._slabs.give_back(entry.location)
            return [None] * len(placed)
        for entry in entries:
            self._slabs.fill(entry.id, entry.location)
        return placed

    def _failed(self, what: str, segment: int, error: OSError) -> None:
        self.write_errors += 1
        log.warning("SSD %s failed in segment %d (block dropped): %s", what, segment, error)

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
        pages = -(-into.nbytes // PAGE_BYTES) * PAGE_BYTES
        header = bytearray(max(where.slot_bytes - pages, 0))
        if len(header) < PAGE_BYTES:
            return ReadResult.GONE
        wanted = len(header) + into.nbytes
        try:
            fd = self._fs.open_file(
                self._directory, segment_name(where.segment), write=False, create=False
            )
            try:
                count = self._fs.read(fd, [memoryview(header), into], record_offset(where))
            finally:
                self._fs.close(fd)
        except OSError as error:
            log.warning("block %s could not be read: %s", block, error)
            gone = error.errno in (errno.ENOENT, errno.EIO, errno.ELOOP, errno.EINVAL)
            return ReadResult.GONE if gone else ReadResult.FAILED
        if count < wanted:
            log.warning("block %s ends after %d of %d bytes", block, count, wanted)
            return ReadResult.GONE
        return ReadResult.OK if _verify(block, header, into) else ReadResult.GONE

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Take blocks out of the index, durably, then free their slots; or raise ``OSError``."""
        self._index.commit((), ids)
        for block, where in zip(ids, locations, strict=True):
            self._slabs.empty(block, where)

    def usage(self) -> Usage:
        """Return how full the tier is: data, index and small files."""
        slabs = self._slabs
        return Usage(slabs.blocks(), slabs.used_bytes(), slabs.limit_bytes)

    def check(self) -> list[str]:
        """Return what is wrong with the slots' books, in words."""
        return self._slabs.check()

    def close(self) -> None:
        """Close the index; idempotent."""
        if not self._closed:
            self._closed = True
            self._index.close()


def _verify(block: BlockId, header: bytearray, payload: memoryview) -> bool:
    try:
        record, digests = decode_header(header)
    except FormatError as error:
        log.warning("block %s is damaged: %s", block, error)
        return False
    if record.id != block or record.payload_bytes != payload.nbytes:
        log.warning("block %s: its slot holds another block", block)
        return False
    if part_digests(record.part_bytes, payload) != digests:
        log.warning("block %s is damaged: a part fails its checksum", block)
        return False
    return True
