"""A real model on this CPU: recomputed, loaded from this disk as it is, and both over a slow link.

Every restore is cold and bit for bit what plain transformers compute; the time is that of the
restore, without the step over the new tokens. On a CPU recomputing takes so long that the disk as
it is decides nothing; the link on which loading takes as long as recomputing shows the plan.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from _breakdown_here import parts, shares_of
from _breakdown_pieces import series
from _harness import Trial, spread_of

import kvtier

if TYPE_CHECKING:
    from collections.abc import Callable

    from _harness import Bench
    from _subjects import Subject

    from kvtier.planner import Way

MODELS: Final = ("smollm2", "tiny")


def run(bench: Bench, name: str, lengths: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """Measure all ways by blocks; returns load / recompute and the A/A spread, by where."""
    from _subjects import smollm2, tiny  # needs transformers

    ratios: dict[str, tuple[float, float]] = {}
    with ExitStack() as stack:
        longest = max(lengths)
        subject = stack.enter_context(
            smollm2(longest, bench) if name == "smollm2" else tiny(longest)
        )
        for blocks in lengths:
            ratios |= one_length(bench, name, subject, blocks)
    return ratios


def one_length(
    bench: Bench, name: str, subject: Subject, blocks: int
) -> dict[str, tuple[float, float]]:
    """Measure all ways for one length and add their rows."""
    tokens = blocks * subject.spec.block_tokens
    recompute_s = subject.recompute_s(blocks)
    link = partial(kvtier.LinkThrottle, subject.rate(blocks, recompute_s))
    ways: dict[str, Callable[[], Trial]] = {
        "recompute": partial(divided, subject, blocks, None, "recompute"),
        "load": partial(divided, subject, blocks, None, "load"),
        "load, slow link": lambda: divided(subject, blocks, link(), "load"),
        "best, slow link": lambda: divided(subject, blocks, link(), "best"),
        "again": partial(divided, subject, blocks, None, "recompute"),
    }
    rate = subject.rate(blocks, recompute_s)
    trials = series(bench, f"model_{name}_{tokens}", ways, tokens=tokens, link_bytes_per_s=rate)
    spread = spread_of(trials["recompute"], trials["again"])
    for way, each in trials.items():
        if way != "again":
            middle = sorted(each, key=lambda trial: trial.seconds)[len(each) // 2]
            bench.results.append(row(name, tokens, way, middle, spread))
    medians = {way: statistics.median(t.seconds for t in each) for way, each in trials.items()}
    where = f"{name} on this CPU, this SSD, {tokens} tokens"
    return {where: (medians["load"] / medians["recompute"], spread)}


def row(name: str, tokens: int, way: str, trial: Trial, spread: float) -> dict[str, Any]:
    """Return a row as the other measured ones are."""
    return {
        "case": "breakdown", "kind": "measured here", "model": name, "tokens": tokens, "way": way,
        "tier": "ssd", "at_once": 1, "seconds": trial.seconds, "spread": spread,
        "parts_s": trial.detail["parts_s"], "shares": shares_of(trial.detail["parts_s"]),
        "loaded": trial.detail["loaded"], "recomputed": trial.detail["recomputed"],
    }  # fmt: skip


def divided(subject: Subject, blocks: int, link: kvtier.LinkThrottle | None, way: Way) -> Trial:
    """Restore and divide the time among what was under way; before the first event is "lookup"."""
    made = subject.traced(blocks, link, way)
    begun = min(event.begin_s for event in made.events)
    ended = max(event.end_s for event in made.events)
    spent = parts(made.events, begun, begun, ended)
    spent["lookup"] = max(made.trial.seconds - (ended - begun), 0.0)
    detail = {**made.trial.detail, "parts_s": spent}
    return Trial(sum(spent.values()), made.trial.held, detail)
