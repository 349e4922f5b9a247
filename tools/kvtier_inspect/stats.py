"""``stats``: how much of a store is shared, reused and old, and what was learned about costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.calibration import cost_records
from kvtier.cost import Profiler
from kvtier.plan import Tier
from kvtier.tiers.write_budget import spent_bytes
from kvtier_inspect.forest import grow
from kvtier_inspect.opened import opened, plain
from kvtier_inspect.render import ExitCode, columns, console, count, emit, facts, safe, size, span
from kvtier_inspect.table import matching, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cost import CostModel
    from kvtier.tiers.entries import Entries
    from kvtier_inspect.opened import Opened

__all__ = ["Learned", "Stats", "learned", "run", "stats_of"]

HITS: Final = (0, 1, 2, 4, 8, 16)
"""Where the classes of hits begin."""
AGES_S: Final = (0, 60, 3600, 6 * 3600, 86400, 7 * 86400)
"""Where the classes of ages begin."""
POSITIONS: Final = (0, 1, 4, 16, 64, 256)
"""Where the classes of positions begin."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts are of blocks unless the name says otherwise; a class is (where it begins, count)."""

    blocks: int
    prompts: int
    """Prompts that can be told apart: blocks that nothing follows."""
    runs_after_hole: int
    shared_blocks: int
    """Blocks that more than one prompt goes through."""
    bytes_saved: int
    """What the shared blocks would occupy besides, were each prompt stored by itself."""
    hits: int
    expired_blocks: int
    by_hits: tuple[tuple[int, int], ...]
    by_age_s: tuple[tuple[int, int], ...]
    by_last_use_s: tuple[tuple[int, int], ...]
    by_position: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Learned:
    """Costs that were measured: of recomputing under a namespace, or of this host's links."""

    of: str
    costs: CostModel
    saved_s: float
    """When, in seconds since 1970."""


def stats_of(entries: Entries, now_ns: int) -> Stats:
    """Sum up a table that rises by key."""
    forest = grow(entries)
    tips = forest.tips_beneath
    shared = tips > 1
    return Stats(
        blocks=len(entries),
        prompts=int((forest.branches == 0).sum()),
        runs_after_hole=int(forest.after_hole.sum()),
        shared_blocks=int(forest.blocks[shared].sum()),
        bytes_saved=int((forest.nbytes[shared] * (tips[shared] - 1)).sum()),
        hits=total(entries["hits"]),
        expired_blocks=int(((entries["expiry_ns"] > 0) & (entries["expiry_ns"] <= now_ns)).sum()),
        by_hits=_classes(entries["hits"], HITS),
        by_age_s=_classes(_ages_s(entries["created_ns"], now_ns), AGES_S),
        by_last_use_s=_classes(_ages_s(entries["last_use_ns"], now_ns), AGES_S),
        by_position=_classes(entries["position"], POSITIONS),
    )


def _ages_s(times_ns: np.ndarray[Any, Any], now_ns: int) -> np.ndarray[Any, Any]:
    return np.maximum((now_ns - times_ns.astype(np.float64)) / 1e9, 0.0)


def _classes(values: np.ndarray[Any, Any], starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    which = np.searchsorted(np.array(starts), values, side="right") - 1
    counts = np.bincount(which, minlength=len(starts)).tolist()
    return tuple(zip(starts, counts, strict=True))


def learned(data: bytes) -> list[Learned]:
    """Return what a cost file says; what was not measured, or cannot be read, is left out."""
    found = []
    for kind, records in cost_records(data).items():
        for key, value in records.items():
            saved = value.get("saved_s") if isinstance(value, dict) else None
            try:
                costs = Profiler.from_record({kind: value}).costs
            except ValueError:
                continue
            if not (costs.compute.samples or costs.host.samples or costs.ssd.samples):
                continue  # a store was opened and closed; nothing was measured
            when = float(saved) if isinstance(saved, (int, float)) else 0.0
            found.append(Learned(f"{kind}|{key}", costs, when))
    return found


def run(path: str, *, namespace: str, tenant: str | None, as_json: bool) -> int:
    """Print it."""
    with opened(path) as store:
        stats = stats_of(matching(store.entries, namespace, tenant), store.read_ns)
        costs = learned(store.directory.read_costs())
        spent = spent_bytes(store.directory.read_writes(), store.read_ns)
    if as_json:
        emit(
            {
                **asdict(stats),
                "budgeted_bytes_written_24h": spent,
                "costs": [_cost_json(each) for each in costs],
                "read_ns": store.read_ns,
                "findings": [plain(each) for each in store.findings],
            }
        )
    else:
        show(store, stats, costs, spent)
    return ExitCode.FINE


def _cost_json(each: Learned) -> dict[str, Any]:
    kind, _, key = each.of.partition("|")
    measured = (
        asdict(each.costs.compute)
        if kind == "compute"
        else {str(tier): asdict(each.costs.link(tier)) for tier in (Tier.HOST, Tier.SSD)}
    )
    return {"kind": kind, "of": key, "saved_s": each.saved_s, **measured}


def show(store: Opened, stats: Stats, costs: Sequence[Learned], spent: int) -> None:
    """Print it for people."""
    out = console()
    pairs: list[tuple[str, object]] = [
        ("blocks", count(stats.blocks)),
        ("prompts", f"{count(stats.prompts)} that can be told apart"),
        ("shared", f"{count(stats.shared_blocks)} blocks, which saves {size(stats.bytes_saved)}"),
        ("holes", f"{count(stats.runs_after_hole)} runs begin after one"),
        ("hits", count(stats.hits)),
        ("expired", f"{count(stats.expired_blocks)} blocks"),
    ]
    if spent:
        pairs.append(("written", f"{size(spent)} in 24 h, of the write budget"))
    out.print(facts(pairs))
    for title, classes, unit in (
        ("hits", stats.by_hits, count),
        ("position", stats.by_position, count),
        ("age", stats.by_age_s, span),
        ("last use", stats.by_last_use_s, span),
    ):
        rows = [
            (f"from {unit(start)}", count(number), "█" * _bar(number, stats.blocks))
            for start, number in classes
        ]
        out.print(columns((title, "blocks", ""), rows, left=("",)))
    for each in costs:
        out.print(f"{safe(each.of)}: {_cost_words(each)}")
    for finding in store.findings:
        out.print(f"{safe(finding.where)}: {safe(finding.what, 1000)}", style="yellow")


def _bar(number: int, of: int) -> int:
    return -(-30 * number // of) if of else 0


def _cost_words(each: Learned) -> str:
    costs = each.costs
    if each.of.startswith("compute|"):
        compute = costs.compute
        return (
            f"{span(compute.fixed_s)} a step, {span(compute.token_s)} a token at the start, "
            f"{compute.samples} samples"
        )
    return ", ".join(
        f"{tier} {size(link.bytes_per_s)}/s + {span(link.latency_s)} ({link.samples} samples)"
        for tier, link in ((tier, costs.link(tier)) for tier in (Tier.HOST, Tier.SSD))
    )
