"""The restore machine under a virtual clock: a small discrete-event engine drives it to the end."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import BlockKeys, CostModel, Residency, RestorePlan, Step, Tier, plan
from kvtier import executor as machine
from kvtier.cost import ComputeCost, LinkCost, Profiler
from kvtier.events import (
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
    Woke,
)
from kvtier.executor import BlockState, RestoreState, advance, advance_all, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_TOKENS = 256
BLOCK_BYTES = 1_000_000
HOST, SSD = Tier.HOST, Tier.SSD


def residency_of(tiers: Sequence[Tier | None]) -> Residency:
    """Return a lookup's result with these tiers."""
    hashes = tuple(index.to_bytes(32, "big") for index in range(len(tiers)))
    keys = BlockKeys(b"n" * 32, BLOCK_TOKENS, b"r" * 32, b"t" * 32, hashes, b"")
    return Residency(keys, tuple(tiers), BLOCK_BYTES)


def costs_of(
    block_s: float, rise: float = 0.0, fixed: float = 0.0, *, host_s: float = 1e-9, ssd_s: float
) -> CostModel:
    """Costs in seconds per block: the first block's recompute, its rise per block, loads."""
    attention = rise / BLOCK_TOKENS**2
    token = block_s / BLOCK_TOKENS - attention * (BLOCK_TOKENS - 1) / 2
    return CostModel(
        ComputeCost(fixed, token, attention, samples=50),
        LinkCost(BLOCK_BYTES / host_s, 0.0, 9),
        LinkCost(BLOCK_BYTES / ssd_s, 0.0, 9),
    )


def profiler_of(costs: CostModel) -> Profiler:
    """Return a profiler that believes ``costs`` and goes on learning."""
    compute = costs.compute
    theta = [
        compute.fixed_s,
        compute.token_s * 256.0,
        compute.attention_s * 256.0 * 1024.0,
    ]
    sigma = 0.02 * max(theta)
    return Profiler.from_record(
        {
            "compute": {
                "theta": theta,
                "covariance": (np.eye(3) * sigma**2).ravel().tolist(),
                "samples": compute.samples,
            },
            "links": {
                str(tier): [costs.link(tier).bytes_per_s, 0.0, costs.link(tier).samples]
                for tier in (HOST, SSD)
            },
        }
    )


@dataclass(frozen=True)
class Read:
    """The SSD has read a block into host memory; the machine is not told."""

    block: int


