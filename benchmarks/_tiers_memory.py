"""The parts of the tier benchmark that need no disk: host memory, and a million blocks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import _million
import numpy as np
import torch
from _blocks import WAIT_S_MAX, Subject
from _disk import arena, need_free
from _harness import (
    NO_BAR,
    Bar,
    Bench,
    Ratio,
    Stopwatch,
    Trial,
    interleave,
    measure,
    spread_of,
    starved_share,
)

from kvtier.tiers.device import read_block, write_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.store import Store

HOST_LOW: Final = 0.9
HOST_ROUNDS: Final = 4
"""Memory is quick: so many times as many pairs, unless everything is to be quick."""
LOOKUPS: Final = 200
PROBE_S_MAX: Final = 300.0
"""How long a fresh process may take to open the store."""


# -- host memory


def host(bench: Bench, folder: Path, subject: Subject) -> None:
    """Compare put and get of host memory with a copy of the same bytes by one thread."""
    copy_of = arena(subject.bytes)
    stored = [t.view(torch.int16).numpy().reshape(-1) for t in subject.source.tensors]

    def memcpy() -> Trial:
        watch, start = Stopwatch(), 0
        with watch:
            for tensor in stored:
                np.copyto(copy_of[start : start + tensor.nbytes].view(np.int16), tensor)
                start += tensor.nbytes
        return Trial(watch.wall_s, watch.held)

    def put() -> Trial:
        keys = subject.prompt()
        begun = time.perf_counter()
        transfer = store.put(keys, subject.source)
        assert transfer.released.wait(WAIT_S_MAX)
        seconds = time.perf_counter() - begun
        result = transfer.result(WAIT_S_MAX)
        assert result.stored == subject.blocks, f"{result} of {subject.blocks} blocks"
        store.flush(WAIT_S_MAX)
        held.append(keys)
        return Trial(seconds)

    def get() -> Trial:
        return Trial(subject.verify(store, held[-1]))

    held: list[Any] = []
    options = bench.options
    pairs = options.pairs * (1 if options.smoke or options.quick else HOST_ROUNDS)
    with subject.open(folder / "host", prompts=0) as store:
        for name, run in (("host_put_vs_memcpy", put), ("host_get_vs_memcpy", get)):
            for warm_up in (memcpy, put, get):
                warm_up()
            ways = {"memcpy": memcpy, "store": run, "again": run}
            with bench.progress(name, 3 * pairs) as tick:
                trials = interleave(ways, pairs, tick)
            same = trials["store"], trials["again"]
            ratio = Ratio.of_pairs(name, trials["memcpy"], trials["store"], same, Bar(low=HOST_LOW))
            bench.add(ratio)
            bench.record(name, trials, mib=subject.mib, blocks=subject.blocks)


def pieces(bench: Bench, _: Path, subject: Subject) -> None:
    """Compare copies between an engine's tensors and a block with copies of whole blocks.

    No store takes part: it is what a copy costs that finds a block in pieces, one or more a layer.
    """
    block_bytes = subject.spec.block_layout.block_bytes
    here, there = arena(subject.bytes), arena(subject.bytes)
    blocks = [slice(n * block_bytes, (n + 1) * block_bytes) for n in range(subject.blocks)]

    def timed(copy: Callable[[int, slice], None]) -> Callable[[], Trial]:
        def run() -> Trial:
            watch = Stopwatch()
            with watch:
                for number, block in enumerate(blocks):
                    copy(number, block)
            return Trial(watch.wall_s, watch.held)

        return run

    whole = timed(lambda _, block: np.copyto(there[block], here[block]))
    ways = {
        "whole": whole,
        "gather": timed(lambda n, block: read_block(subject.source, n, there[block].data)),
        "scatter": timed(lambda n, block: write_block(subject.target, n, there[block].data)),
        "again": whole,
    }
    for warm_up in ways.values():
        warm_up()
    options = bench.options
    pairs = options.pairs * (1 if options.smoke or options.quick else HOST_ROUNDS)
    with bench.progress("copies in pieces", len(ways) * pairs) as tick:
        trials = interleave(ways, pairs, tick)
    same = trials["whole"], trials["again"]
    for name in ("gather", "scatter"):
        full = f"{name}_vs_whole_{subject.mib}MiB"
        bench.add(Ratio.of_pairs(full, same[0], trials[name], same, NO_BAR))
    bench.record("pieces", trials, mib=subject.mib, blocks=subject.blocks)


# -- a million blocks


def million(bench: Bench, folder: Path) -> None:
    """Look up in, and open, a store of a million blocks."""
    path = folder / "million"
    blocks = 4096 if bench.options.smoke else 1_000_000
    need_free(folder, blocks * (_million.SLOT_BYTES + 512))
    with bench.progress("making a million blocks", -(-blocks // _million.COMMIT_ENTRIES)) as tick:
        for _ in _million.build(path, blocks):
            tick()
    bench.settings["million_blocks"] = blocks
    if bench.options.wants("lookup"):
        with _million.open_store(path, blocks) as store:
            lookup(bench, store)
    if bench.options.wants("open"):
        opens(bench, path, blocks)


def lookup(bench: Bench, store: Store) -> None:
    """Time keys and lookup of a long prompt, all of whose blocks are stored."""
    array = _million.prompt_tokens()
    lookups = 5 if bench.options.smoke else LOOKUPS
    for name, tokens, high in (("list", array.tolist(), 2.0), ("array", array, 1.2)):

        def once(tokens: Any = tokens) -> Trial:
            watch = Stopwatch()
            with watch:
                residency = store.lookup(store.keys(tokens))
            assert None not in residency.tiers, "the prompt is stored"
            return Trial(watch.wall_s, watch.held)

        once()
        trials = interleave({"lookup": once, "again": once}, lookups)
        median_ms = 1e3 * statistics.median(trial.seconds for trial in trials["lookup"])
        spread = median_ms * spread_of(trials["lookup"], trials["again"])
        starved = starved_share(*trials.values())
        full_name = f"lookup_128k_{name}_ms"
        bench.add(Ratio(full_name, median_ms, Bar(high=high), spread, lookups, starved))


def opens(bench: Bench, path: Path, blocks: int) -> None:
    """Time opening in fresh processes, and weigh what it takes in memory."""

    def once() -> Trial:
        script = str(Path(_million.__file__))
        done = subprocess.run(  # noqa: S603 - our own script
            [sys.executable, script, str(path), str(blocks)],
            capture_output=True, text=True, timeout=PROBE_S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        return Trial(found.pop("seconds"), found.pop("held"), found)

    with bench.progress("opening a million blocks", bench.options.pairs + 1) as tick:
        trials = []
        for _ in range(bench.options.pairs + 1):
            trials.append(measure(once))
            tick()
    seconds = [trial.seconds for trial in trials]
    weights = [trial.detail["bytes_per_block"] for trial in trials]
    bench.add(
        Ratio.of_series("open_1m_s", seconds, Bar(high=2.0), starved_share(trials)),
        Ratio.of_series("open_1m_bytes_per_block", weights, Bar(high=400.0)),
    )
    bench.record("open", {"open": trials}, blocks=blocks)
