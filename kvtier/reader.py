"""The facade of whoever only reads: another process's store, or a closed one."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from kvtier.calibration import CostBook
from kvtier.catalog import Catalog
from kvtier.config import ByteSize, StoreConfig, parse_bytes, parse_sizes
from kvtier.errors import StoreFailed
from kvtier.follower import FollowedReads, Follower
from kvtier.metrics import Metrics
from kvtier.mover import Mover
from kvtier.parts import Memory, Parts
from kvtier.plan import Tier
from kvtier.policy import Lru
from kvtier.prefetcher import Prefetcher
from kvtier.tiers.directory import ReadDirectory
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.index import LmdbIndexReader
from kvtier.view import StoreView, weakly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.changes import CatalogChanges
    from kvtier.follower import FollowedIndex
    from kvtier.identity import BlockKeys, KVSpec
    from kvtier.loads import Loads
    from kvtier.plan import Residency, RestorePlan
    from kvtier.restore import RestoreSession
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.throttle import LinkThrottle
    from kvtier.trace import Trace

__all__ = ["StoreReader", "open_reader"]

REPLY_S_MAX: Final = 10.0
"""How long the index's process may take to answer before it is ended and started again."""


def open_reader(
    path: str | os.PathLike[str],
    spec: KVSpec,
    *,
    host_bytes: ByteSize = "256MiB",
    device_bytes: ByteSize = 0,
    device: str = "cpu",
    links: Mapping[Tier | str, LinkThrottle] | None = None,
    fs: FileSystem | None = None,
    clock: Callable[[], float] = time.monotonic,
    trace: Trace | None = None,
    **bounds: Any,
) -> StoreReader:
    """Open the store in ``path``, which may be closed or another process's, for reading only.

    ``host_bytes`` and ``device_bytes`` are this reader's own memory. ``device``, ``links``, ``fs``,
    ``clock`` and ``trace`` are as for ``kvtier.open``; of ``StoreConfig``'s other fields those that
    bound loads count here, and ``integrity_key``. An index that cannot be read now is no error:
    everything is a miss until it can be.

    Raises ``FormatError`` or ``StoreFailed`` naming the path, ``ValueError`` naming the setting.
    """
    config = StoreConfig(
        host_bytes=parse_bytes("host_bytes", host_bytes),
        ssd_bytes=0,
        device_bytes=parse_bytes("device_bytes", device_bytes),
        **parse_sizes(bounds),
    )
    throttles = {Tier(tier): link for tier, link in (links or {}).items()}
    where = os.fspath(path)
    return StoreReader(where, spec, config, device, throttles, fs, clock, trace=trace)


class StoreReader(StoreView):
    """A view of a store that someone else may be writing; use ``kvtier.open_reader``.

    Thread-safe. It is in use for ``IN_USE_S`` seconds after a verb or a load, and then follows the
    store's index every ``FOLLOW_S``. A pin protects this reader's copies, nothing in the store.
    """

    def __init__(
        self,
        path: str,
        spec: KVSpec,
        config: StoreConfig,
        device: str,
        links: Mapping[Tier, LinkThrottle],
        fs: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        index: Callable[[str], FollowedIndex] | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(path, spec, config, device, clock, trace)
        fs = fs or PosixFileSystem()
        self._directory = ReadDirectory(path, fs)
        with ExitStack() as undo:
            undo.callback(self._directory.close)
            try:
                self._open_tiers(fs, index, links, device, undo)
            except OSError as error:
                raise StoreFailed(f"{path}: cannot be opened: {error.strerror or error}") from error
            undo.pop_all()

    def _open_tiers(
        self,
        fs: FileSystem,
        index: Callable[[str], FollowedIndex] | None,
        links: Mapping[Tier, LinkThrottle],
        device: str,
        undo: ExitStack,
    ) -> None:
        config, block_bytes = self.config, self._layout.block_bytes
        metrics, catalog = Metrics(), Catalog(Lru)
        followed = (index or _lmdb)(self._directory.index_path)
        undo.callback(followed.close)
        self._follower = Follower(
            followed, catalog, self._namespace, clock=self._clock, failed=weakly(self._fail)
        )
        self._follower.look()
        self._ssd = FollowedReads(
            self._directory.segments, fs, self._follower, integrity_key=config.integrity_key
        )
        host_blocks_max = config.host_bytes // host_slot_bytes(block_bytes)
        memory = Memory.open(
            catalog, metrics, config,
            block_bytes=block_bytes, host_blocks_max=host_blocks_max, device=device, undo=undo,
        )  # fmt: skip
        cost_book = CostBook(self._directory, self._namespace, device, links)
        profiler = cost_book.read()
        mover = Mover(
            catalog, memory.host, self._ssd, metrics,
            host_blocks_max=host_blocks_max, slot_wait_s_max=config.slot_wait_s_max,
            forget=self._follower.forget,
        )  # fmt: skip
        prefetcher = Prefetcher(
            catalog, mover, memory.promoter, profiler, metrics, config,
            block_bytes=block_bytes, links=links,
            failed=weakly(self._fail), trace=self._trace,
        )  # fmt: skip
        self._use(
            Parts(catalog, memory, mover, prefetcher, profiler, cost_book, metrics, host_blocks_max)
        )
        self._follower.start(mover, memory.promoter)

    # -- the verbs: what counts as a use, for the sake of which the index is followed

    def lookup(self, keys: BlockKeys) -> Residency:
        """Return where each block was when the index was last followed: memory only, no I/O."""
        self._check_open()
        self._follower.used()
        return super().lookup(keys)

    def restore(
        self, plan: RestorePlan, into: KVSlots, *, layerwise: bool = False
    ) -> RestoreSession:
        """Return the scope that carries a plan out; a block gone by then is recomputed."""
        self._check_open()
        self._follower.used()
        return super().restore(plan, into, layerwise=layerwise)

    def loads(self, into: KVSlots, told: Callable[[], None] = lambda: None) -> Loads:
        """Return what loads single blocks; one that is gone by then is answered as not loaded."""
        self._check_open()
        self._follower.used()
        return super().loads(into, told)

    def changes(self, since: int = 0) -> CatalogChanges:
        """Return what changed for this reader after ``since``; the sequence is its own."""
        self._check_open()
        self._follower.used()
        return super().changes(since)

    def _ssd_stats(self) -> dict[str, Any]:
        return {**super()._ssd_stats(), "io": self._ssd.io, "index": self._follower.state}

    def close(self) -> None:
        """Let loads under way end and release everything; nothing is written. Idempotent."""
        if not self._begin_close():
            return
        self._prefetcher.close()
        self._follower.close()
        self._memory.close()
        self._directory.close()


def _lmdb(path: str) -> FollowedIndex:
    return LmdbIndexReader(path, reply_s_max=REPLY_S_MAX)
