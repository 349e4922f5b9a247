"""Where the time to the first token goes: simulated restores, and what their moments are spent on.

Costs come from profiles (``kvtier.profiles``), from links measured on this machine, or from what
was given; plans are the library's own and are carried out by its simulator, so every row of this
module is *simulated*. Blocks and links mean what they mean to the planner: a link is one FIFO in
which each transfer pays its latency.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import kvtier
from kvtier.plan import Residency, Tier
from kvtier.planner import split_one_tier
from kvtier.profiles import MODELS, Link, ModelShape, at_distance, block_bytes, cost_model
from kvtier.simulator import simulate
from kvtier.tiers.entries import ENTRY
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.segment import header_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.cost import CostModel
    from kvtier.planner import Way
    from kvtier.profiles import Device

COMPONENTS: Final = ("lookup", "queue", "ssd", "host", "device", "recompute", "new")
"""What a moment of a TTFT goes to, in the order in which it is shown; see benchmarks/README.md."""
TRANSFER: Final = ("queue", "ssd", "host", "device")
"""What is spent on moving bytes, waiting for them included."""
WAYS: Final[tuple[Way, ...]] = ("recompute", "load", "best")
LENGTHS: Final = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NEW_TOKENS: Final = 128
"""Tokens behind the stored prefix, computed in one step however the prefix comes back."""
RATES: Final = tuple(0.25e9 * 2 ** (half / 2) for half in range(17))
"""Links from 0.25 to 64 GB/s, two for each doubling."""
DISTANCES_KM: Final = (0.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a device, the link to its slow source, and the copy link from host memory."""

    model: ModelShape
    device: Device
    source: Link
    copy: Link
    block_tokens: int = 256

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all ranks together."""
        return block_bytes(self.model, self.block_tokens)

    def step_blocks(self, tokens: int) -> int:
        """Return the blocks of one step: steps of 512, 1024 or 2048 tokens as prompts get longer.

        The steps of the theory's tables at 4 K, 32 K and 128 K tokens.
        """
        step = 512 if tokens <= 4096 else 1024 if tokens <= 32768 else 2048
        return max(1, step // self.block_tokens)

    def costs(self, tokens: int) -> CostModel:
        """Return what restoring a prompt of so many tokens costs."""
        return cost_model(
            self.model, self.device, ssd=self.source, host=self.copy,
            block_tokens=self.block_tokens, step_blocks=self.step_blocks(tokens),
        )  # fmt: skip

    def residency(self, tokens: int, tier: Tier) -> Residency:
        """Return a lookup's result: all full blocks in one tier."""
        blocks = tokens // self.block_tokens
        hashes = tuple(block.to_bytes(32, "big") for block in range(blocks))
        keys = kvtier.BlockKeys(bytes(32), self.block_tokens, bytes(32), bytes(32), hashes, b"")
        return Residency(keys, (tier,) * blocks, self.block_bytes)

    def new_s(self, tokens: int) -> float:
        """Return how long the step over the new tokens behind ``tokens`` takes."""
        costs = cost_model(
            self.model, self.device, ssd=self.source, host=self.copy, block_tokens=NEW_TOKENS
        )
        return costs.compute.seconds(tokens, NEW_TOKENS)


def shape(text: str) -> ModelShape:
    """Return a preset, or the shape ``layers,hidden,heads,kv_heads,head_dim,parameters``."""
    if text in MODELS:
        return MODELS[text]
    fields = text.split(",")
    try:
        *counts, parameters = fields
        layers, hidden, heads, kv_heads, head_dim = (int(count) for count in counts)
        return ModelShape(
            f"shape {text}", layers, hidden, heads, kv_heads, head_dim, float(parameters)
        )
    except ValueError as error:
        raise SystemExit(
            f"--shape {text}: one of {', '.join(MODELS)} wanted, or six numbers "
            "layers,hidden,heads,kv_heads,head_dim,parameters"
        ) from error


# -- moments


