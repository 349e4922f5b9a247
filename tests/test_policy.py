from __future__ import annotations

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
    lru.forget(2)
    lru.forget(2)
    lru.forget(99)
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 6), max_size=4)), max_size=30))
def test_against_a_list(calls: list[tuple[bool, list[int]]]) -> None:
    """Any sequence of touches and removals gives the order of a plain list that does the same."""
    lru, model = Lru(), list[int]()
    for touched, rows in calls:
        if touched:
            lru.touch(rows)
        for row in rows:
            if row in model:
                model.remove(row)
            if touched:
                model.append(row)
            else:
                lru.forget(row)
    assert model == list(lru.victims())
