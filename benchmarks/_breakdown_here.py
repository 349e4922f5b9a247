"""What this machine can measure of a restore, through the store's public calls.

Cold restores of whole prompts into tensors, with what every moment went to (from the store's own
trace), alone and several at once; restores from host memory; reads of the SSD into host memory; the
time of keys, lookup and plan; and all of that against block size. Every byte is compared.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from _blocks import MIB, SLACK_BYTES, WAIT_S_MAX, Subject, cold_reads, io_mode, segments
from _breakdown_pieces import series
from _breakdown_shares import moments
from _disk import drop_cache
from _harness import NO_BAR, Bench, Ratio, Stopwatch, Trial, spread_of

import kvtier
from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kvtier.identity import BlockKeys, KVSpec
    from kvtier.profiles import ModelShape
    from kvtier.store import Store

DTYPES: Final = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
"""By the bytes of a value."""
AT_ONCE: Final = 4
"""Restores of different prompts that start together."""
LOOKUPS_PER_TRIAL: Final = 8
LANES: Final = {"ssd": "ssd", "host": "host", "device": "device", "compute": "recompute"}
"""Components by the lanes of a trace. The copy into an engine's tensors is a host copy: this
engine's tensors are in host memory. On a GPU it is the device copy, and there is no host copy."""


def spec_of(model: ModelShape, block_tokens: int = 256) -> KVSpec:
    """Return the spec of a model's blocks; one with latent attention keeps one tensor a layer."""
    settings: dict[str, Any] = {
        "model": f"bench/{model.name}", "weights": "sha256:0", "dtype": DTYPES[model.value_bytes],
        "layers": model.layers, "block_tokens": block_tokens,
    }  # fmt: skip
    if model.latent:
        settings["parts"] = (((1, model.latent),),) * model.layers
    else:
        widths = {"head_dim": model.head_dim, "v_head_dim": model.v_head_dim or model.head_dim}
        settings |= {"kv_heads": model.kv_heads, **widths}
    spec = kvtier.KVSpec(**settings)
    assert spec.block_layout.block_bytes == block_tokens * model.kv_token_bytes
    return spec


