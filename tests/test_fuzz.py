"""What comes from the disk is hostile: anything but a sound record is an error or a miss."""

from __future__ import annotations

import logging
import resource
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from crash.course import SPECS, Course, record
from crash.index import CrashIndex
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SPEC, bring_back, payload, payload_of, prompt_keys, put, record_of

import kvtier
from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location, ReadResult
from kvtier.tiers.entries import ENTRY, Entries, entry_of, id_at, table
from kvtier.tiers.index import LmdbIndex
from kvtier.tiers.scan import segment_name
from kvtier.tiers.segment import (
    HEADER_PAGES_MAX,
    PAGE_BYTES,
    decode_header,
    decode_segment,
    encode_header,
    part_digests,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_BYTES_MAX = 256 << 20
"""What opening and reading a tiny store may take beyond what the process has."""
EDGES = [0, 1, 2, 3, 4095, 4096, 4097, 8192, 12288, 16384]
EDGES += [(1 << bits) + more for bits in (31, 32, 62, 63, 64) for more in (-4096, -1, 0, 1)]
numbers = st.sampled_from(EDGES) | st.integers(0, (1 << 64) - 1)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep the reports of what is damaged to themselves."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@contextmanager
def memory_bound(nbytes: int = MEMORY_BYTES_MAX) -> Iterator[None]:
    """Let allocations fail that a size from the disk would make too large."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- the decoders


def sealed(page: bytearray, checksum: slice) -> bytes:
    """Return a page with a valid checksum, so that what it says is believed."""
    page[checksum] = bytes(16)
    page[checksum] = xxhash.xxh3_128_digest(page)
    return bytes(page)


patches = st.lists(st.tuples(st.integers(0, 520), st.binary(min_size=1, max_size=8)), max_size=6)


def patched(page: bytes, changes: list[tuple[int, bytes]]) -> bytearray:
    """Return a page with some bytes replaced."""
    result = bytearray(page)
    for offset, data in changes:
        result[offset : offset + len(data)] = data
    return result[: len(page)]


def sound_header(number: int = 1) -> bytes:
    """Return the header of a record."""
    made = record_of(number)
    return encode_header(made, part_digests(made.part_bytes, payload(made)))


@given(changes=patches, length=st.sampled_from([0, 1, 255, 256, 4095, 4096, 8192]))
@settings(max_examples=300)
def test_a_record_header_of_any_bytes(changes: list[tuple[int, bytes]], length: int) -> None:
    """Any bytes with a valid checksum decode to a record that holds together, or FormatError."""
    page = patched(sound_header().ljust(length, b"\0")[: max(length, 32)], changes)
    for data in (bytes(page), sealed(page, slice(16, 32))):
        with suppress(FormatError):
            decoded, digests = decode_header(data)
            assert len(digests) == len(decoded.part_bytes) == len(decoded.shapes)
            assert len(digests) <= HEADER_PAGES_MAX * PAGE_BYTES // 64
            assert decoded.payload_bytes < 1 << 80
            assert len(decoded.id.hash) == len(decoded.id.namespace) == 32


@given(data=st.binary(max_size=64) | st.binary(min_size=4096, max_size=4096))
def test_headers_of_random_bytes(data: bytes) -> None:
    """Noise is a FormatError for either decoder."""
    for decode in (decode_header, decode_segment):
        with pytest.raises(FormatError):
            decode(data)


def hostile_segment(segment: int, slots: int, slot_bytes: int) -> bytes:
    """Return a segment's first page that says anything, with a valid checksum."""
    page = bytearray(PAGE_BYTES)
    page[:8] = b"KVTSEG\r\n"
    page[8:12] = (1).to_bytes(4, "little")
    page[12:16] = (slots % (1 << 32)).to_bytes(4, "little")
    page[16:24] = segment.to_bytes(8, "little")
    page[24:32] = (slot_bytes % (1 << 64)).to_bytes(8, "little")
    return sealed(page, slice(32, 48))


@given(slots=numbers, slot_bytes=numbers)
@settings(max_examples=200)
def test_a_segment_header_of_any_numbers(slots: int, slot_bytes: int) -> None:
    """A first page decodes to whole pages and a bounded number of slots, or FormatError."""
    with suppress(FormatError):
        header = decode_segment(hostile_segment(7, slots, slot_bytes))
        assert header.slot_bytes % PAGE_BYTES == 0
        assert 2 * PAGE_BYTES <= header.slot_bytes < 1 << 64
        assert 1 <= header.slots <= 1 << 20


# -- a whole tier over hostile segments and a hostile index

STORED = [0, 2, 1]
WIDTHS = {
    "segment": 64, "slot": 32, "slot_bytes": 64, "payload_bytes": 64, "position": 64, "version": 16,
    "kind": 16, "codec": 16, "created_ns": 64, "expiry_ns": 64, "hits": 32, "last_use_ns": 64,
}  # fmt: skip
lies = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.dictionaries(st.sampled_from(sorted(WIDTHS)), numbers, min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=10,
)


def hostile(entries: Entries, lies_: list[tuple[int, dict[str, int]]]) -> dict[bytes, bytes]:
    """Return an index whose entries lie: about blocks that are stored, and about others."""
    stored = {row.tobytes()[:64]: row.tobytes() for row in entries}
    for number, fields in lies_:
        made = record(number)
        key = made.id.namespace + made.id.hash
        row = np.frombuffer(
            bytearray(stored.get(key, entry_of(made, Location(1, 0, 8192), 0))), dtype=ENTRY
        )
        for name, value in fields.items():
            row[name] = value % (1 << WIDTHS[name])
        stored[key] = row.tobytes()
    return stored


def ready_course() -> Course:
    """Return a course with a few blocks stored."""
    course = Course()
    course.open()
    course.write(STORED)
    course.close()
    return course


def assert_never_wrong(course: Course) -> None:
    """Open and read everything: right bytes or a miss, sound books; then go on."""
    with memory_bound():
        course.open()
        course.ledger.durable.clear()  # what an entry lies about may be lost
        course.ledger.maybe |= {record(number).id for number in range(10)}
        course.check()
        course.settle_doubts()
        course.write_evicting([100, 101, 102])
        course.check_live()
        course.reopen()
        course.check()
        course.close()
    assert course.problems == []


@given(lies_=lies)
@settings(max_examples=120)
def test_an_index_that_lies(lies_: list[tuple[int, dict[str, int]]]) -> None:
    """Whatever the entries say, the tier opens, reads right bytes or misses, and goes on."""
    course = ready_course()
    stored = hostile(table(list(course.index.stored.values())), lies_)
    course.index = CrashIndex(course.fs.points, stored)
    assert_never_wrong(course)


@given(order=st.permutations([0, 1, 2, 3]), slot=st.integers(0, 3))
def test_an_index_that_names_a_block_twice(order: list[int], slot: int) -> None:
    """A damaged tree may hand out a key twice: the tier takes the block once, or not at all."""
    course = ready_course()
    course.reopen()
    course.write([4])
    course.drop([4])  # a slot that is free, where the second entry of a block may point
    rows = list(course.index.stored.values())
    again = table(bytearray(rows[0]))
    again["slot"] = slot
    twice = [again.tobytes(), *rows]

    class Twice(CrashIndex):
        def entries(self) -> Entries:
            """Return one block twice."""
            return table([twice[i] for i in order])

    course.index = Twice(course.fs.points, dict(course.index.stored))
    course.open()
    ids = [id_at(course.tier.entries, row) for row in range(len(course.tier.entries))]
    assert len(ids) == len(set(ids))


@given(
    headers=st.lists(st.tuples(numbers, numbers, st.integers(0, 5 * PAGE_BYTES)), max_size=3),
    lost=st.booleans(),
    lies_=lies,
)
@settings(max_examples=120)
def test_segments_that_lie(
    headers: list[tuple[int, int, int]], lies_: list[Any], *, lost: bool
) -> None:
    """First pages with any numbers, files of any length: the tier opens and goes on."""
    course = ready_course()
    stored = hostile(table(list(course.index.stored.values())), lies_)
    folder = course.fs.open_directory("segments")
    for number, (slots, slot_bytes, length) in enumerate(headers, 1):
        fd = course.fs.open_file(folder, segment_name(number), write=True, create=True)
        page = hostile_segment(number, slots, slot_bytes)
        course.fs.write(fd, [memoryview(page + bytes(length))], 0)
        course.fs.close(fd)
    course.index = CrashIndex(course.fs.points, stored)
    course.index.lost = lost
    assert_never_wrong(course)


@given(changes=patches, lost=st.booleans(), number=st.sampled_from(STORED))
@settings(max_examples=120)
def test_records_that_lie(changes: list[tuple[int, bytes]], number: int, *, lost: bool) -> None:
    """A record's header with any numbers and a valid checksum: right bytes or a miss."""
    course = ready_course()
    where = course.ledger.durable[record(number).id]
    folder = course.fs.open_directory("segments")
    fd = course.fs.open_file(folder, segment_name(where.segment), write=True, create=False)
    offset = PAGE_BYTES + where.slot * where.slot_bytes
    page = bytearray(PAGE_BYTES)
    course.fs.read(fd, [memoryview(page)], offset)
    forged = sealed(patched(bytes(page), changes), slice(16, 32))
    course.fs.write(fd, [memoryview(forged)], offset)
    course.fs.close(fd)
    course.index = course.index.survive(lost=lost)
    with memory_bound():
        course.open()
        for row in range(len(course.tier.entries)):
            _read_anything(course, row)
        course.tier.write([record(100)], [payload(record(100))])
        assert course.tier.check() == []
        course.close()


def _read_anything(course: Course, row: int) -> None:
    """Read an entry by the number of bytes that some caller may expect; wrong bytes are none."""
    entry = course.tier.entries[row]
    where = Location(int(entry["segment"]), int(entry["slot"]), int(entry["slot_bytes"]))
    block = BlockId(entry["namespace"].tobytes(), entry["hash"].tobytes())
    for nbytes in (spec.block_layout.block_bytes for spec in SPECS):
        buffer = bytearray(nbytes)
        (result,) = course.tier.read([block], [where], [memoryview(buffer)])
        known = {record(number).id for number in STORED}
        if result is ReadResult.OK and block in known:
            assert buffer == payload_of(block, nbytes)


# -- the whole store over a hostile index in LMDB


@given(lies_=lies)
@settings(max_examples=20)
def test_a_store_whose_index_lies(tmp_path_factory: Any, lies_: list[Any]) -> None:
    """With any entries in the index on disk, the store opens and restores right bytes."""
    path = str(tmp_path_factory.mktemp("fuzz") / "store")
    keys = prompt_keys(4)
    with kvtier.open(path, SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
        put(store, keys)
    index = LmdbIndex(f"{path}/index", 1 << 26)
    rows = index.entries().copy()
    for number, fields in lies_:
        row = rows[number % len(rows)]
        for name, value in fields.items():
            row[name] = value % (1 << WIDTHS[name])
    index.commit([row.tobytes() for row in rows], [])
    index.close()
    with memory_bound(1 << 30), kvtier.open(path, SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
        bring_back(store, keys)
        put(store, keys)
        assert bring_back(store, keys).loaded == 4
        assert store.check() == []
