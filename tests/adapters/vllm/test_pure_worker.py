from __future__ import annotations

import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import WAIT_S, FaultyFileSystem, prompt, segment_files

import kvtier
from kvtier import BlockKeys, KVSpec, Tier
from kvtier_vllm.messages import Hint, Load, Measured, Orders, RankReport, Save
from kvtier_vllm.slots import EnginePages
from kvtier_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

LAYERS, PAGES, PER_BLOCK, PAGE_TOKENS, HEADS, WIDTH = 2, 40, 4, 4, 2, 8
BLOCKS = 4
LOADED = range(PER_BLOCK * BLOCKS, 2 * PER_BLOCK * BLOCKS)
"""Pages that blocks are loaded into; those before it are where they were computed."""


def spec_of(weights: int = 0, rank: int = 0) -> KVSpec:
    """Return a rank's spec."""
    return KVSpec(
        model="m", weights=f"w{weights}", dtype="float32", layers=LAYERS,
        parts=(((HEADS, WIDTH),),) * LAYERS, layout=f"test/{PAGE_TOKENS}", tp_rank=rank, tp_size=2,
        block_tokens=PER_BLOCK * PAGE_TOKENS,
    )  # fmt: skip


@dataclass
class SlowLook:
    """A look that a GPU has not answered yet, or has."""

    changed_weights: bool
    answered: threading.Event

    @property
    def ready(self) -> bool:
        """Whether the answer is there."""
        return self.answered.is_set()

    @property
    def changed(self) -> bool:
        """Wait for the answer."""
        assert self.answered.wait(WAIT_S)
        return self.changed_weights


@dataclass
class FakeEngine:
    """An engine on a CPU with weights that are a number."""

    rank: int = 0
    weights: int = 0
    known: int = 0
    answered: threading.Event = field(default_factory=threading.Event)
    caches: dict[str, torch.Tensor] = field(
        default_factory=lambda: {
            f"layer.{layer}": torch.zeros(PAGES, HEADS, PAGE_TOKENS, WIDTH)
            for layer in range(LAYERS)
        }
    )

    def __post_init__(self) -> None:
        self.answered.set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the KV tensors."""
        assert caches is self.caches

    def spec(self) -> KVSpec:
        """Return the spec as the weights are now."""
        self.known = self.weights
        return spec_of(self.weights, self.rank)

    def pages(self) -> EnginePages:
        """Return the pages."""
        return EnginePages(spec_of(self.weights).block_layout, self.caches, PAGES)

    def look(self) -> SlowLook:
        """Look at the weights."""
        return SlowLook(self.weights != self.known, self.answered)

    def fence(self) -> Any:
        """There is no GPU."""

    def compute(self, keys: BlockKeys, blocks: range, first_page: int = 0) -> tuple[int, ...]:
        """Write a prompt's KV into pages and return them."""
        pages = tuple(range(first_page + blocks.start * PER_BLOCK, blocks.stop * PER_BLOCK))
        for at, page in enumerate(pages):
            block = blocks.start + at // PER_BLOCK
            for layer, cache in enumerate(self.caches.values()):
                cache[page] = content(keys.hashes[block], layer, at % PER_BLOCK)
        return pages

    def holds(self, keys: BlockKeys, block: int, pages: tuple[int, ...]) -> bool:
        """Whether pages hold a block, bit for bit."""
        return all(
            torch.equal(cache[page], content(keys.hashes[block], layer, at))
            for layer, cache in enumerate(self.caches.values())
            for at, page in enumerate(pages)
        )

    def untouched(self, pages: tuple[int, ...]) -> bool:
        """Whether nothing was written to pages."""
        return all(not cache[list(pages)].any() for cache in self.caches.values())


def content(digest: bytes, layer: int, page: int) -> torch.Tensor:
    """Return what a page of a block holds."""
    seed = int.from_bytes(hashlib.sha256(digest + bytes([layer, page])).digest()[:7], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, PAGE_TOKENS, WIDTH, generator=generator)


