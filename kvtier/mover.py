"""Copies between tiers on named threads: engine -> host -> SSD for a put, SSD -> host for a load.

Host memory is the gateway: SSD and engine never exchange bytes directly. A put is two lanes: the
copy lane brings a block into a host slot (after which the engine may reuse its memory), the write
lane makes batches of them durable. Nothing here runs on the caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreClosed
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Location, ReadResult, Record
from kvtier.tiers.device import read_block
from kvtier.transfer import PutResult, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.metrics import Metrics
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.host import HostTier
    from kvtier.tiers.ssd import SsdTier

__all__ = ["Mover", "PutBlock", "PutJob"]

log = logging.getLogger(__name__)

JOIN_S_MAX: Final = 30.0
"""How long ``close`` waits for a lane that is inside a copy or a disk operation."""


class _NoSlot(Exception):
    """No host slot became free in time: the rest of a put is dropped, not waited for in turn."""


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One block of a put: its place in the prompt, its catalog row, and its record."""

    position: int
    row: int
    record: Record


@dataclass(slots=True)
class PutJob:
    """One accepted put; the mover owns it. ``after`` is waited for before the source is read."""

    slots: KVSlots
    blocks: Sequence[PutBlock]
    transfer: Transfer[PutResult]
    present: int
    dropped: int
    after: Any = None
    stored: int = 0
    open_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.open_blocks = len(self.blocks)


