"""Which copies go first when a tier is full: order only, no bytes, no clock."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Lru", "Policy"]

_OUT: Final = -1
"""The neighbour of a row that is not in the order."""


class Policy(Protocol):
    """An order over the catalog rows of one tier. Deterministic; its owner locks."""

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Note a use of many rows at once, like ``touch``; distinct, and none of them is in."""

    def forget(self, row: int) -> None:
        """Take a row out; unknown rows are ignored."""

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first. The order must not change while walking."""


class Lru:
    """Least recently used first. Touch a prompt tail to head, so that its head survives longest.

    A ring of neighbours in two columns, 8 bytes a row. Row r is place r + 1 of the ring; place 0 is
    both ends: the oldest row comes after it and the newest before it.
    """

    def __init__(self) -> None:
        self._after = array("i", [0])
        self._before = array("i", [0])

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""
        after, before = self._after, self._before
        for row in rows:
            place = row + 1
            if place >= len(before):
                self._grow(place)
            if before[place] != _OUT:
                self._unlink(place)
            newest = before[0]
            after[newest] = before[0] = place
            before[place], after[place] = newest, 0

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Note a use of many rows at once, like ``touch``; distinct, and none of them is in."""
        if not rows.size:
            return
        self._grow(int(rows.max()) + 1)
        if (np.asarray(self._before)[rows + 1] != _OUT).any():
            raise ValueError("enter: a row is in the order already; touch it instead")
        # Views live only here: an array that is looked into cannot grow.
        after, before = np.asarray(self._after), np.asarray(self._before)
        chain = np.concatenate([before[:1], rows + 1, [0]])
        after[chain[:-1]] = chain[1:]
        before[chain[1:]] = chain[:-1]

    def forget(self, row: int) -> None:
        """Take a row out; unknown rows are ignored."""
        place = row + 1
        if place < len(self._before) and self._before[place] != _OUT:
            self._unlink(place)
            self._before[place] = _OUT

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first."""
        place = self._after[0]
        while place:
            yield place - 1
            place = self._after[place]

    def _unlink(self, place: int) -> None:
        older, newer = self._before[place], self._after[place]
        self._after[older] = newer
        self._before[newer] = older

    def _grow(self, place: int) -> None:
        out = array("i", [_OUT]) * (place + 1 - len(self._after))
        self._after.extend(out)
        self._before.extend(out)