def keys_of(seed: int = 0, blocks: int = BLOCKS, spec: KVSpec | None = None) -> BlockKeys:
    """Return a prompt's keys as the scheduler sends them: another rank's, without tokens."""
    spec = spec or spec_of(rank=1)
    tokens = prompt(blocks, seed, spec=spec)
    return replace(BlockKeys.of(spec, tokens), pending=b"")


@dataclass
class Rig:
    """A worker's side, its engine, and everything that it reported."""

    side: WorkerSide
    engine: FakeEngine
    fs: FaultyFileSystem
    path: Path
    answers: Counter[tuple[str, Any]] = field(default_factory=Counter)
    tiers: dict[bytes, tuple[Tier, ...]] = field(default_factory=dict)
    last: RankReport | None = None
    clock_s: float = 0.0

    def step(self, orders: Orders | None = None) -> None:
        """Go through one step of the engine."""
        self.side.take_orders(orders or Orders())
        self.side.after_forward()
        if orders is None:
            self.side.idle_wait()
        self.take(self.side.report())

    def take(self, report: RankReport | None) -> None:
        """Note what was reported."""
        if report is None:
            return
        self.last = report
        for name in ("landed", "failed", "ended", "released"):
            for each in getattr(report, name):
                self.answers[name, each] += 1
        if report.changes is not None:
            self.tiers = {} if report.changes.complete else self.tiers
            self.tiers |= {digest: tiers for _, digest, tiers in report.changes.blocks}
            self.tiers = {digest: tiers for digest, tiers in self.tiers.items() if tiers}

    def until(self, done: Callable[[], bool]) -> None:
        """Step without tokens until something was reported; a safety net bounds it."""
        over = threading.Event()
        timer = threading.Timer(WAIT_S, over.set)
        timer.start()
        try:
            while not done():
                assert not over.is_set(), f"not reported: {self.answers}"
                self.step()
        finally:
            timer.cancel()

    def said(self, name: str, each: Any) -> bool:
        """Whether something was reported, and no more than once."""
        assert self.answers[name, each] <= 1
        return self.answers[name, each] == 1

    def save(self, keys: BlockKeys, number: int = 1) -> None:
        """Compute and store a whole prompt, and see it in the changes."""
        blocks = range(len(keys))
        pages = self.engine.compute(keys, blocks)
        self.step(Orders(saves=(Save(number, keys, 0, len(keys), pages),)))
        self.until(lambda: self.said("released", number))
        self.until(lambda: all(Tier.SSD in self.tiers.get(digest, ()) for digest in keys))


def open_rig(path: Path, fs: FaultyFileSystem | None = None, **options: Any) -> Rig:
    """Start a worker's side over a store in ``path``."""
    fs = fs or FaultyFileSystem()
    options = {"host_bytes": "1MiB", "ssd_bytes": "8MiB", **options}
    engine = FakeEngine()
    side = WorkerSide(
        engine, lambda spec: kvtier.open(path / "s", spec, fs=fs, **options), idle_wait_s=0.05
    )
    side.register_kv_caches(engine.caches)
    return Rig(side, engine, fs, path)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Start a worker's side, and end it."""
    made = open_rig(tmp_path)
    yield made
    made.fs.heal()
    made.side.shutdown()


def load(keys: BlockKeys, block: int, restore: int = 1, tier: Tier = Tier.SSD) -> Load:
    """Order a block into pages of its own."""
    pages = tuple(LOADED[block * PER_BLOCK : (block + 1) * PER_BLOCK])
    return Load(restore, block, keys[block], tier, pages)


def test_it_says_hello(rig: Rig) -> None:
    """The first word has rank, spec, sizes and what is stored; reports do not repeat it."""
    hello = rig.side.hello()
    assert KVSpec.from_bytes(hello.spec) == spec_of()
    assert (hello.rank, hello.resets) == (0, 0)
    assert hello.block_bytes == spec_of().block_layout.block_bytes
    assert hello.stored.complete
    assert hello.stored.blocks == ()
    rig.step(Orders())
    assert rig.last is None


def test_hello_needs_the_engines_memory(tmp_path: Path) -> None:
    """Before the KV tensors are there, nothing can be said."""
    side = WorkerSide(FakeEngine(), lambda spec: kvtier.open(tmp_path / "s", spec))
    with pytest.raises(RuntimeError, match="hello"):
        side.hello()


