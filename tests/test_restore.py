from __future__ import annotations

import errno
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import (
    HOST_SLOT_BYTES,
    POISON,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    Gate,
    HeldSlots,
    bring_back,
    eventually,
    expected,
    fill_slots,
    flip,
    in_thread,
    is_right,
    poisoned_slots,
    prompt_keys,
    put,
    read_slots,
    segment_files,
    settle,
    tiny_budget,
    variant,
)

import kvtier
from kvtier import PENDING, LinkThrottle, SpecMismatch, Step, StoreFailed, Tier

Open = Any
BLOCK_BYTES = SPEC.block_layout.block_bytes


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a file system that fails on demand."""
    return FaultyFileSystem()


@pytest.fixture
def keys() -> kvtier.BlockKeys:
    """Return the keys of a prompt of six blocks."""
    return prompt_keys(6)


@pytest.fixture
def ssd(open_store: Open, fs: FaultyFileSystem, keys: kvtier.BlockKeys) -> kvtier.Store:
    """Return a store that holds the six blocks on its SSD alone."""
    store = open_store(host_bytes=0, fs=fs)
    put(store, keys)
    store.flush()
    return store


def load_plan(store: kvtier.Store, keys: kvtier.BlockKeys) -> kvtier.RestorePlan:
    """Plan to load what is stored."""
    return store.plan(store.lookup(keys), way="load")


def finish(session: kvtier.RestoreSession, slots: Any, keys: kvtier.BlockKeys) -> list[int]:
    """Recompute whatever is handed out; returns those blocks."""
    done: list[int] = []
    while step := session.next_step(WAIT_S):
        fill_slots(slots, keys, step.blocks)
        done += step.blocks
        session.computed(step)
    return done


def all_right(slots: Any, keys: kvtier.BlockKeys) -> bool:
    """Whether every block of a prompt is in place."""
    return all(is_right(slots, keys, block) for block in range(len(keys)))


# -- the three ways


def test_everything_is_loaded(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """A plan that loads everything hands out nothing."""
    back = bring_back(ssd, keys)
    assert back.recomputed == []
    assert back.report.loaded == 6
    assert back.report.loaded_bytes == 6 * BLOCK_BYTES


def test_everything_is_recomputed(ssd: kvtier.Store, fs: Any, keys: kvtier.BlockKeys) -> None:
    """A plan that recomputes everything reads nothing."""
    before = fs.reads()
    assert bring_back(ssd, keys, way="recompute").recomputed == list(range(6))
    assert fs.reads() == before


def test_head_is_recomputed_while_the_tail_loads(open_store: Open, fs: FaultyFileSystem) -> None:
    """With compute known and a link that is held up, the head is computed meanwhile."""
    keys = prompt_keys(8)
    store = open_store(host_bytes=0, fs=fs, links={Tier.SSD: LinkThrottle(BLOCK_BYTES / 0.01)})
    put(store, keys)
    store.flush()
    for start in range(4):
        store._profiler.computed(start * 16, 16, 0.01)
    store._profiler.loaded(Tier.SSD, BLOCK_BYTES, 0.01)
    plan = store.plan(store.lookup(keys))
    assert plan.adaptive
    assert plan.recompute
    assert plan.load
    assert max(plan.recompute) < min(plan.load)
    slots = poisoned_slots(8)
    with store.restore(plan, into=slots) as session:
        while step := session.next_step(WAIT_S):
            fill_slots(slots, keys, step.blocks)
            # However slow this machine is, a load ends while the first step is computed.
            eventually(lambda: session.report.loaded > 0)
            session.computed(step, seconds=0.01)
    assert session.report.loaded > 0
    assert session.report.recomputed > 0
    assert session.report.failed == 0
    assert all(is_right(slots, keys, block) for block in range(8))


def test_resident_blocks_are_not_touched(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """What the engine holds already is neither loaded nor handed out nor written."""
    plan = ssd.plan(ssd.lookup(keys), resident=2, way="load")
    slots = poisoned_slots(6)
    with ssd.restore(plan, into=slots) as session:
        assert session.next_step(WAIT_S) is None
    assert [read_slots(slots, block) == POISON for block in range(6)] == [True] * 2 + [False] * 4
    assert session.report.loaded == 4


def test_an_empty_prompt(ssd: kvtier.Store) -> None:
    """A prompt without a full block is in place at once."""
    keys = prompt_keys(0)
    with ssd.restore(ssd.plan(ssd.lookup(keys)), into=poisoned_slots(0)) as session:
        assert session.poll_step() is None
        assert session.next_step() is None


def test_all_resident(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """A plan of nothing is done at once."""
    plan = ssd.plan(ssd.lookup(keys), resident=6)
    with ssd.restore(plan, into=poisoned_slots(6)) as session:
        assert session.next_step() is None
    assert session.report.measured_s is not None


def test_steps_of_several_blocks(ssd: kvtier.Store) -> None:
    """A step is at most ``step_blocks_max`` blocks, once the cost of compute is known."""
    for start in range(4):
        ssd._profiler.computed(start * 16, 16, 0.001)
    keys = prompt_keys(7, seed=3)
    plan = ssd.plan(ssd.lookup(keys), step_blocks_max=3, way="recompute")
    sizes = []
    slots = poisoned_slots(7)
    with ssd.restore(plan, into=slots) as session:
        while step := session.next_step(WAIT_S):
            fill_slots(slots, keys, step.blocks)
            sizes.append(len(step.blocks))
            session.computed(step)
    assert sizes == [3, 3, 1]
    assert all_right(slots, keys)


def test_the_first_step_of_an_unknown_engine_is_one_block(open_store: Open) -> None:
    """Nothing is known about compute yet: the first step is small, whatever the limit."""
    store = open_store()
    keys = prompt_keys(5)
    plan = store.plan(store.lookup(keys), step_blocks_max=4)
    with store.restore(plan, into=poisoned_slots(5)) as session:
        assert session.next_step(WAIT_S) == Step(0, 1, SPEC.block_tokens)


def test_a_step_builds_on_what_is_in_place(ssd: kvtier.Store, fs: FaultyFileSystem) -> None:
    """A block is handed out only once every block before it is in its slot."""
    keys = prompt_keys(6)
    longer = keys.extend([7] * 2 * SPEC.block_tokens)
    slots = poisoned_slots(8)
    with ssd.restore(load_plan(ssd, longer), into=slots) as session:
        while step := session.next_step(WAIT_S):
            assert all(is_right(slots, longer, block) for block in range(step.start))
            fill_slots(slots, longer, step.blocks)
            session.computed(step)
    assert all_right(slots, longer)


# -- loads that fail


@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("way", ["load", "best"])
def test_a_failed_load_is_handed_out(open_store: Open, block: int, way: str) -> None:
    """Whichever block is damaged, exactly it is recomputed and the restore completes."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    row = store._catalog.find(store._catalog.id(block))
    where = store._catalog.location(row, Tier.SSD)
    flip(segment_files(store.path)[0], 4096 + where.slot * where.slot_bytes + 4096 + 17)
    number = keys.hashes.index(store._catalog.id(row).hash)
    back = bring_back(store, keys, way=way)
    assert back.recomputed == [number]
    assert back.report.failed == 1


