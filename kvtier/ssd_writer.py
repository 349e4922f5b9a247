"""The only one who changes what the SSD holds: writes, evictions, damage, purges.

Two lanes make a group commit: the write lane makes room and starts writes, the commit lane makes
durable and visible whatever has been written by then, while the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.catalog import CopyState
from kvtier.lane import Lane
from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.tiers.base import BlockId, Location, Record
    from kvtier.tiers.ssd import SsdTier
    from kvtier.tiers.write_budget import WriteBudget

__all__ = ["PendingWrite", "Purged", "SsdWriter"]

log = logging.getLogger(__name__)

COMMIT_BATCHES_MAX: Final = 2
"""Blocks being written or waiting for their commit before the write lane waits, in batches."""
GROUP_BYTES_MIN: Final = 32 << 20
"""What a commit waits for, unless nothing is being written any more: a sync costs as much time."""
USES_PER_COMMIT_MAX: Final = 64
"""Blocks whose hits and last use go into one commit."""
FULL_INDEX_BLOCKS: Final = 8
"""Blocks evicted for each batch that meets a full index: removing many at once needs room in it."""
SHORT_USES_MIN: Final = 2
"""How often a block was asked for, its put included, before a short write budget goes to it."""
AHEAD_BLOCKS_MAX: Final = 128
"""Room that a full store keeps ahead of its writes, so that evictions share their commits."""
AHEAD_SHARE: Final = 8
"""That room is at most one in so many of the blocks stored."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """One block to write: its catalog row, whose host copy is pinned, and its record.

    ``done(where)`` is called once, on a lane: with its place, once that is durable, or None.
    """

    row: int
    record: Record
    done: Callable[[Location | None], None]


@dataclass(frozen=True, slots=True)
class Purged:
    """The blocks that a purge removed from the SSD, and the bytes that it destroyed there."""

    blocks: list[BlockId]
    nbytes: int


class SsdWriter:
    """Owns both lanes and their queues; ``submit`` and ``forget`` are for any thread."""

    def __init__(
        self,
        catalog: Catalog,
        ssd: SsdTier,
        budget: WriteBudget,
        config: StoreConfig,
        metrics: Metrics,
        *,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._ssd = ssd
        self._budget = budget
        self._batch_blocks_max = config.write_batch_blocks_max
        self._metrics = metrics
        self._mover: Mover
        self._work = threading.Condition()
        self._writes: deque[PendingWrite] = deque()
        self._commits: deque[tuple[PendingWrite, Future[Location | None]]] = deque()
        self._committing = False
        self._full = False  # writes have had to evict: some room is kept ahead of them
        self._written = False  # the write lane has ended: nothing more comes to be committed
        self._damaged: deque[tuple[BlockId, Location]] = deque()
        self._undropped: list[tuple[BlockId, Location]] = []  # tried again with the next batch
        self._chores: deque[Callable[[], None]] = deque()
        self._closing = False
        self._broken = False
        self._failed = failed
        self._lanes = [
            Lane("write", self._write_next, self._break),
            Lane("commit", self._commit_next, self._break),
        ]

    def start(self, mover: Mover) -> None:
        """Start the lanes, which find their blocks' bytes with ``mover``."""
        self._mover = mover
        for lane in self._lanes:
            lane.start()

    def _break(self, error: BaseException) -> None:
        self._failed(error)
        with self._work:
            self._broken = True
            self._work.notify_all()

    # -- what others call, from any thread

    def submit(self, write: PendingWrite) -> None:
        """Queue a block; its host copy stays pinned until ``done``."""
        with self._work:
            open_ = not (self._closing or self._broken)
            if open_:
                self._writes.append(write)
                self._work.notify_all()
        if not open_:
            write.done(None)

    def forget(self, block: BlockId, where: Location) -> None:
        """Take a damaged record out of the index, soon."""
        with self._work:
            self._damaged.append((block, where))
            self._work.notify_all()

    def purge(self, select: Callable[[], Sequence[int]]) -> Future[Purged]:
        """Remove the SSD copies of the rows that ``select`` returns for good, soon.

        Pinned copies are left. Destroys what every slot holds that no block uses any more. The
        result is an ``OSError`` if the disk refuses.
        """
        future: Future[Purged] = Future()

        def chore() -> None:
            try:
                future.set_result(self._purge(select))
            except OSError as error:
                future.set_exception(error)

        with self._work:
            self._chores.append(chore)
            self._work.notify_all()
        return future

    def close(self) -> None:
        """Stop both lanes after what they are doing; what is still queued is not written."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        for lane in self._lanes:
            lane.join()
        with self._work:
            left = [*self._writes, *(write for write, _ in self._commits)]
            self._writes.clear()
            self._commits.clear()
        for write in left:
            write.done(None)

    # -- write lane

    def _write_next(self) -> bool:
        with self._work:
            self._work.wait_for(self._has_work)
            if self._broken or (self._closing and not self._damaged and not self._chores):
                self._written = True
                self._work.notify_all()
                return False
            damaged = [*self._undropped, *self._damaged]
            self._damaged.clear()
            chores = [self._chores.popleft() for _ in range(len(self._chores))]
            count = min(len(self._writes), self._batch_blocks_max, self._commit_room())
            if count and self._full:
                # Rather a few blocks at once than a wait for an eviction of its own.
                size = self._ssd.slot_bytes(self._writes[0].record)
                count = min(count, max(self._ssd.room(size), 1))
            batch = [self._writes.popleft() for _ in range(count)]
        # Damaged records go first: a block of the batch may be one of them, stored anew.
        if damaged:
            self._undropped = [] if self._drop(damaged) else damaged
        for chore in chores:
            chore()
        if batch:
            self._write(batch)
        return True

    def _has_work(self) -> bool:
        may_write = bool(self._writes) and self._commit_room() > 0
        return bool(may_write or self._damaged or self._chores or self._closing or self._broken)

    def _commit_room(self) -> int:
        return max(COMMIT_BATCHES_MAX * self._batch_blocks_max - len(self._commits), 0)

    def _drop(self, gone: Sequence[tuple[BlockId, Location]]) -> bool:
        try:
            self._ssd.drop([block for block, _ in gone], [where for _, where in gone])
        except OSError as error:
            self._metrics.add("ssd_write_errors")
            log.warning("%d blocks could not be taken out of the index: %s", len(gone), error)
            return False
        return True

    def _write(self, batch: Sequence[PendingWrite]) -> None:
        """Write a batch's data and hand it to the commit lane."""
        undropped = {block for block, _ in self._undropped}
        new: list[PendingWrite] = []
        for write in batch:
            state = self._catalog.state(write.row, Tier.SSD)
            if state is not CopyState.ABSENT:  # stored meanwhile
                ready = state is CopyState.READY
                write.done(self._catalog.location(write.row, Tier.SSD) if ready else None)
                continue
            self._catalog.begin(write.record.id, Tier.SSD, "write")
            if write.record.id in undropped:  # its old, damaged record is still in the index
                self._give_up(write, "abort")
            elif not self._affordable(write):
                self._metrics.add("ssd_declined_blocks")
                self._give_up(write, "abort")
            else:
                new.append(write)
        if not new:
            return
        places = self._place([write.record for write in new])
        started = []
        for write, where in zip(new, places, strict=True):
            if where is None:
                self._give_up(write, "decline")
            else:
                payload = self._mover.payload(write.row)
                started.append((write, self._ssd.store(write.record, payload, where)))
        with self._work:
            self._commits.extend(started)
            self._work.notify_all()
        for _, stored in started:
            stored.add_done_callback(self._stored)

    def _give_up(self, write: PendingWrite, what: str) -> None:
        self._catalog.end(write.row, Tier.SSD, what)
        write.done(None)

    def _stored(self, _: Future[Location | None]) -> None:
        with self._work:
            if self._stored_blocks():
                self._work.notify_all()

    def _affordable(self, write: PendingWrite) -> bool:
        """Whether the write budget allows a block; a short one only what comes a second time."""
        if self._budget.short() and self._catalog.asked(write.row) < SHORT_USES_MIN:
            return False
        try:
            return self._budget.spend(self._ssd.slot_bytes(write.record))
        except OSError as error:
            log.warning("the write budget could not be saved, nothing is written: %s", error)
            return False

    def _place(self, records: Sequence[Record]) -> list[Location | None]:
        size = self._ssd.slot_bytes(records[0])
        self._make_room(size, len(records))
        places = self._ssd.place(records)
        left = [index for index, where in enumerate(places) if where is None]
        if left:
            # The index grew meanwhile and took the room of fresh slots: evicted ones are enough.
            self._make_room(size, len(left))
            for index, where in zip(left, self._ssd.place([records[i] for i in left]), strict=True):
                places[index] = where
        return places

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
        return len(self._remove(self._catalog.evict(Tier.SSD, count), "evicted"))

    def _remove(self, rows: list[int], why: str) -> list[int]:
        """Drop rows that are EVICTING; returns them, or none if the index refused."""
        if not rows:
            return rows
        gone = [(self._catalog.id(row), self._catalog.location(row, Tier.SSD)) for row in rows]
        done = self._drop(gone)
        self._end(rows, why if done else "keep")
        return rows if done else []

    def _end(self, rows: list[int], how: str) -> None:
        """Settle rows that are EVICTING: "evicted", "purged", or "keep" if the index refused."""
        for row in rows:
            self._catalog.end(row, Tier.SSD, "keep" if how == "keep" else "evicted")
        if how != "keep":
            self._metrics.add(f"{how}_blocks_ssd", len(rows))

    def _ahead(self) -> int:
        return min(self._catalog.ready(Tier.SSD) // AHEAD_SHARE, AHEAD_BLOCKS_MAX)

    def _purge(self, select: Callable[[], Sequence[int]]) -> Purged:
        with self._work:
            # What is written but not committed is purged with the rest, once it is there.
            self._work.wait_for(lambda: not (self._commits or self._committing) or self._broken)
        with self._catalog.changed:
            taken = self._catalog.take_out(select(), Tier.SSD)
            blocks = [self._catalog.id(row) for row in taken]
        if self._remove(taken, "purged") != taken:
            raise OSError("the index did not commit the removal; nothing was purged")
        return Purged(blocks, self._ssd.destroy())

    # -- commit lane

    def _commit_next(self) -> bool:
        with self._work:
            self._work.wait_for(
                lambda: (
                    self._stored_blocks() or (self._written and not self._commits) or self._broken
                )
            )
            if self._broken or not self._commits:
                return False
            batch = [self._commits.popleft() for _ in range(self._stored_blocks())]
            self._committing = True
            self._work.notify_all()
        self._commit([write for write, _ in batch], [stored.result() for _, stored in batch])
        with self._work:
            self._committing = False
            self._work.notify_all()
        return True

    def _stored_blocks(self) -> int:
        """Return how many blocks are worth a commit now: all, or enough of those in flight."""
        stored = nbytes = 0
        for write, future in self._commits:
            if not future.done():
                return stored if nbytes >= GROUP_BYTES_MIN else 0
            stored += 1
            nbytes += write.record.payload_bytes
        return stored

    def _commit(self, writes: Sequence[PendingWrite], placed: Sequence[Location | None]) -> None:
        records = [write.record for write in writes]
        uses = self._catalog.uses(USES_PER_COMMIT_MAX)
        size = self._ssd.slot_bytes(records[0])
        rows = self._victims_ahead(size)
        gone = [(self._catalog.id(row), self._catalog.location(row, Tier.SSD)) for row in rows]
        durable, committed = self._ssd.publish(records, placed, uses, gone)
        self._end(rows, "evicted" if committed else "keep")
        if rows:
            self._ssd.reclaim(size, self._ahead())
        for write, where in zip(writes, durable, strict=True):
            if where is None:
                self._catalog.end(write.row, Tier.SSD, "abort")
            else:
                self._catalog.commit(write.row, Tier.SSD, where)
                self._metrics.add("ssd_written_blocks")
                self._metrics.add("ssd_written_bytes", where.slot_bytes)
            write.done(where)

    def _victims_ahead(self, size: int) -> list[int]:
        """Take out blocks whose room the next writes of a full store want, with this commit."""
        missing = self._ahead() - self._ssd.room(size) if self._full else 0
        return self._catalog.evict(Tier.SSD, missing) if missing > 0 else []

    def write_uses(self) -> None:
        """Make hits and last uses durable that no commit took along; for closing."""
        while uses := self._catalog.uses(self._batch_blocks_max * USES_PER_COMMIT_MAX):
            self._ssd.publish((), (), uses)
