"""Puts: engine -> host on the copy lane, host -> SSD in durable batches on the write lane.

The copy lane brings a block into a host slot, after which the engine may reuse its memory; the
write lane makes batches of them durable and is the only thread that changes what the SSD holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtier.catalog import CopyState
from kvtier.errors import StoreClosed, StoreFailed
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Record
from kvtier.tiers.device import read_block
from kvtier.transfer import PutResult, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.identity import BlockKeys
    from kvtier.layout import BlockLayout
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.tiers.base import Location
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.ssd import SsdTier

__all__ = ["PutBlock", "PutJob", "Writeback"]

log = logging.getLogger(__name__)

JOIN_S_MAX: Final = 30.0
"""How long ``close`` waits for a lane that is inside a copy or a disk operation."""
MAKE_ROOM_BLOCKS: Final = 64
"""Blocks of other sizes that are given up at once when their segments' disk is wanted."""


class _NoSlot(Exception):
    """No host slot became free in time: the rest of a put is dropped, not waited for in turn."""


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One block of a put: its place in the prompt, its catalog row, and its record."""

    position: int
    row: int
    record: Record


@dataclass(slots=True, eq=False)
class PutJob:
    """One accepted put; the writeback owns it. ``after`` is awaited before the source is read."""

    slots: KVSlots
    blocks: Sequence[PutBlock]
    transfer: Transfer[PutResult]
    present: int
    dropped: int
    after: Any = None
    stored: int = 0
    open_blocks: int = field(init=False)
    """Blocks whose outcome is not known yet."""

    def __post_init__(self) -> None:
        self.open_blocks = len(self.blocks)


class Writeback:
    """Owns both lanes and their queues. Nothing here runs on the caller's thread."""

    def __init__(
        self,
        catalog: Catalog,
        ssd: SsdTier,
        config: StoreConfig,
        metrics: Metrics,
        *,
        host_blocks_max: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._ssd = ssd
        self._config = config
        self._metrics = metrics
        self._host_blocks_max = host_blocks_max
        self._failed = failed
        self._mover: Mover
        self._work = threading.Condition()
        self._jobs: set[PutJob] = set()  # accepted, with blocks whose outcome is not known
        self._puts: deque[PutJob] = deque()
        self._writes: deque[tuple[PutJob, PutBlock]] = deque()
        self._damaged: deque[tuple[BlockId, Location]] = deque()
        self._undropped: list[tuple[BlockId, Location]] = []  # tried again with the next batch
        self._unsettled = 0  # blocks of all jobs whose outcome is not known
        self._closing = False
        self._broken = False
        self._lanes = [
            threading.Thread(target=self._run, args=(lane,), name=f"kvtier-{name}", daemon=True)
            for name, lane in (("copy", self._copy_next), ("write", self._write_next))
        ]

    def start(self, mover: Mover) -> None:
        """Start the lanes, which take their host slots from ``mover``."""
        self._mover = mover
        for thread in self._lanes:
            thread.start()

    # -- what others call, from any thread

    def accept(
        self, keys: BlockKeys, wanted: range, layout: BlockLayout
    ) -> tuple[list[PutBlock], int, int]:
        """Enter a put's new blocks as WRITING in host: (blocks, number present, number dropped).

        Blocks that are in a tier, or on their way into one, are present; what the queue has no room
        for is dropped.
        """
        accepted: list[PutBlock] = []
        present = dropped = 0
        with self._work:
            room = self._config.write_queue_blocks_max - self._unsettled
        now_ns = time.time_ns()
        with self._catalog.changed:
            for block in wanted:
                record = _record(keys, block, layout, now_ns)
                row = self._catalog.find(record.id)
                if row is not None and any(
                    self._catalog.state(row, tier) not in (CopyState.ABSENT, CopyState.EVICTING)
                    for tier in (Tier.HOST, Tier.SSD)
                ):
                    present += 1
                elif len(accepted) >= room:
                    dropped += 1
                else:
                    row = self._catalog.begin(record.id, Tier.HOST, "write")
                    accepted.append(PutBlock(block, row, record))
        return accepted, present, dropped

    def put(self, job: PutJob) -> None:
        """Take over a put whose blocks were accepted."""
        with self._work:
            if self._closing:
                raise StoreClosed("the store is closing; nothing more can be put")
            if self._broken:
                raise StoreFailed("a background lane failed; nothing more can be put")
            self._unsettled += len(job.blocks)
            self._jobs.add(job)
            self._puts.append(job)
            self._work.notify_all()

    def forget(self, block: BlockId, where: Location) -> None:
        """Take a damaged record out of the index, soon."""
        with self._work:
            self._damaged.append((block, where))
            self._work.notify_all()

    def flush(self, timeout: float) -> int:
        """Wait until everything accepted is durable or dropped; returns the blocks still open."""
        with self._work:
            self._work.wait_for(
                lambda: not self._unsettled or self._closing or self._broken, timeout
            )
            return self._unsettled

    def close(self) -> None:
        """Stop both lanes after what they are doing; what is still queued is dropped."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        for thread in self._lanes:
            thread.join(JOIN_S_MAX)
        with self._work:
            left = list(self._jobs)
        for job in left:
            self._settle(job, job.open_blocks, stored=False)

    # -- both lanes

    def _run(self, step: Callable[[], bool]) -> None:
        try:
            while step():
                pass
        except BaseException as error:
            log.exception("a background lane failed")
            self._failed(error)
            with self._work:
                self._broken = True
                left = list(self._jobs)
                self._work.notify_all()
            for job in left:
                job.transfer.fail(error)

    def _settle(self, job: PutJob, blocks: int = 1, *, stored: bool) -> None:
        """Count the outcome of some blocks of a job; the last one resolves the transfer."""
        with self._work:
            # A lane that comes back after close gave up on it finds nothing left to count.
            blocks = min(blocks, job.open_blocks)
            self._unsettled -= blocks
            job.open_blocks -= blocks
            job.stored += blocks if stored else 0
            job.dropped += 0 if stored else blocks
            last = job.open_blocks == 0
            if last:
                self._jobs.discard(job)
            self._work.notify_all()
        self._metrics.add("put_blocks_stored" if stored else "put_blocks_dropped", blocks)
        if last:
            job.transfer.finish(PutResult(job.stored, job.present, job.dropped))

    # -- copy lane

    def _copy_next(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._puts or self._closing or self._broken)
            if self._closing or self._broken:
                return False
            job = self._puts.popleft()
        failure = self._await_engine(job)
        for block in job.blocks:
            failure = failure or self._copy(job, block)
            if failure is not None:
                if not isinstance(failure, _NoSlot):
                    job.transfer.fail(failure)
                self._catalog.end(block.row, Tier.HOST, "abort")
                self._settle(job, stored=False)
        job.transfer.released.set()
        return True

    def _await_engine(self, job: PutJob) -> Exception | None:
        if job.after is None:
            return None
        try:
            job.after.synchronize()
        except Exception as error:  # noqa: BLE001 - the engine's event is not ours to trust
            return error
        return None

    def _copy(self, job: PutJob, block: PutBlock) -> Exception | None:
        """Bring one block into host memory and queue its write; returns what went wrong."""
        slot = self._mover.take_slot()
        if slot is None:
            return _NoSlot()
        try:
            read_block(job.slots, block.position, self._mover.slot_buffer(slot))
        except Exception as error:  # noqa: BLE001 - the engine's tensors are not ours to trust
            self._mover.free_slot(slot)
            return error
        self._mover.fill(block.row, block.record.id, slot)
        with self._work:
            self._writes.append((job, block))
            self._work.notify_all()
        return None

    # -- write lane

    def _write_next(self) -> bool:
        with self._work:
            self._work.wait_for(
                lambda: self._writes or self._damaged or self._closing or self._broken
            )
            if self._broken or (self._closing and not self._damaged):
                return False
            damaged = [*self._undropped, *self._damaged]
            self._damaged.clear()
            batch = [
                self._writes.popleft()
                for _ in range(min(len(self._writes), self._config.write_batch_blocks_max))
            ]
        # Damaged records go first: a block of the batch may be one of them, stored anew.
        if damaged:
            self._undropped = [] if self._drop(damaged) else damaged
        if batch:
            self._write(batch)
        return True

    def _drop(self, gone: Sequence[tuple[BlockId, Location]]) -> bool:
        try:
            self._ssd.drop([block for block, _ in gone], [where for _, where in gone])
        except OSError as error:
            self._metrics.add("ssd_write_errors")
            log.warning("%d blocks could not be taken out of the index: %s", len(gone), error)
            return False
        return True

    def _write(self, batch: Sequence[tuple[PutJob, PutBlock]]) -> None:
        """Make a batch durable: make room, write, sync, index, visible."""
        undropped = {block for block, _ in self._undropped}
        new: list[tuple[PutJob, PutBlock]] = []
        for job, block in batch:
            state = self._catalog.state(block.row, Tier.SSD)
            if state is not CopyState.ABSENT or block.record.id in undropped:
                # Stored meanwhile; or its old, damaged record is still in the index.
                self._written(job, block, durable=state is CopyState.READY)
                continue
            self._catalog.begin(block.record.id, Tier.SSD, "write")
            new.append((job, block))
        if not new:
            return
        records = [block.record for _, block in new]
        self._make_room(records[0], len(records))
        payloads = [self._mover.payload(block.row) for _, block in new]
        placed = self._write_records(records, payloads)
        for (job, block), where in zip(new, placed, strict=True):
            if where is None:
                self._catalog.end(block.row, Tier.SSD, "abort")
            else:
                self._catalog.commit(block.row, Tier.SSD, where)
                self._metrics.add("ssd_written_blocks")
                self._metrics.add("ssd_written_bytes", where.slot_bytes)
            self._written(job, block, durable=where is not None)

    def _write_records(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        errors = self._ssd.write_errors
        placed = self._ssd.write(records, payloads)
        left = [index for index, where in enumerate(placed) if where is None]
        if left and self._ssd.write_errors == errors:
            # The index grew meanwhile and took the room of fresh slots: evicted ones are enough.
            self._evict(len(left), self._ssd.slot_bytes(records[0]))
            again = self._ssd.write([records[i] for i in left], [payloads[i] for i in left])
            for index, where in zip(left, again, strict=True):
                placed[index] = where
        self._metrics.add("ssd_write_errors", self._ssd.write_errors - errors)
        return placed

    def _written(self, job: PutJob, block: PutBlock, *, durable: bool) -> None:
        self._mover.unpin_host(block.row)
        self._settle(job, stored=durable or self._host_blocks_max > 0)

    def _make_room(self, record: Record, count: int) -> None:
        """Evict until ``count`` records like this one fit, as far as that is possible.

        Slots of the record's own size first: they are reused in place. Only if there are too few of
        them are blocks of other sizes given up, until whole segments are empty.
        """
        missing = count - self._ssd.room(record)
        if missing > 0:
            self._ssd.unlink(self._ssd.empty_segments(record))
            missing = count - self._ssd.room(record)
        if missing > 0:
            self._evict(missing, self._ssd.slot_bytes(record))
        while self._ssd.room(record) == 0 and self._evict(MAKE_ROOM_BLOCKS, None):
            self._ssd.unlink(self._ssd.empty_segments(record))

    def _evict(self, count: int, slot_bytes: int | None) -> int:
        rows = self._catalog.evict(Tier.SSD, count, slot_bytes)
        gone = [(self._catalog.id(row), self._catalog.location(row, Tier.SSD)) for row in rows]
        done = bool(gone) and self._drop(gone)
        for row in rows:
            self._catalog.end(row, Tier.SSD, "evicted" if done else "keep")
        self._metrics.add("evicted_blocks_ssd", len(rows) if done else 0)
        return len(rows) if done else 0


def _record(keys: BlockKeys, block: int, layout: BlockLayout, now_ns: int) -> Record:
    return Record(
        id=BlockId(keys.namespace, keys.hashes[block]),
        parent=keys.parent(block),
        position=block,
        tenant_digest=keys.tenant_digest,
        part_bytes=layout.part_bytes,
        shapes=layout.parts,
        created_ns=now_ns,
    )
