from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from support import payload, record_of

from kvtier import FormatError
from kvtier.tiers.base import BlockId, Kind, Record
from kvtier.tiers.segment import (
    HEADER_PAGES_MAX,
    PAGE_BYTES,
    SLOTS_MAX,
    SegmentHeader,
    decode_header,
    decode_segment,
    encode_header,
    encode_segment,
    header_bytes,
    part_digests,
    slot_bytes,
)

GOLDEN = Path(__file__).parent / "data" / "golden_record_v1.hex"

digests_32 = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
shape = st.lists(st.tuples(u32, u32), min_size=1, max_size=4).map(tuple)


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Draw any record that the format can hold."""
    parts = draw(st.lists(st.tuples(st.integers(0, 2**40), shape), min_size=1, max_size=130))
    return Record(
        id=BlockId(draw(digests_32), draw(digests_32)),
        parent=draw(digests_32),
        position=draw(u64),
        tenant_digest=draw(digests_32),
        part_bytes=tuple(nbytes for nbytes, _ in parts),
        shapes=tuple(shapes for _, shapes in parts),
        kind=draw(st.sampled_from(list(Kind))),
        codec=draw(st.integers(0, 2**16 - 1)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        created_ns=draw(u64),
        expiry_ns=draw(u64),
    )


def resealed(page: bytearray, checksum: slice) -> bytes:
    """Give altered bytes a right checksum: what a clever attacker would write."""
    page[checksum] = bytes(16)
    page[checksum] = xxhash.xxh3_128_digest(page)
    return bytes(page)


def golden_record() -> Record:
    """Return the record whose bytes are kept in tests/data."""
    return Record(
        id=BlockId(bytes(range(32)), bytes(range(32, 64))),
        parent=bytes(range(64, 96)),
        position=7,
        tenant_digest=bytes(range(96, 128)),
        part_bytes=(4096, 6144),
        shapes=(((2, 8), (2, 8)), ((2, 8), (2, 16))),
        priority=-1,
        created_ns=1_700_000_000_000_000_000,
        expiry_ns=1_800_000_000_000_000_000,
    )


def golden_header() -> bytes:
    """Return the kept bytes: the header's first lines, the rest of its page being zero."""
    return bytes.fromhex(GOLDEN.read_text()).ljust(PAGE_BYTES, b"\0")


@given(records(), st.data())
def test_a_header_says_what_was_written(record: Record, data: st.DataObject) -> None:
    """Any record survives encoding and decoding, with its parts' checksums."""
    digests = data.draw(
        st.lists(u64, min_size=len(record.part_bytes), max_size=len(record.part_bytes))
    )
    page = encode_header(record, digests)
    assert len(page) == header_bytes(len(record.part_bytes))
    assert decode_header(page) == (record, digests)


@given(u64, st.integers(1, SLOTS_MAX), st.integers(2, 2**40).map(lambda n: n * PAGE_BYTES))
def test_a_segment_says_what_was_written(segment: int, slots: int, size: int) -> None:
    """Any segment header survives encoding and decoding."""
    header = SegmentHeader(segment, slots, size)
    page = encode_segment(header)
    assert len(page) == PAGE_BYTES
    assert decode_segment(page) == header


def test_the_format_does_not_drift() -> None:
    """The bytes of one header are kept: another encoding is another format version."""
    assert encode_header(golden_record(), [0x0123456789ABCDEF, 0xFEDCBA9876543210]) == (
        golden_header()
    )


def test_the_kept_header_is_read() -> None:
    """A record written by format 1 is read for as long as format 1 is."""
    assert decode_header(golden_header()) == (
        golden_record(),
        [0x0123456789ABCDEF, 0xFEDCBA9876543210],
    )


