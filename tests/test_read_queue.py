from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.read_queue import RESTORE, Rank, ReadQueue, Urgency

MANY = 100


def hint(deadline: float = math.inf, priority: int = 0) -> Urgency:
    """Return how urgent a prefetch is."""
    return Urgency(Rank.PREFETCH, -priority, deadline)


def taken(queue: ReadQueue[Any, Any], count: int = 1, now: float = 0.0) -> list[Any]:
    """Take blocks of any rank."""
    return queue.take(now, count, Rank.PREFETCH).blocks


def test_restores_then_priority_then_deadline_then_who_came_first() -> None:
    """The order of reads, one at a time."""
    queue: ReadQueue[str, str] = ReadQueue()
    for block, urgency in {
        "no deadline": hint(),
        "late": hint(9.0),
        "soon": hint(1.0),
        "as soon, but came later": hint(1.0),
        "important": hint(priority=1),
        "unimportant": hint(0.5, priority=-1),
        "restored": RESTORE,
        "restored too": RESTORE,
    }.items():
        queue.want(block, "somebody", urgency)
    order = [taken(queue)[0] for _ in range(8)]
    assert order == [
        "restored", "restored too", "important", "soon", "as soon, but came later", "late",
        "no deadline", "unimportant",
    ]  # fmt: skip
    assert taken(queue) == []


def test_a_block_that_a_restore_waits_for_too_moves_up_and_back() -> None:
    """The most urgent waiter counts, as long as it waits; the block is there once."""
    queue: ReadQueue[str, str] = ReadQueue()
    queue.want("first", "a", hint(1.0))
    queue.want("second", "b", hint(2.0))
    queue.want("second", "restore", RESTORE)
    assert queue.first() is Rank.RESTORE
    assert queue.leave("second", "restore")
    assert not queue.restoring
    assert taken(queue, MANY) == ["first", "second"]
    assert queue.done("second") == ["b"]


def test_a_run_is_of_one_rank() -> None:
    """A restore's hop is not made longer by blocks of prefetches."""
    queue: ReadQueue[int, str] = ReadQueue()
    queue.want(0, "r", RESTORE)
    for block in (1, 2):
        queue.want(block, "p", hint())
    assert taken(queue, MANY) == [0]
    assert taken(queue, MANY) == [1, 2]


def test_none_below_the_lowest_rank_is_taken() -> None:
    """While only restores may read, prefetches wait."""
    queue: ReadQueue[int, str] = ReadQueue()
    queue.want(1, "p", hint())
    assert queue.take(0.0, MANY, Rank.RESTORE).blocks == []
    assert len(queue) == 1


def test_a_block_being_read_is_joined_and_not_left() -> None:
    """Whoever comes during the read gets its outcome; whoever leaves then is told that it began."""
    queue: ReadQueue[int, str] = ReadQueue()
    queue.want(1, "a", hint())
    assert taken(queue) == [1]
    queue.want(1, "b", RESTORE)
    assert queue.restoring
    assert not queue.leave(1, "a")
    assert taken(queue) == []
    assert queue.done(1) == ["a", "b"]
    assert not queue.restoring
    assert 1 not in queue


def test_only_a_read_that_began_ends() -> None:
    """Anything else is a mistake of the caller, and changes nothing."""
    queue: ReadQueue[int, str] = ReadQueue()
    queue.want(1, "a", hint())
    for block in (1, 2):
        with pytest.raises(ValueError, match="not being read"):
            queue.done(block)
    assert taken(queue) == [1]


