"""The facade: one directory, one spec, and every verb of the API."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvtier.calibration import CostBook
from kvtier.catalog import Catalog
from kvtier.config import ByteSize, StoreConfig, parse_bytes, parse_sizes
from kvtier.demoter import Demoter
from kvtier.errors import SpecMismatch, StoreFailed, TransferFailed
from kvtier.identity import BlockKeys, KVSpec
from kvtier.live import LivePublisher
from kvtier.metrics import Metrics
from kvtier.mover import Mover
from kvtier.parts import Memory, Parts
from kvtier.plan import Residency, Step, Tier
from kvtier.planner import recomputed_head
from kvtier.policies import POLICY
from kvtier.prefetcher import Prefetcher
from kvtier.prices import Prices
from kvtier.purge import Purge, PurgeResult
from kvtier.ssd_writer import SsdWriter
from kvtier.tiers.device import TensorSlots, check_slots
from kvtier.tiers.directory import StoreDirectory
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.index import LmdbIndex, journal_bytes_max
from kvtier.tiers.looks import FileLooks
from kvtier.tiers.segment import size_class
from kvtier.tiers.ssd import SsdTier
from kvtier.tiers.write_budget import WriteBudget
from kvtier.transfer import PutResult, Transfer
from kvtier.view import StoreView, weakly
from kvtier.writeback import PutJob, Writeback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.cost import CostModel
    from kvtier.retention import Retention
    from kvtier.tiers.device import KVSlots
    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.throttle import LinkThrottle
    from kvtier.trace import Trace

__all__ = ["Store", "open_store"]

log = logging.getLogger(__name__)

CALIBRATION_BLOCKS: Final = 2


def open_store(
    path: str | os.PathLike[str],
    spec: KVSpec,
    *,
    host_bytes: ByteSize = "1GiB",
    ssd_bytes: ByteSize = "10GiB",
    ssd_write_bytes_per_day: ByteSize | None = None,
    policy: str = "priced",
    device: str = "cpu",
    links: Mapping[Tier | str, LinkThrottle] | None = None,
    fs: FileSystem | None = None,
    clock: Callable[[], float] = time.monotonic,
    trace: Trace | None = None,
    now_ns: Callable[[], int] = time.time_ns,
    **bounds: Any,
) -> Store:
    """Open ``path`` as this process's store for ``spec``, creating it if it is empty or new.

    ``host_bytes`` and ``ssd_bytes`` take bytes or strings like "8GiB"; ``ssd_bytes`` bounds what
    the directory occupies, data and index, and ``ssd_write_bytes_per_day`` what is written to it in
    any 24 hours. ``device`` names what recomputes, since costs are kept per device; with
    ``device_bytes`` it is torch's name of it, and so much of its memory holds what
    ``prefetch(tier="device")`` brings there. ``links`` slows tiers down; ``fs``, ``clock`` and
    ``now_ns`` (since 1970) are seams for tests; ``trace`` records what the lanes do. Further
    keywords are the other fields of ``StoreConfig``, ``device_bytes`` among them.

    Raises ``StoreLocked``, ``FormatError`` or ``StoreFailed`` naming the path, ``ValueError``
    naming the setting.
    """
    per_day = ssd_write_bytes_per_day
    config = StoreConfig(
        host_bytes=parse_bytes("host_bytes", host_bytes),
        ssd_bytes=parse_bytes("ssd_bytes", ssd_bytes),
        ssd_write_bytes_per_day=(
            None if per_day is None else parse_bytes("ssd_write_bytes_per_day", per_day)
        ),
        policy=policy,
        **parse_sizes(bounds),
    )
    throttles = {Tier(tier): link for tier, link in (links or {}).items()}
    fs = fs or PosixFileSystem()
    return Store(os.fspath(path), spec, config, device, throttles, fs, clock, now_ns, trace)


class Store(StoreView):
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
        now_ns: Callable[[], int],
        trace: Trace | None,
    ) -> None:
        super().__init__(path, spec, config, device, clock, trace)
        self._priced_samples = 0
        self._now_ns = now_ns
        host_blocks_max = self._host_room()
        self._directory = StoreDirectory(path, fs)
        with ExitStack() as undo:
            undo.callback(self._directory.close)
            try:
                self._open_tiers(fs, links, device, host_blocks_max, undo)
            except OSError as error:
                raise StoreFailed(f"{path}: cannot be opened: {error.strerror or error}") from error
            undo.pop_all()

    def _host_room(self) -> int:
        """Return how many blocks stay in host memory; says so where a setting holds none."""
        config, slot = self.config, host_slot_bytes(self._layout.block_bytes)
        blocks = config.host_bytes // slot
        if not blocks and config.write_policy == "demote":
            raise ValueError(
                f"host_bytes: {config.host_bytes} holds no block of this spec, so nothing could be "
                f"written on demotion: give at least {slot}, or write_policy='through'"
            )
        if not blocks and config.host_bytes:
            log.warning(
                "%s: host_bytes=%d holds no block of this spec, so none stay in host memory; "
                "%d would hold one", self.path, config.host_bytes, slot,
            )  # fmt: skip
        return blocks

    def _check_ssd_room(self) -> None:
        """Say so, once, if the SSD can hold no block of this spec, or none before long."""
        size, limit = size_class(self._layout.part_bytes), self.config.ssd_bytes
        journal = journal_bytes_max(self.config.index_bytes_max)
        lasting = self._ssd.limit_for(size, journal)
        if limit and not self._ssd.fits(size):
            log.warning(
                "%s: ssd_bytes=%d holds no block of this spec, so none are written; "
                "%d would hold one, and %d also once the index's journal is full",
                self.path, limit, self._ssd.limit_for(size), lasting,
            )  # fmt: skip
        elif 0 < limit < lasting:
            log.warning(
                "%s: ssd_bytes=%d holds no block of this spec any more once the index's journal "
                "is full, after some thousand changes; %d would", self.path, limit, lasting,
            )  # fmt: skip

    def _open_tiers(
        self,
        fs: FileSystem,
        links: Mapping[Tier, LinkThrottle],
        device: str,
        host_blocks_max: int,
        undo: ExitStack,
    ) -> None:
        config, block_bytes = self.config, self._layout.block_bytes
        metrics = Metrics()
        self._directory.keep_spec(self.spec)
        self._budget = WriteBudget(
            config.ssd_write_bytes_per_day,
            saved=self._directory.read_writes(),
            save=self._directory.write_writes,
            now_ns=self._now_ns,
        )
        self._ssd = self._open_ssd(fs, metrics)
        undo.callback(self._ssd.close)
        self._check_ssd_room()
        cost_book = CostBook(self._directory, self._namespace, device, links)
        profiler = cost_book.read()
        catalog = self._open_catalog(profiler.costs)
        memory = Memory.open(
            catalog, metrics, config,
            block_bytes=block_bytes, host_blocks_max=host_blocks_max, device=device, undo=undo,
        )  # fmt: skip
        self._writer = SsdWriter(
            catalog, self._ssd, self._budget, config, metrics,
            failed=weakly(self._lane_failed), clock=self._clock, trace=self._trace,
        )  # fmt: skip
        self._writeback = Writeback(
            catalog, self._writer, config, metrics,
            host_blocks_max=host_blocks_max, failed=weakly(self._fail),
        )  # fmt: skip
        self._demoter = Demoter(
            catalog, self._writer, config,
            host_blocks_max=host_blocks_max, failed=weakly(self._lane_failed),
        )  # fmt: skip
        mover = Mover(
            catalog, memory.host, self._ssd, metrics,
            host_blocks_max=host_blocks_max, slot_wait_s_max=config.slot_wait_s_max,
            forget=self._writer.forget, crowded=self._demoter.nudge,
        )  # fmt: skip
        self._writer.start(mover)
        self._demoter.start(mover)
        self._writeback.start(mover)
        prefetcher = Prefetcher(
            catalog, mover, memory.promoter, profiler, metrics, config,
            block_bytes=block_bytes, links=links,
            failed=weakly(self._fail), writes=self._ssd.writes, trace=self._trace,
        )  # fmt: skip
        self._use(
            Parts(catalog, memory, mover, prefetcher, profiler, cost_book, metrics, host_blocks_max)
        )
        self._live = self._shown()

    def _open_catalog(self, costs: CostModel) -> Catalog:
        """Return the catalog of what is on the SSD."""
        # Changes are numbered by the clock: who followed an earlier life of the store is told so.
        catalog = Catalog(
            POLICY[self.config.policy], prices=self._prices(costs),
            first_change=time.time_ns(), now_ns=self._now_ns,
        )  # fmt: skip
        catalog.restore(self._ssd.take_entries())
        return catalog

    def _shown(self) -> LivePublisher | None:
        try:
            looks = FileLooks(f"{self.path}/FORMAT")
        except OSError as error:
            log.info(
                "%s: nobody hears who looks, live.msgpack is not written: %s", self.path, error
            )
            return None
        live = LivePublisher(
            looks, weakly(self._what_is_shown), self._directory.write_live,
            clock=self._clock, failed=weakly(self._fail),
        )  # fmt: skip
        live.start()
        return live

    def _what_is_shown(self) -> dict[str, Any]:
        stats = self.stats()
        limits = {"host_bytes": self.config.host_bytes, "ssd_bytes": self.config.ssd_bytes}
        shown = {name: stats[name] for name in ("counters", "tiers", "pins")}
        return {**shown, "namespace": self._namespace.hex(), "pid": os.getpid(), "limits": limits}

    def _open_ssd(self, fs: FileSystem, metrics: Metrics) -> SsdTier:
        config, directory = self.config, self._directory
        index = LmdbIndex(directory.index_path, config.index_bytes_max, lock_fd=directory.lock_fd)
        try:
            return SsdTier(
                directory.segments,
                index,
                fs,
                limit_bytes=config.ssd_bytes,
                segment_bytes_max=config.segment_bytes_max,
                segments_max=config.segments_max,
                reads_inflight_max=config.loads_inflight_max,
                writes_inflight_max=config.writes_inflight_max,
                integrity_key=config.integrity_key,
                failed=lambda: metrics.add("ssd_write_errors"),
            )
        except BaseException:
            index.close()
            raise

    def _prices(self, costs: CostModel) -> Prices:
        size = size_class(self._layout.part_bytes)
        return Prices.of(costs, self.spec.block_tokens, self._layout.block_bytes, size)

    def _reprice(self) -> None:
        """Let evictions go by the costs as known now, once twice as many steps were measured."""
        costs = self.costs
        if costs.compute.samples > 2 * self._priced_samples:
            self._priced_samples = costs.compute.samples
            self._catalog.reprice(self._prices(costs))

    def _lane_failed(self, error: BaseException) -> None:
        self._writeback.fail(error)
        self._demoter.stop()

    # -- the verbs that write

    def put(
        self,
        keys: BlockKeys,
        source: KVSlots,
        *,
        blocks: range | None = None,
        after: Any = None,
        retention: Retention | None = None,
    ) -> Transfer[PutResult]:
        """Store full blocks of a prompt from an engine's slots; returns at once.

        ``blocks`` limits it to a range of the prompt's full blocks; ``after`` is a CUDA event to
        wait for before reading. Blocks that are stored already are counted, not copied. What finds
        no room is dropped and counted, never raised. The source must stay as it is until the
        transfer's ``released`` is set.

        ``retention`` says how long the blocks are wanted. It raises that of blocks which are stored
        already, until the store closes: their records keep what they were written with.
        """
        self._check_open()
        if keys.namespace != self._namespace:
            raise SpecMismatch("the keys were made for another spec than this store's")
        check_slots(source, self._layout)
        wanted = range(len(keys)) if blocks is None else blocks
        if wanted and not 0 <= min(wanted) <= max(wanted) < len(keys):
            raise ValueError(f"blocks: {wanted} is not within the prompt's {len(keys)} full blocks")
        self._reprice()
        transfer: Transfer[PutResult] = Transfer()
        accepted, present, dropped = self._writeback.accept(
            keys, wanted, self._layout, retention, recomputed=self._recomputed_head(len(keys))
        )
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

    def _recomputed_head(self, blocks: int) -> int:
        """Return how many leading blocks of such a prompt are not worth keeping."""
        if not self.config.tails_only:
            return 0
        return recomputed_head(
            blocks,
            self.costs,
            block_tokens=self.spec.block_tokens,
            block_bytes=self._layout.block_bytes,
            compute_price=self.compute_price,
        )

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted so far is durable, or was dropped or declined, counted.

        With ``write_policy="demote"`` that writes what is only in host memory.

        Raises ``TransferFailed`` if that takes longer than ``timeout`` (``close_s_max``) seconds.
        """
        self._check_open()
        limit = self.config.close_s_max if timeout is None else timeout
        self._check_settled(self._flush(limit), limit)

    def _check_settled(self, left: int, limit: float) -> None:
        self._check_open()
        if left:
            raise TransferFailed(f"{self.path}: {left} blocks are not durable after {limit:.1f} s")

    def _flush(self, timeout: float) -> int:
        """Flush puts, then what they left in host memory alone; returns the blocks still open."""
        deadline = time.monotonic() + timeout
        return self._writeback.flush(timeout) + self._demoter.flush(deadline - time.monotonic())

    def purge(
        self,
        *,
        namespace: bytes | None = None,
        tenant: str | None = None,
        older_than_s: float | None = None,
        timeout: float | None = None,
    ) -> PurgeResult:
        """Remove blocks from every tier and destroy their bytes on disk before returning.

        What is purged matches all that is given: a namespace (``spec.namespace``), a tenant, an age
        since its last use in seconds; at least one of them. Bytes of blocks that were evicted
        earlier are destroyed too. Blocks that a restore holds are waited for, up to ``timeout``
        (``slot_wait_s_max``) seconds; what is left then is counted in the result.

        Raises ``TransferFailed`` if the disk refuses.
        """
        self._check_open()
        limit = self.config.slot_wait_s_max if timeout is None else timeout
        self._prefetcher.let_go()  # what is kept for restores to come is purged too
        purge = Purge.of(namespace, tenant, older_than_s, self._now_ns())
        # Puts under way come first; what host memory alone has needs no write to be destroyed.
        self._check_settled(self._writeback.flush(self.config.close_s_max), self.config.close_s_max)
        result = purge.run(
            self._catalog, self._mover, self._promoter, self._writer, limit, self._clock
        )
        self._check_open()
        return result

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

    def _ssd_stats(self) -> dict[str, Any]:
        return {
            **asdict(self._ssd.usage()),
            "ready": self._catalog.ready(Tier.SSD),
            "io": self._ssd.io,
            "medium_written_bytes": self._ssd.written_bytes(),
            "index_repairs": self._ssd.index_repairs,
            "write_budget_left_bytes": self._budget.left(),
        }

    def check(self) -> list[str]:
        """Return what is wrong with the store's books, in words; empty if sound."""
        return [*super().check(), *self._mover.check(), *self._ssd.check()]

    def close(self) -> None:
        """Flush within ``close_s_max``, keep what was learned, release everything; idempotent."""
        if not self._begin_close():
            return
        if self._live is not None:
            self._live.close()
            self._directory.remove_live()
        if self._failure is None:
            left = self._flush(self.config.close_s_max)
            if left:
                log.warning("%s: closed with %d blocks not written", self.path, left)
        self._prefetcher.close()
        self._demoter.close()
        self._writeback.close()
        self._cost_book.write(self._profiler, self._directory)
        try:
            self._writer.write_uses()
            self._budget.close()
        except OSError as error:
            log.warning("%s: the last uses were not written: %s", self.path, error)
        self._ssd.close()
        self._memory.close()
        self._directory.close()
