"""Prefetches: hints that promote blocks to host memory, and keep them there for the restore.

Everything here runs on the prefetcher's loop. What is read, and when, is the read queue's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.hints import Hint, Hints
from kvtier.plan import Tier
from kvtier.read_queue import Rank
from kvtier.tiers.base import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.read_queue import ReadQueue
    from kvtier.ticket import LoadTicket
    from kvtier.transfer import Prefetch

__all__ = ["Promotion", "Promotions", "Timer", "Timers"]


class Timer(Protocol):
    """A call that was asked for."""

    def cancel(self) -> None:
        """Call it off."""


class Timers(Protocol):
    """A clock that calls back."""

    def time(self) -> float:
        """Return the instant that it is."""

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        """Call back at an instant."""


@dataclass(slots=True, eq=False, kw_only=True)
class Promotion(Hint[BlockId]):
    """A hint that somebody holds a handle of."""

    transfer: Prefetch
    withdrawn: bool = False
    timer: Timer | None = None


class Promotions:
    """Owns what prefetches hold. ``changed`` is called when the queue may have to be looked at."""

    def __init__(
        self,
        queue: ReadQueue[BlockId, LoadTicket | Promotion],
        catalog: Catalog,
        mover: Mover,
        metrics: Metrics,
        *,
        blocks_max: int,
        timers: Timers,
        changed: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._catalog = catalog
        self._mover = mover
        self._metrics = metrics
        self._timers = timers
        self._changed = changed
        self._hints: Hints[BlockId, Promotion] = Hints(blocks_max)
        self._over = False

    def usage(self) -> dict[str, int]:
        """Return what prefetches hold, and may hold, in blocks."""
        hints = self._hints
        return {
            "held_blocks": hints.held,
            "kept_blocks": hints.kept,
            "held_blocks_max": hints.blocks_max,
        }

    def accept(
        self, hint: Promotion, wanted: Sequence[BlockId], present: Sequence[BlockId]
    ) -> None:
        """Let a hint wait for ``wanted`` blocks and keep those that are ``present``, in room."""
        keeps = hint.kept_until > self._timers.time()
        for block in dict.fromkeys(present if keeps else ()):
            self._keep_present(hint, block)
        # The tail first: the head is what a plan recomputes, and what comes last stays longest.
        for block in dict.fromkeys(reversed(wanted)):
            if block in hint.kept:
                continue
            if self._has_room(hint, block):
                self._hints.hold(hint, block)
                self._queue.want(block, hint, hint.urgency)
            else:
                self._metrics.add("prefetch_declined_blocks")
        if keeps:
            hint.timer = self._timers.call_at(hint.urgency.deadline, self._late, hint)
        self._check(hint)
        self._changed()

    def withdraw(self, hint: Promotion) -> None:
        """Take a hint back; what is being read for it arrives all the same."""
        hint.withdrawn = True
        self._take_back(hint, "prefetch_cancelled_blocks")
        self._keep_nothing_for(hint)
        hint.transfer.finish(hint.found)

    def arrived(self, hint: Promotion, block: BlockId, row: int | None) -> None:
        """Note that a hint's block is in host memory, pinned by the caller; or cannot be: None."""
        hint.found += row is not None
        keeps = not (hint.withdrawn or self._over) and hint.kept_until > self._timers.time()
        if row is not None and keeps:
            self._catalog.pin(row, Tier.HOST)
            self._hints.keep(hint, block, row)
        else:
            self._release(hint, block)
        self._check(hint)

    def used(self, block: BlockId) -> None:
        """Note that a restore has a block: one of the hints that kept it lets go of it."""
        hint = self._hints.user(block)
        if hint is not None:
            self._release(hint, block)
            self._check(hint)

    def drop(self, hint: Promotion, block: BlockId, why: str) -> None:
        """Let a hint go of a block that is not read for it any more; ``why`` names a counter."""
        self._metrics.add(why)
        self._release(hint, block)
        self._check(hint)

    def keep_nothing(self) -> None:
        """Let go of everything that is kept for restores to come."""
        for hint in self._hints.keeping():
            self._keep_nothing_for(hint)

    def end(self) -> None:
        """Let go of everything that is kept, now and later."""
        self._over = True
        self.keep_nothing()

    # -- inside

    def _has_room(self, hint: Promotion, block: BlockId) -> bool:
        """Whether a hint may hold a block; if need be, one that is less urgent is dropped."""
        if self._hints.has_room(block):
            return True
        last = self._queue.last()
        if last is None or last <= hint.urgency or last.rank is not Rank.PREFETCH:
            return False
        for other, waiter in self._queue.drop_last():
            if isinstance(waiter, Promotion):  # of this rank they all are
                self.drop(waiter, other, "prefetch_declined_blocks")
        return True

    def _keep_present(self, hint: Promotion, block: BlockId) -> None:
        with self._catalog.changed:
            row = self._catalog.find(block)
            if row is None or not self._hints.hold(hint, block):
                return
            if self._catalog.pin(row, Tier.HOST):
                self._hints.keep(hint, block, row)
            else:
                self._hints.release(hint, block)

    def _late(self, hint: Promotion) -> None:
        """Leave what is not being read yet to the restore: the deadline has come."""
        hint.timer = self._timers.call_at(hint.kept_until, self._lapse, hint)
        self._take_back(hint, "prefetch_late_blocks")

    def _lapse(self, hint: Promotion) -> None:
        self._metrics.add("prefetch_unused_blocks", len(hint.kept))
        hint.timer = None
        self._keep_nothing_for(hint)

    def _take_back(self, hint: Promotion, why: str) -> None:
        for block in list(hint.waiting):
            if self._queue.leave(block, hint):
                self.drop(hint, block, why)
        self._changed()

    def _keep_nothing_for(self, hint: Promotion) -> None:
        for block in list(hint.kept):
            self._release(hint, block)
        self._check(hint)

    def _release(self, hint: Promotion, block: BlockId) -> None:
        row = self._hints.release(hint, block)
        if row is not None:
            self._mover.unpin_host(row)

    def _check(self, hint: Promotion) -> None:
        """Answer a hint that waits for nothing; one that holds nothing needs no timer."""
        if hint.waiting:
            return
        hint.transfer.finish(hint.found)
        if not hint.kept and hint.timer is not None:
            hint.timer.cancel()
            hint.timer = None
