"""Two layouts that no single split of the prefix serves: a head in host memory, and a hole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import kvtier
import kvtier_hf
from kvtier.schedule import load_order

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier import RestorePlan, Store
    from kvtier_demo.ask import Answer
    from kvtier_demo.prompt import Reader

__all__ = ["Layout", "measure_layouts"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One prompt whose blocks lie in a given way, answered in three ways over one link."""

    name: str
    where: str
    load: Answer
    head: Answer
    planned: Answer

    @property
    def answers(self) -> tuple[Answer, Answer, Answer]:
        """The three answers: least recompute, head of the prefix, plan."""
        return (self.load, self.head, self.planned)

    @property
    def identical(self) -> bool:
        """Whether all ways gave the same tokens."""
        return all(torch.equal(answer.ids, self.load.ids) for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as the demo's file has it."""
        names = ("load", "head_of_prefix", "planned")
        plan = self.planned.plan
        return {
            "layout": self.name,
            "where": self.where,
            "ttft_s": {n: a.ttft_s for n, a in zip(names, self.answers, strict=True)},
            "recomputed": list(plan.recompute) if plan else [],
            "tokens_identical": self.identical,
        }


def measure_layouts(
    reader: Reader,
    folder: Path,
    ids: torch.Tensor,
    bytes_per_s: float,
    answer: Callable[[kvtier_hf.Adapter, RestorePlan | None], Answer],
) -> list[Layout]:
    """Answer one prompt with its head in host memory, and with one block missing."""
    links = {"ssd": kvtier.LinkThrottle(bytes_per_s=bytes_per_s)}
    blocks = ids.shape[1] // 256
    half, gone = blocks // 2, blocks * 3 // 4
    block_bytes = kvtier_hf.spec_of(reader.model).block_layout.block_bytes

    def ask(way: str, *, host_blocks: int, missing: range) -> Answer:
        # A restore promotes what it loads, so every trial opens the store anew.
        with kvtier_hf.open(
            reader.model, folder, links=links, host_bytes=(host_blocks + 1) * block_bytes
        ) as kv:
            store = kv.store
            if host_blocks:
                store.prefetch(store.keys(ids[:, : host_blocks * 256])).result(timeout=60)
            made = store.plan(_residency(store, ids, host_blocks, missing))
            if way == "load":
                made = _fixed(made, [b for b, tier in enumerate(made.tiers) if tier is None])
            elif way == "head":
                made = _head_of_prefix(store, made)
            return answer(kv, made)

    layouts = []
    for name, where, host_blocks, missing in (
        ("head in host memory", f"{half} blocks in host memory, then {blocks - half} on the SSD",
         half, range(0)),
        ("a hole", f"{blocks - 1} blocks on the SSD, block {gone} missing",
         0, range(gone, gone + 1)),
    ):  # fmt: skip
        load, head, planned = (
            ask(way, host_blocks=host_blocks, missing=missing)
            for way in ("load", "head", "planned")
        )
        layouts.append(Layout(name, where, load, head, planned))
    return layouts


def _residency(
    store: Store, ids: torch.Tensor, host_blocks: int, missing: range
) -> kvtier.Residency:
    """Return where the prompt's blocks lie; those that a trial leaves out count as missing."""
    found = store.lookup(store.keys(ids))
    tiers = [
        None
        if block in missing
        else (kvtier.Tier.SSD if block >= host_blocks and tier is not None else tier)
        for block, tier in enumerate(found.tiers)
    ]
    return replace(found, tiers=tuple(tiers))


def _fixed(made: RestorePlan, recompute: list[int]) -> RestorePlan:
    load = [block for block in range(len(made.tiers)) if block not in recompute]
    return replace(
        made,
        recompute=tuple(recompute),
        load=load_order(made.tiers, load, recompute),
        adaptive=False,
    )


def _head_of_prefix(store: Store, made: RestorePlan) -> RestorePlan:
    """Return the best plan that recomputes the first k blocks of the prefix and loads the rest."""
    holes = [block for block, tier in enumerate(made.tiers) if tier is None]
    costs = store.costs
    step = costs.block_seconds(made.block_tokens, 0, len(made.tiers)) + costs.compute.fixed_s
    load_s = {
        tier: costs.link(tier).seconds(made.block_bytes)
        for tier in (kvtier.Tier.HOST, kvtier.Tier.SSD)
    }

    def seconds(k: int) -> float:
        kept = [b for b in holes if b >= k]
        loads = sum(load_s[tier] for tier in made.tiers[k:] if tier in load_s)
        ahead = sum(load_s[tier] for tier in made.tiers[k : max(kept, default=k)] if tier in load_s)
        compute = float(step[:k].sum())
        return max(loads, compute, (max(compute, ahead) + float(step[kept].sum())) if kept else 0)

    best = min(range(len(made.tiers) + 1), key=lambda k: (seconds(k), k))
    return _fixed(made, sorted({*range(best), *holes}))