@dataclass
class Engine:
    """Carries a plan out in virtual time and checks every move of the machine on the way.

    A link is one FIFO: a transfer ends at max(now, busy until) + latency + bytes / rate. What the
    SSD has read goes over the copy link, which host memory uses too. Steps take their true cost.
    ``learns`` feeds what is seen back, as a store does.
    """

    plan: RestorePlan
    true: CostModel
    believed: CostModel | None = None
    learns: bool = False
    loads_inflight_max: int = 4
    gone: Sequence[int] = ()
    fails: Sequence[int] = ()
    expires_at: float | None = None
    stoppable: Callable[[int], bool] = lambda block: True
    state: RestoreState = field(init=False)
    now: float = 0.0
    finished_at: float | None = None
    loaded: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    started: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        believed = self.believed or self.true
        self.profiler = profiler_of(believed) if self.learns else None
        self.state = begin(
            self.plan, believed, loads_inflight_max=self.loads_inflight_max, gone=self.gone
        )
        self.queue: list[tuple[float, int, Event | Read]] = []
        self.order = itertools.count()
        self.busy: dict[Tier, float] = {}
        self.writing: set[int] = set()  # blocks whose load may write
        self.submitted: dict[int, float] = {}
        self.arriving: int | None = None
        self.last_done: dict[Tier, float] = {}

    def later(self, when: float, event: Event | Read) -> None:
        """Queue an event."""
        heapq.heappush(self.queue, (when, next(self.order), event))

    def post(self, event: Event) -> None:
        """Advance the machine by one event, check what it did, and do what it says."""
        if self.profiler is not None and self.profiler.costs != self.state.costs:
            self._advance(Recosted(self.profiler.costs, self.now))
        self._advance(event)

    def _advance(self, event: Event) -> None:
        before = self.state
        match event:
            case Loaded(block):
                self.loaded.append(block)
                self.writing.remove(block)
            case NotLoaded(block):
                self.writing.remove(block)
            case Computed():
                assert before.step is not None
                self.computed += before.step.blocks
        self.state, actions = advance(before, event)
        self.check(before)
        if self.state.wake_at is not None:
            self.later(self.state.wake_at, Woke(self.state.wake_at))
        for action in actions:
            match action:
                case StartLoad(block, tier):
                    self.start_load(block, tier)
                case CancelLoad(block):
                    self.cancel(block)
                case StartStep(step):
                    self.start_step(step)
        if self.state.finished and self.finished_at is None:
            self.finished_at = self.now

    def start_load(self, block: int, tier: Tier) -> None:
        """Put a load into its tier's queue."""
        assert self.plan.tiers[block] is tier
        assert block not in self.writing
        assert block not in self.gone
        assert len(self.writing) < 2 * self.loads_inflight_max
        self.writing.add(block)
        self.started.append(block)
        self.submitted[block] = self.now
        if tier is SSD:
            self.later(self.transfer(SSD), Read(block))
        else:
            self.copy(block)

    def transfer(self, tier: Tier) -> float:
        """Put one block into a link's queue and return when it ends."""
        link = self.true.link(tier)
        start = max(self.now, self.busy.get(tier, 0.0))
        self.busy[tier] = start + link.latency_s + link.seconds(BLOCK_BYTES)
        return self.busy[tier]

    def copy(self, block: int) -> None:
        """Bring a block that is in host memory into its slot."""
        end = self.transfer(HOST)
        self.later(end, NotLoaded(block, end) if block in self.fails else Loaded(block, end))

    def cancel(self, block: int) -> None:
        """Stop a load unless its bytes are on their way into the slot already."""
        if self.stoppable(block) and block != self.arriving:
            self.queue = [item for item in self.queue if getattr(item[2], "block", None) != block]
            heapq.heapify(self.queue)
            self.later(self.now, NotLoaded(block, self.now))

    def start_step(self, step: Step) -> None:
        """Compute a step for its true time."""
        blocks = self.state.blocks
        assert all(b == BlockState.PLACED for b in blocks[: step.start])
        assert all(b == BlockState.COMPUTING for b in blocks[step.start : step.stop])
        assert not self.writing & set(step.blocks)
        assert 1 <= len(step.blocks) <= self.plan.step_blocks_max
        self.steps.append(step)
        tokens = step.tokens
        self.later(self.now + self.true.compute.seconds(tokens.start, len(tokens)), Computed(0.0))

    def check(self, before: RestoreState) -> None:
        """Check what must hold after every event."""
        after = self.state
        assert len(after.blocks) == len(before.blocks)
        writing = {b for b, s in enumerate(after.blocks) if s in (2, 3)}
        assert writing >= self.writing
        placed = [b == BlockState.PLACED for b in after.blocks]
        assert all(now for was, now in zip(before.blocks, placed, strict=True) if was == 5)
        assert all(placed[: after.front])
        assert after.finished == all(placed)
        assert after.count(BlockState.COMPUTING) == (len(after.step.blocks) if after.step else 0)

    def run(self) -> Engine:
        """Drive the machine to the end; a machine that waits for nothing is stuck."""
        if self.expires_at is not None:
            self.later(self.expires_at, Expired(self.expires_at))
        self.post(Begin(0.0))
        if not self.state.finished:
            self.post(Asked(0.0))
        for _ in range(20 * len(self.state.blocks) + 20):
            if self.state.finished:
                break
            assert self.queue, f"stuck at {self.state.blocks.hex()}"
            self.now, _, event = heapq.heappop(self.queue)
            self.happen(event)
        assert self.state.finished, f"no end: {self.state.blocks.hex()}"
        placed = sorted([*self.loaded, *self.computed])
        assert list(range(self.plan.resident, len(self.state.blocks))) == placed
        return self

    def happen(self, event: Event | Read) -> None:
        """Let the world, and then the machine, see one event."""
        # A load that answers cannot be cancelled any more.
        answers = isinstance(event, (Loaded, NotLoaded))
        self.arriving = event.block if answers else None  # type: ignore[union-attr]
        match event:
            case Woke() if self.state.wake_at != event.now:
                return  # something changed the machine's mind since
            case Read(block):
                self.copy(block)
                return
            case Computed():
                step = self.state.step
                assert step is not None
                if self.profiler is not None:
                    seconds = self.now - self.state.step_started
                    self.profiler.computed(step.tokens.start, len(step.tokens), seconds)
                self.post(Computed(self.now))
                if not self.state.finished:
                    self.post(Asked(self.now))
                return
            case Loaded(block):
                tier = self.plan.tiers[block]
                if self.profiler is not None and tier is not None:
                    busy = self.now - max(self.submitted[block], self.last_done.get(tier, 0.0))
                    self.profiler.loaded(tier, BLOCK_BYTES, busy)
                    self.last_done[tier] = self.now
        self.post(event)

    @property
    def seconds(self) -> float:
        """When the last block was in place."""
        assert self.finished_at is not None
        return self.finished_at


