"""Slots read in the order in which they lie, and what is wrong with the records in them.

Past the page cache where the file system allows it, neighbours at once, several reads in flight;
checksums are computed by the threads that read.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers.entries import id_at, location_at
from kvtier.tiers.record_io import probe_reads
from kvtier.tiers.scan import record_offset, segment_name
from kvtier.tiers.segment import HEADER, HEADER_PAGES_MAX, PAGE_BYTES, part_digests, read_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tiers.base import BlockId
    from kvtier.tiers.entries import Entries
    from kvtier.tiers.fs import FileSystem

__all__ = ["READERS", "SLOT_BYTES_MAX", "UNREAD", "Faults", "SlotReader", "batches", "faults_of"]

READERS: Final = 8
"""Threads that read and compute checksums: half of them keep a disk busy while half compute."""
READ_BYTES_MAX: Final = 8 << 20
"""Neighbouring slots that are read at once; a larger slot is read alone."""
SLOT_BYTES_MAX: Final = 1 << 30
"""A larger slot is not read: each reader holds one in memory."""
UNREAD: Final = "could not be read"
"""How a fault begins that is the disk's, not the record's."""
_HUGE_PAGE: Final = 2 << 20
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
_SAID_TWICE: Final = (
    "parent", "tenant", "position", "kind", "codec", "payload_bytes", "created_ns", "priority",
    "expiry_ns",
)  # fmt: skip
"""What an entry and its record's header both say."""

Faults = list[tuple["BlockId", str]]
"""Blocks that are not as they were written, and what is wrong with each."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Neighbouring slots of one segment, and the rows that say so."""

    segment: int
    rows: Entries = field(repr=False)

    @property
    def nbytes(self) -> int:
        """How much is read for it."""
        return len(self.rows) * int(self.rows["slot_bytes"][0])


