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
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.events import (
    Action,
    Asked,
    Begin,
    CancelLoad,
    Computed,
    Event,
    Expired,
    Loaded,
    NotLoaded,
    Recosted,
    StartLoad,
    StartStep,
)
from kvtier.plan import RestorePlan, Step, Tier
from kvtier.planner import GAIN_MIN
from kvtier.schedule import Busy, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cost import CostModel

__all__ = ["BlockState", "RestoreState", "advance", "begin"]

LOADS_INFLIGHT_MIN: Final = 2
SECONDS_MIN: Final = 1e-9
COVER_S: Final = 0.02
"""Loads in flight cover this much time, so that a link does not idle between two events; more would
only claim blocks early that the compute front might reach first."""


_TIER_OF: Final[dict[int, Tier | None]] = {0: None, 1: Tier.HOST, 2: Tier.SSD}
_CLAIMED: Final = 255


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
class RestoreState:
    """Everything the machine knows. ``blocks`` holds one ``BlockState`` per byte."""

    plan: RestorePlan
    costs: CostModel
    loads_inflight_max: int
    blocks: bytes
    codes: bytes
    """Each block's tier, as ``_TIER_OF`` numbers them."""
    front: int
    """Every block before it is PLACED."""
    step: Step | None = None
    step_started: float = 0.0
    started: bool = False
    expired: bool = False
    idle: bool = False
    """The compute side has asked and waits for an answer."""
    loading: tuple[int, ...] = ()
    """The loads under way, in the order in which they started."""
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
        [b for b in range(plan.resident, len(blocks)) if plan.tiers[b] in (Tier.HOST, Tier.SSD)]
        if plan.adaptive
        else plan.load
    )
    for block in loadable:
        blocks[block] = BlockState.LOADABLE
    for block in gone:
        blocks[block] = BlockState.HOLE
    code_of = {tier: code for code, tier in _TIER_OF.items()}
    codes = bytes(code_of.get(tier, 0) for tier in plan.tiers)
    return RestoreState(plan, costs, loads_inflight_max, bytes(blocks), codes, plan.resident)


def advance(state: RestoreState, event: Event) -> tuple[RestoreState, tuple[Action, ...]]:
    """Apply one event; an event that fits no state raises ``ValueError`` and changes nothing."""
    machine = _Machine(state)
    machine.apply(event)
    if state.started or isinstance(event, Begin):
        machine.decide(event.now)
    return machine.result()