def compute_seconds(costs: CostModel, blocks: int, step_blocks: int) -> float:
    """Return the true cost of recomputing the first blocks in the largest steps allowed."""
    return sum(
        costs.compute.seconds(start * BLOCK_TOKENS, min(step_blocks, blocks - start) * BLOCK_TOKENS)
        for start in range(0, blocks, step_blocks)
    )


def best_split(costs: CostModel, tier: Tier, blocks: int, step_blocks: int = 1) -> float:
    """Best [0, k) recomputed, [k, blocks) loaded, over all k."""
    link = costs.link(tier)
    load = link.latency_s + link.seconds(BLOCK_BYTES)
    return min(
        max(compute_seconds(costs, k, step_blocks), (blocks - k) * load) for k in range(blocks + 1)
    )


def one_tier_cases(
    count: int, blocks: tuple[int, int], seed: int
) -> Iterator[tuple[int, CostModel, int]]:
    """Yield (blocks, true costs, step_blocks_max): loads from 1/8 to 8 times the recompute."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(*blocks))
        block_s = float(np.exp(rng.uniform(np.log(0.01), np.log(1.0))))
        rise = block_s * float(rng.choice([0.0, 0.01, 0.1, 0.3]))
        fixed = block_s * float(rng.choice([0.0, 0.1]))
        whole = fixed * n + block_s * n + rise * n * (n - 1) / 2
        ratio = float(np.exp(rng.uniform(np.log(1 / 8), np.log(8))))
        yield (
            n,
            costs_of(block_s, rise, fixed, ssd_s=whole * ratio / n),
            int(rng.choice([1, 1, 2, 4])),
        )


def scaled(costs: CostModel, factor: float) -> CostModel:
    """Return the costs with an SSD rate that is believed to be ``factor`` times the true one."""
    ssd = LinkCost(costs.ssd.bytes_per_s * factor, costs.ssd.latency_s, costs.ssd.samples)
    return CostModel(costs.compute, costs.host, ssd)


# -- what holds for every layout

LAYOUTS = st.lists(st.sampled_from([HOST, SSD, None]), max_size=12)
SECONDS = st.floats(0.001, 1.0)


COSTS = st.builds(
    lambda block_s, rise, fixed, host_s, ssd_s: costs_of(
        block_s, block_s * rise, fixed, host_s=host_s, ssd_s=ssd_s
    ),
    SECONDS, st.floats(0, 1), st.floats(0, 0.1), SECONDS, SECONDS,
)  # fmt: skip


@st.composite
def engines(draw: st.DrawFn, *, expiry: bool = False) -> Engine:
    """Random layouts, costs, beliefs, failures and limits."""
    tiers = draw(LAYOUTS)
    true, believed = draw(COSTS), draw(COSTS)
    if draw(st.booleans()):
        believed = CostModel(ComputeCost(), believed.host, believed.ssd)
    learns = draw(st.booleans()) and believed.compute.known
    made = plan(
        residency_of(tiers),
        believed,
        resident=draw(st.integers(0, len(tiers))),
        step_blocks_max=draw(st.integers(1, 4)),
        way=draw(st.sampled_from(["best", "best", "best", "load", "recompute"])),
    )
    stored = [b for b in range(made.resident, len(tiers)) if tiers[b] is not None]
    loadable = stored if made.adaptive else sorted(made.load)
    subsets = st.sets(st.sampled_from(loadable)) if loadable else st.just(set())
    stoppable = draw(subsets)
    return Engine(
        made, true, believed, learns,
        loads_inflight_max=draw(st.integers(1, 5)),
        gone=sorted(draw(subsets)) if draw(st.booleans()) else (),
        fails=sorted(draw(subsets)) if draw(st.booleans()) else (),
        expires_at=draw(st.floats(0, 3)) if expiry else None,
        stoppable=stoppable.__contains__,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(engines())
def test_every_block_is_placed_once(engine: Engine) -> None:
    """Any layout, belief, loss and failure ends with every block loaded xor computed, in order."""
    engine.run()
    assert not set(engine.loaded) & set(engine.computed)
    assert not set(engine.fails) & set(engine.loaded)
    assert set(engine.gone) <= set(engine.computed)
    assert engine.computed == sorted(engine.computed)
    assert len(engine.started) == len(set(engine.started))


@settings(max_examples=120, deadline=None)
@given(engines(expiry=True))
def test_expiry_recomputes_what_is_missing(engine: Engine) -> None:
    """After the deadline no load starts, and all that is missing and stoppable is computed."""
    expired: list[set[int]] = []
    advance_before = engine._advance

    def watch(event: Event) -> None:
        started = len(engine.started)
        was_expired = engine.state.expired
        advance_before(event)
        if was_expired:
            assert started == len(engine.started)
        if isinstance(event, Expired):
            assert engine.state.count(BlockState.LOADABLE) == 0
            assert engine.state.count(BlockState.LOADING) == 0
            expired.append(set(engine.writing))

    engine._advance = watch  # type: ignore[method-assign]
    engine.run()
    if expired:
        late = expired[0] & set(engine.loaded)
        assert not [block for block in late if engine.stoppable(block)]


@settings(max_examples=80, deadline=None)
@given(engines())
def test_fixed_plans_keep_to_their_lists(engine: Engine) -> None:
    """A plan that is not adaptive loads its list and computes the rest, whatever is measured."""
    if engine.plan.adaptive:
        return
    engine.run()
    lost = {*engine.gone, *(b for b in engine.fails if b in engine.started)}
    assert set(engine.plan.load) - lost == set(engine.loaded)
    assert set(engine.plan.recompute) | lost == set(engine.computed)


@settings(max_examples=60, deadline=None)
@given(engines(), st.data())
def test_illegal_events_raise_and_change_nothing(engine: Engine, data: st.DataObject) -> None:
    """At any instant, an event that fits no state is a ValueError; the machine goes on unharmed."""
    advance_before = engine._advance

    def watch(event: Event) -> None:
        advance_before(event)
        state = engine.state
        kept = RestoreState(**{name: getattr(state, name) for name in state.__slots__})
        n = len(state.blocks)
        block = data.draw(st.integers(0, n - 1)) if n else None
        illegal: list[Event] = [Begin(engine.now)] if state.started else []
        if block is not None and block not in engine.writing:
            illegal += [Loaded(block, engine.now), NotLoaded(block, engine.now)]
        illegal.append(Computed(engine.now) if state.step is None else Asked(engine.now))
        for wrong in illegal:
            with pytest.raises(ValueError, match=r"."):
                advance(state, wrong)
        assert kept == state

    engine._advance = watch  # type: ignore[method-assign]
    engine.run()


@pytest.mark.parametrize("event", [Loaded(-1, 0.0), Loaded(8, 0.0), NotLoaded(-1, 0.0)], ids=repr)
def test_blocks_outside_the_plan_are_illegal(event: Event) -> None:
    """A block number beyond either end is a ValueError, though the last block is loading."""
    state = begin(plan(residency_of([SSD] * 8), CostModel()), CostModel(), loads_inflight_max=8)
    state, actions = advance(state, Begin(0.0))
    assert StartLoad(7, SSD) in actions
    with pytest.raises(ValueError, match="block"):
        advance(state, event)


@pytest.mark.parametrize(
    ("compute_s", "limit", "started"), [(100.0, 8, 4), (100.0, 3, 3), (1.0, 8, 2)]
)
def test_a_disk_is_kept_busy_where_nothing_is_recomputed(
    compute_s: float, limit: int, started: int
) -> None:
    """Loads alone are four at once; beside a compute front two, as it might reach them first."""
    costs = costs_of(compute_s, ssd_s=1.0)
    made = plan(residency_of([SSD] * 8), costs)
    assert bool(made.recompute) == (started == 2)
    state = begin(made, costs, loads_inflight_max=limit)
    _, actions = advance(state, Begin(0.0))
    assert actions == tuple(StartLoad(7 - index, SSD) for index in range(started))


def test_events_before_the_beginning() -> None:
    """Before Begin nothing starts: asking waits, and finishing something is illegal."""
    state = begin(plan(residency_of([SSD, None]), CostModel()), CostModel(), loads_inflight_max=2)
    state, actions = advance(state, Asked(0.0))
    assert actions == ()
    for event in (Computed(0.0), Loaded(0, 0.0), NotLoaded(1, 0.0)):
        with pytest.raises(ValueError, match=r"."):
            advance(state, event)
    state, actions = advance(state, Begin(0.0))
    assert (StartLoad(0, SSD),) == actions


def test_no_blocks() -> None:
    """A restore of nothing, or of what is all resident, is finished when it begins."""
    for tiers in ([], [SSD, HOST, None]):
        made = plan(residency_of(tiers), costs_of(1.0, ssd_s=1.0), resident=len(tiers))
        engine = Engine(made, costs_of(1.0, ssd_s=1.0)).run()
        assert (engine.seconds, engine.started, engine.steps) == (0.0, [], [])


def test_gone_blocks_are_recomputed_and_never_loaded() -> None:
    """What the store lost between plan and restore is a hole; the rest is loaded as before."""
    costs = costs_of(10.0, ssd_s=0.01)
    made = plan(residency_of([SSD] * 8), costs)
    engine = Engine(made, costs, gone=(2, 3, 7)).run()
    assert engine.computed == [2, 3, 7]
    assert {0, 1, 4, 5, 6} == set(engine.loaded)
    assert {0, 1} == set(engine.started[:2])  # the compute front waits for these


def test_failed_loads_are_recomputed() -> None:
    """Every load fails: everything is recomputed, each block tried at most once."""
    costs = costs_of(1.0, ssd_s=0.01)
    made = plan(residency_of([SSD] * 6), costs, way="load")
    engine = Engine(made, costs, fails=range(6)).run()
    assert list(range(6)) == engine.computed
    assert Counter(range(6)) == Counter(engine.started)


def test_unknown_compute_cost_loads_what_is_stored_and_steps_by_one() -> None:
    """Nothing measured: stored blocks are loaded, holes are computed one block at a time."""
    unknown = CostModel(ssd=LinkCost(BLOCK_BYTES / 0.5, 0.0, 3))
    made = plan(residency_of([None] * 5 + [SSD] * 5), unknown, step_blocks_max=4)
    engine = Engine(made, costs_of(0.1, ssd_s=0.5), unknown).run()
    assert engine.computed == [0, 1, 2, 3, 4]
    assert {5, 6, 7, 8, 9} == set(engine.loaded)
    assert {1} == {len(step.blocks) for step in engine.steps}


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
def test_steps_are_as_large_as_allowed(limit: int) -> None:
    """Holes in a row are computed in steps of exactly the limit, the last one smaller."""
    costs = costs_of(0.1, ssd_s=0.1)
    made = plan(residency_of([None] * 11), costs, step_blocks_max=limit)
    engine = Engine(made, costs).run()
    wanted = [min(limit, 11 - start) for start in range(0, 11, limit)]
    assert wanted == [len(step.blocks) for step in engine.steps]


def test_steps_stop_where_a_load_is_under_way() -> None:
    """A step ends before a block whose load may still write."""
    costs = costs_of(0.1, ssd_s=100.0, host_s=100.0)
    made = plan(residency_of([None, None, SSD, None]), costs, step_blocks_max=4, way="load")
    engine = Engine(made, costs)
    engine.post(Begin(0.0))
    engine.post(Asked(0.0))
    assert [Step(0, 2, BLOCK_TOKENS)] == engine.steps


# -- the table of moves


def stops(block: int, *, may: bool) -> bool:
    """Tell for every block alike whether its load can be stopped."""
    return may


def test_every_move_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry of the table of moves happens in some restore; none is dead."""
    seen: set[tuple[BlockState, str]] = set()
    original = machine._Machine.move

    def move(self: machine._Machine, block: int, what: str) -> None:
        now = BlockState(self.blocks[block])
        original(self, block, what)
        seen.add((now, what))

    monkeypatch.setattr(machine._Machine, "move", move)
    costs = costs_of(1.0, ssd_s=1.0)
    made = plan(residency_of([None] + [SSD] * 12), costs)
    Engine(made, costs, fails=[12]).run()
    for may_stop in (True, False):
        Engine(made, costs, expires_at=2.5, stoppable=partial(stops, may=may_stop)).run()
    assert seen == set(machine._MOVES)


