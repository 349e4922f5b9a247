"""Format v1 of a segment and of a record's header: bytes only, no files (see FORMAT.md)."""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Kind, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.layout import PartShape

__all__ = [
    "FORMAT_VERSION",
    "HEADER_PAGES_MAX",
    "PAGE_BYTES",
    "SLOTS_MAX",
    "SegmentHeader",
    "decode_header",
    "decode_segment",
    "encode_header",
    "encode_segment",
    "header_bytes",
    "header_tag",
    "keyed_tag",
    "part_digests",
    "read_digests",
    "size_class",
    "slot_bytes",
]

FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
HEADER_PAGES_MAX: Final = 256
SLOTS_MAX: Final = 1 << 20
"""Slots in one segment."""

_SEGMENT_MAGIC: Final = b"KVTSEG\r\n"
_SEGMENT: Final = struct.Struct("<8sIIQQ16s")  # magic, version, slots, id, slot bytes, checksum
_RECORD_MAGIC: Final = b"KVTBLK\r\n"
_PREFIX: Final = struct.Struct("<8sII16s")  # magic, version, header bytes, checksum
_FIXED: Final = struct.Struct("<32s32s32s32s32sQHHIQQiIQ16x")
_PART: Final = struct.Struct("<QQII8I8x")
_PARTS: Final = np.dtype(
    [
        ("bytes", "<u8"),
        ("digest", "<u8"),
        ("layer", "<u4"),
        ("tensors", "<u4"),
        ("dims", "<u4", (8,)),
        ("zero", "V8"),
    ]
)
"""``_PART`` as rows of a table."""
PartTable = np.ndarray[Any, np.dtype[np.void]]
_CHECKSUM: Final = slice(16, 32)
_TAG: Final = slice(96, 128)
_TABLE_OFFSET: Final = _PREFIX.size + _FIXED.size
_NO_TAG: Final = bytes(32)
_TENSORS_MAX: Final = 4
if _TABLE_OFFSET != 256 or _PART.size != 64:  # noqa: PLR2004 - the format's own numbers
    raise AssertionError("record header structs do not match format v1")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first page of a segment: its id (never reused) and its slots."""

    id: int
    slots: int
    slot_bytes: int


def encode_segment(header: SegmentHeader) -> bytes:
    """Return the first page of a segment file."""
    page = bytearray(PAGE_BYTES)
    _SEGMENT.pack_into(
        page, 0, _SEGMENT_MAGIC, FORMAT_VERSION, header.slots, header.id, header.slot_bytes, b""
    )
    page[32:48] = xxhash.xxh3_128_digest(page)
    return bytes(page)


def decode_segment(page: bytes | bytearray) -> SegmentHeader:
    """Decode a segment's first page; ``FormatError`` says what is wrong with it."""
    data = bytearray(page)
    if len(data) != PAGE_BYTES:
        raise FormatError(f"segment header of {len(data)} bytes, {PAGE_BYTES} wanted")
    magic, version, slots, segment, size, checksum = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC:
        raise FormatError("not a segment: wrong magic")
    if version != FORMAT_VERSION:
        raise FormatError(f"segment of format {version}; this kvtier reads {FORMAT_VERSION}")
    data[32:48] = bytes(16)
    if xxhash.xxh3_128_digest(data) != checksum:
        raise FormatError("segment header fails its checksum")
    if not 1 <= slots <= SLOTS_MAX or size < 2 * PAGE_BYTES or size % PAGE_BYTES:
        raise FormatError(f"segment of {slots} slots of {size} bytes")
    return SegmentHeader(segment, slots, size)


