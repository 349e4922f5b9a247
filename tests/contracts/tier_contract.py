"""What every tier must do with blocks; a tier's tests inherit it and give ``make``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import SPEC, payload, record_of

from kvtier.tiers.base import Location, ReadResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.tiers.base import BlockTier, Record

BLOCK_BYTES = SPEC.block_layout.block_bytes


def fetch(tier: BlockTier, record: Record, where: Location) -> tuple[ReadResult, bytes]:
    """Read one block into poisoned memory."""
    target = bytearray(b"\xff" * record.payload_bytes)
    (result,) = tier.read([record.id], [where], [memoryview(target)])
    return result, bytes(target)


def store_one(tier: BlockTier, record: Record) -> Location | None:
    """Write one block with its known bytes."""
    (where,) = tier.write([record], [payload(record)])
    return where


class TierContract:
    """Inherit, and define ``make(tmp_path)``: a context with an empty tier of some blocks."""

    def make(self, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
        """Return a scope that yields an empty tier with room for 8 to 500 blocks of SPEC."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[BlockTier]:
        """Yield an empty tier whose books must balance at the end."""
        with self.make(tmp_path) as tier:
            yield tier
            assert tier.check() == []

    def test_what_was_written_is_read_bit_for_bit(self, tier: BlockTier) -> None:
        """A batch comes back as it was written, in any order of reading."""
        records = [record_of(n) for n in range(8)]
        placed = tier.write(records, [payload(record) for record in records])
        assert None not in placed
        assert len(set(placed)) == len(records)
        for record, where in reversed(list(zip(records, placed, strict=True))):
            assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))

    def test_a_batch_is_read_in_one_call(self, tier: BlockTier) -> None:
        """One read call answers per block: what is there is OK, what is not is not."""
        records = [record_of(n) for n in range(3)]
        placed = tier.write(records, [payload(record) for record in records])
        tier.drop([records[1].id], [placed[1]])
        targets = [bytearray(b"\xff" * BLOCK_BYTES) for _ in records]
        found = tier.read([r.id for r in records], placed, [memoryview(t) for t in targets])
        for record, result, target in zip(records, found, targets, strict=True):
            assert result is not ReadResult.OK or bytes(target) == bytes(payload(record))
        assert found[0] is found[2] is ReadResult.OK

    def test_an_unknown_block_is_never_ok(self, tier: BlockTier) -> None:
        """A location does not answer to another block's id, whatever part of the id differs."""
        known = record_of(1)
        where = store_one(tier, known)
        other_hash = record_of(2)
        other_namespace = replace(known, id=replace(known.id, namespace=bytes(32)))
        for stranger in (other_hash, other_namespace):
            assert fetch(tier, stranger, where)[0] is not ReadResult.OK

    def test_a_location_that_was_never_given_is_never_ok(self, tier: BlockTier) -> None:
        """Reading where nothing was written is an answer, not an exception."""
        known = record_of(1)
        where = store_one(tier, known)
        for nowhere in (
            replace(where, slot=where.slot + 1),
            replace(where, slot=10_000),
            replace(where, segment=where.segment + 1),
            replace(where, slot_bytes=where.slot_bytes + 4096),
        ):
            assert fetch(tier, record_of(2), nowhere)[0] is not ReadResult.OK
            result, data = fetch(tier, known, nowhere)
            assert result is not ReadResult.OK or data == bytes(payload(known))

    def test_a_dropped_block_is_never_another(self, tier: BlockTier) -> None:
        """Once dropped, and its place reused, an id never yields another block's bytes."""
        old = record_of(1)
        where = store_one(tier, old)
        tier.drop([old.id], [where])
        reused = False
        for number in range(2, 8):
            new = record_of(number)
            reused |= store_one(tier, new) == where
            result, data = fetch(tier, old, where)
            assert result is not ReadResult.OK or data == bytes(payload(old))
        assert reused, "a freed place was not used again"
        assert fetch(tier, old, where)[0] is not ReadResult.OK

    def test_dropping_twice_harms_nobody(self, tier: BlockTier) -> None:
        """A second drop of an id does not free the place of the block that moved in."""
        old, new = record_of(1), record_of(2)
        where = store_one(tier, old)
        tier.drop([old.id], [where])
        assert store_one(tier, new) == where
        tier.drop([old.id], [where])
        assert fetch(tier, new, where) == (ReadResult.OK, bytes(payload(new)))
        assert store_one(tier, record_of(3)) != where

    def test_a_full_tier_refuses_and_keeps_the_rest(self, tier: BlockTier) -> None:
        """What has no room is None; everything before it stays right."""
        stored: list[tuple[Record, Location]] = []
        for number in range(600):
            record = record_of(number)
            where = store_one(tier, record)
            if where is None:
                break
            stored.append((record, where))
        assert 8 <= len(stored) < 600
        assert store_one(tier, record_of(9_999)) is None
        for record, where in stored:
            assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))
        assert tier.usage().blocks == len(stored)
        assert tier.usage().used_bytes <= tier.usage().limit_bytes

    def test_a_batch_beyond_the_room_is_stored_in_part(self, tier: BlockTier) -> None:
        """A batch larger than the room places some blocks and refuses the others, one by one."""
        records = [record_of(number) for number in range(600)]
        placed = tier.write(records, [payload(record) for record in records])
        assert len(placed) == len(records)
        assert None in placed
        for record, where in zip(records, placed, strict=True):
            if where is not None:
                assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))
        assert tier.usage().blocks == len(placed) - placed.count(None)

    def test_drop_makes_room(self, tier: BlockTier) -> None:
        """A full tier takes exactly as many new blocks as were dropped."""
        stored = []
        number = 0
        while (where := store_one(tier, record_of(number))) is not None:
            stored.append((record_of(number), where))
            number += 1
        out = stored[:3]
        tier.drop([record.id for record, _ in out], [where for _, where in out])
        assert tier.usage().blocks == len(stored) - 3
        again = [store_one(tier, record_of(10_000 + n)) for n in range(4)]
        assert [where is None for where in again] == [False, False, False, True]

    def test_usage_counts(self, tier: BlockTier) -> None:
        """Usage follows writes and drops, within the limit."""
        assert tier.usage().blocks == 0
        record = record_of(1)
        before = tier.usage().used_bytes
        where = store_one(tier, record)
        assert tier.usage().blocks == 1
        assert tier.usage().used_bytes >= before + BLOCK_BYTES
        tier.drop([record.id], [where])
        assert tier.usage().blocks == 0

    def test_a_payload_of_another_size_is_not_stored(self, tier: BlockTier) -> None:
        """A payload that its record does not describe is refused and takes no room."""
        for size in (0, BLOCK_BYTES - 1, BLOCK_BYTES + 1):
            with contextlib.suppress(ValueError):
                assert tier.write([record_of(1)], [memoryview(bytes(size))]) == [None]
        assert tier.usage().blocks == 0
        room = 0
        while store_one(tier, record_of(room + 10)) is not None:
            room += 1
        assert room == self.blocks_at_most

    def test_a_wrong_payload_within_a_batch_takes_no_room(self, tier: BlockTier) -> None:
        """If a batch is refused for one payload, nothing of it stays behind."""
        room = 0
        good = record_of(1)
        for size in (0, BLOCK_BYTES - 1, BLOCK_BYTES + 1):
            with contextlib.suppress(ValueError):
                placed = tier.write([good, good], [payload(good), memoryview(bytes(size))])
                assert placed[1] is None
                tier.drop([good.id], [placed[0]])
        assert tier.usage().blocks == 0
        while store_one(tier, record_of(room + 10)) is not None:
            room += 1
        assert room == self.blocks_at_most, "a refused write kept its room"

    blocks_at_most = 0
    """How many blocks a fresh tier of ``make`` holds."""

    def test_a_buffer_of_another_size_is_never_ok(self, tier: BlockTier) -> None:
        """A block is not read into a buffer that it does not fill exactly."""
        record = record_of(1)
        where = store_one(tier, record)
        for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES):
            with contextlib.suppress(ValueError):
                (result,) = tier.read([record.id], [where], [memoryview(bytearray(size))])
                assert result is not ReadResult.OK

    def test_an_empty_batch_is_nothing(self, tier: BlockTier) -> None:
        """Empty batches are answered by empty lists."""
        assert tier.write([], []) == []
        assert tier.read([], [], []) == []
        tier.drop([], [])
        assert tier.usage().blocks == 0

    def test_lists_of_unequal_length_are_refused(self, tier: BlockTier) -> None:
        """A batch whose lists do not match is a programming error."""
        record = record_of(1)
        with pytest.raises(ValueError, match=r"shorter|longer"):
            tier.write([record], [])
        with pytest.raises(ValueError, match=r"shorter|longer"):
            tier.read([record.id], [], [])
        assert tier.usage().blocks == 0

    def test_close_twice(self, tmp_path: Path) -> None:
        """Closing is idempotent."""
        with self.make(tmp_path) as tier:
            store_one(tier, record_of(1))
            tier.close()
            tier.close()

    @given(st.lists(st.tuples(st.sampled_from(["write", "drop"]), st.integers(0, 11)), max_size=40))
    def test_like_a_dict(
        self, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
    ) -> None:
        """Over any course of writes and drops, a tier answers as a dict would."""
        model: dict[int, Location] = {}
        with self.make(tmp_path_factory.mktemp("tier")) as tier:
            for what, number in steps:
                record = record_of(number)
                if what == "write" and number not in model:
                    where = store_one(tier, record)
                    if where is not None:
                        assert where not in model.values()
                        model[number] = where
                elif what == "drop" and number in model:
                    tier.drop([record.id], [model.pop(number)])
            assert tier.usage().blocks == len(model)
            assert tier.check() == []
            for number, where in model.items():
                record = record_of(number)
                assert fetch(tier, record, where) == (ReadResult.OK, bytes(payload(record)))