@pytest.mark.parametrize("state", list(BlockState))
@pytest.mark.parametrize("what", sorted({what for _, what in machine._MOVES}))
def test_moves_outside_the_table_raise(state: BlockState, what: str) -> None:
    """A move that the table does not have raises and leaves the block as it was."""
    costs = costs_of(1.0, ssd_s=1.0)
    begun = begin(plan(residency_of([SSD]), costs), costs, loads_inflight_max=1)
    scratch = machine._Machine(begun)
    scratch.blocks[0] = state
    after = machine._MOVES.get((state, what))
    if after is None:
        with pytest.raises(ValueError, match=state.name):
            scratch.move(0, what)
        assert state == scratch.blocks[0]
    else:
        scratch.move(0, what)
        assert after == scratch.blocks[0]


@pytest.mark.parametrize(("cover_s", "expected"), [(0.0, 2), (0.1, 3), (0.45, 6), (9.0, 8)])
def test_loads_in_flight_cover_the_time_between_two_answers(cover_s: float, expected: int) -> None:
    """An engine that hears of loads only every so often has as many under way as that takes."""
    costs = costs_of(50.0, ssd_s=0.1)
    planned = plan(residency_of([None, *[SSD] * 20]), costs)  # beside a compute front
    state = begin(planned, costs, loads_inflight_max=8, cover_s=cover_s)
    state, actions = advance(state, Begin(0.0))
    assert sum(isinstance(action, StartLoad) for action in actions) == expected
    first = next(action.block for action in actions if isinstance(action, StartLoad))
    _, more = advance(state, Loaded(first, 0.1))
    assert sum(isinstance(action, StartLoad) for action in more) == 1


