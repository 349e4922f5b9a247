"""The room on the SSD: who is evicted for whom, and which writes of a batch get a slot."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.catalog import Catalog
    from kvtier.metrics import Metrics
    from kvtier.tiers.base import BlockId, Location, Record
    from kvtier.tiers.ssd import SsdTier
    from kvtier.write_rule import PendingWrite

__all__ = ["SsdRoom"]

log = logging.getLogger(__name__)

FULL_INDEX_BLOCKS: Final = 8
"""Blocks evicted for each batch that meets a full index: removing many at once needs room in it."""
AHEAD_BLOCKS_MAX: Final = 128
"""Room that a full store keeps ahead of its writes, so that evictions share their commits."""
AHEAD_SHARE: Final = 8
"""That room is at most one in so many of the blocks stored."""
PLACE_TRIES: Final = 2
"""How often room is made for a batch before what has none is declined."""


class SsdRoom:
    """Makes room for the writer's lanes, which alone call it; evictions are committed here."""

    def __init__(self, catalog: Catalog, ssd: SsdTier, metrics: Metrics) -> None:
        self._catalog = catalog
        self._ssd = ssd
        self._metrics = metrics
        self._full = False  # writes have had to evict: some room is kept ahead of them

    def at_once(self, record: Record, count: int) -> int:
        """Return how many of ``count`` writes to begin, of which ``record`` is the first."""
        if not self._full:
            return count
        # Rather a few blocks at once than a wait for an eviction of its own.
        return min(count, max(self._ssd.room(self._ssd.slot_bytes(record)), 1))

    def place(self, writes: Sequence[PendingWrite]) -> list[Location | None]:
        """Take a slot for each write, or for the most valuable if there is no room for all."""
        records = [write.record for write in writes]
        size = self._ssd.slot_bytes(records[0])
        self._make_room(size, len(records))
        left = self._chosen_first(writes, self._ssd.room(size))
        places: list[Location | None] = [None] * len(writes)
        for _ in range(PLACE_TRIES):
            for at, where in zip(left, self._ssd.place([records[at] for at in left]), strict=True):
                places[at] = where
            left = [at for at in left if places[at] is None]
            if not left:
                break
            # The index grew meanwhile and took the room of fresh slots: evicted ones are enough.
            self._make_room(size, len(left))
        return places

    def is_full(self, size: int, ahead: int) -> bool:
        """Whether a write after ``ahead`` others takes room that an eviction made, or must make."""
        room = self._ssd.room(size)
        # What was made counted what has gone for it: the share is one of all that there was.
        there = self._catalog.ready(Tier.SSD) + room
        return room - ahead <= (_ahead_of(there) if self._full else 0)

    def victims_ahead(self, size: int) -> list[int]:
        """Take out blocks whose room the next writes of a full store want, with this commit."""
        missing = self._ahead() - self._ssd.room(size) if self._full else 0
        return self._catalog.evict(Tier.SSD, missing) if missing > 0 else []

    def made(self, rows: list[int], size: int, *, committed: bool) -> None:
        """Settle ``victims_ahead``, of a commit that went well or not."""
        self._end(rows, "evicted" if committed else "keep")
        if rows:
            self._ssd.reclaim(size, self._ahead())

    def remove(self, rows: list[int], why: str) -> list[int]:
        """Drop rows that are EVICTING; returns them, or none if the index refused."""
        if not rows:
            return rows
        gone = [(self._catalog.id(row), self._catalog.location(row, Tier.SSD)) for row in rows]
        done = self.drop(gone)
        self._end(rows, why if done else "keep")
        return rows if done else []

    def drop(self, gone: Sequence[tuple[BlockId, Location]]) -> bool:
        """Take records out of the index; returns whether it did."""
        try:
            self._ssd.drop([block for block, _ in gone], [where for _, where in gone])
        except OSError as error:
            self._metrics.add("ssd_write_errors")
            log.warning("%d blocks could not be taken out of the index: %s", len(gone), error)
            return False
        return True

    # -- inside

    def _chosen_first(self, writes: Sequence[PendingWrite], room: int) -> list[int]:
        """Return the indexes of writes, those first that get the room, in the order of a prompt.

        The most valuable do; but tails are of no use to callers of contiguous prefixes.
        """
        order = list(range(len(writes)))
        if room >= len(writes) or self._catalog.contiguous:
            return order
        values = self._catalog.values([write.row for write in writes])
        order.sort(key=lambda at: (writes[at].record.priority, values[at]), reverse=True)
        return sorted(order[:room]) + order[room:]

    def _make_room(self, size: int, count: int) -> None:
        """Evict, least valuable first, until ``count`` records of a slot size fit, if they can.

        Slots of that size are reused in place; those of others give their disk back, one by one or
        by whole segments.
        """
        if self._ssd.index_full:
            self._evict(FULL_INDEX_BLOCKS)
        while self._ssd.over_limit():
            self._ssd.trim()
            if self._ssd.over_limit() and not self._evict(1):
                break
        self._ssd.reclaim(size, count)
        if self._ssd.room(size) < count:
            self._full = True
            self._evict(self._ahead())
            self._ssd.reclaim(size, count)
        while (missing := count - self._ssd.room(size)) > 0 and self._evict(missing):
            self._ssd.reclaim(size, count)

    def _evict(self, count: int) -> int:
        """Evict up to ``count`` blocks; returns how many went."""
        return len(self.remove(self._catalog.evict(Tier.SSD, count), "evicted"))

    def _end(self, rows: list[int], how: str) -> None:
        """Settle rows that are EVICTING: "evicted", "purged", or "keep" if the index refused."""
        for row in rows:
            self._catalog.end(row, Tier.SSD, "keep" if how == "keep" else "evicted")
        if how != "keep":
            self._metrics.add(f"{how}_blocks_ssd", len(rows))

    def _ahead(self) -> int:
        return _ahead_of(self._catalog.ready(Tier.SSD))


def _ahead_of(blocks: int) -> int:
    """Return the room that is kept ahead of writes where so many blocks are stored."""
    return min(blocks // AHEAD_SHARE, AHEAD_BLOCKS_MAX)
