"""Ways to bring a stored prefix back, one model: what others do, beside kvtier's plan.

::

    recompute          stock prefill, nothing is loaded
    load               everything is loaded, at the link's full rate
    head_then_compute  a head is loaded, then the tail is computed: what an engine does with a
                       prefix of which it keeps the head; as many blocks as kvtier's plan loads
    break_even         all or nothing: the single way that the cost model predicts to be quicker
    two_pointer        both ends race until they meet, without a cost model (Cake, arXiv 2410.03065)
    kvtier             a planned split, moved by what is measured, with a guard

All but the stock prefill load from the same store over the same throttled link into poisoned
buffers, one block a step, and must end bit for bit in what plain transformers compute. A head that
is loaded and a tail that is computed never overlap, so the best head would be all or nothing, since
recomputing gets dearer with position (theory: load - compute is monotone): that is ``break_even``.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from _harness import ATTEMPTS_MAX, Bar, Ratio, Trial, interleave, measure, quotients
from _subjects import Strategy, smollm2, tiny
from rich.box import SIMPLE
from rich.table import Table

import kvtier
from kvtier.plan import Times

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from _harness import Bench
    from _subjects import Subject

FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Load time / recompute time, by the link's rate."""
QUICK_FACTORS: Final = (1.0,)
BLOCKS: Final = 8
QUICK_BLOCKS: Final = 4
SMOKE_BLOCKS: Final = 3
WAIT_S_MAX: Final = 120.0
"""How long one block may take to be loaded."""
NOT_SLOWER: Final = Bar(low=0.97)
"""Never slower than another way, as ``hybrid_worst`` of the restore benchmark."""


# -- plans


def head_first(store: kvtier.Store, residency: kvtier.Residency) -> kvtier.RestorePlan:
    """Load as many blocks as kvtier's plan would, from the head, and recompute the rest."""
    plan = store.plan(residency)
    blocks, loaded = len(plan.hashes), len(plan.load)
    costs = store.costs
    compute_s = costs.block_seconds(plan.block_tokens, loaded, blocks).sum()
    compute_s += costs.compute.fixed_s * (blocks - loaded)
    load_s = loaded * costs.load_seconds(kvtier.Tier.SSD, plan.block_bytes)
    return replace(
        plan,
        recompute=tuple(range(loaded, blocks)),
        load=tuple(range(loaded)),
        adaptive=False,
        predicted=replace(plan.predicted, planned=float(load_s + compute_s)),
        reason="a head is loaded, then the tail is computed",
    )


def break_even(store: kvtier.Store, residency: kvtier.Residency) -> kvtier.RestorePlan:
    """Load all or recompute all, whichever is predicted to be quicker."""
    load, recompute = (store.plan(residency, way=way) for way in ("load", "recompute"))
    return min(load, recompute, key=lambda plan: plan.predicted.planned)


def one_block(plan: kvtier.RestorePlan, block: int) -> kvtier.RestorePlan:
    """Return a plan that loads one block and nothing else."""
    load_s = (plan.predicted.load or 0.0) / len(plan.hashes)
    return replace(
        plan,
        hashes=plan.hashes[: block + 1],
        tiers=plan.tiers[: block + 1],
        resident=block,
        recompute=(),
        load=(block,),
        adaptive=False,
        predicted=Times(load_s, load_s, plan.predicted.recompute),
    )


class Race:
    """A session: compute takes blocks from the head, loads from the tail, until they meet.

    No cost model and no guard: whoever is free takes the next block; one load is under way at a
    time, and what it has taken it brings. ``load`` loads one block and returns when it is in place.
    """

    def __init__(self, plan: kvtier.RestorePlan, load: Callable[[int], None]) -> None:
        self._plan = plan
        self._load = load
        self._gate = threading.Lock()
        self._front, self._back = 0, len(plan.hashes)
        self._thread = threading.Thread(target=self._loads, daemon=True)
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self._finished: float | None = None

    @classmethod
    def begin(
        cls, store: kvtier.Store, plan: kvtier.RestorePlan, slots: kvtier.TensorSlots
    ) -> Self:
        """Begin over a store: each block is a load-only restore of its own."""

        def load(block: int) -> None:
            with store.restore(one_block(plan, block), into=slots) as session:
                step = session.next_step(WAIT_S_MAX)
            assert step is None, f"block {step} was not loaded"

        return cls(plan, load)

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._gate:
            self._back = self._front  # nothing more is taken
        self._thread.join()

    def next_step(self, timeout: float) -> kvtier.Step | None:
        """Return the next block to recompute, or None once all is in place."""
        with self._gate:
            block = self._front
            taken = block < self._back
            self._front += taken
        if taken:
            return kvtier.Step(block, block + 1, self._plan.block_tokens)
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        assert not self._thread.is_alive(), f"a load takes more than {timeout:.0f} s"
        self._finished = self._finished or time.perf_counter()
        return None

    def computed(self, step: kvtier.Step) -> None:
        """Nothing is learned."""

    @property
    def report(self) -> kvtier.RestoreReport:
        """What was done."""
        loaded = len(self._plan.hashes) - self._front
        finished = self._finished or time.perf_counter()
        return kvtier.RestoreReport(
            loaded=loaded,
            recomputed=self._front,
            failed=0,
            loaded_bytes=loaded * self._plan.block_bytes,
            predicted_s=self._plan.predicted.planned,
            measured_s=finished - self._started,
        )

    def _loads(self) -> None:
        try:
            while True:
                with self._gate:
                    if self._back <= self._front:
                        return
                    self._back -= 1
                    block = self._back
                self._load(block)
        except BaseException as error:  # noqa: BLE001 - next_step raises it
            self._error = error


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "load": Strategy.of("load"),
    "head_then_compute": Strategy(head_first),
    "break_even": Strategy(break_even),
    "two_pointer": Strategy(lambda store, found: store.plan(found, way="load"), Race.begin),
    "kvtier": Strategy.of("best"),
    "again": Strategy.of("best"),
}
OTHERS: Final = ("recompute", "load", "head_then_compute", "break_even", "two_pointer")


