"""One restore under way: the executor's state machine, driven by real loads and a real engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, Self

from kvtier.errors import StoreClosed, StoreFailed, TransferFailed
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
    StartLoad,
    StartStep,
    Woke,
)
from kvtier.executor import advance, begin
from kvtier.layerwise import LayerTail
from kvtier.plan import Tier
from kvtier.restore_notes import RestoreNotes, RestoreReport
from kvtier.ticket import LoadTicket
from kvtier.tiers.base import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from kvtier.catalog import Catalog
    from kvtier.cost import Profiler
    from kvtier.metrics import Metrics
    from kvtier.plan import RestorePlan, Step
    from kvtier.prefetcher import Prefetcher
    from kvtier.tiers.device import KVSlots
    from kvtier.trace import Trace

__all__ = ["PENDING", "Pending", "RestoreReport", "RestoreSession"]

log = logging.getLogger(__name__)

Pending = Literal["pending"]
PENDING: Final[Pending] = "pending"
"""What ``poll_step`` returns while there is nothing to compute and not everything is in place."""

STEP_S: Final = 30.0
COPY_S_MAX: Final = 30.0
"""How long a cancelled load that is already copying into its slot may take to end."""


class RestoreSession:
    """A scope that pins a plan's blocks, starts its loads, and hands out what is to be recomputed.

    ::

        with store.restore(plan, into=slots) as session:
            while step := session.next_step(timeout=30):
                prefill(step.tokens)           # everything before them is in place
                session.computed(step)

    One thread drives a session. Leaving the scope early cancels, and returns when nothing writes
    into the slots any more. In a forked child a session raises ``StoreClosed``, and its scope ends
    at once.

    A ``layerwise`` session says that all is in place when only layers of blocks from host memory
    are missing; the engine calls ``wait_layer`` before it uses each layer.
    """

    def __init__(
        self,
        plan: RestorePlan,
        slots: KVSlots,
        *,
        catalog: Catalog,
        prefetcher: Prefetcher,
        profiler: Profiler,
        metrics: Metrics,
        loads_inflight_max: int,
        clock: Callable[[], float],
        check_open: Callable[[], None],
        now_ns: Callable[[], int] = time.time_ns,
        trace: Trace | None = None,
        layerwise: bool = False,
    ) -> None:
        self.plan = plan
        self._slots = slots
        self._catalog = catalog
        self._prefetcher = prefetcher
        self._profiler = profiler
        self._metrics = metrics
        self._loads_inflight_max = loads_inflight_max
        self._clock = clock
        self._check_open = check_open
        self._now_ns = now_ns
        self._trace = trace
        self._layerwise = layerwise
        self._tail: LayerTail | None = None
        self._notes = RestoreNotes(trace)
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._posting = False
        self._scope = ExitStack()
        self._state = begin(plan, profiler.costs, loads_inflight_max=loads_inflight_max)
        self._tickets: dict[int, LoadTicket] = {}
        self._step: Step | None = None
        self._loading_at_step = False
        self._handed_out = 0.0
        self._copies_until = 0.0  # when copies that were under way at the timeout must have ended
        self._error: BaseException | None = None
        self._started = 0.0
        self._finished: float | None = None
        self._wake_at: float | None = None
        self._loaded = 0
        self._recomputed = 0
        self._failures = 0

    def __enter__(self) -> Self:
        plan = self.plan
        self._check_open()
        self._started = self._clock()
        pinned = self._scope.enter_context(
            self._catalog.pinned(plan.namespace, plan.hashes, plan.tiers)
        )
        self._catalog.touch(plan.namespace, plan.hashes, self._now_ns())
        plan, gone = plan.by_now(pinned)
        self.plan = plan
        placed = self._place_owned(pinned)
        gone += set(plan.on_device) - set(placed)  # if the slots raised: all of it
        if self._layerwise:
            tail = LayerTail.of(plan, self._slots, self._clock, self._trace, self._notes.number)
            self._tail = tail if tail and self._prefetcher.load_layers(tail) else None
        with self._changed:
            self._state = begin(
                plan,
                self._profiler.costs,
                loads_inflight_max=self._loads_inflight_max,
                gone=gone,
                placed=[*placed, *(() if self._tail is None else self._tail.blocks)],
            )
            self._post(Begin(self._clock()))
        return self

    def _place_owned(self, pinned: Sequence[Tier | None]) -> list[int]:
        """Bring what is pinned on the store's own device tier into the engine's slots."""
        plan = self.plan
        wanted = [b for b in range(plan.resident, len(pinned)) if pinned[b] is Tier.DEVICE]
        blocks = ((block, BlockId(plan.namespace, plan.hashes[block])) for block in wanted)
        try:
            placed = self._prefetcher.place(blocks, self._slots) if wanted else []
        except Exception as error:  # noqa: BLE001 - next_step raises it, as it does after a load
            self._error = error
            return []
        except BaseException:
            self._scope.close()  # the scope was not entered, so nobody leaves it
            raise
        self._notes.placed(placed, self._started, self._clock(), plan.block_bytes)
        self._loaded = len(placed)
        return placed

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._owner:
            return
        try:
            with self._changed:
                finished = self._state.finished
                if not finished:
                    self._post(Expired(self._clock()))  # cancels what loads and starts no more
                self._await_copies()
            self._end_tail(cancel=kind is not None or not finished)
        finally:
            self._learn()
            self._scope.close()
            self._metrics.add("restores")
            self._metrics.add("recomputed_blocks", self._recomputed)

    def next_step(self, timeout: float = STEP_S) -> Step | None:
        """Return the next range of blocks to recompute, or None once everything is in place.

        Waits for blocks that the range builds on. After ``timeout`` seconds whatever is missing is
        handed out for recompute; a block is handed out only once no load can still write to it.
        Raises what the engine's slots raised, or ``StoreFailed`` if a copy into them never ends.
        """
        self._check_owner()
        deadline = self._clock() + timeout
        with self._changed:
            self._ask()
            while True:
                answer = self._answer()
                if answer != PENDING:
                    return answer
                if self._woke():
                    continue
                now, expired = self._clock(), self._state.expired
                until = max(deadline, self._copies_until) if expired else deadline
                left, wake_at = until - now, self._state.wake_at
                if left > 0:
                    self._changed.wait(left if wake_at is None else min(left, wake_at - now))
                elif not expired:
                    log.warning("restore: %.1f s passed; the rest is recomputed", timeout)
                    self._copies_until = now + COPY_S_MAX
                    self._post(Expired(now))
                else:
                    raise StoreFailed(f"a copy into the slots did not end in {COPY_S_MAX:.0f} s")

    def poll_step(self) -> Step | Pending | None:
        """Like ``next_step``, but never waits: a step, ``PENDING``, or None."""
        self._check_owner()
        with self._changed:
            self._ask()
            self._woke()
            return self._answer()

    def wait_layer(self, layer: int, timeout: float = STEP_S) -> None:
        """Return when a layer of every block is in place; after ``next_step`` returned None.

        Raises ``ValueError`` before that, what the engine's slots raised, or ``StoreFailed`` if the
        copy does not end in ``timeout`` seconds.
        """
        if not self._state.finished:
            raise ValueError("wait_layer: there are steps left; call next_step until it is None")
        if self._tail is not None and not self._tail.wait(layer, timeout):
            raise StoreFailed(f"layer {layer} was not copied in {timeout:.0f} s")

    def computed(self, step: Step, seconds: float | None = None) -> None:
        """Say that ``step`` is in the slots; its time teaches the cost model.

        ``seconds`` overrides the time since the step was handed out (say, a CUDA event's).
        """
        self._check_owner()
        with self._changed:
            if step != self._step:
                raise ValueError(f"{step} is not the step that is out ({self._step})")
            now = self._clock()
            spent = now - self._handed_out if seconds is None else seconds
            overlap = (self._loading_at_step + bool(self._tickets)) / 2
            self._profiler.computed(step.tokens.start, len(step.tokens), spent, overlap)
            self._metrics.observe("step_seconds", spent)
            self._notes.computed(step, self._handed_out, now)
            self._step = None
            self._recomputed += len(step.blocks)
            self._post(Computed(now, spent))

    @property
    def report(self) -> RestoreReport:
        """What was done so far."""
        self._check_owner()
        with self._changed:
            return RestoreReport(
                loaded=self._loaded,
                recomputed=self._recomputed,
                failed=self._failures,
                loaded_bytes=self._loaded * self.plan.block_bytes,
                predicted_s=self.plan.predicted.planned,
                measured_s=None if self._finished is None else self._finished - self._started,
            )

    def _learn(self) -> None:
        if self._finished is not None:
            self._metrics.observe("restore_seconds", self._finished - self._started)
        # Only an undisturbed restore says something about the prediction.
        if self._finished is not None and not self._failures and not self._state.expired:
            predicted_s, measured_s = self.plan.predicted.planned, self._finished - self._started
            self._profiler.restored(predicted_s, measured_s)
            if predicted_s > 0:
                self._metrics.observe("restore_predicted_ratio", measured_s / predicted_s)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise StoreClosed("this is a forked child; the restore is its parent's")

    # -- inside; everything below holds the condition's lock

    def _ask(self) -> None:
        if not self._state.started:
            raise ValueError("the session's scope was not entered: use 'with store.restore(...)'")
        if self._step is not None:
            raise ValueError(f"{self._step} is out; say computed() first")
        # Whoever polls may have asked before: an answer that came since then waits in the state.
        asked = self._state.idle or self._state.step is not None
        if not asked and not self._state.finished:
            self._post(Asked(self._clock()))

    def _woke(self) -> bool:
        """Wake the machine if the time that it asked for has come."""
        now, wake_at = self._clock(), self._state.wake_at
        due = wake_at is not None and wake_at <= now
        if due:
            self._post(Woke(now))
        return due

    def _answer(self) -> Step | Pending | None:
        if self._error is not None:
            raise self._error
        if self._state.finished:
            self._notes.goes_on(self._clock())
            return None
        if self._state.step is not None:
            self._step = self._state.step
            self._loading_at_step = bool(self._tickets)
            self._handed_out = self._clock()
            self._notes.goes_on(self._handed_out)
            return self._step
        self._notes.waits(self._clock())
        return PENDING

    def _post(self, event: Event) -> None:
        """Advance the machine and do what it says, and so on with whatever that brings at once.

        A store that is closing refuses every load as it is started, and each refusal starts the
        next: one after the other, not one within the other.
        """
        self._events.append(event)
        if self._posting:
            return
        self._posting = True
        try:
            while self._events:
                self._take(self._events.popleft())
        finally:
            self._posting = False
        self._wake()

    def _take(self, event: Event) -> None:
        # What the last load taught counts for what follows from this event: one decision, not two.
        self._state = replace(self._state, costs=self._profiler.costs)
        self._state, actions = advance(self._state, event)
        if self._state.finished and self._finished is None:
            self._finished = event.now
        self._perform(actions)

    def _wake(self) -> None:
        """Wake who waits, if there is anything to do: an answer, another instant, an end."""
        wake_at, self._wake_at = self._wake_at, self._state.wake_at
        answered = self._error is not None or self._state.finished or self._state.step is not None
        if answered or wake_at != self._wake_at or not self._tickets:
            self._changed.notify_all()

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case StartLoad(block, tier):
                    name = BlockId(self.plan.namespace, self.plan.hashes[block])
                    ticket = LoadTicket(
                        name, tier, self._slots, block, self._load_done, session=self._notes.number
                    )
                    self._tickets[block] = ticket
                    self._prefetcher.load(ticket)
                case CancelLoad(block):
                    self._cancel(block)
                case StartStep():
                    pass  # it waits in the state until the compute side takes it

    def _cancel(self, block: int) -> None:
        ticket = self._tickets.get(block)
        if ticket is not None and self._prefetcher.cancel(ticket):
            del self._tickets[block]
            self._post(NotLoaded(block, self._clock()))

    def _end_tail(self, *, cancel: bool) -> None:
        """Let the copy by layers end, or cut it short; nothing writes to the slots afterwards."""
        tail = self._tail
        if tail is None:
            return
        tail.end(COPY_S_MAX, cancel=cancel)
        if tail.ended_s is not None:
            self._loaded += len(tail.blocks)
            if self._finished is not None:
                self._finished = max(self._finished, tail.ended_s)

    def _await_copies(self) -> None:
        """Wait until no copy that has begun writes into the slots any more."""
        if not self._changed.wait_for(lambda: not self._tickets, COPY_S_MAX):
            raise StoreFailed(f"a copy into the slots did not end in {COPY_S_MAX:.0f} s")

    def _load_done(self, block: int, error: BaseException | None) -> None:
        """Take a ticket's answer, on the prefetcher's thread."""
        with self._changed:
            ticket = self._tickets.pop(block)
            if error is None:
                self._notes.arrived(block, ticket.event)
                self._loaded += 1
                self._post(Loaded(block, self._clock()))
                return
            self._failures += 1
            self._metrics.add("load_failures")
            if not isinstance(error, TransferFailed):
                self._error = error
            self._post(NotLoaded(block, self._clock()))
