"""Who is where: the one owner of residency and pins.

Columns, not objects: a dict from block hash to row, and arrays over rows. A block may have a copy
in host memory and one on the SSD; each copy has its own lifecycle:

::

    ABSENT --write--> WRITING --commit--> READY      bytes come from the engine or a faster tier
    ABSENT --load---> LOADING --commit--> READY      bytes come from a slower tier
    WRITING, LOADING --abort--> ABSENT
    READY --evict--> EVICTING --evicted--> ABSENT    and back with --keep--> READY
    READY --drop--> ABSENT                           damaged or gone

Only READY copies are ever shown. A pinned copy is not evicted.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.policy import Policy

__all__ = ["Catalog", "CopyState"]


class CopyState(IntEnum):
    """The state of one block's copy in one tier."""

    ABSENT = 0
    WRITING = 1
    LOADING = 2
    READY = 3
    EVICTING = 4


_MOVES: Final[dict[tuple[CopyState, str], CopyState]] = {
    (CopyState.ABSENT, "write"): CopyState.WRITING,
    (CopyState.ABSENT, "load"): CopyState.LOADING,
    (CopyState.WRITING, "commit"): CopyState.READY,
    (CopyState.LOADING, "commit"): CopyState.READY,
    (CopyState.WRITING, "abort"): CopyState.ABSENT,
    (CopyState.LOADING, "abort"): CopyState.ABSENT,
    (CopyState.READY, "evict"): CopyState.EVICTING,
    (CopyState.EVICTING, "evicted"): CopyState.ABSENT,
    (CopyState.EVICTING, "keep"): CopyState.READY,
    (CopyState.READY, "drop"): CopyState.ABSENT,
}
_TIERS: Final = (Tier.HOST, Tier.SSD)
_COLUMN: Final = {Tier.HOST: 0, Tier.SSD: 1}
_ROWS_MIN: Final = 1024


