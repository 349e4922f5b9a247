"""What the restore machine is told, and what it says to do: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.cost import CostModel
    from kvtier.plan import Step, Tier

__all__ = [
    "Action",
    "Asked",
    "Begin",
    "CancelLoad",
    "Computed",
    "Event",
    "Expired",
    "Loaded",
    "NotLoaded",
    "Recosted",
    "StartLoad",
    "StartStep",
    "Woke",
]


@dataclass(frozen=True, slots=True)
class Begin:
    """The restore starts."""

    now: float


@dataclass(frozen=True, slots=True)
class Asked:
    """The compute side is free and asks for its next step."""

    now: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The step that was out is done; ``seconds`` if its time is known better than by ``now``."""

    now: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A block arrived in its slot."""

    block: int
    now: float


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """A load failed or was cancelled; nothing writes to the block's slot any more."""

    block: int
    now: float


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed: what is not in place is recomputed."""

    now: float


@dataclass(frozen=True, slots=True)
class Recosted:
    """The estimates changed."""

    costs: CostModel
    now: float


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that the machine asked to be woken at has come."""

    now: float


Event = Begin | Asked | Computed | Loaded | NotLoaded | Expired | Recosted | Woke


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Load a block from its tier into its slot; answered by Loaded or NotLoaded."""

    block: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Stop a load if it can still be stopped; answered by NotLoaded or Loaded."""

    block: int


@dataclass(frozen=True, slots=True)
class StartStep:
    """Recompute a range of blocks; everything before it is in place. Answered by Computed."""

    step: Step


Action = StartLoad | CancelLoad | StartStep
