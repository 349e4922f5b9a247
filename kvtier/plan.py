"""The values between a lookup and a restore: where blocks are, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvtier.errors import FormatError
from kvtier.identity import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.identity import BlockKeys

__all__ = ["Residency", "RestorePlan", "Step", "Tier", "Times", "runs"]


class Tier(StrEnum):
    """Where bytes are."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class Residency:
    """For each block of a prompt its fastest ready tier, or None; holes are allowed."""

    keys: BlockKeys
    tiers: tuple[Tier | None, ...]
    block_bytes: int

    @property
    def stored(self) -> int:
        """Blocks found in any tier."""
        return len(self.tiers) - self.tiers.count(None)

    def __str__(self) -> str:
        spans = ", ".join(
            f"{tier or 'missing'} [{start}, {stop})" for tier, start, stop in runs(self.tiers)
        )
        return f"{self.stored} of {len(self.tiers)} blocks stored: {spans or 'no full block'}"


@dataclass(frozen=True, slots=True)
class Times:
    """Predicted seconds of the three ways to bring a prefix back."""

    planned: float
    load: float | None
    """None when a block is missing, so that loading alone cannot bring the prefix back."""
    recompute: float


@dataclass(frozen=True, slots=True)
class Step:
    """A range of consecutive blocks to recompute in one forward pass."""

    start: int
    stop: int
    block_tokens: int

    @property
    def blocks(self) -> range:
        """The blocks [start, stop)."""
        return range(self.start, self.stop)

    @property
    def tokens(self) -> range:
        """The token positions of these blocks."""
        return range(self.start * self.block_tokens, self.stop * self.block_tokens)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Which blocks are recomputed, which are loaded and in which order, and why.

    ::

        [0, resident)   the engine holds them already
        on_device       copied from the store's own device tier, before anything else
        recompute       ascending; needs everything before it in place
        load            in the order in which the loads start

    A plan is a value: it can be printed, logged (it holds hashes, never token ids), serialised and
    executed later or elsewhere; a block that is gone by then is a failed load, hence recomputed.
    """

    namespace: bytes
    hashes: tuple[bytes, ...]
    tiers: tuple[Tier | None, ...]
    block_tokens: int
    block_bytes: int
    resident: int
    recompute: tuple[int, ...]
    load: tuple[int, ...]
    step_blocks_max: int
    adaptive: bool
    """Whether the executor may move the split by what it measures; False keeps to the lists."""
    compute_price: float
    """What a second of compute is worth in seconds of waiting (``planner.plan``)."""
    predicted: Times
    reason: str

    @property
    def on_device(self) -> list[int]:
        """Blocks that are copied from the store's own device tier, before anything else."""
        blocks = range(self.resident, len(self.tiers))
        return [block for block in blocks if self.tiers[block] is Tier.DEVICE]

    def instead(self, tiers: dict[int, Tier]) -> RestorePlan:
        """Return the plan that loads these blocks, not on the device any more, from other tiers."""
        if not tiers:
            return self
        now = tuple(tiers.get(block, tier) for block, tier in enumerate(self.tiers))
        return replace(self, tiers=now, load=(*self.load, *sorted(tiers)))

    def explain(self) -> str:
        """Say in a few lines what will be done, how long each way would take, and why."""
        spans = {
            "recompute": _spans(self.recompute),
            "load": _spans(sorted(self.load)),
        }
        if self.on_device:
            spans["on device"] = _spans(self.on_device)
        load = "-" if self.predicted.load is None else f"{self.predicted.load:.3f} s"
        times = (
            f"  predicted {self.predicted.planned:.3f} s planned, {load} load only, "
            f"{self.predicted.recompute:.3f} s recompute only"
        )
        return "\n".join(
            [
                f"restore {len(self.hashes)} blocks ({self.resident} already in place)",
                *(f"  {what:<10}{where}" for what, where in spans.items()),
                times,
                f"  because   {self.reason}",
            ]
        )

    def to_json(self) -> str:
        """Serialise to JSON; hashes in hex."""
        value = asdict(self)
        value["namespace"] = self.namespace.hex()
        value["hashes"] = [digest.hex() for digest in self.hashes]
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RestorePlan:
        """Decode ``to_json``; anything else is ``FormatError``."""
        try:
            plan = _decode(json.loads(text))
            _verify(plan)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"not a serialised RestorePlan: {error!r}") from error
        return plan


def _decode(value: dict[str, Any]) -> RestorePlan:
    return RestorePlan(
        **{
            **value,
            "namespace": bytes.fromhex(value["namespace"]),
            "hashes": tuple(bytes.fromhex(digest) for digest in value["hashes"]),
            "tiers": tuple(None if tier is None else Tier(tier) for tier in value["tiers"]),
            "recompute": tuple(value["recompute"]),
            "load": tuple(value["load"]),
            "predicted": Times(**value["predicted"]),
        }
    )


def _verify(plan: RestorePlan) -> None:
    """Raise ``ValueError`` unless a decoded plan is one that the executor can carry out."""
    for name in ("resident", "block_tokens", "block_bytes", "step_blocks_max"):
        value, least = getattr(plan, name), 0 if name == "resident" else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: {value!r}")
    if any(len(digest) != HASH_BYTES for digest in (plan.namespace, *plan.hashes)):
        raise ValueError(f"a hash that is not {HASH_BYTES} bytes")
    if any(type(block) is not int for block in (*plan.recompute, *plan.load)):
        raise ValueError("a block that is not an int")
    if list(plan.recompute) != sorted(plan.recompute):
        raise ValueError("recompute is not ascending")
    _verify_tiling(plan)
    times = (plan.predicted.planned, plan.predicted.recompute, plan.predicted.load)
    if not all(time is None or _is_seconds(time) for time in times) or None in times[:2]:
        raise ValueError("predicted times that are no times")
    if not _is_seconds(plan.compute_price):
        raise ValueError("a compute price that is none")
    if type(plan.adaptive) is not bool or type(plan.reason) is not str:
        raise ValueError("adaptive or reason of another type")


def _verify_tiling(plan: RestorePlan) -> None:
    n = len(plan.hashes)
    if n != len(plan.tiers) or not plan.resident <= n:
        raise ValueError("tiers and hashes differ in number")
    wanted = [b for b in range(plan.resident, n) if plan.tiers[b] is not Tier.DEVICE]
    if sorted([*plan.recompute, *plan.load]) != wanted:
        raise ValueError("recompute and load do not tile the prefix")
    if any(plan.tiers[block] is None for block in plan.load):
        raise ValueError("a missing block is to be loaded")


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= float(value) < float("inf")  # type: ignore[arg-type]


def runs(tiers: Sequence[Tier | None]) -> list[tuple[Tier | None, int, int]]:
    """Return the maximal runs of equal tier as (tier, start, stop)."""
    result: list[tuple[Tier | None, int, int]] = []
    for index, tier in enumerate(tiers):
        if result and result[-1][0] == tier:
            result[-1] = (tier, result[-1][1], index + 1)
        else:
            result.append((tier, index, index + 1))
    return result


def _spans(blocks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for block in blocks:
        if spans and spans[-1][1] == block:
            spans[-1][1] = block + 1
        else:
            spans.append([block, block + 1])
    count = f"{len(blocks)} block{'' if len(blocks) == 1 else 's'}"
    return f"{count} {' '.join(f'[{start}, {stop})' for start, stop in spans)}".rstrip()
