"""Host slots, and the way from the SSD into them.

Host memory is the gateway: SSD and engine never exchange bytes directly. Everything here blocks and
runs on somebody's lane, never on the caller's thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.catalog import CopyState
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Location, ReadResult, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.catalog import Catalog
    from kvtier.metrics import Metrics
    from kvtier.tiers.host import HostTier

__all__ = ["BlockReads", "Mover", "Unsaved"]

log = logging.getLogger(__name__)

LOOK_BLOCKS: Final = 32
"""Victims among which one is looked for that needs no write first, while somebody waits."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What to write of a host copy that the SSD was not given yet.

    ``recomputed``: a plan would recompute the block rather than load it.
    """

    record: Record
    recomputed: bool = False


class BlockReads(Protocol):
    """The SSD's blocks, for whoever only reads them."""

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Fetch blocks; GONE only if no later read of that location can succeed."""


class Mover:
    """Owns the use of host slots: the catalog says what is allowed, the tiers hold the bytes.

    An unsaved copy is not evicted before the SSD was given it, or refused it. ``forget`` is told of
    records that turned out damaged, ``crowded`` that copies came or may go; both with the catalog's
    lock held.
    """

    def __init__(
        self,
        catalog: Catalog,
        host: HostTier,
        ssd: BlockReads,
        metrics: Metrics,
        *,
        host_blocks_max: int,
        slot_wait_s_max: float,
        forget: Callable[[BlockId, Location], None],
        crowded: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalog = catalog
        self._host = host
        self._ssd = ssd
        self._metrics = metrics
        self.host_blocks_max = host_blocks_max
        self._slot_wait_s_max = slot_wait_s_max
        self._forget = forget
        self._crowded = crowded
        # By row, guarded by the catalog's lock; a row leaves both with its host copy.
        self._unsaved: dict[int, Unsaved] = {}
        self._refused: dict[int, Unsaved] = {}  # offered to the SSD in vain: they may go

    # -- host slots

    def take_slot(self) -> int | None:
        """Take a host slot, evicting if needed; None after ``slot_wait_s_max``.

        Waits without polling: whatever frees or unpins a host copy wakes it.
        """
        deadline = time.monotonic() + self._slot_wait_s_max
        changed = self._catalog.changed
        with changed:
            while True:
                slot = self._host.reserve()
                if slot is not None:
                    return slot
                if self._evict_one():
                    continue
                self._crowded()
                left = deadline - time.monotonic()
                if left <= 0 or not changed.wait(left):
                    return None

    def trim(self) -> None:
        """Evict host copies beyond the budget; staging slots are only for copies in flight."""
        with self._catalog.changed:
            over = self._catalog.ready(Tier.HOST) - self.host_blocks_max
            if over > 0:
                self.let_go(over)
            self._crowded()

    def let_go(self, count: int) -> dict[int, Unsaved]:
        """Evict those of the ``count`` first victims that may go; returns the others by row."""
        with self._catalog.changed:
            rows = self._catalog.victims(Tier.HOST, count)
            kept = {row: self._unsaved[row] for row in rows if self._must_stay(row)}
            self._evict([row for row in rows if row not in kept])
            return kept

    def _must_stay(self, row: int) -> bool:
        """Whether a copy is to be written before it goes; what has expired is not worth that."""
        return row in self._unsaved and not self._catalog.expired(row)

    def _evict_one(self) -> bool:
        """Evict the first victim that needs no write before; whether there is one."""
        look = LOOK_BLOCKS if self._unsaved else 1
        rows = self._catalog.victims(Tier.HOST, look)
        return self._evict([row for row in rows if not self._must_stay(row)][:1]) > 0

    def unpin_host(self, row: int) -> None:
        """Undo one pin of a host copy and give back what is over the budget."""
        with self._catalog.changed:
            self._catalog.unpin(row, Tier.HOST)
            self.trim()

    def fill(self, row: int, block: BlockId, slot: int, unsaved: Unsaved | None = None) -> None:
        """Make a slot that was filled the block's READY host copy, pinned once."""
        self._host.label(slot, block)
        with self._catalog.changed:
            self._catalog.commit(row, Tier.HOST, Location(0, slot, 0), pinned=True)
            if unsaved is not None:
                self._unsaved[row] = unsaved

    def slot_buffer(self, slot: int) -> memoryview:
        """Return the bytes of a slot that was taken."""
        return self._host.buffer(slot)

    def free_slot(self, slot: int) -> None:
        """Give back a slot that never became a copy."""
        with self._catalog.changed:
            self._host.release(slot)
            self._catalog.changed.notify_all()

    def _evict(self, rows: Sequence[int]) -> int:
        self._catalog.evict_rows(rows, Tier.HOST)
        ssd = [self._catalog.state(row, Tier.SSD) for row in rows]
        self._drop_host(rows)
        self._metrics.add("evicted_blocks_host", len(rows))
        self._metrics.add("lost_blocks_host", len(ssd) - ssd.count(CopyState.READY))
        return len(rows)

    def purge_host(self, select: Callable[[], Sequence[int]]) -> list[BlockId]:
        """Drop the host copies of the rows that ``select`` returns, except pinned ones."""
        with self._catalog.changed:
            rows = self._catalog.take_out(select(), Tier.HOST)
            blocks = [self._catalog.id(row) for row in rows]
            self._drop_host(rows)
        return blocks

    def _drop_host(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._unsaved.pop(row, None)
            self._refused.pop(row, None)
            self._host.release(self._catalog.location(row, Tier.HOST).slot)
            self._catalog.end(row, Tier.HOST, "evicted")

    # -- host copies that the SSD was not given yet

    def unsaved(self) -> dict[int, Unsaved]:
        """Return all of them by row, refused ones included."""
        with self._catalog.changed:
            return self._unsaved | self._refused

    def with_heads(self, rows: dict[int, Unsaved]) -> dict[int, Unsaved]:
        """Return unsaved copies, each after those of its prompt before it that are unsaved too."""
        ordered: dict[int, Unsaved] = {}
        with self._catalog.changed:
            unsaved = self._unsaved | self._refused
            for tail in rows:
                chain, row = [], tail
                while row in unsaved and row not in ordered:
                    chain.append(row)
                    record = unsaved[row].record
                    before = self._catalog.find(BlockId(record.id.namespace, record.parent))
                    row = -1 if before is None else before
                ordered.update((row, unsaved[row]) for row in reversed(chain))
        return ordered

    def is_unsaved(self, row: int, what: Unsaved) -> bool:
        """Whether a row still is what ``unsaved`` said."""
        with self._catalog.changed:
            return self._unsaved.get(row, self._refused.get(row)) is what

    def unsave(self, row: int, what: Unsaved) -> None:
        """Say that a READY host copy is to be written before it goes."""
        with self._catalog.changed:
            self._refused.pop(row, None)
            self._unsaved[row] = what

    def offered(self, row: int, *, saved: bool) -> None:
        """Say how it ended that a pinned host copy was offered to the SSD, and unpin it."""
        with self._catalog.changed:
            what = self._unsaved.pop(row, None) or self._refused.pop(row, None)
            if what is not None and not saved:
                self._refused[row] = what
            self.unpin_host(row)

    def check(self) -> list[str]:
        """Return what is wrong with the books of unsaved copies, in words."""
        with self._catalog.changed:
            return [
                f"host: catalog row {row} is to be written, but not READY"
                for row in self._unsaved | self._refused
                if self._catalog.state(row, Tier.HOST) is not CopyState.READY
            ]

    def payload(self, row: int) -> memoryview:
        """Return the bytes of a pinned host copy."""
        return self._host.buffer(self._catalog.location(row, Tier.HOST).slot)

    # -- loads: called on a read lane

    def load(self, row: int) -> ReadResult:
        """Read a block from the SSD into a host slot.

        The row is LOADING in host and pinned on the SSD; OK leaves its host copy READY and pinned.
        """
        slot = self.take_slot()
        if slot is None:
            log.warning("no host slot became free in %.0f s", self._slot_wait_s_max)
            self._catalog.end(row, Tier.HOST, "abort")
            return ReadResult.FAILED
        block = self._catalog.id(row)
        where = self._catalog.location(row, Tier.SSD)
        target = self._host.buffer(slot)
        result = ReadResult.FAILED
        try:
            (result,) = self._ssd.read([block], [where], [target])
        finally:
            if result is not ReadResult.OK:
                self.free_slot(slot)
                self._catalog.end(row, Tier.HOST, "abort")
        if result is ReadResult.OK:
            self.fill(row, block, slot)
            self._metrics.add("ssd_read_blocks")
            self._metrics.add("ssd_read_bytes", target.nbytes)
        elif result is ReadResult.GONE:
            self._metrics.add("damaged_blocks")
            # One step: a put of the same block must not come between, or its record would go too.
            with self._catalog.changed:
                if self._catalog.places(block.namespace, [block.hash]) == [where]:
                    self._catalog.end(row, Tier.SSD, "drop")
                    self._forget(block, where)
        return result
