"""What the restore machine knows, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvtier.plan import RestorePlan, Step, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cost import CostModel

__all__ = ["COVER_S", "TIER_OF", "BlockState", "RestoreState", "begin"]

TIER_OF: Final[dict[int, Tier | None]] = {0: None, 1: Tier.HOST, 2: Tier.SSD}
"""The tiers that loads come from, by the number that stands for them in ``RestoreState.codes``."""

COVER_S: Final = 0.02
"""How much time the loads in flight cover for who is told of each event as it happens, so that a
link does not idle between two; more would only claim blocks early that the compute front might
reach first."""


class BlockState(IntEnum):
    """What is being done about one block."""

    LOADABLE = 0
    HOLE = 1
    LOADING = 2
    LEAVING = 3
    COMPUTING = 4
    PLACED = 5


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Everything the machine knows. ``blocks`` holds one ``BlockState`` per byte."""

    plan: RestorePlan
    costs: CostModel
    loads_inflight_max: int
    blocks: bytes
    codes: bytes
    """Each block's tier, as ``TIER_OF`` numbers them."""
    front: int
    """Every block before it is PLACED."""
    step: Step | None = None
    step_started: float = 0.0
    last_step: tuple[int, int, float] | None = None
    """The last step computed: first token, tokens, seconds."""
    started: bool = False
    expired: bool = False
    idle: bool = False
    """The compute side has asked and waits for an answer."""
    loading: tuple[int, ...] = ()
    """The loads under way, in the order in which they started."""
    link_free: tuple[tuple[Tier, float], ...] = ()
    """When each link is expected to have delivered what it has in flight."""
    cover_s: float = COVER_S
    """How much time the loads in flight are to cover."""
    wake_at: float | None = None
    """When the machine wants to be woken, if nothing else happens before."""

    @property
    def finished(self) -> bool:
        """Whether every block is in place."""
        return self.front == len(self.blocks)

    def count(self, state: BlockState) -> int:
        """Return how many blocks are in ``state``."""
        return self.blocks.count(state)


def begin(
    plan: RestorePlan,
    costs: CostModel,
    *,
    loads_inflight_max: int,
    gone: Sequence[int] = (),
    placed: Sequence[int] = (),
    cover_s: float = COVER_S,
) -> RestoreState:
    """Return the first state.

    An engine that takes and gives answers only between its steps sets ``cover_s`` to the time of
    one or two of those.

    ``gone`` are blocks that the plan counts on and the store has lost since; ``placed`` are those
    that are in the engine's slots already, or are brought there by somebody else and nothing is
    recomputed after them. What the plan has on the device counts as placed: the session brings it
    there before the machine begins.
    """
    blocks = bytearray([BlockState.HOLE]) * len(plan.hashes)
    blocks[: plan.resident] = bytes([BlockState.PLACED]) * plan.resident
    loadable = (
        [b for b in range(plan.resident, len(blocks)) if plan.tiers[b] in (Tier.HOST, Tier.SSD)]
        if plan.adaptive
        else plan.load
    )
    for block in loadable:
        blocks[block] = BlockState.LOADABLE
    for block, tier in enumerate(plan.tiers):
        if tier is Tier.DEVICE:
            blocks[block] = BlockState.PLACED
    for block in gone:
        blocks[block] = BlockState.HOLE
    for block in placed:
        blocks[block] = BlockState.PLACED
    code_of = {tier: code for code, tier in TIER_OF.items()}
    codes = bytes(code_of.get(tier, 0) for tier in plan.tiers)
    return RestoreState(
        plan, costs, loads_inflight_max, bytes(blocks), codes, plan.resident, cover_s=cover_s
    )
