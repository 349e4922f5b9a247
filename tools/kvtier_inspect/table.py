"""Questions to a table of entries, a million rows at a time: no row becomes a Python object."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from kvtier.tiers.entries import Entries

__all__ = ["Integers", "Rows", "Words", "distinct", "parents", "words"]

Words = np.ndarray[Any, np.dtype[np.uint64]]
Rows = np.ndarray[Any, np.dtype[np.intp]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
NOT_STORED: Final = -1
"""In the place of a parent's row."""


def words(entries: Entries, column: str) -> Words:
    """Return a column of digests as [rows, 4] numbers, which sort as the digests do."""
    packed = np.ascontiguousarray(entries[column]).view(">u8").reshape(-1, 4)
    return packed.astype(np.uint64)


def distinct(entries: Entries, column: str) -> tuple[list[bytes], Rows]:
    """Return the digests of a column, rising, and for each row which of them it has."""
    values = words(entries, column)
    # Digests are random: where their first words are equal, nearly always all of them are.
    _, first, which = np.unique(values[:, 0], return_index=True, return_inverse=True)
    if (values != values[first[which]]).any():
        _, first, which = np.unique(values, axis=0, return_index=True, return_inverse=True)
    return [entries[column][row].tobytes() for row in first], which.reshape(-1)


def parents(entries: Entries) -> tuple[Rows, Rows]:
    """Return for each row the row of its parent, or -1, and the rows whose link is wrong.

    Rows rise by key. A link leads to the position before, within the namespace; so there is no
    cycle, whatever the entries say.
    """
    above = np.full(len(entries), NOT_STORED, dtype=np.intp)
    wrong: list[Rows] = []
    which = distinct(entries, "namespace")[1]
    bounds = np.flatnonzero(np.diff(which, prepend=-1, append=-1))
    for start, stop in pairwise(bounds.tolist()):
        found = _find(entries[start:stop])
        child = np.flatnonzero(found >= 0)
        position = entries["position"][start:stop]
        follows = position[found[child]] + np.uint64(1) == position[child]
        above[start + child[follows]] = start + found[child[follows]]
        wrong.append(start + child[~follows])
    return above, np.concatenate(wrong) if wrong else np.zeros(0, dtype=np.intp)


def _find(entries: Entries) -> Rows:
    """Return for each row of one namespace the row that its parent names, or -1."""
    keys, wanted = words(entries, "hash"), words(entries, "parent")
    first = np.ascontiguousarray(keys[:, 0])
    order = np.argsort(wanted[:, 0])  # in order, a search touches each page once
    at = np.empty(len(entries), dtype=np.intp)
    at[order] = np.searchsorted(first, wanted[order, 0])
    found = np.full(len(entries), NOT_STORED, dtype=np.intp)
    open_ = np.arange(len(entries))
    while len(open_):
        open_ = open_[at[open_] < len(first)]
        open_ = open_[first[at[open_]] == wanted[open_, 0]]
        same = (keys[at[open_]] == wanted[open_]).all(axis=1)
        found[open_[same]] = at[open_[same]]
        open_ = open_[~same]
        at[open_] += 1  # another digest with the same first word
    return found
