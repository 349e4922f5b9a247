"""Blocks of host memory that reach the engine layer by layer, so that it may start before the last.

Only a run of blocks at the prompt's end that the plan loads from host memory goes this way: it is
pinned and needs no recompute, so nothing can fail any more, and copying it in another order costs
nothing. With n blocks of L layers the first layer is complete after n/L block copies instead of n.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreFailed
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId
from kvtier.tiers.device import layer_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.plan import RestorePlan
    from kvtier.tiers.device import KVSlots
    from kvtier.trace import Trace

__all__ = ["LayerTail", "host_tail"]

BLOCKS_MIN: Final = 2
"""A single block is copied as soon whole."""


def host_tail(plan: RestorePlan) -> range:
    """Return the blocks at the prompt's end that a plan only loads from host memory; maybe none."""
    loaded, first = set(plan.load), len(plan.hashes)
    while first > plan.resident and first - 1 in loaded and plan.tiers[first - 1] is Tier.HOST:
        first -= 1
    tail = range(first, len(plan.hashes))
    return tail if len(tail) >= BLOCKS_MIN else range(len(plan.hashes), len(plan.hashes))


class LayerTail:
    """The copy of a run of host blocks into an engine's slots; thread-safe.

    Whoever holds the blocks pinned calls ``copy`` for one layer after the other, until it says that
    there is nothing more to do; any thread waits for layers.
    """

    def __init__(
        self,
        slots: KVSlots,
        blocks: range,
        names: Sequence[BlockId],
        clock: Callable[[], float],
        trace: Trace | None = None,
        session: int = 0,
    ) -> None:
        self.stopped: Callable[[], None] = lambda: None
        """Called when no layer is wanted any more, by the thread that says so."""
        self.blocks = blocks
        self.names = names
        self.ended_s: float | None = None
        """When the last layer was in place, by ``clock``; None until then."""
        self._slots = slots
        self._clock = clock
        self._trace = trace
        self._session = session
        self._changed = threading.Condition()
        self._copies: list[Callable[[int], None]] = []
        self._done = 0
        self._copying = False
        self._over = False  # no layer will be begun any more
        self._error: BaseException | None = None

    @classmethod
    def of(
        cls,
        plan: RestorePlan,
        slots: KVSlots,
        clock: Callable[[], float],
        trace: Trace | None,
        session: int,
    ) -> LayerTail | None:
        """Return the copy of a plan's host tail; None if it has none."""
        blocks = host_tail(plan)
        names = [BlockId(plan.namespace, plan.hashes[block]) for block in blocks]
        return cls(slots, blocks, names, clock, trace, session) if blocks else None

    @property
    def layer_bytes(self) -> Sequence[int]:
        """What each layer takes, in bytes over all blocks."""
        return [nbytes * len(self.blocks) for nbytes in self._slots.layout.part_bytes]

    def copy(self, layer: int, payloads: Sequence[memoryview]) -> bool:
        """Copy one layer, the next one; False if nothing more is to be copied. Blocks.

        What the slots raise is kept for those who wait.
        """
        with self._changed:
            if self._over:
                return False
            self._copying = True
        try:
            self._copy(layer, payloads)
        except Exception as error:  # noqa: BLE001 - the engine's code is not ours to trust
            self._error = error
        with self._changed:
            self._copying = False
            self._done += self._error is None
            self._over |= self._error is not None or self._done == len(self.layer_bytes)
            self._changed.notify_all()
            return not self._over

    def _copy(self, layer: int, payloads: Sequence[memoryview]) -> None:
        begun = self._clock()
        if not self._copies:
            self._copies = [
                layer_copies(self._slots, block, payload)
                for block, payload in zip(self.blocks, payloads, strict=True)
            ]
        for copy in self._copies:
            copy(layer)
        ended = self._clock()
        if layer == len(self.layer_bytes) - 1:
            self.ended_s = ended
        if self._trace is not None:
            self._trace.add(
                "copy", "host", begun, ended, session=self._session,
                start=self.blocks.start, stop=self.blocks.stop, nbytes=self.layer_bytes[layer],
            )  # fmt: skip

    def wait(self, layer: int, timeout: float) -> bool:
        """Wait for a layer of all blocks; False if ``timeout`` seconds pass, or it never comes.

        Raises what the engine's slots raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done > layer or self._over, timeout)
            if self._done <= layer and self._error is not None:
                raise self._error
            return self._done > layer

    def stop(self, timeout: float) -> bool:
        """Begin no layer any more; whether nothing writes to the slots once this returns."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self.stopped()
        with self._changed:
            return self._changed.wait_for(lambda: not self._copying, timeout)

    def end(self, timeout: float, *, cancel: bool) -> None:
        """Let the copy end, or cut it short; nothing writes to the slots afterwards.

        Raises ``StoreFailed`` if a layer's copy does not end in ``timeout`` seconds.
        """
        if not cancel:
            self.wait(len(self.layer_bytes) - 1, timeout)
        if not self.stop(timeout):
            raise StoreFailed(f"a copy into the slots did not end in {timeout:.0f} s")
