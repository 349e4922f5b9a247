"""A prefetcher over memory, with a clock that a test moves and reads that a test holds."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import TYPE_CHECKING, Any, Self

from support import SPEC, WAIT_S, Gate, payload_of, poisoned_slots

from kvtier import StoreConfig, Tier
from kvtier.catalog import Catalog
from kvtier.cost import Profiler
from kvtier.loop import LoopThread
from kvtier.metrics import Metrics
from kvtier.mover import Mover
from kvtier.policy import Lru
from kvtier.prefetcher import Prefetcher
from kvtier.promoter import Promoter
from kvtier.ticket import LoadTicket
from kvtier.tiers.base import BlockId, Location, ReadResult
from kvtier.tiers.device_pool import DevicePool, device_slot_bytes
from kvtier.tiers.host import HostTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier import Prefetch
    from kvtier.tiers.device import KVSlots

BLOCK_BYTES = SPEC.block_layout.block_bytes


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still until it is moved; ``turns`` counts its iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0

    def time(self) -> float:
        """Return the instant that a test has set."""
        return self.now

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


class HeldReads:
    """An SSD in memory: notes the order of its reads, and holds or fails them on demand."""

    def __init__(self) -> None:
        self.order: list[BlockId] = []
        self.gate: Gate | None = None
        self.outcomes: dict[BlockId, ReadResult | BaseException] = {}
        self.under_way = self.most = 0
        self._lock = threading.Lock()

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Read blocks."""
        return [self._read(block, target) for block, target in zip(ids, into, strict=True)]

    def _read(self, block: BlockId, target: memoryview) -> ReadResult:
        with self._lock:
            self.order.append(block)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            gate = self.gate
        try:
            if gate is not None:
                gate.pass_through()
            outcome = self.outcomes.get(block, ReadResult.OK)
            if isinstance(outcome, BaseException):
                raise outcome
            target[:] = payload_of(block, target.nbytes)
            return outcome
        finally:
            with self._lock:
                self.under_way -= 1


class Rig:
    """``blocks`` blocks on an SSD, host slots beyond staging, device slots, and a prefetcher."""

    def __init__(
        self,
        blocks: int,
        *,
        host_blocks: int = 64,
        device_blocks: int = 0,
        links: dict[Tier, Any] | None = None,
        block_bytes: int = BLOCK_BYTES,
        **bounds: Any,
    ) -> None:
        config = StoreConfig(host_bytes=host_blocks * block_bytes, ssd_bytes=0, **bounds)
        self.config = config
        self.loop = VirtualLoop()
        self.catalog = Catalog(Lru)
        self.host = HostTier(block_bytes, host_blocks + config.staging_blocks_max, 0)
        self.ssd = HeldReads()
        self.metrics = Metrics()
        self.failures: list[BaseException] = []
        mover = Mover(
            self.catalog, self.host, self.ssd, self.metrics,
            host_blocks_max=host_blocks, slot_wait_s_max=WAIT_S, forget=lambda *_: None,
        )  # fmt: skip
        self.pool = DevicePool(block_bytes, device_blocks * device_slot_bytes(block_bytes), "cpu")
        self.promoter = Promoter(self.catalog, self.pool, self.metrics)
        self.prefetcher = Prefetcher(
            self.catalog, mover, self.promoter, Profiler(), self.metrics, config,
            block_bytes=block_bytes, links=links or {},
            failed=self.failures.append, loop=LoopThread("loop", lambda: self.loop),
        )  # fmt: skip
        self.blocks = [self.store(number) for number in range(blocks)]

    def store(self, number: int) -> BlockId:
        """Put a block on the SSD."""
        block = BlockId(bytes(32), hashlib.sha256(b"%d" % number).digest())
        row = self.catalog.begin(block, Tier.SSD, "write", position=number)
        self.catalog.commit(row, Tier.SSD, Location(0, number, 0))
        return block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ssd.gate is not None:
            self.ssd.gate.open()
        self.prefetcher.close()
        assert self.catalog.pins() == 0
        assert [*self.catalog.check(), *self.host.check(), *self.promoter.check()] == []
        usage = self.prefetcher.usage()
        del usage["held_blocks_max"], usage["device_held_blocks_max"]
        assert not any(usage.values()), usage
        self.host.close()

    def hold(self) -> Gate:
        """Hold all reads from now on."""
        self.ssd.gate = Gate()
        return self.ssd.gate

    def prefetch(self, *numbers: int, present: Sequence[int] = (), **how: Any) -> Prefetch:
        """Prefetch blocks, and wait until the loop has taken that up."""
        transfer = self.prefetcher.prefetch(
            [self.blocks[n] for n in numbers], [self.blocks[n] for n in present], **how
        )
        self.turn()
        return transfer

    def load(self, number: int, slots: KVSlots | None = None) -> list[Any]:
        """Load a block for a restore; returns where its answer will be."""
        answers: list[Any] = []
        slots = slots or poisoned_slots(1)

        def done(*answer: Any) -> None:
            answers.append(answer)

        self.ticket = LoadTicket(self.blocks[number], Tier.SSD, slots, 0, done)
        self.prefetcher.load(self.ticket)
        self.turn()
        return answers

    def turn(self) -> None:
        """Wait until the loop has done what it was asked for, and what follows from that."""
        for _ in range(4):
            came = threading.Event()
            assert self.prefetcher._loop.submit(came.set)
            assert came.wait(WAIT_S)

    def advance(self, seconds: float) -> None:
        """Move the clock."""

        def move() -> None:
            self.loop.now += seconds

        assert self.prefetcher._loop.submit(move)
        self.turn()

    def read(self) -> list[int]:
        """Return which blocks were read, or are being read, in order."""
        return [self.blocks.index(block) for block in list(self.ssd.order)]

    def in_host(self) -> list[int]:
        """Return which blocks are in host memory."""
        tiers = self.catalog.residency(
            bytes(32), [block.hash for block in self.blocks], (Tier.HOST, Tier.SSD)
        )
        return [number for number, tier in enumerate(tiers) if tier is Tier.HOST]

    def on_device(self) -> list[int]:
        """Return which blocks are on the device."""
        tiers = self.catalog.residency(bytes(32), [block.hash for block in self.blocks])
        return [number for number, tier in enumerate(tiers) if tier is Tier.DEVICE]

    def count(self, name: str) -> int:
        """Return a counter."""
        return self.metrics.snapshot()[name]

    @property
    def held(self) -> int:
        """Blocks that prefetches hold."""
        return self.prefetcher.usage()["held_blocks"]

    @property
    def kept(self) -> int:
        """Blocks that are kept for restores."""
        return self.prefetcher.usage()["kept_blocks"]
