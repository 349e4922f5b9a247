"""The only one who changes what the SSD holds: writes, evictions, damage, purges.

Two lanes make a group commit: the write lane makes room and starts writes, the commit lane makes
durable and visible whatever has been written by then, while the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.catalog import CopyState
from kvtier.errors import KVTierError, StoreClosed, StoreFailed
from kvtier.lane import Lane
from kvtier.plan import Tier
from kvtier.ssd_room import SsdRoom
from kvtier.tiers.base import BlockId
from kvtier.write_rule import PendingWrite, WriteRule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.tiers.base import Location, Record
    from kvtier.tiers.ssd import SsdTier
    from kvtier.tiers.write_budget import WriteBudget
    from kvtier.trace import Trace

__all__ = ["Purged", "SsdWriter"]

log = logging.getLogger(__name__)

COMMIT_BATCHES_MAX: Final = 2
"""Blocks being written or waiting for their commit before the write lane waits, in batches."""
GROUP_BYTES_MIN: Final = 32 << 20
"""What a commit waits for, unless nothing is being written any more: a sync costs as much time."""
USES_PER_COMMIT_MAX: Final = 64
"""Blocks whose hits and last use go into one commit."""


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
        clock: Callable[[], float],
        trace: Trace | None = None,
    ) -> None:
        self._clock = clock
        self._trace = trace
        self._catalog = catalog
        self._ssd = ssd
        self._room = SsdRoom(catalog, ssd, metrics)
        self._rule = WriteRule(budget)
        self._batch_blocks_max = config.write_batch_blocks_max
        self._metrics = metrics
        self._mover: Mover
        self._work = threading.Condition()
        self._writes: deque[PendingWrite] = deque()
        self._commits: deque[tuple[PendingWrite, Future[Location | None], float]] = deque()
        self._committing = False
        self._written = False  # the write lane has ended: nothing more comes to be committed
        self._damaged: deque[tuple[BlockId, Location]] = deque()
        self._undropped: list[tuple[BlockId, Location]] = []  # tried again with the next batch
        # The one that is being carried out stays at the head, so that none is lost with its lane.
        self._purges: deque[tuple[Future[Purged], Callable[[], Sequence[int]]]] = deque()
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
        with self._catalog.changed:
            self._catalog.changed.notify_all()  # the write lane may wait there
        failure = StoreFailed(f"a background lane failed: {error}")
        failure.__cause__ = error
        self._refuse_purges(failure)

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
        result is an ``OSError`` if the disk refuses, ``StoreFailed`` if the lane ends before.
        """
        future: Future[Purged] = Future()
        with self._work:
            if self._closing or self._broken:
                error = StoreClosed if self._closing else StoreFailed
                raise error("the lane that purges has ended; nothing was purged")
            self._purges.append((future, select))
            self._work.notify_all()
        return future

    def _refuse_purges(self, error: KVTierError) -> None:
        with self._work:
            left = [future for future, _ in self._purges]
        for future in left:
            with suppress(InvalidStateError):
                future.set_exception(error)

    def close(self) -> None:
        """Stop both lanes after what they are doing; what is still queued is not written."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        for lane in self._lanes:
            lane.join()
        with self._work:
            left = [*self._writes, *(write for write, _, _ in self._commits)]
            self._writes.clear()
            self._commits.clear()
            self._work.notify_all()  # a commit lane that waited for a write that hangs
        for write in left:
            write.done(None)
        self._refuse_purges(StoreClosed("the store was closed"))

    # -- write lane

    def _write_next(self) -> bool:
        with self._work:
            self._work.wait_for(self._has_work)
            if self._broken or (self._closing and not self._damaged and not self._purges):
                self._written = True
                self._work.notify_all()
                return False
            damaged = [*self._undropped, *self._damaged]
            self._damaged.clear()
            purges = len(self._purges)
            count = min(len(self._writes), self._batch_blocks_max, self._commit_room())
            if count:
                count = self._room.at_once(self._writes[0].record, count)
            batch = [self._writes.popleft() for _ in range(count)]
        # Damaged records go first: a block of the batch may be one of them, stored anew.
        if damaged:
            self._undropped = [] if self._room.drop(damaged) else damaged
        for _ in range(purges):
            self._carry_out(*self._purges[0])
            self._purges.popleft()
        if batch:
            self._write(batch)
        return True

    def _has_work(self) -> bool:
        may_write = bool(self._writes) and self._commit_room() > 0
        return bool(may_write or self._damaged or self._purges or self._closing or self._broken)

    def _commit_room(self) -> int:
        return max(COMMIT_BATCHES_MAX * self._batch_blocks_max - len(self._commits), 0)

    def _write(self, batch: Sequence[PendingWrite]) -> None:
        """Write a batch's data and hand it to the commit lane."""
        undropped = {block for block, _ in self._undropped}
        new: list[PendingWrite] = []
        for write in batch:
            state = self._state(write.row)
            if state is not CopyState.ABSENT:  # stored meanwhile
                ready = state is CopyState.READY
                write.done(self._catalog.location(write.row, Tier.SSD) if ready else None)
                continue
            self._catalog.begin(write.record.id, Tier.SSD, "write")
            if write.record.id in undropped or self._is_cut_off(write.record):
                self._give_up(write, "abort")
            elif not self._wanted(write, len(new)):
                self._metrics.add("ssd_declined_blocks")
                self._give_up(write, "abort")
            else:
                new.append(write)
        if not new:
            return
        places, begun, started = self._room.place(new), self._clock(), []
        for write, where in zip(new, places, strict=True):
            if where is None:
                self._give_up(write, "decline")
            else:
                payload = self._mover.payload(write.row)
                started.append((write, self._ssd.store(write.record, payload, where), begun))
        with self._work:
            self._commits.extend(started)
            self._work.notify_all()
        for _, stored, _ in started:
            stored.add_done_callback(self._stored)

    def _give_up(self, write: PendingWrite, what: str) -> None:
        self._catalog.end(write.row, Tier.SSD, what)
        write.done(None)

    def _stored(self, _: Future[Location | None]) -> None:
        with self._work:
            if self._stored_blocks():
                self._work.notify_all()

    def _is_cut_off(self, record: Record) -> bool:
        """Whether a block could not be reached for want of the one before it."""
        if not (self._catalog.contiguous and record.position):
            return False
        row = self._catalog.find(BlockId(record.id.namespace, record.parent))
        there = CopyState.READY, CopyState.WRITING
        return row is None or self._catalog.state(row, Tier.SSD) not in there

    def _state(self, row: int) -> CopyState:
        """Return the state of a row's copy on the SSD, once no commit is evicting it any more."""
        with self._catalog.changed:
            self._catalog.changed.wait_for(
                lambda: self._broken or self._catalog.state(row, Tier.SSD) is not CopyState.EVICTING
            )
            return self._catalog.state(row, Tier.SSD)

    def _wanted(self, write: PendingWrite, ahead: int) -> bool:
        """Whether a block may be written after ``ahead`` others of its batch; pays for it."""
        size = self._ssd.slot_bytes(write.record)
        # What can never fit must be declined before anything is evicted for it.
        return self._ssd.fits(size) and self._rule.admits(
            write, size, uses=self._catalog.asked(write.row),
            value=self._catalog.values((write.row,))[0], full=self._room.is_full(size, ahead),
        )  # fmt: skip

    def _carry_out(self, future: Future[Purged], select: Callable[[], Sequence[int]]) -> None:
        with suppress(InvalidStateError):  # the commit lane failed meanwhile, and said so
            try:
                future.set_result(self._purge(select))
            except OSError as error:
                future.set_exception(error)

    def _purge(self, select: Callable[[], Sequence[int]]) -> Purged:
        with self._work:
            # What is written but not committed is purged with the rest, once it is there.
            self._work.wait_for(lambda: not (self._commits or self._committing) or self._broken)
        with self._catalog.changed:
            taken = self._catalog.take_out(select(), Tier.SSD)
            blocks = [self._catalog.id(row) for row in taken]
        if self._room.remove(taken, "purged") != taken:
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
        self._commit(
            [write for write, _, _ in batch],
            [stored.result() for _, stored, _ in batch],
            [begun for *_, begun in batch],
        )
        with self._work:
            self._committing = False
            self._work.notify_all()
        return True

    def _note(self, record: Record, begun: float) -> None:
        if self._trace is not None:
            self._trace.add(
                "write", "write", begun, self._clock(), start=record.position,
                stop=record.position + 1, nbytes=record.payload_bytes,
            )  # fmt: skip

    def _stored_blocks(self) -> int:
        """Return how many blocks are worth a commit now: all, or enough of those in flight."""
        stored = nbytes = 0
        for write, future, _ in self._commits:
            if not future.done():
                return stored if nbytes >= GROUP_BYTES_MIN else 0
            stored += 1
            nbytes += write.record.payload_bytes
        return stored

    def _commit(
        self,
        writes: Sequence[PendingWrite],
        placed: Sequence[Location | None],
        begun: Sequence[float],
    ) -> None:
        records = [write.record for write in writes]
        uses = self._catalog.uses(USES_PER_COMMIT_MAX)
        size = self._ssd.slot_bytes(records[0])
        rows = self._room.victims_ahead(size)
        gone = [(self._catalog.id(row), self._catalog.location(row, Tier.SSD)) for row in rows]
        durable, committed = self._ssd.publish(records, placed, uses, gone)
        self._room.made(rows, size, committed=committed)
        for write, where, begun_s in zip(writes, durable, begun, strict=True):
            if where is None:
                self._catalog.end(write.row, Tier.SSD, "abort")
            else:
                self._note(write.record, begun_s)
                self._catalog.commit(write.row, Tier.SSD, where)
                self._metrics.add("ssd_written_blocks")
                self._metrics.add("ssd_written_bytes", where.slot_bytes)
            write.done(where)

    def write_uses(self) -> None:
        """Make hits and last uses durable that no commit took along; for closing."""
        while uses := self._catalog.uses(self._batch_blocks_max * USES_PER_COMMIT_MAX):
            self._ssd.publish((), (), uses)
