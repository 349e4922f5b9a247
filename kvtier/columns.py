"""Every column of the catalog, and what keeps them in step; no lock, no verbs."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.copies import BIT, SHOWN, TIERS, Copies
from kvtier.lifecycle import CopyState
from kvtier.orders import Orders
from kvtier.plan import Tier
from kvtier.retention import PRIORITIES
from kvtier.rows import BlockRows, Places, append_all, prefix_order, use_order
from kvtier.uses import Uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.changes import ChangeLog
    from kvtier.history import History
    from kvtier.policy import MakePolicy
    from kvtier.prices import Prices
    from kvtier.tiers.entries import Entries

__all__ = ["Columns"]

_NS_MAX: Final = (1 << 63) - 1


class Columns:
    """One element a row each; the catalog locks.

    A numpy view of a column may not outlive the call that makes it: an array that is looked into
    cannot grow.
    """

    def __init__(
        self,
        policy: MakePolicy,
        prices: Prices,
        changes: ChangeLog,
        history: History,
        *,
        uses_kept: int,
        now_ns: Callable[[], int],
    ) -> None:
        self._contiguous = policy.contiguous
        self._now_ns = now_ns
        self.rows = BlockRows()
        self.copies = Copies(self.rows, changes)
        self.pins = {tier: array("i") for tier in TIERS}
        self.slots = {Tier.DEVICE: array("I"), Tier.HOST: array("I")}
        self.places = Places()
        self.last_use_ns = array("q")
        self.uses = Uses(history, uses_kept)
        self.orders = Orders(
            policy, prices, uses=self.uses.column, positions=self.rows.positions,
            slot_bytes=self.places.slot_bytes,
        )  # fmt: skip
        self._all = (
            *self.copies.columns, *self.pins.values(), *self.slots.values(), *self.places.columns,
            self.last_use_ns, self.uses.column, *self.orders.columns,
        )  # fmt: skip

    def restore(self, entries: Entries) -> None:
        """Fill empty columns from the SSD copies that were found at open."""
        count, copies = len(entries), self.copies
        self.rows.restore(entries)
        append_all(copies.states[Tier.SSD], np.full(count, CopyState.READY))
        append_all(copies.shown, np.full(count, BIT[Tier.SSD]))
        self.places.restore(entries)
        append_all(self.last_use_ns, np.minimum(entries["last_use_ns"], _NS_MAX))
        lowest, highest = PRIORITIES.start, PRIORITIES.stop - 1
        priorities = np.clip(entries["priority"], lowest, highest)
        self.orders.restore(priorities, entries["expiry_ns"])
        self.uses.restore(entries["hits"])
        for column in self._all:
            append_all(column, np.zeros(count - len(column)))  # all that is not said above
        copies.ready[Tier.SSD] = count
        self.orders.enter((prefix_order if self._contiguous else use_order)(entries), Tier.SSD)

    def add(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tenant_digest: bytes,
        positions: Sequence[int],
        *,
        priority: int,
        expiry_ns: int,
    ) -> list[int]:
        """Give those of distinct blocks that have none a row each; returns the rows of all."""
        has = self.rows.of(namespace)
        fresh = [at for at, digest in enumerate(hashes) if digest not in has]
        names = hashes
        if len(fresh) < len(hashes):
            names, positions = [hashes[at] for at in fresh], [positions[at] for at in fresh]
        rows = self.rows.add_all(namespace, names, tenant_digest, positions)
        missing = len(self.rows) - len(self.last_use_ns)
        if missing:
            for column in self._all:
                column.frombytes(bytes(missing * column.itemsize))
        self.uses.begin(rows, names)
        if priority or expiry_ns:
            self.orders.describe(rows, priority, expiry_ns)
        has = self.rows.of(namespace)
        return rows if names is hashes else [has[digest] for digest in hashes]

    def select(
        self, namespace: bytes | None, tenant_digest: bytes | None, used_before_ns: int | None
    ) -> list[int]:
        """Return the rows with a copy in any state that match all filters; None matches all."""
        chosen = self.rows.matching(namespace, tenant_digest) & self.copies.present()
        if used_before_ns is not None:
            chosen &= np.asarray(self.last_use_ns) < used_before_ns
        rows: list[int] = np.flatnonzero(chosen).tolist()
        return rows

    def used(self, rows: Iterable[int], now_ns: int) -> None:
        """Note when rows were used last; a clock that goes back changes nothing."""
        last_use_ns = self.last_use_ns
        for row in rows:
            last_use_ns[row] = max(last_use_ns[row], now_ns)

    def order(self, rows: Sequence[int], tier: Tier) -> None:
        """Make rows the most recent of a tier's order; unknown ones enter."""
        self.orders.announce(rows, (tier,))
        self.orders.touch(rows, tier)

    def victims(self, tier: Tier, count: int) -> list[int]:
        """Return up to ``count`` READY, unpinned rows, first to go first.

        What is on its way to the SSD makes room for itself whatever it is worth: else what was dear
        once would stay for long, and nothing new get in. Only of a lower priority it displaces
        nothing; and for callers of contiguous prefixes nothing that is worth more, since the blocks
        before it might go.
        """
        states, pins = self.copies.states[tier], self.pins[tier]
        rows: list[int] = []
        coming = PRIORITIES.stop
        for row in self.orders.victims(tier):
            if len(rows) == count or self.orders.priority(row) > coming:
                break
            if states[row] != CopyState.READY:
                if tier is Tier.SSD and self._is_coming(row):
                    if self._contiguous:
                        break
                    coming = min(coming, self.orders.priority(row))
            elif not pins[row]:
                rows.append(row)
        return rows

    def expire(self) -> None:
        """Hide what has expired since the last look, and let it go first."""
        rows = self.orders.expire(self._now_ns)
        if rows:
            self.copies.hidden.update(rows)
            self.copies.show(rows)

    def pin_shown(
        self, namespace: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier | None]
    ) -> tuple[list[tuple[int, Tier]], list[Tier | None]]:
        """Pin each block in its tier or else in the fastest one: the pins, and where each one is.

        A block whose tier is None is left alone.
        """
        held: list[tuple[int, Tier]] = []
        kept: list[Tier | None] = []
        rows = self.rows.of(namespace)
        for digest, wanted in zip(hashes, tiers, strict=True):
            row = rows.get(digest)
            found = () if row is None or wanted is None else SHOWN[self.copies.shown[row]]
            tier = wanted if wanted in found else next(iter(found), None)
            kept.append(tier)
            if row is not None and tier is not None:
                held.append((row, tier))
                self.pins[tier][row] += 1
        return held, kept

    def unpin(self, row: int, tier: Tier) -> None:
        """Undo one pin."""
        if self.pins[tier][row] <= 0:
            raise ValueError(f"catalog row {row} is not pinned in {tier}")
        self.pins[tier][row] -= 1
        self.collect((row,))

    def collect(self, rows: Iterable[int]) -> None:
        """Free rows to which no copy and no pin refers."""
        device, host, ssd = (self.pins[tier] for tier in TIERS)
        unused = self.copies.unused(rows)
        free = [row for row in unused if not (host[row] or ssd[row] or device[row])]
        if free:
            self.orders.clear(free)
            self.copies.hidden.difference_update(free)
            self.uses.end(free, self.rows.remove_all(free))
            for row in free:  # the next block has no place yet, whatever this one's size
                self.last_use_ns[row] = self.places.slot_bytes[row] = 0

    def check(self) -> list[str]:
        """Return what is wrong, in words."""
        problems = [*self.rows.check(), *self.copies.check()]
        for tier in TIERS:
            if (np.asarray(self.pins[tier]) < 0).any():
                problems.append(f"catalog: a pin count below zero in {tier}")
            is_ready = np.asarray(self.copies.states[tier]) == CopyState.READY
            if (np.asarray(self.orders.has)[is_ready] & BIT[tier] == 0).any():
                problems.append(f"catalog: a copy that no order has in {tier}")
        return problems

    def _is_coming(self, row: int) -> bool:
        """Whether a copy is on its way to the SSD, and not late."""
        states = self.copies.states
        coming = CopyState.WRITING in (states[Tier.SSD][row], states[Tier.HOST][row])
        late = self.orders.has_expired(row)
        return (coming or self.pins[Tier.HOST][row] > 0) and not late
