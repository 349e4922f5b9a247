from __future__ import annotations

import errno
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    POISON,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    Gate,
    assert_sound,
    is_right,
    poisoned_slots,
    prompt_keys,
    put,
    read_slots,
    run_python,
    settle,
)

import kvtier
from kvtier import Loads, SpecMismatch, Tier, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import torch

BLOCKS = 6


class Answers:
    """Takes what loads answer, as it comes."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._count = 0
        self.landed: set[int] = set()
        self.failed: set[int] = set()
        self.counts: Counter[int] = Counter()

    def told(self) -> None:
        """Be told that there is something."""
        with self._told:
            self._count += 1
            self._told.notify_all()

    def take(self, loads: Loads) -> None:
        """Take what is there."""
        for block, landed in loads.take():
            self.counts[block] += 1
            (self.landed if landed else self.failed).add(block)

    def until(self, loads: Loads, done: Callable[[], bool]) -> None:
        """Take answers until ``done``, each time when told."""
        while True:
            with self._told:
                seen = self._count
            self.take(loads)
            if done():
                return
            with self._told:
                assert self._told.wait_for(lambda: self._count != seen, WAIT_S), "nobody was told"  # noqa: B023


class GatedSlots:
    """Slots whose copies wait at a gate."""

    def __init__(self, blocks: int) -> None:
        self.inner = poisoned_slots(blocks)
        self.gate = Gate()

    @property
    def layout(self) -> kvtier.BlockLayout:
        """The layout of each block."""
        return self.inner.layout

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.inner.device

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Wait, then return a block's tensors."""
        self.gate.pass_through()
        return self.inner.parts(block)


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return the file system of the store under test."""
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path, fs: FaultyFileSystem) -> Iterator[kvtier.Store]:
    """Open a store without host memory, so that every load reads."""
    with kvtier.open(tmp_path / "s", SPEC, host_bytes=0, ssd_bytes="8MiB", fs=fs) as opened:
        yield opened
        fs.heal()
        assert_sound(opened)


def stored(store: kvtier.Store) -> kvtier.BlockKeys:
    """Store a prompt, durably."""
    keys = prompt_keys(BLOCKS)
    put(store, keys)
    store.flush()
    return keys


def test_blocks_land_one_by_one(store: kvtier.Store) -> None:
    """What was started lands in its slot, bit for bit, and is answered once; nothing else moves."""
    keys, answers, slots = stored(store), Answers(), poisoned_slots(BLOCKS)
    loads = store.loads(slots, answers.told)
    for block in (4, 1):
        loads.start(block, keys[block], Tier.SSD)
    answers.until(loads, lambda: answers.landed == {4, 1})
    assert answers.counts == {4: 1, 1: 1}
    assert all(is_right(slots, keys, block) for block in (4, 1))
    assert all(read_slots(slots, block) == POISON for block in (0, 2, 3, 5))
    assert not loads.ended
    loads.end()
    assert loads.ended
    counters = store.stats()["counters"]
    assert (counters["loaded_blocks_ssd"], counters["restores"]) == (2, 1)


def test_a_block_that_is_gone_is_an_answer(store: kvtier.Store) -> None:
    """A block that is not stored is answered as not loaded, at once, and its slot stays."""
    answers, slots = Answers(), poisoned_slots(1)
    loads = store.loads(slots, answers.told)
    loads.start(0, prompt_keys(1)[0], Tier.SSD)
    answers.until(loads, lambda: answers.failed == {0})
    assert read_slots(slots, 0) == POISON


def test_a_read_that_fails_is_an_answer(store: kvtier.Store, fs: FaultyFileSystem) -> None:
    """A block whose read fails is answered as not loaded, and counted; the next one may land."""
    keys, answers, slots = stored(store), Answers(), poisoned_slots(BLOCKS)
    loads = store.loads(slots, answers.told)
    fs.fail("read", errno.EMFILE, name=".seg")
    loads.start(2, keys[2], Tier.SSD)
    answers.until(loads, lambda: answers.failed == {2})
    assert read_slots(slots, 2) == POISON
    fs.heal()
    loads.start(2, keys[2], Tier.SSD)
    answers.until(loads, lambda: answers.landed == {2})
    assert store.stats()["counters"]["load_failures"] == 1


def test_a_block_is_pinned_while_it_loads(store: kvtier.Store, fs: FaultyFileSystem) -> None:
    """From start to answer a block is pinned, and no longer."""
    keys, answers = stored(store), Answers()
    gate = fs.hold("read", name=".seg")
    loads = store.loads(poisoned_slots(BLOCKS), answers.told)
    loads.start(3, keys[3], Tier.SSD)
    gate.wait_reached()
    assert store.stats()["pins"] > 0
    gate.open()
    answers.until(loads, lambda: answers.landed == {3})
    settle(store)


def test_a_load_is_cancelled_before_its_copy(store: kvtier.Store, fs: FaultyFileSystem) -> None:
    """A load cancelled while it is read is answered at once, and never writes to its slot."""
    keys, answers, slots = stored(store), Answers(), poisoned_slots(BLOCKS)
    gate = fs.hold("read", name=".seg")
    loads = store.loads(slots, answers.told)
    loads.start(5, keys[5], Tier.SSD)
    gate.wait_reached()
    loads.cancel(5)
    loads.cancel(5)
    loads.cancel(0)  # of which there is none
    answers.until(loads, lambda: answers.failed == {5})
    loads.end()
    assert loads.ended
    gate.open()
    settle(store)
    assert read_slots(slots, 5) == POISON
    assert answers.counts == {5: 1}


def test_a_copy_that_began_runs_to_its_end(store: kvtier.Store) -> None:
    """After ``end`` a copy under way still lands; only then it has ended, and nothing starts."""
    keys, answers, slots = stored(store), Answers(), GatedSlots(BLOCKS)
    loads = store.loads(slots, answers.told)
    loads.start(0, keys[0], Tier.SSD)
    slots.gate.wait_reached()
    loads.end()
    loads.end()
    assert not loads.ended
    loads.start(1, keys[1], Tier.SSD)
    answers.until(loads, lambda: answers.failed == {1})
    slots.gate.open()
    answers.until(loads, lambda: answers.landed == {0})
    assert loads.ended
    assert is_right(slots.inner, keys, 0)
    assert read_slots(slots.inner, 1) == POISON
    assert store.stats()["counters"]["restores"] == 1


def test_slots_that_raise(store: kvtier.Store) -> None:
    """What the engine's slots raise is kept, and its block answered as not loaded."""

    class Broken(GatedSlots):
        def parts(self, block: int) -> Sequence[torch.Tensor]:
            raise ZeroDivisionError(f"block {block}")

    keys, answers = stored(store), Answers()
    loads = store.loads(Broken(BLOCKS), answers.told)
    loads.start(0, keys[0], Tier.SSD)
    answers.until(loads, lambda: answers.failed == {0})
    assert isinstance(loads.error, ZeroDivisionError)


