"""Rows in order: rings of neighbours in two columns, so that moving a row costs no search."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Rings"]

_OUT: Final = -1
"""The neighbour of a row that is in no ring."""


class Rings:
    """Each row in at most one of ``count`` rings, from its oldest to its newest; 8 bytes a row.

    Ring k's place k is both its ends: its oldest row comes after it and its newest before it. Row r
    is place r + count.
    """

    def __init__(self, count: int = 1) -> None:
        self._ends = count
        self._after = array("i", range(count))
        self._before = array("i", range(count))

    def __contains__(self, row: int) -> bool:
        """Return whether a row is in a ring."""
        place = row + self._ends
        return place < len(self._before) and self._before[place] != _OUT

    def move(self, rows: Sequence[int], rings: Iterable[int]) -> None:
        """Make each row the newest of its ring, one after the other, wherever it was before."""
        if not rows:
            return
        ends = self._ends
        self._grow(max(rows) + ends)
        after, before = self._after, self._before
        for row, ring in zip(rows, rings, strict=False):
            place = row + ends
            older = before[place]
            if older != _OUT:
                newer = after[place]
                after[older] = newer
                before[newer] = older
            newest = before[ring]
            after[newest] = before[ring] = place
            before[place], after[place] = newest, ring

    def enter(self, rows: np.ndarray[Any, Any], rings: np.ndarray[Any, Any]) -> None:
        """Make many rows the newest of their rings, like ``move``; distinct, and in no ring yet.

        Raises ``ValueError`` and changes nothing if one of them is in a ring.
        """
        if not rows.size:
            return
        self._grow(int(rows.max()) + self._ends)
        grouped = np.argsort(rings.astype(np.uint16), kind="stable")  # few rings: a radix sort
        places, rings = rows[grouped] + self._ends, rings[grouped]
        if (np.asarray(self._before)[places] != _OUT).any():
            raise ValueError("enter: a row is in the order already; touch it instead")
        # Views live only here: an array that is looked into cannot grow.
        after, before = np.asarray(self._after), np.asarray(self._before)
        for some in np.split(np.arange(len(rings)), np.flatnonzero(np.diff(rings)) + 1):
            ring = int(rings[some[0]])
            chain = np.concatenate([before[ring : ring + 1], places[some], [ring]])
            after[chain[:-1]] = chain[1:]
            before[chain[1:]] = chain[:-1]

    def remove(self, rows: Iterable[int]) -> list[int]:
        """Take rows out and return them; those that are in no ring are ignored."""
        removed: list[int] = []
        ends, after, before = self._ends, self._after, self._before
        end = len(before)
        for row in rows:
            place = row + ends
            if place < end and before[place] != _OUT:
                older, newer = before[place], after[place]
                after[older] = newer
                before[newer] = older
                before[place] = _OUT
                removed.append(row)
        return removed

    def oldest(self, ring: int) -> int:
        """Return the oldest row of a ring; negative if the ring is empty."""
        return self._after[ring] - self._ends

    def newer(self, row: int) -> int:
        """Return the row after this one in its ring; negative if it is the newest."""
        return self._after[row + self._ends] - self._ends

    def walk(self, ring: int) -> Iterator[int]:
        """Walk a ring from its oldest row. It must not change while walking."""
        row = self.oldest(ring)
        while row >= 0:
            yield row
            row = self.newer(row)

    def _grow(self, place: int) -> None:
        missing = place + 1 - len(self._after)
        if missing > 0:
            out = array("i", [_OUT]) * missing
            self._after.extend(out)
            self._before.extend(out)
