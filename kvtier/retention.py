"""How long blocks are wanted, and which go before others whatever the policy says."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.rows import append_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvtier.policy import Policy

__all__ = ["EXPIRED", "NEVER_NS", "PRIORITIES", "Deadlines", "Ranks", "Retention"]

PRIORITIES: Final = range(-8, 8)
"""What a put may ask for; each one in use has an order of its own."""
EXPIRED: Final = PRIORITIES.start - 1
"""The priority of what has expired: it goes before all else."""
NEVER_NS: Final = 0
TTL_S_MAX: Final = 100 * 365 * 86400


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the blocks of a put are wanted.

    Blocks of a lower ``priority`` (-8 to 7) are evicted first, whatever the policy says; after
    ``ttl_s`` seconds (None: never) a block is a miss, and the first to go. ``ValueError`` names the
    field.
    """

    priority: int = 0
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int or self.priority not in PRIORITIES:
            raise ValueError(
                f"priority: {self.priority!r} is not an int in "
                f"[{PRIORITIES.start}, {PRIORITIES.stop - 1}]"
            )
        ttl = self.ttl_s
        if ttl is not None and not (
            isinstance(ttl, (int, float)) and math.isfinite(ttl) and 0 < ttl <= TTL_S_MAX
        ):
            raise ValueError(f"ttl_s: {ttl!r} is not a number of seconds in (0, {TTL_S_MAX}]")

    def expiry_ns(self, now_ns: int) -> int:
        """Return when a block stored now expires, in ns since 1970; 0 for never."""
        return NEVER_NS if self.ttl_s is None else now_ns + max(int(self.ttl_s * 1e9), 1)


class Deadlines:
    """When each row expires: a column, and a heap of those that do. Costs nothing without any."""

    def __init__(self) -> None:
        self.column = array("q")  # ns since 1970, 0 for never; one element a row
        self._heap: list[tuple[int, int]] = []  # (when, row); stale where the column differs
        self._live = 0

    def set(self, row: int, expiry_ns: int) -> None:
        """Say when a row expires; 0 for never."""
        before = self.column[row]
        if before == expiry_ns:
            return
        self.column[row] = expiry_ns
        self._live += (expiry_ns != 0) - (before != 0)
        if expiry_ns:
            heappush(self._heap, (expiry_ns, row))
        if len(self._heap) > 2 * self._live + 64:
            self._rebuild()

    def restore(self, expiry_ns: np.ndarray[Any, Any]) -> None:
        """Append the expiries of a table of blocks."""
        append_all(self.column, expiry_ns)
        self._rebuild()

    def _rebuild(self) -> None:
        """Make the heap anew from the column, without what is stale."""
        column = np.asarray(self.column)
        rows = np.flatnonzero(column)
        self._heap = list(zip(column[rows].tolist(), rows.tolist(), strict=True))
        heapify(self._heap)
        self._live = len(self._heap)

    def due(self, now_ns: Callable[[], int]) -> list[int]:
        """Take out the rows that have expired, each once; asks for the time only if some may."""
        rows: list[int] = []
        if self._heap:
            now = now_ns()
            while self._heap and self._heap[0][0] <= now:
                when, row = heappop(self._heap)
                if self.column[row] == when:
                    self.column[row] = NEVER_NS
                    self._live -= 1
                    rows.append(row)
        return rows


class Ranks:
    """One order for each priority in use, the lowest first.

    ``priorities`` is the catalog's column; a row must be taken out before its priority changes. An
    order is made when its priority is first used, so without priorities there is one.
    """

    def __init__(self, make: Callable[[], Policy], priorities: array[int]) -> None:
        self._make = make
        self._priorities = priorities
        self._orders: dict[int, Policy] = {0: make()}

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""
        for priority, some in groupby(rows, self._priorities.__getitem__):
            self._of(priority).touch(some)

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Note a use of many rows at once, like ``touch``; distinct, and none of them is in."""
        mine = np.asarray(self._priorities)[rows]
        for priority in np.unique(mine).tolist():
            self._of(priority).enter(rows[mine == priority])

    def forget(self, rows: Iterable[int]) -> None:
        """Take rows out; unknown ones are ignored."""
        for priority, some in groupby(rows, self._priorities.__getitem__):
            self._of(priority).forget(some)

    def evicted(self, rows: Iterable[int]) -> None:
        """Take victims out, and let their orders learn from it."""
        for priority, some in groupby(rows, self._priorities.__getitem__):
            self._of(priority).evicted(some)

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first."""
        if len(self._orders) == 1:
            return self._orders[0].victims()
        return chain.from_iterable(self._orders[each].victims() for each in sorted(self._orders))

    def _of(self, priority: int) -> Policy:
        order = self._orders.get(priority)
        if order is None:
            order = self._orders[priority] = self._make()
        return order