def test_a_block_is_loaded_once_at_a_time(store: kvtier.Store, fs: FaultyFileSystem) -> None:
    """A second start of a block under way is refused, and changes nothing."""
    keys, answers = stored(store), Answers()
    gate = fs.hold("read", name=".seg")
    loads = store.loads(poisoned_slots(BLOCKS), answers.told)
    loads.start(0, keys[0], Tier.SSD)
    with pytest.raises(ValueError, match="block 0"):
        loads.start(0, keys[0], Tier.SSD)
    gate.open()
    answers.until(loads, lambda: answers.landed == {0})
    assert answers.counts == {0: 1}


def test_slots_of_another_layout(store: kvtier.Store) -> None:
    """Slots that do not hold the store's blocks are refused."""
    other = kvtier.KVSpec(
        model="m", weights="w", dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=16
    )
    with pytest.raises(SpecMismatch):
        store.loads(poisoned_slots(1, other))


def test_a_store_that_closes_answers(tmp_path: Path) -> None:
    """Every load is answered by the time that its store is closed."""
    fs, answers = FaultyFileSystem(), Answers()
    with kvtier.open(tmp_path / "s", SPEC, host_bytes=0, ssd_bytes="8MiB", fs=fs) as store:
        keys = stored(store)
        gate = fs.hold("read", name=".seg")
        loads = store.loads(poisoned_slots(BLOCKS), answers.told)
        for block in range(BLOCKS):
            loads.start(block, keys[block], Tier.SSD)
        gate.open()
    answers.take(loads)
    assert answers.counts == dict.fromkeys(range(BLOCKS), 1)
    loads.start(0, keys[0], Tier.SSD)
    answers.take(loads)
    assert answers.counts[0] == 2
    loads.end()
    assert loads.ended


