"""Questions to a table of entries, a million rows at a time: no row becomes a Python object."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.tiers.base import BlockId
from kvtier_inspect.opened import KEYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.entries import Entries

__all__ = [
    "Integers",
    "Rows",
    "Words",
    "around",
    "distinct",
    "matching",
    "namespaces",
    "parents",
    "rows_at",
    "rows_of",
    "total",
    "words",
]

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
    if len(values) and (values == values[0]).all():
        return [entries[column][0].tobytes()], np.zeros(len(entries), dtype=np.intp)
    # Digests are random: where their first words are equal, nearly always all of them are.
    _, first, which = np.unique(values[:, 0], return_index=True, return_inverse=True)
    if (values != values[first[which]]).any():
        _, first, which = np.unique(values, axis=0, return_index=True, return_inverse=True)
    return [entries[column][row].tobytes() for row in first], which.reshape(-1)


def namespaces(entries: Entries) -> dict[bytes, slice]:
    """Return the rows of each namespace; rows rise by key."""
    if not len(entries):
        return {}
    values = words(entries, "namespace")
    starts = np.flatnonzero((values[1:] != values[:-1]).any(axis=1)) + 1
    bounds = [0, *starts.tolist(), len(entries)]
    return {
        entries["namespace"][start].tobytes(): slice(start, stop)
        for start, stop in pairwise(bounds)
    }


def total(values: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Return a column's sum; damaged numbers do not wrap around, they are only not exact."""
    if not len(values):
        return 0
    huge = int(values.max()) >> 40 > 0
    return int(values.sum(dtype=np.float64 if huge else np.int64))


def matching(entries: Entries, namespace: str = "", tenant: str | None = None) -> Entries:
    """Return the entries of namespaces that begin with some hex digits, and of one tenant.

    Raises ``ValueError`` if ``namespace`` is not the beginning of one.
    """
    if namespace:
        entries = entries[_begins(entries, "namespace", namespace)]
    if tenant is not None:
        digest = hashlib.sha256(tenant.encode(errors="surrogateescape")).digest()
        entries = entries[entries["tenant"] == np.void(digest)]
    return entries


def rows_at(entries: Entries, blocks: Sequence[BlockId]) -> list[int]:
    """Return each block's row, or -1; rows rise by key."""
    keys = entries.view(KEYS)["key"]
    wanted = np.frombuffer(b"".join(each.namespace + each.hash for each in blocks), dtype="S64")
    if not len(keys):
        return [NOT_STORED] * len(blocks)
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    rows: list[int] = np.where(keys[found] == wanted, found, NOT_STORED).tolist()
    return rows


def rows_of(entries: Entries, block: str) -> Rows:
    """Return the rows of blocks named "HASH" or "NAMESPACE/HASH", each by its first hex digits."""
    namespace, slash, digest = block.rpartition("/")
    there = _begins(entries, "hash", digest)
    if slash:
        there &= _begins(entries, "namespace", namespace)
    return np.flatnonzero(there)


def _begins(entries: Entries, column: str, digits: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    if not re.fullmatch(r"[0-9a-fA-F]{1,64}", digits):
        raise ValueError(f"{column}: {digits!r} is not 1 to 64 hex digits")
    digits = digits.lower()
    values = words(entries, column)
    there = np.ones(len(entries), dtype=bool)
    for number in range(-(-len(digits) // 16)):
        piece = digits[16 * number : 16 * number + 16]
        shift = np.uint64(64 - 4 * len(piece))
        there &= values[:, number] >> shift == np.uint64(int(piece, 16))
    return there


def parents(entries: Entries) -> tuple[Rows, Rows]:
    """Return for each row the row of its parent, or -1, and the rows whose link is wrong.

    Rows rise by key. A link leads to the position before, within the namespace; so there is no
    cycle, whatever the entries say.
    """
    above = np.full(len(entries), NOT_STORED, dtype=np.intp)
    wrong: list[Rows] = []
    for rows in namespaces(entries).values():
        start, stop = rows.start, rows.stop
        found = _find(entries[start:stop])
        child = np.flatnonzero(found >= 0)
        position = entries["position"][start:stop]
        follows = position[found[child]] + np.uint64(1) == position[child]
        above[start + child[follows]] = start + found[child[follows]]
        wrong.append(start + child[~follows])
    return above, np.concatenate(wrong) if wrong else np.zeros(0, dtype=np.intp)


def around(entries: Entries, rows: Rows) -> tuple[list[bool], list[int]]:
    """Return for some rows whether their parents are stored, and how many blocks follow each.

    As ``parents`` has it, for a few rows of many: of the rest only one column is looked at.
    """
    some = entries[rows]
    blocks = [
        BlockId(*key)
        for key in zip(some["namespace"].tolist(), some["parent"].tolist(), strict=True)
    ]
    above = np.array(rows_at(entries, blocks), dtype=np.intp)
    stored = (above >= 0) & (entries["position"][above] + np.uint64(1) == some["position"])
    first = np.sort(words(some, "hash")[:, 0])
    claims = np.ascontiguousarray(entries["parent"]).view(">u8").reshape(-1, 4)[:, 0]
    claims = claims.astype(np.uint64)
    at = np.minimum(np.searchsorted(first, claims), max(len(first) - 1, 0))
    maybe = entries[first[at] == claims] if len(first) else entries[:0]
    followers: Counter[tuple[bytes, bytes, int]] = Counter(
        zip(
            maybe["namespace"].tolist(), maybe["parent"].tolist(), maybe["position"].tolist(),
            strict=True,
        )
    )  # fmt: skip
    names = ("namespace", "hash", "position")
    keys = zip(*(some[name].tolist() for name in names), strict=True)
    return stored.tolist(), [followers[space, digest, at + 1] for space, digest, at in keys]


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
