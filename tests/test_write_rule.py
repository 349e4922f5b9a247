"""Which blocks are worth a write while the day's bytes are short."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtier.prices import PRICE_MIN
from kvtier.tiers.base import BlockId, Record
from kvtier.tiers.write_budget import SHORT, WriteBudget
from kvtier.write_rule import (
    WRITE_PRICE_FIRST,
    WRITE_PRICE_MAX,
    WRITE_PRICE_MIN,
    PendingWrite,
    WritePrice,
    WriteRule,
)

HOUR_NS = 3600 * 10**9
BLOCK = 10
DAY = 4000 * BLOCK


class Clock:
    """A wall clock that a test sets."""

    hours = 1000.0

    def __call__(self) -> int:
        """Return the time in ns."""
        return int(self.hours * HOUR_NS)


def offered(*, priority: int = 0) -> PendingWrite:
    """Return a block that is offered to the SSD."""
    block = BlockId(bytes(32), bytes(32))
    record = Record(block, bytes(32), 0, bytes(32), (10,), (((1, 1),),), priority=priority)
    return PendingWrite(0, record, lambda _: None)


def short(left: float, clock: Clock | None = None) -> tuple[WriteBudget, WriteRule]:
    """Return a budget with this share of what is short left, and a rule over it."""
    own = WriteBudget(DAY, saved=b"", save=lambda _: None, now_ns=clock or Clock())
    assert own.spend(DAY - int(left * SHORT * DAY))
    return own, WriteRule(own)


def admits(rule: WriteRule, value: float, *, priority: int = 0, uses: int = 1) -> bool:
    """Offer a block where there is room."""
    write = offered(priority=priority)
    return rule.admits(write, BLOCK, uses=uses, value=value, full=False)


def test_with_enough_left_everything_is_written() -> None:
    """Until the budget is short the least valuable block passes, and the price rests."""
    own = WriteBudget(DAY, saved=b"", save=lambda _: None, now_ns=Clock())
    rule = WriteRule(own)
    while own.share() == 1:
        assert admits(rule, 0.0)
    assert not admits(rule, 1.0)


def test_a_shortage_begins_with_second_access() -> None:
    """Where position counts nothing, what was put once is declined and what comes again is not."""
    _, rule = short(0.9)
    assert not any(admits(rule, 1.0) for _ in range(20))
    assert all(admits(rule, 2.0, uses=2) for _ in range(10))


def test_a_dear_tail_passes_the_first_time() -> None:
    """Value decides, not uses: a dear block passes at once, a cheap one not at its second use."""
    _, rule = short(0.9)
    assert admits(rule, 5.0, uses=1)
    assert not admits(rule, 0.6, uses=2)


def test_priority_is_written_at_any_price() -> None:
    """Retention with priority lifts the price, as long as the day's bytes last."""
    own, rule = short(0.5)
    while own.left():
        assert not admits(rule, 0.0)
        assert admits(rule, 0.0, priority=1)
    assert not admits(rule, 9.0, priority=1)


def test_a_plentiful_day_ends_a_shortage() -> None:
    """When the budget is whole again all is written; the next shortage begins like the first."""
    clock = Clock()
    own, rule = short(0.5, clock)
    while admits(rule, 100.0):
        pass
    clock.hours += 26
    assert admits(rule, 0.0)
    assert own.spend((own.left() or 0) - int(0.9 * SHORT * DAY))
    assert not admits(rule, 1.0)
    assert admits(rule, 2.1, uses=2)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300))
def test_the_price_has_bounds(steps: list[tuple[float, bool]]) -> None:
    """Whatever happens, the price stays where the least of all blocks and the dearest can tell."""
    price = WritePrice()
    for share, written in steps * 20:
        price.follow(share, written=written)
        assert WRITE_PRICE_MIN <= price.now <= WRITE_PRICE_MAX
    assert WRITE_PRICE_MIN <= PRICE_MIN
    price.follow(1.0, written=True)
    assert price.now == WRITE_PRICE_FIRST


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(-1, 1), st.integers(1, DAY // 9), st.floats(0, 2)),
        max_size=80,
    )
)
def test_no_day_exceeds_the_budget(steps: list[tuple[float, int, int, float]]) -> None:
    """In any 24 hours no more than the budget is admitted, whatever it is worth."""
    clock = Clock()
    rule = WriteRule(WriteBudget(DAY, saved=b"", save=lambda _: None, now_ns=clock))
    spent: list[tuple[float, int]] = []
    for value, priority, nbytes, hours in steps:
        clock.hours += hours
        write = offered(priority=priority)
        if rule.admits(write, nbytes, uses=1, value=value, full=False):
            spent.append((clock.hours, nbytes))
        assert sum(n for at, n in spent if at > clock.hours - 24) <= DAY


@given(st.sampled_from([0.1, 0.25, 0.5, 0.75]), st.integers(0, 99))
def test_the_price_finds_the_share(share: float, seed: int) -> None:
    """Of blocks of any values the price lets about the share through, and the dearest of them."""
    draw, price = random.Random(seed), WritePrice()  # noqa: S311 - repeatable
    written: list[float] = []
    declined: list[float] = []
    for at in range(6000):
        value = draw.lognormvariate(0, 1)
        passes = value >= price.now
        price.follow(share, written=passes)
        if at >= 3000:
            (written if passes else declined).append(value)
    assert abs(len(written) / 3000 - share) < 0.03
    middle = sorted(written + declined, reverse=True)[len(written)]
    assert sum(value >= 1.5 * middle for value in declined) < 0.02 * 3000


def test_writes_meet_what_the_hours_give_back() -> None:
    """Twice as much offered as the day affords: about half is written, and in every hour some.

    An eighth of the budget, half of what is short, stays for what is put with priority.
    """
    clock = Clock()
    own = WriteBudget(DAY, saved=b"", save=lambda _: None, now_ns=clock)
    rule, draw = WriteRule(own), random.Random(1)  # noqa: S311 - repeatable
    per_hour = 2 * DAY // BLOCK // 25  # an hour that is not over counts for a whole one
    hourly: list[int] = []
    for _ in range(30 * 24):
        clock.hours += 1
        hourly.append(sum(admits(rule, draw.lognormvariate(0, 1)) for _ in range(per_hour)))
    settled = hourly[10 * 24 :]
    assert 0.78 * DAY / BLOCK < sum(settled) / 20 < DAY / BLOCK
    assert min(settled) > 0
