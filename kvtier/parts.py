"""What every view of a store is made of, and its tiers in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.promoter import Promoter
from kvtier.tiers.arena import cuda_runtime
from kvtier.tiers.device_pool import DevicePool
from kvtier.tiers.host import HostTier

if TYPE_CHECKING:
    from contextlib import ExitStack

    from kvtier.calibration import CostBook
    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.cost import Profiler
    from kvtier.metrics import Metrics
    from kvtier.mover import Mover
    from kvtier.prefetcher import Prefetcher

__all__ = ["Memory", "Parts"]


@dataclass(frozen=True, slots=True)
class Memory:
    """The host tier, and device memory of the store's own with who uses it."""

    host: HostTier
    pool: DevicePool
    promoter: Promoter

    @classmethod
    def open(
        cls,
        catalog: Catalog,
        metrics: Metrics,
        config: StoreConfig,
        *,
        block_bytes: int,
        host_blocks_max: int,
        device: str,
        undo: ExitStack,
    ) -> Memory:
        """Take the memory that ``config`` asks for; ``undo`` closes it if the store cannot open.

        Raises ``ValueError`` naming the setting if it cannot be had.
        """
        slots = host_blocks_max + config.staging_blocks_max
        host = HostTier(block_bytes, slots, config.host_bytes, cuda_runtime())
        undo.callback(host.close)
        pool = DevicePool(block_bytes, config.device_bytes, device)
        undo.callback(pool.close)
        return cls(host, pool, Promoter(catalog, pool, metrics))

    def close(self) -> None:
        """Give it back; idempotent."""
        self.host.close()
        self.pool.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """What every view of a store is made of; ``host_blocks_max`` is the host tier's budget."""

    catalog: Catalog
    memory: Memory
    mover: Mover
    prefetcher: Prefetcher
    profiler: Profiler
    cost_book: CostBook
    metrics: Metrics
    host_blocks_max: int
