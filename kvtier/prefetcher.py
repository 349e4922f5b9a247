"""Loads, on an asyncio loop of the store's own: several reads in flight, one per block.

However many wait for a block, it is read once; each restore then copies it into its own slots. What
is read next is the read queue's decision, at the moment when a read can begin. Blocking work runs
on two small thread lanes (reads, copies); the loop only decides and waits.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from aiofiles.os import wrap

from kvtier.catalog import CopyState
from kvtier.deliveries import Deliveries, LinkRates
from kvtier.errors import StoreClosed, TransferFailed
from kvtier.lane import carried
from kvtier.loop import Cancelled, LoopThread
from kvtier.plan import Tier
from kvtier.promotions import Promotion, Promotions
from kvtier.read_queue import RESTORE, Rank, ReadQueue, Urgency
from kvtier.ticket import LoadTicket
from kvtier.tiers.base import BlockId, ReadResult
from kvtier.tiers.gate import WriteGate
from kvtier.tiers.throttle import LinkThrottle
from kvtier.transfer import Prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.cost import Profiler
    from kvtier.layerwise import LayerTail
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.promoter import Promoter
    from kvtier.promotions import Timer
    from kvtier.tiers.device import KVSlots
    from kvtier.trace import Trace

__all__ = ["Prefetcher"]

log = logging.getLogger(__name__)

JOIN_S_MAX: Final = 30.0
"""How long ``close`` waits for reads and copies that have begun."""

HOP_BYTES: Final = 4 << 20
"""What one hop to a read lane brings at most: several small blocks, or one."""
THREADS_PER_READ: Final = 2
"""Threads for each read that may be in flight: some verify while others read."""
HOPS_PER_READ: Final = 3
"""Hops begun for each read that may be in flight: a thread that is done finds its next one."""


@dataclass(slots=True, eq=False)
class _Read:
    block: BlockId
    row: int
    submitted: float
    arrival: float
    """When the link has delivered it, on the loop's clock."""
    settled: bool = False