def header_bytes(parts: int) -> int:
    """Return the size of a record's header with ``parts`` parts: whole pages."""
    return -(-(_TABLE_OFFSET + parts * _PART.size) // PAGE_BYTES) * PAGE_BYTES


def slot_bytes(record: Record) -> int:
    """Return the size class of a record."""
    return size_class(record.part_bytes)


def size_class(part_bytes: Sequence[int]) -> int:
    """Return the slot size for records with such parts: header and payload in whole pages."""
    size = header_bytes(len(part_bytes)) + sum(part_bytes)
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def part_digests(part_bytes: Sequence[int], payload: memoryview) -> list[int]:
    """Return the xxh3-64 of each part of a payload."""
    digests = []
    start = 0
    for nbytes in part_bytes:
        digests.append(xxhash.xxh3_64_intdigest(payload[start : start + nbytes]))
        start += nbytes
    return digests


def keyed_tag(key: bytes, header: bytes | bytearray | memoryview, payload: memoryview) -> bytes:
    """Return HMAC-SHA256 over a header with checksum and tag zero, and over the payload.

    The checksums find damage; only this finds a record that somebody made up.
    """
    page = bytearray(header)
    page[_CHECKSUM] = bytes(16)
    page[_TAG] = _NO_TAG
    tag = hmac.new(key, page, "sha256")
    tag.update(payload)
    return tag.digest()


def header_tag(header: bytes | bytearray | memoryview) -> bytes:
    """Return the keyed tag that a header carries; zeros if it was written without a key."""
    return bytes(header[_TAG])


def encode_header(record: Record, digests: Sequence[int], tag: bytes = _NO_TAG) -> bytes:
    """Return a record's header; ``digests`` are the parts' checksums."""
    size = header_bytes(len(record.part_bytes))
    page = bytearray(size)
    _PREFIX.pack_into(page, 0, _RECORD_MAGIC, FORMAT_VERSION, size, b"")
    _FIXED.pack_into(
        page,
        _PREFIX.size,
        record.id.namespace,
        record.tenant_digest,
        tag,
        record.id.hash,
        record.parent,
        record.position,
        record.kind,
        record.codec,
        len(record.part_bytes),
        record.payload_bytes,
        record.created_ns,
        record.priority,
        0,
        record.expiry_ns,
    )
    table = _part_table(record.part_bytes, record.shapes).copy()
    if len(digests) != len(table):
        raise ValueError(f"{len(digests)} digests for {len(table)} parts")
    table["digest"] = digests
    page[_TABLE_OFFSET : _TABLE_OFFSET + table.nbytes] = table.tobytes()
    page[_CHECKSUM] = xxhash.xxh3_128_digest(page)
    return bytes(page)


@lru_cache(maxsize=64)
def _part_table(part_bytes: tuple[int, ...], shapes: tuple[PartShape, ...]) -> PartTable:
    """Return the part table of all records of one layout, without digests."""
    table = np.zeros(len(part_bytes), dtype=_PARTS)
    table["bytes"] = part_bytes
    table["layer"] = np.arange(len(part_bytes))
    for row, shape in zip(table, shapes, strict=True):
        row["tensors"] = len(shape)
        row["dims"][: 2 * len(shape)] = [value for pair in shape for value in pair]
    return table


def decode_header(data: bytes | bytearray | memoryview) -> tuple[Record, list[int]]:
    """Decode a whole header into the record and its parts' checksums.

    Everything is verified (checksum, sizes, padding) before a number is used; ``FormatError`` says
    what is wrong.
    """
    return _decode_fields(_checked(data))


def read_digests(
    data: bytes | bytearray | memoryview,
) -> tuple[BlockId, tuple[int, ...], list[int]]:
    """Decode what a read needs of a header: whose it is, its parts' bytes and their checksums.

    Verified as by ``decode_header``, which takes several times as long; ``FormatError`` says what
    is wrong.
    """
    page = _checked(data)
    fields = _FIXED.unpack_from(page, _PREFIX.size)
    namespace, block, parts, payload = fields[0], fields[3], fields[8], fields[9]
    if not 1 <= parts <= (len(page) - _TABLE_OFFSET) // _PARTS.itemsize:
        raise FormatError(f"record header says it has {parts} parts")
    table = np.frombuffer(page, _PARTS, parts, _TABLE_OFFSET)
    sizes: list[int] = table["bytes"].tolist()
    if sum(sizes) != payload:
        raise FormatError(f"parts of {sum(sizes)} bytes in a payload of {payload}")
    return BlockId(namespace, block), tuple(sizes), table["digest"].tolist()


def _checked(data: bytes | bytearray | memoryview) -> bytearray:
    """Return a header, with its checksum zeroed, whose size and checksum are right."""
    page = bytearray(data)
    if len(page) < PAGE_BYTES:
        raise FormatError(f"record header of {len(page)} bytes")
    magic, version, size, checksum = _PREFIX.unpack_from(page)
    if magic != _RECORD_MAGIC:
        raise FormatError("not a record: wrong magic")
    if version != FORMAT_VERSION:
        raise FormatError(f"record of format {version}; this kvtier reads {FORMAT_VERSION}")
    if size % PAGE_BYTES or not PAGE_BYTES <= size <= HEADER_PAGES_MAX * PAGE_BYTES:
        raise FormatError(f"record header says it has {size} bytes")
    if size != len(page):
        raise FormatError(f"record header of {size} bytes, {len(page)} given")
    page[_CHECKSUM] = bytes(16)
    if xxhash.xxh3_128_digest(page) != checksum:
        raise FormatError("record header fails its checksum")
    return page


def _decode_fields(page: bytearray) -> tuple[Record, list[int]]:
    (
        namespace, tenant, _tag, block, parent, position, kind, codec, parts, payload,
        created, priority, _reserved, expiry,
    ) = _FIXED.unpack_from(page, _PREFIX.size)  # fmt: skip
    if not 1 <= parts <= (len(page) - _TABLE_OFFSET) // _PART.size:
        raise FormatError(f"record header says it has {parts} parts")
    sizes, digests, shapes = [], [], []
    for index in range(parts):
        nbytes, digest, layer, tensors, *dims = _PART.unpack_from(
            page, _TABLE_OFFSET + index * _PART.size
        )
        if layer != index or not 1 <= tensors <= _TENSORS_MAX:
            raise FormatError(f"part {index} of a record has layer {layer}, {tensors} tensors")
        sizes.append(nbytes)
        digests.append(digest)
        shapes.append(tuple((dims[2 * i], dims[2 * i + 1]) for i in range(tensors)))
    if sum(sizes) != payload:
        raise FormatError(f"parts of {sum(sizes)} bytes in a payload of {payload}")
    try:
        known = Kind(kind)
    except ValueError:
        raise FormatError(f"record of unknown kind {kind}") from None
    record = Record(
        id=BlockId(namespace, block),
        parent=parent,
        position=position,
        tenant_digest=tenant,
        part_bytes=tuple(sizes),
        shapes=tuple(shapes),
        kind=known,
        codec=codec,
        priority=priority,
        created_ns=created,
        expiry_ns=expiry,
    )
    return record, digests
