"""Loads, on an asyncio loop of the store's own: several reads in flight, one per block.

However many wait for a block, it is read once; each waiter then copies it into its own slots.
Blocking work runs on two small thread lanes (reads, copies); the loop only decides and waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiofiles.os import wrap

from kvtier.catalog import CopyState
from kvtier.errors import StoreClosed, TransferFailed
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, ReadResult
from kvtier.tiers.device import write_block
from kvtier.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from kvtier.catalog import Catalog
    from kvtier.cost import Profiler
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.promoter import Promoter
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.throttle import LinkThrottle

__all__ = ["LoadTicket", "Prefetcher"]

JOIN_S_MAX: Final = 30.0
"""How long ``close`` waits for reads and copies that have begun."""

HOP_BYTES: Final = 4 << 20
"""What one hop to a read lane brings: a prefetch of small blocks takes several at once."""
THREADS_PER_READ: Final = 2
"""Threads for each read that may be in flight: some verify while others read."""
RUNS_PER_READ: Final = 3
"""Hops that a prefetch has begun, for each read that may be in flight."""


class LoadTicket:
    """One block on its way into one engine slot; the only thing that may stop it.

    A ticket is claimed once, by whoever comes first: the copy, after which it runs to its end, or
    the cancellation, after which no copy will start. ``done(position, error)`` is called exactly
    once, from another thread, unless the ticket was cancelled; without an error the block is in its
    slot, with one nothing writes to it any more.
    """

    def __init__(
        self,
        block: BlockId,
        tier: Tier,
        slots: KVSlots,
        position: int,
        done: Callable[[int, BaseException | None], None],
    ) -> None:
        self.block = block
        self.tier = tier
        self.slots = slots
        self.position = position
        self.done = done
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Become the one who decides; False if somebody has."""
        return self._claim.acquire(blocking=False)


@dataclass(slots=True, eq=False)
class _Read:
    block: BlockId
    row: int
    done: asyncio.Future[ReadResult]
    waiters: int = 0


