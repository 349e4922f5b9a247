"""Who is where: the one owner of residency and pins.

Columns, not objects: a dict from block hash to row, and arrays over rows. A block may have a copy
in host memory and one on the SSD, each with its own life (``lifecycle``). Only READY copies of
blocks that have not expired are ever shown. A pinned copy is not evicted. A tier's order holds its
READY copies, and those that a put has announced.
"""

from __future__ import annotations

import threading
import time
from array import array
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.changes import CHANGES_KEPT, BlockTiers, CatalogChanges, ChangeLog
from kvtier.history import History
from kvtier.lifecycle import CopyState, after, moves
from kvtier.plan import Tier
from kvtier.prices import HostValues, Prices, SsdValues
from kvtier.retention import EXPIRED, PRIORITIES, Deadlines, Ranks
from kvtier.rows import BlockRows, Places, append_all, use_order
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.index import Use
from kvtier.uses import USES_KEPT, Uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.policy import MakePolicy
    from kvtier.tiers.entries import Entries

__all__ = ["Catalog", "CopyState"]

_TIERS: Final = (Tier.HOST, Tier.SSD)
_BIT: Final = {Tier.HOST: 1, Tier.SSD: 2}
_SHOWN: Final[tuple[tuple[Tier, ...], ...]] = ((), (Tier.HOST,), (Tier.SSD,), (Tier.HOST, Tier.SSD))
"""The tiers that a sum of bits stands for."""
_NS_MAX: Final = (1 << 63) - 1
_NO_PRICES: Final = Prices()


