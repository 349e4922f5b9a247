"""What a plan needs that no engine is there to say: where blocks are, what they cost, break-evens.

Pure: values in, values out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.cost import ComputeCost, CostModel, LinkCost
from kvtier.identity import BLOCK_TOKENS, HASH_BYTES, BlockKeys
from kvtier.plan import Residency, Tier
from kvtier.planner import plan
from kvtier.profiles import ASSUMED_SAMPLES, LINKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.plan import RestorePlan

__all__ = [
    "Rates",
    "blocks_at",
    "by_name",
    "link_cost",
    "made_up",
    "plain_name",
    "prefill_at",
    "rates",
    "read_ranges",
    "token_ids",
    "with_link",
]

BLOCKS_MAX: Final = 1 << 16
"""Blocks of one plan: 16 M tokens."""
TOKEN_FILE_BYTES_MAX: Final = 256 << 20
RATE_MIN: Final = 1e3
RATE_MAX: Final = 1e15
"""Link rates, in bytes/s, between which break-evens are looked for."""
HALVINGS: Final = 24
"""Of that range's twelve decades: a break-even is exact to 2 parts in a million."""

_NUMBER: Final = re.compile(
    r"\s*(\d{1,15}(?:\.\d{1,9})?(?:[eE]\d{1,2})?)\s*([A-Za-z]*)(?:/s|ps)?\s*"
)
_PREFIXES: Final = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12,
    "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
}  # fmt: skip
_NAMESPACE: Final = bytes(HASH_BYTES)

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the slowest link in use, in bytes/s, at which the decision changes.

    At ``even`` loading what is stored takes as long as recomputing everything. Below ``recompute``
    nothing is loaded over this link; from ``load`` on nothing that it could bring is recomputed.
    None: not at any rate; 0: at every rate.
    """

    tier: Tier
    even: float | None
    recompute: float | None
    load: float | None


# -- what is asked


def read_ranges(name: str, text: str, blocks: int) -> list[range]:
    """Return "0:16,20,30:" as ranges of a prompt's blocks; ``ValueError`` names the option."""
    ranges = []
    for piece in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,9})?(:)?(\d{1,9})?", piece)
        if match is None:
            raise ValueError(f"{name}: {piece!r} is not a range of blocks like 0:16")
        start = int(match[1] or 0)
        stop = int(match[3]) if match[3] else blocks if match[2] else start + 1
        if not start < stop <= blocks:
            raise ValueError(f"{name}: {piece} is not within the prompt's {blocks} full blocks")
        ranges.append(range(start, stop))
    return ranges


def blocks_at(
    blocks: int,
    where: Mapping[Tier | None, Sequence[range]],
    otherwise: Sequence[Tier | None] | None = None,
) -> tuple[tuple[Tier | None, ...], int]:
    """Return each block's tier, and how many leading blocks the engine holds already.

    What no range names is where ``otherwise`` says; without that, missing, or all on the SSD if
    there is no range at all.
    """
    base = None if any(where.values()) else Tier.SSD
    tiers = [base] * blocks if otherwise is None else list(otherwise)
    named: set[int] = set()
    for tier, ranges in where.items():
        for each in ranges:
            if not named.isdisjoint(each):
                twice = f"[{each.start}, {each.stop})"
                raise ValueError(f"--{tier or 'missing'}: a block of {twice} is named twice")
            named.update(each)
            tiers[each.start : each.stop] = [tier] * len(each)
    resident = next((n for n, tier in enumerate(tiers) if tier is not Tier.DEVICE), blocks)
    return tuple(tiers), resident


def token_ids(data: bytes) -> list[int]:
    """Return the ids of a token file: JSON, or numbers between spaces or commas.

    ``ValueError`` names a place, never a token: they are somebody's prompt.
    """
    try:
        text = data.decode()
        values = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        raise ValueError("neither a JSON list of token ids nor numbers between spaces") from None
    if values is None:
        values = [
            int(word) if word.isdigit() else word for word in re.split(r"[\s,]+", text) if word
        ]
    for place, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise ValueError(f"item {place} is not a token id, an integer in [0, 2**32)")
    return values


