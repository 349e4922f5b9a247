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

from dataclasses import replace
from typing import TYPE_CHECKING, Final

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
from kvtier.outlook import Outlook
from kvtier.plan import Step, Tier
from kvtier.planner import GAIN_MIN
from kvtier.state import TIER_OF, BlockState, RestoreState, begin

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockState", "RestoreState", "advance", "advance_all", "begin"]

LOADS_INFLIGHT_MIN: Final = 2
LOADS_ALONE: Final = 4
"""Loads in flight where nothing is recomputed: a disk needs so many, and no front reaches them."""
SECONDS_MIN: Final = 1e-9
WAKE_S_MIN: Final = 0.005

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


def advance(state: RestoreState, event: Event) -> tuple[RestoreState, tuple[Action, ...]]:
    """Apply one event; an event that fits no state raises ``ValueError`` and changes nothing."""
    return advance_all(state, (event,))


def advance_all(
    state: RestoreState, events: Sequence[Event]
) -> tuple[RestoreState, tuple[Action, ...]]:
    """Apply events that are told together, and decide once, at the time of the last.

    For who hears of many answers at a time: a decision looks at every block of the prompt.
    """
    machine = _Machine(state)
    for event in events:
        machine.apply(event)
    if machine.state.started and events:
        machine.decide(events[-1].now)
    return machine.result()


class _Machine:
    """One transition's scratch space; never outlives ``advance``."""

    def __init__(self, state: RestoreState) -> None:
        self.state = state
        self.blocks = bytearray(state.blocks)
        self.actions: list[Action] = []
        self.loading = list(state.loading)
        self.link_free = dict(state.link_free)

    def snapshot(self) -> RestoreState:
        front = self.state.front
        while front < len(self.blocks) and self.blocks[front] == BlockState.PLACED:
            front += 1
        return replace(
            self.state,
            blocks=bytes(self.blocks),
            front=front,
            loading=tuple(self.loading),
            link_free=tuple(self.link_free.items()),
        )

    def result(self) -> tuple[RestoreState, tuple[Action, ...]]:
        return self.snapshot(), tuple(self.actions)

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
            case Computed(now, seconds):
                self._computed(now - self.state.step_started if seconds is None else seconds)
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
            # Woke only brings the time.

    def _computed(self, seconds: float) -> None:
        step = self.state.step
        if step is None:
            raise ValueError("no step is out")
        for block in step.blocks:
            self.move(block, "computed")
        last = (step.tokens.start, len(step.tokens), seconds)
        self.state = replace(self.state, step=None, last_step=last)

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
            plan = self.state.plan
            left = sum(plan.tiers[other] is tier for other in self.loading)
            load_s = self.state.costs.load_seconds(tier, plan.block_bytes)
            self.link_free[tier] = now + left * load_s

    def decide(self, now: float) -> None:
        """Start loads on the load side of the split, and answer a compute side that waits."""
        self.state = replace(self.snapshot(), wake_at=None)
        outlook = Outlook(self.state, now)
        share = outlook.share()
        if not self.state.expired:
            self._claim_loads(share, outlook, now)
        if self.state.idle and not self._offer_step(share, now):
            self._take_back(now)

    def _claim_loads(self, share: dict[Tier, int], outlook: Outlook, now: float) -> None:
        """Start as many loads as the links can use.

        What the compute front must pass comes first, then host memory ascending and the SSD from
        its tail, as in ``schedule.load_order``.
        """
        states = np.frombuffer(self.state.blocks, np.uint8)
        codes = np.frombuffer(self.state.codes, np.uint8)
        mine = {
            tier: np.flatnonzero((states == BlockState.LOADABLE) & (codes == code))
            for code, tier in TIER_OF.items()
            if tier is not None
        }
        recomputed = [np.flatnonzero(states == BlockState.HOLE)]
        recomputed += [blocks[: share[tier]] for tier, blocks in mine.items()]
        last = max((int(blocks[-1]) for blocks in recomputed if blocks.size), default=-1)
        loads = {tier: blocks[share[tier] :] for tier, blocks in mine.items()}
        # What the SSD has read is copied after the host copies in flight: few, while both go on.
        both = all(load.size for load in loads.values())
        least = LOADS_INFLIGHT_MIN if last >= 0 or self.state.step else LOADS_ALONE
        for tier, load in loads.items():
            depth = self._depth(outlook.load_s(tier), least)
            if both and tier is Tier.HOST:
                depth = min(depth, LOADS_INFLIGHT_MIN)
            room = depth - outlook.inflight(tier)
            if room <= 0 or not load.size:
                continue
            ahead, rest = load[load < last], load[load > last]
            order = np.concatenate((ahead, rest if tier is Tier.HOST else rest[::-1]))
            for block in order[:room].tolist():
                self.move(block, "load")
                self.loading.append(block)
                free = max(self.link_free.get(tier, now), now)
                self.link_free[tier] = free + outlook.load_s(tier)
                self.actions.append(StartLoad(block, tier))

    def _depth(self, load_s: float, least: int) -> int:
        cover = LOADS_INFLIGHT_MIN + int(self.state.cover_s / max(load_s, SECONDS_MIN))
        return min(self.state.loads_inflight_max, max(least, cover))

    def _offer_step(self, share: dict[Tier, int], now: float) -> bool:
        """Hand out a step if the block at the front is the compute side's to take."""
        front = self.state.front
        stop = self._step_stop(front, dict(share))
        if stop == front:
            return False
        for block in range(front, stop):
            self.move(block, "compute")
        step = Step(front, stop, self.state.plan.block_tokens)
        self.state = replace(self.state, step=step, step_started=now, idle=False)
        self.actions.append(StartStep(step))
        return True

    def _step_stop(self, front: int, share: dict[Tier, int]) -> int:
        plan = self.state.plan
        limit = plan.step_blocks_max if self.state.costs.compute.known else 1
        stop = front
        while stop < min(len(self.blocks), front + limit):
            tier = plan.tiers[stop]
            if self.blocks[stop] == BlockState.LOADABLE and tier and share.get(tier, 0) > 0:
                share[tier] -= 1
            elif self.blocks[stop] != BlockState.HOLE:
                break
            stop += 1
        return stop

    def _take_back(self, now: float) -> None:
        """Let an idle compute side have the block at the front, if that ends before its load.

        A load under way is cancelled, one that has not begun is not. If the load is not late enough
        yet, the machine asks to be woken when it would be.
        """
        state = self.snapshot()
        plan, front = state.plan, state.front
        if not plan.adaptive or not state.costs.compute.known or front == len(state.blocks):
            return
        tier = plan.tiers[front]
        if tier is None or state.blocks[front] not in (BlockState.LOADING, BlockState.LOADABLE):
            return
        outlook = Outlook(state, now)
        load_s = outlook.load_s(tier)
        compute_s = outlook.compute_s(front * plan.block_tokens, plan.block_tokens)
        if compute_s * plan.compute_price > load_s:
            return
        arrival = outlook.arrivals().get(front, outlook.busy(tier) + load_s)
        if compute_s >= (1 - GAIN_MIN) * arrival:
            later = max(arrival + compute_s, WAKE_S_MIN)
            self.state = replace(self.state, wake_at=now + later)
        elif state.blocks[front] == BlockState.LOADING:
            self.move(front, "cancel")
            self.actions.append(CancelLoad(front))
        else:
            self._offer_step({tier: 1}, now)
