"""Blocks of real models' sizes, prompts that nobody stored yet, and stores to move them through."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from _disk import CpuClock, Shape, drop_cache
from _harness import Trial

import kvtier
from kvtier.plan import Tier
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.segment import header_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.identity import BlockKeys, KVSpec
    from kvtier.store import Store

MIB: Final = 1 << 20
WAIT_S_MAX: Final = 600.0
"""How long a pass may take before something is wrong."""
SLACK_BYTES: Final = 16 * MIB
"""Room for the index and for allowances beside the records."""
FILL_PASSES_MAX: Final = 32
"""Prompts after which a store must be full."""
SHAPES: Final = {
    1: (8, 2, 64),  # a third of Qwen2.5-0.5B's layers
    3: (24, 2, 64),  # Qwen2.5-0.5B
    14: (28, 4, 128),  # Qwen2.5-7B
    32: (32, 8, 128),  # Llama-3-8B
}
"""Layers, KV heads and head width by the MiB of a block of 256 bfloat16 tokens."""
BY_TURNS: Final[dict[str, Any]] = {
    "policy": "lru",
    "host_high_water": 1.0,
    "host_low_water": 1.0,
}
"""Settings under which the prompt used last fills host memory, and each pushes the other one out:
nothing is kept for its worth, nothing let go ahead of need."""
COLD_PROMPTS: Final = 2
"""Prompts that are read in turn: each pushes the other one out of host memory."""


def spec_of(mib: int) -> KVSpec:
    """Return the spec whose blocks have ``mib`` MiB."""
    layers, kv_heads, head_dim = SHAPES[mib]
    spec = kvtier.KVSpec(
        model=f"bench/{mib}MiB", weights="sha256:0", dtype="bfloat16",
        layers=layers, kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip
    assert spec.block_layout.block_bytes == mib * MIB
    return spec


class Subject:
    """``blocks`` blocks of one size in an engine's tensors, and what is done with them."""

    def __init__(self, mib: int, blocks: int, spec: KVSpec | None = None) -> None:
        """``spec``: of which model, if not of the one of ``SHAPES`` with such blocks."""
        self.mib = mib
        self.spec = spec or spec_of(mib)
        self.blocks = blocks
        self.bytes = blocks * self.spec.block_layout.block_bytes
        self.source = kvtier.TensorSlots.empty(self.spec, blocks)
        self.target = kvtier.TensorSlots.empty(self.spec, blocks)
        rng = np.random.default_rng(mib)
        for tensor in self.source.tensors:
            words = tensor.view(torch.int16).numpy().reshape(-1).view(np.uint64)
            words[:] = rng.integers(0, 1 << 64, words.size, dtype=np.uint64)
        self._prompts = count()

    @property
    def record_bytes(self) -> int:
        """What all blocks occupy on disk: headers and payloads."""
        layout = self.spec.block_layout
        return self.blocks * (header_bytes(len(layout.parts)) + host_slot_bytes(layout.block_bytes))

    def prompt(self) -> BlockKeys:
        """Return the keys of a prompt that nobody has seen."""
        tokens = np.zeros(self.blocks * self.spec.block_tokens, dtype=np.int64)
        tokens[0] = next(self._prompts)
        return kvtier.BlockKeys.of(self.spec, tokens)

    def open(self, path: Path, *, prompts: float, host: float = 1.0) -> Store:
        """Open a store with room for so many prompts on the SSD and in host memory."""
        return kvtier.open(
            path,
            self.spec,
            host_bytes=round(host * self.bytes),
            ssd_bytes=round(prompts * self.record_bytes) + (SLACK_BYTES if prompts else 0),
            **BY_TURNS,
        )

    def shape(self, store: Store, *, writes: bool) -> Shape:
        """Return what a raw pass has to move to do what the store does."""
        layout, config = self.spec.block_layout, store.config
        return Shape(
            blocks=self.blocks,
            header_bytes=header_bytes(len(layout.parts)),
            payload_bytes=layout.block_bytes,
            segment_bytes=config.segment_bytes_max,
            depth=config.writes_inflight_max if writes else config.loads_inflight_max,
            direct=io_mode(store) == "direct",
        )

    def put(self, store: Store) -> Trial:
        """Store a new prompt, to the moment when all of it is durable."""
        keys = self.prompt()
        written = counter(store, "ssd_written_blocks")
        begun = time.perf_counter()
        transfer = store.put(keys, self.source)
        store.flush(WAIT_S_MAX)
        seconds = time.perf_counter() - begun
        result = transfer.result(WAIT_S_MAX)
        assert result.stored == self.blocks, f"{result} of {self.blocks} blocks"
        written = counter(store, "ssd_written_blocks") - written
        assert written == self.blocks, f"{written} of {self.blocks} blocks are on the SSD"
        return Trial(seconds, detail={"keys": keys})

    def fill(self, store: Store) -> Trial:
        """Store new prompts until each of them evicts as much; returns the last one."""
        for _ in range(FILL_PASSES_MAX):
            evicted = counter(store, "evicted_blocks_ssd")
            trial = self.put(store)
            if counter(store, "evicted_blocks_ssd") - evicted >= self.blocks:
                return trial
        raise AssertionError(f"{FILL_PASSES_MAX} prompts do not fill the store")

    def verify(self, store: Store, keys: BlockKeys) -> float:
        """Restore a stored prompt and compare every byte; returns the seconds of the restore."""
        return self.restored(store, keys).seconds

    def restored(self, store: Store, keys: BlockKeys) -> Trial:
        """Restore a stored prompt and compare every byte; the comparison does not count."""
        for tensor in self.target.tensors:
            tensor.zero_()
        plan = store.plan(store.lookup(keys), way="load")
        cpu, begun = CpuClock(), time.perf_counter()
        with store.restore(plan, into=self.target) as session:
            step = session.next_step(WAIT_S_MAX)
        seconds, cpu_s = time.perf_counter() - begun, cpu.spent()
        assert step is None, f"blocks {step} were not loaded"
        for got, stored in zip(self.target.tensors, self.source.tensors, strict=True):
            same = torch.equal(got.view(torch.int16), stored.view(torch.int16))
            assert same, "restored KV differs from what was stored"
        return Trial(seconds, detail={"cpu_s": cpu_s})


