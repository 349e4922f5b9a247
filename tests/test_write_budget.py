from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.write_budget import WriteBudget

HOUR_NS = 3600 * 10**9
DAY = 24_000


class Clock:
    """A wall clock that a test sets."""

    def __init__(self, hours: float = 1000.0) -> None:
        self.hours = hours

    def __call__(self) -> int:
        """Return the time in ns."""
        return int(self.hours * HOUR_NS)


def budget(clock: Clock, saved: list[bytes], bytes_per_day: int | None = DAY) -> WriteBudget:
    """Return a budget that saves into a list, from what is last in it."""
    return WriteBudget(
        bytes_per_day,
        saved=saved[-1] if saved else b"",
        save=saved.append,
        now_ns=clock,
    )


def test_without_a_limit_everything_is_written() -> None:
    """None means no limit, nothing to save, and everything is afforded."""
    saved: list[bytes] = []
    free = budget(Clock(), saved, None)
    assert free.spend(1 << 60)
    assert free.share() == 1
    assert free.left() is None
    free.close()
    assert saved == []


def test_no_more_than_the_budget_in_a_day() -> None:
    """What does not fit is refused, and takes nothing."""
    one = budget(Clock(), [])
    assert one.spend(DAY - 1)
    assert not one.spend(2)
    assert one.left() == 1
    assert one.spend(1)
    assert one.left() == 0


def test_short_below_a_quarter() -> None:
    """Down to a quarter of the day's bytes all is afforded; from there as much as is left of it."""
    one = budget(Clock(), [])
    assert one.spend(DAY * 3 // 4)
    assert one.share() == 1
    assert one.spend(1)
    assert 0 < 1 - one.share() < 0.01
    assert one.spend(DAY // 8 - 1)
    assert one.share() == 0.5
    assert one.spend(DAY // 8)
    assert one.share() == 0


def test_a_budget_of_nothing_affords_nothing() -> None:
    """Zero bytes a day are a limit too."""
    one = budget(Clock(), [], 0)
    assert one.share() == 0
    assert not one.spend(1)


def test_a_restart_knows_what_was_spent() -> None:
    """A clean close saves the exact count; a crash never saves less than was spent."""
    clock, saved = Clock(), []
    one = budget(clock, saved)
    assert one.spend(1000)
    assert budget(clock, saved).left() <= DAY - 1000
    one.close()
    assert budget(clock, saved).left() == DAY - 1000


def test_a_day_later_the_budget_is_whole_again() -> None:
    """What was spent more than a day ago is forgotten, hour by hour."""
    clock, saved = Clock(), []
    one = budget(clock, saved)
    assert one.spend(DAY // 2)
    one.close()
    clock.hours += 12
    assert one.spend(DAY // 2)
    assert not one.spend(DAY // 4)
    one.close()
    clock.hours += 13
    assert one.left() == DAY // 2
    clock.hours += 13
    assert one.left() == DAY


def test_a_clock_that_goes_backwards_adds_nothing() -> None:
    """Setting the clock back neither frees nor loses budget; far ahead and back is forgotten."""
    clock, saved = Clock(), []
    one = budget(clock, saved)
    assert one.spend(DAY // 2)
    clock.hours -= 500
    assert one.left() == DAY // 2
    assert one.spend(DAY // 4)
    one.close()
    assert budget(clock, saved).left() == DAY


def test_a_budget_that_cannot_be_saved_is_not_spent_in_silence() -> None:
    """The disk's refusal reaches the caller, who then does not write."""

    def refuse(_: bytes) -> None:
        raise OSError(28, "no space")

    one = WriteBudget(DAY, saved=b"", save=refuse, now_ns=Clock())
    with pytest.raises(OSError, match="no space"):
        one.spend(10)


@given(st.binary(max_size=200))
def test_any_saved_bytes_are_survived(saved: bytes) -> None:
    """Bytes that nobody saved count as nothing spent, or as something sensible."""
    left = budget(Clock(), [saved]).left()
    assert left is not None
    assert 0 <= left <= DAY


@given(st.lists(st.tuples(st.integers(0, 8000), st.floats(0, 3)), max_size=60))
def test_no_day_exceeds_the_budget(steps: list[tuple[int, float]]) -> None:
    """In any 24 hours, restarts and crashes included, at most the budget is spent."""
    clock, saved = Clock(), []
    one = budget(clock, saved)
    spent: list[tuple[float, int]] = []
    for index, (nbytes, hours) in enumerate(steps):
        clock.hours += hours
        if index % 5 == 4:
            one = budget(clock, saved)
        if one.spend(nbytes):
            spent.append((clock.hours, nbytes))
        window = sum(n for at, n in spent if at > clock.hours - 24)
        assert window <= DAY
