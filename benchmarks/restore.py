"""What a restore plan is worth: against the better single way, the best split, and bad luck.

Needs no GPU: SmolLM2-135M and a tiny random Llama recompute on one CPU thread, while an SSD tier
behind a throttled link loads. Every restore is cold (no host tier, a new cache), goes into poisoned
buffers, and must be bit for bit what plain transformers compute in the same 256-token steps.
A restore's time is that of ``prefill`` (keys, lookup, plan, loads, steps), the suffix and the
poisoning left out. ``--quick`` takes at most ten minutes: shorter prompts, no 16 blocks of the real
model.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import TYPE_CHECKING, Any, Final

import torch
from _harness import (
    Bar,
    Bench,
    Ratio,
    Trial,
    interleave,
    measure,
    parse,
    quotients,
    spread_of,
    starved_share,
)
from _simulated import simulated
from _subjects import (
    BLOCK,
    CountingFileSystem,
    LabelledLink,
    Subject,
    VaryingLink,
    best_split,
    smollm2,
    tiny,
)

import kvtier
from kvtier.cost import ComputeCost, LinkCost
from kvtier.plan import Residency, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.planner import Way

PARTS: Final = (
    "plan", "equal_8", "equal_16", "grid", "unknown", "starved", "reads", "simulated",
)  # fmt: skip
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
    def optimal_s(self) -> list[float]:
        """The best split of each round under the rates of that round."""
        loaded_s = [self.block_load_s * count for count in range(self.blocks + 1)]
        return [best_split(trial.detail["steps_s"], loaded_s) for trial in self.recompute]

    @property
    def vs_optimal(self) -> float:
        """The best split under the rates of the same round / hybrid."""
        return statistics.median(
            best / hybrid.seconds for best, hybrid in zip(self.optimal_s, self.hybrid, strict=True)
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
            link_bytes_per_s=rates[factor],
            optimal_s=cell.optimal_s,
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
        "simulated": lambda subject: simulated(bench, subject, lengths, factors),
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
