"""Who is where: the one owner of residency and pins.

Columns, not objects: a dict from block hash to row, and arrays over rows. A block may have a copy
on the device, one in host memory and one on the SSD, each with its own life (``lifecycle``). Only
READY copies are ever shown. A pinned copy is not evicted.
"""

from __future__ import annotations

import threading
from array import array
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.changes import CHANGES_KEPT, BlockTiers, CatalogChanges, ChangeLog
from kvtier.lifecycle import CopyState, after
from kvtier.plan import Tier
from kvtier.rows import BlockRows, Places, append_all, use_order
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.index import Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.policy import Policy
    from kvtier.tiers.entries import Entries

__all__ = ["USES_KEPT", "Catalog", "CopyState"]

USES_KEPT: Final = 1 << 16
"""Blocks whose uses are remembered until ``uses`` takes them; uses of others are not recorded."""

_TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.SSD)
_BIT: Final = {Tier.HOST: 1, Tier.SSD: 2, Tier.DEVICE: 4}
_SHOWN: Final[tuple[tuple[Tier, ...], ...]] = tuple(
    tuple(tier for tier in _TIERS if bits & _BIT[tier]) for bits in range(8)
)
"""The tiers that a sum of bits stands for, fastest first."""
_LAST_USE_NS_MAX: Final = (1 << 63) - 1


