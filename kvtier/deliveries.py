"""The last stretch of a load: from host memory into an engine's slot, on a lane of its own.

Promotions to the device go the same way, some at a time: the lane always has room for a load.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections import deque
from typing import TYPE_CHECKING

from aiofiles.os import wrap

from kvtier.errors import TransferFailed
from kvtier.lane import carried
from kvtier.layerwise import LayerTail
from kvtier.loop import Cancelled, LoopThread
from kvtier.plan import Tier
from kvtier.tiers.device import write_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.cost import Profiler
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.promoter import Promoter
    from kvtier.ticket import LoadTicket
    from kvtier.tiers.throttle import LinkThrottle
    from kvtier.trace import Trace

__all__ = ["Deliveries", "LinkRates"]


class LinkRates:
    """Learns each link's rate from transfers: from the time that one had the link for itself."""

    def __init__(self, profiler: Profiler, block_bytes: int) -> None:
        self._profiler = profiler
        self._block_bytes = block_bytes
        self._last_done = dict.fromkeys((Tier.HOST, Tier.SSD), -math.inf)

    def observe(self, tier: Tier, submitted: float, now: float, blocks: int = 1) -> None:
        """Learn from a transfer of some blocks that ends now."""
        spent = now - max(submitted, self._last_done[tier])
        self._last_done[tier] = now
        self._profiler.loaded(tier, blocks * self._block_bytes, spent)