class _Machine:
    """One transition's scratch space; never outlives ``advance``."""

    def __init__(self, state: RestoreState) -> None:
        self.state = state
        self.blocks = bytearray(state.blocks)
        self.actions: list[Action] = []
        self.loading = list(state.loading)
        self.link_free = dict(state.link_free)

    def result(self) -> tuple[RestoreState, tuple[Action, ...]]:
        front = self.state.front
        while front < len(self.blocks) and self.blocks[front] == BlockState.PLACED:
            front += 1
        state = replace(
            self.state,
            blocks=bytes(self.blocks),
            front=front,
            loading=tuple(self.loading),
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
        self.loading.remove(block)
        tier = self.state.plan.tiers[block]
        if tier is not None:
            self.link_free[tier] = now + self._inflight(tier) * self._load_s(tier)

    def _now(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.blocks, dtype=np.uint8)

    def _inflight(self, tier: Tier) -> int:
        tiers = self.state.plan.tiers
        return sum(tiers[block] is tier for block in self.loading)

    def _load_s(self, tier: Tier) -> float:
        return self.state.costs.link(tier).seconds(self.state.plan.block_bytes)

    def decide(self, now: float) -> None:
        """Start loads on the load side of the split, and answer a compute side that waits."""
        share = self._share(now)
        if not self.state.expired:
            self._claim_loads(share, now)
        if self.state.idle:
            self._offer_step(share, now)

    def _share(self, now: float) -> dict[Tier, int]:
        """Return how many of each tier's earliest unclaimed blocks go to the compute side."""
        plan, costs = self.state.plan, self.state.costs
        nothing = {Tier.SSD: 0, Tier.HOST: 0}
        if not plan.adaptive or not costs.compute.known:
            return nothing
        spans = self._unclaimed()
        if all(tier is None for tier, _, _ in spans):
            return nothing
        arrivals = self._arrivals(now)
        layout = Layout(
            spans,
            costs.block_seconds(plan.block_tokens, 0, len(plan.tiers), plan.step_blocks_max)
            * (1 + costs.interference),
            ssd_s=self._late(Tier.SSD, now),
            host_s=self._late(Tier.HOST, now),
            ready_s=[
                max((when for block, when in arrivals.items() if block < start), default=0.0)
                for _, start, _ in spans
            ],
            busy=Busy(
                self._compute_busy(now), *(self._busy(t, now) for t in (Tier.SSD, Tier.HOST))
            ),
        )
        choice = layout.estimate(layout.worth(plan.compute_price))
        zero = np.zeros(1, dtype=np.int64)
        load_only = float(layout.closed_form(zero, zero)[0])
        if load_only - choice.seconds < GAIN_MIN * load_only:
            return nothing
        return {Tier.SSD: choice.ssd, Tier.HOST: choice.host}

    def _unclaimed(self) -> list[tuple[Tier | None, int, int]]:
        """Return the runs of blocks that are nobody's yet, holes as None."""
        now = self._now()
        kinds = np.where(now == BlockState.HOLE, 0, np.frombuffer(self.state.codes, np.uint8))
        kinds[(now != BlockState.HOLE) & (now != BlockState.LOADABLE)] = _CLAIMED
        edges = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
        spans = zip([0, *edges], [*edges, len(kinds)], strict=True)
        return [
            (_TIER_OF[int(kinds[start])], start, stop)
            for start, stop in spans
            if stop > start and kinds[start] != _CLAIMED
        ]

    def _arrivals(self, now: float) -> dict[int, float]:
        """Return when each load under way will be in place: a tier delivers in order."""
        tiers = self.state.plan.tiers
        after = {Tier.SSD: 0, Tier.HOST: 0}
        arrivals = {}
        for block in reversed(self.loading):
            tier = tiers[block]
            if tier in after:
                late = self._busy(tier, now) - after[tier] * self._load_s(tier)
                arrivals[block] = max(late, 0.0)
                after[tier] += 1
        return arrivals

    def _late(self, tier: Tier, now: float) -> float:
        # A load that is overdue already took at least that long: the rest will not be faster.
        free = self.link_free.get(tier, now)
        overdue = now - free if now > free and self._inflight(tier) else 0.0
        return self._load_s(tier) + overdue

    def _busy(self, tier: Tier, now: float) -> float:
        return max(self.link_free.get(tier, now) - now, 0.0)

    def _compute_busy(self, now: float) -> float:
        step = self.state.step
        if step is None:
            return 0.0
        costs = self.state.costs
        predicted = costs.compute.seconds(step.tokens.start, len(step.tokens))
        end = self.state.step_started + predicted * (1 + costs.interference)
        return max(end - now, 0.0)

    def _claim_loads(self, share: dict[Tier, int], now: float) -> None:
        """Start as many loads as the links can use.

        What the compute front must pass comes first, then host memory ascending and the SSD from
        its tail, as in ``schedule.load_order``.
        """
        states, codes = self._now(), np.frombuffer(self.state.codes, np.uint8)
        mine = {
            tier: np.flatnonzero((states == BlockState.LOADABLE) & (codes == code))
            for code, tier in _TIER_OF.items()
            if tier is not None
        }
        recomputed = [np.flatnonzero(states == BlockState.HOLE)]
        recomputed += [blocks[: share[tier]] for tier, blocks in mine.items()]
        last = max((int(blocks[-1]) for blocks in recomputed if blocks.size), default=-1)
        for tier, blocks in mine.items():
            load = blocks[share[tier] :]
            room = self._depth(tier) - self._inflight(tier)
            if room <= 0 or not load.size:
                continue
            ahead, rest = load[load < last], load[load > last]
            order = np.concatenate((ahead, rest if tier is Tier.HOST else rest[::-1]))
            for block in order[:room].tolist():
                self._start_load(block, tier, now)

    def _start_load(self, block: int, tier: Tier, now: float) -> None:
        self.move(block, "load")
        self.loading.append(block)
        self.link_free[tier] = max(self.link_free.get(tier, now), now) + self._load_s(tier)
        self.actions.append(StartLoad(block, tier))

    def _depth(self, tier: Tier) -> int:
        extra = int(COVER_S / max(self._load_s(tier), SECONDS_MIN))
        return min(self.state.loads_inflight_max, LOADS_INFLIGHT_MIN + extra)

    def _offer_step(self, share: dict[Tier, int], now: float) -> None:
        """Hand out a step if the block at the front is the compute side's to take."""
        front = self.state.front
        while front < len(self.blocks) and self.blocks[front] == BlockState.PLACED:
            front += 1
        stop = self._step_stop(front, dict(share))
        if stop == front:
            return
        for block in range(front, stop):
            self.move(block, "compute")
        step = Step(front, stop, self.state.plan.block_tokens)
        self.state = replace(self.state, step=step, step_started=now, idle=False)
        self.actions.append(StartStep(step))

    def _step_stop(self, front: int, share: dict[Tier, int]) -> int:
        plan = self.state.plan
        limit = plan.step_blocks_max if self.state.costs.compute.known else 1
        stop = front
        while stop < min(len(self.blocks), front + limit):
            tier = plan.tiers[stop]
            if self.blocks[stop] == BlockState.LOADABLE and tier is not None and share[tier] > 0:
                share[tier] -= 1
            elif self.blocks[stop] != BlockState.HOLE:
                break
            stop += 1
        return stop
