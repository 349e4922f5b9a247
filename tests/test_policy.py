from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policy import Lru


def test_least_recently_used_goes_first() -> None:
    """Victims come in the order of their last use."""
    lru = Lru()
    lru.touch([1, 2, 3])
    lru.touch([1])
    lru.touch([4])
    assert list(lru.victims()) == [2, 3, 1, 4]


def test_touching_tail_to_head_keeps_the_head() -> None:
    """A prompt touched from its tail loses its tail first and its head last."""
    lru = Lru()
    prompt = range(10, 15)
    lru.touch(reversed(prompt))
    assert list(lru.victims()) == [14, 13, 12, 11, 10]
    lru.touch(reversed(range(20, 22)))
    lru.touch(reversed(prompt))
    assert list(lru.victims()) == [21, 20, 14, 13, 12, 11, 10]


def test_forgotten_rows_are_no_victims() -> None:
    """A row taken out is never named again until it is touched anew; unknown rows are ignored."""
    lru = Lru()
    lru.touch([1, 2, 3])
    lru.forget([2])
    lru.forget([2])
    lru.forget([99])
    assert list(lru.victims()) == [1, 3]
    lru.touch([2])
    assert list(lru.victims()) == [1, 3, 2]


def test_walking_does_not_change_the_order() -> None:
    """Asking for victims is not a use, and an unfinished walk leaves nothing behind."""
    lru = Lru()
    lru.touch([1, 2, 3])
    assert next(lru.victims()) == 1
    assert [1, 2, 3] == list(lru.victims()) == list(lru.victims())


def test_empty() -> None:
    """A policy without rows has no victims."""
    assert list(Lru().victims()) == []


def test_rows_enter_in_bulk_as_if_touched() -> None:
    """Rows that enter together follow those that are in, in the order given."""
    lru = Lru()
    lru.touch([5, 0])
    lru.enter(np.array([7, 3, 100, 1]))
    lru.enter(np.array([], dtype=np.int64))
    lru.touch([3, 8])
    assert list(lru.victims()) == [5, 0, 7, 100, 1, 3, 8]


def test_only_new_rows_enter() -> None:
    """Bulk entry of a row that is in is refused and changes nothing; a forgotten one is new."""
    lru = Lru()
    lru.touch([1, 2, 3])
    with pytest.raises(ValueError, match="already") as refused:
        lru.enter(np.array([9, 2]))
    lru.forget([2])
    lru.enter(np.array([2, 9]))
    lru.touch([50])  # what was raised holds nothing that would keep the columns from growing
    assert list(lru.victims()) == [1, 3, 2, 9, 50]
    assert refused.value


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["touch", "enter", "forget"]), st.lists(st.integers(0, 6))),
        max_size=30,
    )
)
def test_against_a_list(calls: list[tuple[str, list[int]]]) -> None:
    """Any sequence of calls gives the order of a plain list that does the same."""
    lru, model = Lru(), list[int]()
    for what, given_rows in calls:
        rows = given_rows
        if what == "enter":
            rows = [row for row in dict.fromkeys(rows) if row not in model]
            lru.enter(np.array(rows, dtype=np.int64))
        elif what == "touch":
            lru.touch(rows)
        for row in rows:
            if row in model:
                model.remove(row)
            if what == "forget":
                lru.forget([row])
            else:
                model.append(row)
        assert model == list(lru.victims())