class Catalog:
    """Residency, states and pins of all blocks; thread-safe.

    ``changed`` is the condition that whoever waits for a copy to become evictable waits on; its
    lock is the catalog's own and may be held over several calls. Changes are numbered from
    ``first_change``.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        *,
        first_change: int = 0,
        changes_kept: int = CHANGES_KEPT,
        uses_kept: int = USES_KEPT,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._policies = {tier: policy() for tier in _TIERS}
        self._rows = BlockRows()
        self._changes = ChangeLog(changes_kept, first_change)
        self._ready = dict.fromkeys(_TIERS, 0)
        self._used: dict[int, int] = {}  # row -> uses that were not taken yet
        self._uses_kept = uses_kept
        # One element a row. A numpy view of one may not outlive the call that makes it: an array
        # that is looked into cannot grow.
        self._states = {tier: array("B") for tier in _TIERS}
        self._pins = {tier: array("i") for tier in _TIERS}
        self._shown = array("B")  # the sum of the bits of the tiers in which a block is READY
        self._slots = {Tier.DEVICE: array("I"), Tier.HOST: array("I")}
        self._places = Places()
        self._last_use_ns = array("q")
        self._columns = (
            *self._states.values(), *self._pins.values(), self._shown,
            *self._slots.values(), *self._places.columns, self._last_use_ns,
        )  # fmt: skip

    # -- looking

    def residency(
        self, namespace: bytes, hashes: Sequence[bytes], order: Sequence[Tier] = _TIERS
    ) -> tuple[Tier | None, ...]:
        """Return the first tier of ``order`` in which each block is READY; touches nothing."""
        best = [next((tier for tier in order if tier in tiers), None) for tiers in _SHOWN]
        with self.changed:
            shown = self._shown
            rows = map(self._rows.of(namespace).get, hashes)
            return tuple([None if row is None else best[shown[row]] for row in rows])

    def find(self, block: BlockId) -> int | None:
        """Return a block's row, or None if it has no copy in any state."""
        with self.changed:
            return self._rows.of(block.namespace).get(block.hash)

    def id(self, row: int) -> BlockId:
        """Return the block of a row."""
        with self.changed:
            return self._rows.id(row)

    def position(self, row: int) -> int:
        """Return the position in its prompt of a row's block, in blocks."""
        with self.changed:
            return self._rows.position(row)

    def state(self, row: int, tier: Tier) -> CopyState:
        """Return the state of a row's copy in ``tier``."""
        with self.changed:
            return CopyState(self._states[tier][row])

    def location(self, row: int, tier: Tier) -> Location:
        """Return where a row's READY copy lies."""
        with self.changed:
            if tier is Tier.SSD:
                return self._places.at(row)
            return Location(0, self._slots[tier][row], 0)

    def places(self, namespace: bytes, hashes: Iterable[bytes]) -> list[Location | None]:
        """Return where each block's READY copy on the SSD lies; None for those that have none."""
        with self.changed:
            shown, bit, at = self._shown, _BIT[Tier.SSD], self._places.at
            rows = map(self._rows.of(namespace).get, hashes)
            return [None if row is None or not shown[row] & bit else at(row) for row in rows]

    def ready(self, tier: Tier) -> int:
        """Return the number of READY copies in ``tier``."""
        with self.changed:
            return self._ready[tier]

    def blocks(self, namespace: bytes, tier: Tier, limit: int) -> list[bytes]:
        """Return up to ``limit`` hashes of this namespace that are READY in ``tier``."""
        with self.changed:
            shown, bit = self._shown, _BIT[tier]
            rows = self._rows.of(namespace).items()
            return list(islice((digest for digest, row in rows if shown[row] & bit), limit))

    def select(
        self, namespace: bytes | None, tenant_digest: bytes | None, used_before_ns: int | None
    ) -> list[int]:
        """Return the rows with a copy in any state that match all filters; None matches all."""
        with self.changed:
            chosen = self._rows.matching(namespace, tenant_digest)
            columns = [np.asarray(states) for states in self._states.values()]
            chosen &= np.bitwise_or.reduce(columns) != CopyState.ABSENT
            if used_before_ns is not None:
                chosen &= np.asarray(self._last_use_ns) < used_before_ns
            return np.flatnonzero(chosen).tolist()

    # -- following

    def changes(self, since: int) -> CatalogChanges | None:
        """Return the blocks whose READY tiers changed after sequence number ``since``.

        None if that is too long ago, or not of this catalog: the caller takes a ``snapshot``.
        """
        with self.changed:
            return self._changes.since(since)

    def snapshot(self) -> tuple[int, Iterator[BlockTiers]]:
        """Return everything READY, and the sequence number to ask ``changes`` from."""
        with self.changed:
            sequence, shown = self._changes.sequence, bytes(self._shown)
            spaces = [
                (namespace, list(rows), list(rows.values()))
                for namespace, rows in self._rows.spaces().items()
            ]
        return sequence, (
            (namespace, digest, _SHOWN[shown[row]])
            for namespace, hashes, rows in spaces
            for digest, row in zip(hashes, rows, strict=True)
            if shown[row]
        )

    # -- lifecycle

    def restore(self, entries: Entries) -> None:
        """Enter the SSD copies that were found at open, into a catalog that is empty.

        They are ordered by last use, and those of one use tail to head. Raises ``ValueError`` if a
        block is there twice, and enters none then.
        """
        count = len(entries)
        with self.changed:
            self._rows.restore(entries)
            append_all(self._states[Tier.SSD], np.full(count, CopyState.READY))
            append_all(self._shown, np.full(count, _BIT[Tier.SSD]))
            self._places.restore(entries)
            append_all(self._last_use_ns, np.minimum(entries["last_use_ns"], _LAST_USE_NS_MAX))
            for column in self._columns:
                append_all(column, np.zeros(count - len(column)))  # all that is not said above
            self._ready[Tier.SSD] = count
            self._policies[Tier.SSD].enter(use_order(entries))
            self._changes.cut()
            self.changed.notify_all()

    def begin(
        self,
        block: BlockId,
        tier: Tier,
        what: str,
        *,
        tenant_digest: bytes = b"",
        position: int = 0,
        now_ns: int = 0,
    ) -> int:
        """Start a copy's life ("write" or "load") and return its row.

        ``tenant_digest`` and ``position`` describe a block that has no copy yet; ``now_ns`` counts
        as a use in ``select``, so that a new block is not an old one.
        """
        with self.changed:
            row = self.find(block)
            if row is None:
                after(CopyState.ABSENT, what)  # raises before there is a row
                row = self._rows.add(block, tenant_digest, position)
                if row == len(self._shown):
                    for column in self._columns:
                        column.append(0)
            self._move(row, tier, what)
            self._last_use_ns[row] = max(self._last_use_ns[row], now_ns)
            return row

    def commit(self, row: int, tier: Tier, where: Location, *, pinned: bool = False) -> None:
        """Make a copy READY, pinned once if asked for. In memory only a place's slot counts."""
        with self.changed:
            self._move(row, tier, "commit")
            if tier is Tier.SSD:
                self._places.put(row, where)
            else:
                self._slots[tier][row] = where.slot
            self._pins[tier][row] += pinned
            self._policies[tier].touch([row])
            self.changed.notify_all()

    def relocate(self, row: int, where: Location) -> None:
        """Say where a READY copy on the SSD lies now; a pin does not keep it where it was."""
        with self.changed:
            if self._states[Tier.SSD][row] != CopyState.READY:
                raise ValueError(f"catalog row {row}: only a READY copy on the SSD has a place")
            self._places.put(row, where)

    def end(self, row: int, tier: Tier, what: str) -> None:
        """End a copy: "abort", "evicted", "drop"; or "keep" one whose eviction failed."""
        with self.changed:
            self._move(row, tier, what)
            if what == "keep":
                self._policies[tier].touch([row])
            else:
                self._policies[tier].forget(row)
                if tier is Tier.SSD:
                    self._used.pop(row, None)
                self._collect(row)
            self.changed.notify_all()

    def evict(self, tier: Tier, count: int) -> list[int]:
        """Move up to ``count`` READY, unpinned copies to EVICTING, least valuable first."""
        with self.changed:
            pins = self._pins[tier]
            fitting = (row for row in self._policies[tier].victims() if not pins[row])
            return self.take_out(list(islice(fitting, count)), tier)

    def take_out(self, rows: Iterable[int], tier: Tier) -> list[int]:
        """Move those of ``rows`` that are READY and unpinned to EVICTING; returns them."""
        with self.changed:
            states, pins = self._states[tier], self._pins[tier]
            taken = [row for row in rows if states[row] == CopyState.READY and not pins[row]]
            for row in taken:
                self._move(row, tier, "evict")
                self._policies[tier].forget(row)
            return taken

    # -- uses

    def touch(self, namespace: bytes, hashes: Sequence[bytes], now_ns: int) -> None:
        """Note a use of a prompt's blocks, tail to head.

        A clock that goes back changes no last use; ``uses`` has those on the SSD that had room.
        """
        with self.changed:
            of = self._rows.of(namespace)
            known = [row for row in map(of.get, reversed(hashes)) if row is not None]
            for tier in _TIERS:
                bit = _BIT[tier]
                if self._ready[tier]:
                    self._policies[tier].touch(row for row in known if self._shown[row] & bit)
            for row in known:
                self._last_use_ns[row] = max(self._last_use_ns[row], now_ns)
                room = row in self._used or len(self._used) < self._uses_kept
                if room and self._shown[row] & _BIT[Tier.SSD]:
                    self._used[row] = self._used.get(row, 0) + 1

    def uses(self, limit: int) -> list[Use]:
        """Take out the new uses of up to ``limit`` blocks that have a copy on the SSD."""
        with self.changed:
            rows = list(islice(self._used, limit))
            last = self._last_use_ns
            return [Use(self._rows.id(row), self._used.pop(row), last[row]) for row in rows]

    # -- pins

    def pin(self, row: int, tier: Tier) -> bool:
        """Protect a READY copy from eviction; False if it is not READY. Undone by ``unpin``."""
        with self.changed:
            if self._states[tier][row] != CopyState.READY:
                return False
            self._pins[tier][row] += 1
            return True

    def unpin(self, row: int, tier: Tier) -> None:
        """Undo one ``pin``."""
        with self.changed:
            self._unpin(row, tier)
            self.changed.notify_all()

    @contextmanager
    def pinned(
        self, namespace: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier | None]
    ) -> Iterator[list[Tier | None]]:
        """Pin each block in its tier, or else in the fastest one, for the length of a scope.

        Yields where each one is pinned: None if it is not READY at all. One whose tier is None is
        left alone.
        """
        held: list[tuple[int, Tier]] = []
        kept: list[Tier | None] = []
        with self.changed:
            rows = self._rows.of(namespace)
            for digest, wanted in zip(hashes, tiers, strict=True):
                row = rows.get(digest)
                found = () if row is None or wanted is None else _SHOWN[self._shown[row]]
                tier = wanted if wanted in found else next(iter(found), None)
                kept.append(tier)
                if row is not None and tier is not None:
                    held.append((row, tier))
                    self.pin(row, tier)
        try:
            yield kept
        finally:
            with self.changed:
                for row, tier in held:
                    self._unpin(row, tier)
                self.changed.notify_all()

    def pins(self, tier: Tier | None = None) -> int:
        """Return the number of pins held in ``tier``, or in all."""
        with self.changed:
            wanted = _TIERS if tier is None else (tier,)
            return sum(int(np.asarray(self._pins[each]).sum()) for each in wanted)

    def check(self) -> list[str]:
        """Return what is wrong with the catalog's books, in words."""
        with self.changed:
            problems = self._rows.check()
            shown = np.zeros(len(self._shown), dtype=np.uint8)
            for tier in _TIERS:
                is_ready = np.asarray(self._states[tier]) == CopyState.READY
                shown += is_ready.view(np.uint8) * _BIT[tier]
                if is_ready.sum() != self._ready[tier]:
                    problems.append(
                        f"catalog: {is_ready.sum()} ready in {tier}, {self._ready[tier]} counted"
                    )
                if (np.asarray(self._pins[tier]) < 0).any():
                    problems.append(f"catalog: a pin count below zero in {tier}")
            if (np.asarray(self._shown) != shown).any():
                problems.append("catalog: a block is shown where it is not ready")
        return problems

    # -- inside

    def _move(self, row: int, tier: Tier, what: str) -> None:
        states = self._states[tier]
        was = CopyState(states[row])
        try:
            states[row] = now = after(was, what)
        except ValueError as error:
            raise ValueError(f"catalog row {row}, {tier}: {error}") from None
        if CopyState.READY in {was, now}:
            self._shown[row] ^= _BIT[tier]
            self._ready[tier] += 1 if now is CopyState.READY else -1
            block = self._rows.id(row)
            self._changes.add((block.namespace, block.hash, _SHOWN[self._shown[row]]))

    def _unpin(self, row: int, tier: Tier) -> None:
        if self._pins[tier][row] <= 0:
            raise ValueError(f"catalog row {row} is not pinned in {tier}")
        self._pins[tier][row] -= 1
        self._collect(row)

    def _collect(self, row: int) -> None:
        """Free a row once no copy and no pin refers to it."""
        if self._shown[row]:
            return
        busy = any(self._states[tier][row] or self._pins[tier][row] for tier in _TIERS)
        if self._rows.holds(row) and not busy:
            self._rows.remove(row)
            self._last_use_ns[row] = 0
