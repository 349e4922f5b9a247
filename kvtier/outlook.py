"""What is to be expected from here on: estimates over one state of the restore machine.

A link or a step that is overdue is expected to need as long again as it is late, so that one that
has stalled loses its share little by little instead of being trusted for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.plan import Tier
from kvtier.planner import GAIN_MIN
from kvtier.schedule import Busy, Layout
from kvtier.state import TIER_OF, BlockState

if TYPE_CHECKING:
    from kvtier.state import RestoreState

__all__ = ["Outlook"]

PACE_IGNORED: Final = 1.5
"""A last step within this factor of its prediction is noise; beyond, the next ones are like it."""
_CLAIMED: Final = 255


class Outlook:
    """Estimates at one instant, in seconds from then."""

    def __init__(self, state: RestoreState, now: float) -> None:
        self._state = state
        self._now = now
        self._link_free = dict(state.link_free)
        self.pace = self._pace()

    def load_s(self, tier: Tier) -> float:
        """Return how long one more load of this tier takes."""
        return self._state.costs.load_seconds(tier, self._state.plan.block_bytes)

    def compute_s(self, start: int, tokens: int) -> float:
        """Return how long a step takes, beside loads and at the pace of the last one."""
        costs = self._state.costs
        return costs.compute.seconds(start, tokens) * (1 + costs.interference) * self.pace

    def share(self) -> dict[Tier, int]:
        """Return how many of each tier's earliest unclaimed blocks go to the compute side."""
        plan, costs = self._state.plan, self._state.costs
        nothing = {Tier.SSD: 0, Tier.HOST: 0}
        if not plan.adaptive or not costs.compute.known:
            return nothing
        spans = self._unclaimed()
        if all(tier is None for tier, _, _ in spans):
            return nothing
        arrivals = self.arrivals()
        slowed = (1 + costs.interference) * self.pace
        layout = Layout(
            spans,
            costs.block_seconds(plan.block_tokens, 0, len(plan.tiers)) * slowed,
            step_s=costs.compute.fixed_s * slowed,
            step_blocks=plan.step_blocks_max,
            ssd_s=self.load_s(Tier.SSD),
            host_s=self.load_s(Tier.HOST),
            ready_s=[
                max((when for block, when in arrivals.items() if block < start), default=0.0)
                for _, start, _ in spans
            ],
            busy=Busy(self._compute_busy(), self.busy(Tier.SSD), self.busy(Tier.HOST)),
        )
        choice = layout.estimate(layout.worth(plan.compute_price))
        zero = np.zeros(1, dtype=np.int64)
        load_only = float(layout.closed_form(zero, zero)[0])
        if load_only - choice.seconds < GAIN_MIN * load_only:
            return nothing
        return {Tier.SSD: choice.ssd, Tier.HOST: choice.host}

    def arrivals(self) -> dict[int, float]:
        """Return when each load under way will be in place: a tier delivers in order."""
        after = {Tier.SSD: 0, Tier.HOST: 0}
        arrivals = {}
        for block in reversed(self._state.loading):
            tier = self._state.plan.tiers[block]
            if tier in after:
                arrivals[block] = max(self.busy(tier) - after[tier] * self.load_s(tier), 0.0)
                after[tier] += 1
        return arrivals

    def inflight(self, tier: Tier) -> int:
        """Return how many loads of this tier are under way."""
        tiers = self._state.plan.tiers
        return sum(tiers[block] is tier for block in self._state.loading)

    def _unclaimed(self) -> list[tuple[Tier | None, int, int]]:
        """Return the runs of blocks that are nobody's yet, holes as None."""
        now = np.frombuffer(self._state.blocks, dtype=np.uint8)
        hole = now == BlockState.HOLE
        kinds: np.ndarray[Any, Any] = np.frombuffer(self._state.codes, np.uint8).copy()
        kinds[hole] = 0
        kinds[~hole & (now != BlockState.LOADABLE)] = _CLAIMED
        edges = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
        return [
            (TIER_OF[int(kinds[start])], start, stop)
            for start, stop in zip([0, *edges], [*edges, len(kinds)], strict=True)
            if stop > start and kinds[start] != _CLAIMED
        ]

    def busy(self, tier: Tier) -> float:
        """Return when the link of this tier has delivered what it has in flight."""
        left = self._link_free.get(tier, self._now) - self._now
        if left < 0:  # overdue, if something is under way at all
            return -left if self.inflight(tier) else 0.0
        return left

    def _compute_busy(self) -> float:
        step = self._state.step
        if step is None:
            return 0.0
        predicted = self.compute_s(step.tokens.start, len(step.tokens))
        # Late already: expect as much again as it is late.
        return abs(self._state.step_started + predicted - self._now)

    def _pace(self) -> float:
        """Return by what factor steps are slower or faster than predicted right now.

        The cost model takes many steps to believe in a lasting change, and should; a restore that
        runs beside something else must react to it at once.
        """
        costs, step = self._state.costs, self._state.step
        pace = 1.0
        if self._state.last_step is not None:
            start, tokens, seconds = self._state.last_step
            predicted = costs.compute.seconds(start, tokens) * (1 + costs.interference)
            ratio = seconds / predicted if predicted > 0 else 1.0
            pace = 1.0 if 1 / PACE_IGNORED < ratio < PACE_IGNORED else ratio
        if step is not None:
            predicted = costs.compute.seconds(step.tokens.start, len(step.tokens))
            running = self._now - self._state.step_started
            if predicted > 0 and running > PACE_IGNORED * predicted * pace:
                pace = running / predicted
        return pace
