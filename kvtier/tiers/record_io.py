"""Whole slots between memory and segment files; the only place that knows about direct I/O.

Where the file system allows it, slots bypass the page cache (O_DIRECT): the bytes go between disk
and the caller's buffer without a copy. That needs page-aligned addresses and whole pages, so the
header and the last part of a page of a payload go through a small buffer of the thread's own, and
a payload that lies unaligned through a temporary one.

Plain positional reads and writes on threads: io_uring (liburing 2026.3.30, depth 4, 1 to 32 MiB,
five pairs each) moved 0.92 to 1.03 times as much, at 0.001 to 0.005 core-seconds less per GiB,
which is not worth a package.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.tiers.gate import WriteGate
from kvtier.tiers.scan import record_offset, segment_name
from kvtier.tiers.segment import HEADER_PAGES_MAX, PAGE_BYTES, SegmentHeader, encode_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.tiers.base import Location
    from kvtier.tiers.fs import FileSystem

__all__ = ["Abilities", "RecordIo", "probe", "probe_reads"]

log = logging.getLogger(__name__)

READS_INFLIGHT_MAX: Final = 4
WRITES_INFLIGHT_MAX: Final = 4
_PROBE: Final = "probe.new"
_ZERO_BYTES: Final = 1 << 20
"""How much of a slot is overwritten with zeros at once where holes cannot be punched."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a directory's file system can do: bypass the page cache, give back parts of a file."""

    direct: bool
    punch: bool

    @property
    def io(self) -> str:
        """How the disk is accessed: "direct" or "buffered"."""
        return "direct" if self.direct else "buffered"


def probe(directory: int, fs: FileSystem) -> Abilities:
    """Find out by trying, with one page in a file that is removed again."""
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    try:
        fd = fs.open_file(directory, _PROBE, write=True, create=True)
    except OSError as error:
        log.warning("segments/%s cannot be made, buffered I/O is used: %s", _PROBE, error)
        return Abilities(direct=False, punch=False)
    try:
        fs.write(fd, [page], 0)
        punch = _works(lambda: fs.punch(fd, 0, PAGE_BYTES))
        direct = _works(lambda: _write_direct(directory, fs, page))
    except OSError as error:
        log.warning("segments/%s cannot be written, buffered I/O is used: %s", _PROBE, error)
        return Abilities(direct=False, punch=False)
    finally:
        fs.close(fd)
        _works(lambda: fs.unlink(directory, _PROBE))
    return Abilities(direct=direct, punch=punch)


def probe_reads(directory: int, fs: FileSystem, segment: int) -> Abilities | None:
    """Find out how to read by reading a page of a segment; None if that cannot be read at all."""
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))

    def attempt(*, direct: bool) -> None:
        name = segment_name(segment)
        fd = fs.open_file(directory, name, write=False, create=False, direct=direct)
        try:
            fs.read(fd, [page], 0)
        finally:
            fs.close(fd)

    for direct in (True, False):
        if _works(partial(attempt, direct=direct)):
            return Abilities(direct=direct, punch=False)
    return None


def _write_direct(directory: int, fs: FileSystem, page: memoryview) -> None:
    fd = fs.open_file(directory, _PROBE, write=True, create=False, direct=True)
    try:
        fs.write(fd, [page], 0)
        if fs.read(fd, [page], 0) != PAGE_BYTES:
            raise OSError(errno.EIO, "a page that was just written cannot be read")
    finally:
        fs.close(fd)


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


