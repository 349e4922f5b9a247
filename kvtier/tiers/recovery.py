"""What to do with what was found at open: a pure function from (entries, segments) to repairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.tiers.entries import ENTRY_VERSION, id_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.tiers.base import BlockId
    from kvtier.tiers.entries import Entries
    from kvtier.tiers.segment import SegmentHeader

__all__ = ["FoundSegment", "Repairs", "plan_repairs"]


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file as found.

    ``slots_written`` is how many slots its length reaches into, ``holes`` those of them that occupy
    no disk.
    """

    header: SegmentHeader
    slots_written: int
    holes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Repairs:
    """What to change so that index and segments agree.

    ``keep`` is the index's content from now on; ``remove`` are entries to take out of it, each with
    the reason; ``unlink`` are segments that hold nothing.
    """

    keep: Entries
    remove: tuple[tuple[BlockId, str], ...]
    unlink: tuple[int, ...]


def plan_repairs(entries: Entries, segments: Mapping[int, FoundSegment]) -> Repairs:
    """Decide what is kept. Whatever is in doubt is a miss: it is never a reason not to open."""
    names, which = np.unique(entries["segment"], return_inverse=True)
    found = [segments.get(int(name)) for name in names]
    exists = np.array([one is not None for one in found], dtype=bool)[which]
    size = np.array([one.header.slot_bytes if one else 0 for one in found], dtype=np.uint64)
    written = np.array([one.slots_written if one else 0 for one in found], dtype=np.uint64)
    slot = entries["slot"].astype(np.uint64)
    # A claim is one number: the segment's place in ``names`` above the slot.
    claim = (which.astype(np.uint64) << np.uint64(32)) | slot
    _, claimed, claims = np.unique(claim, return_inverse=True, return_counts=True)
    wrong = (
        (entries["version"] != ENTRY_VERSION, "its entry is of another version"),
        (~exists, "its segment is gone"),
        (entries["slot_bytes"] != size[which], "its segment has another slot size"),
        (slot >= written[which], "its segment ends before it"),
        (claims[claimed] > 1, "two entries claim its slot"),
    )
    good = np.ones(len(entries), dtype=bool)
    reasons: dict[int, str] = {}
    for failed, reason in wrong:
        for row in np.flatnonzero(failed & good):
            reasons[int(row)] = reason
        good &= ~failed
    keep = entries if good.all() else entries[good]
    held = set(np.unique(keep["segment"]).tolist())
    return Repairs(
        keep,
        tuple((id_at(entries, row), reason) for row, reason in sorted(reasons.items())),
        tuple(sorted(set(segments) - held)),
    )
