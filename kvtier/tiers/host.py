"""Host memory: one arena of fixed slots, pinned when a GPU will copy from it.

The arena is one anonymous mapping, so pages are taken only when first written. Slots are whole
pages, so direct I/O can read into them.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from kvtier.errors import StoreClosed
from kvtier.tiers.arena import PIN_PIECE_BYTES_MAX, Arena
from kvtier.tiers.base import BlockId, Location, ReadResult, Record, Usage
from kvtier.tiers.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.arena import CudaRuntime

__all__ = ["HostTier", "host_slot_bytes"]


def host_slot_bytes(block_bytes: int) -> int:
    """Return what one block takes in the arena: whole pages."""
    return -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class HostTier:
    """``slots`` fixed slots of ``block_bytes`` each; thread-safe.

    ``slots`` may exceed what ``limit_bytes`` (the tier's budget) holds: the rest is staging for
    copies in flight. Two ways in: ``write``/``read`` copy whole blocks, and ``reserve``/``buffer``/
    ``release`` hand out a slot for somebody else to fill in place. ``runtime`` pins memory for a
    GPU, ``piece_bytes_max`` at a time.
    """

    def __init__(
        self,
        block_bytes: int,
        slots: int,
        limit_bytes: int,
        runtime: CudaRuntime | None = None,
        *,
        piece_bytes_max: int = PIN_PIECE_BYTES_MAX,
    ) -> None:
        self._block_bytes = block_bytes
        self._slot_bytes = host_slot_bytes(block_bytes)
        self._limit_bytes = limit_bytes
        self._arena = Arena(self._slot_bytes, slots, runtime, piece_bytes_max=piece_bytes_max)
        self._slots = SlotTable("host", slots)
        self._closed = False

    def reserve(self) -> int | None:
        """Take the lowest free slot, or None if there is none."""
        return self._slots.reserve()

    def buffer(self, slot: int) -> memoryview:
        """Return the payload bytes of a slot that is taken.

        The first one of a piece waits until it is pinned: call it on a lane, with no lock held.
        """
        if self._closed:
            raise StoreClosed("the store was closed, and its host memory given back")
        self._slots.require(slot)
        return self._arena.slot(slot)[: self._block_bytes]

    def label(self, slot: int, block: BlockId) -> None:
        """Say whose bytes a reserved slot now holds."""
        self._slots.label(slot, block)

    def release(self, slot: int) -> None:
        """Give a slot back; giving one back twice raises ``ValueError``."""
        self._slots.release(slot)

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store blocks."""
        locations: list[Location | None] = []
        for record, payload in zip(records, payloads, strict=True):
            fits = payload.nbytes == self._block_bytes == record.payload_bytes
            slot = self.reserve() if fits else None
            if slot is None:
                locations.append(None)
                continue
            self.buffer(slot)[:] = payload
            self.label(slot, record.id)
            locations.append(Location(0, slot, self._slot_bytes))
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
            here = self._slots.holds(location.slot, block)
            if here:
                target[:] = self.buffer(location.slot)
            found.append(ReadResult.OK if here else ReadResult.GONE)
        return found

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Forget blocks."""
        for block, location in zip(ids, locations, strict=True):
            self._slots.forget(location.slot, block)

    def usage(self) -> Usage:
        """Return how full the tier is, staging included."""
        taken = len(self._slots)
        return Usage(taken, taken * self._slot_bytes, self._limit_bytes)

    def pinning(self) -> dict[str, int]:
        """Return how many bytes a GPU copies from directly, and how many could not be pinned."""
        return {
            "pinned_bytes": self._arena.pinned_bytes,
            "pin_failed_bytes": self._arena.pin_failed_bytes,
        }

    def check(self) -> list[str]:
        """Return what is wrong with the free list, in words."""
        return self._slots.check()

    def close(self) -> None:
        """Unpin and unmap the arena; idempotent. Views still held keep the memory, not the tier."""
        self._closed = True
        self._arena.close()