def test_other_tensors_need_no_other_store(rig: Rig) -> None:
    """An engine that registers anew goes on with its store, and its new tensors are used."""
    keys = keys_of()
    rig.save(keys)
    rig.engine.caches = {name: t.clone().zero_() for name, t in rig.engine.caches.items()}
    rig.side.register_kv_caches(rig.engine.caches)
    rig.step(Orders(loads=(load(keys, 1),)))
    rig.until(lambda: rig.said("landed", (1, 1)))
    assert rig.engine.holds(keys, 1, load(keys, 1).pages)


def test_what_is_saved_is_loaded(rig: Rig) -> None:
    """Blocks come back bit for bit, under keys of another rank, into pages in any order."""
    rig.side.hello()
    keys = keys_of()
    rig.save(keys)
    pages = tuple(reversed(LOADED))[:PER_BLOCK]
    rig.step(Orders(loads=(Load(1, 2, keys[2], Tier.HOST, pages),)))
    rig.until(lambda: rig.said("landed", (1, 2)))
    assert rig.engine.holds(keys, 2, pages)
    rig.step(Orders(ends=(1,)))
    rig.until(lambda: rig.said("ended", 1))
    rig.step(Orders(ends=(1,)))
    assert rig.answers["ended", 1] == 2  # asked twice, answered twice


def test_a_restart_finds_what_was_saved(tmp_path: Path) -> None:
    """A later engine's first word has what an earlier one stored, of this model alone."""
    rig = open_rig(tmp_path)
    keys = keys_of()
    rig.save(keys)
    rig.side.shutdown()
    other = open_rig(tmp_path)
    hello = other.side.hello()
    assert {digest for _, digest, _ in hello.stored.blocks} == set(keys)
    assert {name for name, _, _ in hello.stored.blocks} == {spec_of().namespace}
    other.side.shutdown()


def test_a_load_of_what_is_not_stored_fails(rig: Rig) -> None:
    """A load of a block that is gone is answered as failed, and its pages stay."""
    keys = keys_of()
    rig.step(Orders(loads=(load(keys, 0),)))
    rig.until(lambda: rig.said("failed", (1, 0)))
    assert rig.engine.untouched(load(keys, 0).pages)


def test_a_cancelled_load_is_answered(tmp_path: Path) -> None:
    """A load that is cancelled while it is read fails at once, and ends when it is asked to."""
    rig = open_rig(tmp_path, host_bytes=0)
    keys = keys_of()
    rig.save(keys)
    gate = rig.fs.hold("read", name=".seg")
    rig.step(Orders(loads=(load(keys, 1),)))
    gate.wait_reached()
    rig.step(Orders(cancels=((1, 1), (9, 0))))
    rig.until(lambda: rig.said("failed", (1, 1)))
    rig.step(Orders(ends=(1,)))
    rig.until(lambda: rig.said("ended", 1))
    gate.open()
    rig.side.shutdown()
    assert rig.engine.untouched(load(keys, 1).pages)


def test_a_restore_ends_when_nothing_writes(tmp_path: Path) -> None:
    """Loads that are under way at the end are answered before their restore is said to end."""
    rig = open_rig(tmp_path, host_bytes=0)
    keys = keys_of()
    rig.save(keys)
    gate = rig.fs.hold("read", name=".seg")
    rig.step(Orders(loads=tuple(load(keys, block) for block in range(BLOCKS))))
    gate.wait_reached()
    rig.step(Orders(ends=(1,)))
    gate.open()
    rig.until(lambda: rig.said("ended", 1))
    for block in range(BLOCKS):
        assert rig.said("landed", (1, block)) != rig.said("failed", (1, block))
    rig.side.shutdown()


def test_saves_without_room_are_released(tmp_path: Path) -> None:
    """A save that finds no room gives its pages back, and stores nothing."""
    rig = open_rig(tmp_path, host_bytes=0, ssd_bytes=0)
    keys = keys_of()
    pages = rig.engine.compute(keys, range(BLOCKS))
    rig.step(Orders(saves=(Save(5, keys, 0, BLOCKS, pages),)))
    rig.until(lambda: rig.said("released", 5))
    assert rig.tiers == {}
    rig.side.shutdown()


