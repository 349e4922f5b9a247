from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.history import USES_MAX, History


def digest(number: int) -> bytes:
    """Return a made-up block's hash."""
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, USES_MAX)), max_size=60))
def test_the_newest_wins_a_place(noted: list[tuple[int, int]]) -> None:
    """What is remembered is right, or forgotten because a later block took its place."""
    history, places = History(16), dict[int, tuple[int, int]]()
    for number, uses in noted:
        history.note([digest(number)], [uses])
        places[int.from_bytes(digest(number)[:8], "little") % 16] = (number, uses)
    kept = dict(places.values())
    for number in range(41):
        assert history.recall([digest(number)]) == [kept.get(number, 0)]


def test_many_at_once_are_as_good_as_one_by_one() -> None:
    """Blocks noted and recalled together are those noted and recalled alone."""
    together, alone = History(1 << 10), History(1 << 10)
    hashes, uses = [digest(n) for n in range(200)], [n % USES_MAX + 1 for n in range(200)]
    together.note(hashes, uses)
    for name, count in zip(hashes, uses, strict=True):
        alone.note([name], [count])
    assert together.recall(hashes) == [alone.recall([name])[0] for name in hashes]
    assert sum(map(bool, together.recall(hashes))) > 150


def test_memory_is_bounded() -> None:
    """A table has 4 bytes a place and never more, and its size is a power of two."""
    history = History(64)
    for number in range(1000):
        history.note([digest(number)], [1])
    assert history._words.nbytes == 256
    with pytest.raises(ValueError, match="power of two"):
        History(100)
