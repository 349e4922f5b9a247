"""Policies that weigh what a loss would cost against how long ago a block was asked for."""

from __future__ import annotations

from array import array
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import repeat
from math import log2
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtier.policy import Values

__all__ = ["LEVELS_PER_OCTAVE", "PrefixClosed", "Priced"]

LEVELS_PER_OCTAVE: Final = 8
"""Values are rounded to a level; neighbours differ by a factor of 2 ** (1 / 8), or 9 %."""
LEVELS_KEPT: Final = 1 << 14
"""Values whose level is looked up rather than computed; those of a store are few."""
_VALUE_MIN: Final = 2.0**-8
_VALUE_MAX: Final = 2.0**24
_OFFSET: Final = 8 * LEVELS_PER_OCTAVE
_LEVELS: Final = 32 * LEVELS_PER_OCTAVE + 1
_WEIGHTS: Final = [2.0 ** ((level - _OFFSET) / LEVELS_PER_OCTAVE) for level in range(_LEVELS)]
_CLOSED_MIN: Final = _OFFSET - LEVELS_PER_OCTAVE
"""The level of half a first block's recomputation."""
_CLOSED_MAX: Final = _OFFSET + 2 * LEVELS_PER_OCTAVE
"""The level of four times that."""


@lru_cache(maxsize=LEVELS_KEPT)
def _level(value: float) -> int:
    bounded = min(max(value, _VALUE_MIN), _VALUE_MAX)
    return round(log2(bounded) * LEVELS_PER_OCTAVE) + _OFFSET


def _all_levels(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.intp]]:
    bounded = np.clip(values, _VALUE_MIN, _VALUE_MAX)
    levels: np.ndarray[Any, np.dtype[np.intp]] = (
        np.rint(np.log2(bounded) * LEVELS_PER_OCTAVE).astype(np.intp) + _OFFSET
    )
    return levels


class Priced:
    """GreedyDual (Young 1994; Cao and Irani 1997): least priority first.

    A row's priority is the clock at its last touch plus its value then; the clock is the priority
    of the last victim, so that what is not asked for any more ages. Values are rounded to levels as
    in CAMP (Ghandeharizadeh et al. 2014): within a level the least recent row is the least, so a
    ring for each level replaces a heap. 18 bytes a row; a victim costs a look at the levels in use.
    """

    contiguous = False

    def __init__(self, values: Values | None = None) -> None:
        self._values = values
        self._rings = Rings(_LEVELS)
        self._priority = array("d")
        self._level = array("H")
        self._in_use: set[int] = set()  # levels whose ring may hold a row
        self._clock = 0.0

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of each row, the last one being the most recent; unknown rows enter."""
        rows = list(rows)
        self._place(rows, self._levels_of(rows))

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Note a use of many rows at once, like ``touch``; distinct, and none of them is in."""
        if not rows.size:
            return
        levels = (
            np.full(len(rows), _OFFSET)
            if self._values is None
            else _all_levels(self._values.of_all(rows))
        )
        self._place_all(rows, levels)

    def forget(self, rows: Iterable[int]) -> None:
        """Take rows out; unknown ones are ignored."""
        self._rings.remove(rows)

    def evicted(self, rows: Iterable[int]) -> None:
        """Take victims out, and set the clock to the priority of the last."""
        gone = self._rings.remove(rows)
        highest = max(map(self._priority.__getitem__, gone), default=self._clock)
        self._clock = max(self._clock, highest)

    def victims(self) -> Iterator[int]:
        """Walk the rows, first to go first."""
        oldest, newer, priority = self._rings.oldest, self._rings.newer, self._priority
        firsts = [(oldest(level), level) for level in self._in_use]
        heads = [(priority[row], level, row) for row, level in firsts if row >= 0]
        self._in_use = {level for _, level, _ in heads}
        heapify(heads)
        while heads:
            _, level, row = heads[0]
            yield row
            following = newer(row)
            if following >= 0:
                heapreplace(heads, (priority[following], level, following))
            else:
                heappop(heads)

    def _levels_of(self, rows: Sequence[int]) -> list[int]:
        if self._values is None:
            return [_OFFSET] * len(rows)
        return list(map(_level, self._values.of(rows)))

    def _place(self, rows: Sequence[int], levels: Sequence[int]) -> None:
        """Make each row the newest of its level, at its priority from now."""
        self._rings.move(rows, levels)
        self._grow(max(rows, default=-1))
        self._in_use.update(levels)
        clock, priority, level_of = self._clock, self._priority, self._level
        for row, level in zip(rows, levels, strict=True):
            priority[row] = clock + _WEIGHTS[level]
            level_of[row] = level

    def _place_all(self, rows: np.ndarray[Any, Any], levels: np.ndarray[Any, Any]) -> None:
        self._rings.enter(rows, levels)
        self._in_use.update(np.unique(levels).tolist())
        self._grow(int(rows.max()))
        np.asarray(self._priority)[rows] = self._clock + np.array(_WEIGHTS)[levels]
        np.asarray(self._level)[rows] = levels

    def _grow(self, row: int) -> None:
        missing = row + 1 - len(self._level)
        if missing > 0:
            self._priority.extend(repeat(0.0, missing))
            self._level.extend(repeat(0, missing))


class PrefixClosed(Priced):
    """``Priced`` for callers that need contiguous prefixes: a block outlives all that follow it.

    A touch covers a whole prompt, tail to head. A row takes at least the priority of the row
    touched before it and keeps the one that it has if that is higher; of equal ones the tail goes
    first. So priorities never fall towards the head, along any chain of blocks.

    A dear tail keeps its whole chain, so values are bounded on both sides: no block outlives
    another by more than eight times. On public traces that is never worse than LRU; unbounded it is
    better on most and up to 17 % worse where prompts stop coming for good.
    """

    contiguous = True

    def _levels_of(self, rows: Sequence[int]) -> list[int]:
        levels = super()._levels_of(rows)
        return [min(max(level, _CLOSED_MIN), _CLOSED_MAX) for level in levels]

    def touch(self, rows: Iterable[int]) -> None:
        """Note a use of one prompt's rows, tail to head; unknown rows enter."""
        rows = list(rows)
        placed: list[int] = []
        at: list[int] = []
        clock = self._clock
        highest, its_level, stays = 0.0, 0, False
        for row, own in zip(rows, self._levels_of(rows), strict=True):
            level, least = own, clock + _WEIGHTS[own]
            if least <= highest:
                level, least = its_level, highest
            if row in self._rings:
                has = self._priority[row]
                # At the same priority it stays behind what stays, and goes behind what was moved,
                # but not to a lower level: rows that follow it may be there.
                if has > least or (has == least and stays):
                    highest, its_level, stays = has, self._level[row], True
                    continue
                if has == least:
                    level = max(level, self._level[row])
            placed.append(row)
            at.append(level)
            highest, its_level, stays = clock + _WEIGHTS[level], level, False
        self._place(placed, at)

    def enter(self, rows: np.ndarray[Any, Any]) -> None:
        """Enter many rows at once, each at the level of the most valuable one before it."""
        if rows.size and self._values is not None:
            bounded = np.clip(_all_levels(self._values.of_all(rows)), _CLOSED_MIN, _CLOSED_MAX)
            levels = np.maximum.accumulate(bounded)
            self._place_all(rows, levels)
        else:
            super().enter(rows)