def test_part_of_a_prompt_is_saved(rig: Rig) -> None:
    """A save of some blocks has their pages only, and stores those."""
    keys = keys_of()
    pages = rig.engine.compute(keys, range(1, 3))
    rig.step(Orders(saves=(Save(1, keys, 1, 3, pages),)))
    rig.until(lambda: rig.said("released", 1))
    rig.until(lambda: len(rig.tiers) == 2)
    rig.step(Orders(loads=(load(keys, 2),)))
    rig.until(lambda: rig.said("landed", (1, 2)))
    assert rig.engine.holds(keys, 2, load(keys, 2).pages)


def test_hints_promote_and_are_taken_back(tmp_path: Path) -> None:
    """A hint brings blocks to host memory, which shows in the changes; taking it back is idle."""
    rig = open_rig(tmp_path)
    keys = keys_of()
    rig.save(keys)
    rig.side.shutdown()
    rig = open_rig(tmp_path)
    rig.step(Orders(hints=(Hint(3, keys),)))
    rig.until(lambda: all(rig.tiers.get(digest, ("",))[0] is Tier.HOST for digest in keys))
    rig.step(Orders(unhints=(3, 4)))
    rig.side.shutdown()


def test_the_engines_steps_teach_the_costs(rig: Rig) -> None:
    """What the scheduler measured comes back as this rank's costs."""
    steps = tuple(Measured(start * 16, 16, 0.25, 0.0) for start in range(6))
    rig.step(Orders(measured=steps))
    assert rig.last is not None
    assert rig.last.costs is not None
    assert rig.last.costs.compute.samples == 6
    rig.last = None
    rig.step(Orders())
    assert rig.last is None  # nothing moved, so nothing is said


def test_nothing_is_said_when_nothing_happened(rig: Rig) -> None:
    """An idle step reports nothing, but for the counters that the first report carries."""
    rig.step(Orders())
    rig.last = None
    rig.step(Orders())
    assert rig.last is None


@pytest.mark.parametrize("answered", [True, False])
def test_changed_weights_stop_loads_and_saves(tmp_path: Path, *, answered: bool) -> None:
    """After weights changed without a reset nothing is restored or stored, and it is said.

    Even where a GPU answers only later that they did.
    """
    rig = open_rig(tmp_path)
    keys, others = keys_of(), keys_of(seed=1)
    rig.save(keys)
    pages = rig.engine.compute(others, range(BLOCKS))
    rig.engine.weights = 1
    if not answered:
        rig.engine.answered = threading.Event()
    rig.step(Orders(loads=(load(keys, 0),), saves=(Save(2, others, 0, BLOCKS, pages),)))
    rig.step(Orders())
    assert not rig.said("landed", (1, 0))
    rig.engine.answered.set()
    rig.until(lambda: rig.said("failed", (1, 0)) and rig.said("released", 2))
    assert rig.last is not None
    assert rig.last.stale
    assert not set(others) & set(rig.tiers)
    rig.side.shutdown()


def test_a_reset_starts_afresh(tmp_path: Path) -> None:
    """After a reset nothing of the model is on disk, a new hello has the weights as they are."""
    rig = open_rig(tmp_path)
    rig.side.hello()
    keys = keys_of()
    rig.save(keys)
    rig.engine.weights = 1
    pages = rig.engine.compute(keys, range(BLOCKS))
    rig.step(Orders(resets=1, loads=(load(keys, 0),)))
    assert rig.last is not None
    hello = rig.last.hello
    assert hello is not None
    assert hello.resets == 1
    assert KVSpec.from_bytes(hello.spec) == spec_of(weights=1)
    assert hello.stored.blocks == ()
    rig.until(lambda: rig.said("failed", (1, 0)))
    assert not rig.last.stale
    marker = next(iter(rig.engine.caches.values()))[pages[0]].numpy().tobytes()
    for path in segment_files(tmp_path / "s"):
        with open(path, "rb") as file:
            assert marker not in file.read()
    fresh = keys_of(spec=spec_of(weights=1, rank=1))
    rig.tiers.clear()
    rig.save(fresh, number=2)
    rig.side.shutdown()