class QueueModel(RuleBasedStateMachine):
    """Against brute force: a dictionary of waiters, sorted anew for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: ReadQueue[int, int] = ReadQueue()
        self.waiting: dict[int, dict[int, Urgency]] = {}
        self.reading: dict[int, dict[int, Urgency]] = {}
        self.came: dict[int, int] = {}
        self.count = 0

    def order(self) -> list[int]:
        """Return the blocks that wait, first to be read first."""
        return sorted(
            self.waiting, key=lambda block: (min(self.waiting[block].values()), self.came[block])
        )

    @rule(
        block=st.integers(0, 7), waiter=st.integers(0, 3), restore=st.booleans(),
        priority=st.integers(-1, 1), deadline=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    )  # fmt: skip
    def want(
        self, *, block: int, waiter: int, restore: bool, priority: int, deadline: float
    ) -> None:
        """Wait for a block, or change how urgently."""
        urgency = RESTORE if restore else hint(deadline, priority)
        self.queue.want(block, waiter, urgency)
        if block in self.reading:
            self.reading[block][waiter] = urgency
            return
        if block not in self.waiting:
            self.count += 1
            self.came[block] = self.count
        self.waiting.setdefault(block, {})[waiter] = urgency

    @rule(block=st.integers(0, 7), waiter=st.integers(0, 3))
    def leave(self, block: int, waiter: int) -> None:
        """Leave; the block stays for the others."""
        there = waiter in self.waiting.get(block, {})
        assert self.queue.leave(block, waiter) == there
        if there:
            del self.waiting[block][waiter]
            if not self.waiting[block]:
                del self.waiting[block]

    @rule(
        now=st.sampled_from([0.0, 1.5, 2.5]), count=st.integers(1, 4),
        lowest=st.sampled_from(list(Rank)),
    )  # fmt: skip
    def take(self, now: float, count: int, lowest: Rank) -> None:
        """Take the start of the order, of one rank, with nobody in it who is late."""
        order = self.order()
        first = min(self.waiting[order[0]].values()).rank if order else None
        blocks: list[int] = []
        late: list[tuple[int, int]] = []
        while len(blocks) < count and (order := self.order()):
            block = order[0]
            urgency = min(self.waiting[block].values())
            if urgency.rank != first or urgency.rank > lowest:
                break
            gone = [w for w, theirs in self.waiting[block].items() if theirs.deadline < now]
            late += [(block, waiter) for waiter in gone]
            left = {w: u for w, u in self.waiting[block].items() if w not in gone}
            if gone and left:
                self.waiting[block] = left
                continue
            del self.waiting[block]
            if left:
                self.reading[block] = left
                blocks.append(block)
        found = self.queue.take(now, count, lowest)
        assert found.blocks == blocks
        assert sorted(found.late) == sorted(late)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        """End a read, which answers everybody who waited, once."""
        block = data.draw(st.sampled_from(sorted(self.reading)))
        assert sorted(self.queue.done(block)) == sorted(self.reading.pop(block))

    @precondition(lambda self: self.waiting)
    @rule()
    def drop_last(self) -> None:
        """Drop the end of the order to make room."""
        block = self.order()[-1]
        assert self.queue.last() == min(self.waiting[block].values())
        dropped = self.queue.drop_last()
        assert sorted(dropped) == sorted((block, waiter) for waiter in self.waiting.pop(block))

    @invariant()
    def agrees(self) -> None:
        """Compare counts and ranks with the model's."""
        order = self.order()
        ranks = [min(self.waiting[block].values()).rank for block in order]
        assert len(self.queue) == len(order)
        assert self.queue.reading == len(self.reading)
        assert self.queue.first() == (ranks[0] if ranks else None)
        assert [self.queue.count(rank) for rank in Rank] == [ranks.count(rank) for rank in Rank]
        for urgency in (RESTORE, hint(2.0), hint(priority=1)):
            behind = [block for block in order if min(self.waiting[block].values()) > urgency]
            assert self.queue.behind(urgency) == behind[::-1]
        everybody = {**self.waiting, **self.reading}
        assert all(sorted(self.queue.waiters(b)) == sorted(w) for b, w in everybody.items())
        restored = any(RESTORE in waiters.values() for waiters in everybody.values())
        assert self.queue.restoring == restored
        assert sorted(self.queue.everybody()) == sorted(
            (block, waiter) for block, waiters in everybody.items() for waiter in waiters
        )


TestQueueModel = QueueModel.TestCase
