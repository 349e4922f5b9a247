"""What lies in the segments directory, read from the files themselves at open."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location, Record
from kvtier.tiers.index import Entry
from kvtier.tiers.recovery import FoundSegment
from kvtier.tiers.segment import (
    PAGE_BYTES,
    SegmentHeader,
    decode_header,
    decode_segment,
    slot_bytes,
)

if TYPE_CHECKING:
    from kvtier.tiers.fs import FileSystem

__all__ = ["entry_of", "find_segments", "record_offset", "scan_headers", "segment_name"]

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"([0-9a-f]{16})\.seg")


def segment_name(segment: int) -> str:
    """Return a segment's file name."""
    return f"{segment:016x}.seg"


def record_offset(where: Location) -> int:
    """Return where in its segment a record begins."""
    return PAGE_BYTES + where.slot * where.slot_bytes


def entry_of(record: Record, where: Location, last_use_ns: int) -> Entry:
    """Return the index entry of a record at ``where``."""
    return Entry(
        id=record.id,
        location=where,
        payload_bytes=record.payload_bytes,
        position=record.position,
        parent=record.parent,
        tenant_digest=record.tenant_digest,
        kind=int(record.kind),
        codec=record.codec,
        priority=record.priority,
        created_ns=record.created_ns,
        expiry_ns=record.expiry_ns,
        last_use_ns=last_use_ns,
    )


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
                log.warning("segments/%s is not a segment; left alone", name)
                unused_bytes += fs.disk_bytes(directory, name)
                continue
            segment = int(match[1], 16)
            header, size = _segment_header(directory, fs, segment)
        except FormatError as error:
            log.warning("segments/%s is damaged and removed: %s", name, error)
            fs.unlink(directory, name)
            continue
        except OSError as error:
            log.warning("segments/%s cannot be read, its blocks are misses: %s", name, error)
            unused_bytes += fs.disk_bytes(directory, name)
            continue
        reach = -(-(size - PAGE_BYTES) // header.slot_bytes)
        found[segment] = FoundSegment(header, min(max(reach, 0), header.slots))
    return found, unused_bytes


def scan_headers(directory: int, fs: FileSystem, found: dict[int, FoundSegment]) -> list[Entry]:
    """Read every slot's header; the newest record of a block wins."""
    best: dict[BlockId, Entry] = {}
    for segment, slab in found.items():
        for slot in range(slab.slots_written):
            where = Location(segment, slot, slab.header.slot_bytes)
            record = _read_header(directory, fs, where)
            if record is None:
                continue
            known = best.get(record.id)
            if known is None or known.created_ns <= record.created_ns:
                best[record.id] = entry_of(record, where, record.created_ns)
    return list(best.values())


def _segment_header(directory: int, fs: FileSystem, segment: int) -> tuple[SegmentHeader, int]:
    page = bytearray(PAGE_BYTES)
    fd = fs.open_file(directory, segment_name(segment), write=False, create=False)
    try:
        count = fs.read(fd, [memoryview(page)], 0)
        size = fs.size(fd)
    finally:
        fs.close(fd)
    header = decode_segment(page[:count])
    if header.id != segment:
        raise FormatError(f"its header says segment {header.id}")
    return header, size


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
        if not PAGE_BYTES <= size <= where.slot_bytes:
            return None
        page = bytearray(size)
        if fs.read(fd, [memoryview(page)], offset) < size:
            return None
        record, _digests = decode_header(page)
    except (FormatError, OSError):
        return None
    finally:
        fs.close(fd)
    return record if slot_bytes(record) == where.slot_bytes else None