class Prefetcher:
    """Owns the loop thread, the read and copy lanes, the read queue and what prefetches hold.

    ``writes`` is narrowed down while a restore waits for a read. ``loop`` has not been started; its
    clock is what deadlines and links are measured by.
    """

    def __init__(
        self,
        catalog: Catalog,
        mover: Mover,
        promoter: Promoter,
        profiler: Profiler,
        metrics: Metrics,
        config: StoreConfig,
        *,
        block_bytes: int,
        links: Mapping[Tier, LinkThrottle],
        failed: Callable[[BaseException], None],
        writes: WriteGate | None = None,
        loop: LoopThread | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._trace = trace
        self._catalog = catalog
        self._mover = mover
        self._promoter = promoter
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._links = links
        self._failed = failed
        self._writes = writes or WriteGate(1)
        self._queue: ReadQueue[BlockId, LoadTicket | Promotion] = ReadQueue()
        self._hop_blocks = max(1, HOP_BYTES // block_bytes)
        self._hops_max = HOPS_PER_READ * config.loads_inflight_max
        self._hops = 0
        per_s = config.prefetch_bytes_per_s
        self._pace = LinkThrottle(per_s) if per_s else None
        self._paced_until = -math.inf
        self._pace_timer: Timer | None = None
        lane = concurrent.futures.ThreadPoolExecutor
        self._read_lane = lane(
            THREADS_PER_READ * config.loads_inflight_max, thread_name_prefix="kvtier-read"
        )
        self._load_run = wrap(carried(self._load_all))
        self._loop = loop or LoopThread("loop")
        self._rates = LinkRates(profiler, block_bytes)
        self._deliveries = Deliveries(
            mover, promoter, metrics, self._rates, self._loop, links.get(Tier.HOST),
            block_bytes=block_bytes, copies_inflight_max=config.loads_inflight_max, failed=failed,
            trace=trace,
        )  # fmt: skip
        self._promotions = Promotions(
            self._queue, catalog, mover, metrics,
            blocks_max={
                Tier.HOST: min(config.prefetch_blocks_max(block_bytes), mover.host_blocks_max),
                Tier.DEVICE: 0 if per_s == 0 else promoter.blocks_max,
            },
            timers=self._loop, changed=self._pump, to_device=self._deliveries.promote,
        )  # fmt: skip
        self._loop.start(self._broke)

    def _broke(self, error: BaseException) -> None:
        """Take note that something on the loop failed: nobody may wait for it."""
        self._failed(error)
        self._turn_away(error)

    # -- what others call, from any thread

    def load(self, ticket: LoadTicket) -> None:
        """Start bringing a block into an engine slot, before all prefetches."""
        if not self._loop.submit(partial(self._begin_load, ticket)):
            ticket.refuse(TransferFailed("the store is closing"))

    def load_layers(self, tail: LayerTail) -> bool:
        """Start copying host blocks into an engine's slots by layers, if all are in host memory."""
        rows: list[int] = []
        with self._catalog.changed:
            for name in tail.names:
                row = self._catalog.find(name)
                if row is None or not self._catalog.pin(row, Tier.HOST):
                    break
                rows.append(row)
        whole = len(rows) == len(tail.names)
        if whole and self._loop.submit(partial(self._begin_layers, tail, rows)):
            return True
        for row in rows:
            self._mover.unpin_host(row)
        return False

    def cancel(self, ticket: LoadTicket) -> bool:
        """Stop a load, and the read too if nobody else wants it; False if it must be awaited."""
        claimed = ticket.claim()
        if claimed:
            self._loop.submit(partial(self._leave, ticket))
        return claimed

    def prefetch(
        self,
        wanted: Sequence[BlockId],
        present: Sequence[BlockId] = (),
        *,
        tier: Tier = Tier.HOST,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> Prefetch:
        """Start promoting ``wanted`` blocks, given in prompt order, from the last one on.

        ``tier`` is host memory or the device. With a deadline these are kept there, and those that
        are ``present`` already, until a restore has them or ``KEPT_AFTER_S`` seconds after it.
        """
        if deadline_s is not None and not 0 <= deadline_s < math.inf:
            raise ValueError(f"deadline_s: {deadline_s!r} is not a number of seconds from now")
        deadline = math.inf if deadline_s is None else self._loop.time() + deadline_s
        urgency = Urgency(Rank.PREFETCH, -priority, deadline)
        transfer = Prefetch(lambda: self._loop.submit(partial(self._promotions.withdraw, hint)))
        hint = Promotion(urgency, transfer=transfer, tier=tier)
        if not self._loop.submit(partial(self._promotions.accept, hint, wanted, present)):
            transfer.fail(StoreClosed("the store is closing"))
        return transfer

    def place(self, blocks: Iterable[tuple[int, BlockId]], slots: KVSlots) -> list[int]:
        """Copy pinned device copies into an engine's slots, as ``Promoter.place`` does."""
        names = dict(blocks)
        placed = self._promoter.place(names.items(), slots)
        self._loop.submit(partial(self._used, [names[position] for position in placed]))
        return placed

    def let_go(self) -> None:
        """Let go, soon, of everything that is kept in memory for restores to come."""
        self._loop.submit(self._promotions.keep_nothing)

    def usage(self) -> dict[str, int]:
        """Return what waits and what prefetches hold, in blocks, and the bound of the latter."""
        return {
            "queued_blocks": len(self._queue),
            "reading_blocks": self._queue.reading,
            "promoting_blocks": self._deliveries.promoting,
            **self._promotions.usage(),
        }

    def close(self) -> None:
        """Turn away what waits, let what has begun end, stop loop and lanes; idempotent."""
        ended = self._loop.close(self._close_queue, self._abandon, JOIN_S_MAX)
        if ended is False:
            # A disk that hangs must not hang the one who closes: its threads are left behind.
            log.warning("reads or copies did not end in %.0f s; they are abandoned", JOIN_S_MAX)
        self._read_lane.shutdown(wait=ended is True, cancel_futures=True)
        self._deliveries.close(ended=ended is True)

    # -- loads: on the loop, like everything below

    def _begin_load(self, ticket: LoadTicket) -> None:
        if ticket.claimed:
            return
        with self._catalog.changed:
            row = self._catalog.find(ticket.block)
            here = row is not None and self._catalog.pin(row, Tier.HOST)
        if here and row is not None:
            self._hand_over(ticket, row, Tier.HOST)
            self._mover.unpin_host(row)
        else:
            self._queue.want(ticket.block, ticket, RESTORE)
            self._pump()

    def _begin_layers(self, tail: LayerTail, rows: Sequence[int]) -> None:
        self._deliveries.start_layers(tail, rows)
        self._used(tail.names)

    def _used(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self._promotions.used(block)

    def _leave(self, ticket: LoadTicket) -> None:
        self._queue.leave(ticket.block, ticket)
        self._pump()

    def _hand_over(self, ticket: LoadTicket, row: int, source: Tier, read: int = 0) -> None:
        """Start the copy of a host copy that the caller has pinned."""
        if not ticket.claimed:
            self._catalog.pin(row, Tier.HOST)
            self._deliveries.start(ticket, row, source, read)
        self._promotions.used(ticket.block)

    # -- reads

    def _pump(self) -> None:
        """Begin what may begin now."""
        now = self._loop.time()
        while self._hops < self._hops_max and self._take(now):
            pass
        if self._queue.restoring:
            self._writes.narrow()
        else:
            self._writes.widen()
        if self._pace_timer is None and now < self._paced_until and len(self._queue):
            self._pace_timer = self._loop.call_at(self._paced_until, self._resume)

    def _resume(self) -> None:
        self._pace_timer = None
        self._pump()

    def _take(self, now: float) -> bool:
        """Begin one hop, if one may begin; False if none may."""
        rank = self._queue.first()
        if rank is None:
            return False
        free = self._hops_max - self._hops
        held_up = now < self._paced_until or self._deliveries.backed_up
        if rank is Rank.PREFETCH and (free == 1 or held_up):
            return False  # the last hop is for a restore, so that its first read begins at once
        size = min(self._hop_blocks, -(-self._queue.count(rank) // free))
        taken = self._queue.take(now, size, rank)
        for block, waiter in taken.late:
            if isinstance(waiter, Promotion):  # a restore has no deadline here
                self._promotions.drop(waiter, block, "prefetch_late_blocks")
        reads = self._begin(taken.blocks, now)
        if reads:
            if rank is Rank.PREFETCH and self._pace is not None:
                self._paced_until = self._pace.reserve(now, len(reads) * self._block_bytes)
            self._hops += 1
            self._loop.spawn(self._hop(reads, now))
        return True

    def _begin(self, blocks: Sequence[BlockId], now: float) -> list[_Read]:
        """Return the reads of those blocks that are only on the SSD; the others are answered."""
        reads: list[_Read] = []
        others: list[tuple[BlockId, int | None]] = []
        link = self._links.get(Tier.SSD)
        try:
            arrivals = [link.reserve(now, self._block_bytes) if link else now for _ in blocks]
        except BaseException as error:
            for block in blocks:
                self._answer(block, None, Tier.SSD, error)
            raise
        with self._catalog.changed:
            for block, arrival in zip(blocks, arrivals, strict=True):
                row = self._catalog.find(block)
                if row is not None and self._may_read(row):
                    self._catalog.begin(block, Tier.HOST, "load")
                    reads.append(_Read(block, row, now, arrival))
                else:
                    here = row is not None and self._catalog.pin(row, Tier.HOST)
                    others.append((block, row if here else None))
        for block, row in others:
            self._answer(block, row, Tier.HOST)
        return reads

    def _may_read(self, row: int) -> bool:
        """Pin the SSD copy for a read, if there is one and nobody is filling the host copy."""
        absent = self._catalog.state(row, Tier.HOST) is CopyState.ABSENT
        return absent and self._catalog.pin(row, Tier.SSD)

    async def _hop(self, reads: Sequence[_Read], submitted: float) -> None:
        try:
            results = await self._load_run(reads, executor=self._read_lane)
            await self._loop.until(reads[-1].arrival)
            loaded = results.count(ReadResult.OK)
            if loaded:
                self._rates.observe(Tier.SSD, submitted, self._loop.time(), loaded)
            for read, result in zip(reads, results, strict=True):
                self._settle(read, result)
        except Cancelled:
            raise  # given up on: those who wait for it have been answered
        except BaseException as error:
            self._failed(error)  # before anybody is answered: the next call must see it
            for read in reads:
                self._settle(read, ReadResult.FAILED, error)
            raise
        finally:
            self._hops -= 1
            self._pump()

    def _load_all(self, reads: Sequence[_Read]) -> list[ReadResult]:
        """Carry out reads, on a read lane; each is announced as soon as it is done."""
        results: list[ReadResult] = []
        try:
            for read in reads:
                results.append(self._mover.load(read.row))
                self._loop.report(self._loaded, read, results[-1])
        except BaseException:
            for read in reads[len(results) + 1 :]:  # the mover ended the one that failed
                self._catalog.end(read.row, Tier.HOST, "abort")
            raise
        return results

    def _loaded(self, read: _Read, result: ReadResult) -> None:
        if read.arrival <= self._loop.time():
            self._settle(read, result)
        else:  # the throttled link is still busy with it
            self._loop.call_at(read.arrival, self._settle, read, result)

    def _settle(self, read: _Read, result: ReadResult, error: BaseException | None = None) -> None:
        """Let a read's waiters know how it ended, once."""
        if read.settled:
            return
        read.settled = True
        self._catalog.unpin(read.row, Tier.SSD)
        row = read.row if result is ReadResult.OK else None
        self._answer(read.block, row, Tier.SSD, error, read.submitted)

    def _answer(
        self,
        block: BlockId,
        row: int | None,
        source: Tier,
        error: BaseException | None = None,
        submitted: float | None = None,
    ) -> None:
        """End the wait for a block. ``row`` is its host copy, pinned once for this, or None."""
        waiters = self._queue.done(block)
        read = 0
        if self._trace is not None and row is not None and submitted is not None:
            read = self._note_read(self._trace, submitted, waiters)
        hints = [waiter for waiter in waiters if isinstance(waiter, Promotion)]
        if hints and row is None:
            self._metrics.add("prefetch_failed_blocks")
        elif any(hint.tier is Tier.HOST for hint in hints):
            self._metrics.add("prefetched_blocks")
        for hint in hints:  # before a restore uses up what they keep
            if error is not None:
                hint.transfer.fail(error)
            self._promotions.arrived(hint, block, row)
        for ticket in waiters:
            if isinstance(ticket, LoadTicket):
                if row is None:
                    ticket.refuse(error or TransferFailed(f"block {block} is gone"))
                else:
                    self._hand_over(ticket, row, source, read)
        if row is not None:
            self._mover.unpin_host(row)

    def _note_read(
        self, trace: Trace, submitted: float, waiters: Sequence[LoadTicket | Promotion]
    ) -> int:
        """Note a read, as done for the first restore that waits for it, and return its event."""
        for waiter in waiters:
            if isinstance(waiter, LoadTicket):
                return trace.add(
                    "read", "ssd", submitted, self._loop.time(), session=waiter.session,
                    start=waiter.position, stop=waiter.position + 1, nbytes=self._block_bytes,
                )  # fmt: skip
        return trace.add("read", "ssd", submitted, self._loop.time(), nbytes=self._block_bytes)

    # -- the end

    def _close_queue(self) -> None:
        self._turn_away(StoreClosed("the store is closing"))

    def _turn_away(self, error: BaseException) -> None:
        """Answer everybody whose read has not begun, and keep nothing any more."""
        while self._queue.last() is not None:
            for block, waiter in self._queue.drop_last():
                self._refuse(waiter, error)
                if isinstance(waiter, Promotion):
                    self._promotions.drop(waiter, block, "prefetch_cancelled_blocks")
        self._promotions.end()
        self._deliveries.end_promotions()
        self._pump()

    def _abandon(self) -> None:
        """Answer those who wait for reads that do not end, too."""
        for _, waiter in list(self._queue.everybody()):
            self._refuse(waiter, StoreClosed("the store is closing; the disk does not answer"))

    def _refuse(self, waiter: LoadTicket | Promotion, error: BaseException) -> None:
        if isinstance(waiter, Promotion):
            waiter.transfer.fail(error)
        else:
            waiter.refuse(TransferFailed(f"{waiter.block} was not read: {error}"))
