"""What the scheduler's side counts, by flat names: one table says what each number means.

A restore is counted where its end is known, blocks are of the prompt (one block, however many
ranks hold a share of it). ``store_...`` are the stores' own counters, summed over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from kvtier.metrics import COUNTERS, HISTOGRAMS
from kvtier.prometheus import name_and_label

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COUNTED", "METRICS", "OBSERVED", "PREFIX", "SAMPLES_MAX", "Metric", "Tally", "Values"]

PREFIX: Final = "vllm:kvtier_"
"""vLLM takes only ``vllm:`` names off the registry again when an engine starts anew."""
SAMPLES_MAX: Final = 1024
"""Observations of one histogram that are kept until somebody takes them; more are not counted."""

Values = dict[str, "float | list[float]"]
"""By flat name: how much a counter rose, or a histogram's observations."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How a flat name is exposed: ``PREFIX + family`` with these labels."""

    family: str
    kind: Literal["counter", "histogram"]
    text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()


_SOURCES: Final = ("local", "host", "ssd", "recomputed", "missing")
"""The engine held it; loaded from a tier; stored, yet faster to recompute; not stored."""
_WAYS: Final = ("hybrid", "load", "recompute")
_RESTORED: Final = ("loaded", "recomputed")
_OUTCOMES: Final = ("released", "dropped")
"""The stores have taken it over, or had it; it was given up before it was copied."""


def _table() -> dict[str, Metric]:
    blocks = "Full prompt blocks of requests, by where their admission's plan takes them from"
    restored = "Blocks that restores put in place, by how; they go by what they measure on the way"
    restores = "Restores that ended, by what they did"
    saves = "Blocks handed to the stores, by what became of the hand-over"
    own = {
        **{
            f"prompt_blocks_{source}": Metric(
                "prompt_blocks", "counter", blocks, {"source": source}
            )
            for source in _SOURCES
        },
        **{
            f"restores_{way}": Metric("restores", "counter", restores, {"way": way})
            for way in _WAYS
        },
        **{
            f"restored_blocks_{how}": Metric("restored_blocks", "counter", restored, {"by": how})
            for how in _RESTORED
        },
        **{
            f"save_blocks_{outcome}": Metric("save_blocks", "counter", saves, {"outcome": outcome})
            for outcome in _OUTCOMES
        },
        "load_failures": Metric("load_failures", "counter", "Loads that failed: recomputed"),
        "restores_left": Metric(
            "restores_left", "counter", "Restores given up: their request was preempted or aborted"
        ),
        "requests_deferred": Metric(
            "requests_deferred",
            "counter",
            "Requests that waited because another one was bringing their blocks",
        ),
        "cache_resets": Metric("cache_resets", "counter", "Resets of the cache"),
        "restore_seconds": Metric(
            "restore_seconds",
            "histogram",
            "Time from a request's admission to its last restored block in place",
            bounds=HISTOGRAMS["restore_seconds"],
        ),
        "restore_predicted_ratio": Metric(
            "restore_predicted_ratio",
            "histogram",
            "Measured over predicted time of a restore",
            bounds=HISTOGRAMS["restore_predicted_ratio"],
        ),
        "lookup_seconds": Metric(
            "lookup_seconds",
            "histogram",
            "Time that a lookup and its plan took of the scheduler's loop",
            bounds=HISTOGRAMS["lookup_seconds"],
        ),
    }
    return {**own, **{f"store_{name}": _of_store(name) for name in sorted(COUNTERS)}}


def _of_store(counter: str) -> Metric:
    family, labels = name_and_label(counter)
    text = f"{family.replace('_', ' ').capitalize()}, as the ranks' stores count them, summed"
    return Metric(f"store_{family}", "counter", text, labels)


METRICS: Final = _table()
COUNTED: Final = frozenset(name for name, each in METRICS.items() if each.kind == "counter")
OBSERVED: Final = frozenset(METRICS) - COUNTED


class Tally:
    """Counts since the last ``take``; an unknown name is a ``KeyError`` so that no typo hides.

    Belongs to one thread, the scheduler's.
    """

    def __init__(self) -> None:
        self._rises: dict[str, float] = {}
        self._samples: dict[str, list[float]] = {}
        self._seen: dict[tuple[int, str], float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Raise a counter."""
        if name not in COUNTED:
            raise KeyError(name)
        if amount:
            self._rises[name] = self._rises.get(name, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Take a histogram's observation."""
        if name not in OBSERVED:
            raise KeyError(name)
        samples = self._samples.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(value)

    def rank(self, rank: int, counters: Mapping[str, float]) -> None:
        """Take over the counters of a rank's store as they stand: what they rose by is counted.

        A counter below what it was is that of a store opened anew: all of it is new.
        """
        for name, value in counters.items():
            flat = f"store_{name}"
            before = self._seen.get((rank, flat), 0)
            self._seen[rank, flat] = value
            self.add(flat, value - before if value >= before else value)

    def take(self) -> Values:
        """Return what was counted since the last call."""
        taken: Values = {**self._rises, **self._samples}
        self._rises, self._samples = {}, {}
        return taken
