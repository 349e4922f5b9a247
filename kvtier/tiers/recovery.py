"""What to do with what was found at open: a pure function from (entries, segments) to repairs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.tiers.base import BlockId
    from kvtier.tiers.index import Entry
    from kvtier.tiers.segment import SegmentHeader

__all__ = ["FoundSegment", "Repairs", "plan_repairs"]


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file as found: its header, and how many slots its length reaches into."""

    header: SegmentHeader
    slots_written: int


@dataclass(frozen=True, slots=True)
class Repairs:
    """What to change so that index and segments agree.

    ``keep`` is the index's content from now on; ``remove`` are entries to take out of it, each with
    the reason; ``unlink`` are segments that hold nothing.
    """

    keep: tuple[Entry, ...]
    remove: tuple[tuple[BlockId, str], ...]
    unlink: tuple[int, ...]


def plan_repairs(entries: Sequence[Entry], segments: Mapping[int, FoundSegment]) -> Repairs:
    """Decide what is kept. Whatever is in doubt is a miss: it is never a reason not to open."""
    claims = Counter((entry.location.segment, entry.location.slot) for entry in entries)
    keep: list[Entry] = []
    remove: list[tuple[BlockId, str]] = []
    for entry in entries:
        where = entry.location
        found = segments.get(where.segment)
        if found is None:
            remove.append((entry.id, "its segment is gone"))
        elif where.slot_bytes != found.header.slot_bytes:
            remove.append((entry.id, "its segment has another slot size"))
        elif where.slot >= found.slots_written:
            remove.append((entry.id, "its segment ends before it"))
        elif claims[where.segment, where.slot] > 1:
            remove.append((entry.id, "two entries claim its slot"))
        else:
            keep.append(entry)
    live = {entry.location.segment for entry in keep}
    return Repairs(tuple(keep), tuple(remove), tuple(sorted(set(segments) - live)))
