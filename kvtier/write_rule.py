"""Which blocks are worth a write to the SSD: what was asked for once may have to come again."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.base import Location, Record
    from kvtier.tiers.write_budget import WriteBudget

__all__ = ["PendingWrite", "WriteRule"]

log = logging.getLogger(__name__)

DOUBTFUL_USES_MIN: Final = 2
"""How often a block was asked for, its put included, before it is written where that is dear."""


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


class WriteRule:
    """Weighs a block against room and the write budget, from which it takes; its owner locks."""

    def __init__(self, budget: WriteBudget) -> None:
        self._budget = budget

    def admits(self, write: PendingWrite, nbytes: int, *, uses: int, full: bool) -> bool:
        """Whether a block of ``nbytes`` on disk may be written; takes them from the budget.

        With a short budget, or if the SSD is ``full`` and a plan would recompute the block, only
        what was asked for twice is: ``uses`` counts its put. Priority lifts that, but nothing lifts
        the budget.
        """
        doubtful = self._budget.short() or (full and write.recomputed)
        if doubtful and write.record.priority <= 0 and uses < DOUBTFUL_USES_MIN:
            return False
        try:
            return self._budget.spend(nbytes)
        except OSError as error:
            log.warning("the write budget could not be saved, nothing is written: %s", error)
            return False
