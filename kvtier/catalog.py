"""Who is where: the one owner of residency and pins.

Columns, not objects: a dict from block hash to row, and arrays over rows. A block may have a copy
on the device, one in host memory and one on the SSD, each with its own life (``lifecycle``). Only
READY copies of blocks that have not expired are ever shown. A pinned copy is not evicted. A tier's
order holds its READY copies, and those that a put has announced.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.changes import CHANGES_KEPT, BlockTiers, CatalogChanges, ChangeLog
from kvtier.columns import Columns
from kvtier.copies import BIT, SHOWN, TIERS
from kvtier.history import History
from kvtier.lifecycle import CopyState, after
from kvtier.plan import Tier
from kvtier.prices import Prices
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.index import Use
from kvtier.uses import USES_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.policy import MakePolicy
    from kvtier.tiers.entries import Entries

__all__ = ["Catalog", "CopyState"]

_NO_PRICES: Final = Prices()


class Catalog:
    """Residency, states and pins of all blocks; thread-safe.

    ``changed`` is the condition that whoever waits for a copy to become evictable waits on; its
    lock is the catalog's own and may be held over several calls. Changes are numbered from
    ``first_change``. ``now_ns`` (since 1970) is asked only while a block has an expiry. It is
    ``contiguous`` if a block without the one before it is of no use to the store's callers.
    """

    def __init__(
        self,
        policy: MakePolicy,
        *,
        prices: Prices = _NO_PRICES,
        first_change: int = 0,
        changes_kept: int = CHANGES_KEPT,
        uses_kept: int = USES_KEPT,
        history: History | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.contiguous = policy.contiguous
        self.now_ns = now_ns
        self._changes = ChangeLog(changes_kept, first_change)
        self._columns = columns = Columns(
            policy, prices, self._changes, history or History(), uses_kept=uses_kept, now_ns=now_ns
        )
        self._rows, self._copies, self._pins = columns.rows, columns.copies, columns.pins
        self._slots, self._places = columns.slots, columns.places
        self._uses, self._orders = columns.uses, columns.orders

    def reprice(self, prices: Prices) -> None:
        """Use other prices from now on; what is in order keeps its place until it is touched."""
        with self.changed:
            self._orders.reprice(prices)

    # -- looking

    def residency(
        self, namespace: bytes, hashes: Sequence[bytes], order: Sequence[Tier] = TIERS
    ) -> tuple[Tier | None, ...]:
        """Return the first tier of ``order`` in which each block is READY; touches nothing."""
        best = [next((tier for tier in order if tier in tiers), None) for tiers in SHOWN]
        with self.changed:
            self._columns.expire()
            shown = self._copies.shown
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

    def state(self, row: int, tier: Tier) -> CopyState:
        """Return the state of a row's copy in ``tier``."""
        with self.changed:
            return CopyState(self._copies.states[tier][row])

    def location(self, row: int, tier: Tier) -> Location:
        """Return where a row's READY copy lies."""
        with self.changed:
            if tier is Tier.SSD:
                return self._places.at(row)
            return Location(0, self._slots[tier][row], 0)

    def places(self, namespace: bytes, hashes: Iterable[bytes]) -> list[Location | None]:
        """Return where each block's READY copy on the SSD lies; None for those that have none."""
        with self.changed:
            shown, bit, at = self._copies.shown, BIT[Tier.SSD], self._places.at
            rows = map(self._rows.of(namespace).get, hashes)
            return [None if row is None or not shown[row] & bit else at(row) for row in rows]

    def ready(self, tier: Tier) -> int:
        """Return the number of READY copies in ``tier``."""
        with self.changed:
            return self._copies.ready[tier]

    def blocks(self, namespace: bytes, tier: Tier, limit: int) -> list[bytes]:
        """Return up to ``limit`` hashes of this namespace that are READY in ``tier``."""
        with self.changed:
            shown, bit = self._copies.shown, BIT[tier]
            rows = self._rows.of(namespace).items()
            return list(islice((digest for digest, row in rows if shown[row] & bit), limit))

    def select(
        self, namespace: bytes | None, tenant_digest: bytes | None, used_before_ns: int | None
    ) -> list[int]:
        """Return the rows with a copy in any state that match all filters; None matches all."""
        with self.changed:
            return self._columns.select(namespace, tenant_digest, used_before_ns)

    # -- following

    def changes(self, since: int) -> CatalogChanges | None:
        """Return the blocks whose READY tiers changed after sequence number ``since``.

        None if that is too long ago, or not of this catalog: the caller takes a ``snapshot``.
        """
        with self.changed:
            self._columns.expire()
            return self._changes.since(since)

    def snapshot(self) -> tuple[int, Iterator[BlockTiers]]:
        """Return everything READY, and the sequence number to ask ``changes`` from."""
        with self.changed:
            self._columns.expire()
            return self._changes.sequence, self._copies.snapshot()

    # -- lifecycle

    def restore(self, entries: Entries) -> None:
        """Enter the SSD copies that were found at open, into a catalog that is empty.

        They are ordered by last use, and those of one use tail to head. Raises ``ValueError`` if a
        block is there twice, and enters none then.
        """
        with self.changed:
            self._columns.restore(entries)
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
        expiry_ns: int = 0,
    ) -> int:
        """Start one copy's life, like ``begin_all``."""
        return self.begin_all(
            block.namespace, (block.hash,), tier, what,
            tenant_digest=tenant_digest, positions=(position,), now_ns=now_ns,
            expiry_ns=expiry_ns,
        )[0]  # fmt: skip

    def begin_all(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tier: Tier,
        what: str,
        *,
        tenant_digest: bytes = b"",
        positions: Sequence[int],
        now_ns: int = 0,
        priority: int = 0,
        expiry_ns: int = 0,
    ) -> list[int]:
        """Start the life of copies of distinct blocks ("write" or "load") and return their rows.

        ``tenant_digest``, ``positions``, ``priority`` and ``expiry_ns`` describe blocks that have
        no copy yet; ``now_ns`` counts as a use in ``select``, so that a new block is not an old
        one.
        """
        with self.changed:
            old = self._rows.known(namespace, hashes)
            self._copies.legal(old, tier, what)
            rows = old
            if len(old) < len(hashes):
                after(CopyState.ABSENT, what)  # raises before there is a row
                rows = self._columns.add(
                    namespace, hashes, tenant_digest, positions,
                    priority=priority, expiry_ns=expiry_ns,
                )  # fmt: skip
            self._copies.move(rows, tier, what)
            self._columns.used(rows, now_ns)
            return rows

    def commit(self, row: int, tier: Tier, where: Location, *, pinned: bool = False) -> None:
        """Make one copy READY, like ``commit_all``."""
        self.commit_all((row,), tier, (where,), pinned=pinned)

    def commit_all(
        self, rows: Sequence[int], tier: Tier, places: Sequence[Location], *, pinned: bool = False
    ) -> None:
        """Make copies READY, pinned once if asked for. In memory only a place's slot counts.

        Those that no put has announced enter the tier's order now.
        """
        with self.changed:
            self._copies.move(rows, tier, "commit")
            if tier is Tier.SSD:
                self._places.put(rows, places)
            else:
                for row, where in zip(rows, places, strict=True):
                    self._slots[tier][row] = where.slot
            for row in rows if pinned else ():
                self._pins[tier][row] += 1
            self._columns.order(self._orders.missing(rows, tier), tier)
            self.changed.notify_all()

    def relocate(self, row: int, where: Location) -> None:
        """Say where a READY copy on the SSD lies now; a pin does not keep it where it was."""
        with self.changed:
            if self._copies.states[Tier.SSD][row] != CopyState.READY:
                raise ValueError(f"catalog row {row}: only a READY copy on the SSD has a place")
            self._places.put((row,), (where,))

    def end(self, row: int, tier: Tier, what: str) -> None:
        """End one copy, like ``end_all``."""
        self.end_all((row,), tier, what)

    def end_all(self, rows: Sequence[int], tier: Tier, what: str) -> None:
        """End copies: "abort", "decline", "evicted", "drop"; or "keep" if their eviction failed."""
        with self.changed:
            self._copies.move(rows, tier, what)
            if what == "keep":
                self._columns.order(rows, tier)
            else:
                if what == "decline":
                    self._orders.evicted(rows, tier)
                else:
                    self._orders.forget(rows, tier)
                if tier is Tier.SSD:
                    self._uses.forget(rows)
                self._columns.collect(rows)
            self.changed.notify_all()

    def evict(self, tier: Tier, count: int) -> list[int]:
        """Move up to ``count`` READY, unpinned copies to EVICTING, least valuable first.

        What is on its way to the SSD displaces nothing of a higher priority and, for callers of
        contiguous prefixes, nothing that is worth more.
        """
        with self.changed:
            rows = self.victims(tier, count)
            self.evict_rows(rows, tier)
            return rows

    def victims(self, tier: Tier, count: int) -> list[int]:
        """Return what ``evict`` would move; nothing moves."""
        with self.changed:
            self._columns.expire()
            return self._columns.victims(tier, count)

    def evict_rows(self, rows: Sequence[int], tier: Tier) -> None:
        """Move ``victims`` to EVICTING."""
        with self.changed:
            self._copies.move(rows, tier, "evict")
            self._orders.evicted(rows, tier)

    def take_out(self, rows: Iterable[int], tier: Tier) -> list[int]:
        """Move those of ``rows`` that are READY and unpinned to EVICTING; returns them."""
        with self.changed:
            states, pins = self._copies.states[tier], self._pins[tier]
            taken = [row for row in rows if states[row] == CopyState.READY and not pins[row]]
            self._copies.move(taken, tier, "evict")
            self._orders.forget(taken, tier)
            return taken

    # -- uses

    def touch(self, namespace: bytes, hashes: Sequence[bytes], now_ns: int) -> None:
        """Note a use of a prompt's blocks, tail to head.

        A clock that goes back changes no last use; ``uses`` has those on the SSD that had room.
        """
        with self.changed:
            known = self._rows.known(namespace, reversed(hashes))
            shown, ssd = self._copies.shown, BIT[Tier.SSD]
            self._columns.used(known, now_ns)
            self._uses.add(known)
            self._uses.record([row for row in known if shown[row] & ssd])
            for tier in TIERS:
                self._orders.touch(known, tier)

    def announce(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        coming: Sequence[int],
        tiers: Sequence[Tier] = (Tier.HOST, Tier.SSD),
    ) -> None:
        """Order a put's prompt, tail to head; a use only of what is there and comes again.

        The copies of the rows ``coming`` are ordered with what is there, before they are: they are
        committed head first, and a prompt's tail must not outlive its head for that.
        """
        with self.changed:
            known = self._rows.known(namespace, reversed(hashes))
            self._uses.add([row for row in coming if self._copies.shown[row]])
            self._orders.announce(coming, tiers)  # first: a copy in host is cheap if it is on both
            for tier in tiers:
                self._orders.touch(known, tier)

    def uses(self, limit: int) -> list[Use]:
        """Take out the new uses of up to ``limit`` blocks that have a copy on the SSD."""
        with self.changed:
            last = self._columns.last_use_ns
            return [Use(self._rows.id(row), new, last[row]) for row, new in self._uses.take(limit)]

    def asked(self, row: int) -> int:
        """Return how often a row's block was asked for, its put included, as far as known."""
        with self.changed:
            return self._uses.column[row]

    def values(self, rows: Sequence[int]) -> list[float]:
        """Return what the loss of each row's last copy would cost, as ``prices`` has it."""
        with self.changed:
            return self._orders.values(rows)

    # -- retention

    def retain(self, row: int, priority: int, expiry_ns: int) -> None:
        """Raise a block's priority and put off its expiry (0: for good), where that is more.

        What has expired is shown again. The record on the SSD stays as it was written.
        """
        with self.changed:
            self._columns.expire()
            self._orders.retain(row, priority, expiry_ns)
            self._copies.hidden.discard(row)
            self._copies.show((row,))

    def retention(self, row: int) -> tuple[int, int]:
        """Return the priority and the expiry (0: none) of a row's block that has not expired."""
        with self.changed:
            return self._orders.retention(row)

    def expired(self, row: int) -> bool:
        """Return whether a row's block has expired."""
        with self.changed:
            self._columns.expire()
            return self._orders.has_expired(row)

    # -- pins

    def pin(self, row: int, tier: Tier) -> bool:
        """Protect a READY copy from eviction; False if it is not READY. Undone by ``unpin``."""
        with self.changed:
            if self._copies.states[tier][row] != CopyState.READY:
                return False
            self._pins[tier][row] += 1
            return True

    def unpin(self, row: int, tier: Tier) -> None:
        """Undo one ``pin``."""
        with self.changed:
            self._columns.unpin(row, tier)
            self.changed.notify_all()

    @contextmanager
    def pinned(
        self, namespace: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier | None]
    ) -> Iterator[list[Tier | None]]:
        """Pin each block in its tier, or else in the fastest one, for the length of a scope.

        Yields where each one is pinned: None if it is not READY at all. One whose tier is None is
        left alone. In a forked child, whose copy of the lock may be held for ever, the scope ends
        without the catalog.
        """
        owner = os.getpid()
        with self.changed:
            self._columns.expire()
            held, kept = self._columns.pin_shown(namespace, hashes, tiers)
        try:
            yield kept
        finally:
            if os.getpid() == owner:
                with self.changed:
                    for row, tier in held:
                        self._columns.unpin(row, tier)
                    self.changed.notify_all()

    def pins(self, tier: Tier | None = None) -> int:
        """Return the number of pins held in ``tier``, or in all."""
        with self.changed:
            wanted = TIERS if tier is None else (tier,)
            return sum(int(np.asarray(self._pins[each]).sum()) for each in wanted)

    def check(self) -> list[str]:
        """Return what is wrong with the catalog's books, in words."""
        with self.changed:
            return self._columns.check()
