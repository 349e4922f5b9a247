from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policies import POLICY
from kvtier.priced import PrefixClosed, Priced

ROWS = range(8)


@dataclass
class Fixed:
    """Values that a test sets."""

    values: dict[int, float] = field(default_factory=dict)

    def of(self, rows: Any) -> list[float]:
        """Return the value of each row."""
        return [self.values.get(row, 1.0) for row in rows]

    def of_all(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the same as an array."""
        return np.array(self.of(rows.tolist()))


class Naive:
    """GreedyDual over a dict that is sorted whenever it is asked."""

    def __init__(self, values: Fixed) -> None:
        self.values, self.clock, self.touches = values, 0.0, 0
        self.rows: dict[int, tuple[float, int, int]] = {}

    def touch(self, rows: list[int]) -> None:
        """Give each row the clock plus its value, rounded to an eighth of an octave."""
        for row in rows:
            step = round(8 * math.log2(self.values.of([row])[0]))
            self.touches += 1
            self.rows[row] = (self.clock + 2.0 ** (step / 8), step, self.touches)

    def victims(self) -> list[int]:
        """Return the rows by priority, then by recency."""
        return sorted(self.rows, key=lambda row: self.rows[row])

    def evicted(self, rows: list[int]) -> None:
        """Take rows out and set the clock."""
        for row in rows:
            self.clock = max(self.clock, self.rows.pop(row, (0.0, 0, 0))[0])


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["touch", "touch", "enter", "forget", "evict", "evict"]),
        st.lists(st.sampled_from(ROWS), unique=True, max_size=4),
        st.floats(0.1, 1000),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_against_a_sorted_dict(calls: list[tuple[str, list[int], float]]) -> None:
    """Any sequence of touches, entries, evictions and removals gives GreedyDual's order."""
    values = Fixed()
    priced, naive = Priced(values), Naive(values)
    for what, given_rows, value in calls:
        rows = given_rows
        values.values |= dict.fromkeys(rows, value)
        if what == "enter":
            rows = [row for row in rows if row not in naive.rows]
            priced.enter(np.array(rows, dtype=np.int64))
            naive.touch(rows)
        elif what == "touch":
            priced.touch(rows)
            naive.touch(rows)
        elif what == "forget":
            priced.forget(rows)
            for row in rows:
                naive.rows.pop(row, None)
        else:
            rows = naive.victims()[: len(rows)]
            priced.evicted(rows)
            naive.evicted(rows)
        assert naive.victims() == list(priced.victims()) == list(priced.victims())


def test_what_is_worth_more_stays_longer() -> None:
    """Ten evictions of what is worth one outweigh what was worth ten and never asked for again."""
    values = Fixed({0: 10.0})
    priced = Priced(values)
    priced.touch([0])
    survived = 0
    while True:
        priced.touch([1])
        first = next(priced.victims())
        if first == 0:
            break
        priced.evicted([first])
        survived += 1
    assert survived == pytest.approx(10, abs=1)


def test_values_out_of_range_are_bounded() -> None:
    """Nothing, and more than can be told apart, have an order too."""
    priced = Priced(Fixed({0: 1e300, 1: 0.0, 2: 1.0}))
    priced.touch([0, 1])
    priced.enter(np.array([2]))
    assert list(priced.victims()) == [1, 2, 0]


@pytest.mark.parametrize("name", POLICY)
def test_only_new_rows_enter(name: str) -> None:
    """Bulk entry of a row that is in is refused and changes nothing, whatever the policy."""
    policy = POLICY[name](Fixed({7: 50.0}))
    policy.touch([1, 2])
    before = list(policy.victims())
    with pytest.raises(ValueError, match="already"):
        policy.enter(np.array([7, 2]))
    assert list(policy.victims()) == before
    policy.enter(np.array([7, 5]))
    policy.touch([50])
    assert set(policy.victims()) == {1, 2, 7, 5, 50}


@pytest.mark.parametrize("name", POLICY)
def test_a_million_rows_enter_at_once(name: str) -> None:
    """All that enter are in the order, each once."""
    policy = POLICY[name](Fixed())
    count = 1_000_000 if name == "lru" else 100_000
    policy.enter(np.arange(count))
    assert sorted(policy.victims()) == list(range(count))


class SieveModel:
    """SIEVE as published: a list, a bit for each row, and a hand that goes from old to new."""

    def __init__(self) -> None:
        self.queue: list[int] = []  # old to new
        self.used: set[int] = set()
        self.hand = 0

    def touch(self, row: int) -> None:
        """Mark what is in, append what is not."""
        if row in self.queue:
            self.used.add(row)
        else:
            self.queue.append(row)

    def forget(self, row: int) -> None:
        """Take a row out; the hand stays before the same row."""
        if row in self.queue:
            at = self.queue.index(row)
            self.queue.remove(row)
            self.used.discard(row)
            self.hand -= at < self.hand

    def evict(self) -> int:
        """Move the hand to the first row that is unused, clearing bits on the way."""
        while True:
            self.hand %= len(self.queue)
            row = self.queue[self.hand]
            if row not in self.used:
                del self.queue[self.hand]
                return row
            self.used.discard(row)
            self.hand += 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["touch", "touch", "evict", "forget"]), st.sampled_from(ROWS)),
        max_size=60,
    )
)
def test_sieve_as_published(calls: list[tuple[str, int]]) -> None:
    """The first victim is the one that SIEVE's hand would come to, at any time."""
    sieve, model = POLICY["sieve"](), SieveModel()
    for what, row in calls:
        if what == "touch":
            sieve.touch([row])
            model.touch(row)
        elif what == "forget":
            sieve.forget([row])
            model.forget(row)
        elif model.queue:
            first = next(sieve.victims())
            assert first == model.evict()
            sieve.evicted([first])
    assert sorted(sieve.victims()) == sorted(model.queue)