def made_up(tokens: int, block_tokens: int = BLOCK_TOKENS) -> BlockKeys:
    """Return keys of a prompt that nobody wrote: as many blocks as so many tokens fill."""
    blocks = tokens // block_tokens
    if tokens < 1 or blocks > BLOCKS_MAX:
        raise ValueError(f"tokens: {tokens} is not from 1 to {BLOCKS_MAX * block_tokens}")
    hashes = tuple(number.to_bytes(HASH_BYTES, "big") for number in range(blocks))
    rest = bytes(4 * (tokens - blocks * block_tokens))
    return BlockKeys(_NAMESPACE, block_tokens, _NAMESPACE, _NAMESPACE, hashes, rest)


# -- what it costs


def by_name(what: str, name: str, known: Mapping[str, _Value]) -> _Value:
    """Return what a table has under a name, case and punctuation aside."""
    wanted = plain_name(name)
    for each, value in known.items():
        if plain_name(each) == wanted:
            return value
    raise ValueError(f"{what}: {name!r} is not one of {', '.join(known)}")


def link_cost(what: str, text: str) -> LinkCost:
    """Return a link by name ("SSD 7 GB/s", "NIC 100G") or by rate ("7GB/s", "25 Gbit/s")."""
    for link in LINKS.values():
        if plain_name(link.name) == plain_name(text):
            return LinkCost(link.bytes_per_s, link.latency_s, ASSUMED_SAMPLES)
    match = _NUMBER.fullmatch(text)
    unit = match[2] if match else ""
    bits = unit.lower().endswith("bit") or (unit.endswith("b") and len(unit) > 1)
    prefix = unit.lower().removesuffix("bit").removesuffix("b")
    if (
        match is None
        or prefix not in _PREFIXES
        or (unit and not unit.lower().endswith(("b", "bit")))
    ):
        raise ValueError(
            f"{what}: {text!r} is neither a rate like 7GB/s or 25Gbit/s nor one of "
            + ", ".join(LINKS)
        )
    rate = float(match[1]) * _PREFIXES[prefix] / (8 if bits else 1)
    if not RATE_MIN <= rate <= RATE_MAX:
        raise ValueError(f"{what}: {text} is not from {RATE_MIN:g} to {RATE_MAX:g} bytes/s")
    return LinkCost(rate, 0.0, ASSUMED_SAMPLES)


def prefill_at(tokens_per_s: float) -> ComputeCost:
    """Return the cost of recomputing at one rate wherever in the prompt."""
    if not 0 < tokens_per_s < float("inf"):
        raise ValueError(f"prefill rate: {tokens_per_s} is not a positive number of tokens/s")
    return ComputeCost(token_s=1 / tokens_per_s, samples=ASSUMED_SAMPLES)


def with_link(costs: CostModel, tier: Tier, link: LinkCost) -> CostModel:
    """Return the costs with another link."""
    return replace(costs, host=link) if tier is Tier.HOST else replace(costs, ssd=link)


def rates(
    residency: Residency, costs: CostModel, *, resident: int = 0, step_blocks_max: int = 1
) -> Rates | None:
    """Return at which rates of the slowest link in use the decision changes.

    None if nothing is stored, or if it is not known what recomputing costs.
    """
    left = residency.tiers[resident:]
    tier = next((tier for tier in (Tier.SSD, Tier.HOST) if tier in left), None)
    if tier is None or not costs.compute.known:
        return None

    def at(rate: float, way: str = "best") -> RestorePlan:
        link = replace(costs.link(tier), bytes_per_s=rate)
        return plan(
            residency, with_link(costs, tier, link),
            resident=resident, step_blocks_max=step_blocks_max, way=way,  # type: ignore[arg-type]
        )  # fmt: skip

    def loads(rate: float) -> int:
        return sum(residency.tiers[block] is tier for block in at(rate).load)

    stored = left.count(tier)
    recompute_s = at(RATE_MAX).predicted.recompute
    return Rates(
        tier,
        even=_least(lambda rate: at(rate, "load").predicted.planned <= recompute_s),
        recompute=_least(lambda rate: loads(rate) > 0),
        load=_least(lambda rate: loads(rate) == stored),
    )


def _least(holds: Callable[[float], bool]) -> float | None:
    """Return the lowest rate at which something holds that goes on to hold above it."""
    if not holds(RATE_MAX):
        return None
    if holds(RATE_MIN):
        return 0.0
    low, high = RATE_MIN, RATE_MAX
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def plain_name(name: str) -> str:
    """Return a name without case and punctuation, as people remember it."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())
