"""Single blocks into an engine's slots, for a restore whose decisions are made elsewhere.

``RestoreSession`` decides and loads in one process. Where another process decides (an engine's
scheduler, for all ranks at once), each rank carries out what it is told with ``Loads``.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from kvtier.errors import StoreClosed, TransferFailed
from kvtier.ticket import LoadTicket
from kvtier.tiers.base import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kvtier.catalog import Catalog
    from kvtier.metrics import Metrics
    from kvtier.plan import Tier
    from kvtier.prefetcher import Prefetcher
    from kvtier.tiers.device import KVSlots
    from kvtier.trace import Trace

__all__ = ["Loads"]


class Loads:
    """The loads of one restore, each started by itself; nothing here waits.

    ::

        loads = store.loads(into=slots, told=wake)
        loads.start(7, keys[7], Tier.SSD)
        for block, landed in loads.take():     # after wake() was called, or whenever
            ...
        loads.end()                            # then poll: once ``ended``, nothing writes any more

    A block is pinned from ``start`` until its answer, and is answered exactly once. One thread
    drives it; ``told`` is called from others.
    """

    def __init__(
        self,
        namespace: bytes,
        slots: KVSlots,
        *,
        catalog: Catalog,
        prefetcher: Prefetcher,
        metrics: Metrics,
        told: Callable[[], None],
        now_ns: Callable[[], int] = time.time_ns,
        trace: Trace | None = None,
    ) -> None:
        self.error: BaseException | None = None
        """What the engine's slots raised, if they did; the block is answered as not loaded."""
        self._namespace = namespace
        self._slots = slots
        self._catalog = catalog
        self._prefetcher = prefetcher
        self._metrics = metrics
        self._now_ns = now_ns
        self._told = told
        self._session = 0 if trace is None else trace.session()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[LoadTicket, AbstractContextManager[object]]] = {}
        self._answers: list[tuple[int, bool]] = []
        self._over = False

    def start(self, block: int, digest: bytes, tier: Tier) -> None:
        """Start loading a stored block, of that hash, into slot ``block``; answered by ``take``.

        One that is not stored any more, or that is wanted after ``end``, is answered as not loaded.
        """
        self._check_owner()
        name = BlockId(self._namespace, digest)
        pin = self._catalog.pinned(self._namespace, (digest,), (tier,))
        with self._lock:
            if block in self._under_way:
                raise ValueError(f"block {block} is being loaded already")
            found = None if self._over else pin.__enter__()[0]
            if found is None:
                self._answers.append((block, False))
            else:
                ticket = LoadTicket(
                    name, found, self._slots, block, self._done, session=self._session
                )
                self._under_way[block] = ticket, pin
        if found is None:
            self._told()
            return
        self._catalog.touch(self._namespace, (digest,), self._now_ns())
        self._prefetcher.load(ticket)

    def cancel(self, block: int) -> None:
        """Stop a load if its copy has not begun; it is answered either way."""
        self._check_owner()
        with self._lock:
            ticket, _ = self._under_way.get(block, (None, None))
        if ticket is not None and self._prefetcher.cancel(ticket):
            self._answer(block, landed=False)

    def take(self) -> list[tuple[int, bool]]:
        """Return (block, whether it landed) of loads that were answered since the last call.

        Once a block is answered nothing writes to its slot any more.
        """
        with self._lock:
            answers, self._answers = self._answers, []
            return answers

    def end(self) -> None:
        """Start no load any more, and cancel those that can be; idempotent."""
        self._check_owner()
        with self._lock:
            first, self._over = not self._over, True
            blocks = list(self._under_way)
        for block in blocks:
            self.cancel(block)
        if first:
            self._metrics.add("restores")

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called and nothing writes to any slot any more."""
        with self._lock:
            return self._over and not self._under_way

    def _done(self, block: int, error: BaseException | None) -> None:
        """Take a ticket's answer, on the prefetcher's thread."""
        if error is not None:
            self._metrics.add("load_failures")
            if not isinstance(error, TransferFailed):
                self.error = error
        self._answer(block, landed=error is None)

    def _answer(self, block: int, *, landed: bool) -> None:
        with self._lock:
            _, pin = self._under_way.pop(block)
            self._answers.append((block, landed))
        pin.__exit__(None, None, None)
        self._told()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise StoreClosed("this is a forked child; the loads are its parent's")
