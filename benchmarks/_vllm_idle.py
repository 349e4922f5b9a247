"""Whether an engine that has nothing to compute slows down the loads that it waits for.

While all its requests wait, vLLM runs empty steps, in the process and under the interpreter lock of
the threads that load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from _blocks import Subject, io_mode, segments
from _disk import drop_cache
from _harness import ATTEMPTS_MAX, NO_BAR, Bench, Ratio, Trial, interleave
from _vllm_engines import BLOCK, BLOCK_BYTES, SUFFIX, Engines, prompt, request, ttft

import kvtier

if TYPE_CHECKING:
    from kvtier_vllm_run.process import EngineProcess

WARM: Final = 3
"""Serves before anything is measured: the first stores the prompt."""
SPEC: Final = kvtier.KVSpec(
    model="bench/SmolLM2-135M", weights="sha256:0", dtype="float32",
    layers=30, kv_heads=3, head_dim=64,
)  # fmt: skip
"""What the engine's model has, for a store without an engine."""


def idle(bench: Bench, engines: Engines) -> None:
    """Load a cold prompt in an engine that waits for it, and as many bytes without an engine."""
    smoke = bench.options.smoke
    blocks = 2 if smoke else 24
    ids = prompt(3, blocks * BLOCK + SUFFIX)
    length = len(ids) + BLOCK
    stock = engines.stock(length)
    ttft(stock, ids, engines.verdicts.stock)
    engines.stop(stock)
    settings: dict[str, Any] = {"host_bytes": 0, "ssd_bytes": 8 * blocks * BLOCK_BYTES}
    loading = engines.kvtier("idle", length, {**settings, "hybrid": False})
    subject = Subject(0, blocks, SPEC)
    assert subject.bytes == blocks * BLOCK_BYTES
    with subject.open(engines.folder / "alone", prompts=2, host=0) as store:
        keys = subject.put(store).detail["keys"]

        def alone() -> Trial:
            drop_cache(segments(store))
            return subject.restored(store, keys)

        def waited() -> Trial:
            drop_cache(engines.folder / "idle")
            return _load(loading, ids, engines)

        ways = {"engine": waited, "alone": alone, "alone_again": alone}
        for _ in range(1 if smoke else WARM):
            ttft(loading, ids, engines.verdicts.same)
            alone()
        with bench.progress("loads that an engine waits for", 3 * bench.options.pairs) as tick:
            attempts = 1 if smoke else ATTEMPTS_MAX
            trials = interleave(ways, bench.options.pairs, tick, attempts)
        io = io_mode(store)
    same = trials["alone"], trials["alone_again"]
    bench.add(Ratio.of_pairs("idle_load_rate", same[0], trials["engine"], same, NO_BAR))
    bench.record("idle", trials, bytes=subject.bytes, io=io, counts=loading.counts())


def _load(engine: EngineProcess, ids: list[int], engines: Engines) -> Trial:
    """Return how long the loads of a prompt took: its TTFT without that of what is not loaded."""
    trial = ttft(engine, ids, engines.verdicts.same)
    cached = trial.detail["cached"]
    assert cached >= len(ids) - SUFFIX - BLOCK, f"only {cached} tokens were loaded"
    (again,) = engine.serve([request(ids)])
    return replace(trial, seconds=trial.seconds - again.ttft_s)
