"""Host memory: one arena of fixed slots, pinned when a GPU will copy from it.

The arena is one anonymous mapping, so pages are taken only when first written. Slots are whole
pages, so direct I/O can read into them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreClosed
from kvtier.tiers.base import BlockId, Location, ReadResult, Record, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HostTier", "host_slot_bytes"]

log = logging.getLogger(__name__)

_WIPE_ON_FORK: Final = 18
"""MADV_WIPEONFORK: a forked child has no use for the arena, and must not make the parent's writes,
the disk's among them, go to copies of its pages."""


def host_slot_bytes(block_bytes: int) -> int:
    """Return what one block takes in the arena: whole pages."""
    return -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class HostTier:
    """``slots`` fixed slots of ``block_bytes`` each; thread-safe.

    ``slots`` may exceed what ``limit_bytes`` (the tier's budget) holds: the rest is staging for
    copies in flight. Two ways in: ``write``/``read`` copy whole blocks, and ``reserve``/``buffer``/
    ``release`` hand out a slot for somebody else to fill in place.
    """

    def __init__(self, block_bytes: int, slots: int, limit_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._slot_bytes = host_slot_bytes(block_bytes)
        self._slots = slots
        self._limit_bytes = limit_bytes
        self._map = _arena(max(slots, 1) * self._slot_bytes)
        self._view = memoryview(self._map)
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        self._free = list(range(slots - 1, -1, -1))
        self._ids: dict[int, BlockId | None] = {}
        self._closed = False
        self.pinned = _pin(self._map)

    def reserve(self) -> int | None:
        """Take a free slot, or None if there is none."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._ids[slot] = None
            return slot

    def buffer(self, slot: int) -> memoryview:
        """Return the payload bytes of a slot that is taken."""
        with self._lock:
            if self._closed:
                raise StoreClosed("the store was closed, and its host memory given back")
            if slot not in self._ids:
                raise ValueError(f"host slot {slot} is not taken")
        start = slot * self._slot_bytes
        return self._view[start : start + self._block_bytes]

    def label(self, slot: int, block: BlockId) -> None:
        """Say whose bytes a reserved slot now holds."""
        with self._lock:
            if slot not in self._ids:
                raise ValueError(f"host slot {slot} is not taken")
            self._ids[slot] = block

    def release(self, slot: int) -> None:
        """Give a slot back; giving one back twice raises ``ValueError``."""
        with self._lock:
            if slot not in self._ids:
                raise ValueError(f"host slot {slot} given back twice")
            del self._ids[slot]
            self._free.append(slot)

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
            with self._lock:
                here = self._ids.get(location.slot) == block
            if here:
                target[:] = self.buffer(location.slot)
            found.append(ReadResult.OK if here else ReadResult.GONE)
        return found

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Forget blocks."""
        for block, location in zip(ids, locations, strict=True):
            with self._lock:
                here = self._ids.get(location.slot) == block
            if here:
                self.release(location.slot)

    def usage(self) -> Usage:
        """Return how full the tier is, staging included."""
        with self._lock:
            taken = len(self._ids)
        return Usage(taken, taken * self._slot_bytes, self._limit_bytes)

    def check(self) -> list[str]:
        """Return what is wrong with the free list, in words."""
        with self._lock:
            everything = sorted([*self._free, *self._ids])
        if everything != list(range(self._slots)):
            return [f"host: {len(everything)} slots accounted for, the arena has {self._slots}"]
        return []

    def close(self) -> None:
        """Unmap the arena; idempotent. Views still held keep the memory, not the tier."""
        if self._closed:
            return
        self._closed = True
        if self.pinned:
            _unpin(self._map)
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("host arena is still viewed; it is freed with the last view")


def _arena(nbytes: int) -> mmap.mmap:
    """Return memory in huge pages: direct I/O into small ones is up to twice as slow."""
    # A shared mapping, which is what mmap makes by default, gets none.
    arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
        with suppress(OSError):
            arena.madvise(advice)
    return arena


def _cuda_runtime() -> object | None:
    # Pinning serves a GPU; whoever has one has imported torch by now.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    runtime: object = torch.cuda.cudart()
    return runtime


def _address(arena: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(arena))


def _pin(arena: mmap.mmap) -> bool:
    """Register the arena with CUDA. Not exercised without a GPU."""
    runtime = _cuda_runtime()
    if runtime is None:
        return False
    error = runtime.cudaHostRegister(_address(arena), len(arena), 0)  # type: ignore[attr-defined]
    if int(error) != 0:
        log.warning(
            "host_bytes: pinning %d bytes failed (CUDA error %d); copies use pageable memory",
            len(arena),
            int(error),
        )
        return False
    return True


def _unpin(arena: mmap.mmap) -> None:
    runtime = _cuda_runtime()
    if runtime is not None:
        runtime.cudaHostUnregister(_address(arena))  # type: ignore[attr-defined]
