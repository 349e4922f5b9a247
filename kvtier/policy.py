"""Which copies go first when a tier is full: order only, no bytes, no clock."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

__all__ = ["Lru", "MakePolicy", "Policy", "Sieve", "Values"]


class Values(Protocol):
    """What a tier's copies are worth: uses times the price of their loss, dimensionless."""

    def of(self, rows: Sequence[int]) -> list[float]:
        """Return the value of each row's copy."""

    def of_all(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the same for many rows at once."""


class Policy(Protocol):
    """An order over the catalog rows of one tier. Deterministic; its owner locks.

    A touch is the use of one prompt, tail to head, and covers what is in of the whole prompt.
    """

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Note a use of many rows at once, like ``touch``; distinct, and none of them is in."""

    def forget(self, rows: Iterable[int]) -> None:
        """Take rows out; unknown ones are ignored."""

    def evicted(self, rows: Iterable[int]) -> None:
        """Take victims out: what the policy learns from, as it does not from ``forget``."""

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first. The order must not change while walking."""


class MakePolicy(Protocol):
    """How a policy is made, once for every tier and priority in use."""

    def __call__(self, values: Values | None = None) -> Policy:
        """Return an empty order over rows of these values."""


class Lru:
    """Least recently used first. A prompt is touched tail to head: its head survives longest."""

    def __init__(self, values: Values | None = None) -> None:
        del values  # recency is all that counts
        self._rings = Rings()

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""
        self._rings.move(list(rows), repeat(0))

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Note a use of many rows at once, like ``touch``; distinct, and none of them is in."""
        self._rings.enter(rows, 0)

    def forget(self, rows: Iterable[int]) -> None:
        """Take rows out; unknown ones are ignored."""
        self._rings.remove(rows)

    evicted = forget

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first."""
        return self._rings.walk(0)


class Sieve:
    """SIEVE (Zhang et al., NSDI 2024): a hand goes from old to new and spares what was used again.

    One ring and one bit a row, no sizes to tune: a block that never comes back leaves at the hand's
    first pass. What enters is the newest and unused.
    """

    def __init__(self, values: Values | None = None) -> None:
        del values
        self._rings = Rings()
        self._used = bytearray()
        self._hand = -1  # the row that is looked at next; none: the oldest

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row; unknown ones enter as the newest, unused."""
        for row in rows:
            self._grow(row)
            if row in self._rings:
                self._used[row] = 1
            else:
                self._rings.move((row,), (0,))

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Enter many rows at once; distinct, and none of them is in."""
        self._rings.enter(rows, 0)
        self._grow(int(rows.max()) if rows.size else -1)

    def forget(self, rows: Iterable[int]) -> None:
        """Take rows out; unknown ones are ignored."""
        for row in rows:
            if row in self._rings:
                if row == self._hand:
                    self._hand = self._rings.newer(row)
                self._rings.remove((row,))
                self._used[row] = 0

    def evicted(self, rows: Iterable[int]) -> None:
        """Take victims out: the hand has passed what it spared, and goes on after them."""
        for row in rows:
            if row not in self._rings:
                continue
            for passed in self._round():
                if passed == row and not self._used[row]:
                    break
                self._used[passed] = 0  # a victim that was used means that the hand came round
            self._hand = self._rings.newer(row)
            self._rings.remove((row,))

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first: the unused from the hand on, then the used ones."""
        used = self._used
        yield from (row for row in self._round() if not used[row])
        yield from (row for row in self._round() if used[row])

    def _round(self) -> Iterator[int]:
        """Walk all rows once, from the hand on."""
        start = row = self._hand if self._hand >= 0 else self._rings.oldest(0)
        while row >= 0:
            yield row
            row = self._rings.newer(row)
        row = self._rings.oldest(0)
        while row not in (start, -1):
            yield row
            row = self._rings.newer(row)

    def _grow(self, row: int) -> None:
        if row >= len(self._used):
            self._used.extend(bytes(row + 1 - len(self._used)))
