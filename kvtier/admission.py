"""Which blocks are worth a write when the write budget is short: those that come a second time."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.tiers.base import BlockId

__all__ = ["SecondAccess"]

SEEN_BLOCKS_MAX: Final = 1 << 16
"""Blocks that are remembered without being stored."""


class SecondAccess:
    """Remembers the last ``limit`` blocks that were offered; its owner locks."""

    def __init__(self, limit: int = SEEN_BLOCKS_MAX) -> None:
        self._limit = limit
        self._seen: OrderedDict[BlockId, None] = OrderedDict()

    def admits(self, block: BlockId) -> bool:
        """Whether a block was offered before; remembers it if not."""
        if block in self._seen:
            del self._seen[block]
            return True
        self._seen[block] = None
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return False
