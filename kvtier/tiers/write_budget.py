"""How many bytes a day the SSD may be written to, so that it lives; counted by the hour.

In any 24 hours no more than the budget is written. What is spent is saved before it is written,
some way ahead, so that a crash never makes the count too low.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WriteBudget", "spent_bytes"]

_HOURS: Final = 24
_HOUR_NS: Final = 3600 * 10**9
_VERSION: Final = 1
SHORT: Final = 0.25
"""The part of the day's budget below which only part of what is offered is written."""
LEASE: Final = 1 / 256
"""The part of the day's budget that is saved as spent ahead of its use."""
SAVED_BYTES_MAX: Final = 4096


class WriteBudget:
    """``bytes_per_day``, or no limit if it is None; thread-safe.

    ``saved`` is what an earlier one gave to ``save``; bytes that cannot be read count as nothing
    spent. A clock that goes backwards adds nothing to the budget.
    """

    def __init__(
        self,
        bytes_per_day: int | None,
        *,
        saved: bytes,
        save: Callable[[bytes], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._limit = bytes_per_day
        self._save = save
        self._now_ns = now_ns
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        # A clock that was far ahead once must not close the budget for good.
        last = now_ns() // _HOUR_NS + _HOURS
        self._spent = {hour: spent for hour, spent in _decode(saved).items() if hour <= last}
        self._leased = 0

    def left(self) -> int | None:
        """Return how many bytes may still be written now; None without a limit."""
        with self._lock:
            return None if self._limit is None else self._left(self._limit)

    def share(self) -> float:
        """Return the share of what is offered that the budget affords, from 0 to 1.

        1 until the budget is short; below that it falls with what is left, so that writes meet what
        the hours give back.
        """
        with self._lock:
            if self._limit is None:
                return 1.0
            short = SHORT * self._limit
            return min(self._left(self._limit) / short, 1.0) if short else 0.0

    def spend(self, nbytes: int) -> bool:
        """Take ``nbytes`` from the budget; False, and nothing taken, if they are not there.

        Raises ``OSError`` if what was spent cannot be saved.
        """
        with self._lock:
            if self._limit is None:
                return True
            if nbytes > self._left(self._limit):
                return False
            if nbytes > self._leased:
                lease = min(max(nbytes, int(LEASE * self._limit)), self._unleased(self._limit))
                hour = self._hour()
                self._spent[hour] = self._spent.get(hour, 0) + lease
                self._leased += lease
                self._save(_encode(self._spent))
            self._leased -= nbytes
            return True

    def close(self) -> None:
        """Save what was really spent. Raises ``OSError``."""
        with self._lock:
            if self._limit is not None and self._leased:
                hour = self._hour()
                # A lease taken in an earlier hour stays spent: that errs on the safe side.
                self._spent[hour] = max(self._spent.get(hour, 0) - self._leased, 0)
                self._leased = 0
                self._save(_encode(self._spent))

    def _left(self, limit: int) -> int:
        return self._unleased(limit) + self._leased

    def _unleased(self, limit: int) -> int:
        self._forget_old()
        return max(limit - sum(self._spent.values()), 0)

    def _hour(self) -> int:
        return max(self._now_ns() // _HOUR_NS, max(self._spent, default=0))

    def _forget_old(self) -> None:
        first = self._hour() - _HOURS
        self._spent = {hour: spent for hour, spent in self._spent.items() if hour >= first}


def spent_bytes(saved: bytes, now_ns: int) -> int:
    """Return what ``saved`` says was written in the last 24 hours; 0 if it cannot be read."""
    first = now_ns // _HOUR_NS - _HOURS
    return sum(spent for hour, spent in _decode(saved).items() if hour >= first)


def _encode(spent: dict[int, int]) -> bytes:
    packed: bytes = msgpack.packb([_VERSION, sorted(spent.items())])
    return packed


def _decode(saved: bytes) -> dict[int, int]:
    try:
        version, pairs = msgpack.unpackb(saved[:SAVED_BYTES_MAX], strict_map_key=True)
        spent = {int(hour): int(nbytes) for hour, nbytes in pairs[: _HOURS + 1]}
    except (ValueError, TypeError, msgpack.UnpackException):
        return {}
    return spent if version == _VERSION and all(n >= 0 for n in spent.values()) else {}
