"""Which row of the catalog's columns each block has, and what never changes about the block.

A million blocks are one dict per namespace, one list and a few columns; a row's ``BlockId`` is
built when it is asked for.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from kvtier.tiers.base import BlockId, Location

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.tiers.entries import Entries

__all__ = ["U32_MAX", "BlockRows", "Interned", "Places", "append_all", "prefix_order", "use_order"]

U32_MAX: Final = (1 << 32) - 1
_NAMES_CHUNK: Final = 1 << 16
"""Digests of a table that are Python objects at once while they are numbered."""


class Interned:
    """Digests as small numbers; a number is given back with its last use."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.digests: list[bytes] = []  # by number
        self._uses: list[int] = []
        self._free: list[int] = []

    def find(self, digest: bytes) -> int | None:
        """Return a digest's number, or None if nobody uses it."""
        return self._numbers.get(digest)

    def digest(self, number: int) -> bytes:
        """Return the digest of a number in use."""
        return self.digests[number]

    def take(self, digest: bytes, uses: int = 1) -> int:
        """Return a digest's number, in use so many times more."""
        number = self._numbers.get(digest)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self.digests)
                self.digests.append(b"")
                self._uses.append(0)
            self.digests[number] = digest
            self._numbers[digest] = number
        self._uses[number] += uses
        return number

    def release(self, number: int, uses: int = 1) -> None:
        """Undo so many uses."""
        self._uses[number] -= uses
        if not self._uses[number]:
            del self._numbers[self.digests[number]]
            self.digests[number] = b""
            self._free.append(number)

    def take_all(self, digests: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the number of each digest of a column ("V32"), each in use once more."""
        # Equal neighbours are taken together: the index sorts by namespace, and tenants are few.
        words = np.ascontiguousarray(digests).view("<u8").reshape(-1, digests.itemsize // 8)
        heads = np.flatnonzero(np.append(True, (words[1:] != words[:-1]).any(axis=1))[: len(words)])
        lengths = np.diff(heads, append=len(words))
        numbers = np.empty(len(heads), dtype=np.int32)
        for start in range(0, len(heads), _NAMES_CHUNK):
            chunk = slice(start, start + _NAMES_CHUNK)
            pairs = zip(digests[heads[chunk]].tolist(), lengths[chunk].tolist(), strict=True)
            numbers[chunk] = [self.take(digest, length) for digest, length in pairs]
        return np.repeat(numbers, lengths)


class BlockRows:
    """The rows in use and the block of each; its owner locks."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, dict[bytes, int]] = {}
        self._hashes: list[bytes | None] = []
        self._free: list[int] = []
        self._namespaces = Interned()
        self._tenants = Interned()
        self._namespace = array("i")
        self._tenant = array("i")
        self.positions = array("I")
        """The position in its prompt of each row's block, in blocks; not for writing."""

    def __len__(self) -> int:
        """Return the number of rows ever made, free ones included."""
        return len(self._hashes)

    def of(self, namespace: bytes) -> Mapping[bytes, int]:
        """Return the row of each block hash of a namespace, in no order; a live view."""
        return self._by_hash.get(namespace, {})

    def known(self, namespace: bytes, hashes: Iterable[bytes]) -> list[int]:
        """Return the rows of those of these blocks that have one, in their order."""
        of = self.of(namespace).get
        return [row for row in map(of, hashes) if row is not None]

    def spaces(self) -> Mapping[bytes, Mapping[bytes, int]]:
        """Return ``of`` for every namespace that has a row; a live view."""
        return self._by_hash

    def id(self, row: int) -> BlockId:
        """Return the block of a row; ``ValueError`` if it holds none."""
        return BlockId(*self.key(row))

    def key(self, row: int) -> tuple[bytes, bytes]:
        """Return the namespace and the hash of a row's block; ``ValueError`` if it holds none."""
        digest = self._hashes[row]
        if digest is None:
            raise ValueError(f"catalog row {row} holds no block")
        return self._namespaces.digest(self._namespace[row]), digest

    def holds(self, row: int) -> bool:
        """Return whether a row holds a block."""
        return self._hashes[row] is not None

    def matching(
        self, namespace: bytes | None, tenant_digest: bytes | None
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each row whether its block is of this namespace and tenant; None is any.

        A free row may match.
        """
        matches = np.ones(len(self), dtype=np.bool_)
        for digest, names, column in (
            (namespace, self._namespaces, self._namespace),
            (tenant_digest, self._tenants, self._tenant),
        ):
            if digest is not None:
                number = names.find(digest)
                matches &= False if number is None else np.asarray(column) == number
        return matches

    def add(self, block: BlockId, tenant_digest: bytes, position: int) -> int:
        """Give a block that has none a row."""
        return self.add_all(block.namespace, [block.hash], tenant_digest, [position])[0]

    def add_all(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tenant_digest: bytes,
        positions: Sequence[int],
    ) -> list[int]:
        """Give blocks that have none a row each; the hashes are distinct."""
        count = len(hashes)
        if not count:
            return []
        free, made = self._free, len(self._hashes)
        reused = min(count, len(free))
        rows = [free.pop() for _ in range(reused)] + list(range(made, made + count - reused))
        if count > reused:
            self._hashes.extend([None] * (count - reused))
            for column in (self._namespace, self._tenant, self.positions):
                column.frombytes(bytes((count - reused) * column.itemsize))
        number = self._namespaces.take(namespace, count)
        tenant = self._tenants.take(tenant_digest, count)
        by_hash = self._by_hash.setdefault(namespace, {})
        columns = self._hashes, self._namespace, self._tenant, self.positions
        names, namespaces, tenants, places = columns
        for row, digest, position in zip(rows, hashes, positions, strict=True):
            names[row] = digest
            namespaces[row] = number
            tenants[row] = tenant
            places[row] = min(U32_MAX, position)
            by_hash[digest] = row
        return rows

    def keys(self, rows: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Return the namespace and the hash of the block of each of these rows, which hold one."""
        names, numbers, hashes = self._namespaces.digests, self._namespace, self._hashes
        found = [(names[numbers[row]], hashes[row]) for row in rows]
        return cast("list[tuple[bytes, bytes]]", found)

    def remove(self, row: int) -> None:
        """Take a row from its block; ``add`` may give it to another."""
        self.remove_all((row,))

    def remove_all(self, rows: Sequence[int]) -> list[bytes]:
        """Take distinct rows from their blocks and return the hashes of these.

        ``add`` may give the rows to others.
        """
        hashes, keys = self._hashes, self.keys(rows)
        for row, (namespace, digest) in zip(rows, keys, strict=True):
            mine = self._by_hash[namespace]
            del mine[digest]
            if not mine:
                del self._by_hash[namespace]
            hashes[row] = None
        for digests, column in (
            (self._namespaces, self._namespace),
            (self._tenants, self._tenant),
        ):
            for number, uses in Counter([column[row] for row in rows]).items():
                digests.release(number, uses)
        self._free.extend(rows)
        return [digest for _, digest in keys]

    def restore(self, entries: Entries) -> None:
        """Give the blocks of a table the rows 0, 1, ...; ``ValueError`` if it names one twice.

        Raises also if there are rows already.
        """
        if self._hashes:
            raise ValueError(f"entries: the catalog has {len(self)} rows already; wanted a new one")
        namespaces = Interned()
        numbers = namespaces.take_all(entries["namespace"])
        hashes = entries["hash"].tolist()  # the dicts' keys are these very objects
        by_hash = {}
        grouped = np.argsort(numbers, kind="stable")
        for rows in np.split(grouped, np.flatnonzero(np.diff(numbers[grouped])) + 1):
            if rows.size:
                mine = hashes if rows.size == len(hashes) else [hashes[row] for row in rows]
                by_hash[namespaces.digest(numbers[rows[0]])] = dict(
                    zip(mine, rows.tolist(), strict=True)
                )
        twice = len(hashes) - sum(map(len, by_hash.values()))
        if twice:
            raise ValueError(
                f"entries: {twice} of {len(hashes)} name a block that another one does"
            )
        self._by_hash, self._hashes, self._namespaces = by_hash, hashes, namespaces
        append_all(self._namespace, numbers)
        append_all(self._tenant, self._tenants.take_all(entries["tenant"]))
        append_all(self.positions, np.minimum(entries["position"], U32_MAX))

    def check(self) -> list[str]:
        """Return what is wrong with the rows, in words."""
        rows = [row for mapping in self._by_hash.values() for row in mapping.values()]
        if sorted([*rows, *self._free]) == list(range(len(self))):
            return []
        return [f"catalog: {len(rows)} rows and {len(self._free)} free, {len(self)} made"]


class Places:
    """Where each row's copy on the SSD lies, as columns; its owner locks."""

    def __init__(self) -> None:
        self._segment = array("Q")
        self._slot = array("I")
        self.slot_bytes = array("Q")
        self.columns = (self._segment, self._slot, self.slot_bytes)

    def at(self, row: int) -> Location:
        """Return a row's place; of a row without a copy it means nothing."""
        return Location(self._segment[row], self._slot[row], self.slot_bytes[row])

    def put(self, rows: Iterable[int], places: Iterable[Location]) -> None:
        """Change the places of rows."""
        segment, slot, slot_bytes = self.columns
        for row, where in zip(rows, places, strict=True):
            segment[row] = where.segment
            slot[row] = where.slot
            slot_bytes[row] = where.slot_bytes

    def restore(self, entries: Entries) -> None:
        """Append the places of a table."""
        for column, name in zip(self.columns, ("segment", "slot", "slot_bytes"), strict=True):
            append_all(column, entries[name])


def use_order(entries: Entries) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return a table's rows, least recently used first and of one use the last position first."""
    _, use = np.unique(entries["last_use_ns"], return_inverse=True)
    ahead = U32_MAX - np.minimum(entries["position"], U32_MAX)
    return np.argsort(use.astype(np.uint64) << np.uint64(32) | ahead)


def prefix_order(entries: Entries) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the same, but no block before one that follows it in a prompt, whatever was recorded.

    Uses are recorded in part when the store dies; a block counts as used when its last child was.
    """
    # 64 bits of each hash are enough for an order. Both sides sorted: a search in memory order.
    names, parents = (
        np.ascontiguousarray(np.ascontiguousarray(entries[name]).view("<u8")[::4])
        for name in ("hash", "parent")
    )
    by_name, by_parent = np.argsort(names), np.argsort(parents)
    at = np.searchsorted(names[by_name], parents[by_parent])
    before = np.zeros(len(names), dtype=np.intp)
    before[by_parent] = by_name[np.minimum(at, len(names) - 1)]
    found = names[before] == parents
    use = np.minimum(entries["last_use_ns"], np.iinfo(np.int64).max).astype(np.int64)
    position = np.minimum(entries["position"], U32_MAX).astype(np.int64)
    deepest = np.argsort(-position, kind="stable")
    for rows in np.split(deepest, np.flatnonzero(np.diff(position[deepest])) + 1):
        known = rows[found[rows]]
        np.maximum.at(use, before[known], use[known])
    return np.lexsort((-position, use))


def append_all(column: array[int], values: np.ndarray[Any, Any]) -> None:
    """Append a numpy column to a column of rows, cast to its type."""
    column.frombytes(values.astype(column.typecode).tobytes())