class Mover:
    """Owns the copy and write lanes; the catalog says what is allowed, the tiers hold the bytes."""

    def __init__(
        self,
        catalog: Catalog,
        host: HostTier,
        ssd: SsdTier,
        config: StoreConfig,
        metrics: Metrics,
        *,
        host_blocks_max: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._host = host
        self._ssd = ssd
        self._config = config
        self._metrics = metrics
        self._host_blocks_max = host_blocks_max
        self._failed = failed
        self._work = threading.Condition()
        self._puts: deque[PutJob] = deque()
        self._writes: deque[tuple[PutJob, PutBlock]] = deque()
        self._damaged: deque[tuple[BlockId, Location]] = deque()
        self._unsettled = 0  # accepted blocks that are neither durable nor dropped
        self._closing = False
        self._lanes = [
            threading.Thread(target=self._run, args=(lane,), name=f"kvtier-{name}", daemon=True)
            for name, lane in (("copy", self._copy_next), ("write", self._write_next))
        ]
        for thread in self._lanes:
            thread.start()

    # -- host slots

    def take_slot(self) -> int | None:
        """Take a host slot, evicting if needed; None after ``slot_wait_s_max``.

        Waits without polling: whatever frees or unpins a host copy wakes it.
        """
        deadline = time.monotonic() + self._config.slot_wait_s_max
        changed = self._catalog.changed
        with changed:
            while True:
                slot = self._host.reserve()
                if slot is not None:
                    return slot
                if self._evict_host(1):
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or not changed.wait(left):
                    return None

    def trim(self) -> None:
        """Evict host copies beyond the budget; staging slots are only for copies in flight."""
        with self._catalog.changed:
            over = self._catalog.ready(Tier.HOST) - self._host_blocks_max
            if over > 0:
                self._evict_host(over)

    def unpin_host(self, row: int) -> None:
        """Undo one pin of a host copy and give back what is over the budget."""
        with self._catalog.changed:
            self._catalog.unpin(row, Tier.HOST)
            self.trim()

    def free_slot(self, slot: int) -> None:
        """Give back a slot that never became a copy."""
        with self._catalog.changed:
            self._host.release(slot)
            self._catalog.changed.notify_all()

    def _evict_host(self, count: int) -> int:
        rows = self._catalog.evict(Tier.HOST, count)
        for row in rows:
            self._host.release(self._catalog.location(row, Tier.HOST).slot)
            self._catalog.end(row, Tier.HOST, "evicted")
        self._metrics.add("evicted_blocks_host", len(rows))
        return len(rows)

    def payload(self, row: int) -> memoryview:
        """Return the bytes of a pinned host copy."""
        return self._host.buffer(self._catalog.location(row, Tier.HOST).slot)

    # -- loads: called on a read lane

    def load(self, row: int) -> ReadResult:
        """Read a block from the SSD into a host slot.

        The row is LOADING in host and pinned on the SSD; OK leaves its host copy READY and pinned.
        """
        slot = self.take_slot()
        if slot is None:
            log.warning("no host slot became free in %.0f s", self._config.slot_wait_s_max)
            self._catalog.end(row, Tier.HOST, "abort")
            return ReadResult.FAILED
        block = self._catalog.id(row)
        where = self._catalog.location(row, Tier.SSD)
        target = self._host.buffer(slot)
        result = ReadResult.FAILED
        try:
            (result,) = self._ssd.read([block], [where], [target])
        finally:
            if result is not ReadResult.OK:
                self.free_slot(slot)
                self._catalog.end(row, Tier.HOST, "abort")
        if result is ReadResult.OK:
            self._host.label(slot, block)
            self._catalog.commit(row, Tier.HOST, Location(0, slot, 0), pinned=True)
            self._metrics.add("ssd_read_blocks")
            self._metrics.add("ssd_read_bytes", target.nbytes)
        elif result is ReadResult.GONE:
            self._metrics.add("damaged_blocks")
            self._forget_damaged(row, block, where)
        return result

    def _forget_damaged(self, row: int, block: BlockId, where: Location) -> None:
        with self._catalog.changed:
            self._catalog.end(row, Tier.SSD, "drop")
        with self._work:
            self._damaged.append((block, where))
            self._work.notify_all()

    # -- puts

    def put(self, job: PutJob) -> None:
        """Accept a put; its blocks are WRITING in host already."""
        with self._work:
            if self._closing:
                raise StoreClosed("the store is closing; nothing more can be put")
            self._unsettled += len(job.blocks)
            self._puts.append(job)
            self._work.notify_all()

    def room(self) -> int:
        """Return how many more blocks may wait for their copy."""
        with self._work:
            return max(self._config.write_queue_blocks_max - self._unsettled, 0)

    def flush(self, timeout: float) -> int:
        """Wait until everything accepted is durable or dropped; returns the blocks still open."""
        with self._work:
            self._work.wait_for(lambda: self._unsettled == 0 or self._closing, timeout)
            return self._unsettled

    def close(self) -> None:
        """Stop both lanes after what they are doing; what is still queued is dropped."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        for thread in self._lanes:
            thread.join(JOIN_S_MAX)
        queued = [job for job, _ in self._writes]
        queued += [job for job in self._puts for _ in job.blocks]
        self._puts.clear()
        self._writes.clear()
        for job in queued:
            self._settle(job, stored=False)

    def _run(self, step: Callable[[], bool]) -> None:
        try:
            while step():
                pass
        except BaseException as error:
            log.exception("a background lane failed")
            self._failed(error)

    def _settle(self, job: PutJob, *, stored: bool) -> None:
        """Count one block's outcome; the last one resolves the transfer."""
        with self._work:
            self._unsettled -= 1
            job.open_blocks -= 1
            job.stored += stored
            job.dropped += not stored
            last = job.open_blocks == 0
            self._work.notify_all()
        self._metrics.add("put_blocks_stored" if stored else "put_blocks_dropped")
        if last:
            job.transfer.finish(PutResult(job.stored, job.present, job.dropped))

    # -- copy lane

    def _copy_next(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._puts or self._closing)
            if self._closing:
                return False
            job = self._puts[0]
        if job.after is not None:
            job.after.synchronize()
        failure: Exception | None = None
        for block in job.blocks:
            failure = failure or self._copy(job, block)
            if failure is not None:
                if not isinstance(failure, _NoSlot):
                    job.transfer.fail(failure)
                self._catalog.end(block.row, Tier.HOST, "abort")
                self._settle(job, stored=False)
        job.transfer.released.set()
        with self._work:
            self._puts.popleft()
        return True

    def _copy(self, job: PutJob, block: PutBlock) -> Exception | None:
        """Bring one block into host memory and queue its write; returns what went wrong."""
        slot = self.take_slot()
        if slot is None:
            return _NoSlot()
        try:
            read_block(job.slots, block.position, self._host.buffer(slot))
        except Exception as error:  # noqa: BLE001 - the engine's tensors are not ours to trust
            self.free_slot(slot)
            return error
        self._host.label(slot, block.record.id)
        self._catalog.commit(block.row, Tier.HOST, Location(0, slot, 0), pinned=True)
        with self._work:
            self._writes.append((job, block))
            self._work.notify_all()
        return None

    # -- write lane

    def _write_next(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._writes or self._damaged or self._closing)
            if self._closing and not self._damaged:
                return False
            damaged = list(self._damaged)
            self._damaged.clear()
            batch = [
                self._writes.popleft()
                for _ in range(min(len(self._writes), self._config.write_batch_blocks_max))
            ]
        if damaged:
            self._drop_ssd([block for block, _ in damaged], [where for _, where in damaged])
        if batch:
            self._write(batch)
        return True

    def _drop_ssd(self, blocks: list[BlockId], locations: list[Location]) -> bool:
        try:
            self._ssd.drop(blocks, locations)
        except OSError as error:
            self._metrics.add("ssd_write_errors")
            log.warning("%d blocks could not be taken out of the index: %s", len(blocks), error)
            return False
        return True

    def _write(self, batch: list[tuple[PutJob, PutBlock]]) -> None:
        """Make a batch durable: make room, write, sync, index, visible."""
        new: list[tuple[PutJob, PutBlock]] = []
        for job, block in batch:
            try:
                self._catalog.begin(block.record.id, Tier.SSD, "write")
            except ValueError:  # stored meanwhile, e.g. by a put that overtook a host eviction
                self._written(job, block, durable=True)
                continue
            new.append((job, block))
        if not new:
            return
        records = [block.record for _, block in new]
        self._make_room(records[0], len(records))
        payloads = [self.payload(block.row) for _, block in new]
        errors = self._ssd.write_errors
        placed = self._ssd.write(records, payloads)
        self._metrics.add("ssd_write_errors", self._ssd.write_errors - errors)
        for (job, block), where in zip(new, placed, strict=True):
            if where is None:
                self._catalog.end(block.row, Tier.SSD, "abort")
            else:
                self._catalog.commit(block.row, Tier.SSD, where)
                self._metrics.add("ssd_written_blocks")
                self._metrics.add("ssd_written_bytes", where.slot_bytes)
            self._written(job, block, durable=where is not None)

    def _written(self, job: PutJob, block: PutBlock, *, durable: bool) -> None:
        self.unpin_host(block.row)
        self._settle(job, stored=durable or self._host_blocks_max > 0)

    def _make_room(self, record: Record, count: int) -> None:
        missing = count - self._ssd.room(record)
        if missing <= 0:
            return
        rows = self._catalog.evict(Tier.SSD, missing, self._ssd.slot_bytes(record))
        if not rows:
            return
        blocks = [self._catalog.id(row) for row in rows]
        locations = [self._catalog.location(row, Tier.SSD) for row in rows]
        gone = self._drop_ssd(blocks, locations)
        for row in rows:
            self._catalog.end(row, Tier.SSD, "evicted" if gone else "keep")
        self._metrics.add("evicted_blocks_ssd", len(rows) if gone else 0)
