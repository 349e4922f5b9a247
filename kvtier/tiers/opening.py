"""Opening the SSD tier: make index, segments and limit agree, and never wipe in silence."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import Entries, id_at, location_at, table
from kvtier.tiers.index import REBUILD_COMMIT_ENTRIES
from kvtier.tiers.recovery import FoundSegment, plan_repairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtier.tiers.index import Index
    from kvtier.tiers.record_io import RecordIo
    from kvtier.tiers.slabs import Slabs

__all__ = ["reclaim", "recover"]

log = logging.getLogger(__name__)

_REFUSED: Final = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
)
"""Errors that say nothing about the index: making it anew would meet them too."""
RECLAIM_SLOTS: Final = 64
"""Slots whose disk is given back before the room is looked at again."""


def recover(
    found: Mapping[int, FoundSegment],
    index: Index,
    slabs: Slabs,
    io: RecordIo,
    scan: Callable[[Iterable[Location]], list[bytes]],
) -> Entries:
    """Bring index, segments and books into agreement; returns the entries of what is there.

    An index that cannot be read, or is empty beside segments, is rebuilt from the headers.
    """
    entries = _read(index)
    if entries is None or (found and not len(entries)):
        rows = scan(
            Location(segment, slot, slab.header.slot_bytes)
            for segment, slab in found.items()
            for slot in range(slab.slots_written)
            if slot not in slab.holes
        )
        index.rebuild(rows)
        entries = table(rows)
    repairs = plan_repairs(entries, found)
    for block, reason in repairs.remove:
        log.warning("block %s dropped: %s", block, reason)
    _remove(index, [block for block, _ in repairs.remove], repairs.keep)
    for segment in repairs.unlink:
        io.unlink(segment)
        slabs.forget(segment)
    slabs.settle(repairs.keep)
    return _shrink(repairs.keep, index, slabs, io)


def _read(index: Index) -> Entries | None:
    """Return the index's entries, or None if it must be rebuilt from the records' headers."""
    try:
        entries = index.entries()
    except FormatError as error:
        log.warning("%s; it is rebuilt from the records' headers", error)
        return None
    if _has_twins(entries):
        log.warning("the index names a block twice; it is rebuilt from the records' headers")
        return None
    return entries


def _has_twins(entries: Entries) -> bool:
    # Hashes are random: where their first 8 bytes differ, which is cheap to see, all of them do.
    first = np.sort(np.ascontiguousarray(entries["hash"]).view("<u8").reshape(-1, 4)[:, 0])
    if not (first[1:] == first[:-1]).any():
        return False
    return len({id_at(entries, row) for row in range(len(entries))}) < len(entries)


def _remove(index: Index, blocks: list[BlockId], keep: Entries) -> None:
    """Take blocks out of the index; one that does not let go of them is made anew with the rest."""
    try:
        for start in range(0, len(blocks), REBUILD_COMMIT_ENTRIES):
            index.commit((), blocks[start : start + REBUILD_COMMIT_ENTRIES])
    except OSError as error:
        if error.errno in _REFUSED:
            raise
        log.warning("the index is made anew: %s", error)
        index.rebuild([keep[row : row + 1].tobytes() for row in range(len(keep))])


def reclaim(
    slabs: Slabs, io: RecordIo, enough: Callable[[], bool], other_than: int | None = None
) -> None:
    """Give back the disk of slots that hold nothing until there is ``enough`` room, if possible.

    Whole segments first; parts of them only where the file system can. Slots of size
    ``other_than`` are left alone: they are reused in place.
    """
    if enough():
        return
    for segment in slabs.empty_segments(other_than):
        slabs.forget(segment)
        try:
            io.unlink(segment)
        except OSError as error:
            log.warning("segment %016x could not be removed: %s", segment, error)
        if enough():
            return
    while io.abilities.punch and not enough():
        taken = slabs.take_free(RECLAIM_SLOTS, other_than)
        if not taken:
            return
        for where in taken:
            try:
                hole = not enough() and io.destroy(where)
            except OSError as error:
                log.warning("a slot of segment %016x keeps its disk: %s", where.segment, error)
                hole = False
            slabs.give_back(where, hole=hole)
        # A punch that a power cut undoes would bring back what was given up, over the limit.
        for segment in {where.segment for where in taken}:
            with suppress(OSError):
                io.sync(segment)


def _shrink(entries: Entries, index: Index, slabs: Slabs, io: RecordIo) -> Entries:
    """Give up least recently used blocks until the tier fits its limit."""
    dropped = 0
    while True:
        reclaim(slabs, io, lambda: slabs.excess_bytes() == 0)
        excess = slabs.excess_bytes()
        if not excess or not len(entries):
            break
        used = np.maximum(entries["last_use_ns"], entries["created_ns"])
        if io.abilities.punch:
            order = np.argsort(used, kind="stable")
            freed = np.cumsum(entries["slot_bytes"][order])
            gone = order[: int(np.searchsorted(freed, excess)) + 1]
        else:
            gone = _oldest_segment(entries, used)
        left = np.delete(entries, gone)
        _remove(index, [id_at(entries, row) for row in gone], left)
        for row in gone:
            slabs.empty(id_at(entries, row), location_at(entries, row))
        entries = left
        dropped += len(gone)
    if dropped:
        log.warning("%d blocks given up to fit the SSD budget", dropped)
    return entries


def _oldest_segment(entries: Entries, used: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the rows of the segment whose last use is longest ago."""
    names, which = np.unique(entries["segment"], return_inverse=True)
    last = np.zeros(len(names), dtype=used.dtype)
    np.maximum.at(last, which, used)
    return np.flatnonzero(which == np.argmin(last))
