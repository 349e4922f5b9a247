"""How often each row's block was asked for, and which of it the index does not know yet."""

from __future__ import annotations

from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.history import USES_MAX, History
from kvtier.rows import append_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["USES_KEPT", "Uses"]

USES_KEPT: Final = 1 << 16
"""Blocks whose uses are remembered until they are taken; uses of others are not recorded."""


class Uses:
    """A column of uses, and of blocks on the SSD the uses since they were last taken.

    A block starts with one use, its put, and with what history remembers of an earlier life. The
    owner locks, and grows ``column`` by one element a row.
    """

    def __init__(self, history: History, kept: int = USES_KEPT) -> None:
        self.column = array("B")
        self._history = history
        self._kept = kept
        self._new: dict[int, int] = {}  # row -> uses that were not taken yet

    def begin(self, rows: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Start counting for rows that were given to blocks."""
        column, recall = self.column, self._history.recall
        for row, digest in zip(rows, hashes, strict=True):
            column[row] = min(1 + recall(digest), USES_MAX)

    def restore(self, hits: np.ndarray[Any, Any]) -> None:
        """Append the uses of a table of blocks, from the hits that the index counted."""
        append_all(self.column, np.minimum(hits.astype(np.uint64) + 1, USES_MAX))

    def end(self, rows: Sequence[int], hashes: Iterable[bytes]) -> None:
        """Remember the uses of blocks that have no copy any more."""
        column, note = self.column, self._history.note
        for row, digest in zip(rows, hashes, strict=True):
            note(digest, column[row])

    def add(self, rows: Sequence[int]) -> None:
        """Count one more use of each."""
        column = self.column
        for row in rows:
            if column[row] < USES_MAX:
                column[row] += 1

    def record(self, rows: Sequence[int]) -> None:
        """Keep one more use of each of these blocks on the SSD until it is taken."""
        new = self._new
        for row in rows:
            if row in new or len(new) < self._kept:
                new[row] = new.get(row, 0) + 1

    def forget(self, rows: Iterable[int]) -> None:
        """Drop what was kept of blocks that left the SSD."""
        for row in rows if self._new else ():
            self._new.pop(row, None)

    def take(self, limit: int) -> list[tuple[int, int]]:
        """Take out up to ``limit`` (row, uses)."""
        rows = list(islice(self._new, limit))
        return [(row, self._new.pop(row)) for row in rows]
