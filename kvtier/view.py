"""The verbs that only look and load: what a store and a reader have in common."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from kvtier import planner
from kvtier.changes import CatalogChanges
from kvtier.errors import SpecMismatch, StoreClosed, StoreFailed
from kvtier.identity import BlockKeys, KVSpec
from kvtier.loads import Loads
from kvtier.plan import Residency, RestorePlan, Tier
from kvtier.restore import RestoreSession
from kvtier.tiers.base import BlockId
from kvtier.tiers.device import check_slots
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.memory import check_host_bytes, machine_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from kvtier.config import StoreConfig
    from kvtier.cost import CostModel
    from kvtier.fields import Extra
    from kvtier.parts import Parts
    from kvtier.tiers.device import KVSlots
    from kvtier.tokens import TokenIds
    from kvtier.trace import Trace
    from kvtier.transfer import Prefetch

__all__ = ["StoreView", "weakly"]

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class StoreView(ABC):
    """An open store seen by somebody who looks up, plans and restores; thread-safe.

    Whoever derives from it makes the ``Parts``, and closes them. Lanes never keep it alive: one
    that nobody holds any more is closed, with a ``ResourceWarning``.
    """

    _closed = True  # until there is something to close

    def __init__(
        self,
        path: str,
        spec: KVSpec,
        config: StoreConfig,
        device: str,
        clock: Callable[[], float],
        trace: Trace | None,
    ) -> None:
        self.spec = spec
        self.path = path
        self.config = config
        self._layout = spec.block_layout
        self._namespace = spec.namespace
        self._clock = clock
        self._trace = trace
        beside = config.staging_blocks_max * host_slot_bytes(self._layout.block_bytes)
        if device.partition(":")[0] == "cpu":
            beside += config.device_bytes
        short = check_host_bytes(config.host_bytes, beside, machine_memory())
        if short:
            log.warning("%s: %s", path, short)
        self._pid = os.getpid()
        self._closer = threading.Lock()
        self._failure: BaseException | None = None
        self._compute_price = 0.0

    def _use(self, parts: Parts) -> None:
        self._catalog = parts.catalog
        self._memory = parts.memory
        self._host = parts.memory.host
        self._promoter = parts.memory.promoter
        self._mover = parts.mover
        self._prefetcher = parts.prefetcher
        self._profiler = parts.profiler
        self._cost_book = parts.cost_book
        self._metrics = parts.metrics
        self._host_blocks_max = parts.host_blocks_max
        self._closed = False

    # -- the verbs

    def keys(
        self,
        token_ids: TokenIds,
        tenant: str = "",
        adapter: str = "",
        extra: Sequence[Extra] = (),
    ) -> BlockKeys:
        """Hash a prompt's full blocks under this store's spec (``BlockKeys.of``)."""
        return BlockKeys.of(self.spec, token_ids, tenant, adapter, extra)

    def lookup(self, keys: BlockKeys) -> Residency:
        """Return where each block is: memory only, no I/O, holes allowed, extends nobody's life.

        Keys of another spec are simply not found.
        """
        self._check_open()
        begun = self._clock()
        tiers: tuple[Tier | None, ...] = (None,) * len(keys)
        if keys.namespace == self._namespace:
            # Without a host tier a copy there is one in passing: only what is on the SSD stays.
            order = (Tier.HOST, Tier.SSD) if self._host_blocks_max else (Tier.SSD, Tier.HOST)
            tiers = self._catalog.residency(keys.namespace, keys.hashes, (Tier.DEVICE, *order))
        self._metrics.observe("lookup_seconds", self._clock() - begun)
        return Residency(keys, tiers, self._layout.block_bytes)

    def plan(
        self,
        residency: Residency,
        *,
        resident: int = 0,
        step_blocks_max: int = 1,
        way: planner.Way = "best",
        compute_price: float | None = None,
        deadline_s: float | None = None,
    ) -> RestorePlan:
        """Decide what to recompute and what to load, by this store's costs (``planner.plan``).

        ``compute_price`` is the store's own unless it is given.
        """
        return planner.plan(
            residency,
            self.costs,
            resident=resident,
            step_blocks_max=step_blocks_max,
            way=way,
            compute_price=self._compute_price if compute_price is None else compute_price,
            deadline_s=deadline_s,
        )

    def restore(
        self, plan: RestorePlan, into: KVSlots, *, layerwise: bool = False
    ) -> RestoreSession:
        """Return the scope that carries a plan out into an engine's slots.

        ``layerwise``: the engine waits for each layer (``RestoreSession.wait_layer``), and may
        start with the first one before the last one is copied.
        """
        self._check_open()
        if plan.namespace != self._namespace:
            raise SpecMismatch("the plan was made for another spec than this store's")
        check_slots(into, self._layout)
        return RestoreSession(
            plan,
            into,
            catalog=self._catalog,
            prefetcher=self._prefetcher,
            profiler=self._profiler,
            metrics=self._metrics,
            loads_inflight_max=self.config.loads_inflight_max,
            clock=self._clock,
            check_open=self._check_open,
            trace=self._trace,
            layerwise=layerwise,
        )

    def loads(self, into: KVSlots, told: Callable[[], None] = lambda: None) -> Loads:
        """Return what loads single blocks into an engine's slots, for decisions made elsewhere.

        ``told`` is called, from any thread, when an answer is there to be taken.
        """
        self._check_open()
        check_slots(into, self._layout)
        return Loads(
            self._namespace,
            into,
            catalog=self._catalog,
            prefetcher=self._prefetcher,
            metrics=self._metrics,
            told=told,
            trace=self._trace,
        )

    def measured(self, start: int, tokens: int, seconds: float, overlap: float = 0.0) -> None:
        """Teach the cost of recomputing from a step that was measured elsewhere.

        ``tokens`` tokens from position ``start`` on took ``seconds``; during the share ``overlap``
        of them loads were under way.
        """
        self._check_open()
        self._profiler.computed(start, tokens, seconds, overlap)
        self._metrics.observe("step_seconds", seconds)

    def prefetch(
        self,
        keys: BlockKeys,
        tier: Tier | str = Tier.HOST,
        *,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> Prefetch:
        """Start promoting a prompt's stored blocks to a tier: a hint, which may be cancelled.

        ``tier`` is "host", or "device" for the store's own device memory (``device_bytes``).
        ``deadline_s`` is when the prompt is expected to be restored, in seconds from now. Higher
        priorities go first, then earlier deadlines. A block whose read has not begun by then is
        dropped; one that arrived is kept until it was restored, or a little longer than that. What
        prefetches hold is bounded by ``prefetch_bytes_max`` and ``device_bytes``: the tail of a
        prompt, and what is more urgent, gets the room. Restores never wait for prefetches.
        """
        target = Tier(tier)
        if target is Tier.SSD:
            raise ValueError("tier: 'host' or 'device' wanted; the SSD is what is promoted from")
        device = target is Tier.DEVICE
        room = self._promoter.blocks_max if device else self._host_blocks_max
        slower = (Tier.HOST, Tier.SSD) if device else (Tier.SSD,)
        stored = [
            (BlockId(keys.namespace, digest), found in slower)
            for digest, found in zip(keys.hashes, self.lookup(keys).tiers, strict=True)
            if found is not None
        ]
        # The tail is kept if there is no room for all: the head is what a plan recomputes.
        head = max(len(stored) - room, 0)
        self._metrics.add("prefetch_declined_blocks", sum(below for _, below in stored[:head]))
        return self._prefetcher.prefetch(
            [block for block, below in stored[head:] if below],
            [block for block, below in stored[head:] if not below],
            tier=target, deadline_s=deadline_s, priority=priority,
        )  # fmt: skip

    @contextmanager
    def pin(self, keys: BlockKeys) -> Iterator[Residency]:
        """Protect a prompt's blocks from eviction, each in its fastest tier, for a scope."""
        residency = self.lookup(keys)
        with self._catalog.pinned(keys.namespace, keys.hashes, residency.tiers):
            yield self.lookup(keys)

    def changes(self, since: int = 0) -> CatalogChanges:
        """Return which blocks came to be, or ceased to be, in which tiers after ``since``.

        ``since`` is the ``sequence`` of an earlier answer; where that is too long ago (or 0), the
        answer is everything that is stored, and says so in ``complete``.
        """
        self._check_open()
        found = self._catalog.changes(since)
        if found is None:
            sequence, blocks = self._catalog.snapshot()
            found = CatalogChanges(sequence, tuple(blocks), complete=True)
        return found

    @property
    def costs(self) -> CostModel:
        """What recomputing and loading cost, as known now."""
        self._check_owner()
        return self._profiler.costs

    @property
    def compute_price(self) -> float:
        """What a second of compute is worth in seconds of waiting; 0 unless the engine sets it.

        The price at which this store plans, and by which ``tails_only`` tells what is recomputed.
        """
        return self._compute_price

    @compute_price.setter
    def compute_price(self, price: float) -> None:
        if not (price >= 0 and math.isfinite(price)):
            raise ValueError(f"compute_price: {price!r} is not a number of 0 or more")
        self._compute_price = float(price)

    def stats(self) -> dict[str, Any]:
        """Return counters, histograms, tier usage and costs as plain values."""
        self._check_open()
        return {
            "counters": self._metrics.snapshot(),
            "histograms": self._metrics.histograms(),
            "tiers": {
                "device": {
                    **asdict(self._memory.pool.usage()),
                    "ready": self._catalog.ready(Tier.DEVICE),
                },
                "host": {
                    **asdict(self._host.usage()),
                    **self._host.pinning(),
                    "ready": self._catalog.ready(Tier.HOST),
                    "unsaved": len(self._mover.unsaved()),
                },
                "ssd": self._ssd_stats(),
            },
            "pins": self._catalog.pins(),
            "prefetch": self._prefetcher.usage(),
            "costs": {
                **asdict(self.costs),
                "accuracy": asdict(self._profiler.accuracy),
                "age_s": dict(self._cost_book.age_s),
            },
        }

    def _ssd_stats(self) -> dict[str, Any]:
        return {"ready": self._catalog.ready(Tier.SSD)}

    def check(self) -> list[str]:
        """Return what is wrong with the books, in words; empty if sound."""
        self._check_open()
        return [*self._catalog.check(), *self._host.check(), *self._promoter.check()]

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        if not sys.is_finalizing():
            # This may be any thread, a lane's among them, and closing waits for lanes.
            threading.Thread(target=self.close, name="kvtier-close").start()
        message = f"{self.path}: the store was not closed"
        warnings.warn(message, ResourceWarning, stacklevel=1, source=self)

    # -- inside

    def _begin_close(self) -> bool:
        """Whether the caller is the one who closes: once, and never in a forked child."""
        # Claimed and never given back: a signal handler may come at any point of this.
        if os.getpid() != self._pid or not self._closer.acquire(blocking=False):
            return False
        self._closed = True
        return True

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(f"{self.path}: this is a forked child; open a store of its own")

    def _check_open(self) -> None:
        self._check_owner()
        if self._closed:
            raise StoreClosed(f"{self.path}: the store is closed")
        if self._failure is not None:
            raise StoreFailed(
                f"{self.path}: a background lane failed: {self._failure}"
            ) from self._failure

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error


def weakly(method: Callable[P, R]) -> Callable[P, R | None]:
    """Return ``method`` as a callback that does not keep its object alive; without it, None."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        found = reference()
        return None if found is None else found(*args, **kwargs)

    return call