def subject_of(model: ModelShape, tokens: int, block_tokens: int = 256) -> Subject:
    """Return blocks of a prompt of so many tokens."""
    spec = spec_of(model, block_tokens)
    mib = max(1, spec.block_layout.block_bytes // MIB)
    return Subject(mib, max(1, tokens // block_tokens), spec)


# -- restores


def parts(
    events: Iterable[kvtier.TraceEvent], begun: float, planned: float, ended: float
) -> dict[str, float]:
    """Return the seconds of a restore's components: of its trace, and before its plan was made."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.lane in LANES and event.what != "wait":
            name = LANES[event.lane]
            spans.setdefault(name, []).append((event.begin_s - planned, event.end_s - planned))
    return moments(spans, ended - planned) | {"lookup": planned - begun}


def shares_of(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Return the part of a restore that each component takes."""
    return {name: each / sum(parts_s.values()) for name, each in parts_s.items()}


def mean_parts(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each component over several restores."""
    names = sorted({name for one in each for name in one})
    return {name: statistics.fmean(one.get(name, 0.0) for one in each) for name in names}


class Restores:
    """Cold restores of prompts of one length, by one or several callers at once."""

    def __init__(self, subject: Subject, store: Store, trace: kvtier.Trace, prompts: int) -> None:
        self._subject = subject
        self._store = store
        self._trace = trace
        self._slots = [subject.target] + [
            kvtier.TensorSlots.empty(subject.spec, subject.blocks) for _ in range(prompts - 1)
        ]
        self._tokens = []
        for number in range(prompts):
            tokens = np.zeros(subject.blocks * subject.spec.block_tokens, dtype=np.int64)
            tokens[0] = number
            self._tokens.append(tokens)
            self._put(kvtier.BlockKeys.of(subject.spec, tokens))

    def _put(self, keys: BlockKeys) -> None:
        transfer = self._store.put(keys, self._subject.source)
        self._store.flush(WAIT_S_MAX)
        result = transfer.result(WAIT_S_MAX)
        assert result.stored == self._subject.blocks, f"{result} of {self._subject.blocks} blocks"

    def trial(self, count: int, tier: Tier) -> Trial:
        """Restore ``count`` prompts at once; seconds and parts are the mean over them."""
        for tokens, slots in zip(self._tokens[:count], self._slots, strict=False):
            found = set(self._store.lookup(self._store.keys(tokens)).tiers)
            assert found == {tier}, f"the prompt is not in {tier} alone: {found}"
            for tensor in slots.tensors:
                tensor.zero_()
        drop_cache(segments(self._store))
        self._trace.clear()
        trials = self._together(count)
        self._compare(count)
        each = mean_parts([trial.detail["parts_s"] for trial in trials])
        slowest_s = max(trial.seconds for trial in trials)
        seconds = statistics.fmean(trial.seconds for trial in trials)
        return Trial(seconds, detail={"parts_s": each, "slowest_s": slowest_s})

    def _together(self, count: int) -> list[Trial]:
        found: list[tuple[float, float, float]] = []
        start = threading.Barrier(count)

        def run(number: int) -> None:
            start.wait(WAIT_S_MAX)
            begun = time.monotonic()  # the clock of the store's trace
            store = self._store
            plan = store.plan(store.lookup(store.keys(self._tokens[number])), way="load")
            planned = time.monotonic()
            with store.restore(plan, into=self._slots[number]) as session:
                step = session.next_step(WAIT_S_MAX)
            if step is None:
                found.append((begun, planned, time.monotonic()))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S_MAX)
        assert len(found) == count, f"{count - len(found)} of {count} restores did not load all"
        # Whose session was whose does not matter to the mean, as long as each caller has one.
        sessions: dict[int, list[kvtier.TraceEvent]] = {}
        for event in self._trace.events:
            if event.session:
                sessions.setdefault(event.session, []).append(event)
        ends = sorted(found, key=lambda times: times[2])
        order = sorted(sessions.values(), key=lambda events: max(e.end_s for e in events))
        assert len(order) == count, f"{len(order)} restores were traced, {count} were made"
        return [
            Trial(ended - begun, detail={"parts_s": parts(events, begun, planned, ended)})
            for events, (begun, planned, ended) in zip(order, ends, strict=True)
        ]

    def _compare(self, count: int) -> None:
        for slots in self._slots[:count]:
            for got, stored in zip(slots.tensors, self._subject.source.tensors, strict=True):
                same = torch.equal(got.view(torch.uint8), stored.view(torch.uint8))
                assert same, "restored KV differs from what was stored"


def restores(bench: Bench, folder: Path, subject: Subject, tier: Tier, at_once: int) -> None:
    """Measure restores of one length from one tier, alone and ``at_once`` together."""
    tokens = subject.blocks * subject.spec.block_tokens
    room = at_once if tier is Tier.HOST else 0
    trace = kvtier.Trace()
    with kvtier.open(
        folder / f"{tier}-{tokens}",
        subject.spec,
        host_bytes=room * subject.bytes,
        ssd_bytes=0 if room else at_once * subject.record_bytes + SLACK_BYTES,
        host_high_water=1.0,
        host_low_water=1.0,
        trace=trace,
    ) as store:
        made = Restores(subject, store, trace, at_once)
        ways = {"alone": partial(made.trial, 1, tier), "again": partial(made.trial, 1, tier)}
        if at_once > 1:
            ways["at_once"] = partial(made.trial, at_once, tier)
        case = f"restore_{tier}_{tokens}"
        trials = series(
            bench, case, ways, tier=str(tier), tokens=tokens, at_once=at_once,
            blocks=subject.blocks, block_bytes=subject.bytes // subject.blocks,
        )  # fmt: skip
    for way in ("alone", "at_once"):
        if way in trials:
            bench.results.append(summary(trials[way], str(tier), tokens, way, at_once, trials))


def summary(
    trials: Sequence[Trial],
    tier: str,
    tokens: int,
    way: str,
    at_once: int,
    same: Mapping[str, Sequence[Trial]],
) -> dict[str, Any]:
    """Return a row as the simulated ones are: the trial of the median, and the spread."""
    middle = sorted(trials, key=lambda trial: trial.seconds)[len(trials) // 2]
    parts_s = middle.detail["parts_s"]
    return {
        "case": "breakdown", "kind": "measured here", "tokens": tokens, "way": "load",
        "tier": tier, "at_once": at_once if way == "at_once" else 1,
        "seconds": middle.seconds, "parts_s": parts_s, "shares": shares_of(parts_s),
        "spread": spread_of(same["alone"], same["again"]),
    }  # fmt: skip


def ssd_rate(bench: Bench, folder: Path, subject: Subject) -> tuple[float, float]:
    """Measure cold reads from the SSD into host memory; returns bytes/s and the A/A spread."""
    with cold_reads(subject, folder) as (reads, store):
        bench.settings["io"] = io_mode(store)
        trials = series(
            bench, "ssd_read", {"store": reads.trial, "again": reads.trial},
            blocks=subject.blocks, block_bytes=subject.bytes // subject.blocks,
        )  # fmt: skip
    gb = subject.bytes / 1e9
    rate = gb / statistics.median(trial.seconds for trial in trials["store"])
    spread = spread_of(trials["store"], trials["again"])
    bench.add(Ratio("ssd_read_gb_per_s", rate, NO_BAR, rate * spread, len(trials["store"])))
    return rate * 1e9, spread


# -- lookup


def lookup_ms(
    bench: Bench, folder: Path, lengths: Sequence[int], block_tokens: int = 256
) -> dict[int, float]:
    """Measure keys, lookup and plan of stored prompts; returns milliseconds by tokens.

    Blocks of few bytes: how many there are counts, not how large they are.
    """
    spec = kvtier.KVSpec(
        model="bench/lookup", weights="sha256:0", dtype="bfloat16",
        layers=1, kv_heads=1, head_dim=4, block_tokens=block_tokens,
    )  # fmt: skip
    longest = max(lengths)
    ids = np.random.default_rng(7).integers(0, 128 << 10, longest, dtype=np.int64)
    slots = kvtier.TensorSlots.empty(spec, longest // block_tokens)
    with kvtier.open(
        folder / f"lookup-{block_tokens}",
        spec,
        host_bytes=2 * (longest // block_tokens) * max(spec.block_layout.block_bytes, 4096),
        ssd_bytes=0,
        write_queue_blocks_max=max(4096, longest // block_tokens),
    ) as store:
        store.put(store.keys(ids), slots).result(WAIT_S_MAX)
        ways = {str(tokens): partial(one_lookup, store, ids[:tokens]) for tokens in lengths}
        ways["again"] = ways[str(longest)]
        trials = series(bench, "lookup", ways, block_tokens=block_tokens, lengths=list(lengths))
    return {
        tokens: 1e3 * statistics.median(trial.seconds for trial in trials[str(tokens)])
        for tokens in lengths
    }


def one_lookup(store: Store, ids: np.ndarray[Any, Any]) -> Trial:
    """Time keys, lookup and plan of one prompt, the mean of a few."""
    watch = Stopwatch()
    with watch:
        for _ in range(LOOKUPS_PER_TRIAL):
            residency = store.lookup(store.keys(ids))
            store.plan(residency)
    assert None not in residency.tiers, "the prompt is stored"
    return Trial(watch.wall_s / LOOKUPS_PER_TRIAL, watch.held)


# -- block size


def read_by_block_tokens(
    bench: Bench,
    folder: Path,
    model: ModelShape,
    block_tokens: Sequence[int],
    nbytes: int,
    suffix: str = "",
) -> dict[int, tuple[float, float]]:
    """Measure cold reads of as many bytes in blocks of several sizes.

    Returns bytes/s and the A/A spread by tokens. Each size by turns with 256 tokens; what is
    returned is the rate of 256, times the ratio.
    """
    tokens = max(*block_tokens, nbytes // model.kv_token_bytes)
    tokens -= tokens % max(block_tokens)
    ratios: dict[int, tuple[float, float]] = {}
    reference: list[float] = []
    with ExitStack() as stack:
        base = subject_of(model, tokens)
        base_reads, _ = stack.enter_context(cold_reads(base, folder / "256"))
        for each in block_tokens:
            if each == base.spec.block_tokens:
                ratios[each] = 1.0, 0.0
                continue
            subject = subject_of(model, tokens, each)
            with cold_reads(subject, folder / str(each)) as (reads, _):
                ways: dict[str, Callable[[], Trial]] = {
                    "this": reads.trial,
                    "256": base_reads.trial,
                    "again": base_reads.trial,
                }
                trials = series(
                    bench, f"read_{each}_tokens", ways,
                    model=model.name, block_tokens=each, tokens=tokens,
                    nbytes=subject.bytes, blocks=subject.blocks,
                    block_bytes=subject.bytes // subject.blocks,
                )  # fmt: skip
            same = trials["256"], trials["again"]
            ratio = Ratio.of_pairs(
                f"read_{each}_vs_256_tokens{suffix}", trials["256"], trials["this"], same, NO_BAR
            )
            bench.add(ratio)
            ratios[each] = ratio.value, ratio.spread / ratio.value
            reference += [trial.seconds for trial in trials["256"]]
    middle = base.bytes / statistics.median(reference)
    return {each: (middle * ratio, spread) for each, (ratio, spread) in ratios.items()}
