from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefetch_rig import BLOCK_BYTES, Rig
from support import (
    POISON,
    WAIT_S,
    Gate,
    eventually,
    in_thread,
    payload_of,
    poisoned_slots,
    read_slots,
)

from kvtier import LinkThrottle, Tier, TransferFailed
from kvtier.hints import KEPT_AFTER_S
from kvtier.layerwise import LayerTail
from kvtier.prefetcher import HOP_BYTES, HOPS_PER_READ, THREADS_PER_READ
from kvtier.tiers.base import ReadResult

ONE_AT_A_TIME = {"block_bytes": BLOCK_BYTES, "loads_inflight_max": 1, "staging_blocks_max": 8}


def busy(rig: Rig) -> tuple[Gate, int]:
    """Let prefetches take every hop that they may; returns what holds them, and how many."""
    gate = rig.hold()
    hops = HOPS_PER_READ * rig.config.loads_inflight_max - 1
    for number in range(hops):
        rig.prefetch(number)
    return gate, hops


class HeldLink(LinkThrottle):
    """A link that brings nothing before it is opened."""

    def __init__(self) -> None:
        super().__init__(1e12)
        self.passed = 0
        self.arrival = 1e6

    def reserve(self, now: float, nbytes: int) -> float:
        """Return when a transfer ends."""
        self.passed += 1
        return max(now, self.arrival)

    def open(self, rig: Rig) -> None:
        """Let everything through from now on."""
        self.arrival = 0.0
        rig.advance(2e6)


# -- order


def test_the_earliest_deadline_is_read_first() -> None:
    """Whatever the order of the hints; higher priorities before all of them."""
    with Rig(6, block_bytes=HOP_BYTES, prefetch_bytes_per_s=HOP_BYTES) as rig:  # one a second
        rig.prefetch(5)
        for number, (deadline_s, priority) in enumerate(
            [(None, 0), (90.0, 0), (30.0, 0), (50.0, 0), (70.0, 1)]
        ):
            rig.prefetch(number, deadline_s=deadline_s, priority=priority)
        for count in range(1, 7):
            eventually(lambda count=count: len(rig.read()) == count)
            rig.advance(1.0)
        assert rig.read() == [5, 4, 2, 3, 1, 0]


