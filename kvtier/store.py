"""The facade: one directory, one spec, and every verb of the API."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Self

from kvtier import planner
from kvtier.calibration import CostBook
from kvtier.catalog import Catalog
from kvtier.config import ByteSize, StoreConfig, parse_bytes
from kvtier.errors import SpecMismatch, StoreClosed, StoreFailed, TransferFailed
from kvtier.identity import BlockKeys, KVSpec
from kvtier.metrics import Metrics
from kvtier.mover import Mover
from kvtier.plan import Residency, RestorePlan, Step, Tier
from kvtier.policy import Lru
from kvtier.prefetcher import Prefetcher
from kvtier.restore import RestoreSession
from kvtier.tiers.base import BlockId
from kvtier.tiers.device import TensorSlots, check_slots
from kvtier.tiers.directory import StoreDirectory
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.host import HostTier, host_slot_bytes
from kvtier.tiers.index import LmdbIndex
from kvtier.tiers.ssd import SsdTier
from kvtier.transfer import PutResult, Transfer
from kvtier.writeback import PutJob, Writeback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from kvtier.cost import CostModel
    from kvtier.fields import Extra
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.throttle import LinkThrottle
    from kvtier.tokens import TokenIds

__all__ = ["Store", "open_store"]

log = logging.getLogger(__name__)

CALIBRATION_BLOCKS: Final = 2


def open_store(
    path: str | os.PathLike[str],
    spec: KVSpec,
    *,
    host_bytes: ByteSize = "1GiB",
    ssd_bytes: ByteSize = "10GiB",
    policy: str = "lru",
    device: str = "cpu",
    links: Mapping[Tier | str, LinkThrottle] | None = None,
    fs: FileSystem | None = None,
    clock: Callable[[], float] = time.monotonic,
    **bounds: Any,
) -> Store:
    """Open ``path`` as this process's store for ``spec``, creating it if it is empty or new.

    ``host_bytes`` and ``ssd_bytes`` take bytes or strings like "8GiB"; ``ssd_bytes`` bounds what
    the directory occupies, data and index. ``device`` names what recomputes, since costs are kept
    per device. ``links`` slows tiers down; ``fs`` and ``clock`` are seams for tests. Further
    keywords are the other fields of ``StoreConfig``.

    Raises ``StoreLocked``, ``FormatError`` or ``StoreFailed`` naming the path, ``ValueError``
    naming the setting.
    """
    config = StoreConfig(
        host_bytes=parse_bytes("host_bytes", host_bytes),
        ssd_bytes=parse_bytes("ssd_bytes", ssd_bytes),
        policy=policy,
        **bounds,
    )
    throttles = {Tier(tier): link for tier, link in (links or {}).items()}
    return Store(os.fspath(path), spec, config, device, throttles, fs or PosixFileSystem(), clock)


class Store:
    """An open store: the writer of one directory. Use ``kvtier.open``; thread-safe."""

    def __init__(
        self,
        path: str,
        spec: KVSpec,
        config: StoreConfig,
        device: str,
        links: Mapping[Tier, LinkThrottle],
        fs: FileSystem,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.path = path
        self.config = config
        self._layout = spec.block_layout
        self._namespace = spec.namespace
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        self._failure: BaseException | None = None
        self._metrics = Metrics()
        self._directory = StoreDirectory(path, fs)
        try:
            self._open_tiers(fs, links, device)
        except OSError as error:
            self._directory.close()
            raise StoreFailed(f"{path}: cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self._directory.close()
            raise

    def _open_tiers(self, fs: FileSystem, links: Mapping[Tier, LinkThrottle], device: str) -> None:
        config, block_bytes = self.config, self._layout.block_bytes
        self._directory.keep_spec(self.spec)
        index = LmdbIndex(self._directory.index_path, config.index_bytes_max)
        try:
            self._ssd = SsdTier(
                self._directory.segments,
                index,
                fs,
                limit_bytes=config.ssd_bytes,
                segment_bytes_max=config.segment_bytes_max,
            )
        except BaseException:
            index.close()
            raise
        self._catalog = Catalog(Lru)
        entries = sorted(self._ssd.entries, key=lambda entry: (entry.last_use_ns, -entry.position))
        self._catalog.restore((entry.id, entry.location) for entry in entries)
        self._host_blocks_max = config.host_bytes // host_slot_bytes(block_bytes)
        self._host = HostTier(
            block_bytes, self._host_blocks_max + config.staging_blocks_max, config.host_bytes
        )
        self._cost_book = CostBook(self._directory, self._namespace, device, links)
        self._profiler = self._cost_book.read()
        self._writeback = Writeback(
            self._catalog, self._ssd, config, self._metrics,
            host_blocks_max=self._host_blocks_max, failed=self._fail,
        )  # fmt: skip
        self._mover = Mover(
            self._catalog, self._host, self._ssd, self._metrics,
            host_blocks_max=self._host_blocks_max, slot_wait_s_max=config.slot_wait_s_max,
            forget=self._writeback.forget,
        )  # fmt: skip
        self._writeback.start(self._mover)
        self._prefetcher = Prefetcher(
            self._catalog, self._mover, self._profiler, self._metrics,
            block_bytes=block_bytes, loads_inflight_max=config.loads_inflight_max, links=links,
            failed=self._fail,
        )  # fmt: skip

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
            tiers = self._catalog.residency(keys.namespace, keys.hashes, order)
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
            profiler=self._profiler,
            metrics=self._metrics,
            loads_inflight_max=self.config.loads_inflight_max,
            clock=self._clock,
            check_open=self._check_open,
        )

    def put(
        self,
        keys: BlockKeys,
        source: KVSlots,
        *,
        blocks: range | None = None,
        after: Any = None,
    ) -> Transfer[PutResult]:
        """Store full blocks of a prompt from an engine's slots; returns at once.

        ``blocks`` limits it to a range of the prompt's full blocks; ``after`` is a CUDA event to
        wait for before reading. Blocks that are stored already are counted, not copied. What finds
        no room is dropped and counted, never raised. The source must stay as it is until the
        transfer's ``released`` is set.
        """
        self._check_open()
        if keys.namespace != self._namespace:
            raise SpecMismatch("the keys were made for another spec than this store's")
        check_slots(source, self._layout)
        wanted = range(len(keys)) if blocks is None else blocks
        if wanted and not 0 <= min(wanted) <= max(wanted) < len(keys):
            raise ValueError(f"blocks: {wanted} is not within the prompt's {len(keys)} full blocks")
        transfer: Transfer[PutResult] = Transfer()
        accepted, present, dropped = self._writeback.accept(keys, wanted, self._layout)
        self._metrics.add("put_blocks_present", present)
        self._metrics.add("put_blocks_dropped", dropped)
        if not accepted:
            transfer.finish(PutResult(0, present, dropped))
            return transfer
        job = PutJob(source, accepted, transfer, present, dropped, after)
        try:
            self._writeback.put(job)
        except BaseException:
            for block in accepted:
                self._catalog.end(block.row, Tier.HOST, "abort")
            raise
        return transfer

    def prefetch(self, keys: BlockKeys) -> Transfer[int]:
        """Start promoting a prompt's stored blocks to host memory, as far as it has room."""
        residency = self.lookup(keys)
        room = self._host_blocks_max
        wanted = [
            BlockId(keys.namespace, digest)
            for digest, tier in zip(keys.hashes, residency.tiers, strict=True)
            if tier is Tier.SSD
        ]
        # The tail is kept if there is no room for all: the head is what a plan recomputes.
        return self._prefetcher.prefetch(wanted[-room:] if room else [])

    @contextmanager
    def pin(self, keys: BlockKeys) -> Iterator[Residency]:
        """Protect a prompt's blocks from eviction, each in its fastest tier, for a scope."""
        residency = self.lookup(keys)
        with self._catalog.pinned(keys.namespace, keys.hashes, residency.tiers):
            yield self.lookup(keys)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted so far is durable (or was dropped and counted).

        Raises ``TransferFailed`` if that takes longer than ``timeout`` (``close_s_max``) seconds.
        """
        self._check_open()
        limit = self.config.close_s_max if timeout is None else timeout
        left = self._writeback.flush(limit)
        self._check_open()
        if left:
            raise TransferFailed(f"{self.path}: {left} blocks are not durable after {limit:.1f} s")

    def calibrate(self, prefill: Callable[[Step], None]) -> None:
        """Measure what is not known yet: seconds at most, and nothing if all is known.

        ``prefill(step)`` recomputes a step into scratch KV; it runs three times. If blocks are
        stored, two are loaded once to learn their tier's rate.
        """
        self._check_open()
        if not self.costs.compute.known:
            prefill(Step(0, 1, self.spec.block_tokens))  # the first run only warms up
            for start in range(CALIBRATION_BLOCKS):
                step = Step(start, start + 1, self.spec.block_tokens)
                begun = self._clock()
                prefill(step)
                self._profiler.computed(step.tokens.start, len(step.tokens), self._clock() - begun)
        for tier in (Tier.HOST, Tier.SSD):
            if self.costs.link(tier).samples == 0:
                self._calibrate_link(tier)

    def _calibrate_link(self, tier: Tier) -> None:
        hashes = tuple(self._catalog.blocks(self._namespace, tier, CALIBRATION_BLOCKS))
        if not hashes:
            return
        # Which blocks does not matter, so they need no prompt: keys with hashes and nothing else.
        keys = BlockKeys(self._namespace, self.spec.block_tokens, b"", b"", hashes, b"")
        residency = Residency(keys, (tier,) * len(hashes), self._layout.block_bytes)
        slots = TensorSlots.empty(self.spec, len(hashes))
        with self.restore(self.plan(residency, way="load"), slots) as session:
            # A step would mean that a load failed: nothing is learned, and nothing is lost.
            session.next_step()

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
                "host": {**asdict(self._host.usage()), "ready": self._catalog.ready(Tier.HOST)},
                "ssd": {**asdict(self._ssd.usage()), "ready": self._catalog.ready(Tier.SSD)},
            },
            "pins": self._catalog.pins(),
            "costs": {
                **asdict(self.costs),
                "accuracy": asdict(self._profiler.accuracy),
                "age_s": dict(self._cost_book.age_s),
            },
        }

    def check(self) -> list[str]:
        """Return what is wrong with the store's books, in words; empty if sound."""
        self._check_open()
        return [*self._catalog.check(), *self._host.check(), *self._ssd.check()]

    def close(self) -> None:
        """Flush within ``close_s_max``, keep what was learned, release everything; idempotent."""
        with self._close_lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        if self._failure is None:
            left = self._writeback.flush(self.config.close_s_max)
            if left:
                log.warning("%s: closed with %d blocks not written", self.path, left)
        self._prefetcher.close()
        self._writeback.close()
        self._cost_book.write(self._profiler)
        self._ssd.close()
        self._host.close()
        self._directory.close()

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
