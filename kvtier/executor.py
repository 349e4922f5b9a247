"""Meet in the middle, with a guard: a pure state machine (state, event -> state, actions).

The compute front moves from the head, loads come from the tail, and after every event the split of
what nobody has claimed yet is chosen anew from the current estimates. A step is taken only if it
ends sooner than the load of everything left would (the guard), so the result is never worse than
loading alone by more than one step's error; a link faster than one step gets everything.

No clock, no I/O: events carry the time. ``RestoreSession`` drives it in process.

::

    LOADABLE  stored, claimed by nobody     HOLE       must be recomputed
    LOADING   a load may write to it        LEAVING    a load was told to stop, may still write
    COMPUTING in the step that is out       PLACED     in place
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.plan import RestorePlan, Step, Tier
from kvtier.planner import GAIN_MIN, load_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cost import CostModel

__all__ = [
    "Action",
    "Asked",
    "Begin",
    "BlockState",
    "CancelLoad",
    "Computed",
    "Event",
    "Expired",
    "Loaded",
    "NotLoaded",
    "Recosted",
    "RestoreState",
    "StartLoad",
    "StartStep",
    "advance",
    "begin",
]

LOADS_INFLIGHT_MIN: Final = 2
COVER_S: Final = 0.02
"""Loads in flight cover this much time, so that a link does not idle between two events; more would
only claim blocks early that the compute front might reach first."""


class BlockState(IntEnum):
    """What is being done about one block."""

    LOADABLE = 0
    HOLE = 1
    LOADING = 2
    LEAVING = 3
    COMPUTING = 4
    PLACED = 5


_MOVES: Final[dict[tuple[BlockState, str], BlockState]] = {
    (BlockState.LOADABLE, "load"): BlockState.LOADING,
    (BlockState.LOADABLE, "compute"): BlockState.COMPUTING,
    (BlockState.LOADABLE, "give up"): BlockState.HOLE,
    (BlockState.HOLE, "compute"): BlockState.COMPUTING,
    (BlockState.LOADING, "loaded"): BlockState.PLACED,
    (BlockState.LOADING, "not loaded"): BlockState.HOLE,
    (BlockState.LOADING, "cancel"): BlockState.LEAVING,
    (BlockState.LEAVING, "loaded"): BlockState.PLACED,
    (BlockState.LEAVING, "not loaded"): BlockState.HOLE,
    (BlockState.COMPUTING, "computed"): BlockState.PLACED,
}


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
    """The step that was out is done."""

    now: float


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


Event = Begin | Asked | Computed | Loaded | NotLoaded | Expired | Recosted


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


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Everything the machine knows. ``blocks`` holds one ``BlockState`` per byte."""

    plan: RestorePlan
    costs: CostModel
    loads_inflight_max: int
    blocks: bytes
    front: int
    """Every block before it is PLACED."""
    step: Step | None = None
    step_started: float = 0.0
    started: bool = False
    expired: bool = False
    idle: bool = False
    """The compute side has asked and waits for an answer."""
    link_free: tuple[tuple[Tier, float], ...] = ()
    """When each link is expected to have delivered what it has in flight."""

    @property
    def finished(self) -> bool:
        """Whether every block is in place."""
        return self.front == len(self.blocks)

    def count(self, state: BlockState) -> int:
        """Return how many blocks are in ``state``."""
        return self.blocks.count(state)


def begin(
    plan: RestorePlan, costs: CostModel, *, loads_inflight_max: int, gone: Sequence[int] = ()
) -> RestoreState:
    """Return the first state. ``gone`` are blocks that the plan loads and the store lost since."""
    blocks = bytearray([BlockState.HOLE]) * len(plan.hashes)
    blocks[: plan.resident] = bytes([BlockState.PLACED]) * plan.resident
    loadable = (
        [b for b in range(plan.resident, len(blocks)) if plan.tiers[b] is not None]
        if plan.adaptive
        else plan.load
    )
    for block in loadable:
        blocks[block] = BlockState.LOADABLE
    for block in gone:
        blocks[block] = BlockState.HOLE
    return RestoreState(plan, costs, loads_inflight_max, bytes(blocks), plan.resident)


def advance(state: RestoreState, event: Event) -> tuple[RestoreState, tuple[Action, ...]]:
    """Apply one event; an event that fits no state raises ``ValueError`` and changes nothing."""
    machine = _Machine(state)
    machine.apply(event)
    if state.started or isinstance(event, Begin):
        machine.claim_loads(event.now)
        machine.offer_step(event.now)
    return machine.result()


