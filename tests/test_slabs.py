from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import record_of

from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import entry_of, table
from kvtier.tiers.index import INDEX_COMMIT_BYTES_MAX
from kvtier.tiers.recovery import FoundSegment
from kvtier.tiers.segment import PAGE_BYTES, SegmentHeader
from kvtier.tiers.slabs import OTHER_BYTES, SEGMENT_METADATA_BYTES, Slabs

SIZE = 8192
OTHER = 3 * SIZE
LIMIT = INDEX_COMMIT_BYTES_MAX + OTHER_BYTES + 3 * SEGMENT_METADATA_BYTES + 20 * SIZE


def slabs(found: dict[int, FoundSegment] | None = None, **changes: Any) -> Slabs:
    """Return books with room for about 20 slots in segments of 6."""
    settings: dict[str, Any] = {
        "limit_bytes": LIMIT,
        "segment_bytes_max": 6 * SIZE + PAGE_BYTES,
        "segments_max": 100,
        "index_bytes": lambda: 0,
        "now_ns": lambda: 1000,
    }
    return Slabs(found or {}, **{**settings, **changes})


def block(number: int) -> BlockId:
    """Return the id of a made-up block."""
    return record_of(number).id


def fill(books: Slabs, count: int, size: int = SIZE) -> list[tuple[BlockId, Location]]:
    """Store so many blocks and return where."""
    held = []
    for number in range(count):
        taken = books.take(size)
        assert taken is not None
        books.fill(block(number), taken[0])
        held.append((block(number), taken[0]))
    return held


def test_freed_slots_are_used_before_fresh_ones() -> None:
    """Slots are reused in place: a store that turns over does not grow."""
    books = slabs()
    held = fill(books, 4)
    books.empty(*held[1])
    used = books.used_bytes()
    taken = books.take(SIZE)
    assert taken == (held[1][1], False)
    assert books.used_bytes() == used


def test_a_hole_gives_its_bytes_back_and_takes_them_again() -> None:
    """A slot whose disk was given back does not count; writing to it does."""
    books = slabs()
    held = fill(books, 3)
    used = books.used_bytes()
    books.empty(*held[0])
    (where,) = books.take_free(10)
    books.give_back(where, hole=True)
    assert books.used_bytes() == used - SIZE
    assert books.take(SIZE) == (where, False)
    assert books.used_bytes() == used


def test_no_hole_is_filled_beyond_the_limit() -> None:
    """Where the limit allows no fresh slot, it allows no hole either."""
    index = [0]
    books = slabs(index_bytes=lambda: index[0])
    held = fill(books, 6)
    books.empty(*held[0])
    books.give_back(*books.take_free(1), hole=True)
    index[0] = LIMIT - books.used_bytes() - INDEX_COMMIT_BYTES_MAX
    assert books.room(SIZE) == 0
    assert books.take(SIZE) is None
    books.empty(*held[1])
    assert books.room(SIZE) == 1
    assert books.take(SIZE) == (held[1][1], False)


def test_a_block_frees_only_its_own_slot() -> None:
    """Freeing a block twice does not free the slot of the block that came after it."""
    books = slabs()
    ((first, where),) = fill(books, 1)
    books.empty(first, where)
    assert books.take(SIZE) == (where, False)
    books.fill(block(7), where)
    books.empty(first, where)
    assert books.holds(block(7), where)
    assert books.blocks() == 1


def test_the_number_of_files_is_bounded() -> None:
    """Beyond ``segments_max`` there is no new segment, and ``room`` says so."""
    books = slabs(segments_max=2)
    assert books.room(SIZE) == 12
    fill(books, 12)
    assert books.room(SIZE) == 0
    assert books.take(SIZE) is None


def test_other_sizes_give_way_by_segment_or_by_slot() -> None:
    """Free slots of other sizes are offered for their disk, the asker's own are not."""
    books = slabs()
    small = fill(books, 7)
    fill(books, 1, OTHER)
    for held in small[:6]:
        books.empty(*held)
    assert books.empty_segments(SIZE) == []
    assert len(books.empty_segments(OTHER)) == 1
    assert books.take_free(100, other_than=SIZE) == []
    assert len(books.take_free(4, other_than=OTHER)) == 4


@pytest.mark.parametrize("what", ["fill", "give_back"])
def test_a_slot_that_is_not_taken_cannot_be_settled(what: str) -> None:
    """Filling or giving back a slot twice raises and changes nothing."""
    books = slabs()
    ((first, where),) = fill(books, 1)
    with pytest.raises(ValueError, match="is LIVE, not TAKEN"):
        books.fill(first, where) if what == "fill" else books.give_back(where)
    assert books.check() == []


def test_found_slots_are_live_free_or_holes() -> None:
    """At an open every written slot is what entries and file system say."""
    found = {5: FoundSegment(SegmentHeader(5, 10, SIZE), 6, frozenset({1, 4}))}
    books = slabs(found)
    live = [entry_of(record_of(n), Location(5, n, SIZE), 0) for n in (0, 3)]
    books.settle(table(live))
    assert books.blocks() == 2
    assert books.used_bytes() == OTHER_BYTES + SEGMENT_METADATA_BYTES + 4 * SIZE
    assert sorted(where.slot for where in books.live()) == [0, 3]
    assert sorted(where.slot for where in books.take_free(10)) == [2, 5]
    assert books.check() == []


class SlabsMachine(RuleBasedStateMachine):
    """Whatever is done to the books, they balance, and no two blocks share a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.books = slabs()
        self.taken: list[Location] = []
        self.live: dict[Location, BlockId] = {}
        self.number = 0

    @rule(size=st.sampled_from([SIZE, OTHER]))
    def take(self, size: int) -> None:
        """Take a slot: there is one if and only if there is room."""
        room = self.books.room(size)
        taken = self.books.take(size)
        assert (taken is None) == (room == 0)
        if taken is not None:
            assert taken[0] not in self.taken
            assert taken[0] not in self.live
            self.taken.append(taken[0])

    @precondition(lambda self: self.taken)
    @rule(hole=st.booleans())
    def give_back(self, hole: bool) -> None:  # noqa: FBT001 - drawn by Hypothesis
        """Give a taken slot back."""
        self.books.give_back(self.taken.pop(), hole=hole)

    @precondition(lambda self: self.taken)
    @rule()
    def fill(self) -> None:
        """Put a block into a taken slot."""
        where = self.taken.pop()
        self.number += 1
        self.live[where] = block(self.number)
        self.books.fill(self.live[where], where)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def empty(self, data: st.DataObject) -> None:
        """Free a block's slot."""
        where = data.draw(st.sampled_from(sorted(self.live, key=str)))
        self.books.empty(self.live.pop(where), where)

    @rule(limit=st.integers(1, 4))
    def destroy(self, limit: int) -> None:
        """Give the disk of some free slots back."""
        for where in self.books.take_free(limit):
            assert where not in self.live
            self.books.give_back(where, hole=True)

    @rule()
    def unlink(self) -> None:
        """Remove segments that hold nothing."""
        for segment in self.books.empty_segments():
            assert all(where.segment != segment for where in (*self.live, *self.taken))
            self.books.forget(segment)

    @invariant()
    def balances(self) -> None:
        """Check the books against what is known."""
        assert self.books.check() == []
        assert self.books.blocks() == len(self.live)
        assert set(self.books.live()) == set(self.live)
        assert self.books.used_bytes() <= LIMIT


TestSlabs = SlabsMachine.TestCase
