"""Carry out a restore plan in virtual time: the store's own decisions, under costs that are given.

Discrete events drive the same state machine that a ``RestoreSession`` drives. Every lane is one
FIFO: a transfer ends at max(now, busy until) + latency + bytes / rate. What the SSD has read goes
over the copy link, which host memory uses too. A step that begins while loads are under way takes
longer by the true ``interference``:

::

    ssd  --read--> host --copy--> slot
    host ----------copy---------> slot
    compute -------step---------> slots
"""

from __future__ import annotations

import heapq
import itertools
import json
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvtier import events
from kvtier.cost import POSITION_SCALE, TOKEN_SCALE, Profiler
from kvtier.executor import advance, begin
from kvtier.plan import Tier
from kvtier.trace import LANES, lane_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from kvtier.cost import CostModel
    from kvtier.executor import RestoreState
    from kvtier.plan import RestorePlan, Step
    from kvtier.trace import TraceEvent, TraceLane

__all__ = ["Span", "Speed", "Speeds", "Timeline", "replay", "simulate"]

BELIEF_ERROR: Final = 0.02
"""Relative error that a store which learns takes its first beliefs about recomputing to have."""

What = Literal["recompute", "read", "copy"]


@dataclass(frozen=True, slots=True)
class Speed:
    """Piecewise constant: ``factors[i]`` from i * ``segment_s`` seconds on, the last for ever."""

    factors: tuple[float, ...] = (1.0,)
    segment_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.factors or min(self.factors) <= 0 or self.segment_s <= 0:
            raise ValueError(f"{self}: every speed and the segment must be positive")

    def finish(self, start: float, work_s: float) -> float:
        """Return when work ends that begins at ``start`` and takes ``work_s`` at speed 1."""
        last = len(self.factors) - 1
        for index in range(min(int(start / self.segment_s), last), last):
            end = max((index + 1) * self.segment_s, start)
            possible_s = (end - start) * self.factors[index]
            if work_s <= possible_s:
                return start + work_s / self.factors[index]
            start, work_s = end, work_s - possible_s
        return start + work_s / self.factors[last]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast each lane is over time, relative to its true cost."""

    compute: Speed = Speed()
    ssd: Speed = Speed()
    host: Speed = Speed()


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did: blocks [start, stop) from ``begin_s`` to ``end_s``."""

    what: What
    start: int
    stop: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated restore: how long it took, what was done, and when each lane did what.

    ``seconds`` is when the last block was in place, ``compute_s`` how long compute was busy;
    ``loaded``, ``recomputed`` and ``failed`` are blocks. The lanes ``compute``, ``ssd`` and
    ``host`` are in order of time. A cancelled load keeps its place on a link.
    """

    seconds: float
    compute_s: float
    loaded: int
    recomputed: int
    failed: int
    compute: tuple[Span, ...]
    ssd: tuple[Span, ...]
    host: tuple[Span, ...]

    def to_json(self) -> str:
        """Serialise to JSON, each span as an object."""
        return json.dumps(asdict(self), separators=(",", ":"))


def simulate(
    plan: RestorePlan,
    true: CostModel,
    *,
    believed: CostModel | None = None,
    learns: bool = False,
    loads_inflight_max: int = 4,
    failures: Collection[int] = (),
    gone: Collection[int] = (),
    expires_s: float | None = None,
    speeds: Speeds | None = None,
) -> Timeline:
    """Carry out ``plan`` where costs are ``true``, by a store that believes ``believed``.

    ``learns``: what is seen corrects the beliefs, as in a store; otherwise they stay. Loads of
    ``failures`` fail, ``gone`` blocks were lost since the plan was made, and at ``expires_s`` what
    is not in place is recomputed. ``speeds`` makes lanes faster or slower as time passes.
    """
    first = believed or true
    speeds = speeds or Speeds()
    world = _World(
        begin(plan, first, loads_inflight_max=loads_inflight_max, gone=tuple(gone)),
        true,
        frozenset(failures),
        _profiler(first) if learns else None,
        _Lane(speeds.compute),
        {Tier.SSD: _Lane(speeds.ssd), Tier.HOST: _Lane(speeds.host)},
    )
    return world.run(expires_s)


def replay(
    events: Sequence[TraceEvent], faster: Mapping[TraceLane, float] | None = None
) -> tuple[TraceEvent, ...]:
    """Let traced events happen again, with lanes so many times faster; times are from 0.

    An event begins when the last one of its lane and everything that it depends on have ended, plus
    what it was late then: deciding and handing over take as long as they did. A wait has no length
    of its own: it lasts until what followed it begins.
    """
    factors = {lane: (faster or {}).get(lane, 1.0) for lane in LANES}
    if not all(0 < factor < float("inf") for factor in factors.values()):
        raise ValueError(f"faster: {factors}: every factor must be positive")
    work = [event for event in events if event.what != "wait"]
    order, recorded = lane_order(work), {event.id: event for event in work}
    origin = min((event.begin_s for event in work), default=0.0)
    again: dict[int, TraceEvent] = {}
    for event in sorted(work, key=lambda event: event.id):
        deps = [dep for dep in (*event.after, order.get(event.id)) if dep in recorded]
        ready = max((recorded[dep].end_s for dep in deps), default=origin)
        begin = max((again[dep].end_s for dep in deps), default=0.0)
        begin += max(event.begin_s - ready, 0.0)
        end = begin + event.seconds / factors[event.lane]
        again[event.id] = replace(event, begin_s=begin, end_s=end, after=tuple(
            dep for dep in event.after if dep in recorded
        ))  # fmt: skip
    return tuple(again.values())


@dataclass(slots=True)
class _Lane:
    """One FIFO and what it did."""

    speed: Speed
    busy_until: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def reserve(self, what: What, blocks: range, now: float, work_s: float, wait_s: float) -> Span:
        """Put work into the queue, which takes ``wait_s`` before it starts, and return when."""
        begin_s = max(now, self.busy_until)
        self.busy_until = self.speed.finish(begin_s + wait_s, work_s)
        self.spans.append(Span(what, blocks.start, blocks.stop, begin_s, self.busy_until))
        return self.spans[-1]


@dataclass(slots=True)
class _World:
    """One simulated restore: the machine, three lanes, and what is to happen when."""

    state: RestoreState
    true: CostModel
    failures: frozenset[int]
    profiler: Profiler | None
    compute: _Lane
    links: dict[Tier, _Lane]
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)
    submitted: dict[int, float] = field(default_factory=dict)  # the loads under way
    copied_from: dict[int, float] = field(default_factory=dict)  # when a copy into its slot begins
    last_loaded: dict[Tier, float] = field(default_factory=dict)
    loaded: int = 0
    failed: int = 0

    def run(self, expires_s: float | None) -> Timeline:
        """Let things happen until every block is in place."""
        if expires_s is not None:
            self.later(expires_s, lambda: self.post(events.Expired(self.now)))
        self.post(events.Begin(0.0))
        self.post(events.Asked(0.0))
        while not self.state.finished:
            self.now, _, happen = heapq.heappop(self.queue)
            happen()
        steps = tuple(self.compute.spans)
        return Timeline(
            seconds=self.now,
            compute_s=sum(span.end_s - span.begin_s for span in steps),
            loaded=self.loaded,
            recomputed=sum(span.stop - span.start for span in steps),
            failed=self.failed,
            compute=steps,
            ssd=tuple(self.links[Tier.SSD].spans),
            host=tuple(self.links[Tier.HOST].spans),
        )

    def later(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (when, next(self.order), happen))

    def post(self, event: events.Event) -> None:
        """Tell the machine what was learned and what happened, and do what it says."""
        if self.profiler is not None and self.profiler.costs != self.state.costs:
            self._advance(events.Recosted(self.profiler.costs, self.now))
        self._advance(event)

    def _advance(self, event: events.Event) -> None:
        self.state, actions = advance(self.state, event)
        if self.state.wake_at is not None:
            self.later(self.state.wake_at, partial(self._wake, self.state.wake_at))
        for action in actions:
            match action:
                case events.StartStep(step):
                    self._start(step)
                case events.StartLoad(block, tier):
                    self.submitted[block] = self.now
                    self._move(block, tier)
                case events.CancelLoad(block):
                    # Once a copy into the slot has begun, its end is awaited.
                    begun = self.copied_from.get(block, self.now) < self.now
                    if block in self.submitted and not begun:
                        del self.submitted[block]
                        stopped = events.NotLoaded(block, self.now)
                        self.later(self.now, partial(self.post, stopped))

    def _wake(self, wake_at: float) -> None:
        if self.state.wake_at == wake_at:  # and nothing has changed the machine's mind since
            self.post(events.Woke(self.now))

    def _start(self, step: Step) -> None:
        work_s = self.true.compute.seconds(step.tokens.start, len(step.tokens))
        if loading := bool(self.submitted):
            work_s *= 1 + self.true.interference
        span = self.compute.reserve("recompute", step.blocks, self.now, work_s, 0.0)
        self.later(span.end_s, partial(self._computed, step, loading=loading))

    def _computed(self, step: Step, *, loading: bool) -> None:
        if self.profiler is not None:
            spent_s = self.now - self.state.step_started
            overlap = (loading + bool(self.submitted)) / 2
            self.profiler.computed(step.tokens.start, len(step.tokens), spent_s, overlap)
        self.post(events.Computed(self.now))
        self.post(events.Asked(self.now))

    def _move(self, block: int, tier: Tier) -> None:
        """Bring a block one tier closer: from SSD to host memory, or from there into its slot."""
        link = self.true.link(tier)
        work_s = link.seconds(self.state.plan.block_bytes)
        what: What = "read" if tier is Tier.SSD else "copy"
        blocks = range(block, block + 1)
        span = self.links[tier].reserve(what, blocks, self.now, work_s, link.latency_s)
        if tier is Tier.HOST:
            self.copied_from[block] = span.begin_s
        self.later(span.end_s, partial(self._moved, block, tier))

    def _moved(self, block: int, tier: Tier) -> None:
        if block not in self.submitted:
            return  # cancelled on its way
        if block in self.failures:
            self.failed += 1
            del self.submitted[block]
            self.post(events.NotLoaded(block, self.now))
        elif tier is Tier.SSD:
            self._move(block, Tier.HOST)
        else:
            self.loaded += 1
            self._observe(block, self.submitted.pop(block))
            self.post(events.Loaded(block, self.now))

    def _observe(self, block: int, submitted: float) -> None:
        tier = self.state.plan.tiers[block]
        if self.profiler is not None and tier is not None:
            busy_s = self.now - max(submitted, self.last_loaded.get(tier, 0.0))
            self.profiler.loaded(tier, self.state.plan.block_bytes, busy_s)
            self.last_loaded[tier] = self.now


def _profiler(costs: CostModel) -> Profiler:
    """Return a profiler that believes ``costs`` and goes on learning."""
    compute = costs.compute
    scales = (1.0, TOKEN_SCALE, TOKEN_SCALE * POSITION_SCALE)
    terms = (compute.fixed_s, compute.token_s, compute.attention_s)
    theta = [scale * term for scale, term in zip(scales, terms, strict=True)]
    covariance = np.eye(3) * (BELIEF_ERROR * max(theta)) ** 2
    fit = {
        "theta": theta,
        "covariance": covariance,
        "samples": compute.samples,
        "interference": costs.interference,
    }
    links = {tier: astuple(costs.link(tier)) for tier in (Tier.HOST, Tier.SSD)}
    return Profiler.from_record({"compute": fit, "links": links})