# -- measuring


def strategies(bench: Bench) -> None:
    """Measure every strategy over every link by turns, and say how kvtier stands."""
    options = bench.options
    factors = FACTORS if not (options.quick or options.smoke) else QUICK_FACTORS
    blocks = SMOKE_BLOCKS if options.smoke else QUICK_BLOCKS if options.quick else BLOCKS
    model = "tiny random Llama" if options.smoke else "SmolLM2-135M"
    bench.settings |= {"model": model, "blocks": blocks, "factors": list(factors)}
    with tiny(blocks) if options.smoke else smollm2(blocks, bench) as subject:
        found = compare(bench, subject, blocks, factors)
    for factor, trials in found.items():
        bench.add(*ratios(trials, factor))
    bench.console.print(table(found, f"{model}, {blocks} blocks of 256 tokens"))
    bench.console.print(verdict(found), markup=False)


Found = dict[float, dict[str, list[Trial]]]
"""Trials by load time / recompute time and strategy."""


def compare(bench: Bench, subject: Subject, blocks: int, factors: Sequence[float]) -> Found:
    """Run everything by turns; what is believed about a link and the model is warm."""
    found: Found = {}
    runs = len(factors) * (1 + len(STRATEGIES)) * bench.options.pairs
    with bench.progress(f"restores, {blocks} blocks", runs) as tick:
        measure(partial(subject.stock, blocks))  # the first one warms up
        spent_s = subject.recompute_s(blocks)
        for factor in factors:
            rate = subject.rate(blocks, factor * spent_s)

            def over(strategy: Strategy, rate: float = rate) -> Trial:
                return subject.restore(blocks, kvtier.LinkThrottle(rate), strategy)

            over(STRATEGIES["load"])  # measures the link
            ways: dict[str, Callable[[], Trial]] = {"recompute": partial(subject.stock, blocks)}
            ways |= {name: partial(over, each) for name, each in STRATEGIES.items()}
            attempts_max = 1 if bench.options.smoke else ATTEMPTS_MAX
            found[factor] = interleave(ways, bench.options.pairs, tick, attempts_max)
            bench.record(
                "strategies", found[factor], load_vs_recompute=factor, link_bytes_per_s=rate,
                blocks=blocks, source="measured here",
            )  # fmt: skip
    return found


def ratios(trials: Mapping[str, Sequence[Trial]], factor: float) -> list[Ratio]:
    """Return each strategy / kvtier over one link."""
    same = trials["kvtier"], trials["again"]
    return [
        Ratio.of_pairs(
            f"restore_vs_{name}_x{factor:g}", trials[name], trials["kvtier"], same,
            NOT_SLOWER,
        )
        for name in OTHERS
    ]  # fmt: skip


def table(found: Mapping[float, Mapping[str, Sequence[Trial]]], what: str) -> Table:
    """Return the seconds of every strategy, a column per link."""
    shown = Table(
        title=f"seconds to bring a prefix back, {what}; medians, measured here",
        box=SIMPLE, pad_edge=False, caption="columns: load time / recompute time, by the link",
    )  # fmt: skip
    shown.add_column("strategy", no_wrap=True)
    for factor in found:
        shown.add_column(f"x{factor:g}", justify="right")
    shown.add_column("loaded of the blocks", justify="right")
    for name in (*OTHERS, "kvtier"):
        cells = [cell(trials, name) for trials in found.values()]
        loaded = " ".join(blocks_loaded(trials[name]) for trials in found.values())
        shown.add_row(name, *cells, loaded, style="bold" if name == "kvtier" else None)
    return shown


def cell(trials: Mapping[str, Sequence[Trial]], name: str) -> str:
    """Return a strategy's median, and how many times kvtier's it is, pair by pair."""
    seconds = statistics.median(trial.seconds for trial in trials[name])
    if name == "kvtier":
        return f"{seconds:.2f}"
    times = statistics.median(quotients(trials[name], trials["kvtier"]))
    return f"{seconds:.2f} ({times:.2f}x)"


def blocks_loaded(trials: Sequence[Trial]) -> str:
    """Return how many blocks were loaded, by the median; stock prefill loads none."""
    return f"{statistics.median(trial.detail.get('loaded', 0) for trial in trials):g}"


def verdict(found: Mapping[float, Mapping[str, Sequence[Trial]]]) -> str:
    """Say how kvtier stands against the best of the others over each link."""
    parts: list[str] = []
    for factor, trials in found.items():
        stands = zip(ratios(trials, factor), OTHERS, strict=True)
        ratio, name = min(stands, key=lambda pair: pair[0].value)
        parts.append(f"x{ratio.value:.2f} +- {ratio.spread:.2f} ({name}) at x{factor:g}")
    return f"Best other strategy's time / kvtier's: {', '.join(parts)}."
