"""Restores from a cold SSD by open-loop clients, against the disk alone: the two numbers with bars.

Prompts of 8K tokens, of which the engine holds the head; their tails are on the SSD only. They come
faster than the disk can serve them, so that it is never without work. Every restore has memory of
its own, which is compared, all of it, once the clock has stopped. A scheduler looks prompts up
meanwhile.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from _blocks import SLACK_BYTES, segments
from _disk import RawDisk, arena, drop_cache, process_cpu_s
from _harness import ATTEMPTS_MAX, NO_BAR, Bar, Bench, Ratio, Trial, interleave
from _load_content import Content, spoil, target
from _load_limits import Others, shape_of
from _load_run import LOOKUPS_PER_S, STEP_BLOCKS_MAX, WAIT_S_MAX, Scheduler, drive, load
from _load_work import BLOCK, Sharing, arrivals, percentiles, prompts, tokens

import kvtier
from kvtier.plan import Tier
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.segment import header_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier.identity import KVSpec
    from kvtier.store import Store

CLIENTS: Final = 16
PROMPT_BLOCKS: Final = 8192 // BLOCK
ROUNDS: Final = 2
"""Requests of a pass for each client."""
OVERLOAD: Final = 2.0
"""Bytes asked for a second / what the disk alone delivers: there is always somebody waiting."""
GIB: Final = 1 << 30


@dataclass(slots=True)
class Pass:
    """What one pass saw."""

    ended: float = 0.0
    ready_s: list[float] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)
    failed: int = 0


class ColdLoad:
    """A store whose SSD holds the tails of ``CLIENTS`` x ``ROUNDS`` prompts, and passes over them.

    ``pass_bytes`` is what one pass restores, about.
    """

    def __init__(self, store: Store, content: Content, pass_bytes: int) -> None:
        self.store = store
        self._content = content
        self._size = content.layout.block_bytes
        count = CLIENTS * ROUNDS
        self.tail = min(max(pass_bytes // (count * self._size), 1), PROMPT_BLOCKS)
        self.head = PROMPT_BLOCKS - self.tail
        self.prompts = prompts(Sharing(prefixes=count, zipf=0.0), [PROMPT_BLOCKS], count, seed=1)
        self._ids = [tokens(prompt) for prompt in self.prompts]
        self._memory = arena(self.blocks * self._size).view(np.uint64)
        self._passes = 0
        self.right = self.wrong = self.damaged = 0
        for ids in self._ids:
            keys, tail = store.keys(ids), range(self.head, PROMPT_BLOCKS)
            found = store.put(keys, content.source(keys), blocks=tail).result(WAIT_S_MAX)
            assert found.dropped == 0, f"{found}: the store has no room"
        store.flush(WAIT_S_MAX)

    @property
    def blocks(self) -> int:
        """Blocks of one pass."""
        return CLIENTS * ROUNDS * self.tail

    @property
    def bytes(self) -> int:
        """Payload bytes of one pass."""
        return self.blocks * self._size

    def run(self, read_rate: float) -> Trial:
        """Restore all prompts, then compare every byte; ``seconds`` are those of one right GiB."""
        self._passes += 1
        order = list(range(len(self._ids)))
        random.Random(self._passes).shuffle(order)  # noqa: S311 - a benchmark repeats itself
        spoil(self._memory)
        drop_cache(segments(self.store))
        rate = OVERLOAD * read_rate / (self.tail * self._size)
        dues = arrivals("poisson", rate, len(order), self._passes)
        seen, lock = Pass(), threading.Lock()

        def serve(number: int, due: float, client: int) -> None:  # noqa: ARG001 - one memory a request
            begun = time.perf_counter()
            keys = self.store.keys(self._ids[order[number]])
            residency = self.store.lookup(keys)
            looked = time.perf_counter()
            assert set(residency.tiers[self.head :]) <= {Tier.SSD, None}, "the prompt is not cold"
            plan = self.store.plan(
                residency, resident=self.head, way="load", step_blocks_max=STEP_BLOCKS_MAX
            )
            slots = target(self._content.layout, self._piece(order[number]), self.head)
            _, failed = load(self.store, plan, slots)
            ended = time.perf_counter()
            with lock:
                seen.ended = max(seen.ended, ended)
                seen.ready_s.append(ended - due)
                seen.lookup_s.append(looked - begun)
                seen.failed += failed

        others, cpu_s = Others(), process_cpu_s()
        with Scheduler(self.store, self.prompts, LOOKUPS_PER_S) as scheduler:
            begun = drive(serve, len(order), CLIENTS, dues=dues)
        cpu_s, share = process_cpu_s() - cpu_s, others.share()
        right, lookups = self._compare(seen.failed), scheduler.latencies_s
        gib = right * self._size / GIB
        detail = {
            "gib": gib,
            "others": share,
            "core_s_per_gib": cpu_s / gib,
            "ready_ms": [1e3 * each for each in percentiles(seen.ready_s)],
            "lookup_ms": [1e3 * each for each in percentiles([call for call, _ in lookups])],
            "lookup_from_due_ms": [1e3 * each for each in percentiles([due for _, due in lookups])],
            "request_lookup_ms": [1e3 * each for each in percentiles(seen.lookup_s)],
            "lookups": len(lookups),
            "core_wait_ms_per_lookup": 1e3 * scheduler.watch.delay_s / len(lookups),
        }
        return Trial((seen.ended - begun) / gib, 1.0 - share, detail)

    def _piece(self, prompt: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        words = self.tail * self._size // 8
        return self._memory[prompt * words : (prompt + 1) * words]

    def _compare(self, failed: int) -> int:
        """Return how many blocks are right; what differs though it was restored is wrong."""
        differing = sum(
            self._content.differing(
                self.store.keys(ids),
                self._piece(number),
                range(self.head, PROMPT_BLOCKS),
                self.head,
            )
            for number, ids in enumerate(self._ids)
        )
        # What failed was not written, so that it differs: it is a damaged read, not a wrong one.
        self.damaged += failed
        self.wrong += differing - failed
        self.right += self.blocks - differing
        return self.blocks - differing


def open_cold(folder: Path, spec: KVSpec, pass_bytes: int) -> Store:
    """Open a store that keeps nothing in host memory, with room for one pass on the SSD."""
    layout = spec.block_layout
    blocks = max(CLIENTS * ROUNDS, pass_bytes // layout.block_bytes)
    record = header_bytes(len(layout.parts)) + host_slot_bytes(layout.block_bytes)
    return kvtier.open(
        folder, spec, host_bytes=0, ssd_bytes=(blocks + 1) * record + SLACK_BYTES, policy="lru"
    )


def cold(bench: Bench, folder: Path, content: Content, spec: KVSpec, pass_bytes: int) -> ColdLoad:
    """Measure ``load_vs_raw`` and ``lookup_p99_ms``."""
    pairs = bench.options.pairs
    (folder / "raw").mkdir()
    with (
        bench.progress("cold restores", 3 * pairs, per_s=1) as tick,
        open_cold(folder / "cold", spec, pass_bytes) as store,
    ):
        made = ColdLoad(store, content, pass_bytes)
        with RawDisk(folder / "raw", shape_of(store, made.blocks, writes=False)) as raw:
            raw.fresh()
            rate = made.bytes / raw.read()

            def alone() -> Trial:
                others = Others()
                seconds = raw.read()
                return Trial(seconds / (made.bytes / GIB), 1.0 - others.share())

            def run() -> Trial:
                return made.run(rate)

            ways: dict[str, Callable[[], Trial]] = {"raw": alone, "store": run, "again": run}
            for way in ways.values():
                way()
            attempts = 1 if bench.options.smoke else ATTEMPTS_MAX
            trials = interleave(ways, pairs, tick, attempts)
    add(bench, trials)
    bench.record(
        "cold", trials, model=spec.model, blocks=made.blocks, restored_blocks=made.tail,
        block_bytes=content.layout.block_bytes, clients=CLIENTS,
        damaged=made.damaged, wrong=made.wrong,
    )  # fmt: skip
    return made


def add(bench: Bench, trials: dict[str, list[Trial]]) -> None:
    """Add the ratio, and the lookups' p99: of each pass, whose median counts."""
    store, again = trials["store"], trials["again"]
    bench.add(
        Ratio.of_pairs("load_vs_raw", trials["raw"], store, (store, again), Bar(low=0.85)),
    )
    passes = [each for pair in zip(store, again, strict=True) for each in pair]
    starved = sum(each.starved for each in passes) / len(passes)
    for name, key, bar in (
        ("lookup_p99_ms", "lookup_ms", Bar(high=2.0)),
        ("lookup_from_due_p99_ms", "lookup_from_due_ms", NO_BAR),
    ):
        values = [each.detail[key][-1] for each in passes]
        bench.add(Ratio.of_series(name, values, bar, starved))
    costs = [each.detail["core_s_per_gib"] for each in passes]
    bench.add(Ratio.of_series("load_core_s_per_gib", costs, NO_BAR, starved))
