"""One request's restore: the executor's machine, driven by engine steps and ranks' reports.

The scheduler says how far the engine has come, the ranks say what landed; out come loads to order,
a position that prefill must not pass, and the position from which the engine may go on. No clock
and no engine in here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtier.events import (
    Asked,
    Begin,
    CancelLoad,
    Computed,
    Event,
    Expired,
    Loaded,
    NotLoaded,
    StartLoad,
    Woke,
)
from kvtier.executor import BlockState, advance_all, begin
from kvtier.state import COVER_S
from kvtier_vllm.messages import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier import CostModel, RestorePlan

__all__ = ["LOADS_INFLIGHT_MAX", "STALLED_S_MAX", "Restore"]

LOADS_INFLIGHT_MAX: Final = 256
"""Loads that one restore has ordered and not been answered; the stores bound what really runs."""
STALLED_S_MAX: Final = 30.0
"""A restore that waits and gets no answer for so long recomputes what it lacks."""


class Restore:
    """A restore from its plan to its last block in place; the scheduler's thread."""

    def __init__(
        self,
        request_id: str,
        plan: RestorePlan,
        costs: CostModel,
        now: float,
        *,
        ranks: int,
        cover_s: float = COVER_S,
    ) -> None:
        self.request_id = request_id
        self.plan = plan
        self.begun = now
        self.number = -1
        self.claimed = 0
        """Tokens of which the engine was told at admission that they are loaded."""
        self.loaded = 0
        self.failed = 0
        """Loads that came to nothing and that nobody stopped."""
        self._costs = costs
        self._ranks = ranks
        self._pages: tuple[tuple[int, ...], ...] = ()
        self._state = begin(
            plan, costs, loads_inflight_max=LOADS_INFLIGHT_MAX, cover_s=max(cover_s, COVER_S)
        )
        self._starts: list[StartLoad] = []
        self._cancels: list[int] = []
        self._stopped: set[int] = set()
        self._answers: dict[int, dict[int, bool]] = {}
        self._told: list[Event] = []
        self._heard = now
        self._feed(Begin(now), Asked(now))

    # -- what it says

    @property
    def finished(self) -> bool:
        """Whether every block is in place."""
        return self._state.finished

    @property
    def waits(self) -> bool:
        """Whether there is nothing to compute until a load is answered."""
        return self._state.step is None and not self._state.finished

    @property
    def front(self) -> int:
        """Every block before it is in place."""
        return self._state.front

    @property
    def position(self) -> int:
        """The token before which everything is in place."""
        return self._state.front * self.plan.block_tokens

    @property
    def end(self) -> int:
        """The token at which the restored prefix ends."""
        return len(self.plan.hashes) * self.plan.block_tokens

    @property
    def cap(self) -> int | None:
        """The token that prefill must not pass; None when all is in place."""
        if self._state.step is not None:
            return self._state.step.tokens.stop
        return None if self._state.finished else self.position

    @property
    def loads_under_way(self) -> bool:
        """Whether a load may still write into a page."""
        return bool(self._answers)

    @property
    def first_loadable(self) -> int:
        """The first block that a load may ever write; the number of blocks if there is none."""
        able = bytes((BlockState.LOADABLE, BlockState.LOADING, BlockState.LEAVING))
        blocks = enumerate(self._state.blocks)
        return next((i for i, state in blocks if state in able), len(self._state.blocks))

    # -- what it is told

    def start(self, number: int, pages: Sequence[int], pages_per_block: int) -> None:
        """Go ahead with the engine's pages for the blocks of the plan, in token order."""
        blocks = range(len(self.plan.hashes))
        self.number = number
        self._pages = tuple(
            tuple(pages[block * pages_per_block : (block + 1) * pages_per_block])
            for block in blocks
        )

    def reached(self, position: int, now: float, *, pipelined: bool) -> None:
        """Say that the engine has computed, or will have in this step's order, up to a token.

        ``pipelined``: the step may still be running, so that its time is not known.
        """
        step = self._state.step
        if step is not None and position >= step.tokens.stop:
            start, tokens = step.tokens.start, len(step.tokens)
            seconds = self._costs.compute.seconds(start, tokens) if pipelined else None
            self._feed(Computed(now, seconds), Asked(now))
        self.woke(now)

    def woke(self, now: float) -> None:
        """Let time pass: a load that is late may be taken back, one that stalls is given up."""
        if self._state.wake_at is not None and now >= self._state.wake_at:
            self._feed(Woke(now))
        if self.waits and now - self._heard > STALLED_S_MAX:
            self.expire(now)

    def recosted(self, costs: CostModel) -> None:
        """Decide by these costs from now on."""
        self._costs = costs

    def answered(self, rank: int, block: int, now: float, *, landed: bool) -> None:
        """Take a rank's answer, to be ``settled`` with others that came with it.

        The block is in place when all ranks have it there.
        """
        answers = self._answers.get(block)
        if answers is None or rank in answers:
            return
        answers[rank] = landed
        self._heard = now
        if len(answers) < self._ranks:
            return
        del self._answers[block]
        if all(answers.values()):
            self.loaded += 1
            self._told.append(Loaded(block, now))
        else:
            self.failed += block not in self._stopped
            self._told.append(NotLoaded(block, now))

    def settled(self) -> None:
        """Decide what follows from the answers that were taken."""
        if self._told:
            self._feed()

    def expire(self, now: float) -> None:
        """Load nothing more: what is not in place is recomputed."""
        self._heard = now
        if not self._state.expired and not self._state.finished:
            self._feed(Expired(now))

    def take_orders(self) -> tuple[list[Load], list[tuple[int, int]]]:
        """Return the loads to start and those to stop, of a restore that was started."""
        starts, self._starts = self._starts, []
        cancels, self._cancels = self._cancels, []
        loads = [
            Load(
                self.number,
                each.block,
                self.plan.hashes[each.block],
                each.tier,
                self._pages[each.block],
            )
            for each in starts
        ]
        return loads, [(self.number, block) for block in cancels]

    def _feed(self, *events: Event) -> None:
        told, self._told = (*self._told, *events), []
        self._state = replace(self._state, costs=self._costs)
        self._state, actions = advance_all(self._state, told)
        for action in actions:
            match action:
                case StartLoad(block):
                    self._starts.append(action)
                    self._answers[block] = {}
                    self._stopped.discard(block)
                case CancelLoad(block):
                    self._cancels.append(block)
                    self._stopped.add(block)
