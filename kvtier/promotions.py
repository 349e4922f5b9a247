"""Prefetches: hints that promote blocks to a tier, and keep them there for the restore.

Everything here runs on the prefetcher's loop. What is read, and when, is the read queue's decision;
what is in host memory already passes through it too. A block comes to the device by way of host
memory, where it is pinned from its arrival until it was copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.hints import Hint, Hints
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """A hint that somebody holds a handle of, to bring blocks to ``tier``."""

    transfer: Prefetch
    tier: Tier = Tier.HOST
    withdrawn: bool = False
    timer: Timer | None = None


class Promotions:
    """Owns what prefetches hold: of each tier's hints up to ``blocks_max`` blocks.

    ``changed`` is called when the queue may have to be looked at. ``to_device`` starts the copy of
    a row's pinned host copy to the device, and says, before it unpins that, whether it is there.
    """

    def __init__(
        self,
        queue: ReadQueue[BlockId, LoadTicket | Promotion],
        catalog: Catalog,
        mover: Mover,
        metrics: Metrics,
        *,
        blocks_max: Mapping[Tier, int],
        timers: Timers,
        changed: Callable[[], None],
        to_device: Callable[[int, Callable[[bool], None]], None],
    ) -> None:
        self._queue = queue
        self._catalog = catalog
        self._mover = mover
        self._metrics = metrics
        self._timers = timers
        self._changed = changed
        self._to_device = to_device
        self._hints: dict[Tier, Hints[BlockId, Promotion]] = {
            tier: Hints(most) for tier, most in blocks_max.items()
        }
        self._copied: dict[BlockId, list[Promotion]] = {}  # who waits for a copy to the device
        self._over = False

    def usage(self) -> dict[str, int]:
        """Return what prefetches to host memory and the device hold, and may hold, in blocks."""
        host, device = self._hints[Tier.HOST], self._hints[Tier.DEVICE]
        return {
            "held_blocks": host.held,
            "kept_blocks": host.kept,
            "held_blocks_max": host.blocks_max,
            "device_held_blocks": device.held,
            "device_kept_blocks": device.kept,
            "device_held_blocks_max": device.blocks_max,
        }

    def accept(
        self, hint: Promotion, wanted: Sequence[BlockId], present: Sequence[BlockId]
    ) -> None:
        """Let a hint wait for ``wanted`` blocks and keep those that are ``present``, in room."""
        keeps = hint.kept_until > self._timers.time()
        for block in dict.fromkeys(present if keeps else ()):
            self._keep_present(hint, block)
        spare = self._less_urgent(hint)
        # The tail first: the head is what a plan recomputes, and what comes last stays longest.
        for block in dict.fromkeys(reversed(wanted)):
            if block in hint.kept:
                continue
            if self._has_room(hint, block, spare):
                self._hints[hint.tier].hold(hint, block)
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
        if row is None or hint.tier is Tier.HOST:
            self._settle(hint, block, row)
        elif hint.withdrawn or self._over:
            self._settle(hint, block, None)
        else:
            self._copy(hint, block, row)

    def used(self, block: BlockId) -> None:
        """Note that a restore has a block: one of the hints that kept it lets go of it."""
        users = [hints.user(block) for hints in self._hints.values()]
        hint = min(filter(None, users), key=lambda hint: hint.urgency, default=None)
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
        for hints in self._hints.values():
            for hint in hints.keeping():
                self._keep_nothing_for(hint)

    def end(self) -> None:
        """Let go of everything that is kept, now and later."""
        self._over = True
        self.keep_nothing()

    # -- inside

    def _has_room(self, hint: Promotion, block: BlockId, spare: Iterator[BlockId]) -> bool:
        """Whether a hint may hold a block; if need be, ``spare`` ones of its tier are dropped."""
        while not self._hints[hint.tier].has_room(block):
            other = next(spare, None)
            if other is None:
                return False
            for waiter in self._queue.waiters(other):
                if not isinstance(waiter, Promotion) or waiter.tier is not hint.tier:
                    continue
                if self._queue.leave(other, waiter):
                    self.drop(waiter, other, "prefetch_declined_blocks")
        return True

    def _less_urgent(self, hint: Promotion) -> Iterator[BlockId]:
        """Walk the queued blocks that are less urgent than a hint, the last one first.

        They are looked up once, at the first need: what enters meanwhile is the hint's own.
        """
        for block in self._queue.behind(hint.urgency):
            if block not in hint.waiting:
                yield block

    def _keep_present(self, hint: Promotion, block: BlockId) -> None:
        hints = self._hints[hint.tier]
        with self._catalog.changed:
            row = self._catalog.find(block)
            if row is None or not hints.hold(hint, block):
                return
            if self._catalog.pin(row, hint.tier):
                hints.keep(hint, block, row)
            else:
                hints.release(hint, block)

    def _copy(self, hint: Promotion, block: BlockId, row: int) -> None:
        """Bring a block from host memory, where the caller has pinned it, to the device; once."""
        waiting = self._copied.setdefault(block, [])
        waiting.append(hint)
        if len(waiting) == 1:
            self._catalog.pin(row, Tier.HOST)
            self._to_device(row, partial(self._was_copied, block, row))

    def _was_copied(self, block: BlockId, row: int, there: bool) -> None:  # noqa: FBT001
        self._metrics.add("prefetched_blocks" if there else "prefetch_declined_blocks")
        for hint in self._copied.pop(block):
            self._settle(hint, block, row if there else None)
        self._changed()

    def _settle(self, hint: Promotion, block: BlockId, row: int | None) -> None:
        """Note that a hint's block is in its tier; or will not be: None."""
        hint.found += row is not None
        keeps = not (hint.withdrawn or self._over) and hint.kept_until > self._timers.time()
        if row is not None and keeps and self._catalog.pin(row, hint.tier):
            self._hints[hint.tier].keep(hint, block, row)
        else:
            self._release(hint, block)
        self._check(hint)

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
        row = self._hints[hint.tier].release(hint, block)
        if row is None:
            return
        if hint.tier is Tier.HOST:
            self._mover.unpin_host(row)
        else:
            self._catalog.unpin(row, hint.tier)

    def _check(self, hint: Promotion) -> None:
        """Answer a hint that waits for nothing; one that holds nothing needs no timer."""
        if hint.waiting:
            return
        hint.transfer.finish(hint.found)
        if not hint.kept and hint.timer is not None:
            hint.timer.cancel()
            hint.timer = None
