"""Results as benchmarks write them, made up, and a reader of pages: for the tests of the report."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
VOID = {"meta", "rect", "line", "circle", "br", "link"}


def ratio(name: str, value: float, bar: str, verdict: str, spread: float = 0.01) -> dict[str, Any]:
    """Return a ratio as the harness writes it."""
    return {
        "name": name, "value": value, "bar": bar, "spread": spread, "pairs": 5, "starved": 0.0,
        "verdict": verdict,
    }  # fmt: skip


def result(name: str = "example", *rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return one result as the harness writes it."""
    judged = [row for row in rows if "verdict" in row]
    value = {
        "name": name, "commit": "0123456789ab", "machine": "CPU, 2 cores, Linux",
        "settings": {"quick": False, "pairs": 5},
        "ratios": {row["name"]: row["value"] for row in judged}, "results": list(rows),
    }  # fmt: skip
    return value | changes


def series(*seconds: float) -> list[dict[str, float]]:
    """Return trials as the harness writes them."""
    return [{"seconds": each, "held": 1.0, "attempts": 1} for each in seconds]


def written(folder: Path, value: Any, name: str = "example.json") -> Path:
    """Write a result to a file."""
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


class Outline(HTMLParser):
    """Checks that elements nest; collects their text, ids, and what they would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.tags.append(tag)
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [
            str(found[name]) for name in ("href", "src", "xlink:href") if found.get(name)
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open and close an element."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take text."""
        self.text.append(data)


# -- results of each benchmark


def tiers() -> dict[str, Any]:
    """Return a result of two block sizes."""
    rows = [
        {
            "case": "read", "mib": mib, "blocks": 1000 // mib,
            "trials": {"raw": series(0.5, 1.0, 2.0), "store": series(2.0), "again": series(2.0)},
        }
        for mib in (1, 10)
    ]  # fmt: skip
    return result("tiers", *rows)


def cell(blocks: int, factor: float, **values: Any) -> dict[str, Any]:
    """Return one cell of the restore benchmark's grid."""
    ways = {"stock": series(1.0), "load": series(factor), "hybrid": series(0.5)}
    trials = ways | {"again": series(0.75), "recompute": series(1.0)}
    return {
        "case": "grid",
        "blocks": blocks,
        "load_vs_recompute": factor,
        "trials": trials,
    } | values


def policies(blocks: int, policy: str, saved_s: float, *, hybrid: bool = True) -> dict[str, Any]:
    """Return one row of the replay benchmark."""
    return {
        "case": "policies, t", "trace": "t", "policy": policy, "saved_s": saved_s,
        "way": {"holes": False, "hybrid": hybrid, "price": 0.0},
        "blocks": {"host": 0, "ssd": blocks}, "block_bytes": 1 << 30,
    }  # fmt: skip


def demo() -> dict[str, Any]:
    """Return the demo's result, whose settings are a list."""
    each = {"recompute": [5.0], "load": [4.0, 6.0, 5.0], "planned": [2.0]}
    link = {"link": "equal", "link_bytes_per_s": 1e7, "ttft_s_each": each}
    return result("demo", settings=[link])


def replayed() -> dict[str, Any]:
    """Return a result of three budgets and a bound."""
    rows = [policies(4, "lru", 20.0, hybrid=False), policies(2, "lru", 10.0, hybrid=False)]
    return result("replay", *rows, policies(2, "priced", 15.0), policies(0, "infinite", 40.0))


def timed(seconds: float, cpu_s: float) -> list[dict[str, float]]:
    """Return one trial with its CPU time."""
    return [{"seconds": seconds, "cpu_s": cpu_s}]


def rivals() -> dict[str, Any]:
    """Return a result of two rivals of one class, and of strategies."""
    ours = {f"kvtier_{kind}": timed(0.5, 0.1) for kind in ("write", "cold", "warm")}
    rows = [
        {
            "case": "rival", "rival": name, "class": "synced", "bytes": 10**9,
            "trials": ours | {"write": timed(seconds, 0.0), "cold": timed(2 * seconds, 0.2)},
        }
        for name, seconds in (("file", 1.0), ("lmdb", 2.0))
    ]  # fmt: skip
    trials = {"load": series(2.0), "kvtier": series(1.0), "again": series(1.1)}
    strategies = {"case": "strategies", "blocks": 8, "load_vs_recompute": 1.0, "trials": trials}
    return result("rivals", *rows, strategies)


def part(kind: str, tokens: int, way: str, **values: Any) -> dict[str, Any]:
    """Return one row of the breakdown benchmark: half of it loads, half of it computes."""
    whole = "ttft_s" if kind == "simulated" else "seconds"
    return {
        "case": "breakdown", "kind": kind, "tokens": tokens, "way": way, "tier": "ssd",
        "link": "a disk", whole: 2.0, "parts_s": {"ssd": 1.0, "recompute": 1.0, "queue": 0.0},
    } | values  # fmt: skip


def breakdown() -> dict[str, Any]:
    """Return a result with a row of each kind."""
    lengths = [1024 * 2**power for power in range(8)]
    sizes = {"case": "read_by_size_4", "piece_bytes": [1024, 2048]}
    sizes["trials"] = {str(nbytes): [{"seconds": 1e-6, "pieces": 10}] for nbytes in (1024, 2048)}
    link = {"case": "link_sweep", "tokens": 32768, "recompute_s": 3.0, "load_s": 2.0}
    link |= {"best_s": 1.5, "optimum_s": 1.4}
    block = {"case": "granularity", "prompt_tokens": 32768, "lookup_ms": 1.0, "total_s": 0.5}
    return result(
        "breakdown",
        *(part("simulated", tokens, way) for tokens in lengths for way in ("load", "best")),
        part("measured here", 2000, "load", at_once=4),
        *(link | {"bytes_per_s": rate} for rate in (2e9, 1e9)),
        *(block | {"block_tokens": tokens, "bytes_per_s": 1e9} for tokens in (256, 16)),
        sizes,
        {"case": "verdict", "text": "It is not negligible."},
    )


def loaded() -> dict[str, Any]:
    """Return a result of two workloads, one of which put nothing."""
    row = {
        "case": "workload", "restore_bytes_per_s": 2e9, "put_bytes_per_s": 1e9,
        "limits": {"read": 3e9, "write": 2e9}, "lookup_ms": [1, 2, 3], "ready_ms": [4, 5, 6],
    }  # fmt: skip
    rows = [row | {"name": "a", "released_ms": []}, row | {"name": "b", "released_ms": [7, 8, 9]}]
    return result("load", *rows)


def restored() -> dict[str, Any]:
    """Return a result of one cell."""
    return result("restore", cell(4, 1.0))


EVERY = (tiers, restored, replayed, rivals, breakdown, loaded, demo)
