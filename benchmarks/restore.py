"""What a restore plan is worth: against the better single way, the best split, and bad luck.

Needs no GPU: SmolLM2-135M and a tiny random Llama recompute on one CPU thread, while an SSD tier
behind a throttled link loads. Every restore is cold (no host tier, a new cache), goes into poisoned
buffers, and must be bit for bit what plain transformers compute in the same 256-token steps.
A restore's time is that of ``prefill`` (keys, lookup, plan, loads, steps), the suffix and the
poisoning left out. ``--quick`` takes at most ten minutes: shorter prompts, no 16 blocks of the real
model.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import accumulate, count, product
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
import transformers
from _harness import (
    Bar,
    Bench,
    Ratio,
    Stopwatch,
    Trial,
    interleave,
    measure,
    parse,
    quotients,
    spread_of,
    starved_share,
)

import kvtier
import kvtier_hf
from kvtier.cost import ComputeCost, LinkCost
from kvtier.plan import Residency, Tier
from kvtier.tiers.fs import PosixFileSystem
from kvtier_demo.prompt import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.planner import Way
    from kvtier.tiers.fs import FileSystem

PARTS: Final = ("plan", "equal_8", "equal_16", "grid", "unknown", "starved", "reads")
BLOCK: Final = 256
SUFFIX: Final = 8
"""Tokens behind the full blocks: a prompt is never only blocks, and their time never counts."""
FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Load time / recompute time."""
EQUAL_BARS: Final = ((8, 1.9), (16, 2.05))
BELIEF_BLOCKS: Final = 4
"""Loads from which a wrong belief about a link comes."""
STARVED_FACTOR: Final = 2.0
STARVED_WAYS: Final = ("load", "hybrid", "again")
INFLIGHT_MAX: Final = 4
"""Loads of one restore under way at once, by default."""
PLANS: Final = 200


# -- links


class LabelledLink(kvtier.LinkThrottle):
    """A link that the store's cost file knows by a name: another rate, the same belief."""

    def __init__(self, bytes_per_s: float, label: str) -> None:
        super().__init__(bytes_per_s)
        self._label = label

    def __repr__(self) -> str:
        return f"LabelledLink({self._label!r})"

    def ends(self, start: float, nbytes: float) -> float:
        """Return when a transfer that starts at ``start`` ends, in seconds from the first load."""
        return start + nbytes / self.bytes_per_s


class VaryingLink(LabelledLink):
    """A link whose rate changes at random, from its first load on, around a mean."""

    SEGMENTS: Final = 64
    SEGMENT_BLOCKS: Final = 2
    SIGMA: Final = 0.5

    def __init__(self, bytes_per_s: float, label: str, block_bytes: int, seed: int) -> None:
        super().__init__(bytes_per_s, label)
        numbers = random.Random(seed)  # noqa: S311 - a schedule, not a secret
        factors = [math.exp(numbers.gauss(0.0, self.SIGMA)) for _ in range(self.SEGMENTS)]
        mean = statistics.fmean(factors)
        self._rates = [bytes_per_s * factor / mean for factor in factors]
        self._segment_s = self.SEGMENT_BLOCKS * block_bytes / bytes_per_s
        self._begun: float | None = None
        self._free = 0.0
        self._gate = threading.Lock()

    def reserve(self, now: float, nbytes: int) -> float:
        """Put a transfer into the queue and return when it ends, on the clock of ``now``."""
        with self._gate:
            if self._begun is None:
                self._begun = now
            self._free = self.ends(max(now - self._begun, self._free), nbytes)
            return self._begun + self._free

    def ends(self, start: float, nbytes: float) -> float:
        """Return when a transfer that starts at ``start`` ends, in seconds from the first load."""
        segment = int(start / self._segment_s)
        while True:
            rate = self._rates[segment % self.SEGMENTS]
            stop = (segment + 1) * self._segment_s
            if nbytes <= (stop - start) * rate:
                return start + nbytes / rate
            nbytes -= (stop - start) * rate
            start, segment = stop, segment + 1


class CountingFileSystem(PosixFileSystem):
    """Counts reads of at least ``least`` bytes: one per block."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.reads = 0
        self._gate = threading.Lock()

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read, and count."""
        count = super().read(fd, into, offset)
        with self._gate:
            self.reads += count >= self.least
        return count