# -- how fast it is


def report(name: str, ratios: list[float]) -> None:
    """Print mean and worst; seen with pytest -s."""
    print(f"\n{name}: mean {np.mean(ratios):.3f}, worst {max(ratios):.3f}, n {len(ratios)}")  # noqa: T201


def test_exact_beliefs_come_within_a_tenth_of_the_best_split() -> None:
    """With exact costs, one tier's run of 8 blocks or more takes at most 1.10 x the best split."""
    ratios = []
    worst: tuple[float, object] = (0.0, None)
    for n, costs, _ in one_tier_cases(300, (8, 65), seed=1):
        made = plan(residency_of([SSD] * n), costs)
        ratio = Engine(made, costs).run().seconds / best_split(costs, SSD, n)
        ratios.append(ratio)
        worst = max(worst, (ratio, (n, costs)), key=lambda pair: pair[0])
    report("exact beliefs / best split", ratios)
    assert worst[0] <= 1.10, worst


def test_never_slower_than_loading_by_more_than_a_step() -> None:
    """With costs known exactly, the result is at most one step behind loading everything."""
    for n, costs, step in one_tier_cases(200, (1, 65), seed=2):
        made = plan(residency_of([SSD] * n), costs, step_blocks_max=step)
        engine = Engine(made, costs).run()
        load = n * costs.ssd.seconds(BLOCK_BYTES)
        largest = max(
            (costs.compute.seconds(s.tokens.start, len(s.tokens)) for s in engine.steps),
            default=0.0,
        )
        assert engine.seconds <= load + largest + 1e-9
        assert engine.seconds <= 1.01 * min(load, compute_seconds(costs, n, 1)) + 1e-9