class _Machine:
    """One transition's scratch space; never outlives ``advance``."""

    def __init__(self, state: RestoreState) -> None:
        self.state = state
        self.blocks = bytearray(state.blocks)
        self.actions: list[Action] = []
        self.link_free = dict(state.link_free)

    def result(self) -> tuple[RestoreState, tuple[Action, ...]]:
        front = self.state.front
        while front < len(self.blocks) and self.blocks[front] == BlockState.PLACED:
            front += 1
        state = replace(
            self.state,
            blocks=bytes(self.blocks),
            front=front,
            link_free=tuple(self.link_free.items()),
        )
        return state, tuple(self.actions)

    def move(self, block: int, what: str) -> None:
        if not 0 <= block < len(self.blocks):
            raise ValueError(f"block {block} is not in [0, {len(self.blocks)})")
        now = BlockState(self.blocks[block])
        after = _MOVES.get((now, what))
        if after is None:
            raise ValueError(f"block {block} is {now.name}: it cannot be '{what}'")
        self.blocks[block] = after

    def apply(self, event: Event) -> None:
        match event:
            case Begin():
                if self.state.started:
                    raise ValueError("the restore has begun already")
                self.state = replace(self.state, started=True)
            case Asked():
                if self.state.step is not None:
                    raise ValueError("the last step is not computed yet")
                self.state = replace(self.state, idle=True)
            case Computed():
                self._computed()
            case Loaded(block, now):
                self.move(block, "loaded")
                self._link_progress(block, now)
            case NotLoaded(block, now):
                self.move(block, "not loaded")
                self._link_progress(block, now)
            case Expired():
                self.state = replace(self.state, expired=True)
                self._give_up()
            case Recosted(costs):
                self.state = replace(self.state, costs=costs)

    def _computed(self) -> None:
        if self.state.step is None:
            raise ValueError("no step is out")
        for block in self.state.step.blocks:
            self.move(block, "computed")
        self.state = replace(self.state, step=None)

    def _give_up(self) -> None:
        for block, now in enumerate(self.blocks):
            if now == BlockState.LOADABLE:
                self.move(block, "give up")
            elif now == BlockState.LOADING:
                self.move(block, "cancel")
                self.actions.append(CancelLoad(block))

    def _link_progress(self, block: int, now: float) -> None:
        # What is still in flight on this tier takes the link from now on.
        tier = self.state.plan.tiers[block]
        if tier is not None:
            self.link_free[tier] = now + self._inflight(tier) * self._load_s(tier)

    def _inflight(self, tier: Tier) -> int:
        tiers = self.state.plan.tiers
        return sum(
            tiers[block] is tier
            for block, now in enumerate(self.blocks)
            if now in (BlockState.LOADING, BlockState.LEAVING)
        )

    def _load_s(self, tier: Tier) -> float:
        return self.state.costs.link(tier).seconds(self.state.plan.block_bytes)

    def claim_loads(self, now: float) -> None:
        """Start loads of blocks on the load side of the split, as many as the links can use."""
        if self.state.expired:
            return
        loadable = [b for b, s in enumerate(self.blocks) if s == BlockState.LOADABLE]
        if not loadable:
            return
        keep = self._compute_share(loadable, now)
        holes = [b for b, s in enumerate(self.blocks) if s == BlockState.HOLE]
        tiers = self.state.plan.tiers
        room: dict[Tier, int] = {}
        for block in load_order(tiers, loadable[keep:], [*loadable[:keep], *holes]):
            tier = tiers[block]
            if tier is None:
                raise ValueError(f"block {block} is in no tier")
            if tier not in room:
                room[tier] = self._depth(tier) - self._inflight(tier)
            if room[tier] <= 0:
                continue
            room[tier] -= 1
            self.move(block, "load")
            self.link_free[tier] = max(self.link_free.get(tier, now), now) + self._load_s(tier)
            self.actions.append(StartLoad(block, tier))

    def _depth(self, tier: Tier) -> int:
        extra = int(COVER_S / max(self._load_s(tier), 1e-9))
        return min(self.state.loads_inflight_max, LOADS_INFLIGHT_MIN + extra)

    def _compute_share(self, loadable: list[int], now: float) -> int:
        """Return j: the first j of ``loadable`` go to the compute side, the rest are loaded."""
        plan, costs = self.state.plan, self.state.costs
        if not plan.adaptive or not costs.compute.known:
            return 0
        holes = [b for b, s in enumerate(self.blocks) if s == BlockState.HOLE]
        block_s = costs.block_seconds(plan.block_tokens, 0, len(plan.tiers), plan.step_blocks_max)
        compute = self._compute_free(now) + float(block_s[holes].sum())
        finish = compute + np.concatenate(([0.0], np.cumsum(block_s[loadable])))
        for tier in (Tier.HOST, Tier.SSD):
            mine = np.array([plan.tiers[b] is tier for b in loadable], dtype=np.float64)
            left = np.concatenate((mine[::-1].cumsum()[::-1], [0.0]))
            free, each = self.link_free.get(tier, now), self._load_s(tier)
            if now > free and self._inflight(tier):
                each += now - free  # late already: what is under way takes at least that long
            finish = np.maximum(finish, np.where(left > 0, max(free, now) + left * each, 0.0))
        share = int(np.argmin(finish))
        gain = (finish[0] - finish[share]) / max(finish[0] - now, 1e-9)
        return share if gain >= GAIN_MIN else 0

    def _compute_free(self, now: float) -> float:
        step = self.state.step
        if step is None:
            return now
        tokens = len(step.tokens)
        predicted = self.state.costs.compute.seconds(step.tokens.start, tokens)
        return max(now, self.state.step_started + predicted)

    def offer_step(self, now: float) -> None:
        """Answer a waiting compute side if the block at the front is its to take."""
        if not self.state.idle:
            return
        front = self.state.front
        while front < len(self.blocks) and self.blocks[front] == BlockState.PLACED:
            front += 1
        stop = self._step_stop(front, now)
        if stop == front:
            return
        for block in range(front, stop):
            self.move(block, "compute")
        step = Step(front, stop, self.state.plan.block_tokens)
        self.state = replace(self.state, step=step, step_started=now, idle=False)
        self.actions.append(StartStep(step))

    def _step_stop(self, front: int, now: float) -> int:
        plan = self.state.plan
        limit = plan.step_blocks_max if self.state.costs.compute.known else 1
        takable = {b for b, s in enumerate(self.blocks) if s == BlockState.HOLE}
        loadable = [b for b, s in enumerate(self.blocks) if s == BlockState.LOADABLE]
        if loadable:
            takable.update(loadable[: self._compute_share(loadable, now)])
        stop = front
        while stop in takable and stop - front < limit:
            stop += 1
        return stop