class Deliveries:
    """Owns the copy lane. Everything but the copies runs on the loop."""

    def __init__(
        self,
        mover: Mover,
        promoter: Promoter,
        metrics: Metrics,
        rates: LinkRates,
        loop: LoopThread,
        link: LinkThrottle | None,
        *,
        block_bytes: int,
        copies_inflight_max: int,
        failed: Callable[[BaseException], None],
        trace: Trace | None = None,
    ) -> None:
        self._trace = trace
        self._mover = mover
        self._metrics = metrics
        self._rates = rates
        self._loop = loop
        self._link = link
        self._block_bytes = block_bytes
        self._failed = failed
        self._lane = concurrent.futures.ThreadPoolExecutor(
            copies_inflight_max, thread_name_prefix="kvtier-load"
        )
        self._promoting_max = max(1, copies_inflight_max - 1)
        self._promoting = 0
        self._waiting: deque[tuple[int, Callable[[bool], None]]] = deque()  # pinned host copies
        self._promote_block = wrap(carried(promoter.promote))
        self._write_block = wrap(carried(write_block))
        self._copy_layer = wrap(carried(LayerTail.copy))

    def start(self, ticket: LoadTicket, row: int, source: Tier, read: int = 0) -> None:
        """Start the copy of a host copy that was pinned for it; ``source`` is where it was.

        ``read`` is the trace's event of the read that brought it there, if one did.
        """
        self._loop.spawn(self._deliver(ticket, row, source, read))

    def start_layers(self, tail: LayerTail, rows: Sequence[int]) -> None:
        """Start the copy by layers of host copies that were pinned for it."""
        self._loop.spawn(self._deliver_layers(tail, rows))

    def promote(self, row: int, done: Callable[[bool], None]) -> None:
        """Bring a host copy that was pinned for it to the device, in turn.

        ``done`` learns whether it is there now, before the host copy is unpinned.
        """
        self._waiting.append((row, done))
        self._promote_next()

    @property
    def promoting(self) -> int:
        """Host copies that are pinned to be promoted."""
        return len(self._waiting) + self._promoting

    @property
    def backed_up(self) -> bool:
        """Whether promotions wait for others: more of them would only hold host memory."""
        return bool(self._waiting)

    def end_promotions(self) -> None:
        """Turn away the promotions that have not begun."""
        while self._waiting:
            row, done = self._waiting.popleft()
            done(False)  # noqa: FBT003
            self._mover.unpin_host(row)

    def close(self, *, ended: bool) -> None:
        """End the lane; copies that have not ended are waited for only if they are known to."""
        self._lane.shutdown(wait=ended, cancel_futures=True)

    async def _deliver(self, ticket: LoadTicket, row: int, source: Tier, read: int) -> None:
        claimed = False
        error: BaseException | None = None
        try:
            try:
                asked = self._loop.time()
                await self._link_passed()
                claimed = ticket.claim()
                if claimed:
                    error = await self._into_slot(ticket, row, read, asked)
            finally:
                self._mover.unpin_host(row)
            if claimed and error is None:
                self._metrics.add(f"loaded_blocks_{source}")
                self._metrics.add(f"loaded_bytes_{source}", self._block_bytes)
        except Cancelled:
            # Given up on: no answer for a copy that has begun, since it may still write.
            error, claimed = TransferFailed("the store was closed"), False
            raise
        except BaseException as failure:
            error = failure
            self._failed(failure)  # before the ticket is answered: the next call must see it
            raise
        finally:
            # Whoever loses the claim stays silent: exactly one answer per ticket.
            if claimed or ticket.claim():
                ticket.done(ticket.position, error)

    async def _link_passed(self) -> None:
        """Wait for the copy link, whatever tier a block came from."""
        if self._link is not None:
            arrival = self._link.reserve(self._loop.time(), self._block_bytes)
            await self._loop.until(arrival)

    def _promote_next(self) -> None:
        while self._waiting and self._promoting < self._promoting_max:
            self._promoting += 1
            self._loop.spawn(self._promote(*self._waiting.popleft()))

    async def _promote(self, row: int, done: Callable[[bool], None]) -> None:
        there = False
        try:
            await self._link_passed()
            payload = self._mover.payload(row)
            there = await self._promote_block(row, payload, executor=self._lane)
        except Cancelled:
            raise  # given up on
        except BaseException as failure:
            self._failed(failure)  # before anybody is answered: the next call must see it
            raise
        finally:
            self._promoting -= 1
            self._promote_next()
            done(there)
            self._mover.unpin_host(row)

    async def _into_slot(
        self, ticket: LoadTicket, row: int, read: int, asked: float
    ) -> Exception | None:
        """Copy a pinned host copy into its slot; returns what the engine's slots raised.

        A throttled link is slow from the time it was ``asked``, as a plan must expect it.
        """
        payload = self._mover.payload(row)
        submitted = self._loop.time()
        try:
            await self._write_block(ticket.slots, ticket.position, payload, executor=self._lane)
            ended = self._loop.time()
            self._rates.observe(Tier.HOST, submitted if self._link is None else asked, ended)
        except Exception as error:  # noqa: BLE001 - the engine's code is not ours to trust
            return error
        if self._trace is not None:
            ticket.event = self._trace.add(
                "copy", "host", submitted, ended,
                session=ticket.session, start=ticket.position, stop=ticket.position + 1,
                nbytes=self._block_bytes, after=(read,) if read else (),
            )  # fmt: skip
        return None

    async def _deliver_layers(self, tail: LayerTail, rows: Sequence[int]) -> None:
        count, submitted = len(rows), self._loop.time()
        payloads = [self._mover.payload(row) for row in rows]
        stopped = self._loop.promise()
        tail.stopped = lambda: self._loop.keep(stopped)
        try:
            for layer, nbytes in enumerate(tail.layer_bytes):
                if self._link is not None:  # a slow link does not hold up who gives up
                    arrival = self._link.reserve(self._loop.time(), nbytes)
                    await self._loop.until(arrival, stopped)
                if not await self._copy_layer(tail, layer, payloads, executor=self._lane):
                    break
            if tail.ended_s is not None:
                self._rates.observe(Tier.HOST, submitted, self._loop.time(), count)
                self._metrics.add("loaded_blocks_host", count)
                self._metrics.add("loaded_bytes_host", count * self._block_bytes)
        finally:
            payloads.clear()
            for row in rows:
                self._mover.unpin_host(row)
