"""Device memory that kvtier owns: block slots in one tensor, apart from the engine's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.tiers.base import BlockId, Location, ReadResult, Record, Usage
from kvtier.tiers.device import copy_block, fill_bytes, read_bytes
from kvtier.tiers.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvtier.tiers.device import KVSlots

__all__ = ["DevicePool", "device_slot_bytes"]

ALIGN_BYTES: Final = 256
"""Slots begin where a GPU's copies are fastest, and where values of any width may lie."""


def device_slot_bytes(block_bytes: int) -> int:
    """Return what one block takes in the pool."""
    return -(-block_bytes // ALIGN_BYTES) * ALIGN_BYTES


class DevicePool:
    """As many slots for payloads of ``block_bytes`` as ``limit_bytes`` hold; thread-safe.

    ``device`` is torch's name of where they are, "cuda:0" or "cpu"; without room for a block it is
    not looked at. Two ways in: ``write``/``read`` copy whole blocks, and ``reserve``/``fill``/
    ``copy_out``/``release`` serve whoever keeps the books. Raises ``ValueError`` naming the setting
    if there is no such device or not so much memory on it.
    """

    def __init__(self, block_bytes: int, limit_bytes: int, device: str) -> None:
        self._block_bytes = block_bytes
        self._slot_bytes = device_slot_bytes(block_bytes)
        self._limit_bytes = limit_bytes
        self.slots = limit_bytes // self._slot_bytes
        self._rows = _rows(self.slots, self._slot_bytes, device) if self.slots else None
        self._table = SlotTable("device", self.slots)

    def reserve(self) -> int | None:
        """Take the lowest free slot, or None if there is none."""
        return self._table.reserve()

    def fill(self, slot: int, block: BlockId, payload: memoryview) -> None:
        """Copy a payload into a slot that is taken and make it that block's; returns when done."""
        if self._rows is None:
            raise ValueError("the device pool is closed")
        fill_bytes(self._rows[slot, : self._block_bytes], payload)
        self._table.label(slot, block)

    def copy_out(self, slot: int, block: BlockId, slots: KVSlots, position: int) -> bool:
        """Copy a block into an engine's slots, as ``copy_block`` does; False if it is not here."""
        row = self._row(slot, block)
        if row is None:
            return False
        copy_block(slots, position, row)
        return True

    def _row(self, slot: int, block: BlockId) -> torch.Tensor | None:
        rows = self._rows
        if rows is None or not self._table.holds(slot, block):
            return None
        return rows[slot, : self._block_bytes]

    def release(self, slot: int) -> None:
        """Give a slot back; giving one back twice raises ``ValueError``."""
        self._table.release(slot)

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store blocks."""
        locations: list[Location | None] = []
        for record, payload in zip(records, payloads, strict=True):
            fits = payload.nbytes == self._block_bytes == record.payload_bytes
            slot = self.reserve() if fits else None
            if slot is not None:
                self.fill(slot, record.id, payload)
            locations.append(None if slot is None else Location(0, slot, self._slot_bytes))
        return locations

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Fetch blocks into buffers of their payload's size."""
        found = []
        for block, location, target in zip(ids, locations, into, strict=True):
            row = self._row(location.slot, block)
            if row is not None:
                read_bytes(row, target)
            found.append(ReadResult.GONE if row is None else ReadResult.OK)
        return found

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Forget blocks."""
        for block, location in zip(ids, locations, strict=True):
            self._table.forget(location.slot, block)

    def usage(self) -> Usage:
        """Return how full the pool is."""
        taken = len(self._table)
        return Usage(taken, taken * self._slot_bytes, self._limit_bytes)

    def check(self) -> list[str]:
        """Return what is wrong with the free list, in words."""
        return self._table.check()

    def close(self) -> None:
        """Let the tensor go; idempotent. Rows still held keep the memory, not the pool."""
        self._rows = None


def _rows(slots: int, slot_bytes: int, device: str) -> torch.Tensor:
    import torch

    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: {device!r} is no device of torch ('cpu', 'cuda:0', ...), which device_bytes "
            f"needs: {error}"
        ) from error
    try:
        # Pages of CPU memory are taken when they are first written.
        return torch.empty((slots, slot_bytes), dtype=torch.uint8, device=where)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise ValueError(
            f"device_bytes: {slots * slot_bytes} bytes cannot be had on {device}; free some there "
            f"or set a smaller device_bytes: {error}"
        ) from error
