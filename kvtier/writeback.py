"""Puts: engine -> host on the copy lane, then on to the SSD through its writer.

The copy lane brings a block into a host slot, after which the engine may reuse its memory. Where
blocks are written on demotion only, that ends the put: the ``Demoter`` has the rest.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtier.catalog import CopyState
from kvtier.errors import StoreClosed, StoreFailed
from kvtier.lane import Lane
from kvtier.mover import Unsaved
from kvtier.plan import Tier
from kvtier.retention import Retention
from kvtier.tiers.base import BlockId, Record
from kvtier.tiers.device import read_block
from kvtier.transfer import PutResult, Transfer
from kvtier.write_rule import PendingWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.identity import BlockKeys
    from kvtier.layout import BlockLayout
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.ssd_writer import SsdWriter
    from kvtier.tiers.base import Location
    from kvtier.tiers.device import KVSlots

__all__ = ["PutBlock", "PutJob", "Writeback"]

log = logging.getLogger(__name__)


class _NoSlot(Exception):
    """No host slot became free in time: the rest of a put is dropped, not waited for in turn."""


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One block of a put: its place in the prompt, its catalog row, and its record.

    ``recomputed``: a plan would recompute it rather than load it.
    """

    position: int
    row: int
    record: Record
    recomputed: bool = False


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
    """Owns the copy lane and the puts under way. Nothing here runs on the caller's thread."""

    def __init__(
        self,
        catalog: Catalog,
        writer: SsdWriter,
        config: StoreConfig,
        metrics: Metrics,
        *,
        host_blocks_max: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._config = config
        self._demote = config.write_policy == "demote"
        self._metrics = metrics
        self._host_blocks_max = host_blocks_max
        self._failed = failed
        self._mover: Mover
        self._work = threading.Condition()
        self._jobs: set[PutJob] = set()  # accepted, with blocks whose outcome is not known
        self._puts: deque[PutJob] = deque()
        self._writing: set[int] = set()  # rows that the writer was given and has not answered for
        self._unsettled = 0  # blocks whose outcome is not known
        self._closing = False
        self._broken = False
        self._lane = Lane("copy", self._copy_next, self.fail)

    def start(self, mover: Mover) -> None:
        """Start the lane, which takes its host slots from ``mover``."""
        self._mover = mover
        self._lane.start()

    # -- what others call, from any thread

    def accept(
        self,
        keys: BlockKeys,
        wanted: range,
        layout: BlockLayout,
        retention: Retention | None,
        *,
        recomputed: int = 0,
    ) -> tuple[list[PutBlock], int, int]:
        """Enter a put's new blocks as WRITING in host: (blocks, number present, number dropped).

        Blocks that are in a tier, or on their way into one, are present; what the queue has no room
        for is dropped. A present block that is not on the SSD is written now, or when host memory
        lets go of it. Of the prompt, a plan recomputes the first ``recomputed`` blocks.
        """
        with self._work:
            room = self._config.write_queue_blocks_max - self._unsettled
        now_ns, asked = self._catalog.now_ns(), retention or Retention()
        expiry_ns = asked.expiry_ns(now_ns)
        record = _recorder(keys, layout, asked.priority, now_ns, expiry_ns)
        with self._catalog.changed:
            new, rewritten, present = self._sorted(
                keys, wanted, room, asked.priority, expiry_ns, retained=retention is not None
            )
            rows = self._catalog.begin_all(
                keys.namespace,
                [keys.hashes[block] for block in new],
                Tier.HOST,
                "write",
                tenant_digest=keys.tenant_digest,
                positions=new,
                now_ns=now_ns,
                priority=asked.priority,
                expiry_ns=expiry_ns,
            )
            coming = [*rows, *(row for _, row in rewritten)]
            if coming or retention is not None:
                self._catalog.announce(
                    keys.namespace, keys.hashes[: max(wanted, default=-1) + 1], coming
                )
            for block, row in rewritten:
                if self._demote:
                    self._mover.unsave(row, Unsaved(record(block), block < recomputed))
                else:
                    self._rewrite(row, record(block))
        accepted = [
            PutBlock(block, row, record(block), block < recomputed)
            for block, row in zip(new, rows, strict=True)
        ]
        return accepted, present, len(wanted) - present - len(new)

    def _sorted(
        self,
        keys: BlockKeys,
        wanted: range,
        room: int,
        priority: int,
        expiry_ns: int,
        *,
        retained: bool,
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        """Return blocks to enter, (block, row) to write again, and the number present.

        Within the queue's ``room``: what is neither entered nor present is dropped. What is present
        is ``retained`` from now on if the put says so, and if it has expired. Under the catalog's
        lock.
        """
        new: list[int] = []
        rewritten: list[tuple[int, int]] = []
        present = 0
        for block in wanted:
            row = self._catalog.find(BlockId(keys.namespace, keys.hashes[block]))
            if row is not None and self._present(row):
                present += 1
                if retained or self._catalog.expired(row):
                    self._catalog.retain(row, priority, expiry_ns)
                free = self._demote or room > len(new) + len(rewritten)
                if free and self._only_in_host(row):
                    rewritten.append((block, row))
            elif len(new) + (not self._demote) * len(rewritten) < room:
                new.append(block)
        return new, rewritten, present

    def _present(self, row: int) -> bool:
        return any(
            self._catalog.state(row, tier) not in (CopyState.ABSENT, CopyState.EVICTING)
            for tier in (Tier.HOST, Tier.SSD)
        )

    def _only_in_host(self, row: int) -> bool:
        with self._work:
            return (
                row not in self._writing
                and self._catalog.state(row, Tier.SSD) is CopyState.ABSENT
                and self._catalog.state(row, Tier.HOST) is CopyState.READY
            )

    def _rewrite(self, row: int, record: Record) -> None:
        if self._catalog.pin(row, Tier.HOST):
            with self._work:
                self._unsettled += 1
            self._submit(None, row, record)

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

    def flush(self, timeout: float) -> int:
        """Wait until everything accepted is settled; returns the blocks still open.

        Settled is durable or dropped; where blocks are written on demotion, in host or dropped.
        """
        with self._work:
            self._work.wait_for(
                lambda: not self._unsettled or self._closing or self._broken, timeout
            )
            return self._unsettled

    def close(self) -> None:
        """Stop the lane after what it is doing; what is still queued is dropped."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        self._lane.join()
        self._writer.close()
        with self._work:
            left = list(self._jobs)
        for job in left:
            self._settle(job, job.open_blocks, stored=False)

    def fail(self, error: BaseException) -> None:
        """Take note that a lane, this one or the writer's, ended with an error."""
        self._failed(error)
        with self._work:
            self._broken = True
            left = list(self._jobs)
            self._work.notify_all()
        for job in left:
            job.transfer.fail(error)

    # -- the copy lane

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
        unsaved = Unsaved(block.record, block.recomputed) if self._demote else None
        self._mover.fill(block.row, block.record.id, slot, unsaved)
        if self._demote:
            self._mover.unpin_host(block.row)
            self._settle(job, stored=True)
        else:
            self._submit(job, block.row, block.record, recomputed=block.recomputed)
        return None

    # -- outcomes, on the writer's lanes

    def _submit(
        self, job: PutJob | None, row: int, record: Record, *, recomputed: bool = False
    ) -> None:
        with self._work:
            self._writing.add(row)
        done = partial(self._written, job, row)
        self._writer.submit(PendingWrite(row, record, done, recomputed=recomputed))

    def _written(self, job: PutJob | None, row: int, where: Location | None) -> None:
        with self._work:
            self._writing.discard(row)
        self._mover.unpin_host(row)
        self._settle(job, stored=where is not None or self._host_blocks_max > 0)

    def _settle(self, job: PutJob | None, blocks: int = 1, *, stored: bool) -> None:
        """Count the outcome of some blocks; a job's last one resolves its transfer."""
        with self._work:
            if job is not None:
                # A lane that comes back after close gave up on it finds nothing left to count.
                blocks = min(blocks, job.open_blocks)
                job.open_blocks -= blocks
                job.stored += blocks if stored else 0
                job.dropped += 0 if stored else blocks
            self._unsettled -= blocks
            last = job is not None and job.open_blocks == 0
            if last:
                self._jobs.discard(job)
            self._work.notify_all()
        if job is None:
            return
        self._metrics.add("put_blocks_stored" if stored else "put_blocks_dropped", blocks)
        if last:
            job.transfer.finish(PutResult(job.stored, job.present, job.dropped))


def _recorder(
    keys: BlockKeys, layout: BlockLayout, priority: int, now_ns: int, expiry_ns: int
) -> Callable[[int], Record]:
    """Return what makes the record of a block of this prompt."""
    part_bytes = layout.part_bytes

    def record(block: int) -> Record:
        return Record(
            id=BlockId(keys.namespace, keys.hashes[block]),
            parent=keys.parent(block),
            position=block,
            tenant_digest=keys.tenant_digest,
            part_bytes=part_bytes,
            shapes=layout.parts,
            priority=priority,
            created_ns=now_ns,
            expiry_ns=expiry_ns,
        )

    return record
