from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_fakes import BLOCK, PAGE, costs_of

import kvtier
from kvtier import BlockKeys, Residency, RestorePlan, Tier
from kvtier_vllm.restore import STALLED_S_MAX, Restore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOST, SSD = Tier.HOST, Tier.SSD


def plan_of(
    tiers: Sequence[Tier | None], resident: int = 0, load_s: float = 0.01, step: int = 2
) -> RestorePlan:
    """Plan a prompt with these tiers."""
    hashes = tuple(index.to_bytes(32, "big") for index in range(len(tiers)))
    keys = BlockKeys(b"n" * 32, BLOCK, b"r" * 32, b"t" * 32, hashes, b"")
    costs = costs_of(load_s=load_s)
    return kvtier.plan(
        Residency(keys, tuple(tiers), 1000), costs, resident=resident, step_blocks_max=step
    )


def begun(
    tiers: Sequence[Tier | None], *, ranks: int = 1, resident: int = 0, load_s: float = 0.01
) -> Restore:
    """Begin its restore, as number 7."""
    plan = plan_of(tiers, resident, load_s)
    restore = Restore("r", plan, costs_of(load_s=load_s), 0.0, ranks=ranks)
    restore.start(7, list(range(2 * len(tiers))), BLOCK // PAGE)
    return restore


def answer_all(restore: Restore, blocks: Sequence[int], now: float, *, landed: bool = True) -> None:
    """Let the only rank answer for these blocks."""
    for block in blocks:
        restore.answered(0, block, now, landed=landed)
    restore.settled()


class World:
    """Ranks that answer, an engine that computes, and who writes which block."""

    def __init__(self, restore: Restore, ranks: int, draw: Callable[[Any], Any]) -> None:
        self.restore = restore
        self.ranks = ranks
        self.draw = draw
        self.now = 0.0
        self.written = set(range(restore.plan.resident))
        self.unanswered: dict[int, set[int]] = {}
        self.failed: set[int] = set()

    def order(self) -> None:
        """Take the orders of a step; some cancelled loads fail at once, others may still land."""
        loads, cancels = self.restore.take_orders()
        for load in loads:
            assert load.block not in self.written
            assert load.block not in self.unanswered
            assert load.tier is self.restore.plan.tiers[load.block]
            assert load.pages == (2 * load.block, 2 * load.block + 1)
            self.unanswered[load.block] = set(range(self.ranks))
        for number, block in cancels:
            assert number == 7
            if block in self.unanswered and self.draw(st.booleans()):
                for rank in sorted(self.unanswered[block]):
                    self.answer(rank, block, landed=False)

    def answer(self, rank: int, block: int, *, landed: bool) -> None:
        """Let a rank answer."""
        self.failed |= set() if landed else {block}
        self.unanswered[block].discard(rank)
        self.restore.answered(rank, block, self.now, landed=landed)
        if not self.unanswered[block]:
            del self.unanswered[block]
            self.written |= set() if block in self.failed else {block}
            self.failed.discard(block)

    def answer_some(self) -> None:
        """Let ranks answer as they like."""
        for _ in range(self.draw(st.integers(0, 3)) if self.unanswered else 0):
            if self.unanswered:
                block = self.draw(st.sampled_from(sorted(self.unanswered)))
                rank = self.draw(st.sampled_from(sorted(self.unanswered[block])))
                self.answer(rank, block, landed=self.draw(st.integers(0, 9)) > 0)
        self.restore.settled()

    def answer_all(self) -> None:
        """Let every load land."""
        for block in list(self.unanswered):
            for rank in list(self.unanswered[block]):
                self.answer(rank, block, landed=True)
        self.restore.settled()

    def compute(self, *, whole: bool, pipelined: bool) -> None:
        """Compute what is handed out, or a part of it."""
        cap, start = self.restore.cap, self.restore.position
        assert cap is not None
        step = set(range(start // BLOCK, cap // BLOCK))
        assert not step & set(self.unanswered), "handed out while a load may write it"
        position = cap if whole else self.draw(st.integers(start, cap))
        if position == cap:
            self.written |= step
        self.restore.reached(position, self.now, pipelined=pipelined)


@given(
    tiers=st.lists(st.sampled_from([HOST, SSD, None]), min_size=1, max_size=12),
    ranks=st.integers(1, 3),
    load_s=st.sampled_from([1e-6, 0.005, 0.01, 0.05]),
    ahead=st.sampled_from([False, True]),
    data=st.data(),
)
def test_a_block_is_computed_or_loaded_and_never_both_at_once(
    tiers: list[Tier | None], ranks: int, load_s: float, ahead: Any, data: st.DataObject
) -> None:
    """However ranks answer and the engine steps, it ends, and every block has one writer."""
    resident = data.draw(st.integers(0, len(tiers) - 1))
    tiers[-1] = data.draw(st.sampled_from([HOST, SSD]))
    restore = begun(tiers, ranks=ranks, resident=resident, load_s=load_s)
    world = World(restore, ranks, data.draw)
    for turn in range(60):
        world.order()
        world.now += data.draw(st.sampled_from([0.0, 0.004, 0.05]))
        world.answer_some()
        if data.draw(st.integers(0, 40)) == 40:
            restore.expire(world.now)
        assert restore.position <= (restore.cap or restore.end)
        assert set(range(restore.front)) <= world.written
        if restore.waits:
            restore.woke(world.now)
        elif not restore.finished:
            world.compute(whole=turn > 40, pipelined=ahead)
    for _ in range(60):
        world.order()
        world.answer_all()
        if restore.cap is not None and not restore.waits:
            world.compute(whole=True, pipelined=ahead)
    assert restore.finished
    assert restore.cap is None
    assert restore.position == restore.end
    assert world.written == set(range(len(tiers)))


def test_a_block_is_in_place_when_every_rank_has_it() -> None:
    """The first answers of three change nothing, a second answer of one rank neither."""
    restore = begun([SSD], ranks=3, load_s=1e-6)
    restore.take_orders()
    for rank in (0, 1, 1, 0):
        restore.answered(rank, 0, 0.1, landed=True)
    restore.settled()
    assert restore.waits
    restore.answered(2, 0, 0.1, landed=True)
    restore.settled()
    assert restore.finished
    assert restore.loaded == 1


def test_one_rank_that_fails_is_enough() -> None:
    """A block that one of the ranks lacks is computed, once all have answered."""
    restore = begun([SSD], ranks=2, load_s=1e-6)
    restore.take_orders()
    restore.answered(0, 0, 0.1, landed=False)
    restore.settled()
    assert restore.waits
    restore.answered(1, 0, 0.1, landed=True)
    restore.settled()
    assert restore.cap == BLOCK
    assert restore.failed == 1


def test_a_restore_that_hears_nothing_gives_up() -> None:
    """After the bound it orders its loads to stop, and computes once they have."""
    restore = begun([SSD, SSD], load_s=1e-9)
    restore.take_orders()
    assert restore.waits
    restore.woke(STALLED_S_MAX - 1)  # the front is late, and is taken back long before
    assert restore.take_orders()[1] == [(7, 0)]
    restore.woke(STALLED_S_MAX + 0.1)
    assert restore.take_orders()[1] == [(7, 1)]
    answer_all(restore, [0, 1], STALLED_S_MAX + 0.2, landed=False)
    assert restore.cap == 2 * BLOCK


@pytest.mark.parametrize("ahead", [False, True])
def test_a_hole_caps_prefill_and_a_loaded_run_is_passed(ahead: Any) -> None:
    """The cap is the hole's end, and what is in place behind it moves the position on."""
    restore = begun([None, SSD, SSD, None, SSD], load_s=1e-6)
    assert restore.cap == BLOCK
    answer_all(restore, [load.block for load in restore.take_orders()[0]], 0.0)
    restore.reached(BLOCK, 0.01, pipelined=ahead)
    answer_all(restore, [load.block for load in restore.take_orders()[0]], 0.01)
    assert (restore.position, restore.cap) == (3 * BLOCK, 4 * BLOCK)
    restore.reached(4 * BLOCK, 0.02, pipelined=ahead)
    assert restore.finished
    assert restore.position == 5 * BLOCK
