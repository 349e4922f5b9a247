"""An index in memory whose commits are durable when they return, or end in doubt on demand."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from crash.disk import Points

from kvtier.errors import FormatError
from kvtier.tiers.entries import ENTRY, KEY_BYTES, Entries, table
from kvtier.tiers.index import REBUILD_COMMIT_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.base import BlockId
    from kvtier.tiers.index import Use

EMPTY_BYTES = 32 << 10
"""What the index occupies with nothing in it."""


class CrashIndex:
    """An index; ``stored`` is what is durable. Each entry takes ``entry_bytes`` of disk for good.

    ``lost`` makes it unreadable until ``reset``; ``broken`` lets it be read, but every commit meets
    damage and fails, until then. ``doubt`` lets the next commit fail, and says
    whether it happened nevertheless; the index is then unhealthy until ``reopen``.
    """

    def __init__(
        self, points: Points, stored: dict[bytes, bytes] | None = None, *, entry_bytes: int = 0
    ) -> None:
        self.points = points
        self.entry_bytes = entry_bytes
        self.stored = {} if stored is None else stored
        self.lost = False
        self.broken = False
        self.unfinished = False
        self.doubt: bool | None = None
        self.closed = False
        self.failures = 0
        self._healthy = True
        self._most = len(self.stored)

    def entries(self) -> Entries:
        """Return the whole index."""
        if self.lost or self.unfinished or not self._healthy:
            raise FormatError("the index cannot be read")
        return table(self.stored[key] for key in sorted(self.stored))

    def commit(
        self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use] = ()
    ) -> None:
        """Apply removals, additions and uses in one durable transaction."""
        if self.lost or self.closed or not self._healthy:
            self.failures += 1
            raise OSError(errno.EIO, "the index is not usable")
        if self.broken:
            self.failures += 1
            self._healthy = False
            raise OSError(errno.EIO, "the index is damaged")
        self.points.reach("commit begins")
        if self.doubt is None:
            self._apply(put, remove, uses)
            self.points.reach("commit done")
            return
        if self.doubt:
            self._apply(put, remove, uses)
        self.doubt, self._healthy = None, False
        self.failures += 1
        self.points.reach("commit in doubt")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _apply(self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use]) -> None:
        for block in remove:
            self.stored.pop(block.namespace + block.hash, None)
        for packed in put:
            if len(packed) != ENTRY.itemsize:
                raise ValueError(f"an entry of {len(packed)} bytes")
            self.stored[bytes(packed[:KEY_BYTES])] = bytes(packed)
        for use in uses:
            key = use.id.namespace + use.id.hash
            if key in self.stored:
                row = table(bytearray(self.stored[key]))
                row["hits"] += use.hits
                row["last_use_ns"] = use.last_use_ns
                self.stored[key] = row.tobytes()
        self._most = max(self._most, len(self.stored))

    def rebuild(self, entries: Sequence[bytes]) -> None:
        """Replace everything, in several commits; cut short, the index is unreadable."""
        self.unfinished = True
        self.points.reach("rebuild begins")
        self.reset()
        for start in range(0, len(entries), REBUILD_COMMIT_ENTRIES):
            self.commit(entries[start : start + REBUILD_COMMIT_ENTRIES], ())
        self.unfinished = False
        self.points.reach("rebuild done")

    def reset(self) -> None:
        """Start over empty."""
        self.points.reach("reset begins")
        self.stored.clear()
        self.lost, self.broken, self._healthy, self._most = False, False, True, 0
        self.points.reach("reset done")

    def reopen(self) -> None:
        """Read again what is durable."""
        self._healthy = True

    def healthy(self) -> bool:
        """Whether commits can succeed."""
        return self._healthy and not self.lost

    def disk_bytes(self) -> int:
        """Return what the index occupies: it grows with its entries and never shrinks."""
        return EMPTY_BYTES + self.entry_bytes * self._most

    def survive(self, *, lost: bool) -> CrashIndex:
        """Return the index as it is found after a crash."""
        survivor = CrashIndex(Points(), dict(self.stored), entry_bytes=self.entry_bytes)
        survivor.lost = lost
        survivor.unfinished = self.unfinished
        return survivor

    def write_bytes(self) -> int:
        """Return what was written: not counted here."""
        return 0

    def close(self) -> None:
        """Close the index."""
        self.closed = True