def test_a_reset_in_the_middle_answers_everything(tmp_path: Path) -> None:
    """Loads, saves and restores of before a reset are answered by the time of its hello."""
    rig = open_rig(tmp_path, host_bytes=0)
    keys = keys_of()
    rig.save(keys)
    gate = rig.fs.hold("read", name=".seg")
    rig.step(Orders(loads=(load(keys, 0), load(keys, 1, restore=2))))
    gate.wait_reached()
    pages = rig.engine.compute(keys, range(BLOCKS))
    rig.step(Orders(saves=(Save(7, keys, 0, BLOCKS, pages),)))
    threading.Timer(0.05, gate.open).start()
    rig.step(Orders(resets=1, ends=(1,)))
    assert rig.last is not None
    assert rig.last.hello is not None
    assert rig.said("failed", (1, 0))
    assert rig.said("failed", (2, 1))
    assert rig.said("released", 7)
    assert rig.said("ended", 1)
    rig.step(Orders(ends=(2,)))
    assert rig.said("ended", 2)
    rig.side.shutdown()


def test_a_store_that_cannot_be_opened_again(tmp_path: Path) -> None:
    """Where a reset cannot open the store again, everything is a miss until a later one can."""
    rig = open_rig(tmp_path)
    keys = keys_of()
    rig.save(keys)
    rig.fs.fail("open_directory")
    rig.step(Orders(resets=1, loads=(load(keys, 0),)))
    rig.until(lambda: rig.said("failed", (1, 0)))
    pages = rig.engine.compute(keys, range(BLOCKS))
    rig.step(Orders(resets=1, saves=(Save(2, keys, 0, BLOCKS, pages),), ends=(1,)))
    rig.until(lambda: rig.said("released", 2) and rig.said("ended", 1))
    assert rig.last is not None
    assert rig.last.hello is None
    rig.fs.heal()
    rig.step(Orders(resets=2))
    assert rig.last.hello is not None
    assert rig.last.hello.resets == 2
    assert rig.last.hello.stored.blocks == ()
    rig.save(keys, number=3)
    rig.side.shutdown()


def test_a_broken_store_is_a_store_of_misses(tmp_path: Path) -> None:
    """When the store breaks, everything is answered and the scheduler hears that nothing is left.

    Steps go on, and a reset opens the store again.
    """
    rig = open_rig(tmp_path, host_bytes=0)
    rig.side.hello()
    keys = keys_of()
    rig.save(keys)
    assert rig.side._store is not None
    rig.side._store._fail(OSError("the lane broke"))
    pages = rig.engine.compute(keys, range(BLOCKS))
    loads = tuple(load(keys, block, restore=2 + block % 2) for block in range(BLOCKS))
    rig.step(Orders(loads=loads, saves=(Save(9, keys, 0, BLOCKS, pages),), ends=(3,)))
    rig.until(lambda: rig.said("released", 9) and rig.said("ended", 3))
    assert all(rig.said("failed", (2 + block % 2, block)) for block in range(BLOCKS))
    assert rig.tiers == {}
    rig.step(Orders(ends=(2,), hints=(Hint(1, keys),), measured=(Measured(0, 16, 1.0, 0.0),)))
    rig.until(lambda: rig.said("ended", 2))
    rig.step(Orders(resets=1))
    assert rig.last is not None
    assert rig.last.hello is not None
    assert rig.last.hello.stored.blocks == ()
    rig.save(keys, number=10)
    rig.side.shutdown()


