from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import record_of

from kvtier.tiers.slots import SlotTable

names = st.integers(0, 5).map(lambda number: record_of(number).id)
slots = st.integers(0, 7)


class SlotModel(RuleBasedStateMachine):
    """A slot table against a dict from slot to whose it is."""

    @initialize(count=st.integers(0, 6))
    def start(self, count: int) -> None:
        """Make a table."""
        self.count = count
        self.table = SlotTable("host", count)
        self.taken: dict[int, object] = {}

    @rule()
    def reserve(self) -> None:
        """Take the lowest free slot, for nobody."""
        free = [slot for slot in range(self.count) if slot not in self.taken]
        slot = self.table.reserve()
        assert slot == (free[0] if free else None)
        if slot is not None:
            self.taken[slot] = None

    @rule(order=st.permutations(range(6)))
    def take_all_and_give_some_back(self, order: list[int]) -> None:
        """Fill the table, then free half of it in any order."""
        while len(self.taken) < self.count:
            self.reserve()
        self.reserve()
        for slot in [slot for slot in order if slot in self.taken][::2]:
            self.release(slot)

    @rule(slot=slots, block=names)
    def label(self, slot: int, block: object) -> None:
        """Make a slot that is taken a block's; another one raises."""
        if slot in self.taken:
            self.table.label(slot, block)
            self.taken[slot] = block
        else:
            with pytest.raises(ValueError, match=f"host slot {slot} is not taken"):
                self.table.label(slot, block)

    @rule(slot=slots)
    def release(self, slot: int) -> None:
        """Give a slot back, once."""
        if slot in self.taken:
            self.table.release(slot)
            del self.taken[slot]
        else:
            with pytest.raises(ValueError, match="twice"):
                self.table.release(slot)

    @rule(slot=slots, block=names)
    def forget(self, slot: int, block: object) -> None:
        """Give a slot back by name, which does it only if it is that block's."""
        self.table.forget(slot, block)
        if self.taken.get(slot) == block:
            del self.taken[slot]

    @precondition(lambda self: hasattr(self, "table"))
    @invariant()
    def same(self) -> None:
        """Both know the same."""
        assert len(self.table) == len(self.taken)
        assert self.table.check() == []
        for slot in range(8):
            for number in range(6):
                block = record_of(number).id
                assert self.table.holds(slot, block) == (self.taken.get(slot) == block)


TestSlotModel = SlotModel.TestCase
TestSlotModel.settings = settings(max_examples=50, stateful_step_count=30)


def test_a_lost_slot_is_noticed() -> None:
    """A slot that is neither free nor taken is a fault of the books."""
    table = SlotTable("host", 3)
    for slot in [table.reserve() for _ in range(3)]:
        table.release(slot)
    assert table.check() == []
    table._free.pop()
    assert table.check() == ["host: 2 slots accounted for, 3 were taken"]
