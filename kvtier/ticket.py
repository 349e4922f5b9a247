"""One block on its way into an engine's slot."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.plan import Tier
    from kvtier.tiers.base import BlockId
    from kvtier.tiers.device import KVSlots

__all__ = ["LoadTicket"]


class LoadTicket:
    """One block on its way into one engine slot; the only thing that may stop it.

    A ticket is claimed once, by whoever comes first: the copy, after which it runs to its end, or
    the cancellation, after which no copy will start. ``done(position, error)`` is called exactly
    once, from another thread, unless the ticket was cancelled; without an error the block is in its
    slot, with one nothing writes to it any more. ``session`` numbers the restore in a trace.
    """

    def __init__(
        self,
        block: BlockId,
        tier: Tier,
        slots: KVSlots,
        position: int,
        done: Callable[[int, BaseException | None], None],
        *,
        session: int = 0,
    ) -> None:
        self.session = session
        self.event = 0
        """The trace's event of the copy into the slot, once that is done."""
        self.block = block
        self.tier = tier
        self.slots = slots
        self.position = position
        self.done = done
        self._claim = threading.Lock()

    @property
    def claimed(self) -> bool:
        """Whether somebody has decided already."""
        return self._claim.locked()

    def claim(self) -> bool:
        """Become the one who decides; False if somebody has."""
        return self._claim.acquire(blocking=False)

    def refuse(self, error: BaseException) -> None:
        """Answer that the block is not loaded, unless somebody has decided."""
        if self.claim():
            self.done(self.position, error)
