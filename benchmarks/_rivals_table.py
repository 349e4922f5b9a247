"""The rivals side by side: rows of trials, how kvtier stands in each column, tables and sentences.

A row holds a rival's trials and kvtier's own of the same rounds, so that every number is a median
over pairs. Ratios are rival / kvtier: above 1 means that kvtier is quicker, or needs less CPU.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from _harness import Bar, Ratio, Trial
from rich.box import SIMPLE
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from _harness import Bench
    from rich.console import Console

CLASSES: Final = {
    "synced": "survives a power cut",
    "unsynced": "survives a killed process, a power cut may lose it",
    "memory": "gone with the process that holds it",
}
"""Durability classes, and what they say."""
COLUMNS: Final = {
    "write": ("write", "write", False),
    "cold": ("cold", "cold", False),
    "warm": ("warm", "warm", False),
    "write_cpu": ("CPU write", "write", True),
    "cold_cpu": ("CPU cold", "cold", True),
}
"""Column by name: its heading, the kind of trial, and whether it shows their CPU time."""
AHEAD: Final = Bar(low=1.0)
CPU_S_MIN: Final = 1e-4
"""A clock of ticks may say that nothing was spent at all."""
GIB: Final = 1 << 30
STYLES: Final = {"met": "", "not decided": "yellow", "missed": "bold red"}
"""How a rival's number looks, by kvtier's verdict against it."""

Series = dict[str, list[Trial]]
"""Trials by kind: "write", "cold", "warm"."""


@dataclass(frozen=True, slots=True)
class Row:
    """A rival's backend, and kvtier's trials of the same rounds (twice: against itself)."""

    name: str
    durability: str
    checks: str
    durable: str
    trials: Series
    """Of the way that was quickest by its median."""
    ours: Series
    again: Series

    def standing(self, column: str) -> Ratio | None:
        """Return rival / kvtier in one column, or None if the rival has no such trial."""
        _, kind, cpu = COLUMNS[column]
        if not (self.trials.get(kind) and self.ours.get(kind)):
            return None
        theirs, mine, again = (
            cpu_of(series[kind]) if cpu else series[kind]
            for series in (self.trials, self.ours, self.again)
        )
        name = f"{self.durability}_{column}_vs_{self.name.replace(' ', '_')}"
        return Ratio.of_pairs(name, theirs, mine, (mine, again), AHEAD)

    def standings(self) -> dict[str, Ratio]:
        """Return all columns that there are."""
        found = {column: self.standing(column) for column in COLUMNS}
        return {column: ratio for column, ratio in found.items() if ratio is not None}


def cpu_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials that count their CPU time instead."""
    return [replace(trial, seconds=max(trial.detail["cpu_s"], CPU_S_MIN)) for trial in trials]


def quickest(ways: Mapping[str, Sequence[Trial]]) -> tuple[str, list[Trial]]:
    """Return the way whose median is smallest, and its trials."""
    best = min(ways, key=lambda way: statistics.median(trial.seconds for trial in ways[way]))
    return best, list(ways[best])


def best_of(rows: Sequence[Row], durability: str, column: str) -> tuple[Row, Ratio] | None:
    """Return the rival of a class against which kvtier stands worst in a column."""
    found = [
        (row, ratio)
        for row in rows
        if row.durability == durability and (ratio := row.standing(column)) is not None
    ]
    return min(found, key=lambda pair: pair[1].value, default=None)


def class_ratios(rows: Sequence[Row]) -> list[tuple[Row, Ratio]]:
    """Return each class's columns against the best rival there, as ``CLASS_COLUMN_vs_best``."""
    found = []
    for durability in CLASSES:
        for column in COLUMNS:
            best = best_of(rows, durability, column)
            if best is not None:
                row, ratio = best
                found.append((row, replace(ratio, name=f"{durability}_{column}_vs_best")))
    return found


def shown(trials: Sequence[Trial], nbytes: int, *, cpu: bool) -> str:
    """Return the median as GB/s, or as CPU seconds per GiB."""
    if not trials:
        return "-"
    seconds = statistics.median(trial.seconds for trial in (cpu_of(trials) if cpu else trials))
    return f"{seconds * GIB / nbytes:.2f}" if cpu else f"{nbytes / 1e9 / seconds:.2f}"


def class_table(
    rows: Sequence[Row], durability: str, nbytes: int, ours: tuple[str, str]
) -> Table | None:
    """Return one class as a table, kvtier first; None if nobody is in it."""
    mine = [row for row in rows if row.durability == durability]
    if not mine:
        return None
    table = Table(
        title=f"{durability}: {CLASSES[durability]}; medians, measured here",
        box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("GB/s; CPU s/GiB", no_wrap=True)
    for heading, _, _ in COLUMNS.values():
        table.add_column(heading, justify="right", width=5)
    table.add_column("checks: spoilt bytes", min_width=7)
    table.add_column("durable by", min_width=9)
    merged: Series = {}
    for row in mine:
        for kind, trials in row.ours.items():
            merged.setdefault(kind, []).extend(trials)
    numbers = [shown(merged.get(kind, []), nbytes, cpu=cpu) for _, kind, cpu in COLUMNS.values()]
    table.add_row("kvtier", *numbers, *ours, style="bold")
    for row in sorted(mine, key=lambda row: row.name):
        standings = row.standings()
        cells = []
        for column, (_, kind, cpu) in COLUMNS.items():
            text = shown(row.trials.get(kind, []), nbytes, cpu=cpu)
            ratio = standings.get(column)
            style = STYLES[ratio.verdict] if ratio else ""
            cells.append(f"[{style}]{text}[/]" if style else text)
        table.add_row(row.name, *cells, row.checks, row.durable)
    return table


def sentence(stands: Iterable[tuple[Row, Ratio]]) -> str:
    """Say in which columns kvtier is ahead of every rival, in which it is not, and behind whom."""
    said: dict[str, list[str]] = {"met": [], "missed": [], "not decided": []}
    for row, ratio in stands:
        what = ratio.name.removesuffix("_vs_best").replace("_", " ")
        # As quick as the best rival meets the bar; to be ahead is more than the spread.
        verdict = ratio.verdict
        if verdict == "met" and ratio.value - 1 <= ratio.spread:
            verdict = "not decided"
        if verdict != "met":
            what += f" ({row.name}: x{ratio.value:.2f} +- {ratio.spread:.2f})"
        said[verdict].append(what)
    parts = [
        f"{words} {', '.join(said[verdict]) or 'nothing'}"
        for verdict, words in (
            ("met", "kvtier is ahead of every rival of its class in"),
            ("missed", "behind in"),
            ("not decided", "not decided in"),
        )
        if said[verdict] or verdict == "met"
    ]
    return f"{'; '.join(parts)}."


def record(bench: Bench, rows: Sequence[Row], nbytes: int) -> None:
    """Keep every row with its trials and standings."""
    for row in rows:
        value: dict[str, Any] = {
            "rival": row.name, "class": row.durability, "checks": row.checks,
            "durable": row.durable, "bytes": nbytes, "source": "measured here",
            "standings": {column: ratio.to_json() for column, ratio in row.standings().items()},
        }  # fmt: skip
        bench.record(
            "rival", {**row.trials, **{f"kvtier_{k}": v for k, v in row.ours.items()}}, **value
        )


def show(
    console: Console, rows: Sequence[Row], nbytes: int, ours: Mapping[str, tuple[str, str]]
) -> None:
    """Print all classes."""
    for durability in CLASSES:
        table = class_table(rows, durability, nbytes, ours[durability])
        if table is not None:
            console.print(table)