def test_blocks_evicted_between_plan_and_restore(open_store: Open) -> None:
    """A plan whose blocks are gone by then recomputes them."""
    store = open_store(host_bytes=0, **tiny_budget(12))
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    plan = load_plan(store, keys)
    assert plan.load == tuple(sorted(plan.load, reverse=True))
    for seed in range(1, 5):
        put(store, prompt_keys(6, seed))
        store.flush()
    assert bring_back(store, keys, plan=plan).recomputed == list(range(6))


def test_host_copies_evicted_between_plan_and_restore(open_store: Open) -> None:
    """A plan that counted on host memory is loaded from the SSD when those copies are gone."""
    store = open_store(host_bytes=6 * HOST_SLOT_BYTES)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    plan = load_plan(store, keys)
    assert set(plan.tiers) == {Tier.HOST}
    for seed in range(1, 4):
        put(store, prompt_keys(6, seed))
        store.flush()
    assert Tier.HOST not in store.lookup(keys).tiers
    assert bring_back(store, keys, plan=plan).loaded == 6


def test_a_plan_is_carried_out_later_and_elsewhere(open_store: Open, store_path: str) -> None:
    """A plan that went through JSON, and a restart, restores the same bytes."""
    store = open_store()
    keys = prompt_keys(5)
    put(store, keys)
    store.flush()
    text = load_plan(store, keys).to_json()
    store.close()
    store = open_store()
    bring_back(store, keys, plan=kvtier.RestorePlan.from_json(text))


