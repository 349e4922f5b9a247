"""Which of a tier's equal slots are taken, and whose bytes each holds."""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tiers.base import BlockId

__all__ = ["SlotTable"]


class SlotTable:
    """``count`` slots, the lowest free one taken first; thread-safe.

    Low slots first, so that memory above the highest number ever in use at once stays untouched.
    A slot is taken for nobody, and holds a block once it is labelled. ``tier`` is for messages.
    """

    def __init__(self, tier: str, count: int) -> None:
        self._tier = tier
        self._count = count
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        self._untouched = 0  # slots from here on were never taken
        self._free: list[int] = []  # a heap of those before it
        self._ids: dict[int, BlockId | None] = {}

    def __len__(self) -> int:
        """Return how many slots are taken."""
        with self._lock:
            return len(self._ids)

    def reserve(self) -> int | None:
        """Take the lowest free slot, or None if there is none."""
        with self._lock:
            if self._free:
                slot = heapq.heappop(self._free)
            elif self._untouched < self._count:
                slot = self._untouched
                self._untouched += 1
            else:
                return None
            self._ids[slot] = None
            return slot

    def label(self, slot: int, block: BlockId) -> None:
        """Say whose bytes a slot now holds; ``ValueError`` if it is not taken."""
        with self._lock:
            self._require(slot)
            self._ids[slot] = block

    def require(self, slot: int) -> None:
        """Raise ``ValueError`` unless a slot is taken."""
        with self._lock:
            self._require(slot)

    def holds(self, slot: int, block: BlockId) -> bool:
        """Whether a slot holds this block's bytes."""
        with self._lock:
            return self._ids.get(slot) == block

    def release(self, slot: int) -> None:
        """Give a slot back; giving one back twice raises ``ValueError``."""
        with self._lock:
            if slot not in self._ids:
                raise ValueError(f"{self._tier} slot {slot} given back twice")
            self._give_back(slot)

    def forget(self, slot: int, block: BlockId) -> None:
        """Give a slot back if it holds this block."""
        with self._lock:
            if self._ids.get(slot) == block:
                self._give_back(slot)

    def check(self) -> list[str]:
        """Return what is wrong with the free list, in words."""
        with self._lock:
            known, touched = sorted([*self._free, *self._ids]), self._untouched
        if known != list(range(touched)) or touched > self._count:
            return [f"{self._tier}: {len(known)} slots accounted for, {touched} were taken"]
        return []

    # -- inside, with the lock

    def _require(self, slot: int) -> None:
        if slot not in self._ids:
            raise ValueError(f"{self._tier} slot {slot} is not taken")

    def _give_back(self, slot: int) -> None:
        del self._ids[slot]
        heapq.heappush(self._free, slot)
