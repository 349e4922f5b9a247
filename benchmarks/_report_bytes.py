"""Figures of bytes: bandwidth by block and piece size, rivals side by side, a store under load."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from _report_figures import MIB, Curve, Figure, Panel, measured, rows
from _report_read import seconds_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _report_read import Run

RIVAL_KINDS: Final = {"write": "write", "cold": "cold read", "warm": "warm read"}
CLASSES: Final = {
    "synced": "synced: survives a power cut",
    "unsynced": "unsynced: survives a killed process",
    "memory": "memory: gone with its process",
}
CPU_S_MIN: Final = 1e-4
"""A clock of ticks may say that nothing was spent at all."""
PIECES: Final = {
    "read_by_size_1": "read, 1 at once",
    "read_by_size_4": "read, 4 at once",
    "copy_by_size": "copy in memory, 1 thread",
}


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


# -- pieces of the same bytes


def pieces(run: Run) -> Figure:
    """Draw bandwidth against the size of a piece."""
    found = rows(run, "bandwidth against the size of a piece", *PIECES)
    curves = []
    for row in found:
        points = []
        for nbytes in row["piece_bytes"]:
            trials = row["trials"][str(nbytes)]
            rates = [nbytes * t["pieces"] / t["seconds"] / 1e9 for t in trials]
            points.append((nbytes / 1024, rates))
        curves.append(measured(PIECES[row["case"]], points))
    return Figure(
        f"{run.name}-pieces", "Bandwidth against the size of a piece", "KiB in one piece", "GB/s",
        [Panel("", curves)],
        "Measured here: the same bytes in pieces of many sizes, disk cold, memory warm.",
        log_x=True, log_y=True,
    )  # fmt: skip


# -- rivals


def rivals(run: Run) -> Figure:
    """Draw writes and reads of rivals side by side."""
    return _side_by_side(
        run, "writes and reads, GB/s", "bandwidth", "GB/s",
        lambda trial, nbytes: nbytes / 1e9 / trial["seconds"],
    )  # fmt: skip


def rivals_cpu(run: Run) -> Figure:
    """Draw the CPU time of rivals side by side."""
    return _side_by_side(
        run, "CPU time, seconds per GiB", "cpu", "core-seconds per GiB",
        lambda trial, nbytes: max(trial["cpu_s"], CPU_S_MIN) * (1 << 30) / nbytes,
        ("write", "cold"),
    )  # fmt: skip


def _side_by_side(
    run: Run, what: str, slug: str, unit: str, value: Any, kinds: Sequence[str] = (*RIVAL_KINDS,)
) -> Figure:
    found = rows(run, what, "rival")
    panels = []
    for durability in dict.fromkeys(row["class"] for row in found):
        mine = [row for row in found if row["class"] == durability]
        labels = ["kvtier", *(row["rival"] for row in mine)]
        curves = []
        for kind in kinds:
            points = [(0, _values(mine, f"kvtier_{kind}", value))]
            points += [(at, _values([row], kind, value)) for at, row in enumerate(mine, 1)]
            curves.append(measured(RIVAL_KINDS[kind], [(x, ys) for x, ys in points if ys]))
        panels.append(Panel(CLASSES.get(durability, durability), curves, labels))
    return Figure(
        f"{run.name}-{slug}", f"Rivals side by side: {what}", "", unit, panels,
        "Measured here by turns: medians with the lowest and the highest. kvtier checks every "
        "byte and its writes are durable in every class; who else does is in the table below.",
        kind="bars",
    )  # fmt: skip


def _values(found: Sequence[Mapping[str, Any]], kind: str, value: Any) -> list[float]:
    return [value(trial, row["bytes"]) for row in found for trial in row["trials"].get(kind, ())]


def strategies(run: Run) -> Figure:
    """Draw restore strategies side by side."""
    found = rows(run, "restore strategies side by side", "strategies")
    panels = []
    for row in found:
        spent = {way: seconds_of(row, way) for way in row["trials"] if way != "again"}
        ordered = sorted(spent, key=lambda way: statistics.median(spent[way]))
        curve: Curve = measured("restore", [(at, spent[way]) for at, way in enumerate(ordered)])
        title = (
            f"{row['blocks']} blocks, loading takes {row['load_vs_recompute']:g} x as long as "
            "recomputing"
        )
        panels.append(Panel(title, [curve], ordered, marked=("kvtier",)))
    return Figure(
        f"{run.name}-strategies", "Restore strategies side by side", "", "seconds", panels,
        f"Measured here by turns on {run.settings.get('model', 'a model not recorded')} over a "
        "throttled link: medians with the quickest and the slowest.",
        kind="bars",
    )  # fmt: skip


# -- load


CALLS: Final = {
    "lookup_ms": "keys and lookup",
    "ready_ms": "restore",
    "released_ms": "put, until the source may be reused",
}
PERCENTILES: Final = ("p50", "p95", "p99")


def latencies(run: Run) -> Figure:
    """Draw latencies under load."""
    found = rows(run, "latencies under load", "workload")
    labels = [row["name"] for row in found]
    panels = []
    for key, call in CALLS.items():
        curves = []
        for at, percentile in enumerate(PERCENTILES):
            points = [(x, row[key][at]) for x, row in enumerate(found) if row[key]]
            if points:
                curves.append(Curve(percentile, *zip(*points, strict=True)))
        panels.append(Panel(call, curves, labels))
    return Figure(
        f"{run.name}-latency", "Latencies under load", "", "ms", panels,
        "Measured here, every restored byte compared; in open loop a latency counts from when the "
        "request was due. What each workload is, is in the table below.",
        kind="bars",
    )  # fmt: skip


def throughput(run: Run) -> Figure:
    """Draw throughput under load beside the raw disk's."""
    found = rows(run, "throughput under load", "workload")
    labels = [row["name"] for row in found]

    def curve(name: str, rates: Sequence[float]) -> Curve:
        return Curve(name, tuple(range(len(found))), tuple(rate / 1e9 for rate in rates))

    curves = [
        curve("restored", [row["restore_bytes_per_s"] for row in found]),
        curve("put", [row["put_bytes_per_s"] for row in found]),
        curve("raw disk, read", [row["limits"]["read"] for row in found]),
        curve("raw disk, write", [row["limits"]["write"] for row in found]),
    ]
    return Figure(
        f"{run.name}-throughput", "Throughput under load, beside the raw disk", "", "GB/s",
        [Panel("", curves, labels)],
        "Measured here; only what was restored right counts. In open loop no more is served than "
        "is asked for, and what host memory serves may be above the disk.",
        kind="bars",
    )  # fmt: skip