def best_split(compute_s: Sequence[float], loaded_s: Sequence[float]) -> float:
    """Return the best time if the first k blocks are computed and the other n - k loaded.

    ``loaded_s[j]`` is when j blocks would be loaded.
    """
    computed_s = [0.0, *accumulate(compute_s)]
    n = len(compute_s)
    return min(max(computed_s[k], loaded_s[n - k]) for k in range(n + 1))


# -- a model and its prompt


def body(model: transformers.PreTrainedModel) -> torch.nn.Module:
    """Return the model without its head."""
    found: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return found


class Meter:
    """Watches a model's forwards: tokens, seconds of each, and whether the thread had its core."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.tokens = 0
        self.steps: list[float] = []
        self.watch = Stopwatch()
        self._body = body(model)
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            self._body.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._body.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, _module: object, _args: object, kwargs: dict[str, Any]) -> None:
        self.tokens += kwargs["input_ids"].shape[1]
        self._before = self.watch.wall_s
        self.watch.__enter__()

    def _end(self, *_: object) -> None:
        self.watch.__exit__()
        self.steps.append(self.watch.wall_s - self._before)


@dataclass(slots=True)
class PoisonedStore:
    """A store that fills an engine's slots with NaN before it restores into them."""

    store: kvtier.Store
    seconds: float = 0.0

    def restore(self, plan: kvtier.RestorePlan, into: kvtier.TensorSlots) -> kvtier.RestoreSession:
        """Poison, and count how long that took."""
        begun = time.perf_counter()
        for tensor in into.tensors:
            tensor.fill_(math.nan)
        self.seconds += time.perf_counter() - begun
        return self.store.restore(plan, into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@dataclass(slots=True)
class Subject:
    """A model, a prompt, a folder in which the prompt's KV is stored, and what that KV must be."""

    model: transformers.PreTrainedModel
    ids: torch.Tensor
    folder: str
    spec: kvtier.KVSpec = field(init=False)
    reference: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.spec = kvtier_hf.spec_of(self.model)
        self.reference = self._chunked()
        with (
            kvtier.open(self.folder, self.spec, host_bytes=0, ssd_bytes="4GiB") as store,
            kvtier_hf.attach(self.model, store) as kv,
        ):
            kv.put(kv.prefill(self.ids)).result(60)
            store.flush()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.spec.block_layout.block_bytes

    def _chunked(self) -> list[torch.Tensor]:
        """Compute the KV of all full blocks in steps of one block, without kvtier."""
        cache = transformers.DynamicCache(config=self.model.config)
        run = body(self.model)
        name = "cache" if "cache" in signature(run.forward).parameters else "past_key_values"
        with torch.no_grad():
            for start in range(0, self.ids.shape[1] // BLOCK * BLOCK, BLOCK):
                step = self.ids[:, start : start + BLOCK]
                run(input_ids=step, use_cache=True, **{name: cache})
        layers: list[Any] = cache.layers
        return [kv[0] for layer in layers for kv in (layer.keys, layer.values)]

    def stock(self, blocks: int) -> Trial:
        """Prefill the blocks' tokens with plain transformers."""
        ids = self.ids[:, : blocks * BLOCK]
        with Meter(self.model) as meter, torch.no_grad():
            begun = time.perf_counter()
            self.model(ids, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - begun
        return Trial(seconds, meter.watch.held)

    def restore(
        self,
        blocks: int,
        link: kvtier.LinkThrottle | None,
        way: Way = "best",
        *,
        fs: FileSystem | None = None,
        device: str = "cpu",
        on: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> Trial:
        """Restore the first ``blocks`` blocks over ``link`` and check every byte.

        ``device`` separates what is believed about recomputing; ``on`` runs the restore elsewhere.
        """
        ids = self.ids[:, : blocks * BLOCK + SUFFIX]
        links = {} if link is None else {"ssd": link}
        settings: dict[str, Any] = {"host_bytes": 0, "ssd_bytes": "4GiB", "links": links}
        with (
            kvtier.open(self.folder, self.spec, fs=fs, device=device, **settings) as store,
            kvtier_hf.attach(self.model, store) as kv,
            Meter(self.model) as meter,
        ):
            poisoned = PoisonedStore(store)
            kv.store = cast("Any", poisoned)

            def work() -> tuple[kvtier_hf.KVTierCache, float]:
                begun = time.perf_counter()
                plan = store.plan(store.lookup(store.keys(ids)), way=way)
                cache = kv.prefill(ids, plan=plan)
                return cache, time.perf_counter() - begun - poisoned.seconds

            cache, seconds = on(work)
            report = cache.report
        self._check(blocks, cache)
        assert meter.tokens == report.recomputed * BLOCK, "a token was computed twice, or not"
        assert (report.loaded + report.recomputed, report.failed) == (blocks, 0)
        detail = {
            "loaded": report.loaded,
            "recomputed": report.recomputed,
            "predicted_s": report.predicted_s,
            "measured_s": report.measured_s,
            "steps_s": meter.steps,
        }
        return Trial(seconds, meter.watch.held, detail)

    def _check(self, blocks: int, cache: kvtier_hf.KVTierCache) -> None:
        stop = blocks * BLOCK
        for ours, theirs in zip(cache.slots.tensors, self.reference, strict=True):
            assert torch.equal(ours[:, :stop], theirs[:, :stop]), "restored KV differs"

    def rate(self, blocks: int, seconds: float) -> float:
        """Return the rate at which loading the blocks takes so long."""
        return blocks * self.block_bytes / seconds

    def recompute_s(self, blocks: int) -> float:
        """Return how long recomputing the blocks takes here and now."""
        return math.fsum(measure(partial(self.recompute, blocks)).detail["steps_s"])

    def recompute(self, blocks: int) -> Trial:
        """Recompute every block through the executor."""
        return self.restore(blocks, None, "recompute")


@contextmanager
def smollm2(blocks: int, bench: Bench) -> Iterator[Subject]:
    """Load the real model and store the KV of a document of so many blocks."""
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        bench.console.status("SmolLM2-135M: loading, computing the reference, storing") as status,
    ):
        reader = Reader.load(blocks * BLOCK + SUFFIX, 1, status.update)
        subject = Subject(reader.model, reader.document[:, : blocks * BLOCK + SUFFIX], folder)
        status.stop()
        yield subject


@contextmanager
def tiny(blocks: int) -> Iterator[Subject]:
    """Make a tiny Llama with random weights, whose blocks get dearer visibly with position."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1 << 15,
    )
    model = transformers.LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    ids = torch.randint(0, config.vocab_size, (1, blocks * BLOCK + SUFFIX))
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        yield Subject(model, ids, folder)


# -- the parts


def plan_512(bench: Bench) -> None:
    """Time the planner alone: 512 blocks, runs of 64 in host memory and on SSD by turns."""
    spec = kvtier.KVSpec(
        model="any", weights="sha256:0", dtype="bfloat16", layers=32, kv_heads=8, head_dim=128
    )
    keys = kvtier.BlockKeys.of(spec, [0] * (512 * BLOCK))
    tiers = tuple(Tier.SSD if block // 64 % 2 else Tier.HOST for block in range(512))
    residency = Residency(keys, tiers, spec.block_layout.block_bytes)
    # Made up so that some of each tier is recomputed: that is the planner's longest way.
    costs = kvtier.CostModel(
        ComputeCost(0.001, 4e-5, 4e-10, samples=100),
        LinkCost(8e9, 0.0, 100),
        LinkCost(2e9, 0.0, 100),
    )

    def once() -> Trial:
        begun = time.perf_counter()
        kvtier.plan(residency, costs)
        return Trial(time.perf_counter() - begun)

    plan = kvtier.plan(residency, costs)
    assert min(len(plan.recompute), len(plan.load)) > 0, "the case is one in which both are used"
    trials = interleave({"plan": once, "again": once}, PLANS)
    median_ms = 1e3 * statistics.median(trial.seconds for trial in trials["plan"])
    spread = median_ms * spread_of(trials["plan"], trials["again"])
    bench.add(Ratio("plan_512_ms", median_ms, Bar(high=1.0), spread, PLANS))


def better(stock: Sequence[Trial], load: Sequence[Trial]) -> Sequence[Trial]:
    """Return the single way whose median is smaller."""
    return min((stock, load), key=lambda way: statistics.median(trial.seconds for trial in way))


def equal(bench: Bench, subject: Subject, blocks: int, bar: Bar) -> None:
    """Compare with the better single way where loading and recomputing take equally long."""
    with bench.progress(f"SmolLM2, {blocks} blocks", 4 + 4 * bench.options.pairs) as tick:
        spent = []
        for _ in range(4):  # the first one warms up, or the link would be set too slow
            spent.append(measure(partial(subject.stock, blocks)).seconds)
            tick()
        rate = subject.rate(blocks, statistics.median(spent[1:]))

        def over(way: Way) -> Trial:
            return subject.restore(blocks, kvtier.LinkThrottle(rate), way)

        ways: dict[str, Callable[[], Trial]] = {
            "stock": partial(subject.stock, blocks),
            "load": partial(over, "load"),
            "hybrid": partial(over, "best"),
            "again": partial(over, "best"),
        }
        trials = interleave(ways, bench.options.pairs, tick)
    single = better(trials["stock"], trials["load"])
    name = f"hybrid_gain_equal_{blocks}"
    same = trials["hybrid"], trials["again"]
    bench.add(Ratio.of_pairs(name, single, trials["hybrid"], same, bar))
    bench.record(f"equal_{blocks}", trials, link_bytes_per_s=rate)


@dataclass(frozen=True, slots=True)
class Cell:
    """All trials of one length over one link, pair by pair."""

    blocks: int
    block_load_s: float
    stock: Sequence[Trial]
    recompute: Sequence[Trial]
    load: Sequence[Trial]
    hybrid: Sequence[Trial]
    again: Sequence[Trial]

    @property
    def vs_better(self) -> float:
        """The better single way / hybrid."""
        return statistics.median(quotients(better(self.stock, self.load), self.hybrid))

    @property
    def vs_optimal(self) -> float:
        """The best split under the rates of the same round / hybrid."""
        loaded_s = [self.block_load_s * count for count in range(self.blocks + 1)]
        return statistics.median(
            best_split(recompute.detail["steps_s"], loaded_s) / hybrid.seconds
            for recompute, hybrid in zip(self.recompute, self.hybrid, strict=True)
        )

    @property
    def self_ratio(self) -> float:
        """The hybrid / itself: 1, but for what this machine does meanwhile."""
        return statistics.median(quotients(self.hybrid, self.again))

    @property
    def predicted(self) -> list[float]:
        """Measured / predicted time of each hybrid restore."""
        return [trial.detail["measured_s"] / trial.detail["predicted_s"] for trial in self.hybrid]


def grid(bench: Bench, subject: Subject, lengths: Sequence[int], factors: Sequence[float]) -> None:
    """Compare over links from four times faster to four times slower than recomputing."""
    cells: list[Cell] = []
    runs = len(lengths) * bench.options.pairs * (2 + 3 * len(factors))
    with bench.progress("grid, tiny model", runs) as tick:
        for blocks in lengths:
            cells += length(bench, subject, blocks, factors, tick)
    hybrids = [trial for cell in cells for trial in cell.hybrid]
    again = [trial for cell in cells for trial in cell.again]
    spread = spread_of(hybrids, again)
    starved = starved_share(hybrids, *(cell.recompute for cell in cells))
    pairs = bench.options.pairs
    optimal = statistics.median(cell.vs_optimal for cell in cells)
    worst = min(cell.vs_better for cell in cells)
    worst_spread = max(abs(cell.self_ratio - 1) for cell in cells)
    predicted = statistics.median(ratio for cell in cells for ratio in cell.predicted)
    bench.add(
        Ratio("hybrid_vs_optimal", optimal, Bar(low=0.95), optimal * spread, pairs, starved),
        Ratio("hybrid_worst", worst, Bar(low=0.97), worst * worst_spread, pairs, starved),
        Ratio("predicted_median", predicted, Bar(0.9, 1.1), predicted * spread, pairs, starved),
    )


def length(
    bench: Bench,
    subject: Subject,
    blocks: int,
    factors: Sequence[float],
    tick: Callable[[], None],
) -> list[Cell]:
    """Measure one length over every link, interleaved."""
    spent = subject.recompute_s(blocks)
    ways: dict[str, Callable[[], Trial]] = {
        "stock": partial(subject.stock, blocks),
        "recompute": partial(subject.recompute, blocks),
    }
    rates = {factor: subject.rate(blocks, factor * spent) for factor in factors}

    def over(factor: float, way: Way) -> Trial:
        return subject.restore(blocks, kvtier.LinkThrottle(rates[factor]), way)

    for factor in factors:
        ways[f"load {factor}"] = partial(over, factor, "load")
        ways[f"hybrid {factor}"] = partial(over, factor, "best")
        ways[f"again {factor}"] = partial(over, factor, "best")
    trials = interleave(ways, bench.options.pairs, tick)
    cells = []
    for factor in factors:
        mine = {way: trials[f"{way} {factor}"] for way in ("load", "hybrid", "again")}
        mine |= {way: trials[way] for way in ("stock", "recompute")}
        cell = Cell(blocks, subject.block_bytes / rates[factor], **mine)
        cells.append(cell)
        bench.record(
            "grid",
            mine,
            blocks=blocks,
            load_vs_recompute=factor,
            vs_better=cell.vs_better,
            vs_optimal=cell.vs_optimal,
            predicted=cell.predicted,
        )
    return cells


@dataclass(frozen=True, slots=True)
class Unknown:
    """A link that is not what the store believes: its mean rate times ``belief``."""

    name: str
    belief: float
    varies: bool = False

    def link(self, bytes_per_s: float, label: str, block_bytes: int, seed: int) -> LabelledLink:
        """Return the true link."""
        if self.varies:
            return VaryingLink(bytes_per_s, label, block_bytes, seed)
        return LabelledLink(bytes_per_s, label)


UNKNOWN: Final = (
    Unknown("varying_link_excess", 1.0, varies=True),
    Unknown("misjudged_excess_x4", 4.0),
    Unknown("misjudged_excess_x025", 0.25),
)


def unknown(bench: Bench, subject: Subject, blocks: int, factors: Sequence[float]) -> None:
    """Compare with the best split that somebody who knew the link's true rates would choose."""
    spent = subject.recompute_s(blocks)
    kept: dict[str, dict[str, list[Trial]]] = {
        case.name: {"recompute": [], "hybrid": [], "again": []} for case in UNKNOWN
    }
    best_s: dict[str, list[float]] = {case.name: [] for case in UNKNOWN}
    numbers = count()

    def once(case: Unknown, mean: float, seed: int) -> Trial:
        # A name of its own: the belief comes from the loads before, at another rate, and no others.
        label = f"{case.name} {next(numbers)}"
        few = min(blocks, BELIEF_BLOCKS)
        subject.restore(few, LabelledLink(mean * case.belief, label), "load")
        return subject.restore(blocks, case.link(mean, label, subject.block_bytes, seed))

    runs = bench.options.pairs * (1 + 2 * len(factors) * len(UNKNOWN))
    with bench.progress("unknown links, tiny model", runs) as tick:
        for seed in range(bench.options.pairs):
            recompute = measure(partial(subject.recompute, blocks))
            tick()
            for case, factor in product(UNKNOWN, factors):
                mean = subject.rate(blocks, factor * spent)
                run = partial(once, case, mean, seed)
                pair = interleave({"hybrid": run, "again": run}, 1, tick)
                for way, trials in {"recompute": [recompute], **pair}.items():
                    kept[case.name][way] += trials
                link = case.link(mean, "", subject.block_bytes, seed)
                best = best_split(recompute.detail["steps_s"], loads(link, subject, blocks))
                best_s[case.name].append(best)
    for name, mine in kept.items():
        excess = statistics.fmean(
            trial.seconds / best - 1
            for trial, best in zip(mine["hybrid"], best_s[name], strict=True)
        )
        spread = (1 + excess) * spread_of(mine["hybrid"], mine["again"])
        starved = starved_share(*mine.values())
        bench.add(Ratio(name, excess, Bar(high=0.05), spread, len(best_s[name]), starved))
        bench.record(name, mine, blocks=blocks, factors=list(factors), best_s=best_s[name])


def loads(link: LabelledLink, subject: Subject, blocks: int) -> list[float]:
    """Return when 0, 1, 2, ... blocks are loaded over a link that never idles."""
    ends = [0.0]
    for _ in range(blocks):
        ends.append(link.ends(ends[-1], subject.block_bytes))
    return ends


@contextmanager
def starved_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield what runs work on a thread that has to share its core with a busy process."""
    core = min(os.sched_getaffinity(0))

    def starve() -> None:
        # Of this thread alone: both stay with the thread, and end with it.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, {core})
        with ThreadPoolExecutor(1, initializer=starve) as thread:
            yield lambda work: thread.submit(work).result()
    finally:
        busy.kill()
        busy.wait()


def starved(bench: Bench, subject: Subject, blocks: int) -> None:
    """Compare with loading alone when the compute thread hardly runs.

    The first restore believes in a thread that has its core; what follows knows better. Times are
    the sessions' own, to the last block in place: the starved thread would read its clock late.
    """
    if len(os.sched_getaffinity(0)) < 2:
        bench.console.print("starved_vs_load needs two cores: left out", style="yellow")
        return
    rate = subject.rate(blocks, STARVED_FACTOR * subject.recompute_s(blocks))
    with (
        starved_thread() as on,
        bench.progress("starved compute thread, tiny model", 3 * bench.options.pairs) as tick,
    ):

        def over(way: Way) -> Trial:
            link = kvtier.LinkThrottle(rate)
            trial = subject.restore(blocks, link, way, device="starved", on=on)
            detail = {**trial.detail, "held_cores": trial.held}
            return Trial(trial.detail["measured_s"], 1.0, detail)

        ways = {way: partial(over, "load" if way == "load" else "best") for way in STARVED_WAYS}
        trials = interleave(ways, bench.options.pairs, tick)
    same = trials["hybrid"], trials["again"]
    bar = Bar(high=1.03)
    bench.add(Ratio.of_pairs("starved_vs_load", trials["hybrid"], trials["load"], same, bar))
    bench.record("starved", trials, blocks=blocks, link_bytes_per_s=rate)


def reads(bench: Bench, subject: Subject, blocks: int, factors: Sequence[float]) -> None:
    """Count: a block is read or recomputed, hardly ever both, and nothing twice."""
    spent = subject.recompute_s(blocks)
    exact = []
    trials: list[Trial] = []
    for factor, _ in product(factors, range(bench.options.pairs)):
        link = partial(kvtier.LinkThrottle, subject.rate(blocks, factor * spent))
        subject.restore(blocks, link())  # the first one over a link also measures it
        fs = CountingFileSystem(subject.block_bytes)
        trial = subject.restore(blocks, link(), fs=fs)
        trials.append(replace(trial, detail={**trial.detail, "reads": fs.reads}))
        # Loads in flight when the pointers met may have been read in vain; restore() itself checks
        # that as many tokens were run as belong to the recomputed blocks.
        exact.append(0 <= fs.reads - trial.detail["loaded"] <= INFLIGHT_MAX)
    share = sum(exact) / len(exact)
    bench.add(Ratio("reads_exact", share, Bar(low=1.0), 0.0, len(exact)))
    bench.record("reads", {"hybrid": trials}, blocks=blocks)


def real_model(bench: Bench) -> None:
    """Run the parts that need SmolLM2."""
    options = bench.options
    # Five pairs over 16 blocks take minutes: a quick run leaves them out unless asked for.
    sizes = [
        (blocks, low)
        for blocks, low in EQUAL_BARS
        if options.wants(f"equal_{blocks}") and (blocks == 8 or options.only or not options.quick)
    ]
    if sizes:
        with smollm2(max(blocks for blocks, _ in sizes), bench) as subject:
            for blocks, low in sizes:
                equal(bench, subject, blocks, Bar(low=low))


def tiny_model(bench: Bench) -> None:
    """Run the parts over the tiny model."""
    options = bench.options
    lengths: Sequence[int] = (4, 8, 12, 16) if options.quick else (4, 8, 16, 32)
    cells: Sequence[float] = FACTORS
    factors: Sequence[float] = (1.0,) if options.quick else (0.5, 1.0, 2.0)
    if options.smoke:
        lengths, cells, factors = (2, 4), (1.0,), (1.0,)
    bench.settings |= {"lengths": lengths, "factors": cells, "unknown_factors": factors}
    blocks = max(lengths)
    parts: dict[str, Callable[[Subject], None]] = {
        "grid": lambda subject: grid(bench, subject, lengths, cells),
        "unknown": lambda subject: unknown(bench, subject, blocks, factors),
        "reads": lambda subject: reads(bench, subject, min(blocks, 16), factors),
        "starved": lambda subject: starved(bench, subject, min(blocks, 16)),
    }
    wanted = [run for part, run in parts.items() if options.wants(part)]
    if wanted:
        with tiny(blocks) as subject:
            for run in wanted:
                run(subject)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    options = parse(__doc__.partition("\n")[0], PARTS, argv)
    torch.set_num_threads(1)
    bench = Bench("restore", options, block_tokens=BLOCK)
    if options.wants("plan"):
        plan_512(bench)
    real_model(bench)
    tiny_model(bench)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
