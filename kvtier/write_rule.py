"""Which blocks are worth a write to the SSD: what was asked for once may have to come again."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.admission import SecondAccess

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.base import Location, Record
    from kvtier.tiers.write_budget import WriteBudget

__all__ = ["PendingWrite", "WriteRule"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """One block to write: its catalog row, whose host copy is pinned, and its record.

    ``done(where)`` is called once, on a lane: with its place, once that is durable, or None.
    ``recomputed``: a plan would recompute the block anyway. ``again``: it is known to have been
    asked for before.
    """

    row: int
    record: Record
    done: Callable[[Location | None], None]
    recomputed: bool = False
    again: bool = False


class WriteRule:
    """The write budget, and the memory of blocks that were declined; its owner locks."""

    def __init__(self, budget: WriteBudget) -> None:
        self._budget = budget
        self._seen = SecondAccess()

    def admits(self, write: PendingWrite, nbytes: int, *, full: bool) -> bool:
        """Whether a block of ``nbytes`` on disk may be written; takes them from the budget.

        With a short budget, or if the SSD is ``full`` and a plan would recompute the block, only
        what is asked for a second time is. Priority lifts that, but nothing lifts the budget.
        """
        if self._budget.short() or (full and write.recomputed):
            record = write.record
            if record.priority <= 0 and not write.again and not self._seen.admits(record.id):
                return False
        try:
            return self._budget.spend(nbytes)
        except OSError as error:
            log.warning("the write budget could not be saved, nothing is written: %s", error)
            return False
