from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import record_of

from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import entry_of, id_at, table
from kvtier.tiers.recovery import FoundSegment, plan_repairs
from kvtier.tiers.segment import SegmentHeader

if TYPE_CHECKING:
    from kvtier.tiers.entries import Entries

SIZE = 8192


def entry(number: int, segment: int, slot: int, size: int = SIZE) -> bytes:
    """Return the packed entry of a made-up block."""
    record = record_of(number, id=BlockId(bytes(32), number.to_bytes(32, "little")))
    return entry_of(record, Location(segment, slot, size), 0)


def packed(entries: Entries) -> list[bytes]:
    """Return the rows of a table."""
    return [entries[row : row + 1].tobytes() for row in range(len(entries))]


def segments(*found: tuple[int, int]) -> dict[int, FoundSegment]:
    """Return segments of ten slots, given as (id, slots written)."""
    return {
        number: FoundSegment(SegmentHeader(number, 10, SIZE), written) for number, written in found
    }


def test_what_agrees_is_kept() -> None:
    """Entries whose segments hold their slots are kept, in their order."""
    entries = [entry(1, 5, 0), entry(2, 5, 3), entry(3, 6, 9)]
    repairs = plan_repairs(table(entries), segments((5, 4), (6, 10)))
    assert packed(repairs.keep) == entries
    assert repairs.remove == ()
    assert repairs.unlink == ()


def test_an_empty_store_needs_no_repair() -> None:
    """Nothing in, nothing out."""
    repairs = plan_repairs(table(b""), {})
    assert (packed(repairs.keep), repairs.remove, repairs.unlink) == ([], (), ())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry(1, 99, 0), "gone"),
        (entry(1, 5, 4), "ends before"),
        (entry(1, 5, 10), "ends before"),
        (entry(1, 5, 2**32 - 1), "ends before"),
        (entry(1, 5, 0, size=4 * SIZE), "slot size"),
    ],
)
def test_what_contradicts_the_disk_is_removed(bad: bytes, reason: str) -> None:
    """An entry that cannot be true is removed, with its reason; the others stay."""
    good = entry(2, 5, 3)
    repairs = plan_repairs(table([bad, good]), segments((5, 4)))
    assert packed(repairs.keep) == [good]
    ((block, why),) = repairs.remove
    assert block == id_at(table(bad), 0)
    assert reason in why


def test_a_slot_claimed_twice_is_nobodys() -> None:
    """Two entries cannot both be right about a slot, so neither is believed."""
    twins = [entry(1, 5, 0), entry(2, 5, 0)]
    good = entry(3, 5, 1)
    repairs = plan_repairs(table([*twins, good]), segments((5, 2)))
    assert packed(repairs.keep) == [good]
    assert {block for block, _ in repairs.remove} == {id_at(table(twin), 0) for twin in twins}


def test_an_empty_segment_goes() -> None:
    """Segments that hold nothing that is kept are unlinked, ascending."""
    found = segments((8, 1), (7, 4), (5, 1))
    repairs = plan_repairs(table([entry(1, 5, 0), entry(2, 8, 9)]), found)
    assert repairs.unlink == (7, 8)


def any_entries() -> st.SearchStrategy[list[bytes]]:
    """Draw entries of distinct blocks, many of them nonsense."""
    places: Any = st.tuples(
        st.integers(0, 5), st.integers(0, 12), st.sampled_from([SIZE, SIZE, SIZE, 2 * SIZE])
    )
    return st.lists(places, max_size=30).map(
        lambda found: [entry(n, *place) for n, place in enumerate(found)]
    )


@given(any_entries(), st.dictionaries(st.integers(0, 5), st.integers(0, 10), max_size=6))
def test_repairs_leave_index_and_segments_in_agreement(
    entries: list[bytes], written: dict[int, int]
) -> None:
    """Every entry is kept or removed, what is kept lies within its segment, no slot is shared."""
    found = segments(*written.items())
    repairs = plan_repairs(table(entries), found)
    kept = [id_at(repairs.keep, row) for row in range(len(repairs.keep))]
    removed = [block for block, _ in repairs.remove]
    assert Counter(kept + removed) == Counter(id_at(table(each), 0) for each in entries)
    places = [(int(one["segment"]), int(one["slot"])) for one in repairs.keep]
    assert len(set(places)) == len(places)
    for one in repairs.keep:
        segment = found[int(one["segment"])]
        assert one["slot"] < segment.slots_written
        assert one["slot_bytes"] == segment.header.slot_bytes
    live = {segment for segment, _ in places}
    assert set(repairs.unlink) == set(found) - live
    assert all(reason for _, reason in repairs.remove)


@given(any_entries(), st.dictionaries(st.integers(0, 5), st.integers(0, 10), max_size=6))
def test_repairs_are_done_once(entries: list[bytes], written: dict[int, int]) -> None:
    """What the repairs leave behind needs no repair."""
    found = segments(*written.items())
    first = plan_repairs(table(entries), found)
    left = {segment: slab for segment, slab in found.items() if segment not in first.unlink}
    second = plan_repairs(first.keep, left)
    assert packed(second.keep) == packed(first.keep)
    assert second.remove == ()
    assert second.unlink == ()