# -- prefix-closed: a tree of blocks, by parent

PARENTS = [-1, 0, 1, 2, 1, 4, 5, 0, 7, -1, 9, 9]


def chain(leaf: int) -> list[int]:
    """Return a block and all before it, tail to head."""
    blocks = [leaf]
    while PARENTS[blocks[-1]] >= 0:
        blocks.append(PARENTS[blocks[-1]])
    return blocks


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["touch", "touch", "evict", "clock"]),
            st.sampled_from(range(len(PARENTS))),
            st.sampled_from([0.5, 1.0, 1.09, 2.0, 4.0, 8.0, 16.0, 50.0]),  # sums that tie
        ),
        max_size=60,
    )
)
def test_no_block_goes_before_one_that_follows_it(calls: list[tuple[str, int, float]]) -> None:
    """Whatever is touched, at whatever value, victims come tails first along every chain."""
    values = Fixed()
    closed = PrefixClosed(values)
    for what, block, value in calls:
        if what == "touch":
            values.values[block] = value
            closed.touch(chain(block))
        elif what == "clock":
            closed.evicted([next(closed.victims(), block)])
        else:
            closed.evicted(list(closed.victims())[:2])
        order = list(closed.victims())
        for row in order:
            before = PARENTS[row]
            assert before < 0 or before in order[order.index(row) + 1 :]


def test_a_head_is_worth_what_follows_it() -> None:
    """A cheap head stays as long as its dear tail, and no longer."""
    closed = PrefixClosed(Fixed({1: 20.0, 2: 3.0}))
    closed.touch([1, 0])
    closed.touch([2])
    assert list(closed.victims()) == [2, 1, 0]


def test_a_use_of_the_head_alone_adds_nothing_to_what_follows_it() -> None:
    """Rows that have their priority from a tail keep it when they are touched without that tail."""
    values = Fixed({2: 16.0, 5: 4.0, 6: 13.0})
    closed = PrefixClosed(values)
    closed.touch([2, 1, 0])
    closed.touch([5])
    closed.evicted([5])
    closed.touch([1, 0])
    closed.touch([6])
    assert list(closed.victims()) == [2, 1, 0, 6]


def test_equal_priorities_at_other_levels_keep_a_prompts_order() -> None:
    """A head that ties with its tail does not go to a lower level than another tail is at."""
    values = Fixed({1: 3.0, 4: 6.0, 2: 1.0})
    closed = PrefixClosed(values)
    closed.touch([1, 0])
    closed.touch([4, 0])
    closed.evicted([1])
    values.values[1] = 3.0
    closed.touch([1, 0])
    assert list(closed.victims()) in ([1, 4, 0], [4, 1, 0])
