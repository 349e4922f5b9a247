"""The books of the SSD tier's slots: which are free, which are live, how much disk they take."""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.tiers.base import Location
from kvtier.tiers.index import INDEX_COMMIT_BYTES_MAX
from kvtier.tiers.segment import PAGE_BYTES, SLOTS_MAX, SegmentHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.tiers.base import BlockId
    from kvtier.tiers.entries import Entries
    from kvtier.tiers.recovery import FoundSegment

__all__ = ["OTHER_BYTES", "SEGMENT_METADATA_BYTES", "Slabs", "SlotState"]

OTHER_BYTES: Final = 64 << 10
"""Allowance for directories and the small files beside segments and index."""
SEGMENT_METADATA_BYTES: Final = 16 << 10
"""Allowance per segment for its first page and the file system's extent blocks."""


class SlotState(IntEnum):
    """What a slot below its segment's high-water mark is."""

    FREE = 0
    """It occupies disk and may be overwritten."""
    HOLE = 1
    """It may be written; its disk was given back."""
    TAKEN = 2
    """A write, or the destruction of what it held, is under way."""
    LIVE = 3
    """It holds a block."""


@dataclass(slots=True, eq=False)
class _Segment:
    header: SegmentHeader
    written: int
    states: bytearray  # one SlotState for each written slot
    counts: list[int]  # written slots by state
    tags: array[int]  # for each written slot, which block it holds if it is LIVE

    def move(self, slot: int, after: SlotState) -> SlotState:
        before = SlotState(self.states[slot])
        self.states[slot] = after
        self.counts[before] -= 1
        self.counts[after] += 1
        return before

    @property
    def disk_bytes(self) -> int:
        held = self.written - self.counts[SlotState.HOLE]
        return SEGMENT_METADATA_BYTES + held * self.header.slot_bytes


