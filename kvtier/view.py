"""The verbs that only look and load: what a store and a reader have in common."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from kvtier import planner
from kvtier.changes import CatalogChanges
from kvtier.errors import SpecMismatch, StoreClosed, StoreFailed
from kvtier.identity import BlockKeys, KVSpec
from kvtier.plan import Residency, RestorePlan, Tier
from kvtier.restore import RestoreSession
from kvtier.tiers.base import BlockId
from kvtier.tiers.device import check_slots
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.memory import check_host_bytes, machine_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from kvtier.calibration import CostBook
    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.cost import CostModel, Profiler
    from kvtier.fields import Extra
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.prefetcher import Prefetcher
    from kvtier.promoter import Promoter
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.device_pool import DevicePool
    from kvtier.tiers.host import HostTier
    from kvtier.tokens import TokenIds
    from kvtier.transfer import Transfer

__all__ = ["Parts", "StoreView"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every view of a store is made of; ``host_blocks_max`` is the host tier's budget."""

    catalog: Catalog
    host: HostTier
    pool: DevicePool
    mover: Mover
    promoter: Promoter
    prefetcher: Prefetcher
    profiler: Profiler
    cost_book: CostBook
    metrics: Metrics
    host_blocks_max: int


class StoreView(ABC):
    """An open store seen by somebody who looks up, plans and restores; thread-safe.

    Whoever derives from it makes the ``Parts``, and closes them.
    """

    def __init__(
        self,
        path: str,
        spec: KVSpec,
        config: StoreConfig,
        device: str,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.path = path
        self.config = config
        self._layout = spec.block_layout
        self._namespace = spec.namespace
        self._clock = clock
        beside = config.staging_blocks_max * host_slot_bytes(self._layout.block_bytes)
        if device.partition(":")[0] == "cpu":
            beside += config.device_bytes
        short = check_host_bytes(config.host_bytes, beside, machine_memory())
        if short:
            log.warning("%s: %s", path, short)
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        self._failure: BaseException | None = None

    def _use(self, parts: Parts) -> None:
        self._catalog = parts.catalog
        self._host = parts.host
        self._pool = parts.pool
        self._mover = parts.mover
        self._promoter = parts.promoter
        self._prefetcher = parts.prefetcher
        self._profiler = parts.profiler
        self._cost_book = parts.cost_book
        self._metrics = parts.metrics
        self._host_blocks_max = parts.host_blocks_max

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
        tiers: tuple[Tier | None, ...] = (None,) * len(keys)
        if keys.namespace == self._namespace:
            # Without a host tier a copy there is one in passing: only what is on the SSD stays.
            order = (Tier.HOST, Tier.SSD) if self._host_blocks_max else (Tier.SSD, Tier.HOST)
            tiers = self._catalog.residency(keys.namespace, keys.hashes, (Tier.DEVICE, *order))
        return Residency(keys, tiers, self._layout.block_bytes)

    def plan(
        self,
        residency: Residency,
        *,
        resident: int = 0,
        step_blocks_max: int = 1,
        way: planner.Way = "best",
    ) -> RestorePlan:
        """Decide what to recompute and what to load, by this store's costs (``planner.plan``)."""
        return planner.plan(
            residency,
            self.costs,
            resident=resident,
            step_blocks_max=step_blocks_max,
            way=way,
        )

    def restore(self, plan: RestorePlan, into: KVSlots) -> RestoreSession:
        """Return the scope that carries a plan out into an engine's slots."""
        self._check_open()
        if plan.namespace != self._namespace:
            raise SpecMismatch("the plan was made for another spec than this store's")
        check_slots(into, self._layout)
        return RestoreSession(
            plan,
            into,
            catalog=self._catalog,
            prefetcher=self._prefetcher,
            promoter=self._promoter,
            profiler=self._profiler,
            metrics=self._metrics,
            loads_inflight_max=self.config.loads_inflight_max,
            clock=self._clock,
            check_open=self._check_open,
        )

    def prefetch(self, keys: BlockKeys, tier: Tier | str = Tier.HOST) -> Transfer[int]:
        """Start promoting a prompt's stored blocks to a tier, as far as it has room.

        ``tier`` is "host", or "device" for the store's own device memory (``device_bytes``), where
        promoted blocks replace those used least recently. The result counts the blocks that came
        to be there.
        """
        target = Tier(tier)
        if target is Tier.SSD:
            raise ValueError("tier: 'host' or 'device' wanted; the SSD is what is promoted from")
        device = target is Tier.DEVICE
        room = self._promoter.blocks_max if device else self._host_blocks_max
        residency = self.lookup(keys)
        stored = [
            (BlockId(keys.namespace, digest), found)
            for digest, found in zip(keys.hashes, residency.tiers, strict=True)
            if found is not None
        ]
        # The tail is kept if there is no room for all: the head is what a plan recomputes.
        kept = stored[-room:] if room else []
        slower = (Tier.HOST, Tier.SSD) if device else (Tier.SSD,)
        wanted = [block for block, found in kept if found in slower]
        return self._prefetcher.prefetch(wanted, target)

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
        return self._profiler.costs

    def stats(self) -> dict[str, Any]:
        """Return counters, tier usage and costs as plain values."""
        self._check_open()
        return {
            "counters": self._metrics.snapshot(),
            "tiers": {
                "device": {**asdict(self._pool.usage()), "ready": self._catalog.ready(Tier.DEVICE)},
                "host": {
                    **asdict(self._host.usage()),
                    **self._host.pinning(),
                    "ready": self._catalog.ready(Tier.HOST),
                },
                "ssd": self._ssd_stats(),
            },
            "pins": self._catalog.pins(),
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

    # -- inside

    def _begin_close(self) -> bool:
        """Whether the caller is the one who closes: once, and never in a forked child."""
        with self._close_lock:
            if self._closed or os.getpid() != self._pid:
                return False
            self._closed = True
            return True

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(f"{self.path}: this is a forked child; open a store of its own")
        if self._closed:
            raise StoreClosed(f"{self.path}: the store is closed")
        if self._failure is not None:
            raise StoreFailed(
                f"{self.path}: a background lane failed: {self._failure}"
            ) from self._failure

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