def moments(busy: Mapping[str, Iterable[tuple[float, float]]], seconds: float) -> dict[str, float]:
    """Divide [0, ``seconds``] among what was under way: ``busy`` is (begin, end) by component.

    A moment in which several components were under way counts in equal parts for each of them, one
    in which nothing was counts as "queue". The parts add up to ``seconds``.
    """
    spans = {name: list(each) for name, each in busy.items()}
    edges = {0.0, seconds}
    for each in spans.values():
        edges.update(min(max(edge, 0.0), seconds) for span in each for edge in span)
    found = dict.fromkeys(spans, 0.0) | {"queue": 0.0}
    ordered = sorted(edges)
    index = {edge: number for number, edge in enumerate(ordered)}
    active = {name: np.zeros(len(ordered)) for name in spans}
    for name, each in spans.items():
        for begin, end in each:
            active[name][index[min(max(begin, 0.0), seconds)]] += 1
            active[name][index[min(max(end, 0.0), seconds)]] -= 1
    under_way = {name: np.cumsum(turns) > 0 for name, turns in active.items()}
    for number, (begin, end) in enumerate(pairwise(ordered)):
        names = [name for name, each in under_way.items() if each[number]] or ["queue"]
        for name in names:
            found[name] += (end - begin) / len(names)
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One way to the first token: seconds of each component, which add up to ``ttft_s``."""

    tokens: int
    way: str
    tier: str
    ttft_s: float
    parts_s: Mapping[str, float]
    loaded: int
    recomputed: int

    @property
    def shares(self) -> dict[str, float]:
        """The part of the TTFT that each component takes."""
        return {name: self.parts_s.get(name, 0.0) / self.ttft_s for name in COMPONENTS}

    @property
    def transfer(self) -> float:
        """The part of the TTFT that goes to moving bytes."""
        return sum(self.parts_s.get(name, 0.0) for name in TRANSFER) / self.ttft_s

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "tokens": self.tokens, "way": self.way, "tier": self.tier, "ttft_s": self.ttft_s,
            "parts_s": {name: self.parts_s.get(name, 0.0) for name in COMPONENTS},
            "shares": self.shares, "transfer_share": self.transfer,
            "loaded": self.loaded, "recomputed": self.recomputed,
        }  # fmt: skip


def row(setup: Setup, tokens: int, way: Way, tier: Tier, lookup_s: float = 0.0) -> Row:
    """Simulate one restore of a prompt whose blocks all lie in ``tier``."""
    costs = setup.costs(tokens)
    residency = setup.residency(tokens, tier)
    plan = kvtier.plan(residency, costs, step_blocks_max=setup.step_blocks(tokens), way=way)
    timeline = simulate(plan, costs)
    lanes = {"recompute": timeline.compute, "ssd": timeline.ssd, "device": timeline.host}
    spans = {name: [(s.begin_s, s.end_s) for s in lane] for name, lane in lanes.items()}
    parts = moments(spans, timeline.seconds) | {"lookup": lookup_s, "new": setup.new_s(tokens)}
    seconds = sum(parts.values())
    return Row(tokens, way, tier, seconds, parts, timeline.loaded, timeline.recomputed)


def rows(
    setup: Setup, lengths: Sequence[int], lookup_s: Mapping[int, float], tier: Tier = Tier.SSD
) -> list[Row]:
    """Return the three ways for each length; ``lookup_s`` by tokens, 0 where it is not known."""
    return [
        row(setup, tokens, way, tier, 0.0 if way == "recompute" else lookup_s.get(tokens, 0.0))
        for tokens in lengths
        for way in WAYS
    ]


# -- links


def optimum(setup: Setup, tokens: int) -> tuple[int, float]:
    """Return how many blocks the exact split recomputes, and the restore's seconds then.

    Of every split into a recomputed head and a loaded tail, steps of full size, one block's copy
    behind the last read.
    """
    costs, n = setup.costs(tokens), tokens // setup.block_tokens
    fixed_s = costs.compute.fixed_s / setup.step_blocks(tokens)
    compute_s = costs.block_seconds(setup.block_tokens, 0, n) + fixed_s
    load_s = np.full(n, costs.load_seconds(Tier.SSD, setup.block_bytes))
    copy_s = costs.load_seconds(Tier.HOST, setup.block_bytes)
    return split_one_tier(
        compute_s, np.maximum(load_s, copy_s), float(np.minimum(load_s[0], copy_s))
    )


def at_once_s(setup: Setup, tokens: int, tier: Tier) -> float:
    """Return how long a prefix takes over one link in one request, the latency paid once."""
    link = setup.costs(tokens).link(tier)
    return link.latency_s + tokens * setup.model.kv_token_bytes / link.bytes_per_s


def recompute_s(setup: Setup, tokens: int) -> float:
    """Return how long recomputing a prefix takes, by the planner."""
    residency, step = setup.residency(tokens, Tier.SSD), setup.step_blocks(tokens)
    plan = kvtier.plan(residency, setup.costs(tokens), step_blocks_max=step, way="recompute")
    return plan.predicted.recompute


def link_sweep(setup: Setup, tokens: int, rates: Sequence[float] = RATES) -> list[dict[str, Any]]:
    """Return the restore's seconds of all ways and of the exact split, over links of given rates.

    Latency as the source's; the step over the new tokens is left out.
    """
    found = []
    for rate in rates:
        here = replace(setup, source=Link(f"{rate / 1e9:.2f} GB/s", rate, setup.source.latency_s))
        ways = {way: row(here, tokens, way, Tier.SSD) for way in WAYS}
        head, best_s = optimum(here, tokens)
        seconds = {f"{way}_s": each.ttft_s - each.parts_s["new"] for way, each in ways.items()}
        found.append(
            {
                "bytes_per_s": rate, **seconds, "new_s": setup.new_s(tokens),
                "optimum_s": best_s, "optimum_recomputed": head,
                "plan_recomputed": ways["best"].recomputed, "tokens": tokens,
            }
        )  # fmt: skip
    return found


def network(
    setup: Setup, links: Sequence[Link], tokens: int, distances: Sequence[float] = DISTANCES_KM
) -> list[dict[str, Any]]:
    """Return what loading over networks costs at a distance, beside recomputing and the plan.

    ``at_once_s``: one request for the whole prefix, so that the distance is paid once.
    ``by_block_s``: the FIFO of the planner, in which every block's request pays it.
    """
    found = []
    for link in links:
        for km in distances:
            far = at_distance(link, km)
            here = replace(setup, source=far)
            by_block = row(here, tokens, "load", Tier.SSD)
            best = row(here, tokens, "best", Tier.SSD)
            recompute = row(here, tokens, "recompute", Tier.SSD)
            new_s = recompute.parts_s["new"]
            found.append(
                {
                    "link": link.name, "km": km, "latency_s": far.latency_s,
                    "bytes_per_s": far.bytes_per_s, "tokens": tokens,
                    "at_once_s": at_once_s(here, tokens, Tier.SSD),
                    "by_block_s": by_block.ttft_s - new_s,
                    "plan_s": best.ttft_s - new_s, "recompute_s": recompute.ttft_s - new_s,
                }
            )  # fmt: skip
    return found


# -- block size


def metadata_bytes(setup: Setup) -> int:
    """Return the bytes of one block's record and index entry that are not KV."""
    layers = setup.model.layers
    padding = host_slot_bytes(setup.block_bytes) - setup.block_bytes
    return header_bytes(layers) + padding + ENTRY.itemsize