def batches(entries: Entries) -> Iterator[Batch]:
    """Yield all rows, in the order in which their slots lie, neighbours together."""
    rows = entries[np.lexsort((entries["slot"], entries["segment"]))]
    segment, slot = rows["segment"], rows["slot"].astype(np.int64)
    apart = (segment[1:] != segment[:-1]) | (slot[1:] != slot[:-1] + 1)
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        at_once = max(READ_BYTES_MAX // int(rows["slot_bytes"][start]), 1)
        for first in range(start, stop, at_once):
            yield Batch(int(segment[first]), rows[first : min(first + at_once, stop)])


class SlotReader:
    """Reads the slots of the segments in an open directory, with ``READERS`` threads.

    ``advance`` is told the bytes of slots as they are done, from several threads.
    """

    def __init__(self, segments: int, fs: FileSystem, advance: Callable[[int], None]) -> None:
        self._segments = segments
        self._fs = fs
        self._advance = advance
        self._lock = threading.Lock()
        self._direct = False
        self._failure: BaseException | None = None
        self.read_bytes = 0
        self.io = "unknown"

    def read(self, work: Iterator[Batch]) -> Faults:
        """Return what is wrong; ``io`` says how the disk was accessed."""
        first = next(work, None)
        if first is None:
            return []
        found = probe_reads(self._segments, self._fs, first.segment)
        if found is not None:
            self._direct, self.io = found.direct, found.io
        faults: Faults = []
        todo = chain([first], work)
        threads = [
            threading.Thread(target=self._work, args=(todo, faults), name=f"check-{number}")
            for number in range(READERS)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # the caller has had enough: so have the readers
            self._failure = error
            raise
        if self._failure is not None:
            raise self._failure
        return faults

    def _work(self, work: Iterator[Batch], faults: Faults) -> None:
        buffer = _memory(READ_BYTES_MAX)
        try:
            while True:
                with self._lock:
                    batch = next(work, None) if self._failure is None else None
                if batch is None:
                    return
                if SLOT_BYTES_MAX >= batch.nbytes > len(buffer):
                    buffer = _memory(batch.nbytes)
                count, found = self._one(batch, buffer)
                self._advance(batch.nbytes)
                with self._lock:
                    self.read_bytes += count
                    faults.extend(found)
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            with self._lock:
                self._failure = error

    def _one(self, batch: Batch, buffer: memoryview) -> tuple[int, Faults]:
        everyone = [id_at(batch.rows, row) for row in range(len(batch.rows))]
        if batch.nbytes > len(buffer):
            return 0, [(block, f"its slot is over {SLOT_BYTES_MAX} bytes") for block in everyone]
        try:
            count = self._fill(batch, buffer[: batch.nbytes])
        except OSError as error:
            words = f"{UNREAD}: {error.strerror or error}"
            if len(everyone) == 1:
                return 0, [(everyone[0], words)]
            # One bad sector is one block's.
            alone = [
                Batch(batch.segment, batch.rows[row : row + 1]) for row in range(len(everyone))
            ]
            parts = [self._one(each, buffer) for each in alone]
            return sum(count for count, _ in parts), [one for _, each in parts for one in each]
        faults = faults_of(batch.rows, buffer[:count])
        return count, [(everyone[row], fault) for row, fault in faults.items()]

    def _fill(self, batch: Batch, buffer: memoryview) -> int:
        fs, name = self._fs, segment_name(batch.segment)
        fd = fs.open_file(self._segments, name, write=False, create=False, direct=self._direct)
        try:
            offset = record_offset(location_at(batch.rows, 0))
            count = fs.read(fd, [buffer], offset)
            if not self._direct:
                fs.evict_cache(fd, offset, len(buffer))
        finally:
            fs.close(fd)
        return count


def _memory(nbytes: int) -> memoryview:
    """Return page-aligned memory; in huge pages, where there are any, direct I/O is faster."""
    memory = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, flags=_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def faults_of(rows: Entries, slots: memoryview) -> dict[int, str]:
    """Return what is wrong with neighbouring slots, by row; those in order have no place in it.

    ``slots`` holds the bytes of the rows' slots, or as many as there are.
    """
    width = int(rows["slot_bytes"][0])
    faults: dict[int, str] = {}
    for row in range(len(rows)):
        fault = _fault(id_at(rows, row), slots[row * width : (row + 1) * width])
        if fault:
            faults[row] = fault
    whole = min(len(rows), len(slots) // width)
    heads = np.ndarray((whole,), HEADER, slots, strides=(width,))
    for name in _SAID_TWICE:
        for row in np.flatnonzero(heads[name] != rows[name][:whole]).tolist():
            faults.setdefault(row, f"is not as the index says: another {name}")
    return faults


def _fault(block: BlockId, slot: memoryview) -> str:
    """Return what is wrong with a block's record; empty if nothing."""
    if len(slot) < PAGE_BYTES:
        return f"ends after {len(slot)} bytes"
    if not any(slot[: HEADER.itemsize]):
        return "is not there: its slot is empty"
    size = int.from_bytes(slot[12:16], "little")
    limit = min(len(slot), HEADER_PAGES_MAX * PAGE_BYTES)
    try:
        found, part_bytes, digests = read_digests(slot[: min(max(size, PAGE_BYTES), limit)])
    except FormatError as error:
        return f"is damaged: {error}"
    if found != block:
        return f"is not there: its slot holds block {found}"
    return _payload_fault(slot[size:], part_bytes, digests)


def _payload_fault(rest: memoryview, part_bytes: tuple[int, ...], digests: list[int]) -> str:
    wanted = sum(part_bytes)
    if wanted > len(rest):
        return f"ends after {len(rest)} bytes of payload, {wanted} wanted"
    if len(rest) - wanted >= PAGE_BYTES:
        return "is damaged: its slot has another size"
    are = part_digests(part_bytes, rest)
    wrong = [layer for layer, (a, b) in enumerate(zip(are, digests, strict=True)) if a != b]
    if not wrong:
        return ""
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"is damaged: layer {wrong[0]}{others} fails its checksum"
