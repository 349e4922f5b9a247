"""What lies in the segments directory, read from the files themselves at open."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from kvtier.errors import FormatError
from kvtier.tiers.entries import entry_of
from kvtier.tiers.recovery import FoundSegment
from kvtier.tiers.segment import (
    HEADER_PAGES_MAX,
    PAGE_BYTES,
    SegmentHeader,
    decode_header,
    decode_segment,
    slot_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.tiers.base import BlockId, Location, Record
    from kvtier.tiers.fs import FileSystem

__all__ = ["find_segment", "find_segments", "record_offset", "scan_headers", "segment_name"]

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"([0-9a-f]{16})\.seg")
_TEMPORARY: Final = ".new"


def segment_name(segment: int) -> str:
    """Return a segment's file name."""
    return f"{segment:016x}.seg"


def record_offset(where: Location) -> int:
    """Return where in its segment a record begins."""
    return PAGE_BYTES + where.slot * where.slot_bytes


def find_segments(directory: int, fs: FileSystem) -> tuple[dict[int, FoundSegment], int]:
    """Return the segments by id, and the disk bytes of files that stay but cannot be used.

    A segment whose first page is damaged is unlinked: what it held is a cache, and bytes that
    nobody counts would break the budget. One that cannot be read this time stays, and is counted.
    """
    found: dict[int, FoundSegment] = {}
    unused_bytes = 0
    for name in fs.names(directory):
        match = _NAME.fullmatch(name)
        try:
            if match is None:
                unused_bytes += _stranger(directory, fs, name)
                continue
            segment = int(match[1], 16)
            found[segment] = find_segment(directory, fs, segment)
        except FormatError as error:
            log.warning("segments/%s is damaged and removed: %s", name, error)
            fs.unlink(directory, name)
        except OSError as error:
            log.warning("segments/%s cannot be read, its blocks are misses: %s", name, error)
            unused_bytes += fs.disk_bytes(directory, name)
    return found, unused_bytes


def _stranger(directory: int, fs: FileSystem, name: str) -> int:
    if name.endswith(_TEMPORARY):
        # The directory is locked: whoever was writing this file is gone.
        fs.unlink(directory, name)
        return 0
    log.warning("segments/%s is not a segment; left alone", name)
    return fs.disk_bytes(directory, name)


def scan_headers(directory: int, fs: FileSystem, slots: Iterable[Location]) -> list[bytes]:
    """Read the headers of some slots and return their entries; the newest record of a block wins.

    Slots that hold no record, or one that fails its checksum, are left out.
    """
    best: dict[BlockId, tuple[int, bytes]] = {}
    for where in slots:
        record = _read_header(directory, fs, where)
        if record is None:
            continue
        known = best.get(record.id)
        if known is None or known[0] <= record.created_ns:
            entry = entry_of(record, where, record.created_ns)
            best[record.id] = (record.created_ns, entry)
    return [entry for _, entry in best.values()]


def find_segment(directory: int, fs: FileSystem, segment: int) -> FoundSegment:
    """Return what a segment's file shows; ``FormatError`` says what is wrong with it."""
    page = bytearray(PAGE_BYTES)
    fd = fs.open_file(directory, segment_name(segment), write=False, create=False)
    try:
        count = fs.read(fd, [memoryview(page)], 0)
        header = decode_segment(page[:count])
        if header.id != segment:
            raise FormatError(f"its header says segment {header.id}")
        size = fs.size(fd)
        reach = -(-(size - PAGE_BYTES) // header.slot_bytes)
        written = min(max(reach, 0), header.slots)
        holes: frozenset[int] = frozenset()
        if fs.disk_bytes(directory, segment_name(segment)) < size:
            holes = _holes(fs.data_ranges(fd), header, written)
        return FoundSegment(header, written, holes)
    finally:
        fs.close(fd)


def _holes(ranges: list[tuple[int, int]], header: SegmentHeader, written: int) -> frozenset[int]:
    """Return the slots that no range of data touches."""
    touched = bytearray(written)
    for start, stop in ranges:
        first = max(start - PAGE_BYTES, 0) // header.slot_bytes
        last = min(-(-(stop - PAGE_BYTES) // header.slot_bytes), written)
        touched[first:last] = b"\1" * max(last - first, 0)
    return frozenset(slot for slot in range(written) if not touched[slot])


def _read_header(directory: int, fs: FileSystem, where: Location) -> Record | None:
    page = bytearray(PAGE_BYTES)
    offset = record_offset(where)
    try:
        fd = fs.open_file(directory, segment_name(where.segment), write=False, create=False)
    except OSError:
        return None
    try:
        if fs.read(fd, [memoryview(page)], offset) < PAGE_BYTES:
            return None
        size = int.from_bytes(page[12:16], "little")
        if not PAGE_BYTES <= size <= min(where.slot_bytes, HEADER_PAGES_MAX * PAGE_BYTES):
            return None
        if size > PAGE_BYTES:
            page = bytearray(size)
            if fs.read(fd, [memoryview(page)], offset) < size:
                return None
        record, _digests = decode_header(page)
    except (FormatError, OSError):
        return None
    finally:
        fs.close(fd)
    return record if slot_bytes(record) == where.slot_bytes else None
