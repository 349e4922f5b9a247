"""What can be drawn from a run: values only, nothing of how it looks (see ``_plots``).

Each kind of benchmark has its figures in ``FIGURES``; a run that lacks the rows for one says so.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from _report_read import seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _report_read import Run

MIB: Final = 1 << 20
GIB: Final = 1 << 30
RECOMPUTE, LOAD, PLANNED, OPTIMUM = "recompute", "load", "planned", "best split"


class NotDrawn(Exception):
    """A figure that a run does not hold the rows for; says which rows."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One thing over several places; ``low`` and ``high`` are the ends of what was measured.

    A reference (``dashed``) is what others are compared with: an optimum, a bound.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; with ``labels``, x counts in them, and those ``marked`` stand out."""

    title: str
    curves: Sequence[Curve]
    labels: Sequence[str] = ()
    marked: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that share their axes' meaning.

    ``lines``: curves over x. ``bars``: for each label one bar of each curve. ``stacked``: for each
    label the curves' bars one on the other.
    """

    slug: str
    title: str
    x: str
    y: str
    panels: Sequence[Panel]
    note: str
    """What was done to get these numbers: measured here, simulated, or whose they are."""
    kind: Literal["lines", "bars", "stacked"] = "lines"
    log_x: bool = False
    log_y: bool = False


def figures(run: Run) -> tuple[list[Figure], list[str]]:
    """Return what can be drawn of a run, and what cannot and why."""
    drawn, problems = [], []
    for make in FIGURES.get(run.name, ()):
        try:
            drawn.append(make(run))
        except NotDrawn as error:
            problems.append(f"{run.source}: {error}")
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            what = (make.__doc__ or "").removeprefix("Draw ").rstrip(".")
            problems.append(f"{run.source}: no plot of {what}: a row lacks or has a wrong {error}")
    return drawn, problems


def rows(run: Run, what: str, *cases: str) -> list[Mapping[str, Any]]:
    """Return the rows of these cases; raises NotDrawn if there are none."""
    found = run.rows(*cases)
    if not found:
        named = " or ".join(repr(case) for case in cases)
        raise NotDrawn(f"no plot of {what}: no result of case {named}; run that part as well")
    return found


def measured(name: str, points: Iterable[tuple[float, Sequence[float]]]) -> Curve:
    """Return the medians of several measurements at each place, with the ends of each."""
    ordered = sorted((x, list(values)) for x, values in points)
    return Curve(
        name,
        tuple(x for x, _ in ordered),
        tuple(statistics.median(values) for _, values in ordered),
        tuple(min(values) for _, values in ordered),
        tuple(max(values) for _, values in ordered),
    )


# -- tiers


def bandwidth(run: Run) -> Figure:
    """Draw bandwidth against block size."""
    titles = {
        "read": "cold reads",
        "write into fresh slots": "writes into fresh slots",
        "write into a full store": "writes into a full store",
    }
    found = rows(run, "bandwidth against block size", *titles)
    panels = []
    for case, title in titles.items():
        points: dict[str, list[tuple[float, list[float]]]] = defaultdict(list)
        for row in (row for row in found if row["case"] == case):
            gb = row["mib"] * row["blocks"] * MIB / 1e9
            for name, ways in (("raw disk", ("raw",)), ("store", ("store", "again"))):
                spent = [each for way in ways for each in seconds_of(row, way)]
                points[name].append((row["mib"], [gb / each for each in spent]))
        if points:
            curves = [measured(name, each) for name, each in points.items()]
            panels.append(Panel(title, curves))
    note = (
        f"Measured here, {run.settings.get('io', 'I/O mode not recorded')} I/O: medians, with the "
        "slowest and quickest pass. Raw is the same disk, records, depth and threads without a "
        "store; both may move together when the disk itself is unsteady."
    )
    return Figure(
        f"{run.name}-bandwidth",
        "Bandwidth against block size",
        "block of 256 tokens, MiB",
        "GB/s",
        panels,
        note,
        log_x=True,
    )


# -- restore


RESTORE_WAYS: Final = {RECOMPUTE: ("stock",), LOAD: ("load",), PLANNED: ("hybrid", "again")}
GRID: Final = (
    "Measured here with a tiny model on one thread over a throttled link, cold, every byte "
)


def restore_curves(found: Sequence[Mapping[str, Any]], x: Callable[[Any], float]) -> list[Curve]:
    """Return one curve for each way and one for the best split that was possible."""
    curves = []
    for name, ways in RESTORE_WAYS.items():
        points = [(x(row), [s for way in ways for s in seconds_of(row, way)]) for row in found]
        curves.append(measured(name, points))
    if all("optimal_s" in row for row in found):
        best = measured(OPTIMUM, [(x(row), row["optimal_s"]) for row in found])
        curves.append(Curve(best.name, best.x, best.y, dashed=True))
    return curves