class Catalog:
    """Residency, states and pins of all blocks; thread-safe.

    ``changed`` is the condition that whoever waits for a copy to become evictable waits on; its
    lock is the catalog's own and may be held over several calls. Changes are numbered from
    ``first_change``. ``now_ns`` (since 1970) is asked only while a block has an expiry.
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
        self._now_ns = now_ns
        self._rows = BlockRows()
        self._changes = ChangeLog(changes_kept, first_change)
        self._ready = dict.fromkeys(_TIERS, 0)
        # One element a row. A numpy view of one may not outlive the call that makes it: an array
        # that is looked into cannot grow.
        self._states = {tier: array("B") for tier in _TIERS}
        self._pins = {tier: array("i") for tier in _TIERS}
        self._shown = array("B")  # the sum of the bits of the tiers in which a block is READY
        self._ordered = array("B")  # the sum of the bits of the tiers whose order has it
        self._host_slot = array("I")
        self._places = Places()
        self._last_use_ns = array("q")
        self._priority = array("b")
        self._deadlines = Deadlines()
        self._uses = Uses(history or History(), uses_kept)
        self._columns = (
            *self._states.values(), *self._pins.values(), self._shown, self._ordered,
            self._host_slot, *self._places.columns, self._last_use_ns, self._priority,
            self._deadlines.column, self._uses.column,
        )  # fmt: skip
        asked, positions = self._uses.column, self._rows.positions
        self._values: dict[Tier, HostValues | SsdValues] = {
            Tier.HOST: HostValues(asked, positions, self._ordered, _BIT[Tier.SSD], prices),
            Tier.SSD: SsdValues(asked, positions, self._places.slot_bytes, prices),
        }
        self._orders = {
            tier: Ranks(partial(policy, values), self._priority)
            for tier, values in self._values.items()
        }

    def reprice(self, prices: Prices) -> None:
        """Use other prices from now on; what is in order keeps its place until it is touched."""
        with self.changed:
            for values in self._values.values():
                values.reprice(prices)

    # -- looking

    def residency(
        self, namespace: bytes, hashes: Sequence[bytes], order: Sequence[Tier] = _TIERS
    ) -> tuple[Tier | None, ...]:
        """Return the first tier of ``order`` in which each block is READY; touches nothing."""
        best = [next((tier for tier in order if tier in tiers), None) for tiers in _SHOWN]
        with self.changed:
            self._expire()
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
            return self._rows.positions[row]

    def state(self, row: int, tier: Tier) -> CopyState:
        """Return the state of a row's copy in ``tier``."""
        with self.changed:
            return CopyState(self._states[tier][row])

    def location(self, row: int, tier: Tier) -> Location:
        """Return where a row's READY copy lies."""
        with self.changed:
            host = tier is Tier.HOST
            return Location(0, self._host_slot[row], 0) if host else self._places.at(row)

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
            host, ssd = (np.asarray(states) for states in self._states.values())
            chosen &= (host | ssd) != CopyState.ABSENT
            if used_before_ns is not None:
                chosen &= np.asarray(self._last_use_ns) < used_before_ns
            return np.flatnonzero(chosen).tolist()

    # -- following

    def changes(self, since: int) -> CatalogChanges | None:
        """Return the blocks whose READY tiers changed after sequence number ``since``.

        None if that is too long ago, or not of this catalog: the caller takes a ``snapshot``.
        """
        with self.changed:
            self._expire()
            return self._changes.since(since)

    def snapshot(self) -> tuple[int, Iterator[BlockTiers]]:
        """Return everything READY, and the sequence number to ask ``changes`` from."""
        with self.changed:
            self._expire()
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
            append_all(self._ordered, np.full(count, _BIT[Tier.SSD]))
            self._places.restore(entries)
            append_all(self._last_use_ns, np.minimum(entries["last_use_ns"], _NS_MAX))
            lowest, highest = PRIORITIES.start, PRIORITIES.stop - 1
            append_all(self._priority, np.clip(entries["priority"], lowest, highest))
            self._deadlines.restore(np.minimum(entries["expiry_ns"], _NS_MAX))
            self._uses.restore(entries["hits"])
            for column in self._columns:
                append_all(column, np.zeros(count - len(column)))  # all that is not said above
            self._ready[Tier.SSD] = count
            self._orders[Tier.SSD].enter(use_order(entries))
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
        """Start one copy's life, like ``begin_all``."""
        return self.begin_all(
            block.namespace, (block.hash,), tier, what,
            tenant_digest=tenant_digest, positions=(position,), now_ns=now_ns,
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
            known = self._rows.of(namespace).get
            old = [row for row in map(known, hashes) if row is not None]
            to = self._legal(old, tier, what)
            if len(old) == len(hashes):
                rows, new = old, []
            else:
                after(CopyState.ABSENT, what)  # raises before there is a row
                fresh = [at for at, digest in enumerate(hashes) if known(digest) is None]
                names = [hashes[at] for at in fresh]
                where = [positions[at] for at in fresh]
                new = self._rows.add_all(namespace, names, tenant_digest, where)
                self._describe(new, names, priority, expiry_ns)
                rows = [self._rows.of(namespace)[digest] for digest in hashes] if old else new
            states, last_use_ns = self._states[tier], self._last_use_ns
            for row in rows:
                states[row] = to[states[row]]
                last_use_ns[row] = max(last_use_ns[row], now_ns)
            return rows

    def commit(self, row: int, tier: Tier, where: Location, *, pinned: bool = False) -> None:
        """Make one copy READY, like ``commit_all``."""
        self.commit_all((row,), tier, (where,), pinned=pinned)

    def commit_all(
        self, rows: Sequence[int], tier: Tier, places: Sequence[Location], *, pinned: bool = False
    ) -> None:
        """Make copies READY, pinned once if asked for. Of a place in host only the slot counts.

        Those that no put has announced enter the tier's order now.
        """
        with self.changed:
            self._move(rows, tier, "commit")
            for row, where in zip(rows, places, strict=True):
                if tier is Tier.HOST:
                    self._host_slot[row] = where.slot
                else:
                    self._places.put(row, where)
            if pinned:
                for row in rows:
                    self._pins[tier][row] += 1
            ordered, bit = self._ordered, _BIT[tier]
            self._order([row for row in rows if not ordered[row] & bit], tier)
            self.changed.notify_all()

    def relocate(self, row: int, where: Location) -> None:
        """Say where a READY copy on the SSD lies now; a pin does not keep it where it was."""
        with self.changed:
            if self._states[Tier.SSD][row] != CopyState.READY:
                raise ValueError(f"catalog row {row}: only a READY copy on the SSD has a place")
            self._places.put(row, where)

    def end(self, row: int, tier: Tier, what: str) -> None:
        """End one copy, like ``end_all``."""
        self.end_all((row,), tier, what)

    def end_all(self, rows: Sequence[int], tier: Tier, what: str) -> None:
        """End copies: "abort", "decline", "evicted", "drop"; or "keep" if their eviction failed."""
        with self.changed:
            self._move(rows, tier, what)
            if what == "keep":
                self._order(rows, tier)
            else:
                order, ordered, bit = self._orders[tier], self._ordered, _BIT[tier]
                for row in rows:
                    if ordered[row] & bit:
                        ordered[row] ^= bit
                        (order.evicted if what == "decline" else order.forget)(row)
                    if tier is Tier.SSD:
                        self._uses.forget(row)
                    self._collect(row)
            self.changed.notify_all()

    def evict(self, tier: Tier, count: int) -> list[int]:
        """Move up to ``count`` READY, unpinned copies to EVICTING, least valuable first.

        From the SSD no more than come before those on their way to it: what is worth less than what
        it would displace finds no room.
        """
        with self.changed:
            self._expire()
            order, states, pins = self._orders[tier], self._states[tier], self._pins[tier]
            rows: list[int] = []
            for row in order.victims():
                if len(rows) == count:
                    break
                if states[row] != CopyState.READY:
                    if tier is Tier.SSD and self._is_coming(row):
                        break
                elif not pins[row]:
                    rows.append(row)
            for row in rows:
                order.evicted(row)
            return self._leave(rows, tier)

    def take_out(self, rows: Iterable[int], tier: Tier) -> list[int]:
        """Move those of ``rows`` that are READY and unpinned to EVICTING; returns them."""
        with self.changed:
            states, pins = self._states[tier], self._pins[tier]
            taken = [row for row in rows if states[row] == CopyState.READY and not pins[row]]
            for row in taken:
                self._orders[tier].forget(row)
            return self._leave(taken, tier)

    # -- uses

    def touch(self, namespace: bytes, hashes: Sequence[bytes], now_ns: int) -> None:
        """Note a use of a prompt's blocks, tail to head.

        A clock that goes back changes no last use; ``uses`` has those on the SSD that had room.
        """
        with self.changed:
            of = self._rows.of(namespace).get
            known = [row for row in map(of, reversed(hashes)) if row is not None]
            last_use_ns, shown, ssd = self._last_use_ns, self._shown, _BIT[Tier.SSD]
            for row in known:
                last_use_ns[row] = max(last_use_ns[row], now_ns)
            self._uses.add(known)
            self._uses.record([row for row in known if shown[row] & ssd])
            for tier in _TIERS:
                self._order_again(known, tier)

    def announce(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        coming: Iterable[int],
        tiers: Iterable[Tier] = _TIERS,
    ) -> None:
        """Order a put's prompt, tail to head, without counting a use.

        The copies of the rows ``coming`` are ordered with what is there, before they are: they are
        committed head first, and a prompt's tail must not outlive its head for that.
        """
        with self.changed:
            of = self._rows.of(namespace).get
            known = [row for row in map(of, reversed(hashes)) if row is not None]
            for tier in tiers:
                bit = _BIT[tier]
                for row in coming:
                    self._ordered[row] |= bit
                self._order_again(known, tier)

    def uses(self, limit: int) -> list[Use]:
        """Take out the new uses of up to ``limit`` blocks that have a copy on the SSD."""
        with self.changed:
            last = self._last_use_ns
            return [
                Use(self._rows.id(row), uses, last[row]) for row, uses in self._uses.take(limit)
            ]

    def asked(self, row: int) -> int:
        """Return how often a row's block was asked for, its put included, as far as known."""
        with self.changed:
            return self._uses.column[row]

    def ask(self, row: int) -> None:
        """Count one more use of a block that is not ordered for it."""
        with self.changed:
            self._uses.add((row,))

    # -- retention

    def retain(self, row: int, priority: int, expiry_ns: int) -> None:
        """Raise a block's priority and put off its expiry (0: for good), where that is more.

        What has expired is shown again. The record on the SSD stays as it was written.
        """
        with self.changed:
            self._expire()
            expired = self._priority[row] == EXPIRED
            if priority > self._priority[row]:
                self._rank(row, priority)
            before = self._deadlines.column[row]
            if expired or (before and (not expiry_ns or expiry_ns > before)):
                self._deadlines.set(row, expiry_ns)
            if expired:
                self._show(row)

    def expired(self, row: int) -> bool:
        """Return whether a row's block has expired."""
        with self.changed:
            self._expire()
            return self._priority[row] == EXPIRED

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
    ) -> Iterator[list[bool]]:
        """Pin each block in its tier, or else in the other one, for the length of a scope.

        Yields which ones were READY at all; one whose tier is None is left alone.
        """
        held: list[tuple[int, Tier]] = []
        kept: list[bool] = []
        with self.changed:
            self._expire()
            rows = self._rows.of(namespace)
            for digest, wanted in zip(hashes, tiers, strict=True):
                row = rows.get(digest)
                found = () if row is None or wanted is None else _SHOWN[self._shown[row]]
                kept.append(bool(found))
                if row is not None and found:
                    held.append((row, wanted if wanted in found else found[0]))
                    self.pin(*held[-1])
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
                if (np.asarray(self._ordered)[is_ready] & _BIT[tier] == 0).any():
                    problems.append(f"catalog: a copy that no order has in {tier}")
            shown[np.asarray(self._priority) == EXPIRED] = 0
            if (np.asarray(self._shown) != shown).any():
                problems.append("catalog: a block is shown where it is not ready")
        return problems

    # -- inside

    def _legal(self, rows: Iterable[int], tier: Tier, what: str) -> tuple[int, ...]:
        """Return where a move leads from each state; ``ValueError`` if a row has no such move."""
        states, to = self._states[tier], moves(what)
        for row in rows:
            if to[states[row]] < 0:
                try:
                    after(CopyState(states[row]), what)
                except ValueError as error:
                    raise ValueError(f"catalog row {row}, {tier}: {error}") from None
        return to

    def _move(self, rows: Sequence[int], tier: Tier, what: str) -> None:
        """Make a move with all rows, or with none."""
        states, to = self._states[tier], self._legal(rows, tier, what)
        for row in rows:
            states[row] = to[states[row]]
        turns = {"commit": 1, "keep": 1, "evict": -1, "drop": -1}.get(what, 0)
        if turns:
            self._ready[tier] += turns * len(rows)
            for row in rows:
                self._show(row)

    def _show(self, row: int) -> None:
        """Show a block where it is READY, unless it has expired, and note the change."""
        host, ssd = self._states[Tier.HOST][row], self._states[Tier.SSD][row]
        shown = (host == CopyState.READY) + 2 * (ssd == CopyState.READY)
        if self._priority[row] == EXPIRED:
            shown = 0
        if shown != self._shown[row]:
            self._shown[row] = shown
            self._changes.add((*self._rows.key(row), _SHOWN[shown]))

    def _describe(
        self, rows: Sequence[int], hashes: Sequence[bytes], priority: int, expiry_ns: int
    ) -> None:
        """Fill the columns of new rows."""
        missing = len(self._rows) - len(self._shown)
        if missing:
            for column in self._columns:
                column.frombytes(bytes(missing * column.itemsize))
        self._uses.begin(rows, hashes)
        for row in rows if priority or expiry_ns else ():
            self._priority[row] = priority
            self._deadlines.set(row, expiry_ns)

    def _order(self, rows: Sequence[int], tier: Tier) -> None:
        """Make rows the most recent of a tier's order; unknown ones enter."""
        ordered, bit = self._ordered, _BIT[tier]
        for row in rows:
            ordered[row] |= bit
        self._orders[tier].touch(rows)

    def _order_again(self, rows: Sequence[int], tier: Tier) -> None:
        ordered, bit = self._ordered, _BIT[tier]
        self._orders[tier].touch([row for row in rows if ordered[row] & bit])

    def _leave(self, rows: list[int], tier: Tier) -> list[int]:
        self._move(rows, tier, "evict")
        for row in rows:
            self._ordered[row] ^= _BIT[tier]
        return rows

    def _is_coming(self, row: int) -> bool:
        """Whether a copy is on its way to the SSD."""
        return (
            bool(
                self._states[Tier.SSD][row] == CopyState.WRITING
                or self._states[Tier.HOST][row] == CopyState.WRITING
                or self._pins[Tier.HOST][row]
            )
            and self._priority[row] != EXPIRED
        )

    def _rank(self, row: int, priority: int) -> None:
        """Change a row's priority, and its place in the orders that have it."""
        tiers = _SHOWN[self._ordered[row]]
        for tier in tiers:
            self._orders[tier].forget(row)
        self._priority[row] = priority
        for tier in tiers:
            self._orders[tier].touch([row])

    def _expire(self) -> None:
        """Hide what has expired since the last look, and let it go first."""
        for row in self._deadlines.due(self._now_ns):
            self._rank(row, EXPIRED)
            self._show(row)

    def _unpin(self, row: int, tier: Tier) -> None:
        if self._pins[tier][row] <= 0:
            raise ValueError(f"catalog row {row} is not pinned in {tier}")
        self._pins[tier][row] -= 1
        self._collect(row)

    def _collect(self, row: int) -> None:
        """Free a row once no copy and no pin refers to it."""
        if self._shown[row] or not self._rows.holds(row):
            return
        if any(self._states[tier][row] or self._pins[tier][row] for tier in _TIERS):
            return
        self._uses.end(row, self._rows.key(row)[1])
        for tier in _SHOWN[self._ordered[row]]:
            self._orders[tier].forget(row)
        self._ordered[row] = 0
        self._rows.remove(row)
        self._last_use_ns[row] = 0
        self._priority[row] = 0
        self._deadlines.set(row, 0)
