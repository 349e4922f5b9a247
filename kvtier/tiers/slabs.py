"""The books of the SSD tier's slots: which are free, which are live, how much disk they take."""

from __future__ import annotations

import threading
from collections import defaultdict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.index import INDEX_COMMIT_BYTES_MAX
from kvtier.tiers.segment import PAGE_BYTES, SegmentHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.tiers.recovery import FoundSegment

__all__ = ["OTHER_BYTES", "SEGMENT_METADATA_BYTES", "Slabs"]

OTHER_BYTES: Final = 64 << 10
"""Allowance for directories and the small files beside segments and index."""
SEGMENT_METADATA_BYTES: Final = 16 << 10
"""Allowance per segment for its first page and the file system's extent blocks."""


class Slabs:
    """Slots of fixed sizes in segments, within ``limit_bytes`` on disk; thread-safe.

    Every slot below a segment's high-water mark is either free (in a heap, so that low slots are
    reused first), live (it holds a block), or taken (a write is under way).
    """

    def __init__(
        self,
        found: dict[int, FoundSegment],
        *,
        limit_bytes: int,
        segment_bytes_max: int,
        index_bytes: Callable[[], int],
        now_ns: Callable[[], int],
    ) -> None:
        self.limit_bytes = limit_bytes
        self._segment_bytes_max = segment_bytes_max
        self._index_bytes = index_bytes
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._headers = {segment: slab.header for segment, slab in found.items()}
        self._written = {segment: slab.slots_written for segment, slab in found.items()}
        self._free: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._live: dict[tuple[int, int], BlockId] = {}
        self._taken: set[tuple[int, int]] = set()

    def header(self, segment: int) -> SegmentHeader:
        """Return a segment's header."""
        with self._lock:
            return self._headers[segment]

    def segments(self) -> list[int]:
        """Return the segments' ids."""
        with self._lock:
            return list(self._headers)

    def used_bytes(self) -> int:
        """Return what data, index and small files occupy on disk."""
        with self._lock:
            return self._used()

    def fits(self) -> bool:
        """Whether data and index, with what its next commit may add, are within the limit."""
        with self._lock:
            return self._fresh_room() >= 0

    def empty_segments(self, size: int) -> list[int]:
        """Return the segments of other slot sizes in which every slot is free."""
        with self._lock:
            held = {segment for segment, _ in (*self._live, *self._taken)}
            return [
                segment
                for segment, header in self._headers.items()
                if header.slot_bytes != size and segment not in held
            ]

    def blocks(self) -> int:
        """Return how many slots hold a block."""
        with self._lock:
            return len(self._live)

    def settle(self, live: Iterable[tuple[BlockId, Location]]) -> None:
        """Say which slots hold blocks; every other written slot is free."""
        with self._lock:
            self._live = {(where.segment, where.slot): block for block, where in live}
            self._free.clear()
            for segment, written in self._written.items():
                heap = self._free[self._headers[segment].slot_bytes]
                heap.extend((segment, s) for s in range(written) if (segment, s) not in self._live)
            for heap in self._free.values():
                heapify(heap)

    def forget(self, segment: int) -> None:
        """Take a whole segment out of the books."""
        with self._lock:
            header = self._headers.pop(segment)
            del self._written[segment]
            heap = [key for key in self._free[header.slot_bytes] if key[0] != segment]
            heapify(heap)
            self._free[header.slot_bytes] = heap
            self._live = {key: block for key, block in self._live.items() if key[0] != segment}
            self._taken = {key for key in self._taken if key[0] != segment}

    def room(self, size: int) -> int:
        """Return how many records of this slot size fit before something must go."""
        with self._lock:
            fresh = max(self._fresh_room(), 0)
            open_slots = sum(
                header.slots - self._written[segment]
                for segment, header in self._headers.items()
                if header.slot_bytes == size
            )
            inside = min(open_slots, fresh // size)
            per_segment = self._slots_per_segment(size)
            whole = per_segment * size + SEGMENT_METADATA_BYTES
            segments, rest = divmod(fresh - inside * size, whole)
            more = segments * per_segment + max(rest - SEGMENT_METADATA_BYTES, 0) // size
            return len(self._free[size]) + inside + more

    def take(self, size: int) -> tuple[Location, bool] | None:
        """Take a slot, True if its segment is new; None if the limit allows no fresh one."""
        with self._lock:
            if self._free[size]:
                segment, slot = heappop(self._free[size])
                self._taken.add((segment, slot))
                return Location(segment, slot, size), False
            room = self._fresh_room()
            for segment, header in self._headers.items():
                slot = self._written[segment]
                if header.slot_bytes == size and slot < header.slots:
                    if room < size:
                        return None
                    self._written[segment] += 1
                    self._taken.add((segment, slot))
                    return Location(segment, slot, size), False
            if room < size + SEGMENT_METADATA_BYTES:
                return None
            # Ids are never reused, also not after a segment is gone: they follow the clock.
            segment = max(self._now_ns(), max(self._headers, default=0) + 1)
            slots = self._slots_per_segment(size)
            self._headers[segment] = SegmentHeader(segment, slots, size)
            self._written[segment] = 1
            self._taken.add((segment, 0))
            return Location(segment, 0, size), True

    def give_back(self, where: Location) -> None:
        """Free a taken slot whose write did not happen."""
        with self._lock:
            self._taken.remove((where.segment, where.slot))
            heappush(self._free[where.slot_bytes], (where.segment, where.slot))

    def fill(self, block: BlockId, where: Location) -> None:
        """Record that a taken slot holds a block from now on."""
        with self._lock:
            self._taken.remove((where.segment, where.slot))
            self._live[where.segment, where.slot] = block

    def empty(self, block: BlockId, where: Location) -> None:
        """Free a slot if it still holds this block."""
        with self._lock:
            key = (where.segment, where.slot)
            if self._live.get(key) == block:
                del self._live[key]
                heappush(self._free[where.slot_bytes], key)

    def check(self) -> list[str]:
        """Return what is wrong with the books, in words."""
        problems = []
        with self._lock:
            free = [key for heap in self._free.values() for key in heap]
            everything = sorted([*free, *self._live, *self._taken])
            expected = sorted(
                (segment, slot)
                for segment, written in self._written.items()
                for slot in range(written)
            )
            if everything != expected:
                problems.append(
                    f"ssd: {len(free)} free, {len(self._live)} live and {len(self._taken)} taken "
                    f"slots, {len(expected)} written"
                )
            if self._headers and self._used() > self.limit_bytes:
                problems.append(f"ssd: {self._used()} bytes used, limit {self.limit_bytes}")
        return problems

    def _used(self) -> int:
        data = sum(
            SEGMENT_METADATA_BYTES + written * self._headers[segment].slot_bytes
            for segment, written in self._written.items()
        )
        return data + self._index_bytes() + OTHER_BYTES

    def _fresh_room(self) -> int:
        return self.limit_bytes - self._used() - INDEX_COMMIT_BYTES_MAX

    def _slots_per_segment(self, size: int) -> int:
        return max(1, (self._segment_bytes_max - PAGE_BYTES) // size)