def test_prediction_is_met_when_beliefs_are_exact() -> None:
    """The plan's predicted time is within a tenth of what the executor takes, in the median."""
    ratios = []
    for n, costs, _ in one_tier_cases(150, (8, 65), seed=3):
        made = plan(residency_of([SSD] * n), costs)
        ratios.append(Engine(made, costs).run().seconds / made.predicted.planned)
    report("measured / predicted", ratios)
    assert 0.9 <= float(np.median(ratios)) <= 1.1


@pytest.mark.parametrize("step_blocks", [1, 4])
def test_a_link_faster_than_a_step_gets_everything(step_blocks: int) -> None:
    """If loading all ends before one block could be computed, nothing is computed."""
    costs = costs_of(1.0, ssd_s=0.99 / 16)
    made = plan(residency_of([SSD] * 16), costs, step_blocks_max=step_blocks)
    engine = Engine(made, costs).run()
    assert engine.computed == []
    assert engine.seconds == pytest.approx(0.99)


def test_a_link_slower_than_everything_gets_next_to_nothing() -> None:
    """If one block's load outlasts computing all, at most the loads claimed at the start happen."""
    costs = costs_of(0.01, ssd_s=100.0)
    made = plan(residency_of([SSD] * 16), costs)
    engine = Engine(made, costs).run()
    assert engine.loaded == []
    assert engine.seconds == pytest.approx(0.16)