def test_a_restore_goes_before_all_prefetches() -> None:
    """One hop is always free for it, and whatever else it wants is next."""
    with Rig(40, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        transfer = rig.prefetch(*range(first, 30), deadline_s=1.0, priority=9)
        loads = [rig.load(number) for number in range(30, 36)]
        gate.open()
        assert transfer.result(WAIT_S) == 30 - first
        eventually(lambda: all(loads))
        assert set(rig.read()[: first + 6]) == {*range(first), *range(30, 36)}


def test_a_block_that_is_queued_for_a_prefetch_is_upgraded_and_read_once() -> None:
    """A restore that wants a queued block gets it at once, and the prefetch counts it."""
    with Rig(30, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        transfer = rig.prefetch(*range(first, 30))
        slots = poisoned_slots(1)
        answers = rig.load(first, slots)  # the head, which the prefetch would read last
        gate.open()
        assert transfer.result(WAIT_S) == 30 - first
        eventually(lambda: answers == [(0, None)])
        assert read_slots(slots, 0) == payload_of(rig.blocks[first], BLOCK_BYTES)
        assert sorted(rig.read()) == list(range(30))
        assert rig.read().index(first) <= first


def test_a_cancelled_load_is_not_read() -> None:
    """A restore that gives up a block whose read has not begun costs no read."""
    with Rig(40, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        loads = [(rig.load(number), rig.ticket) for number in range(first, first + 4)]
        for answers, ticket in loads[1:]:
            assert rig.prefetcher.cancel(ticket)
            assert not rig.prefetcher.cancel(ticket)
            assert answers == []
        gate.open()
        eventually(lambda: loads[0][0] == [(0, None)])
        rig.turn()
        assert len(rig.read()) == first + 1


def test_reads_in_flight_are_bounded_and_the_rest_waits_in_the_queue() -> None:
    """However much is asked for: so many threads read, so many hops have begun."""
    with Rig(64, block_bytes=BLOCK_BYTES, loads_inflight_max=2) as rig:
        gate = rig.hold()
        transfer = rig.prefetch(*range(64))
        gate.wait_reached()
        eventually(lambda: rig.ssd.under_way == min(THREADS_PER_READ, HOPS_PER_READ) * 2)
        usage = rig.prefetcher.usage()
        hops = HOPS_PER_READ * 2 - 1
        size = min(HOP_BYTES // BLOCK_BYTES, -(-64 // (hops + 1)))
        assert usage["reading_blocks"] <= hops * size
        assert usage["queued_blocks"] == 64 - usage["reading_blocks"]
        gate.open()
        assert transfer.result(WAIT_S) == 64
        assert rig.ssd.most <= THREADS_PER_READ * 2


# -- deadlines


def test_what_is_late_is_dropped_and_counted() -> None:
    """A block whose deadline passes before its read begins is left to the restore."""
    with Rig(30, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        late = rig.prefetch(*range(first, 20), deadline_s=1.0)
        later = rig.prefetch(*range(20, 30), deadline_s=2.0)
        rig.advance(1.5)
        assert late.result(0) == 0
        assert rig.count("prefetch_late_blocks") == 20 - first
        assert rig.held == first + 10
        gate.open()
        assert later.result(WAIT_S) == 10
        assert set(rig.read()) == {*range(first), *range(20, 30)}


def test_a_block_that_one_hint_drops_is_read_for_another() -> None:
    """A deadline is a hint's own."""
    with Rig(30, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        late = rig.prefetch(first, deadline_s=1.0)
        other = rig.prefetch(first)
        rig.advance(1.5)
        assert late.result(0) == 0
        gate.open()
        assert other.result(WAIT_S) == 1


def test_a_read_that_began_in_time_arrives() -> None:
    """The deadline is that of the beginning: nothing that is being read is thrown away."""
    with Rig(4) as rig:
        gate = rig.hold()
        transfer = rig.prefetch(0, 1, deadline_s=1.0)
        gate.wait_reached()
        rig.advance(1.5)
        gate.open()
        assert transfer.result(WAIT_S) == 2
        assert rig.in_host() == [0, 1]


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan"), float("inf")])
def test_a_deadline_is_a_number_of_seconds(deadline_s: float) -> None:
    """Anything else is refused by name."""
    with Rig(1) as rig, pytest.raises(ValueError, match="deadline_s"):
        rig.prefetch(0, deadline_s=deadline_s)


# -- bounds


def test_what_prefetches_hold_is_bounded_and_the_tail_gets_the_room() -> None:
    """What has no room is declined and counted."""
    with Rig(20, prefetch_bytes_max=8 * BLOCK_BYTES) as rig:
        gate = rig.hold()
        transfer = rig.prefetch(*range(20))
        assert rig.held == 8
        assert rig.count("prefetch_declined_blocks") == 12
        gate.open()
        assert transfer.result(WAIT_S) == 8
        assert rig.in_host() == list(range(12, 20))


def test_a_bound_beyond_host_memory_is_that_of_host_memory() -> None:
    """Nothing is promoted that would have no place."""
    with Rig(1, host_blocks=3, prefetch_bytes_max=100 * BLOCK_BYTES) as rig:
        assert rig.prefetcher.usage()["held_blocks_max"] == 3
    with Rig(1, host_blocks=3) as rig:
        assert rig.prefetcher.usage()["held_blocks_max"] == 3


def test_what_is_more_urgent_takes_the_room_of_what_waits() -> None:
    """The least urgent queued blocks go, and never those that are being read."""
    with Rig(40, prefetch_bytes_max=10 * BLOCK_BYTES, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        late = rig.prefetch(*range(10, 30), deadline_s=9.0)
        assert rig.held == 10
        soon = rig.prefetch(*range(30, 34), deadline_s=1.0)
        same = rig.prefetch(*range(34, 40), deadline_s=9.0)
        assert same.result(0) == 0
        assert rig.held == 10
        gate.open()
        assert soon.result(WAIT_S) == 4
        assert late.result(WAIT_S) == 10 - first - 4
        eventually(lambda: rig.in_host() == [*range(first), *range(24 + first, 34)])


def test_nothing_is_left_of_many_that_were_cancelled_failed_or_dropped() -> None:
    """After 10,000 prefetches of every fate the room is whole, and there are no timers left."""
    numbers = random.Random(5)  # noqa: S311 - a test's choices
    with Rig(50, host_blocks=16, prefetch_bytes_max=12 * BLOCK_BYTES, loads_inflight_max=1) as rig:
        for block in rig.blocks[::3]:
            rig.ssd.outcomes[block] = ReadResult.FAILED
        gate = rig.hold()  # until something was late
        transfers = []
        for number in range(10_000):
            start = numbers.randrange(48)
            transfers.append(
                rig.prefetcher.prefetch(
                    rig.blocks[start : start + 3],
                    rig.blocks[start : start + 1],
                    deadline_s=numbers.choice([None, 0.0, 0.5, 5.0]),
                    priority=numbers.randrange(3),
                )
            )
            if number % 3 == 0:
                numbers.choice(transfers).cancel()
            if number % 100 == 0:
                rig.advance(0.4)
                assert rig.held <= 12
            if number == 200:
                gate.open()
        for transfer in transfers[:5000]:
            transfer.cancel()
        assert all(0 <= transfer.result(WAIT_S) <= 3 for transfer in transfers)
        rig.advance(5.0 + KEPT_AFTER_S + 0.1)
        eventually(lambda: rig.held == 0)
        assert rig.catalog.pins() == 0
        counters = rig.metrics.snapshot()
        for fate in ("prefetched", "prefetch_declined", "prefetch_late", "prefetch_cancelled",
                     "prefetch_failed", "prefetch_unused"):  # fmt: skip
            assert counters[f"{fate}_blocks"] > 0, fate
        assert [each for each in rig.loop._scheduled if not each.cancelled()] == []
        assert rig.failures == []


def test_prefetches_begin_at_the_rate_they_are_given() -> None:
    """One hop at a time, each when the one before would have ended at that rate."""
    hop = HOP_BYTES // BLOCK_BYTES
    big = HOP_BYTES
    with Rig(12, host_blocks=12, block_bytes=big, prefetch_bytes_per_s=big // 2) as rig:
        transfer = rig.prefetch(*range(12))
        for count in range(1, 12):
            eventually(lambda count=count: len(rig.read()) == count)
            rig.advance(1.0)
            assert len(rig.read()) == count
            rig.advance(1.0)
        assert transfer.result(WAIT_S) == 12
    assert hop > 1  # small blocks: several of them in a hop


def test_a_rate_holds_up_no_restore() -> None:
    """Restores read at once, those of prefetched blocks too."""
    with Rig(20, host_blocks=20, block_bytes=BLOCK_BYTES, prefetch_bytes_per_s=1) as rig:
        first = rig.prefetch(0)
        assert first.result(WAIT_S) == 1
        transfer = rig.prefetch(*range(1, 20))
        loads = [rig.load(number) for number in range(1, 10)]
        eventually(lambda: all(loads))
        assert not transfer.done()
        assert rig.read()[0] == 0
        assert sorted(rig.read()[1:]) == list(range(1, 10))


def test_a_rate_of_nothing_prefetches_nothing() -> None:
    """Everything is declined."""
    with Rig(2, prefetch_bytes_per_s=0) as rig:
        assert rig.prefetch(0, 1).result(WAIT_S) == 0
        assert rig.read() == []


# -- cancellation


def test_cancelling_frees_nothing_that_a_read_writes_to() -> None:
    """Reads that have begun end where they write, in slots of their own; the rest never begins."""
    with Rig(40, host_blocks=40, block_bytes=BLOCK_BYTES, loads_inflight_max=2) as rig:
        gate = rig.hold()
        transfer = rig.prefetch(*range(40), deadline_s=100.0)
        eventually(lambda: rig.ssd.under_way == 4)
        transfer.cancel()
        transfer.cancel()
        rig.turn()
        assert transfer.result(0) == 0
        slots = rig.host.usage().blocks
        assert slots == rig.ssd.under_way == 4
        assert rig.prefetcher.usage()["queued_blocks"] == 0
        assert rig.held == rig.prefetcher.usage()["reading_blocks"] > 0
        gate.open()
        eventually(lambda: rig.held == 0)
        begun = rig.read()
        assert sorted(begun) == rig.in_host()
        assert len(begun) < 40
        for number in begun:
            row = rig.catalog.find(rig.blocks[number])
            slot = rig.catalog.location(row, Tier.HOST).slot
            assert bytes(rig.host.buffer(slot)) == payload_of(rig.blocks[number], BLOCK_BYTES)


def test_what_others_wait_for_is_read_although_a_hint_was_cancelled() -> None:
    """A restore and another hint get their blocks."""
    with Rig(30, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        cancelled = rig.prefetch(*range(first, 20))
        other = rig.prefetch(first, first + 1)
        answers = rig.load(first + 2)
        cancelled.cancel()
        rig.turn()
        assert cancelled.result(0) == 0
        gate.open()
        assert other.result(WAIT_S) == 2
        eventually(lambda: answers == [(0, None)])
        assert sorted(rig.read()) == list(range(first + 3))


def test_cancelling_after_the_end_lets_go_of_what_is_kept() -> None:
    """A request that is gone needs nothing any more."""
    with Rig(4) as rig:
        transfer = rig.prefetch(*range(4), deadline_s=5.0)
        assert transfer.result(WAIT_S) == 4
        rig.turn()
        assert rig.kept == rig.catalog.pins(Tier.HOST) == 4
        transfer.cancel()
        rig.turn()
        assert rig.held == rig.catalog.pins() == 0
        assert transfer.result(0) == 4


# -- what is kept


def test_what_was_brought_in_time_is_kept_until_a_restore_has_it() -> None:
    """Other prefetches and copies do not push it out; the use gives its room back."""
    with Rig(40, host_blocks=8, prefetch_bytes_max=4 * BLOCK_BYTES) as rig:
        assert rig.prefetch(*range(4), deadline_s=5.0).result(WAIT_S) == 4
        for number in range(10, 40):
            answers = rig.load(number)
            eventually(lambda answers=answers: answers == [(0, None)])
        assert set(rig.in_host()) >= set(range(4))
        assert rig.prefetch(4, deadline_s=1.0).result(WAIT_S) == 0  # there is no room
        answers = rig.load(0)
        eventually(lambda: answers == [(0, None)])
        rig.turn()
        assert rig.kept == 3
        assert rig.prefetch(4, deadline_s=1.0).result(WAIT_S) == 1


def test_what_nobody_used_is_let_go_a_little_after_its_deadline() -> None:
    """And counted."""
    with Rig(4) as rig:
        assert rig.prefetch(*range(4), deadline_s=5.0).result(WAIT_S) == 4
        rig.advance(5.0 + 0.9 * KEPT_AFTER_S)
        assert rig.kept == 4
        rig.advance(0.2 * KEPT_AFTER_S)
        assert rig.held == rig.catalog.pins() == 0
        assert rig.count("prefetch_unused_blocks") == 4
        assert rig.in_host() == [0, 1, 2, 3]


def test_a_deadline_keeps_what_is_there_already() -> None:
    """A hint is about a prompt, wherever its blocks are; without a deadline nothing is kept."""
    with Rig(6) as rig:
        assert rig.prefetch(0, 1, 2).result(WAIT_S) == 3
        rig.turn()
        assert rig.kept == 0
        assert rig.prefetch(3, present=[0, 1, 5], deadline_s=5.0).result(WAIT_S) == 1
        rig.turn()
        assert rig.kept == 3  # block 5 is not there


def test_two_hints_keep_a_block_for_two_restores() -> None:
    """A shared head is kept until each of the prompts was restored."""
    with Rig(2) as rig:
        for deadline_s in (5.0, 9.0):
            rig.prefetch(0, present=[0], deadline_s=deadline_s).result(WAIT_S)
        for kept in (1, 0):
            answers = rig.load(0)
            eventually(lambda answers=answers: answers == [(0, None)])
            rig.turn()
            assert rig.kept == kept


def test_letting_go_of_everything() -> None:
    """A purge is not held up by what is kept."""
    with Rig(4) as rig:
        rig.prefetch(*range(4), deadline_s=5.0).result(WAIT_S)
        rig.prefetcher.let_go()
        rig.turn()
        assert rig.held == rig.catalog.pins() == 0


def test_layers_use_up_what_was_kept() -> None:
    """A restore that copies by layers has its blocks too: nobody keeps them for it any longer."""
    with Rig(3) as rig:
        rig.prefetch(*range(3), deadline_s=5.0).result(WAIT_S)
        tail = LayerTail(poisoned_slots(3), range(3), rig.blocks, rig.loop.time)
        assert rig.prefetcher.load_layers(tail)
        assert tail.wait(len(tail.layer_bytes) - 1, WAIT_S)
        eventually(lambda: rig.held == 0)
        assert rig.count("prefetch_unused_blocks") == 0


# -- to the device


def test_a_promotion_to_the_device_goes_by_way_of_host_memory() -> None:
    """What is on the SSD is read, what is in host memory is not; each is counted once it is there.

    Nothing stays pinned in host memory for it.
    """
    with Rig(6, device_blocks=6) as rig:
        assert rig.prefetch(0, 1).result(WAIT_S) == 2
        assert rig.prefetch(*range(6), tier=Tier.DEVICE).result(WAIT_S) == 6
        assert rig.on_device() == list(range(6))
        assert sorted(rig.read()) == list(range(6))
        assert rig.count("prefetched_blocks") == 2 + 6
        assert rig.count("device_written_blocks") == 6
        eventually(lambda: rig.catalog.pins() == 0)


def test_a_deadline_keeps_blocks_on_the_device_until_a_restore_has_them() -> None:
    """Others do not push them out; a copy out of the device uses them up, and so does a load."""
    with Rig(8, device_blocks=2) as rig:
        to = {"tier": Tier.DEVICE}
        assert rig.prefetch(0, 1, deadline_s=5.0, **to).result(WAIT_S) == 2
        rig.turn()
        assert rig.catalog.pins(Tier.DEVICE) == 2
        assert rig.prefetch(2, **to).result(WAIT_S) == 0
        assert rig.on_device() == [0, 1]
        slots = poisoned_slots(1)
        assert rig.prefetcher.place([(0, rig.blocks[0])], slots) == [0]
        assert read_slots(slots, 0) == payload_of(rig.blocks[0], BLOCK_BYTES)
        rig.turn()
        assert rig.catalog.pins(Tier.DEVICE) == 1
        rig.load(1)
        eventually(lambda: rig.catalog.pins() == 0)
        assert rig.prefetch(2, 3, **to).result(WAIT_S) == 2
        assert rig.on_device() == [2, 3]


def test_what_nobody_used_on_the_device_is_let_go_after_its_deadline() -> None:
    """As in host memory, and counted; what is there already is kept as well."""
    with Rig(2, device_blocks=2) as rig:
        rig.prefetch(0, tier=Tier.DEVICE).result(WAIT_S)
        rig.prefetch(1, present=[0], deadline_s=5.0, tier=Tier.DEVICE).result(WAIT_S)
        rig.turn()
        assert rig.catalog.pins(Tier.DEVICE) == 2
        rig.advance(5.0 + 1.1 * KEPT_AFTER_S)
        assert rig.catalog.pins() == 0
        assert rig.count("prefetch_unused_blocks") == 2


def test_each_tier_has_a_bound_of_its_own() -> None:
    """What waits for the device takes nobody's room in host memory, nor the other way round."""
    with Rig(40, device_blocks=6, prefetch_bytes_max=8 * BLOCK_BYTES, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        device = rig.prefetch(*range(10, 20), tier=Tier.DEVICE)
        host = rig.prefetch(*range(20, 30))
        usage = rig.prefetcher.usage()
        assert (usage["held_blocks"], usage["device_held_blocks"]) == (8, 6)
        gate.open()
        assert (device.result(WAIT_S), host.result(WAIT_S)) == (6, 8 - first)


def test_what_is_more_urgent_takes_room_only_of_its_own_tier() -> None:
    """Less urgent hints for the other tier keep their place, though they are read later."""
    with Rig(40, device_blocks=4, prefetch_bytes_max=8 * BLOCK_BYTES, **ONE_AT_A_TIME) as rig:
        gate, first = busy(rig)
        late = rig.prefetch(*range(10, 20), deadline_s=8.0)
        later = rig.prefetch(*range(20, 30), deadline_s=9.0, tier=Tier.DEVICE)
        soon = rig.prefetch(*range(30, 33), deadline_s=1.0)
        gate.open()
        assert soon.result(WAIT_S) == 3
        assert late.result(WAIT_S) == 8 - first - 3
        assert later.result(WAIT_S) == 4


def test_a_block_that_makes_no_room_is_not_enough() -> None:
    """A block that another hint keeps goes on being held when the one that queues it is dropped."""
    with Rig(8, prefetch_bytes_max=3 * BLOCK_BYTES, **ONE_AT_A_TIME) as rig:
        rig.prefetch(7, deadline_s=50.0).result(WAIT_S)
        gate, first = busy(rig)
        assert first == 2
        rig.prefetch(7, deadline_s=9.0)  # it is in host memory, but was not when that was decided
        soon = rig.prefetch(3, deadline_s=1.0)
        assert soon.result(0) == 0
        assert rig.held == 3
        gate.open()


def test_hints_that_want_the_same_block_on_the_device_share_one_copy() -> None:
    """It is read once and copied once, and each of them counts it."""
    with Rig(4, device_blocks=4) as rig:
        gate = rig.hold()
        transfers = [rig.prefetch(*range(4), tier=Tier.DEVICE) for _ in range(3)]
        host = rig.prefetch(*range(4))
        gate.open()
        assert [each.result(WAIT_S) for each in (*transfers, host)] == [4] * 4
        assert sorted(rig.read()) == list(range(4))
        assert rig.count("device_written_blocks") == 4


def test_a_cancelled_hint_copies_nothing_to_the_device() -> None:
    """What was being read arrives in host memory, and goes no further."""
    with Rig(4, device_blocks=4) as rig:
        gate = rig.hold()
        transfer = rig.prefetch(*range(4), tier=Tier.DEVICE, deadline_s=5.0)
        gate.wait_reached()
        transfer.cancel()
        rig.turn()
        assert transfer.result(0) == 0
        gate.open()
        eventually(lambda: rig.prefetcher.usage()["device_held_blocks"] == 0)
        assert rig.on_device() == []
        assert rig.count("device_written_blocks") == 0


def test_while_copies_to_the_device_wait_no_more_is_read_for_prefetches() -> None:
    """What they pin in host memory is bounded, and a restore finds both lanes."""
    link = HeldLink()
    with Rig(64, device_blocks=60, links={Tier.HOST: link}, **ONE_AT_A_TIME) as rig:
        transfer = rig.prefetch(*range(60), tier=Tier.DEVICE)
        eventually(lambda: rig.prefetcher.usage()["promoting_blocks"] > 1)
        rig.turn()
        most = HOPS_PER_READ * rig.config.loads_inflight_max * (HOP_BYTES // BLOCK_BYTES)
        assert link.passed == 1, "one copy has begun, the others wait for it"
        assert rig.catalog.pins(Tier.HOST) <= most
        link.open(rig)
        assert transfer.result(WAIT_S) == 60


def test_closing_answers_what_waits_for_a_copy_to_the_device() -> None:
    """What has not begun is turned away; nothing stays pinned."""
    link = HeldLink()
    with Rig(8, device_blocks=8, links={Tier.HOST: link}, **ONE_AT_A_TIME) as rig:
        transfer = rig.prefetch(*range(8), tier=Tier.DEVICE, deadline_s=5.0)
        eventually(lambda: rig.prefetcher.usage()["promoting_blocks"] > 1)
        rig.prefetcher.close()
        assert transfer.done()
        assert len(rig.on_device()) <= 1


# -- errors and the end


def test_an_error_on_a_read_lane_reaches_who_waits_and_the_store() -> None:
    """A prefetch fails with its cause, and nothing is left LOADING or held."""
    with Rig(12) as rig:
        cause = RuntimeError("not the disk's fault")
        rig.ssd.outcomes[rig.blocks[3]] = cause
        transfer = rig.prefetch(*range(12), deadline_s=5.0)
        with pytest.raises(TransferFailed, match="not the disk") as info:
            transfer.result(WAIT_S)
        assert info.value.__cause__ is cause
        assert cause in rig.failures
        rig.turn()
        rig.prefetcher.close()
        for block in rig.blocks:
            row = rig.catalog.find(block)
            assert rig.catalog.state(row, Tier.HOST).name in ("ABSENT", "READY")


def test_an_error_on_the_loop_reaches_who_waits_and_the_store() -> None:
    """A link that raises fails everybody instead of leaving them to wait."""

    class Broken(LinkThrottle):
        def reserve(self, now: float, nbytes: int) -> float:
            raise RuntimeError("no such link")

    with Rig(4, links={Tier.SSD: Broken(1.0)}) as rig:
        transfer = rig.prefetch(0, 1)
        with pytest.raises(TransferFailed, match="no such link"):
            transfer.result(WAIT_S)
        answers = rig.load(2)
        eventually(lambda: bool(answers))
        assert str(answers[0][1]) == "no such link"
        assert str(rig.failures[0]) == "no such link"


def test_closing_turns_away_what_waits_and_ends_what_has_begun() -> None:
    """Nobody is left without an answer, and nothing that waited is read."""
    rig = Rig(60, **ONE_AT_A_TIME)
    with rig:
        gate, first = busy(rig)
        kept = rig.prefetch(50, present=[], deadline_s=1.0)
        transfers = [rig.prefetch(number) for number in range(first, 40)]
        loads = [rig.load(number) for number in range(40, 50)]
        closing = threading.Thread(target=rig.prefetcher.close)
        closing.start()
        eventually(lambda: all(transfer.done() for transfer in transfers))
        gate.open()
        closing.join(WAIT_S)
        for transfer in (kept, *transfers):
            with pytest.raises(TransferFailed, match="closing"):
                transfer.result(0)
        assert all(len(answers) == 1 for answers in loads)
        assert len(rig.read()) <= first + 1


def test_closing_does_not_wait_for_a_slow_link() -> None:
    """What has been read is handed over then, whenever the link would have delivered it."""
    with Rig(8, links={Tier.SSD: LinkThrottle(1.0), Tier.HOST: LinkThrottle(1.0)}) as rig:
        transfer = rig.prefetch(0, 1)
        answers = rig.load(2)
        eventually(lambda: len(rig.read()) == 3)
        assert not transfer.done()
        rig.prefetcher.close()
        assert transfer.result(0) == 2
        assert len(answers) == 1


def test_a_disk_that_hangs_does_not_hang_the_one_who_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a bound everybody is answered, and nothing is written to an engine's slots."""
    monkeypatch.setattr("kvtier.prefetcher.JOIN_S_MAX", 0.05)
    rig = Rig(8)
    gate = rig.hold()
    slots = poisoned_slots(1)
    transfer, answers = rig.prefetch(0, 1), rig.load(2, slots)
    gate.wait_reached()
    closed = in_thread(rig.prefetcher.close)

    def time_passes() -> None:
        rig.loop.now += 1.0

    def answered() -> bool:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            rig.loop.call_soon_threadsafe(time_passes)
        return transfer.done() and len(answers) == 1

    eventually(answered)
    closed()
    with pytest.raises(TransferFailed, match="closing"):
        transfer.result(0)
    assert isinstance(answers[0][1], TransferFailed)
    gate.open()
    eventually(lambda: rig.ssd.under_way == 0)
    rig.prefetcher._read_lane.shutdown(wait=True)
    assert read_slots(slots, 0) == POISON
    assert rig.loop.is_closed()
    rig.host.close()


def test_an_idle_loop_does_not_turn() -> None:
    """Nothing polls: without work there is no iteration, with timers none before they are due."""
    with Rig(8) as rig:
        rig.prefetch(*range(4)).result(WAIT_S)
        rig.prefetch(*range(4, 8), deadline_s=1000.0).result(WAIT_S)
        rig.turn()
        threading.Event().wait(0.1)
        before = rig.loop.turns
        assert not threading.Event().wait(0.3)
        assert rig.loop.turns == before


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefetch"), st.integers(0, 15), st.sampled_from([None, 0.5, 2.0])),
        st.tuples(st.just("cancel"), st.integers(0, 7), st.none()),
        st.tuples(st.just("load"), st.integers(0, 15), st.none()),
        st.tuples(st.just("advance"), st.just(1), st.none()),
        st.tuples(st.just("let go"), st.just(1), st.none()),
        st.tuples(st.just("fail"), st.integers(0, 15), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=40)
@given(steps=STEPS, room=st.integers(1, 8))
def test_any_course_of_hints_and_loads(steps: list[tuple[str, int, Any]], room: int) -> None:
    """Everybody is answered, right bytes arrive, the bound holds, and all is given back."""
    with Rig(18, host_blocks=8, prefetch_bytes_max=room * BLOCK_BYTES) as rig:
        transfers: list[Any] = []
        loads: list[tuple[int, Any, list[Any]]] = []
        for what, number, deadline_s in steps:
            if what == "prefetch":
                numbers = range(number, number + 3)
                transfers.append(rig.prefetch(*numbers, present=[*numbers], deadline_s=deadline_s))
            elif what == "cancel" and number < len(transfers):
                transfers[number].cancel()
            elif what == "load":
                slots = poisoned_slots(1)
                loads.append((number, slots, rig.load(number, slots)))
            elif what == "advance":
                rig.advance(1.0)
            elif what == "let go":
                rig.prefetcher.let_go()
            elif what == "fail":
                rig.ssd.outcomes[rig.blocks[number]] = ReadResult.FAILED
            assert rig.held <= room
        assert all(0 <= transfer.result(WAIT_S) <= 3 for transfer in transfers)
        for number, slots, answers in loads:
            eventually(lambda answers=answers: len(answers) == 1)
            right = payload_of(rig.blocks[number], BLOCK_BYTES)
            assert read_slots(slots, 0) == (right if answers[0][1] is None else POISON)
        rig.advance(2.0 + KEPT_AFTER_S + 0.1)
        assert rig.held == 0
        assert rig.failures == []