class Catalog:
    """Residency, states and pins of all blocks; thread-safe.

    ``changed`` is the condition that whoever waits for a copy to become evictable waits on; its
    lock is the catalog's own and may be held over several calls.
    """

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._policies = {tier: policy() for tier in _TIERS}
        self._rows: dict[bytes, dict[bytes, int]] = {}
        self._ids: list[BlockId | None] = []
        self._free: list[int] = []
        self._ready = dict.fromkeys(_TIERS, 0)
        self._states = np.zeros((2, _ROWS_MIN), dtype=np.uint8)
        self._pins = np.zeros((2, _ROWS_MIN), dtype=np.int32)
        self._segments = np.zeros((2, _ROWS_MIN), dtype=np.uint64)
        self._slots = np.zeros((2, _ROWS_MIN), dtype=np.int64)
        self._slot_bytes = np.zeros((2, _ROWS_MIN), dtype=np.int64)

    # -- looking

    def residency(
        self, namespace: bytes, hashes: Sequence[bytes], order: Sequence[Tier] = _TIERS
    ) -> tuple[Tier | None, ...]:
        """Return the first tier of ``order`` in which each block is READY; touches nothing."""
        with self.changed:
            rows = self._rows.get(namespace, {})
            found: list[Tier | None] = []
            first, second = ((tier, self._states[_COLUMN[tier]]) for tier in order)
            for digest in hashes:
                row = rows.get(digest)
                if row is None:
                    found.append(None)
                elif first[1][row] == CopyState.READY:
                    found.append(first[0])
                else:
                    found.append(second[0] if second[1][row] == CopyState.READY else None)
            return tuple(found)

    def find(self, block: BlockId) -> int | None:
        """Return a block's row, or None if it has no copy in any state."""
        with self.changed:
            return self._rows.get(block.namespace, {}).get(block.hash)

    def id(self, row: int) -> BlockId:
        """Return the block of a row."""
        with self.changed:
            block = self._ids[row]
        if block is None:
            raise ValueError(f"catalog row {row} holds no block")
        return block

    def state(self, row: int, tier: Tier) -> CopyState:
        """Return the state of a row's copy in ``tier``."""
        with self.changed:
            return CopyState(int(self._states[_COLUMN[tier], row]))

    def location(self, row: int, tier: Tier) -> Location:
        """Return where a row's READY copy lies."""
        with self.changed:
            column = _COLUMN[tier]
            return Location(
                int(self._segments[column, row]),
                int(self._slots[column, row]),
                int(self._slot_bytes[column, row]),
            )

    def ready(self, tier: Tier) -> int:
        """Return the number of READY copies in ``tier``."""
        with self.changed:
            return self._ready[tier]

    def blocks(self, namespace: bytes, tier: Tier, limit: int) -> list[bytes]:
        """Return up to ``limit`` hashes of this namespace that are READY in ``tier``."""
        with self.changed:
            found: list[bytes] = []
            for digest, row in self._rows.get(namespace, {}).items():
                if len(found) == limit:
                    break
                if self._states[_COLUMN[tier], row] == CopyState.READY:
                    found.append(digest)
            return found

    # -- lifecycle

    def restore(self, copies: Iterable[tuple[BlockId, Location]]) -> None:
        """Enter SSD copies that were found at open, least recently used first."""
        with self.changed:
            for block, where in copies:
                row = self.begin(block, Tier.SSD, "write")
                self.commit(row, Tier.SSD, where)

    def begin(self, block: BlockId, tier: Tier, what: str) -> int:
        """Start a copy's life ("write" or "load") and return its row."""
        with self.changed:
            row = self.find(block)
            if row is None:
                if (CopyState.ABSENT, what) not in _MOVES:
                    raise ValueError(f"{block}: a copy in {tier} that is ABSENT cannot {what}")
                row = self._new_row()
                self._rows.setdefault(block.namespace, {})[block.hash] = row
                self._ids[row] = block
            self._move(row, tier, what)
            return row

    def commit(self, row: int, tier: Tier, where: Location, *, pinned: bool = False) -> None:
        """Make a copy READY, pinned once if asked for."""
        with self.changed:
            self._move(row, tier, "commit")
            column = _COLUMN[tier]
            self._segments[column, row] = where.segment
            self._slots[column, row] = where.slot
            self._slot_bytes[column, row] = where.slot_bytes
            self._pins[column, row] += pinned
            self._policies[tier].touch([row])
            self.changed.notify_all()

    def end(self, row: int, tier: Tier, what: str) -> None:
        """End a copy: "abort", "evicted", "drop"; or "keep" one whose eviction failed."""
        with self.changed:
            self._move(row, tier, what)
            if what == "keep":
                self._policies[tier].touch([row])
            else:
                self._policies[tier].forget(row)
                self._collect(row)
            self.changed.notify_all()

    def evict(self, tier: Tier, count: int, slot_bytes: int | None = None) -> list[int]:
        """Move up to ``count`` READY, unpinned copies (of one slot size) to EVICTING."""
        with self.changed:
            column = _COLUMN[tier]
            chosen: list[int] = []
            for row in self._policies[tier].victims():
                if len(chosen) >= count:
                    break
                if self._pins[column, row] or self._states[column, row] != CopyState.READY:
                    continue
                if slot_bytes is not None and self._slot_bytes[column, row] != slot_bytes:
                    continue
                chosen.append(row)
            for row in chosen:
                self._move(row, tier, "evict")
                self._policies[tier].forget(row)
            return chosen

    def touch(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """Note a use of a prompt's blocks, tail to head."""
        with self.changed:
            rows = self._rows.get(namespace, {})
            known = [rows[digest] for digest in reversed(hashes) if digest in rows]
            for tier in _TIERS:
                states = self._states[_COLUMN[tier]]
                self._policies[tier].touch(r for r in known if states[r] == CopyState.READY)

    # -- pins

    def pin(self, row: int, tier: Tier) -> bool:
        """Protect a READY copy from eviction; False if it is not READY. Undone by ``unpin``."""
        with self.changed:
            column = _COLUMN[tier]
            if self._states[column, row] != CopyState.READY:
                return False
            self._pins[column, row] += 1
            return True

    def unpin(self, row: int, tier: Tier) -> None:
        """Undo one ``pin``."""
        with self.changed:
            column = _COLUMN[tier]
            if self._pins[column, row] <= 0:
                raise ValueError(f"catalog row {row} is not pinned in {tier}")
            self._pins[column, row] -= 1
            self._collect(row)
            self.changed.notify_all()

    @contextmanager
    def pinned(
        self, namespace: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier | None]
    ) -> Iterator[list[bool]]:
        """Pin each block in its tier, or else in the other one, for the length of a scope.

        Yields which ones were READY at all; one whose tier is None is left alone.
        """
        held: list[tuple[int, Tier]] = []
        kept: list[bool] = []
        with self.changed:
            rows = self._rows.get(namespace, {})
            for digest, wanted in zip(hashes, tiers, strict=True):
                row = rows.get(digest)
                order = sorted(_TIERS, key=lambda tier: tier is not wanted) if wanted else []
                pinned = next((t for t in order if row is not None and self.pin(row, t)), None)
                kept.append(pinned is not None)
                if row is not None and pinned is not None:
                    held.append((row, pinned))
        try:
            yield kept
        finally:
            with self.changed:
                for row, tier in held:
                    self.unpin(row, tier)

    def check(self) -> list[str]:
        """Return what is wrong with the catalog's books, in words."""
        problems = []
        with self.changed:
            rows = [row for mapping in self._rows.values() for row in mapping.values()]
            if sorted([*rows, *self._free]) != list(range(len(self._ids))):
                problems.append(
                    f"catalog: {len(rows)} rows and {len(self._free)} free, {len(self._ids)} made"
                )
            for tier in _TIERS:
                ready = int((self._states[_COLUMN[tier]] == CopyState.READY).sum())
                if ready != self._ready[tier]:
                    problems.append(
                        f"catalog: {ready} ready in {tier}, {self._ready[tier]} counted"
                    )
            if (self._pins < 0).any():
                problems.append("catalog: a pin count below zero")
        return problems

    def pins(self) -> int:
        """Return the number of pins held."""
        with self.changed:
            return int(self._pins.sum())

    # -- inside

    def _move(self, row: int, tier: Tier, what: str) -> None:
        column = _COLUMN[tier]
        now = CopyState(int(self._states[column, row]))
        after = _MOVES.get((now, what))
        if after is None:
            raise ValueError(f"{self._ids[row]}: a copy in {tier} that is {now.name} cannot {what}")
        self._states[column, row] = after
        self._ready[tier] += (after == CopyState.READY) - (now == CopyState.READY)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = len(self._ids)
        self._ids.append(None)
        if row == self._states.shape[1]:
            self._states = _doubled(self._states)
            self._pins = _doubled(self._pins)
            self._segments = _doubled(self._segments)
            self._slots = _doubled(self._slots)
            self._slot_bytes = _doubled(self._slot_bytes)
        return row

    def _collect(self, row: int) -> None:
        """Free a row once no copy and no pin refers to it."""
        block = self._ids[row]
        if block is None or self._states[:, row].any() or self._pins[:, row].any():
            return
        rows = self._rows[block.namespace]
        del rows[block.hash]
        if not rows:
            del self._rows[block.namespace]
        self._ids[row] = None
        self._free.append(row)


def _doubled(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([column, np.zeros_like(column)], axis=1)