def stalled() -> Engine:
    """Run 16 blocks over a link that is believed to be 4 x faster than recompute and is dead."""
    believed = costs_of(1.0, ssd_s=0.25)
    true = scaled(believed, 0.25 / 1e6)
    made = plan(residency_of([SSD] * 16), believed)
    assert made.load
    return Engine(made, true, believed, learns=True, expires_at=60.0).run()


def test_a_stalled_link_ends_up_computed() -> None:
    """A link that is believed fast and delivers nothing: everything ends up computed."""
    engine = stalled()
    assert engine.loaded == []
    assert list(range(16)) == engine.computed


def test_a_stalled_link_does_not_idle_the_engine() -> None:
    """While a link delivers nothing, the engine computes all that no load in flight may write."""
    engine = stalled()
    held = len(engine.started)
    assert held <= engine.loads_inflight_max
    assert engine.seconds <= 60.0 + held * 1.0 + 1e-9


def test_a_slow_link_that_is_believed_fast_delays_little() -> None:
    """A link 200 x slower than believed costs the loads in flight, then everything is computed."""
    believed = costs_of(1.0, ssd_s=0.25)
    true = scaled(believed, 0.25 / 50.0)
    made = plan(residency_of([SSD] * 16), believed)
    engine = Engine(made, true, believed, learns=True).run()
    assert len(engine.loaded) <= 2
    assert engine.seconds <= 2 * 50.0 + 1e-9


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_wrong_bandwidth_comes_within_a_quarter_of_clairvoyance(factor: float) -> None:
    """A rate believed 4 x too low or too high costs at most a quarter over the best true split."""
    ratios = []
    misses = []
    for n, true, step in one_tier_cases(100, (8, 65), seed=4):
        believed = scaled(true, factor)
        made = plan(residency_of([SSD] * n), believed, step_blocks_max=step)
        engine = Engine(made, true, believed, learns=True).run()
        ratio = engine.seconds / best_split(true, SSD, n, step)
        ratios.append(ratio)
        if ratio > 1.25:
            misses.append((round(ratio, 3), n, step, true.compute, true.ssd))
    report(f"believed rate x{factor} / clairvoyant", ratios)
    assert not misses, f"{len(misses)} of {len(ratios)}: " + "\n".join(map(str, misses[:5]))


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_wrong_compute_cost_is_corrected_by_the_first_steps(factor: float) -> None:
    """A recompute cost believed 4 x wrong costs a quarter and one step: a step cannot be undone."""
    ratios = []
    for n, true, step in one_tier_cases(100, (16, 65), seed=5):
        wrong = ComputeCost(
            true.compute.fixed_s * factor, true.compute.token_s * factor,
            true.compute.attention_s * factor, samples=3,
        )  # fmt: skip
        believed = CostModel(wrong, true.host, true.ssd)
        made = plan(residency_of([SSD] * n), believed, step_blocks_max=step)
        engine = Engine(made, true, believed, learns=True).run()
        best = best_split(true, SSD, n, step)
        ratios.append(engine.seconds / best)
        first = true.compute.seconds(0, step * BLOCK_TOKENS)
        assert engine.seconds <= 1.25 * best + first, (n, step, true)
    report(f"believed compute x{factor} / clairvoyant", ratios)