def test_the_header_is_where_the_format_says() -> None:
    """Fields lie at the offsets of FORMAT.md."""
    page = golden_header()
    record = golden_record()
    assert page[:8] == b"KVTBLK\r\n"
    assert int.from_bytes(page[8:12], "little") == 1
    assert int.from_bytes(page[12:16], "little") == PAGE_BYTES
    assert page[32:64] == record.id.namespace
    assert page[64:96] == record.tenant_digest
    assert page[96:128] == bytes(32)
    assert page[128:160] == record.id.hash
    assert page[160:192] == record.parent
    assert int.from_bytes(page[192:200], "little") == record.position
    assert int.from_bytes(page[204:208], "little") == 2
    assert int.from_bytes(page[208:216], "little") == record.payload_bytes
    assert int.from_bytes(page[216:224], "little") == record.created_ns
    assert int.from_bytes(page[224:228], "little", signed=True) == -1
    assert int.from_bytes(page[232:240], "little") == record.expiry_ns
    assert int.from_bytes(page[256 + 64 : 256 + 72], "little") == 6144
    assert page[256 + 2 * 64 :] == bytes(PAGE_BYTES - 256 - 2 * 64)


@pytest.mark.parametrize("parts", [1, 60, 61, 124, 125, 4096])
def test_many_parts_take_more_pages(parts: int) -> None:
    """A part table that does not fit one page makes the header longer, by whole pages."""
    record = record_of(1, part_bytes=(8,) * parts, shapes=(((1, 1),),) * parts)
    page = encode_header(record, range(parts))
    assert len(page) == -(-(256 + 64 * parts) // PAGE_BYTES) * PAGE_BYTES
    assert decode_header(page) == (record, list(range(parts)))
    assert slot_bytes(record) == -(-(len(page) + 8 * parts) // PAGE_BYTES) * PAGE_BYTES


def test_a_header_has_at_most_256_pages() -> None:
    """A header that claims more pages than a record can have is refused before it is hashed."""
    size = (HEADER_PAGES_MAX + 1) * PAGE_BYTES
    page = bytearray(golden_header().ljust(size, b"\0"))
    page[12:16] = size.to_bytes(4, "little")
    with pytest.raises(FormatError, match=str(size)):
        decode_header(resealed(page, slice(16, 32)))


@pytest.mark.parametrize("which", ["record", "segment"])
def test_every_flipped_byte_of_a_header_is_noticed(which: str) -> None:
    """No single byte of a header can change: fields, checksum and padding alike."""
    if which == "record":
        page, decode = golden_header(), decode_header
    else:
        page, decode = encode_segment(SegmentHeader(5, 9, 3 * PAGE_BYTES)), decode_segment
    decode(page)
    offsets = [*range(400), *range(400, PAGE_BYTES, 61), PAGE_BYTES - 1]
    for offset in offsets:
        for mask in (1, 0x80, 0xFF):
            altered = bytearray(page)
            altered[offset] ^= mask
            with pytest.raises(FormatError):
                decode(altered)


@given(st.integers(0, 6143), st.integers(1, 255))
def test_every_flipped_byte_of_a_payload_is_noticed(offset: int, mask: int) -> None:
    """A changed byte of a payload changes its part's checksum, and no other."""
    record = record_of(1)
    data = bytearray(payload(record))
    right = part_digests(record.part_bytes, memoryview(data))
    data[offset] ^= mask
    wrong = part_digests(record.part_bytes, memoryview(data))
    part = offset // record.part_bytes[0]
    assert [a == b for a, b in zip(right, wrong, strict=True)] == [n != part for n in range(3)]


@given(st.binary(max_size=3 * PAGE_BYTES))
@example(b"")
@example(bytes(PAGE_BYTES))
def test_any_bytes_are_refused_politely(data: bytes) -> None:
    """Bytes that are no header are a FormatError, and nothing else."""
    for decode in (decode_header, decode_segment):
        with pytest.raises(FormatError):
            decode(data)


@given(
    st.lists(st.tuples(st.integers(32, 511), st.integers(0, 255)), min_size=1, max_size=12),
    st.booleans(),
)
def test_hostile_headers_are_refused_politely(edits: list[tuple[int, int]], small: bool) -> None:  # noqa: FBT001 - drawn
    """A header with a right checksum and any fields is sane or a FormatError."""
    page = bytearray(golden_header())
    for offset, value in edits:
        page[204 + offset % 12 if small else offset] = value
    try:
        record, digests = decode_header(resealed(page, slice(16, 32)))
    except FormatError:
        return
    assert len(record.part_bytes) == len(record.shapes) == len(digests) >= 1
    assert sum(record.part_bytes) == record.payload_bytes
    assert all(1 <= len(shapes) <= 4 for shapes in record.shapes)


@given(st.integers(0, 2**32 - 1), u64, u64)
def test_hostile_segments_are_refused_politely(slots: int, segment: int, size: int) -> None:
    """A segment header with a right checksum has at least a slot, of whole pages, or is refused."""
    page = bytearray(encode_segment(SegmentHeader(1, 1, 2 * PAGE_BYTES)))
    page[12:16] = slots.to_bytes(4, "little")
    page[16:24] = segment.to_bytes(8, "little")
    page[24:32] = size.to_bytes(8, "little")
    try:
        header = decode_segment(resealed(page, slice(32, 48)))
    except FormatError:
        return
    assert header.slots >= 1
    assert header.slot_bytes >= 2 * PAGE_BYTES
    assert header.slot_bytes % PAGE_BYTES == 0


@pytest.mark.parametrize("version", [0, 2, 7, 2**32 - 1])
@pytest.mark.parametrize("which", ["record", "segment"])
def test_another_version_names_both(which: str, version: int) -> None:
    """Whoever meets a newer record or segment learns its version and the one that is read here."""
    if which == "record":
        page, decode, checksum = golden_header(), decode_header, slice(16, 32)
    else:
        page, decode, checksum = (
            encode_segment(SegmentHeader(5, 9, 8192)),
            decode_segment,
            slice(32, 48),
        )
    altered = bytearray(page)
    altered[8:12] = version.to_bytes(4, "little")
    with pytest.raises(FormatError, match=rf"format {version}\b.*reads 1\b"):
        decode(resealed(altered, checksum))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": 9}, "kind 9"),
        ({"parts": 0}, "0 parts"),
        ({"parts": 2**32 - 1}, "parts"),
        ({"payload": 1}, "payload of 1"),
    ],
)
def test_impossible_fields_are_named(fields: dict[str, int], message: str) -> None:
    """A header whose fields contradict each other says which."""
    where = {"kind": slice(200, 202), "parts": slice(204, 208), "payload": slice(208, 216)}
    page = bytearray(golden_header())
    for name, value in fields.items():
        span = where[name]
        page[span] = value.to_bytes(span.stop - span.start, "little")
    with pytest.raises(FormatError, match=message):
        decode_header(resealed(page, slice(16, 32)))


def test_a_header_of_another_length_is_refused() -> None:
    """A header is decoded from exactly its pages."""
    page = golden_header()
    for wrong in (page[:-1], page + b"\0", page + bytes(PAGE_BYTES), page[:100]):
        with pytest.raises(FormatError, match="bytes"):
            decode_header(wrong)


def test_a_record_tells_its_slot_size() -> None:
    """Slots are whole pages and hold header and payload with less than a page left over."""
    for nbytes in (1, 4095, 4096, 4097, 1 << 20):
        record = record_of(1, part_bytes=(nbytes,), shapes=(((1, 1),),))
        assert slot_bytes(record) == PAGE_BYTES + -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def test_records_differ_in_their_headers() -> None:
    """Two records of unequal identity never share a header."""
    base = record_of(1)
    other = replace(base, id=replace(base.id, namespace=bytes(32)))
    assert encode_header(base, [1, 2, 3]) != encode_header(other, [1, 2, 3])