def ttft_by_link(run: Run) -> Figure:
    """Draw restore time against link speed."""
    found = rows(run, "restore time against link speed", "grid")
    tokens = run.settings.get("block_tokens", 256)
    panels = []
    for blocks in sorted({row["blocks"] for row in found}):
        mine = [row for row in found if row["blocks"] == blocks]
        curves = restore_curves(mine, lambda row: 1 / row["load_vs_recompute"])
        panels.append(Panel(f"{blocks * tokens:,} tokens", curves))
    return Figure(
        f"{run.name}-ttft-link",
        "Restore time against link speed",
        "link speed (1: loading everything takes as long as recomputing it)",
        "seconds",
        panels,
        GRID + "compared. The best split is what someone would choose who knew the rates of that "
        "very round; the suffix's own prefill is not part of the time.",
        log_x=True,
        log_y=True,
    )


def ttft_by_length(run: Run) -> Figure:
    """Draw restore time against prompt length."""
    found = rows(run, "restore time against prompt length", "grid")
    tokens = run.settings.get("block_tokens", 256)
    panels = []
    for factor in sorted({row["load_vs_recompute"] for row in found}, reverse=True):
        mine = [row for row in found if row["load_vs_recompute"] == factor]
        curves = restore_curves(mine, lambda row: row["blocks"] * tokens)
        panels.append(Panel(f"link speed {1 / factor:g}", curves))
    return Figure(
        f"{run.name}-ttft-length",
        "Restore time against prompt length",
        "tokens restored",
        "seconds",
        panels,
        GRID + "compared. Link speed 1: loading everything takes as long as recomputing it.",
        log_x=True,
        log_y=True,
    )


def demo_ttft(run: Run) -> Figure:
    """Draw time to first token over links."""
    found = rows(run, "time to first token over links", "setting")
    labels = [f"{row['link']}, {row['link_bytes_per_s'] / 1e6:.1f} MB/s" for row in found]
    curves = []
    for way in (RECOMPUTE, LOAD, PLANNED):
        each = [row["ttft_s_each"][way] for row in found]
        curves.append(measured(way, list(enumerate(each))))
    note = "Measured here: the median over the questions, with the quickest and the slowest."
    return Figure(
        f"{run.name}-ttft", "Time to first token over links", "", "seconds",
        [Panel("", curves, labels)], note, kind="bars",
    )  # fmt: skip


# -- replay


def saved(run: Run) -> Figure:
    """Draw saved seconds against budget."""
    prefix = "policies, "
    found = [row for row in run.results if str(row.get("case", "")).startswith(prefix)]
    if not found:
        raise NotDrawn(
            "no plot of saved seconds against budget: no result of case 'policies, TRACE'; "
            "run that part as well"
        )
    panels = []
    for trace in dict.fromkeys(row["trace"] for row in found):
        points: dict[str, dict[float, float]] = defaultdict(dict)
        bound = None
        for row in (row for row in found if row["trace"] == trace):
            if row["policy"] == "infinite":
                bound = row["saved_s"]
                continue
            gib = row["blocks"]["ssd"] * row["block_bytes"] / GIB
            points[policy_of(row)][gib] = row["saved_s"]
        ends = sorted({gib for each in points.values() for gib in each})
        curves = [
            Curve(name, tuple(sorted(each)), tuple(each[gib] for gib in sorted(each)))
            for name, each in points.items()
        ]
        if bound is not None and ends:
            curves.append(Curve("no bound", (ends[0], ends[-1]), (bound, bound), dashed=True))
        panels.append(Panel(f"trace: {trace}", curves))
    note = (
        f"Simulated: public traces through the store's own catalog and policies on "
        f"{run.settings.get('hardware', 'hardware not recorded')}, idle device and links, one "
        "request after the other. Dashed: a cache that never forgets."
    )
    return Figure(
        f"{run.name}-saved", "Saved seconds of TTFT against budget", "SSD budget, GiB",
        "seconds saved over recomputing all", panels, note, log_x=True,
    )  # fmt: skip


def policy_of(row: Mapping[str, Any]) -> str:
    """Say which policy restores how: as ``replay.py`` prints it."""
    if row["policy"] == "belady":
        return "belady"
    kind = "hybrid" if row["way"]["hybrid"] else "load only"
    return f"{row['policy']}, {kind}{', holes' if row['way']['holes'] else ''}"


# -- rivals


def rival_reads(run: Run) -> Figure:
    """Draw cold reads of rivals side by side."""
    (row,) = rows(run, "rivals side by side", "read")
    gb = row["mib"] * row["blocks"] * MIB / 1e9
    rates = {
        way: sorted(gb / each for each in seconds_of(row, way))
        for way in row["trials"]
        if way != "again"
    }
    ordered = sorted(rates, key=lambda way: -statistics.median(rates[way]))
    curve = measured("cold read", [(at, rates[way]) for at, way in enumerate(ordered)])
    note = (
        f"Measured here by turns, blocks of {row['mib']} MiB, medians with the slowest and the "
        "quickest. The classes differ: who syncs and who checks is in the table below."
    )
    return Figure(
        f"{run.name}-reads", "Cold reads, side by side", "", "GB/s",
        [Panel("", [curve], ordered, marked=("kvtier",))], note, kind="bars",
    )  # fmt: skip


FIGURES: Final[dict[str, tuple[Callable[[Run], Figure], ...]]] = {
    "demo": (demo_ttft,),
    "replay": (saved,),
    "restore": (ttft_by_link, ttft_by_length),
    "rivals": (rival_reads,),
    "tiers": (bandwidth,),
}
"""What to draw of which benchmark; of one that is not here, only its tables are shown."""