class Slabs:
    """Slots of fixed sizes in segments, within ``limit_bytes`` on disk; thread-safe.

    A slot is reused in place: first those that still occupy disk, then holes, then slots that were
    never written, then a new segment, of which there are at most ``segments_max``.
    """

    def __init__(
        self,
        found: Mapping[int, FoundSegment],
        *,
        limit_bytes: int,
        segment_bytes_max: int,
        segments_max: int,
        index_bytes: Callable[[], int],
        now_ns: Callable[[], int],
    ) -> None:
        self.limit_bytes = limit_bytes
        self._segment_bytes_max = segment_bytes_max
        self._segments_max = segments_max
        self._index_bytes = index_bytes
        self._now_ns = now_ns
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        self._segments: dict[int, _Segment] = {}
        # By slot size, the segments that have such a slot; dicts because they keep their order.
        self._with: dict[SlotState, dict[int, dict[int, None]]] = {
            state: defaultdict(dict) for state in (SlotState.FREE, SlotState.HOLE)
        }
        self._unfilled: dict[int, dict[int, None]] = defaultdict(dict)
        self._data_bytes = 0
        for segment, slab in found.items():
            states = bytearray(slab.slots_written)
            for slot in slab.holes:
                states[slot] = SlotState.HOLE
            self._enter(segment, slab.header, states)

    def _enter(self, segment: int, header: SegmentHeader, states: bytearray) -> None:
        counts = [states.count(state) for state in SlotState]
        tags = array("Q", bytes(8 * len(states)))
        slab = _Segment(header, len(states), states, counts, tags)
        self._segments[segment] = slab
        self._data_bytes += slab.disk_bytes
        self._list(segment, slab)

    def _list(self, segment: int, slab: _Segment) -> None:
        """Keep the lists of where to find a slot in step with a segment's counts."""
        size = slab.header.slot_bytes
        for state, by_size in self._with.items():
            if slab.counts[state]:
                by_size[size][segment] = None
            else:
                by_size[size].pop(segment, None)
        if slab.written < slab.header.slots:
            self._unfilled[size][segment] = None
        else:
            self._unfilled[size].pop(segment, None)

    def _move(self, segment: int, slot: int, after: SlotState) -> None:
        slab = self._segments[segment]
        before = slab.move(slot, after)
        size = slab.header.slot_bytes
        self._data_bytes += size * ((before is SlotState.HOLE) - (after is SlotState.HOLE))
        self._list(segment, slab)

    # -- looking

    def header(self, segment: int) -> SegmentHeader:
        """Return a segment's header."""
        with self._lock:
            return self._segments[segment].header

    def segments(self) -> list[int]:
        """Return the segments' ids."""
        with self._lock:
            return list(self._segments)

    def used_bytes(self) -> int:
        """Return what data, index and small files occupy on disk."""
        with self._lock:
            return self._used()

    def excess_bytes(self) -> int:
        """Return by how much data and index are over the limit."""
        with self._lock:
            return max(self._used() - self.limit_bytes, 0)

    def may_commit(self) -> bool:
        """Whether the limit holds whatever the next commit may add to the index."""
        with self._lock:
            return self._fresh_room() >= 0

    def blocks(self) -> int:
        """Return how many slots hold a block."""
        with self._lock:
            return sum(slab.counts[SlotState.LIVE] for slab in self._segments.values())

    def holds(self, block: BlockId, where: Location) -> bool:
        """Whether a slot holds this block."""
        with self._lock:
            return self._holds(block, where)

    def _holds(self, block: BlockId, where: Location) -> bool:
        slab = self._segments.get(where.segment)
        return (
            slab is not None
            and slab.header.slot_bytes == where.slot_bytes
            and where.slot < slab.written
            and slab.states[where.slot] == SlotState.LIVE
            and slab.tags[where.slot] == _tag(block)
        )

    def live(self) -> list[Location]:
        """Return every slot that holds a block."""
        with self._lock:
            return [
                Location(segment, int(slot), slab.header.slot_bytes)
                for segment, slab in self._segments.items()
                for slot in np.flatnonzero(
                    np.frombuffer(slab.states, dtype=np.uint8) == SlotState.LIVE
                )
            ]

    def empty_segments(self, other_than: int | None = None) -> list[int]:
        """Return segments that hold nothing, except those of one slot size."""
        with self._lock:
            return [
                segment
                for segment, slab in self._segments.items()
                if slab.header.slot_bytes != other_than
                and not slab.counts[SlotState.LIVE]
                and not slab.counts[SlotState.TAKEN]
            ]

    def room(self, size: int) -> int:
        """Return how many records of this slot size fit before something must go."""
        with self._lock:
            fresh = max(self._fresh_room(), 0)
            free = sum(
                self._segments[segment].counts[SlotState.FREE]
                for segment in self._with[SlotState.FREE][size]
            )
            inside = sum(
                self._segments[segment].counts[SlotState.HOLE]
                for segment in self._with[SlotState.HOLE][size]
            ) + sum(
                self._segments[segment].header.slots - self._segments[segment].written
                for segment in self._unfilled[size]
            )
            inside = min(inside, fresh // size)
            fresh -= inside * size
            per_segment = self._slots_per_segment(size)
            whole = per_segment * size + SEGMENT_METADATA_BYTES
            segments, rest = divmod(fresh, whole)
            more = segments * per_segment + max(rest - SEGMENT_METADATA_BYTES, 0) // size
            files = max(self._segments_max - len(self._segments), 0)
            return free + inside + min(more, files * per_segment)

    def limit_for(self, size: int, index_bytes: int = 0) -> int:
        """Return the least limit under which a slot of this size fits once all others are gone.

        With an index of at least ``index_bytes``.
        """
        index_bytes = max(self._index_bytes(), index_bytes)
        rest = index_bytes + OTHER_BYTES + INDEX_COMMIT_BYTES_MAX
        return rest + SEGMENT_METADATA_BYTES + size

    # -- slots

    def settle(self, live: Entries) -> None:
        """Say which slots hold blocks; every other written slot is free."""
        with self._lock:
            names = live["segment"]
            order = np.argsort(names, kind="stable")
            ids, starts = np.unique(names[order], return_index=True)
            stops = np.append(starts, len(order))[1:]
            for segment, start, stop in zip(ids, starts, stops, strict=True):
                rows = order[start:stop]
                slab = self._segments[int(segment)]
                states = np.frombuffer(slab.states, dtype=np.uint8)
                states[live["slot"][rows]] = SlotState.LIVE
                hashes = np.ascontiguousarray(live["hash"][rows]).view("<u8").reshape(-1, 4)
                np.frombuffer(slab.tags, dtype=np.uint64)[live["slot"][rows]] = hashes[:, 0]
            self._data_bytes = 0
            for segment, slab in self._segments.items():
                slab.counts = [slab.states.count(state) for state in SlotState]
                self._data_bytes += slab.disk_bytes
                self._list(segment, slab)

    def forget(self, segment: int) -> None:
        """Take a whole segment out of the books, whatever its slots are; one that is not there too.

        What was taken in it is given back to nobody.
        """
        with self._lock:
            if segment not in self._segments:
                return
            slab = self._segments.pop(segment)
            self._data_bytes -= slab.disk_bytes
            for by_size in (*self._with.values(), self._unfilled):
                by_size[slab.header.slot_bytes].pop(segment, None)

    def take(self, size: int) -> tuple[Location, bool] | None:
        """Take a slot, True if its segment is new; None if the limit allows no fresh one."""
        with self._lock:
            segment = next(iter(self._with[SlotState.FREE][size]), None)
            if segment is not None:
                return self._reuse(segment, SlotState.FREE), False
            room = self._fresh_room()
            segment = next(iter(self._with[SlotState.HOLE][size]), None)
            if segment is not None:
                return (self._reuse(segment, SlotState.HOLE), False) if room >= size else None
            segment = next(iter(self._unfilled[size]), None)
            if segment is not None:
                return (self._extend(segment), False) if room >= size else None
            full = len(self._segments) >= self._segments_max
            if full or room < size + SEGMENT_METADATA_BYTES:
                return None
            # Ids are never reused, also not after a segment is gone: they follow the clock.
            segment = max(self._now_ns(), max(self._segments, default=0) + 1)
            header = SegmentHeader(segment, self._slots_per_segment(size), size)
            self._enter(segment, header, bytearray())
            return self._extend(segment), True

    def _reuse(self, segment: int, state: SlotState) -> Location:
        slab = self._segments[segment]
        slot = slab.states.find(state)
        self._move(segment, slot, SlotState.TAKEN)
        return Location(segment, slot, slab.header.slot_bytes)

    def _extend(self, segment: int) -> Location:
        slab = self._segments[segment]
        slot = slab.written
        slab.states.append(SlotState.TAKEN)
        slab.tags.append(0)
        slab.counts[SlotState.TAKEN] += 1
        slab.written += 1
        self._data_bytes += slab.header.slot_bytes
        self._list(segment, slab)
        return Location(segment, slot, slab.header.slot_bytes)

    def give_back(self, where: Location, *, hole: bool = False) -> None:
        """Free a taken slot; ``hole`` if it occupies no disk any more."""
        with self._lock:
            if where.segment in self._segments:
                self._expect(where, SlotState.TAKEN)
                after = SlotState.HOLE if hole else SlotState.FREE
                self._move(where.segment, where.slot, after)

    def fill(self, block: BlockId, where: Location) -> None:
        """Record that a taken slot holds a block from now on."""
        with self._lock:
            if where.segment not in self._segments:
                return  # the file was removed by somebody: a read will find that out
            self._expect(where, SlotState.TAKEN)
            self._move(where.segment, where.slot, SlotState.LIVE)
            self._segments[where.segment].tags[where.slot] = _tag(block)

    def empty(self, block: BlockId, where: Location) -> None:
        """Free a slot if it still holds this block."""
        with self._lock:
            if self._holds(block, where):
                self._move(where.segment, where.slot, SlotState.FREE)

    def take_free(self, limit: int, other_than: int | None = None) -> list[Location]:
        """Take up to ``limit`` free slots that occupy disk, except those of one slot size."""
        with self._lock:
            taken: list[Location] = []
            for size, segments in self._with[SlotState.FREE].items():
                if size == other_than:
                    continue
                for segment in list(segments):
                    states = self._segments[segment].states
                    while len(taken) < limit and (slot := states.find(SlotState.FREE)) >= 0:
                        self._move(segment, slot, SlotState.TAKEN)
                        taken.append(Location(segment, slot, size))
            return taken

    def _expect(self, where: Location, state: SlotState) -> None:
        now = SlotState(self._segments[where.segment].states[where.slot])
        if now is not state:
            raise ValueError(f"slot {where} is {now.name}, not {state.name}")

    def check(self) -> list[str]:
        """Return what is wrong with the books, in words."""
        problems = []
        with self._lock:
            for segment, slab in self._segments.items():
                counted = [slab.states.count(state) for state in SlotState]
                if counted != slab.counts or len(slab.states) != slab.written:
                    problems.append(
                        f"ssd: segment {segment:016x} has {counted} slots by state, "
                        f"{slab.counts} counted, {slab.written} written"
                    )
            data = sum(slab.disk_bytes for slab in self._segments.values())
            if data != self._data_bytes:
                problems.append(f"ssd: {data} bytes of data, {self._data_bytes} counted")
            if self._segments and self._used() > self.limit_bytes:
                problems.append(f"ssd: {self._used()} bytes used, limit {self.limit_bytes}")
        return problems

    def _used(self) -> int:
        return self._data_bytes + self._index_bytes() + OTHER_BYTES

    def _fresh_room(self) -> int:
        return self.limit_bytes - self._used() - INDEX_COMMIT_BYTES_MAX

    def _slots_per_segment(self, size: int) -> int:
        return min(max(1, (self._segment_bytes_max - PAGE_BYTES) // size), SLOTS_MAX)


def _tag(block: BlockId) -> int:
    return int.from_bytes(block.hash[:8], "little")