class Prefetcher:
    """Owns the loop thread, the read and copy lanes, and the reads under way."""

    def __init__(
        self,
        catalog: Catalog,
        mover: Mover,
        promoter: Promoter,
        profiler: Profiler,
        metrics: Metrics,
        *,
        block_bytes: int,
        loads_inflight_max: int,
        links: Mapping[Tier, LinkThrottle],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._mover = mover
        self._profiler = profiler
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._links = links
        self._failed = failed
        self._run_blocks = max(1, HOP_BYTES // block_bytes)
        self._runs_inflight = RUNS_PER_READ * loads_inflight_max
        self._reads: dict[BlockId, _Read] = {}
        self._last_done = dict.fromkeys((Tier.HOST, Tier.SSD), float("-inf"))
        lane = concurrent.futures.ThreadPoolExecutor
        threads = THREADS_PER_READ * loads_inflight_max
        self._read_lane = lane(threads, thread_name_prefix="kvtier-read")
        self._copy_lane = lane(loads_inflight_max, thread_name_prefix="kvtier-load")
        self._load_run = wrap(self._load_all)
        self._write_block = wrap(write_block)
        self._to_device = wrap(promoter.promote)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gate = threading.Lock()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvtier-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Start work on the loop; False if it is closing."""
        with self._gate:
            if not self._closing:
                self._loop.call_soon_threadsafe(lambda: self._spawn(work()))
            return not self._closing

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    # -- what others call, from any thread

    def load(self, ticket: LoadTicket) -> None:
        """Start bringing a block into an engine slot."""
        if not self._submit(lambda: self._load(ticket)) and ticket.claim():
            ticket.done(ticket.position, TransferFailed("the store is closing"))

    def prefetch(self, blocks: Sequence[BlockId], tier: Tier) -> Transfer[int]:
        """Start promoting blocks to host memory or the device.

        The result counts those that came to be there.
        """
        transfer: Transfer[int] = Transfer()
        if not self._submit(lambda: self._prefetch(blocks, tier, transfer)):
            transfer.fail(StoreClosed("the store is closing"))
        return transfer

    def close(self) -> None:
        """Let what has begun end, stop the loop and the lanes; idempotent."""
        with self._gate:
            if self._closing:
                return
            self._closing = True
        drained = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        try:
            drained.result(JOIN_S_MAX)
        except TimeoutError:
            drained.cancel()
        self._read_lane.shutdown(wait=True, cancel_futures=True)
        self._copy_lane.shutdown(wait=True, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S_MAX)
        self._loop.close()

    async def _drain(self) -> None:
        mine = asyncio.current_task()
        while waiting := asyncio.all_tasks() - {mine}:
            await asyncio.wait(waiting)

    # -- on the loop

    async def _load(self, ticket: LoadTicket) -> None:
        claimed = False
        error: BaseException | None = TransferFailed(f"block {ticket.block} is gone")
        try:
            row, source = await self._fetch(ticket.block)
            if row is None:
                return
            try:
                await self._throttle(Tier.HOST)  # the copy link, whatever tier it came from
                claimed = ticket.claim()
                if claimed:
                    error = await self._into_slot(ticket, row)
            finally:
                self._mover.unpin_host(row)
            if error is None:
                self._metrics.add(f"loaded_blocks_{source}")
                self._metrics.add(f"loaded_bytes_{source}", self._block_bytes)
        except BaseException as failure:
            error = failure
            self._failed(failure)  # before the ticket is answered: the next call must see it
            raise
        finally:
            # Whoever loses the claim stays silent: exactly one answer per ticket.
            if claimed or ticket.claim():
                ticket.done(ticket.position, error)

    async def _into_slot(self, ticket: LoadTicket, row: int) -> Exception | None:
        """Copy a pinned host copy into its slot; returns what the engine's slots raised."""
        payload = self._mover.payload(row)
        submitted = self._loop.time()
        try:
            await self._write_block(
                ticket.slots, ticket.position, payload, executor=self._copy_lane
            )
            self._observe(Tier.HOST, submitted)
        except Exception as error:  # noqa: BLE001 - the engine's code is not ours to trust
            return error
        return None

    def _observe(self, tier: Tier, submitted: float, blocks: int = 1) -> None:
        """Learn a link's rate from one transfer: the time it had the link for itself."""
        now = self._loop.time()
        previous = self._last_done[tier]
        self._last_done[tier] = now
        spent = now - max(submitted, previous)
        self._profiler.loaded(tier, blocks * self._block_bytes, spent)

    async def _throttle(self, tier: Tier) -> None:
        link = self._links.get(tier)
        if link is not None:
            now = self._loop.time()
            await self._until(link.reserve(now, self._block_bytes))

    async def _until(self, instant: float) -> None:
        if instant <= self._loop.time():
            return
        arrived = self._loop.create_future()
        timer = self._loop.call_at(instant, arrived.set_result, None)
        try:
            await arrived
        finally:
            timer.cancel()

    async def _prefetch(
        self, blocks: Sequence[BlockId], tier: Tier, transfer: Transfer[int]
    ) -> None:
        size = self._run_blocks
        left = iter([blocks[i : i + size] for i in range(0, len(blocks), size)])

        async def promote() -> int:
            return sum([await self._promote(run, tier) for run in left])

        # A few at a time: starting thousands of reads at once would keep the loop, and with it the
        # interpreter, from the threads that are to carry them out.
        runners = [promote() for _ in range(self._runs_inflight)]
        try:
            transfer.finish(sum(await asyncio.gather(*runners)))
        except BaseException as error:
            transfer.fail(error)
            raise

    async def _promote(self, blocks: Sequence[BlockId], tier: Tier) -> int:
        """Bring blocks into host memory, and on to the device if that is the tier.

        Returns how many came to be there.
        """
        begun = self._begin(blocks)
        for read in begun:
            read.waiters += 1
        found = 0
        # Unpinned at once: many prefetches must not hold all slots while they wait for more.
        for read in begun:
            found += await self._let_go(await self._arrival(read), tier)
        mine = {read.block for read in begun}
        for block in blocks:
            if block not in mine:
                row, _ = await self._fetch(block)
                found += await self._let_go(row, tier)
        return found

    async def _let_go(self, row: int | None, tier: Tier) -> bool:
        """Unpin a host copy, once it is on the device too if that is the tier.

        Returns whether the block is in the tier.
        """
        if row is None:
            return False
        try:
            if tier is not Tier.DEVICE:
                return True
            await self._throttle(Tier.HOST)  # the copy link, as for a load
            payload = self._mover.payload(row)
            return await self._to_device(row, payload, executor=self._copy_lane)
        finally:
            self._mover.unpin_host(row)

    async def _fetch(self, block: BlockId) -> tuple[int | None, Tier]:
        """Bring a block into host memory, if it is not there, and pin it.

        Returns its row, or None if it is gone, and the tier that it came from.
        """
        read = self._reads.get(block)
        if read is None:
            with self._catalog.changed:
                row = self._catalog.find(block)
                if row is not None and self._catalog.pin(row, Tier.HOST):
                    return row, Tier.HOST
            self._begin([block])
            read = self._reads.get(block)
        if read is None:
            return None, Tier.SSD
        read.waiters += 1
        return await self._arrival(read), Tier.SSD

    async def _arrival(self, read: _Read) -> int | None:
        """Wait for a read, as one of its waiters; returns its row, pinned, or None."""
        result = await asyncio.shield(read.done)
        read.waiters -= 1
        if result is not ReadResult.OK:
            return None
        # The read left one pin: the last waiter takes it over, the others take their own first.
        if read.waiters:
            self._catalog.pin(read.row, Tier.HOST)
        return read.row

    def _begin(self, blocks: Sequence[BlockId]) -> list[_Read]:
        """Start one read of those blocks that are only on the SSD and that nobody reads yet."""
        begun: list[_Read] = []
        with self._catalog.changed:
            for block in blocks:
                row = self._catalog.find(block)
                if row is None or block in self._reads or not self._may_read(row):
                    continue
                self._catalog.begin(block, Tier.HOST, "load")
                self._reads[block] = _Read(block, row, self._loop.create_future())
                begun.append(self._reads[block])
        if begun:
            self._spawn(self._read(begun))
        return begun

    def _may_read(self, row: int) -> bool:
        """Pin the SSD copy for a read, if there is one and nobody is filling the host copy."""
        absent = self._catalog.state(row, Tier.HOST) is CopyState.ABSENT
        return absent and self._catalog.pin(row, Tier.SSD)

    async def _read(self, reads: Sequence[_Read]) -> None:
        link, submitted = self._links.get(Tier.SSD), self._loop.time()
        arrival = link.reserve(submitted, len(reads) * self._block_bytes) if link else 0.0
        try:
            results = await self._load_run(reads, arrival, executor=self._read_lane)
            await self._until(arrival)
            loaded = results.count(ReadResult.OK)
            if loaded:
                self._observe(Tier.SSD, submitted, loaded)
        except BaseException as error:
            for read in reads:
                self._settle(read, error)
            raise

    def _load_all(self, reads: Sequence[_Read], arrival: float) -> list[ReadResult]:
        """Carry out reads, on a read lane; each is announced as soon as it is done."""
        results = []
        for read in reads:
            results.append(self._mover.load(read.row))
            self._loop.call_soon_threadsafe(self._loaded, read, results[-1], arrival)
        return results

    def _loaded(self, read: _Read, result: ReadResult, arrival: float) -> None:
        if arrival <= self._loop.time():
            self._settle(read, result)
        else:  # the throttled link is still busy with it
            self._loop.call_at(arrival, self._settle, read, result)

    def _settle(self, read: _Read, outcome: ReadResult | BaseException) -> None:
        """Let a read's waiters know how it ended, once."""
        if read.done.done():
            return
        del self._reads[read.block]
        self._catalog.unpin(read.row, Tier.SSD)
        if isinstance(outcome, BaseException):
            read.done.set_exception(outcome)
            read.done.exception()  # the task that failed reports it; waiters may be gone
        else:
            read.done.set_result(outcome)
