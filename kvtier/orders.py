"""Which copies go first in each tier: one order a tier and priority, and what has expired."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.copies import BIT, SHOWN
from kvtier.plan import Tier
from kvtier.prices import HostValues, SsdValues
from kvtier.retention import EXPIRED, Deadlines, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.policy import MakePolicy
    from kvtier.prices import Prices

__all__ = ["Orders"]

_SSD_BIT: Final = BIT[Tier.SSD]
_BELOW_DEVICE: Final = BIT[Tier.HOST] | BIT[Tier.SSD]


class Orders:
    """The orders of all tiers; its owner locks, and grows ``columns``.

    An order has the READY copies of its tier, and those that a put has announced.
    """

    def __init__(
        self,
        policy: MakePolicy,
        prices: Prices,
        *,
        uses: array[int],
        positions: array[int],
        slot_bytes: array[int],
    ) -> None:
        self._contiguous = policy.contiguous
        self.has = array("B")  # the sum of the bits of the tiers whose order has a row
        self._priority = array("b")
        self._deadlines = Deadlines()
        self._retained = False  # no row ever had a priority or an expiry
        self.columns = (self.has, self._priority, self._deadlines.column)
        self._values: dict[Tier, HostValues | SsdValues] = {
            Tier.DEVICE: HostValues(uses, positions, self.has, _BELOW_DEVICE, prices),
            Tier.HOST: HostValues(uses, positions, self.has, _SSD_BIT, prices),
            Tier.SSD: SsdValues(uses, positions, slot_bytes, prices),
        }
        self._ranks = {
            tier: Ranks(partial(policy, values), self._priority)
            for tier, values in self._values.items()
        }

    def reprice(self, prices: Prices) -> None:
        """Use other prices from now on; what is in order keeps its place until it is touched."""
        for values in self._values.values():
            values.reprice(prices)

    def values(self, rows: Sequence[int]) -> list[float]:
        """Return what the loss of each row's last copy would cost."""
        return self._values[Tier.SSD].of(rows)

    # -- order

    def restore(self, priorities: np.ndarray[Any, Any], expiry_ns: np.ndarray[Any, Any]) -> None:
        """Append the retention of a table of blocks."""
        self._priority.frombytes(priorities.astype(np.int8).tobytes())
        self._deadlines.restore(expiry_ns)
        self._retained = bool(priorities.any() or expiry_ns.any())

    def enter(self, rows: np.ndarray[Any, Any], tier: Tier) -> None:
        """Enter many rows at once, the first to go first; none of them is in."""
        np.asarray(self.has)[rows] |= BIT[tier]
        self._ranks[tier].enter(rows)

    def announce(self, rows: Iterable[int], tiers: Iterable[Tier]) -> None:
        """Let rows be ordered with the others of the next ``touch``."""
        has, bits = self.has, sum(BIT[tier] for tier in tiers)
        for row in rows:
            has[row] |= bits

    def touch(self, rows: Sequence[int], tier: Tier) -> None:
        """Order those of one prompt's rows, tail to head, that are in."""
        has, bit = self.has, BIT[tier]
        if self._contiguous and self._retained:
            self._lift(rows)
        self._ranks[tier].touch([row for row in rows if has[row] & bit])

    def missing(self, rows: Iterable[int], tier: Tier) -> list[int]:
        """Return those of the rows that are not in the tier's order."""
        has, bit = self.has, BIT[tier]
        return [row for row in rows if not has[row] & bit]

    def victims(self, tier: Tier) -> Iterator[int]:
        """Walk a tier's rows, first to go first."""
        return self._ranks[tier].victims()

    def forget(self, rows: Iterable[int], tier: Tier) -> None:
        """Take rows out that left otherwise than as victims."""
        self._ranks[tier].forget(self._take(rows, tier))

    def evicted(self, rows: Iterable[int], tier: Tier) -> None:
        """Take victims out, from which a policy may learn what room is worth."""
        self._ranks[tier].evicted(self._take(rows, tier))

    def _take(self, rows: Iterable[int], tier: Tier) -> list[int]:
        has, bit = self.has, BIT[tier]
        inside = [row for row in rows if has[row] & bit]
        for row in inside:
            has[row] ^= bit
        return inside

    # -- retention

    def describe(self, rows: Iterable[int], priority: int, expiry_ns: int) -> None:
        """Set the retention of rows that are in no order."""
        self._retained = True
        for row in rows:
            self._priority[row] = priority
            self._deadlines.set(row, expiry_ns)

    def clear(self, rows: Sequence[int]) -> None:
        """Let go of rows that hold no block any more."""
        has = self.has
        for row in [row for row in rows if has[row]]:
            for tier in SHOWN[has[row]]:
                self.forget((row,), tier)
        if self._retained:
            self.describe(rows, 0, 0)

    def priority(self, row: int) -> int:
        """Return a row's priority."""
        return self._priority[row]

    def retain(self, row: int, priority: int, expiry_ns: int) -> None:
        """Raise a priority and put off an expiry (0: for good), where that is more."""
        before, expired = self._deadlines.column[row], self.has_expired(row)
        if priority > self._priority[row]:
            self._retained = True
            self._rank(row, priority)
        if expired or (before and (not expiry_ns or expiry_ns > before)):
            self._deadlines.set(row, expiry_ns)

    def retention(self, row: int) -> tuple[int, int]:
        """Return a row's priority and expiry."""
        return self._priority[row], self._deadlines.column[row]

    def has_expired(self, row: int) -> bool:
        """Return whether a row was taken for expired by ``expire``."""
        return self._priority[row] == EXPIRED

    def expire(self, now_ns: Callable[[], int]) -> list[int]:
        """Let rows go first that have expired since the last call; returns them."""
        rows = self._deadlines.due(now_ns)
        for row in rows:
            self._rank(row, EXPIRED)
        return rows

    def _lift(self, rows: Iterable[int]) -> None:
        """Give each of a prompt's rows the highest priority of those after it; tail to head."""
        highest = EXPIRED
        for row in rows:
            highest = max(highest, self._priority[row])
            if EXPIRED < self._priority[row] < highest:
                self._rank(row, highest)

    def _rank(self, row: int, priority: int) -> None:
        tiers = SHOWN[self.has[row]]
        for tier in tiers:
            self._ranks[tier].forget([row])
        self._priority[row] = priority
        for tier in tiers:
            self._ranks[tier].touch([row])