def test_any_layout_is_at_most_one_step_behind_loading() -> None:
    """Two tiers in any order and exact costs: loading everything is never beaten by over a step."""
    rng = np.random.default_rng(6)
    ratios = []
    for _ in range(150):
        n = int(rng.integers(2, 40))
        edges = np.sort(rng.integers(0, n + 1, 3))
        tiers = [(HOST, SSD)[int(np.searchsorted(edges, b, side="right")) % 2] for b in range(n)]
        block_s, ssd_s = (float(np.exp(rng.uniform(-4, 0))) for _ in range(2))
        host_s = ssd_s * float(rng.uniform(0.02, 0.5))  # a copy link is at least twice as fast
        costs = costs_of(block_s, block_s * 0.02, host_s=host_s, ssd_s=ssd_s)
        made = plan(residency_of(tiers), costs)
        engine = Engine(made, costs).run()
        load = Engine(plan(residency_of(tiers), costs, way="load"), costs).run().seconds
        step = max(
            (costs.compute.seconds(s.tokens.start, len(s.tokens)) for s in engine.steps), default=0
        )
        ratios.append(engine.seconds / made.predicted.planned)
        assert engine.seconds <= load + step + 1e-9, (tiers, costs)
    report("two tiers, measured / predicted", ratios)
    assert np.median(ratios) <= 1.02
    assert max(ratios) <= 1.25, "a shared copy link costs a load or two"


def test_latency_of_each_load_counts() -> None:
    """A link's latency is paid by every load of the FIFO; learning makes it part of the rate."""
    true = costs_of(0.5, ssd_s=0.1)
    slow = CostModel(
        true.compute, true.host, LinkCost(true.ssd.bytes_per_s, latency_s=0.3, samples=9)
    )
    made = plan(residency_of([SSD] * 32), true)
    engine = Engine(made, slow, true, learns=True).run()
    assert engine.seconds <= 1.25 * best_split(slow, SSD, 32)


def test_answers_that_come_together_end_where_single_ones_do() -> None:
    """Told at once or one after the other, the same blocks are in place; one decision is made."""
    costs = costs_of(1.0, host_s=1e-3, ssd_s=1e-3)
    made = plan(residency_of([SSD] * 6), costs)
    state = begin(made, costs, loads_inflight_max=6)
    state, actions = advance_all(state, (Begin(0.0), Asked(0.0)))
    loads = [action.block for action in actions if isinstance(action, StartLoad)]
    single = state
    for block in loads:
        single, _ = advance(single, Loaded(block, 1.0))
    together, _ = advance_all(state, [Loaded(block, 1.0) for block in loads])
    assert loads
    assert together.blocks == single.blocks
    assert together.front == single.front
    assert advance_all(state, ()) == (state, ())


def test_one_illegal_event_among_several_changes_nothing() -> None:
    """All are applied, or none."""
    costs = costs_of(1.0, ssd_s=1.0)
    state = begin(plan(residency_of([SSD] * 2), costs), costs, loads_inflight_max=2)
    with pytest.raises(ValueError, match="cannot be"):
        advance_all(state, (Begin(0.0), Loaded(0, 1.0), Loaded(0, 1.0)))
    assert not state.started