def test_a_reader_restores_and_stores_nothing(tmp_path: Path) -> None:
    """A rank that only reads loads what the writer stored; a save is released and not stored."""
    rig = open_rig(tmp_path)
    keys = keys_of()
    rig.save(keys)
    engine = FakeEngine()
    side = WorkerSide(engine, lambda spec: kvtier.open_reader(tmp_path / "s", spec))
    side.register_kv_caches(engine.caches)
    reads = Rig(side, engine, rig.fs, tmp_path)
    hello = side.hello()
    assert {digest for _, digest, _ in hello.stored.blocks} == set(keys)
    reads.step(Orders(loads=(load(keys, 3),), saves=(Save(1, keys, 0, 1, (0, 1, 2, 3)),)))
    reads.until(lambda: reads.said("landed", (1, 3)) and reads.said("released", 1))
    assert engine.holds(keys, 3, load(keys, 3).pages)
    reads.step(Orders(resets=1))
    assert reads.last is not None
    assert reads.last.hello is not None
    assert len(reads.last.hello.stored.blocks) == BLOCKS  # the writer's to purge
    side.shutdown()
    rig.side.shutdown()


def test_a_second_writer_is_told_the_path(tmp_path: Path) -> None:
    """Two engines cannot write one rank's directory: the second one's error names it."""
    rig = open_rig(tmp_path)
    with pytest.raises(kvtier.StoreLocked, match=str(tmp_path)):
        open_rig(tmp_path)
    rig.side.shutdown()


def test_an_idle_step_waits_for_a_load(tmp_path: Path) -> None:
    """A step without tokens returns as soon as a load is answered, and at once with none."""
    rig = open_rig(tmp_path, host_bytes=0)
    keys = keys_of()
    rig.save(keys)
    rig.side.idle_wait()  # nothing is under way
    rig.side._idle_wait_s = 10 * WAIT_S  # a wait that nobody ends fails by its time limit
    rig.side.take_orders(Orders(loads=(load(keys, 0),)))
    rig.side.idle_wait()
    rig.take(rig.side.report())
    assert rig.said("landed", (1, 0))
    rig.side.shutdown()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["load", "cancel", "end", "idle", "reset", "weights", "break"]),
        st.integers(0, 2),
        st.integers(0, BLOCKS),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_every_order_is_answered(  # noqa: C901 - one branch for each thing that may happen
    tmp_path_factory: pytest.TempPathFactory, steps: Any
) -> None:
    """Whatever happens in between: each load has one answer, and what landed has its bytes."""
    rig = open_rig(tmp_path_factory.mktemp("worker"), host_bytes=0)
    keys = keys_of(blocks=BLOCKS + 1)
    pages = rig.engine.compute(keys, range(BLOCKS))
    rig.step(Orders(saves=(Save(1, keys, 0, BLOCKS, pages),)))
    rig.until(lambda: rig.said("released", 1))
    under_way: dict[tuple[int, int], Load] = {}
    numbers, resets, asked = [0, 100, 200], 0, set()

    def settled(each: tuple[int, int]) -> bool:
        return rig.answers["landed", each] + rig.answers["failed", each] > 0

    for what, which, block in steps:
        number = numbers[which]
        busy = {load.block for each, load in under_way.items() if not settled(each)}
        if what == "load" and block not in busy and (number, block) not in under_way:
            wanted = load(keys, block, restore=number) if block < BLOCKS else None
            wanted = wanted or Load(number, block, keys[block], Tier.SSD, LOADED[:PER_BLOCK])
            if block == BLOCKS and 0 in busy:
                continue
            under_way[number, block] = wanted
            rig.step(Orders(loads=(wanted,), resets=resets))
        elif what == "cancel":
            rig.step(Orders(cancels=((number, block),), resets=resets))
        elif what == "end":
            rig.step(Orders(ends=(number,), resets=resets))
            asked.add(number)
            numbers[which] += 1
        elif what == "reset" and resets < 2:
            resets += 1
            rig.step(Orders(resets=resets))
        elif what == "weights":
            rig.engine.weights += block == 0
        elif what == "break" and block == 0 and rig.side._store is not None:
            rig.side._store._fail(OSError("the lane broke"))
        else:
            rig.step(Orders(resets=resets))
    left = set(numbers) - asked
    rig.step(Orders(ends=tuple(left), resets=resets))
    rig.until(lambda: all(rig.answers["ended", number] for number in asked | left))
    for each, wanted in under_way.items():
        assert rig.said("landed", each) != rig.said("failed", each)
        if rig.said("landed", each) and list(under_way.values())[-1] is wanted:
            assert rig.engine.holds(keys, wanted.block, tuple(wanted.pages))
    rig.side.shutdown()
