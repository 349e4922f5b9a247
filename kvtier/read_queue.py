"""Which block is read next: a pure order over blocks and those who wait for them.

A block is in it once, however many wait, and stands where the most urgent of them puts it: restores
before prefetches, among prefetches the higher priority, then the earlier deadline, then who came
first. Until its read begins it may move up, move back, or leave.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["RESTORE", "Rank", "ReadQueue", "Taken", "Urgency"]

B = TypeVar("B", bound="Hashable")
W = TypeVar("W", bound="Hashable")


class Rank(IntEnum):
    """For whose sake a block is read; the lower one comes first."""

    RESTORE = 0
    PREFETCH = 1


class Urgency(NamedTuple):
    """How soon somebody wants a block; the smaller, the sooner. ``deadline`` is an instant."""

    rank: Rank
    less_important: int = 0
    deadline: float = math.inf


RESTORE: Final = Urgency(Rank.RESTORE)


class _Place(NamedTuple):
    urgency: Urgency
    number: int


_BEFORE_PREFETCHES: Final = _Place(Urgency(Rank.RESTORE, less_important=1), 0)


@dataclass(frozen=True, slots=True)
class Taken(Generic[B, W]):
    """Blocks to be read now, and who was waiting for a block whose deadline passed before that."""

    blocks: list[B]
    late: list[tuple[B, W]]


class ReadQueue(Generic[B, W]):
    """Blocks that are to be read or are being read, each with its waiters.

    No clock, no I/O; its owner locks. A block's read begins with ``take`` and ends with ``done``.
    """

    def __init__(self) -> None:
        self._waiters: dict[B, dict[W, Urgency]] = {}
        self._places: dict[B, _Place] = {}
        self._order: list[tuple[_Place, B]] = []
        self._numbers = 0
        self._restored: set[B] = set()

    def __len__(self) -> int:
        """Return the number of blocks whose read has not begun."""
        return len(self._order)

    def __contains__(self, block: B) -> bool:
        return block in self._waiters

    @property
    def reading(self) -> int:
        """The number of blocks whose read has begun and not ended."""
        return len(self._waiters) - len(self._order)

    @property
    def restoring(self) -> bool:
        """Whether a restore waits for any block, read or not."""
        return bool(self._restored)

    def want(self, block: B, waiter: W, urgency: Urgency) -> None:
        """Let somebody wait for a block, or change how urgently; a read under way is joined."""
        is_new = block not in self._waiters
        self._waiters.setdefault(block, {})[waiter] = urgency
        if is_new:
            self._numbers += 1
            self._enter(block, _Place(urgency, self._numbers))
        self._update(block)

    def leave(self, block: B, waiter: W) -> bool:
        """Wait no longer; False, and nothing changes, once the block is being read or was.

        A block that nobody waits for is not read.
        """
        if block not in self._places or waiter not in self._waiters[block]:
            return False
        del self._waiters[block][waiter]
        self._update(block)
        return True

    def first(self) -> Rank | None:
        """Return the rank of the block that would be taken next; None if the queue is empty."""
        return self._order[0][0].urgency.rank if self._order else None

    def count(self, rank: Rank) -> int:
        """Return the number of blocks of a rank whose read has not begun."""
        restores = bisect_left(self._order, (_BEFORE_PREFETCHES,))
        return restores if rank is Rank.RESTORE else len(self._order) - restores

    def take(self, now: float, count: int, lowest: Rank) -> Taken[B, W]:
        """Begin reading up to ``count`` blocks of one rank, ``lowest`` or above."""
        blocks: list[B] = []
        late: list[tuple[B, W]] = []
        rank = self.first()
        while self._order and len(blocks) < count:
            (urgency, _), block = self._order[0]
            if urgency.rank != rank or urgency.rank > lowest:
                break
            waiters = self._waiters[block]
            gone = [each for each, theirs in waiters.items() if theirs.deadline < now]
            for waiter in gone:
                del waiters[waiter]
                late.append((block, waiter))
            if gone:
                self._update(block)
            else:
                self._exit(block)
                blocks.append(block)
        return Taken(blocks, late)

    def done(self, block: B) -> list[W]:
        """End the read of a block that was taken; returns who waited for it, in order."""
        if block not in self._waiters or block in self._places:
            raise ValueError(f"{block} is not being read")
        self._restored.discard(block)
        return list(self._waiters.pop(block))

    def last(self) -> Urgency | None:
        """Return how urgent the last block in the queue is; None without one."""
        return self._order[-1][0].urgency if self._order else None

    def drop_last(self) -> list[tuple[B, W]]:
        """Take out the block that would be read last; returns it with each who waited for it."""
        _, block = self._order[-1]
        self._exit(block)
        self._restored.discard(block)
        return [(block, waiter) for waiter in self._waiters.pop(block)]

    def behind(self, urgency: Urgency) -> list[B]:
        """Return the blocks in the queue that are less urgent than that, the last one first."""
        first = bisect_right(self._order, urgency, key=lambda entry: entry[0].urgency)
        return [block for _, block in reversed(self._order[first:])]

    def waiters(self, block: B) -> list[W]:
        """Return who waits for a block, in the queue or being read."""
        return list(self._waiters.get(block, ()))

    def everybody(self) -> Iterator[tuple[B, W]]:
        """Walk all waiters, those of blocks being read too."""
        for block, waiters in self._waiters.items():
            for waiter in waiters:
                yield block, waiter

    # -- inside

    def _update(self, block: B) -> None:
        """Make a block's place, and whether it is restored, agree with its waiters."""
        waiters = self._waiters[block]
        if not waiters:  # only of a block in the queue: one being read keeps its waiters
            self._exit(block)
            del self._waiters[block]
            self._restored.discard(block)
            return
        urgency = min(waiters.values())
        if urgency.rank is Rank.RESTORE:
            self._restored.add(block)
        else:
            self._restored.discard(block)
        place = self._places.get(block)
        if place is not None and place.urgency != urgency:
            self._exit(block)
            self._enter(block, _Place(urgency, place.number))

    def _enter(self, block: B, place: _Place) -> None:
        self._places[block] = place
        insort(self._order, (place, block))  # numbers differ: blocks are never compared

    def _exit(self, block: B) -> None:
        place = self._places.pop(block)
        del self._order[bisect_left(self._order, (place,))]
