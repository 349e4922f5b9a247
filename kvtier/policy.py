"""Which copies go first when a tier is full: order only, no bytes, no clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Lru", "Policy"]


class Policy(Protocol):
    """An order over the catalog rows of one tier. Deterministic; its owner locks."""

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""

    def forget(self, row: int) -> None:
        """Take a row out; unknown rows are ignored."""

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first. The order must not change while walking."""


class Lru:
    """Least recently used first. Touch a prompt tail to head, so that its head survives longest."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""
        for row in rows:
            self._order[row] = None
            self._order.move_to_end(row)

    def forget(self, row: int) -> None:
        """Take a row out; unknown rows are ignored."""
        self._order.pop(row, None)

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first."""
        return iter(self._order)
