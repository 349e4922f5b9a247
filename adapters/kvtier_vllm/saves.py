"""Blocks on their way into the stores: numbered, held, and let go when every rank has let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier_vllm.messages import Save
from kvtier_vllm.tracked import confirmed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier import BlockKeys, Tier
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

    def order_missing(
        self,
        keys: BlockKeys,
        blocks: range,
        tiers: Sequence[Tier | None],
        pages: Sequence[int],
        pages_per_block: int,
    ) -> int:
        """Save those of ``blocks`` that are in no tier and not on their way.

        ``pages``: the request's, from its first token on. Returns the block before which nothing is
        left to do, which is not the last one while too many pages are held.
        """
        wanted = [
            block
            for block, tier in zip(blocks, tiers, strict=True)
            if tier is None and keys.hashes[block] not in self._under_way
        ]
        for start, stop in _runs(wanted):
            if not self._room((stop - start) * pages_per_block):
                return start
            mine = pages[start * pages_per_block : stop * pages_per_block]
            self.order(confirmed(keys, stop), start, stop, mine)
        return blocks.stop

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

    def _room(self, pages: int) -> bool:
        """Whether so many more pages may be held; however few there are, one save may be."""
        limit = self._holds.engine.count * SAVE_PAGES_SHARE_MAX
        return not self._waiting or self._holds.pages(SAVE) + pages <= limit

    def _end(self, number: int) -> int:
        del self._waiting[number]
        hashes = self._hashes.pop(number)
        self._under_way.difference_update(hashes)
        self._holds.drop(SAVE, number)
        return len(hashes)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive blocks as (first, last + 1)."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[start], blocks[index - 1] + 1
            start = index
