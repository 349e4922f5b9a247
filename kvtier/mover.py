"""Host slots, and the way from the SSD into them.

Host memory is the gateway: SSD and engine never exchange bytes directly. Everything here blocks and
runs on somebody's lane, never on the caller's thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Location, ReadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.metrics import Metrics
    from kvtier.tiers.host import HostTier

__all__ = ["BlockReads", "Mover"]

log = logging.getLogger(__name__)


class BlockReads(Protocol):
    """The SSD's blocks, for whoever only reads them."""

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Fetch blocks; GONE only if no later read of that location can succeed."""


class Mover:
    """Owns the use of host slots: the catalog says what is allowed, the tiers hold the bytes.

    ``forget`` is told of records that turned out damaged, with the catalog's lock held.
    """

    def __init__(
        self,
        catalog: Catalog,
        host: HostTier,
        ssd: BlockReads,
        metrics: Metrics,
        *,
        host_blocks_max: int,
        slot_wait_s_max: float,
        forget: Callable[[BlockId, Location], None],
    ) -> None:
        self._catalog = catalog
        self._host = host
        self._ssd = ssd
        self._metrics = metrics
        self._host_blocks_max = host_blocks_max
        self._slot_wait_s_max = slot_wait_s_max
        self._forget = forget

    # -- host slots

    def take_slot(self) -> int | None:
        """Take a host slot, evicting if needed; None after ``slot_wait_s_max``.

        Waits without polling: whatever frees or unpins a host copy wakes it.
        """
        deadline = time.monotonic() + self._slot_wait_s_max
        changed = self._catalog.changed
        with changed:
            while True:
                slot = self._host.reserve()
                if slot is not None:
                    return slot
                if self._evict_host(1):
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or not changed.wait(left):
                    return None

    def trim(self) -> None:
        """Evict host copies beyond the budget; staging slots are only for copies in flight."""
        with self._catalog.changed:
            over = self._catalog.ready(Tier.HOST) - self._host_blocks_max
            if over > 0:
                self._evict_host(over)

    def unpin_host(self, row: int) -> None:
        """Undo one pin of a host copy and give back what is over the budget."""
        with self._catalog.changed:
            self._catalog.unpin(row, Tier.HOST)
            self.trim()

    def fill(self, row: int, block: BlockId, slot: int) -> None:
        """Make a slot that was filled the block's READY host copy, pinned once."""
        self._host.label(slot, block)
        self._catalog.commit(row, Tier.HOST, Location(0, slot, 0), pinned=True)

    def slot_buffer(self, slot: int) -> memoryview:
        """Return the bytes of a slot that was taken."""
        return self._host.buffer(slot)

    def free_slot(self, slot: int) -> None:
        """Give back a slot that never became a copy."""
        with self._catalog.changed:
            self._host.release(slot)
            self._catalog.changed.notify_all()

    def _evict_host(self, count: int) -> int:
        rows = self._catalog.evict(Tier.HOST, count)
        self._drop_host(rows)
        self._metrics.add("evicted_blocks_host", len(rows))
        return len(rows)

    def purge_host(self, select: Callable[[], Sequence[int]]) -> list[BlockId]:
        """Drop the host copies of the rows that ``select`` returns, except pinned ones."""
        with self._catalog.changed:
            rows = self._catalog.take_out(select(), Tier.HOST)
            blocks = [self._catalog.id(row) for row in rows]
            self._drop_host(rows)
        return blocks

    def _drop_host(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._host.release(self._catalog.location(row, Tier.HOST).slot)
            self._catalog.end(row, Tier.HOST, "evicted")

    def payload(self, row: int) -> memoryview:
        """Return the bytes of a pinned host copy."""
        return self._host.buffer(self._catalog.location(row, Tier.HOST).slot)

    # -- loads: called on a read lane

    def load(self, row: int) -> ReadResult:
        """Read a block from the SSD into a host slot.

        The row is LOADING in host and pinned on the SSD; OK leaves its host copy READY and pinned.
        """
        slot = self.take_slot()
        if slot is None:
            log.warning("no host slot became free in %.0f s", self._slot_wait_s_max)
            self._catalog.end(row, Tier.HOST, "abort")
            return ReadResult.FAILED
        block = self._catalog.id(row)
        where = self._catalog.location(row, Tier.SSD)
        target = self._host.buffer(slot)
        result = ReadResult.FAILED
        try:
            (result,) = self._ssd.read([block], [where], [target])
        finally:
            if result is not ReadResult.OK:
                self.free_slot(slot)
                self._catalog.end(row, Tier.HOST, "abort")
        if result is ReadResult.OK:
            self.fill(row, block, slot)
            self._metrics.add("ssd_read_blocks")
            self._metrics.add("ssd_read_bytes", target.nbytes)
        elif result is ReadResult.GONE:
            self._metrics.add("damaged_blocks")
            # One step: a put of the same block must not come between, or its record would go too.
            with self._catalog.changed:
                if self._catalog.places(block.namespace, [block.hash]) == [where]:
                    self._catalog.end(row, Tier.SSD, "drop")
                    self._forget(block, where)
        return result
