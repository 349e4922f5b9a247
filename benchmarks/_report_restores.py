"""Figures of restores: time against prompt length and link speed, and what it is spent on."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from _report_figures import (
    GIB,
    LOAD,
    OPTIMUM,
    PLANNED,
    RECOMPUTE,
    Curve,
    Figure,
    NotDrawn,
    Panel,
    measured,
    rows,
)
from _report_read import seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from _report_read import Run

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


# -- what a TTFT is spent on


COMPONENTS: Final = {
    "lookup": "lookup",
    "queue": "waiting",
    "ssd": "read from the slow tier",
    "host": "copy in host memory",
    "device": "copy to the device",
    "recompute": "recompute",
    "new": "new tokens",
}
WAYS: Final = {"recompute": RECOMPUTE, "load": LOAD, "best": PLANNED}
LENGTHS_MAX: Final = 4
"""Of so many lengths the shares are drawn, of all of them there are rows in the table."""
WHERE: Final = {"ssd": "on the slow tier", "host": "in host memory"}
SWEEP: Final = {
    RECOMPUTE: "recompute_s", LOAD: "load_s", PLANNED: "best_s", OPTIMUM: "optimum_s",
}  # fmt: skip


def of_breakdown(run: Run, what: str, kind: str) -> list[Mapping[str, Any]]:
    """Return the breakdowns of one kind; raises NotDrawn if there are none."""
    found = [row for row in rows(run, what, "breakdown") if row["kind"] == kind]
    if not found:
        raise NotDrawn(f"no plot of {what}: no result of case 'breakdown' that is {kind}")
    return found


def tokens_of(row: Mapping[str, Any]) -> str:
    """Return a length in short."""
    tokens = int(row["tokens"])
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else f"{tokens:,}"


def stacked(found: Sequence[Mapping[str, Any]], title: str, whole: str) -> Panel:
    """Return shares of ``whole`` in percent, one bar for each row."""
    labels = []
    for row in found:
        way = " ".join(filter(None, (row.get("model"), WAYS.get(row["way"], row["way"]))))
        beside = f", {row['at_once']} at once" if row.get("at_once", 1) > 1 else ""
        labels.append(f"{tokens_of(row)}, {way}{beside}: {_short(row[whole])}")
    curves = []
    for name, said in COMPONENTS.items():
        shares = [100 * row["parts_s"].get(name, 0.0) / row[whole] for row in found]
        if any(shares):
            curves.append(Curve(said, tuple(range(len(found))), tuple(shares)))
    return Panel(title, curves, labels)


def some_of(values: Sequence[int], most: int) -> Sequence[int]:
    """Return the first, the last, and what lies evenly between them, ``most`` at most."""
    if len(values) <= most:
        return values
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def shares(run: Run) -> Figure:
    """Draw the share of TTFT by component."""
    what = "the share of TTFT by component"
    found = of_breakdown(run, what, "simulated")
    lengths = some_of(sorted({row["tokens"] for row in found}), LENGTHS_MAX)
    panels = []
    for tier, link in dict.fromkeys((row["tier"], row["link"]) for row in found):
        mine = [row for row in found if (row["tier"], row["link"]) == (tier, link)]
        mine = [row for row in mine if row["tokens"] in lengths]
        panels.append(stacked(mine, f"KV {WHERE.get(tier, tier)}, over {link}", "ttft_s"))
    return Figure(
        f"{run.name}-shares", "Share of TTFT by component, simulated", "", "% of TTFT", panels,
        f"Simulated: {run.settings.get('model')} on {run.settings.get('device')}, idle, by the "
        "planner's own simulator; lookups measured here, and so is the link where it says so. "
        "Two components at once count half each. Beside each bar: its TTFT.",
        kind="stacked",
    )  # fmt: skip


def shares_here(run: Run) -> Figure:
    """Draw what restores of this machine are spent on."""
    found = of_breakdown(run, "what restores of this machine are spent on", "measured here")
    panels = [
        stacked(
            [row for row in found if row["tier"] == tier], f"KV {WHERE.get(tier, tier)}", "seconds"
        )
        for tier in dict.fromkeys(row["tier"] for row in found)
    ]
    return Figure(
        f"{run.name}-shares-here", "What a restore is spent on, measured here", "",
        "% of the restore", panels,
        "Measured here: the traced restore of median length, cold, checksums on, into host "
        "memory; no device. Beside each bar: how long the restore took.",
        kind="stacked",
    )  # fmt: skip


def sweep(run: Run) -> Figure:
    """Draw restore time against link speed, with the optimum."""
    found = rows(run, "restore time against link speed", "link_sweep")
    panels = []
    for tokens in dict.fromkeys(row["tokens"] for row in found):
        mine = sorted(
            (row for row in found if row["tokens"] == tokens), key=lambda row: row["bytes_per_s"]
        )
        rates = tuple(row["bytes_per_s"] / 1e9 for row in mine)
        curves = [
            Curve(name, rates, tuple(row[key] for row in mine), dashed=name == OPTIMUM)
            for name, key in SWEEP.items()
        ]
        panels.append(Panel(f"{tokens_of(mine[0])} tokens", curves))
    return Figure(
        f"{run.name}-ttft-link", "Restore time against link speed", "link, GB/s", "seconds",
        panels,
        f"Simulated: {run.settings.get('model')} on {run.settings.get('device')}. The best split "
        "is the exact one between two blocks, which needs the costs to be known.",
        log_x=True, log_y=True,
    )  # fmt: skip


def lengths(run: Run) -> Figure:
    """Draw TTFT against prompt length."""
    found = of_breakdown(run, "TTFT against prompt length", "simulated")
    panels = []
    for link in dict.fromkeys(row["link"] for row in found):
        mine = [row for row in found if row["link"] == link]
        curves = [
            measured(name, [(r["tokens"], [r["ttft_s"]]) for r in mine if r["way"] == way])
            for way, name in WAYS.items()
        ]
        curves = [Curve(curve.name, curve.x, curve.y) for curve in curves]
        panels.append(Panel(f"over {link}", curves))
    return Figure(
        f"{run.name}-ttft-length", "TTFT against prompt length", "tokens stored", "seconds",
        panels,
        f"Simulated: {run.settings.get('model')} on {run.settings.get('device')}, with "
        f"{run.settings.get('new_tokens', 'some')} new tokens behind the stored ones.",
        log_x=True, log_y=True,
    )  # fmt: skip


def block_sizes(run: Run) -> Figure:
    """Draw what a block's size decides."""
    found = sorted(
        rows(run, "what a block's size decides", "granularity"),
        key=lambda row: row["block_tokens"],
    )
    tokens = tuple(row["block_tokens"] for row in found)

    def curve(name: str, key: str, scale: float) -> Curve:
        return Curve(name, tokens, tuple(row[key] * scale for row in found))

    panels = [
        Panel("read, GB/s (measured here)", [curve("read", "bytes_per_s", 1e-9)]),
        Panel("lookup, ms (measured here)", [curve("lookup", "lookup_ms", 1.0)]),
        Panel("restore, ms (simulated)", [curve("restore", "total_s", 1e3)]),
    ]
    return Figure(
        f"{run.name}-block-size", "What a block's size decides", "tokens in a block", "",
        panels,
        f"A prompt of {tokens_of({'tokens': found[0]['prompt_tokens']})} tokens. The restore is "
        "the lookup, the plan at the rate read here, and recomputing the tokens behind the last "
        "full block.",
        log_x=True,
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
