"""What changed in the residency lately, for whoever mirrors it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plan import Tier

__all__ = ["CHANGES_KEPT", "BlockTiers", "CatalogChanges", "ChangeLog"]

CHANGES_KEPT: Final = 1 << 16
"""Changes that are remembered; a follower that is further behind takes a snapshot."""

BlockTiers = tuple[bytes, bytes, "tuple[Tier, ...]"]
"""(namespace, block hash, tiers in which the block is READY, fastest first)."""


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """The blocks whose tiers changed up to ``sequence``, each once, as they are now.

    ``complete`` if they are all blocks that are READY anywhere, and not only what changed.
    """

    sequence: int
    blocks: tuple[BlockTiers, ...]
    complete: bool = False


class ChangeLog:
    """The last ``kept`` changes, numbered from ``first``; its owner locks.

    Entries name blocks, not rows: a row may hold another block by the time it is asked for. A later
    log of the same store must start above this one's numbers, or a follower would be misled.
    """

    def __init__(self, kept: int, first: int = 0) -> None:
        self.sequence = first
        self._last: deque[BlockTiers] = deque(maxlen=kept)

    def add(self, change: BlockTiers) -> None:
        """Note a block's new tiers."""
        self.add_all((change,))

    def add_all(self, changes: Sequence[BlockTiers]) -> None:
        """Note the new tiers of blocks, in order."""
        self.sequence += len(changes)
        self._last.extend(changes)

    def cut(self) -> None:
        """Note a change too large to be listed: who has not seen it needs a snapshot."""
        self.sequence += 1
        self._last.clear()

    def since(self, sequence: int) -> CatalogChanges | None:
        """Return what changed after ``sequence``; None if that is not known any more, or yet."""
        behind = self.sequence - sequence
        if not 0 <= behind <= len(self._last):
            return None
        folded: dict[tuple[bytes, bytes], BlockTiers] = {}
        for change in islice(reversed(self._last), behind):
            folded.setdefault(change[:2], change)
        return CatalogChanges(self.sequence, tuple(reversed(folded.values())))