def test_a_plan_of_another_spec(open_store: Open) -> None:
    """A plan made for another spec is refused, however alike."""
    store = open_store()
    other = variant(weights="sha256:1")
    foreign = kvtier.BlockKeys.of(other, [1] * 32)
    plan = kvtier.plan(kvtier.Residency(foreign, (None, None), BLOCK_BYTES), kvtier.CostModel())
    with pytest.raises(SpecMismatch):
        store.restore(plan, into=poisoned_slots(2))


def test_slots_shorter_than_the_plan(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """Slots that end before the plan does are a SpecMismatch; the store goes on."""
    session = ssd.restore(load_plan(ssd, keys), into=poisoned_slots(4))
    with session, pytest.raises(SpecMismatch, match="beyond"):
        finish(session, poisoned_slots(6), keys)
    settle(ssd)
    assert bring_back(ssd, keys).loaded == 6


def test_slots_that_raise(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """What the engine's slots raise comes out of the session, and the store goes on."""

    class Broken:
        layout = SPEC.block_layout
        device = torch.device("cpu")

        def parts(self, block: int) -> Any:
            raise RuntimeError("engine bug")

    session = ssd.restore(load_plan(ssd, keys), into=Broken())
    with session, pytest.raises(RuntimeError, match="engine bug"):
        session.next_step(WAIT_S)
    settle(ssd)
    assert bring_back(ssd, keys).loaded == 6


# -- time


def test_a_timeout_hands_out_the_rest(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys
) -> None:
    """When the disk hangs, the blocks are handed out, and no load writes to them afterwards."""
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(6)
    handed = []
    with ssd.restore(load_plan(ssd, keys), into=slots) as session:
        gate.wait_reached()
        while step := session.next_step(0.01):
            handed += step.blocks
            session.computed(step)
    assert handed == list(range(6))
    gate.open()
    ssd._prefetcher.close()  # returns when every read and copy that began has ended
    assert all(read_slots(slots, block) == POISON for block in range(6))
    assert session.report.recomputed == 6


def test_a_copy_that_has_begun_is_waited_for(
    ssd: kvtier.Store, keys: kvtier.BlockKeys, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that is being copied into its slot is not handed out, whatever the timeout."""
    gate = Gate()
    inner = poisoned_slots(6)
    expired = threading.Event()

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            expired.set()

    handler = Notice()
    logging.getLogger("kvtier.restore").addHandler(handler)
    try:
        with ssd.restore(load_plan(ssd, keys), into=HeldSlots(inner, gate)) as session:
            gate.wait_reached()
            asking = in_thread(lambda: finish_soon(session, inner, keys))
            assert expired.wait(WAIT_S)
            assert all(read_slots(inner, block) == POISON for block in session_loading(session))
            gate.open()
            recomputed = asking()
    finally:
        logging.getLogger("kvtier.restore").removeHandler(handler)
    assert all_right(inner, keys)
    assert session.report.loaded == 6 - len(recomputed) >= 1


def test_a_copy_is_waited_for_however_often_the_time_was_up(
    ssd: kvtier.Store, keys: kvtier.BlockKeys
) -> None:
    """Asking again without patience is no reason to call a copy under way a failure."""
    gate = Gate()
    slots = poisoned_slots(6)
    with ssd.restore(load_plan(ssd, keys), into=HeldSlots(slots, gate)) as session:
        gate.wait_reached()
        asking = in_thread(lambda: finish_soon(session, slots, keys, 0.0))
        eventually(lambda: session.report.recomputed > 0 and len(session_loading(session)) > 0)
        gate.open()
        asking()
    assert all_right(slots, keys)


def finish_soon(
    session: Any, slots: Any, keys: kvtier.BlockKeys, timeout: float = 0.01
) -> list[int]:
    """Recompute whatever is handed out after almost no time."""
    done: list[int] = []
    while step := session.next_step(timeout):
        fill_slots(slots, keys, step.blocks)
        done += step.blocks
        session.computed(step)
    return done


def session_loading(session: Any) -> list[int]:
    """Return the blocks that a load may still write to."""
    with session._changed:
        return list(session._tickets)


def test_a_copy_that_never_ends(
    ssd: kvtier.Store, keys: kvtier.BlockKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine's slots hang, the caller gets StoreFailed rather than a slot still in use."""
    monkeypatch.setattr("kvtier.restore.COPY_S_MAX", 0.02)
    gate = Gate()
    session = ssd.restore(load_plan(ssd, keys), into=HeldSlots(poisoned_slots(6), gate))
    session.__enter__()
    try:
        gate.wait_reached()
        with pytest.raises(StoreFailed, match="did not end"):
            finish_soon(session, poisoned_slots(6), keys)
        with pytest.raises(StoreFailed, match="did not end"):
            session.__exit__(None, None, None)
    finally:
        gate.open()


class HeldBlocks:
    """Slots whose ``parts`` waits, for each block, at a gate of its own."""

    def __init__(self, blocks: int) -> None:
        self.slots = poisoned_slots(blocks)
        self.gates = [Gate() for _ in range(blocks)]
        self.layout, self.device = self.slots.layout, self.slots.device

    def parts(self, block: int) -> Any:
        """Wait, then return the block's tensors."""
        self.gates[block].pass_through()
        return self.slots.parts(block)


class CountedClock:
    """A clock that says when it has been looked at so often from now on."""

    def __init__(self) -> None:
        self._left = 0
        self.looked = threading.Event()

    def expect(self, looks: int) -> None:
        """Begin to count."""
        self.looked.clear()
        self._left = looks

    def __call__(self) -> float:
        """Return the time."""
        self._left -= 1
        if self._left == 0:
            self.looked.set()
        return time.monotonic()


def test_a_copy_may_take_its_time_after_every_timeout(open_store: Open) -> None:
    """A later call whose timeout has passed waits for a copy as long as the first one does."""
    clock = CountedClock()
    store, keys, slots = open_store(clock=clock), prompt_keys(4), HeldBlocks(4)
    for block in (1, 3):
        put(store, keys, range(block, block + 1))

    def compute(step: Any) -> int:
        fill_slots(slots.slots, keys, step.blocks)
        session.computed(step)
        return step.start

    with store.restore(load_plan(store, keys), into=slots) as session:
        for block in (1, 3):
            slots.gates[block].wait_reached()
        assert compute(session.next_step(0)) == 0
        asking = in_thread(lambda: session.next_step(0))
        with session._changed:
            assert session._changed.wait_for(lambda: session._state.expired, WAIT_S)
        slots.gates[1].open()
        assert compute(asking()) == 2
        clock.expect(looks=3)  # for the deadline, the question, and how long to wait
        asking = in_thread(lambda: session.next_step(0))
        assert clock.looked.wait(WAIT_S)
        slots.gates[3].open()
        assert asking() is None
    assert all_right(slots.slots, keys)


def test_poll_never_waits(ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys) -> None:
    """While loads are held, polling says PENDING; then None."""
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(6)
    with ssd.restore(load_plan(ssd, keys), into=slots) as session:
        gate.wait_reached()
        assert [session.poll_step() for _ in range(3)] == [PENDING] * 3
        gate.open()
        assert session.next_step(WAIT_S) is None
        assert session.poll_step() is None
    assert all_right(slots, keys)


def test_poll_hands_out_steps(open_store: Open) -> None:
    """Polling hands out the same steps as waiting."""
    store = open_store()
    keys = prompt_keys(3)
    slots = poisoned_slots(3)
    with store.restore(store.plan(store.lookup(keys)), into=slots) as session:
        seen = []
        while isinstance(step := session.poll_step(), Step):
            fill_slots(slots, keys, step.blocks)
            session.computed(step)
            seen.append(step.start)
        assert step is None
    assert seen == [0, 1, 2]


def test_a_step_that_comes_between_two_polls(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys
) -> None:
    """A load that fails after PENDING is the next poll's step; asking again is not an error."""
    gate = fs.hold("read", name=".seg")
    fs.fail("read", name=".seg")
    slots = poisoned_slots(6)
    with ssd.restore(load_plan(ssd, keys), into=slots) as session:
        gate.wait_reached()
        assert session.poll_step() == PENDING
        gate.open()
        with session._changed:
            assert session._changed.wait_for(lambda: session._state.step is not None, WAIT_S)
        step = session.poll_step()
        assert isinstance(step, Step)
        fill_slots(slots, keys, step.blocks)
        session.computed(step)
        finish(session, slots, keys)
    assert all_right(slots, keys)


# -- leaving early


def leave(session: Any, error: BaseException) -> None:
    """Enter a session and leave it by an exception."""
    with session:
        raise error


@pytest.mark.parametrize("error", [KeyError("engine"), KeyboardInterrupt()])
def test_leaving_early_leaves_nothing_writing(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys, error: BaseException
) -> None:
    """Out of the scope, however it was left, no load writes any more, and no new one starts."""
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(6)
    before = fs.reads()
    session = ssd.restore(load_plan(ssd, keys), into=slots)
    with pytest.raises(type(error)):
        leave(session, error)  # returns although the reads are still held
    gate.open()
    ssd.flush()
    ssd._prefetcher.close()
    assert all(read_slots(slots, block) == POISON for block in range(6))
    assert fs.reads() - before <= ssd.config.loads_inflight_max


def test_leaving_waits_for_a_copy_under_way(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """The scope ends only after a copy into the slots that has begun."""
    gate = Gate()
    slots = poisoned_slots(6)
    session = ssd.restore(load_plan(ssd, keys), into=HeldSlots(slots, gate))
    session.__enter__()
    gate.wait_reached()
    leaving = in_thread(lambda: session.__exit__(None, None, None))
    gate.open()
    leaving()
    after = [read_slots(slots, block) for block in range(6)]
    assert bring_back(ssd, keys).loaded == 6
    assert [read_slots(slots, block) for block in range(6)] == after
    for block in range(6):
        assert after[block] in (POISON, expected(keys, block))


def test_a_session_pins_only_while_open(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """Blocks of a plan are pinned inside the scope and free after it."""
    with ssd.restore(load_plan(ssd, keys), into=poisoned_slots(6)) as session:
        assert ssd.stats()["pins"] >= 6
        session.next_step(WAIT_S)
    settle(ssd)


def test_pinned_by_a_session_under_pressure(open_store: Open, fs: FaultyFileSystem) -> None:
    """Blocks of a plan are not evicted while its session is open, however much is put."""
    store = open_store(host_bytes=0, fs=fs, **tiny_budget(12))
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(6)
    with store.restore(load_plan(store, keys), into=slots) as session:
        gate.wait_reached()
        for seed in range(1, 6):
            put(store, prompt_keys(6, seed))
            store.flush()
        gate.open()
        assert session.next_step(WAIT_S) is None
    assert all_right(slots, keys)


# -- the protocol


def test_computed_needs_the_step_that_is_out(open_store: Open) -> None:
    """Another step, a step twice, or asking with a step out is refused and changes nothing."""
    store = open_store()
    keys = prompt_keys(3)
    with store.restore(store.plan(store.lookup(keys)), into=poisoned_slots(3)) as session:
        with pytest.raises(ValueError, match="not the step"):
            session.computed(Step(0, 1, 16))
        step = session.next_step(WAIT_S)
        for wrong in (replace(step, start=1), replace(step, stop=3)):
            with pytest.raises(ValueError, match="not the step"):
                session.computed(wrong)
        for ask in (session.next_step, session.poll_step):
            with pytest.raises(ValueError, match="computed"):
                ask()
        session.computed(step)
        with pytest.raises(ValueError, match="not the step"):
            session.computed(step)
        assert session.next_step(WAIT_S) == Step(1, 2, 16)


def test_given_seconds_teach_the_model(open_store: Open) -> None:
    """``seconds`` overrides the session's own clock."""
    store = open_store()
    keys = prompt_keys(4)
    with store.restore(store.plan(store.lookup(keys)), into=poisoned_slots(4)) as session:
        while step := session.next_step(WAIT_S):
            session.computed(step, seconds=3.0)
    assert store.costs.compute.samples == 4
    assert 2.5 < store.costs.compute.seconds(0, 16) < 3.5


def test_the_report_adds_up(ssd: kvtier.Store) -> None:
    """Loaded, recomputed and resident blocks are all there are; time is known at the end only."""
    keys = prompt_keys(6).extend([3] * 2 * SPEC.block_tokens)
    plan = ssd.plan(ssd.lookup(keys), resident=1, way="load")
    slots = poisoned_slots(8)
    with ssd.restore(plan, into=slots) as session:
        assert session.report.measured_s is None
        assert finish(session, slots, keys) == [6, 7]
    report = session.report
    assert (report.loaded, report.recomputed, report.failed) == (5, 2, 0)
    assert report.loaded_bytes == 5 * BLOCK_BYTES
    assert report.predicted_s == plan.predicted.planned
    assert report.measured_s is not None
    assert report.measured_s > 0


def test_a_session_is_a_scope(open_store: Open) -> None:
    """Asking for a step outside the scope is an error at once, not a wait."""
    store = open_store()
    keys = prompt_keys(3)
    session = store.restore(store.plan(store.lookup(keys)), into=poisoned_slots(3))
    with pytest.raises((ValueError, RuntimeError)):
        in_thread(session.next_step)()


# -- sharing


def test_two_sessions_read_a_block_once(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys
) -> None:
    """However many restore the same blocks at once, each is read once."""
    before = fs.reads()
    gate = fs.hold("read", name=".seg")
    all_slots = [poisoned_slots(6) for _ in range(3)]
    plan = load_plan(ssd, keys)
    one_block = replace(plan, hashes=plan.hashes[:1], tiers=plan.tiers[:1], load=(0,))
    sessions = [ssd.restore(one_block, into=slots) for slots in all_slots]
    for session in sessions:
        session.__enter__()
    gate.wait_reached()
    # Everything that the loop was asked for has been taken up once it answers this.
    assert ssd.prefetch(prompt_keys(1, seed=50)).result(WAIT_S) == 0
    gate.open()
    for session, slots in zip(sessions, all_slots, strict=True):
        assert session.next_step(WAIT_S) is None
        session.__exit__(None, None, None)
        assert is_right(slots, keys, 0)
    assert fs.reads() - before == 1


def test_others_compute_while_one_load_is_shared(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys
) -> None:
    """A cancelled waiter does not take the shared read away from the others."""
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(6)
    given_up = ssd.restore(load_plan(ssd, keys), into=poisoned_slots(6))
    given_up.__enter__()
    gate.wait_reached()
    with ssd.restore(load_plan(ssd, keys), into=slots) as session:
        given_up.__exit__(None, None, None)
        gate.open()
        assert session.next_step(WAIT_S) is None
    assert all_right(slots, keys)


def test_many_sessions_at_once(open_store: Open) -> None:
    """Sessions on many threads over the same prompts all get right bytes."""
    store = open_store(host_bytes=4 * HOST_SLOT_BYTES)
    prompts = [prompt_keys(6, seed) for seed in range(3)]
    for one in prompts:
        put(store, one)
    store.flush()

    def work(number: int) -> int:
        return sum(bring_back(store, prompts[(number + n) % 3]).loaded for n in range(4))

    threads = [in_thread(lambda number=number: work(number)) for number in range(6)]
    assert all(0 < thread() <= 24 for thread in threads)


def test_prefetched_blocks_are_not_read_again(open_store: Open, fs: FaultyFileSystem) -> None:
    """After a prefetch a restore takes everything from host memory."""
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(6)
    put(store, keys)
    store.close()
    store = open_store(fs=fs)
    assert store.prefetch(keys).result(WAIT_S) == 6
    assert set(store.lookup(keys).tiers) == {Tier.HOST}
    before = fs.reads()
    assert bring_back(store, keys).loaded == 6
    assert fs.reads() == before
    assert store.stats()["counters"]["loaded_blocks_host"] == 6


# -- links and calibration


def test_a_throttled_link_delivers_the_same_bytes(open_store: Open) -> None:
    """A slow link changes when blocks arrive, not what they are."""
    links = {"ssd": LinkThrottle(BLOCK_BYTES / 0.001, 0.0005), "host": LinkThrottle(1e9)}
    store = open_store(links=links)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    assert bring_back(store, keys).loaded == 6
    store.close()
    store = open_store(links=links)
    assert bring_back(store, keys).loaded == 6
    assert store.costs.ssd.samples == 6


def test_leaving_while_a_slow_link_delivers(open_store: Open) -> None:
    """Leaving the scope does not wait for a link that would take for ever."""
    store = open_store(host_bytes=0, links={Tier.SSD: LinkThrottle(BLOCK_BYTES / 0.2)})
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    slots = poisoned_slots(6)
    with store.restore(load_plan(store, keys), into=slots):
        pass
    assert all(read_slots(slots, block) == POISON for block in range(6))


def test_calibrate_learns_once(open_store: Open) -> None:
    """Calibration measures compute and the tiers that hold blocks; a second one does nothing."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(4))
    store.flush()
    steps = []
    store.calibrate(steps.append)
    assert [step.start for step in steps] == [0, 0, 1]
    assert store.costs.compute.known
    assert store.costs.ssd.samples == 2
    assert store.costs.host.samples == 2  # what the SSD reads is copied on
    learned = store.costs
    store.calibrate(steps.append)
    assert len(steps) == 3
    assert store.costs == learned


def test_calibrate_an_empty_store(open_store: Open) -> None:
    """Without a block there is only compute to measure."""
    store = open_store()
    store.calibrate(lambda step: None)
    assert store.costs.compute.known
    assert store.costs.ssd.samples == store.costs.host.samples == 0


def test_calibrate_with_a_failing_disk(open_store: Open, fs: FaultyFileSystem) -> None:
    """A disk that cannot be read teaches nothing and raises nothing."""
    store = open_store(host_bytes=0, fs=fs)
    put(store, prompt_keys(4))
    store.flush()
    fs.fail("read", errno.EIO, name=".seg")
    store.calibrate(lambda step: None)
    assert store.costs.ssd.samples == 0


def test_a_prefill_that_raises(open_store: Open) -> None:
    """What the caller's prefill raises comes out of calibrate, and the store goes on."""
    store = open_store()

    def broken(step: Step) -> None:
        raise KeyError("model")

    with pytest.raises(KeyError):
        store.calibrate(broken)
    put(store, prompt_keys(2))
    assert bring_back(store, prompt_keys(2)).loaded == 2
