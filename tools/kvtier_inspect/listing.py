"""``ls`` and ``tree``: blocks one by one, and the prefix forest; a page at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier_inspect.forest import SORTS, Forest, Line, grow, lines
from kvtier_inspect.opened import opened, plain
from kvtier_inspect.render import ExitCode, ago, columns, console, count, emit, safe, size
from kvtier_inspect.table import around, matching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.entries import Entries
    from kvtier_inspect.opened import Finding
    from kvtier_inspect.table import Rows

__all__ = ["ls", "order", "tree"]

COLUMNS: Final = {
    "used": "last_use_ns",
    "age": "created_ns",
    "hits": "hits",
    "size": "payload_bytes",
    "position": "position",
    "hash": "",
}
"""What ``ls`` orders by: the latest use, the newest, the most hits, the largest, ... first."""
LEVELS_MAX: Final = 12
"""Levels of a tree that are drawn; deeper ones are numbered."""


def order(entries: Entries, sort: str) -> Rows:
    """Return rows in the order of ``ls``; "hash" is the order of the index."""
    if sort not in COLUMNS:
        raise ValueError(f"sort: {sort!r} is not one of {', '.join(COLUMNS)}")
    if sort == "hash":
        return np.arange(len(entries))
    values = np.ascontiguousarray(entries[COLUMNS[sort]])
    if sort == "position":
        return np.argsort(values, kind="stable")
    return np.argsort(np.iinfo(values.dtype).max - values, kind="stable")


def ls(
    path: str, *, namespace: str, tenant: str | None, sort: str, offset: int, limit: int,
    as_json: bool,
) -> int:  # fmt: skip
    """Print blocks, one a line."""
    with opened(path) as store:
        entries = matching(store.entries, namespace, tenant)
    page = order(entries, sort)[offset : offset + limit]
    placed = zip(page.tolist(), *around(entries, page), strict=True)
    rows = [
        block_json(entries, row, parent_stored=stored, branches=number)
        for row, stored, number in placed
    ]
    if as_json:
        emit(_paged(len(entries), offset, store.findings, "blocks", rows))
        return ExitCode.FINE
    out = console()
    names = ("block", "position", "size", "age", "last use", "hits", "link", "at")
    shown = (
        (
            f"{each['namespace'][:8]}/{each['hash'][:16]}",
            each["position"],
            size(each["payload_bytes"]),
            ago(each["created_ns"], store.read_ns),
            ago(each["last_use_ns"], store.read_ns),
            count(each["hits"]),
            _link(each),
            f"{each['segment']:016x}:{each['slot']}",
        )
        for each in rows
    )
    out.print(columns(names, shown, left=("block", "link", "at")))
    _foot("blocks", len(rows), len(entries), offset, store.findings)
    return ExitCode.FINE


def block_json(entries: Entries, row: int, *, parent_stored: bool, branches: int) -> dict[str, Any]:
    """Return a block as plain values; ``parent_stored`` and ``branches`` place it in the forest."""
    entry = entries[row]
    numbers = (
        "position", "kind", "codec", "segment", "slot", "slot_bytes", "payload_bytes", "created_ns",
        "expiry_ns", "priority", "hits", "last_use_ns",
    )  # fmt: skip
    return {
        **{name: entry[name].tobytes().hex() for name in ("namespace", "hash", "parent", "tenant")},
        **{name: int(entry[name]) for name in numbers},
        "parent_stored": parent_stored,
        "branches": branches,
    }


def _link(block: dict[str, Any]) -> str:
    """Say how a block hangs together with the others."""
    head = "head" if block["position"] == 0 else "chained"
    begins = head if block["parent_stored"] or block["position"] == 0 else "after a hole"
    ends = {0: ", end", 1: ""}.get(block["branches"], f", shared by {block['branches']}")
    return begins + ends


def tree(
    path: str, *, namespace: str, tenant: str | None, sort: str, offset: int, limit: int,
    as_json: bool,
) -> int:  # fmt: skip
    """Print the prefix forest, one run a line."""
    if sort not in SORTS:
        raise ValueError(f"sort: {sort!r} is not one of {', '.join(SORTS)}")
    with opened(path) as store:
        forest = grow(matching(store.entries, namespace, tenant))
    page = lines(forest, sort, offset, limit)
    if as_json:
        runs = [run_json(forest, line) for line in page]
        emit(_paged(len(forest.first), offset, store.findings, "runs", runs))
        return ExitCode.FINE
    out = console()
    names = ("blocks", "first", "count", "size", "with branches", "prompts", "hits", "last use")
    rows = [_row(forest, line, store.read_ns) for line in page]
    out.print(columns(names, rows, left=("blocks", "first")))
    _foot("runs", len(page), len(forest.first), offset, store.findings)
    if len(forest.wrong):
        out.print(f"{count(len(forest.wrong))} blocks name a parent that is not before them")
    return ExitCode.FINE


def run_json(forest: Forest, line: Line) -> dict[str, Any]:
    """Return a run as plain values."""
    run = line.run
    first, last = int(forest.first[run]), int(forest.last[run])
    entries = forest.entries
    return {
        "level": len(line.guides),
        "namespace": entries["namespace"][first].tobytes().hex(),
        "tenant": entries["tenant"][first].tobytes().hex(),
        "first_hash": entries["hash"][first].tobytes().hex(),
        "last_hash": entries["hash"][last].tobytes().hex(),
        "first_position": int(entries["position"][first]),
        "last_position": int(entries["position"][last]),
        "after_hole": bool(forest.parent[run] < 0 and entries["position"][first] > 0),
        "branches": int(forest.branches[last]),
        "blocks": int(forest.blocks[run]),
        "payload_bytes": int(forest.nbytes[run]),
        "hits": int(forest.hits[run]),
        "created_ns": int(forest.created_ns[run]),
        "last_use_ns": int(forest.last_use_ns[run]),
        "blocks_beneath": int(forest.blocks_beneath[run]),
        "payload_bytes_beneath": int(forest.bytes_beneath[run]),
        "prompts_beneath": int(forest.tips_beneath[run]),
    }


def _row(forest: Forest, line: Line, now_ns: int) -> Sequence[object]:
    run = run_json(forest, line)
    first, last = run["first_position"], run["last_position"]
    label = f"{first}" if first == last else f"{first}-{last}"
    hole = " (after a hole)" if run["after_hole"] else ""
    branches = run["payload_bytes_beneath"] > run["payload_bytes"]
    return (
        f"{_guides(line)}{label}{hole}",
        f"{run['namespace'][:8]}/{run['first_hash'][:16]}",
        count(run["blocks"]),
        size(run["payload_bytes"]),
        size(run["payload_bytes_beneath"]) if branches else "",
        count(run["prompts_beneath"]),
        count(run["hits"]),
        ago(run["last_use_ns"], now_ns),
    )


def _guides(line: Line) -> str:
    if not line.guides:
        return ""
    above = line.guides[1:]
    drawn = "".join("│ " if more else "  " for more in above[-LEVELS_MAX:])
    left_out = f"{len(above) - LEVELS_MAX}… " if len(above) > LEVELS_MAX else ""
    return f"{left_out}{drawn}{'├ ' if line.more else '└ '}"


def _paged(
    total: int, offset: int, findings: Sequence[Finding], name: str, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "total": total,
        "offset": offset,
        name: rows,
        "findings": [plain(each) for each in findings],
    }


def _foot(what: str, shown: int, total: int, offset: int, findings: Sequence[Finding]) -> None:
    out = console()
    for finding in findings:
        out.print(f"{safe(finding.where)}: {safe(finding.what, 1000)}", style="yellow")
    if shown == total:
        out.print(f"{count(total)} {what}")
    elif shown:
        rest = f"; next: --offset {offset + shown}" if offset + shown < total else ""
        out.print(f"{what} {count(offset + 1)} to {count(offset + shown)} of {count(total)}{rest}")
    else:
        out.print(f"{count(total)} {what}, none from {count(offset)} on")
