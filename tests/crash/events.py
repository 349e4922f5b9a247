"""The course of operations that every crash is tried in, and the disks that it is tried on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crash.course import Course, Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISKS = {
    "direct, punching": Disk(),
    "direct, no punching": Disk(punching=False),
    "buffered, punching": Disk(direct=False),
    "buffered, no punching": Disk(direct=False, punching=False),
}


def events() -> Iterator[Callable[[Course], None]]:
    """Yield a course of operations that comes through every path of the tier.

    New segments, reused slots, both slot sizes, one taking the other's disk, purges, reopening,
    a lost index.
    """
    yield Course.open
    yield lambda c: c.write([0, 2, 4])
    yield lambda c: c.write([1, 3])
    yield lambda c: c.write_evicting([6, 8])
    yield lambda c: c.drop([2])
    yield lambda c: c.write([12])
    yield lambda c: c.purge([4, 1])
    yield lambda c: c.write_evicting([14, 5])
    yield Course.reopen
    yield Course.check
    yield lambda c: c.write_evicting([16, 18, 20, 22, 24])
    yield lambda c: c.write_evicting([7, 9, 11])
    yield lambda c: c.write_evicting([13, 15, 17, 19])
    yield lambda c: c.purge([n for n in c.stored() if n % 2])
    yield lambda c: c.write_evicting([4, 26])
    yield lambda c: c.reopen(lose_index=True)
    yield Course.check
    yield Course.settle_doubts
    yield lambda c: c.write_evicting([28, 21])
    yield lambda c: c.purge(c.stored())
    yield Course.reopen
    yield Course.check
    yield Course.close