class RecordIo:
    """Slots of the segment files in ``directory``; thread-safe. Errors are ``OSError``.

    At most so many reads and so many writes are under way at once, however many threads there are:
    one that computes checksums leaves the disk to the others. ``writes`` narrows the latter down.
    """

    def __init__(
        self,
        directory: int,
        fs: FileSystem,
        abilities: Abilities,
        reads_inflight_max: int = READS_INFLIGHT_MAX,
        writes_inflight_max: int = WRITES_INFLIGHT_MAX,
    ) -> None:
        self._reads = threading.BoundedSemaphore(reads_inflight_max)
        self.writes = WriteGate(writes_inflight_max)
        self._directory = directory
        self._fs = fs
        self.abilities = abilities
        self._scratch = threading.local()

    # -- records

    def read(self, where: Location, into: memoryview) -> tuple[memoryview, int]:
        """Fill ``into`` with a slot's payload; returns its header and how many bytes there were.

        The header is in the thread's own buffer: it holds until the thread's next call. A slot
        whose size does not fit the payload has an empty header.
        """
        pages = -(-into.nbytes // PAGE_BYTES) * PAGE_BYTES
        header_bytes = where.slot_bytes - pages
        if not PAGE_BYTES <= header_bytes <= HEADER_PAGES_MAX * PAGE_BYTES:
            return memoryview(b""), 0
        scratch = self._buffer(header_bytes + PAGE_BYTES)
        header, last = scratch[:header_bytes], scratch[header_bytes:]
        target = self._aligned(into)
        whole = into.nbytes // PAGE_BYTES * PAGE_BYTES
        rest = into.nbytes - whole
        pieces = [header, target[:whole]] + ([last] if rest else [])
        fd = self._open(where.segment, write=False)
        try:
            with self._reads:
                count = self._fs.read(
                    fd, [piece for piece in pieces if piece], record_offset(where)
                )
            if not self.abilities.direct:
                self._fs.evict_cache(fd, record_offset(where), where.slot_bytes)
        finally:
            self._fs.close(fd)
        if target is not into:
            into[:whole] = target[:whole]
        into[whole:] = last[:rest]
        return header, min(count, header_bytes + into.nbytes)

    def write(self, where: Location, header: bytes, payload: memoryview) -> None:
        """Write a record into its slot, the rest of the last page being zero."""
        scratch = self._buffer(len(header) + PAGE_BYTES)
        scratch[: len(header)] = header
        last = scratch[len(header) :]
        source = self._aligned(payload)
        if source is not payload:
            source[: payload.nbytes] = payload
        whole = payload.nbytes // PAGE_BYTES * PAGE_BYTES
        rest = payload.nbytes - whole
        last[:rest] = payload[whole:]
        last[rest:] = bytes(PAGE_BYTES - rest)
        pieces = [scratch[: len(header)], source[:whole]] + ([last] if rest else [])
        self._write(where, [piece for piece in pieces if piece])

    def _write(self, where: Location, pieces: Sequence[memoryview]) -> None:
        fd = self._open(where.segment, write=True)
        try:
            with self.writes:
                self._fs.write(fd, pieces, record_offset(where))
        finally:
            self._fs.close(fd)

    def destroy(self, where: Location) -> bool:
        """Make what a slot held unreadable; True if its disk was given back too."""
        if self.abilities.punch:
            fd = self._open(where.segment, write=True)
            try:
                self._fs.punch(fd, record_offset(where), where.slot_bytes)
            finally:
                self._fs.close(fd)
            return True
        zeros = memoryview(mmap.mmap(-1, min(_ZERO_BYTES, where.slot_bytes)))
        fd = self._open(where.segment, write=True)
        try:
            for start in range(0, where.slot_bytes, zeros.nbytes):
                piece = zeros[: where.slot_bytes - start]
                self._fs.write(fd, [piece], record_offset(where) + start)
        finally:
            self._fs.close(fd)
        return False

    # -- segments

    def create(self, header: SegmentHeader) -> None:
        """Make a segment file; its name is durable when this returns."""
        page = memoryview(encode_segment(header))
        name = segment_name(header.id)
        fd = self._fs.open_file(self._directory, name, write=True, create=True)
        try:
            self._fs.write(fd, [page], 0)
        finally:
            self._fs.close(fd)
        self._fs.sync_directory(self._directory)

    def sync(self, segment: int) -> None:
        """Make what was written to a segment durable."""
        fd = self._fs.open_file(self._directory, segment_name(segment), write=True, create=False)
        try:
            self._fs.sync(fd)
            if not self.abilities.direct:
                self._fs.evict_cache(fd, 0, 0)
        finally:
            self._fs.close(fd)

    def unlink(self, segment: int) -> None:
        """Remove a segment file; it stays removed after a power cut."""
        self._fs.unlink(self._directory, segment_name(segment))
        self._fs.sync_directory(self._directory)

    # -- inside

    def _open(self, segment: int, *, write: bool) -> int:
        name = segment_name(segment)
        direct = self.abilities.direct
        return self._fs.open_file(self._directory, name, write=write, create=False, direct=direct)

    def _buffer(self, nbytes: int) -> memoryview:
        """Return a page-aligned buffer of the calling thread's own, at least so long."""
        held: memoryview | None = getattr(self._scratch, "held", None)
        if held is None or held.nbytes < nbytes:
            held = memoryview(mmap.mmap(-1, nbytes))
            self._scratch.held = held
        return held[:nbytes]

    def _aligned(self, buffer: memoryview) -> memoryview:
        """Return the buffer itself if direct I/O may use it, or else another one of its size."""
        if not self.abilities.direct or not buffer.nbytes:
            return buffer
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        if address % PAGE_BYTES == 0:
            return buffer
        return memoryview(mmap.mmap(-1, buffer.nbytes))
