"""The simulator against traced restores: the same plan, beliefs and costs must take as long.

The true costs of a simulated restore are those of the traced one: what its steps took, what the
link was set to, what its copies took. What is compared is everything else: which block is loaded or
recomputed when, what waits for what, and when the last block is in place.
"""

from __future__ import annotations

import statistics
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np
from _harness import Bar, Bench, Ratio, starved_share

import kvtier
from kvtier.cost import ComputeCost, LinkCost
from kvtier.simulator import replay, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _subjects import Restored, Subject

SAMPLES: Final = 100
"""What the fitted costs count for: they are true, so nothing is to be learned."""


def simulated(
    bench: Bench, subject: Subject, lengths: Sequence[int], factors: Sequence[float]
) -> None:
    """Compare simulated with measured times over several lengths and links."""
    ratios, again_ratios, trials = [], [], []
    runs = len(lengths) * len(factors) * bench.options.pairs
    with bench.progress("simulated against traced, tiny model", runs) as tick:
        for blocks, factor in product(lengths, factors):
            rate = subject.rate(blocks, factor * subject.recompute_s(blocks))
            mine = []
            for _ in range(bench.options.pairs):
                mine.append(subject.traced(blocks, kvtier.LinkThrottle(rate)))
                tick()
            shape = fitted([step for one in mine for step in steps(one)])
            found = [compare(one, shape, rate) for one in mine]
            ratios += [ratio for ratio, _ in found]
            again_ratios += [ratio for _, ratio in found]
            trials += [one.trial for one in mine]
            bench.record(
                "simulated",
                {"hybrid": [one.trial for one in mine]},
                blocks=blocks,
                load_vs_recompute=factor,
                simulated_vs_measured=[ratio for ratio, _ in found],
                replayed_vs_measured=[ratio for _, ratio in found],
            )
    starved = starved_share(trials)
    errors = [abs(ratio - 1) for ratio in ratios]
    again = [abs(ratio - 1) for ratio in again_ratios]
    count, spread = len(ratios), statistics.median(errors)
    within = Bar(0.9, 1.1)
    bench.add(
        Ratio("simulated_vs_measured", statistics.median(ratios), within, spread, count, starved),
        Ratio("simulated_error_median", spread, Bar(high=0.1), 0.0, count, starved),
        Ratio("simulated_error_p90", float(np.quantile(errors, 0.9)), Bar(), 0.0, count, starved),
        Ratio("replayed_error_p90", float(np.quantile(again, 0.9)), Bar(high=0.1), 0.0, count),
    )


def steps(one: Restored) -> list[tuple[int, int, float]]:
    """Return (first block, blocks, seconds) of each traced step."""
    return [
        (event.start, event.stop - event.start, event.seconds)
        for event in one.events
        if event.what == "recompute"
    ]


def fitted(seen: Sequence[tuple[int, int, float]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return seconds per block and per block and position, by least squares over all steps."""
    if not seen:
        return np.array([1e-3, 0.0])
    start, count, seconds = np.array(seen).T
    design = np.stack([count, count * (start + (count - 1) / 2)], axis=1)
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = np.linalg.lstsq(design, seconds)[0]
    return np.maximum(found, 0.0)


def compare(
    one: Restored, shape: np.ndarray[tuple[int], np.dtype[np.float64]], rate: float
) -> tuple[float, float]:
    """Return simulated / measured time, and that of the trace replayed / measured."""
    plan, tokens = one.plan, one.plan.block_tokens
    mine = steps(one)
    # A step's cost rises with position as all steps say; how fast this run was, it says itself.
    model = sum(n * (shape[0] + shape[1] * (start + (n - 1) / 2)) for start, n, _ in mine)
    pace = sum(seconds for *_, seconds in mine) / model if mine and model > 0 else 1.0
    block_s, rise_s = shape * pace
    attention_s = rise_s / tokens**2
    copies = [event.seconds for event in one.events if event.what == "copy"]
    copy_s = statistics.median(copies) if copies else 1e-5
    true = kvtier.CostModel(
        ComputeCost(0.0, block_s / tokens - attention_s * (tokens - 1) / 2, attention_s, SAMPLES),
        LinkCost(plan.block_bytes / copy_s, 0.0, SAMPLES),
        LinkCost(rate, 0.0, SAMPLES),
    )
    measured_s = one.trial.detail["measured_s"]
    timeline = simulate(plan, true, believed=one.believed, learns=True)
    # Reads that were in flight when the pointers met end after the restore.
    ends = [e.end_s for e in replay(one.events) if e.what in ("recompute", "copy")]
    return timeline.seconds / measured_s, max(ends) / measured_s
