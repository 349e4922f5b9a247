"""Device slots that kvtier owns: from host memory into them, and out into the engine's.

A promotion is a hint: it evicts what was used least recently on the device, waits for nobody and
may decline. What is on the device is copied, device to device, when a restore begins.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier.catalog import CopyState
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.device import wait_for_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.metrics import Metrics
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.device_pool import DevicePool

__all__ = ["Promoter"]

log = logging.getLogger(__name__)


class Promoter:
    """Owns the use of device slots: the catalog says what is allowed, the pool holds the bytes.

    A slot is taken and given back under the catalog's lock, together with its copy's state, so that
    the books of both agree whenever nobody holds it.
    """

    def __init__(self, catalog: Catalog, pool: DevicePool, metrics: Metrics) -> None:
        self._catalog = catalog
        self._pool = pool
        self._metrics = metrics
        self._filling = 0  # copies that are LOADING; under the catalog's lock
        self.blocks_max = pool.slots

    def promote(self, row: int, payload: memoryview) -> bool:
        """Copy a block to the device, on a copy lane; the caller has pinned its host copy.

        Returns whether it is there now: not if all slots are pinned, or the device refuses.
        """
        with self._catalog.changed:
            state = self._catalog.state(row, Tier.DEVICE)
            if state is not CopyState.ABSENT:
                return state is CopyState.READY
            slot = self._take_slot()
            if slot is None:
                return False
            block = self._catalog.id(row)
            self._catalog.begin(block, Tier.DEVICE, "load")
            self._filling += 1
        filled = False
        try:
            self._pool.fill(slot, block, payload)
            filled = True
        except Exception as error:  # noqa: BLE001 - a device that fails costs a hint, not the store
            log.warning("a block could not be copied to the device: %s", error)
            self._metrics.add("device_write_errors")
        finally:
            self._settle(row, slot, filled=filled)
        return filled

    def place(self, blocks: Iterable[tuple[int, BlockId]], slots: KVSlots) -> list[int]:
        """Copy pinned device copies into the engine's slots; returns the blocks that are in place.

        Runs on the caller's thread, on CUDA in its current stream, after what the engine has queued
        there, and waits for the copies. Raises what the engine's slots raise; nothing writes to
        them then either.
        """
        placed: list[int] = []
        try:
            for position, block in blocks:
                slot = self._slot(block)
                if slot is not None and self._pool.copy_out(slot, block, slots, position):
                    placed.append(position)
        finally:
            if placed:
                wait_for_copies(slots.device)
        self._metrics.add("loaded_blocks_device", len(placed))
        self._metrics.add("loaded_bytes_device", len(placed) * slots.layout.block_bytes)
        return placed

    def purge(self, select: Callable[[], Sequence[int]]) -> list[BlockId]:
        """Drop the device copies of the rows that ``select`` returns, except pinned ones."""
        with self._catalog.changed:
            rows = self._catalog.take_out(select(), Tier.DEVICE)
            blocks = [self._catalog.id(row) for row in rows]
            self._drop(rows)
        return blocks

    def check(self) -> list[str]:
        """Return what is wrong with the pool's books, in words."""
        with self._catalog.changed:
            taken, known = self._pool.usage().blocks, self._catalog.ready(Tier.DEVICE)
            problems = self._pool.check()
            if taken != known + self._filling:
                problems.append(
                    f"device: {taken} slots taken, {known} blocks ready and {self._filling} loading"
                )
        return problems

    # -- inside

    def _take_slot(self) -> int | None:
        """Take a slot, evicting if needed; the catalog's lock is held."""
        slot = self._pool.reserve()
        if slot is not None:
            return slot
        rows = self._catalog.evict(Tier.DEVICE, 1)
        self._drop(rows)
        self._metrics.add("evicted_blocks_device", len(rows))
        return self._pool.reserve()

    def _drop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._pool.release(self._catalog.location(row, Tier.DEVICE).slot)
            self._catalog.end(row, Tier.DEVICE, "evicted")

    def _settle(self, row: int, slot: int, *, filled: bool) -> None:
        """Make a copy READY, or give its slot back."""
        with self._catalog.changed:
            self._filling -= 1
            if filled:
                self._catalog.commit(row, Tier.DEVICE, Location(0, slot, 0))
            else:
                self._pool.release(slot)
                self._catalog.end(row, Tier.DEVICE, "abort")
        if filled:
            self._metrics.add("device_written_blocks")

    def _slot(self, block: BlockId) -> int | None:
        with self._catalog.changed:
            row = self._catalog.find(block)
            if row is None or self._catalog.state(row, Tier.DEVICE) is not CopyState.READY:
                return None
            return self._catalog.location(row, Tier.DEVICE).slot