def test_a_reader_loads(tmp_path: Path) -> None:
    """A reader's loads come from the same records."""
    with kvtier.open(tmp_path / "s", SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
        keys = stored(store)
        answers, slots = Answers(), poisoned_slots(BLOCKS)
        with kvtier.open_reader(tmp_path / "s", SPEC, host_bytes="64KiB") as reader:
            loads = reader.loads(slots, answers.told)
            for block in range(BLOCKS):
                loads.start(block, keys[block], Tier.SSD)
            answers.until(loads, lambda: len(answers.landed) == BLOCKS)
            loads.end()
    assert all(is_right(slots, keys, block) for block in range(BLOCKS))


def test_a_load_is_a_use(tmp_path: Path) -> None:
    """What was loaded lately outlives what was not, as after a restore."""
    with kvtier.open(
        tmp_path / "s", SPEC, host_bytes=3 * 8192, ssd_bytes=0, policy="lru", staging_blocks_max=5
    ) as store:
        keys, answers = prompt_keys(3), Answers()
        put(store, keys)
        loads = store.loads(poisoned_slots(3), answers.told)
        loads.start(2, keys[2], Tier.HOST)
        answers.until(loads, lambda: answers.landed == {2})
        loads.end()
        put(store, prompt_keys(2, seed=9))
        assert store.lookup(keys).tiers[2] is Tier.HOST


def test_a_trace_tells_the_restores_apart(tmp_path: Path) -> None:
    """Each restore's loads carry a number of their own in the trace."""
    trace = Trace()
    with kvtier.open(tmp_path / "s", SPEC, host_bytes=0, ssd_bytes="8MiB", trace=trace) as store:
        keys = stored(store)
        for block in (3, 4):
            answers = Answers()
            loads = store.loads(poisoned_slots(BLOCKS), answers.told)
            loads.start(block, keys[block], Tier.SSD)
            answers.until(loads, lambda: bool(answers.landed))  # noqa: B023
            loads.end()
    copies = [event for event in trace.events if event.what == "copy"]
    assert [event.start for event in copies] == [3, 4]
    assert len({event.session for event in copies} - {0}) == 2


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    """Loads are their process's: a forked child gets an error and not a hang."""
    run_python(
        "import os, sys, kvtier\n"
        "from support import SPEC, poisoned_slots, prompt_keys, put\n"
        "with kvtier.open(sys.argv[1], SPEC, host_bytes='1MiB', ssd_bytes=0) as store:\n"
        "    keys = prompt_keys(1); put(store, keys)\n"
        "    loads = store.loads(poisoned_slots(1))\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        for call in (lambda: loads.start(0, keys[0], 'host'), loads.end):\n"
        "            try: call()\n"
        "            except kvtier.StoreClosed: continue\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n",
        str(tmp_path / "s"),
    )


def test_steps_measured_elsewhere_are_kept(tmp_path: Path) -> None:
    """Steps that the engine measured teach the costs, which the next process starts with."""
    with kvtier.open(tmp_path / "s", SPEC, host_bytes="1MiB", ssd_bytes=0) as store:
        for step in range(8):
            store.measured(step * 256, 256, 0.5)
        costs = store.costs
        assert costs.compute.samples == 8
        assert 0.45 < costs.compute.seconds(1024, 256) < 0.55
        assert sum(store.stats()["histograms"]["step_seconds"]["counts"]) == 8
    with kvtier.open(tmp_path / "s", SPEC, host_bytes="1MiB", ssd_bytes=0) as store:
        assert store.costs.compute == costs.compute


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["start", "cancel", "take", "pass"]), st.integers(0, BLOCKS)),
    max_size=40,
)


@settings(max_examples=20, deadline=None)
@given(actions=ACTIONS, held=st.booleans(), data=st.data())
def test_every_load_is_answered_once(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[Any],
    *,
    held: bool,
    data: st.DataObject,
) -> None:
    """Whatever is started, cancelled and ended when: one answer each, and what it says is so."""
    path = tmp_path_factory.mktemp("loads")
    fs, answers, slots = FaultyFileSystem(), Answers(), poisoned_slots(BLOCKS + 1)
    keys = prompt_keys(BLOCKS + 1)  # the last one is not stored
    with kvtier.open(path / "s", SPEC, host_bytes=3 * 8192, ssd_bytes="8MiB", fs=fs) as store:
        put(store, keys, blocks=range(BLOCKS))
        store.flush()
        gate = fs.hold("read", name=".seg") if held else None
        loads = store.loads(slots, answers.told)
        started: Counter[int] = Counter()
        for what, block in actions:
            open_now = started[block] > answers.counts[block]
            if what == "start" and not open_now and block not in answers.landed:
                loads.start(block, keys[block], data.draw(st.sampled_from([Tier.HOST, Tier.SSD])))
                started[block] += 1
            elif what == "cancel":
                loads.cancel(block)
            elif what == "take":
                answers.take(loads)
            elif gate is not None:
                gate.open()
        loads.end()
        if gate is not None:
            gate.open()
        answers.until(loads, lambda: loads.ended)
        answers.take(loads)
        assert +started == +answers.counts
        settle(store)
        for block in range(BLOCKS + 1):
            if block in answers.landed:
                assert is_right(slots, keys, block)
            else:
                assert read_slots(slots, block) == POISON
