from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvtier.hints import KEPT_AFTER_S, Hint, Hints
from kvtier.read_queue import Rank, Urgency

ROOM = 3


def hint(deadline: float = math.inf) -> Hint[int]:
    """Return a new hint."""
    return Hint(Urgency(Rank.PREFETCH, 0, deadline))


def test_a_block_that_several_hold_counts_once() -> None:
    """Room is for different blocks; it is free again when the last one lets go."""
    hints: Hints[int, Hint[int]] = Hints(1)
    one, two = hint(), hint()
    assert hints.hold(one, 7)
    assert hints.hold(two, 7)
    assert not hints.hold(one, 8)
    hints.release(one, 7)
    assert not hints.hold(one, 8)
    hints.release(two, 7)
    assert hints.hold(one, 8)


def test_a_use_is_the_most_urgent_hints() -> None:
    """Two prompts that share a block keep it until both were restored."""
    hints: Hints[int, Hint[int]] = Hints(ROOM)
    soon, late = hint(1.0), hint(9.0)
    for each in (late, soon):
        hints.hold(each, 7)
        hints.keep(each, 7, 70)
    assert hints.user(7) is soon
    assert hints.release(soon, 7) == 70
    assert hints.user(7) is late
    assert hints.release(late, 7) == 70
    assert hints.user(7) is None


def test_without_a_deadline_nothing_is_kept() -> None:
    """A hint that does not say when keeps nothing; one that does keeps a little longer."""
    assert hint().kept_until == -math.inf
    assert hint(5.0).kept_until == 5.0 + KEPT_AFTER_S


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=60))
def test_room_is_exact_and_comes_back(moves: list[tuple[int, int, bool]]) -> None:
    """Whatever is held, kept and released: never more than there may be, and none left over."""
    hints: Hints[int, Hint[int]] = Hints(ROOM)
    each = [hint(float(number)) for number in range(3)]
    held: dict[int, set[int]] = {}

    def count(test: Any) -> int:
        return sum(1 for block, by in held.items() if any(test(each[n], block) for n in by))

    for number, block, keeps in moves:
        one, by = each[number], held.setdefault(block, set())
        if number in by and keeps and block in one.waiting:
            hints.keep(one, block, block * 10)
        elif number in by:
            row = hints.release(one, block)
            assert row in (None, block * 10)
            by.remove(number)
        else:
            room = bool(by) or count(lambda hint, block: True) < ROOM
            assert hints.hold(one, block) == room
            by |= {number} if room else set()
        assert hints.held == count(lambda hint, block: True) <= ROOM
        assert hints.kept == count(lambda hint, block: block in hint.kept)
        assert set(hints.keeping()) == {one for one in each if one.kept}
    for block, by in held.items():
        for number in by:
            hints.release(each[number], block)
    assert (hints.held, hints.kept) == (0, 0)
    assert not any(one.waiting or one.kept for one in each)