def by_block_tokens(
    setup: Setup,
    tokens: int,
    rates: Mapping[int, tuple[float, float]],
    lookup_s: Mapping[int, float],
) -> list[dict[str, Any]]:
    """Return what blocks of several sizes make of a restore, by block tokens.

    ``rates``: bytes/s and their spread, relative to 256 tokens.

    ``planning_loss``: how much longer than with the smallest blocks a plan takes because it splits
    between blocks only, all at one rate. ``lost_tail_s``: recomputing the tokens behind the last
    full block, half a block on average. ``total_s``: lookup, plan at the own rate, and that tail.
    """
    median = statistics.median(rate for rate, _ in rates.values())
    middle, _ = rates.get(setup.block_tokens, (median, 0.0))
    found: list[dict[str, Any]] = []
    finest_s = 0.0
    for block_tokens, (rate, spread) in sorted(rates.items()):
        each = replace(setup, block_tokens=block_tokens, source=Link("own rate", rate))
        alike = replace(each, source=Link("one rate", middle))
        plan_s, alike_s = (
            row(one, tokens, "best", Tier.SSD).ttft_s - one.new_s(tokens) for one in (each, alike)
        )
        finest_s = finest_s or alike_s
        compute = each.costs(tokens).compute
        lost = (block_tokens - 1) / 2
        lost_s = lost * (compute.token_s + compute.attention_s * tokens)
        found.append(
            {
                "block_tokens": block_tokens, "block_bytes": each.block_bytes,
                "model": setup.model.name, "prompt_tokens": tokens,
                "bytes_per_s": rate, "spread": spread,
                "lookup_ms": 1e3 * lookup_s.get(block_tokens, 0.0),
                "metadata_bytes_per_token": metadata_bytes(each) / block_tokens,
                "planning_loss": alike_s / finest_s - 1, "lost_tail_s": lost_s, "plan_s": plan_s,
                "total_s": plan_s + lost_s + lookup_s.get(block_tokens, 0.0),
            }
        )  # fmt: skip
    best_s = min(each["total_s"] for each in found)
    return [{**each, "vs_best": each["total_s"] / best_s} for each in found]


def why(rows: Sequence[Mapping[str, Any]], block_tokens: int = 256) -> str:
    """Say in a sentence what blocks of ``block_tokens`` tokens cost and save among others."""
    by_size = {each["block_tokens"]: each for each in rows}
    ours, least = by_size[block_tokens], min(by_size)
    best = min(rows, key=lambda each: each["total_s"])
    noise = max(each["spread"] for each in rows)
    excess = ours["vs_best"] - 1
    said = "within" if excess <= noise else "beyond"
    slower = f"{excess:.1%} slower than {best['block_tokens']}, {said} the noise of the reads"
    place = "fastest" if best is ours else f"{slower} ({noise:.1%})"
    metadata, lookup = (
        ours[name] / by_size[least][name] for name in ("metadata_bytes_per_token", "lookup_ms")
    )
    return (
        f"Blocks of {block_tokens} tokens ({ours['model']}) restore {place}; they take "
        f"{metadata:.2f} of the metadata and {lookup:.2f} of the lookup of {least}."
    )