class ColdReads:
    """Reads of whole prompts from the SSD into host memory, verified by the store itself.

    What a read brings to host memory pushes out what the reads before brought there, so that every
    read finds its prompt on the SSD only; pages of the store's files are not in the page cache.
    """

    def __init__(self, subject: Subject, store: Store, prompts: Sequence[BlockKeys]) -> None:
        self._subject = subject
        self._store = store
        self._prompts = list(prompts)

    def trial(self) -> Trial:
        """Read the prompt whose turn it is, and compare what was read with what was stored."""
        keys = self._prompts.pop(0)
        self._prompts.append(keys)
        tiers = set(self._store.lookup(keys).tiers)
        assert tiers == {Tier.SSD}, f"the prompt is not cold: {tiers}"
        drop_cache(segments(self._store))
        written = counter(self._store, "ssd_written_bytes")
        cpu, begun = CpuClock(), time.perf_counter()
        found = self._store.prefetch(keys).result(WAIT_S_MAX)
        seconds, cpu_s = time.perf_counter() - begun, cpu.spent()
        written = counter(self._store, "ssd_written_bytes") - written
        assert found == self._subject.blocks, f"{found} of {self._subject.blocks} blocks were read"
        self._subject.verify(self._store, keys)
        return Trial(seconds, detail={"cpu_s": cpu_s, "written_bytes": written})

    def warm(self) -> Trial:
        """Restore the prompt that was read last, from host memory."""
        keys = self._prompts[-1]
        tiers = set(self._store.lookup(keys).tiers)
        assert tiers == {Tier.HOST}, f"the prompt is not in host memory: {tiers}"
        return self._subject.restored(self._store, keys)


@contextmanager
def cold_reads(subject: Subject, folder: Path) -> Iterator[tuple[ColdReads, Store]]:
    """Yield reads of prompts stored for them; everything that is reused was used once before."""
    with ExitStack() as stack:
        store = stack.enter_context(subject.open(folder / "read", prompts=COLD_PROMPTS))
        prompts = [subject.put(store).detail["keys"] for _ in range(COLD_PROMPTS)]
        reads = ColdReads(subject, store, prompts)
        for _ in prompts:
            reads.trial()
        yield reads, store


def counter(store: Store, name: str) -> int:
    """Return one of a store's counters."""
    return int(store.stats()["counters"].get(name, 0))


def io_mode(store: Store) -> str:
    """Return how the store accesses its disk: "direct" or "buffered"."""
    return str(store.stats()["tiers"]["ssd"].get("io", "buffered"))


def segments(store: Store) -> Path:
    """Return the folder of a store's segment files."""
    return Path(store.path) / "segments"
