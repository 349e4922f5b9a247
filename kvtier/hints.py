"""What prefetches hold: blocks that are on their way, and blocks that arrived and are kept.

Pure books: who holds what, and how much of it there may be. Whoever reads and pins tells them what
happened and does what they say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvtier.read_queue import Urgency

__all__ = ["KEPT_AFTER_S", "Hint", "Hints"]

KEPT_AFTER_S: Final = 2.0
"""How long after its deadline what a prefetch brought is still kept for the restore, which may
start late."""

B = TypeVar("B", bound="Hashable")
H = TypeVar("H", bound="Hint[Any]")


@dataclass(slots=True, eq=False)
class Hint(Generic[B]):
    """One prefetch: what it waits for, and the catalog rows that it keeps in its tier.

    Without a deadline nothing is kept: the hint does not say for how long.
    """

    urgency: Urgency
    waiting: set[B] = field(default_factory=set)
    kept: dict[B, int] = field(default_factory=dict)
    found: int = 0

    @property
    def kept_until(self) -> float:
        """The instant from which nothing is kept any more."""
        deadline = self.urgency.deadline
        return -math.inf if deadline == math.inf else deadline + KEPT_AFTER_S


class Hints(Generic[B, H]):
    """The blocks that hints to one tier hold, ``blocks_max`` different ones; its owner locks."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._holders: dict[B, list[H]] = {}
        self._kept: dict[B, int] = {}  # how many hints keep a block

    @property
    def held(self) -> int:
        """Blocks that some hint holds: waiting, being read, or kept."""
        return len(self._holders)

    @property
    def kept(self) -> int:
        """Blocks that some hint keeps in its tier."""
        return len(self._kept)

    def has_room(self, block: B) -> bool:
        """Whether one more hint may hold a block."""
        return block in self._holders or self.held < self.blocks_max

    def hold(self, hint: H, block: B) -> bool:
        """Let a hint wait for a block; False if that would be more than there may be."""
        if not self.has_room(block):
            return False
        hint.waiting.add(block)
        self._holders.setdefault(block, []).append(hint)
        return True

    def keep(self, hint: H, block: B, row: int) -> None:
        """Say that a block that a hint waited for is in its tier, pinned for it in ``row``."""
        hint.waiting.remove(block)
        hint.kept[block] = row
        self._kept[block] = self._kept.get(block, 0) + 1

    def release(self, hint: H, block: B) -> int | None:
        """Let a hint go of a block; returns the row whose pin is to be undone, if it kept it."""
        hint.waiting.discard(block)
        row = hint.kept.pop(block, None)
        if row is not None:
            self._kept[block] -= 1
            if not self._kept[block]:
                del self._kept[block]
        holders = self._holders[block]
        holders.remove(hint)
        if not holders:
            del self._holders[block]
        return row

    def user(self, block: B) -> H | None:
        """Return the hint that lets go of a block when a restore takes it: the most urgent one."""
        if block not in self._kept:
            return None
        keeping = (hint for hint in self._holders[block] if block in hint.kept)
        return min(keeping, key=lambda hint: hint.urgency)

    def keeping(self) -> list[H]:
        """Return the hints that keep anything."""
        kept = {hint: None for block in self._kept for hint in self._holders[block] if hint.kept}
        return list(kept)
