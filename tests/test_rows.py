from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.rows import BlockRows, Interned, prefix_order
from kvtier.tiers.base import BlockId
from kvtier.tiers.entries import ENTRY, Entries

DIGESTS = [bytes([n]) * 32 for n in range(4)]


def table(blocks: list[tuple[bytes, bytes, bytes]]) -> Entries:
    """Return an index table of (namespace, hash, tenant)."""
    made = np.zeros(len(blocks), dtype=ENTRY)
    for entry, (namespace, digest, tenant) in zip(made, blocks, strict=True):
        entry["namespace"], entry["hash"] = np.void(namespace), np.void(digest)
        entry["tenant"] = np.void(tenant)
    return made


def test_a_number_lives_as_long_as_it_is_used() -> None:
    """One digest has one number; with its last use the number may go to another digest."""
    names = Interned()
    first, second = names.take(DIGESTS[0]), names.take(DIGESTS[1])
    assert names.take(DIGESTS[0]) == first != second
    names.release(first)
    assert names.find(DIGESTS[0]) == first
    names.release(first)
    assert names.find(DIGESTS[0]) is None
    assert names.take(DIGESTS[2]) == first
    assert [names.digest(number) for number in (first, second)] == [DIGESTS[2], DIGESTS[1]]


def test_passing_tenants_leave_nothing_behind() -> None:
    """However many tenants and namespaces come and go, only those in use are remembered."""
    rows = BlockRows()
    for number in range(100):
        digest = number.to_bytes(32, "big")
        rows.remove(rows.add(BlockId(digest, digest), digest, 0))
    assert len(rows) == len(rows._tenants.digests) == len(rows._namespaces.digests) == 1
    assert rows.spaces() == {}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DIGESTS), st.integers(0, 99), st.sampled_from(DIGESTS)),
        unique_by=lambda block: block[:2],
        max_size=30,
    )
)
def test_a_table_is_as_good_as_blocks_one_by_one(blocks: list[tuple[bytes, int, bytes]]) -> None:
    """Rows restored from a table are those that the same blocks get one after the other."""
    one_by_one, restored = BlockRows(), BlockRows()
    named = [(namespace, bytes([n]) * 32, tenant) for namespace, n, tenant in blocks]
    for namespace, digest, tenant in named:
        one_by_one.add(BlockId(namespace, digest), tenant, 0)
    restored.restore(table(named))
    assert restored.spaces() == one_by_one.spaces()
    for namespace in (None, *DIGESTS, b"?" * 32):
        for tenant in (None, *DIGESTS):
            matching = (rows.matching(namespace, tenant) for rows in (restored, one_by_one))
            np.testing.assert_array_equal(*matching)
    for rows in (restored, one_by_one):
        for row in range(len(rows)):
            rows.remove(row)
        assert rows.spaces() == {}
        assert rows.check() == []
        assert rows.matching(DIGESTS[0], None).sum() == 0


def test_a_free_row_holds_no_block() -> None:
    """Only a row in use has a block."""
    rows = BlockRows()
    row = rows.add(BlockId(DIGESTS[0], DIGESTS[1]), DIGESTS[2], 2**40)
    assert rows.positions[row] == 2**32 - 1
    assert rows.holds(row)
    rows.remove(row)
    assert not rows.holds(row)
    with pytest.raises(ValueError, match=f"row {row} holds no block"):
        rows.id(row)


@given(st.permutations(range(6)), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_no_head_is_older_than_its_tail(rows: list[int], used: list[int]) -> None:
    """In prefix order a block follows all that follow it in a prompt, whatever uses were lost."""
    before = [-1, 0, 1, 1, 0, -1]
    made = np.zeros(6, dtype=ENTRY)
    for row, number in zip(made, rows, strict=True):
        row["hash"] = np.void(bytes([number + 1]) * 32)
        row["parent"] = np.void(bytes([before[number] + 1]) * 32)
        row["position"] = (0, 1, 2, 2, 1, 0)[number]
        row["last_use_ns"] = used[number]
    order = [rows[row] for row in prefix_order(made).tolist()]
    assert sorted(order) == list(range(6))
    assert all(head < 0 or order.index(head) > order.index(n) for n, head in enumerate(before))
    assert prefix_order(made[:0]).tolist() == []
