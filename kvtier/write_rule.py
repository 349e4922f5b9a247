"""Which blocks are worth a write to the SSD: while writes are short, those of the highest value."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.prices import PRICE_MIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.base import Location, Record
    from kvtier.tiers.write_budget import WriteBudget

__all__ = ["PendingWrite", "WritePrice", "WriteRule"]

log = logging.getLogger(__name__)

RECOMPUTED_USES_MIN: Final = 2
"""How often a block that a plan would recompute is asked for before a full SSD takes it."""
WRITE_PRICE_FIRST: Final = 2.0
"""Where the price of a write starts: the value of a prompt's first block asked for twice."""
WRITE_PRICE_MIN: Final = PRICE_MIN
"""At this price whatever was put once is written."""
WRITE_PRICE_MAX: Final = 1024.0
"""At this price hardly anything is."""
WRITE_PRICE_STEP: Final = 0.01
"""By how much of itself the price moves at most with a block that is offered."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """One block to write: its catalog row, whose host copy is pinned, and its record.

    ``done(where)`` is called once, on a lane: with its place, once that is durable, or None.
    ``recomputed``: a plan would recompute the block anyway.
    """

    row: int
    record: Record
    done: Callable[[Location | None], None]
    recomputed: bool = False


class WritePrice:
    """What a block must be worth to be written, so that a share of what is offered is.

    It rises with every write and falls with every block offered, by ``share`` of that: the
    multiplier of the budget's constraint, found by subgradient steps on its logarithm. ``now`` is a
    value as ``prices`` has them. Its owner locks.
    """

    def __init__(self) -> None:
        self.now = WRITE_PRICE_FIRST

    def follow(self, share: float, *, written: bool) -> None:
        """Take note of a block that was offered; from a share of 1 on the price rests."""
        if share >= 1:
            self.now = WRITE_PRICE_FIRST
            return
        moved = self.now * math.exp(WRITE_PRICE_STEP * (written - share))
        self.now = min(max(moved, WRITE_PRICE_MIN), WRITE_PRICE_MAX)


class WriteRule:
    """Weighs a block against room and the write budget, from which it takes; its owner locks.

    While the budget is short, only what is worth the price of a write is written. That is admission
    at the second access, and more: the price starts where a first block passes at its second use,
    as it does wherever position counts nothing because prices are unknown. From there it follows
    what the budget affords, so that dear tails pass at once and cheap heads have to come often.
    """

    def __init__(self, budget: WriteBudget) -> None:
        self._budget = budget
        self._price = WritePrice()

    def admits(
        self, write: PendingWrite, nbytes: int, *, uses: int, value: float, full: bool
    ) -> bool:
        """Whether a block of ``nbytes`` on disk may be written; takes them from the budget.

        ``value`` is what its loss would cost; ``uses`` counts its put. If the SSD is ``full`` and a
        plan would recompute the block, it has to be asked for twice. Priority lifts price and
        doubt, but nothing lifts the budget.
        """
        share = self._budget.share()
        doubtful = full and write.recomputed and uses < RECOMPUTED_USES_MIN
        dear = share < 1 and value < self._price.now
        wanted = write.record.priority > 0 or not (doubtful or dear)
        written = wanted and self._spent(nbytes)
        self._price.follow(share, written=written)
        return written

    def _spent(self, nbytes: int) -> bool:
        try:
            return self._budget.spend(nbytes)
        except OSError as error:
            log.warning("the write budget could not be saved, nothing is written: %s", error)
            return False
