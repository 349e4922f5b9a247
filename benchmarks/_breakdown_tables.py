"""How a breakdown is shown: tables of 100 columns, each saying where its numbers are from."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from _breakdown_shares import COMPONENTS, why
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _breakdown_evidence import Evidence
    from _breakdown_shares import Row
    from _breakdown_verdict import Condition
    from rich.console import Console

KIB: Final = 1 << 10
WIDTH: Final = 100
COLOURS: Final = {"recompute": "yellow", "load": "blue", "best": "green"}
NAMES: Final = {"best": "plan"}
"""What a way is called in a table, where not by its own name."""


def table_of(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Return an empty table; all columns are numbers but those named in ``left``."""
    table = Table(title=title, box=SIMPLE, pad_edge=False, padding=0, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def show(console: Console, table: Table) -> None:
    """Print a table; where there is no terminal to fit, ``WIDTH`` columns wide at most."""
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def length(tokens: int) -> str:
    """Return tokens in short: 32K."""
    return f"{tokens >> 10}K" if tokens % KIB == 0 else str(tokens)


def size(nbytes: float) -> str:
    """Return bytes in short: 64 KiB, 8 MiB."""
    return f"{nbytes / KIB:g} KiB" if nbytes < KIB * KIB else f"{nbytes / KIB / KIB:g} MiB"


def seconds(value: float) -> str:
    """Return seconds with three digits that count."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} us"


def share(value: float) -> str:
    """Return a share in percent; what is under 0.05 % but not nothing says so."""
    if value == 0:
        return "-"
    return "<0.1" if value < 0.0005 else f"{100 * value:.1f}"


def simulated(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print shares of TTFT in percent, three ways for each length.

    Blocks are those recomputed, of all.
    """
    table = table_of(title, ["tokens", "way", "TTFT", *COMPONENTS, "blocks"], ["way"])
    for number, row in enumerate(rows):
        if number and row.tokens != rows[number - 1].tokens:
            table.add_section()
        blocks = f"{row.recomputed}/{row.recomputed + row.loaded}"
        table.add_row(
            length(row.tokens), NAMES.get(row.way, row.way), seconds(row.ttft_s),
            *(share(row.shares[name]) for name in COMPONENTS), blocks,
            style=COLOURS[row.way],
        )  # fmt: skip
    show(console, table)


def measured(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Print measured restores; shares in percent of the restore's own time."""
    rows = [row for row in results if row["case"] == "breakdown" and row["kind"] == "measured here"]
    if not rows:
        return
    names = [name for name in COMPONENTS if name not in ("device", "new")]
    columns = ["tokens", "from", "callers", "way", "restore", "A/A", *names]
    table = table_of("Restores measured here, cold; % of each restore", columns, ["from", "way"])
    for row in rows:
        parts = [share(row["parts_s"].get(name, 0.0) / row["seconds"]) for name in names]
        way = f"{row['model']}: {row['way']}" if "model" in row else row["way"]
        table.add_row(
            length(row["tokens"]), row["tier"], str(row["at_once"]),
            way.replace("best", NAMES["best"]), seconds(row["seconds"]),
            f"{row['spread']:.1%}", *parts,
        )  # fmt: skip
    show(console, table)


def granularity(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what a block's size decides."""
    columns = [
        "tokens", "block", "read GB/s", "A/A", "lookup", "meta B/token", "plan loss", "lost tail",
        "restore", "vs best",
    ]  # fmt: skip
    title = (
        f"Block size, {rows[0]['model']}, {length(rows[0]['prompt_tokens'])} tokens: read and "
        "lookup measured here, metadata arithmetic, rest simulated"
    )
    table = table_of(title, columns)
    for row in rows:
        table.add_row(
            str(row["block_tokens"]), size(row["block_bytes"]), f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['spread']:.0%}" if row["spread"] else "-",
            f"{row['lookup_ms']:.2f} ms", f"{row['metadata_bytes_per_token']:.1f}",
            f"{row['planning_loss']:.1%}", seconds(row["lost_tail_s"]),
            seconds(row["total_s"]), f"{row['vs_best']:.3f}",
            style="bold" if row["block_tokens"] == 256 else None,
        )  # fmt: skip
    show(console, table)
    console.print(why(rows), highlight=False)


def by_size(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Print bandwidth against piece size."""
    cases = {row["case"]: row for row in results if "_by_size" in row["case"]}
    if not cases:
        return
    names = ["read_by_size_1", "read_by_size_4", "copy_by_size"]
    columns = ["piece", "read, 1 at once", "read, 4 at once", "copy, 1 thread"]
    table = table_of("GB/s by size of a piece, measured here: disk cold, memory warm", columns)
    for nbytes in cases[names[0]]["piece_bytes"]:
        table.add_row(size(nbytes), *(f"{rate(cases[name], nbytes) / 1e9:.2f}" for name in names))
    show(console, table)


def rate(case: Mapping[str, Any], nbytes: int) -> float:
    """Return the bytes/s of a case's way for pieces of one size."""
    trials = case["trials"][str(nbytes)]
    moved = nbytes * trials[0]["pieces"]
    return float(moved / statistics.median(trial["seconds"] for trial in trials))


def links(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print restores over links of many rates, with the exact split."""
    columns = ["GB/s", "recompute", "load", "plan", "exact split", "plan/exact", "recomputed"]
    title = f"Restore of {length(rows[0]['tokens'])} tokens by link speed, simulated"
    table = table_of(title, columns)
    for row in rows:
        table.add_row(
            f"{row['bytes_per_s'] / 1e9:.2f}", seconds(row["recompute_s"]), seconds(row["load_s"]),
            seconds(row["best_s"]), seconds(row["optimum_s"]),
            f"{row['best_s'] / row['optimum_s']:.3f}", str(row["plan_recomputed"]),
        )  # fmt: skip
    show(console, table)


def network(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print restores over networks with distance."""
    columns = ["link", "km", "latency", "load at once", "load by block", "plan", "recompute"]
    title = f"Restore of {length(rows[0]['tokens'])} tokens over networks, simulated"
    table = table_of(title, columns, ["link"])
    for row in rows:
        table.add_row(
            row["link"], f"{row['km']:g}", seconds(row["latency_s"]), seconds(row["at_once_s"]),
            seconds(row["by_block_s"]), seconds(row["plan_s"]), seconds(row["recompute_s"]),
        )  # fmt: skip
    show(console, table)


def evidence(console: Console, rows: Sequence[Evidence]) -> None:
    """Print what others report beside what we find."""
    table = Table(title="What others report, and ours", box=SIMPLE, pad_edge=False,
                  title_justify="left", show_lines=False)  # fmt: skip
    for column, width in (("work", 14), ("theirs (quoted)", 30), ("ours", 33), ("kind", 13)):
        table.add_column(column, width=width)
    for row in rows:
        kind = row.kind if row.agrees == "-" else f"{row.kind}: {row.agrees}"
        table.add_row(escape(row.work), escape(row.theirs), escape(row.ours), kind)
        table.add_section()
    show(console, table)


def conditions(console: Console, found: Sequence[Condition]) -> None:
    """Print the conditions, each with its verdict and the case that says most."""
    table = Table(
        title='What would refute "it depends on the path"',
        box=SIMPLE,
        pad_edge=False,
        title_justify="left",
    )
    columns = {"condition": 29, "verdict": 14, "most telling case": 31, "value": 5, "met in": 8}
    for column, width in columns.items():
        table.add_column(column, width=width)
    for each in found:
        case = (each.met or each.cases)[0]
        met = f"{len(each.met)}/{len(each.cases)}"
        table.add_row(each.what, each.verdict, escape(case.where), f"{case.value:.2g}", met)
        table.add_section()
    show(console, table)
