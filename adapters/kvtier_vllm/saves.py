"""Blocks on their way into the stores: numbered, held, and let go when every rank has let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier_vllm.messages import Save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier import BlockKeys
    from kvtier_vllm.holds import Holds

__all__ = ["SAVE_PAGES_SHARE_MAX", "Saves"]

SAVE_PAGES_SHARE_MAX: Final = 0.25
"""The part of the engine's pages that saves may hold; what comes on top is saved later, or not."""
SAVE = "save"


class Saves:
    """Saves from their order to the release of their pages; the scheduler's thread."""

    def __init__(self, holds: Holds, ranks: int, dropped: Callable[[int], None]) -> None:
        self._holds = holds
        self._ranks = ranks
        self._dropped = dropped
        self._next = 0
        self._queue: list[Save] = []
        self._waiting: dict[int, set[int]] = {}
        self._hashes: dict[int, tuple[bytes, ...]] = {}
        self._under_way: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def under_way(self, digest: bytes) -> bool:
        """Whether the block is on its way already."""
        return digest in self._under_way

    def room(self, pages: int) -> bool:
        """Whether so many more pages may be held; however few there are, one save may be."""
        limit = self._holds.engine.count * SAVE_PAGES_SHARE_MAX
        return not self._waiting or self._holds.pages(SAVE) + pages <= limit

    def order(self, keys: BlockKeys, start: int, stop: int, pages: Sequence[int]) -> None:
        """Save blocks [start, stop), which this step or an earlier one computes."""
        save = Save(self._next, keys, start, stop, tuple(pages))
        self._next += 1
        self._holds.take(SAVE, save.save, save.pages)
        self._waiting[save.save] = set(range(self._ranks))
        self._hashes[save.save] = keys.hashes[start:stop]
        self._under_way.update(self._hashes[save.save])
        self._queue.append(save)

    def take(self) -> tuple[Save, ...]:
        """Return what is to be ordered with this step."""
        queue, self._queue = tuple(self._queue), []
        return queue

    def released(self, rank: int, number: int) -> int:
        """Note that a rank is done with a save's pages; returns blocks that all are done with."""
        waiting = self._waiting.get(number)
        if waiting is None:
            return 0
        waiting.discard(rank)
        return 0 if waiting else self._end(number)

    def forget_queued(self) -> None:
        """Give up what no rank was told of yet."""
        for save in self.take():
            self._dropped(self._end(save.save))

    def _end(self, number: int) -> int:
        del self._waiting[number]
        hashes = self._hashes.pop(number)
        self._under_way.difference_update(hashes)
        self._holds.drop(SAVE, number)
        return len(hashes)
