"""A catalog that follows the index of a store that another process writes.

The index is asked a few times a second while its reader is in use, and not at all otherwise. What
it says is applied to the catalog; a read that does not find its block asks at once.
"""

from __future__ import annotations

import logging
import threading
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvtier.catalog import CopyState
from kvtier.errors import FormatError
from kvtier.lane import Lane
from kvtier.plan import Tier
from kvtier.tiers.base import BlockId, Location, ReadResult
from kvtier.tiers.record_io import Abilities, RecordIo, probe_reads
from kvtier.tiers.verify import read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.catalog import Catalog
    from kvtier.mover import Mover
    from kvtier.promoter import Promoter
    from kvtier.tiers.entries import Entries
    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.index import Changes

__all__ = ["FOLLOW_S", "IN_USE_S", "FollowedIndex", "FollowedReads", "Follower"]

log = logging.getLogger(__name__)

FOLLOW_S: Final = 0.2
"""How often the index is asked while the reader is in use."""
IN_USE_S: Final = 5.0
"""How long after its last use a reader counts as in use."""
RETRY_S_MAX: Final = 5.0
"""How long an index that cannot be read is left alone; the first time it is ``FOLLOW_S``."""
DAMAGED_KEPT: Final = 4096
"""Damaged blocks that are remembered, so that a snapshot does not bring them back."""
_APPLIED_AT_ONCE: Final = 256
"""Blocks for which the catalog is locked once: a lookup waits no longer than for these."""


class FollowedIndex(Protocol):
    """An index that somebody else writes; thread-safe, waits are bounded."""

    def snapshot(self) -> tuple[int, Entries]:
        """Return a sequence number and all entries as of then; ``FormatError`` if unreadable."""

    def since(self, sequence: int) -> Changes | None:
        """Return what changed after ``sequence``; None if only a snapshot can tell."""

    def close(self) -> None:
        """Close it; idempotent."""


class Follower:
    """Keeps ``catalog`` as the index is, as far as one namespace goes; thread-safe.

    A pin protects nothing here: the writer does not know of it.
    """

    def __init__(
        self,
        index: FollowedIndex,
        catalog: Catalog,
        namespace: bytes,
        *,
        clock: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._index = index
        self._catalog = catalog
        self._namespace = namespace
        self._clock = clock
        self._mover: Mover
        self._promoter: Promoter
        self._turn = threading.Lock()  # one asks at a time; never taken under the catalog's lock
        self._sequence: int | None = None
        self._filled = False
        self._asked_at = float("-inf")  # when the last answer was asked for
        self._retry_s = 0.0  # 0 while the index can be read
        self._fault = "not read yet"
        # Below: under the catalog's lock.
        self._incomplete = False  # something was taken out that the index may still have
        self._damaged: dict[BlockId, Location] = {}
        self._leaving: set[BlockId] = set()  # removed blocks whose copies in memory were in use
        # Below: under the condition's, which is held for moments only.
        self._wake = threading.Condition()
        self._next_at = float("-inf")
        self._used_at = float("-inf")
        self._asleep = False
        self._closing = False
        self._lane = Lane("follow", self._next, failed)

    def start(self, mover: Mover, promoter: Promoter) -> None:
        """Begin to follow; these drop the host and device copies of what is removed."""
        self._mover = mover
        self._promoter = promoter
        self._lane.start()

    def close(self) -> None:
        """Stop following and close the index; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._lane.join()
        self._index.close()

    # -- what others call, from any thread

    def used(self) -> None:
        """Note a use; a follower that was asleep asks the index at once, without the caller."""
        with self._wake:
            self._used_at = self._clock()
            if self._asleep:
                self._wake.notify_all()

    @property
    def state(self) -> str:
        """Whether the index is followed, or why not."""
        return f"unreadable: {self._fault}" if self._fault else "following"

    def look(self) -> bool:
        """Ask the index what changed and apply it; False if it cannot be read now.

        An answer that was asked for after this call began serves as well.
        """
        began = self._clock()
        with self._turn:
            if self._asked_at > began:
                return not self._fault
            if self._retry_s and began < self._asked_at + self._retry_s:
                return False
            self._asked_at = self._clock()
            try:
                self._follow()
            except (OSError, FormatError) as error:
                self._stumble(str(error))
            else:
                if self._retry_s:
                    log.warning("the index can be read again")
                self._fault, self._retry_s = "", 0.0
            self._drop_leaving()
            with self._wake:
                self._next_at = self._asked_at + max(self._retry_s, FOLLOW_S)
            return not self._fault

    def place(self, block: BlockId) -> Location | None:
        """Return where a block lies, as far as is known."""
        return self._catalog.places(block.namespace, [block.hash])[0]

    def lose(self, block: BlockId, where: Location) -> None:
        """Take out a block that is not where it was, until the index says what became of it."""
        with self._catalog.changed:
            row = self._catalog.find(block)
            if row is not None and self.place(block) == where:
                self._catalog.end(row, Tier.SSD, "drop")
                self._incomplete = True

    def forget(self, block: BlockId, where: Location) -> None:
        """Remember a block as damaged that was taken out; the catalog's lock is held."""
        self._damaged[block] = where
        if len(self._damaged) > DAMAGED_KEPT:
            del self._damaged[next(iter(self._damaged))]

    # -- the lane

    def _next(self) -> bool:
        with self._wake:
            while not self._closing:
                wait = self._due_in()
                if wait is not None and wait <= 0:
                    break
                self._asleep = wait is None
                self._wake.wait(wait)
                self._asleep = False
            if self._closing:
                return False
        self.look()
        return True

    def _due_in(self) -> float | None:
        """Return how long the index is not asked; None until somebody uses the reader."""
        now = self._clock()
        # A copy that is on its way out is waited for, or it would be found for ever.
        if now - self._used_at >= IN_USE_S and not self._leaving:
            return None
        return self._next_at - now

    # -- one turn; everything below is called by whoever has it

    def _stumble(self, why: str) -> None:
        if not self._retry_s:
            log.warning("%s; what is known stays, and it is tried again", why)
        self._fault = why
        self._retry_s = min(max(2 * self._retry_s, FOLLOW_S), RETRY_S_MAX)

    def _follow(self) -> None:
        with self._catalog.changed:
            if self._incomplete:
                self._sequence, self._incomplete = None, False
        changes = None if self._sequence is None else self._index.since(self._sequence)
        if changes is not None:
            self._apply(self._ours(changes.put), changes.removed)
            self._sequence = changes.sequence
        else:
            sequence, entries = self._index.snapshot()
            self._become(self._ours(entries))
            self._sequence = sequence

    def _ours(self, entries: Entries) -> Entries:
        ours = entries["namespace"] == np.void(self._namespace)
        return entries if ours.all() else entries[ours]  # a table of a million is 200 MB

    def _become(self, entries: Entries) -> None:
        """Apply a snapshot: at once to a new catalog, or else what is different about it."""
        with self._catalog.changed:
            if not self._filled:
                self._catalog.restore(entries)
                self._filled = True
                return
        there = set(entries["hash"].tolist())
        held = self._catalog.blocks(self._namespace, Tier.SSD, self._catalog.ready(Tier.SSD))
        gone = [BlockId(self._namespace, digest) for digest in held if digest not in there]
        different = np.zeros(len(entries), dtype=bool)
        for start in range(0, len(entries), _APPLIED_AT_ONCE):
            piece = slice(start, start + _APPLIED_AT_ONCE)
            known = self._catalog.places(self._namespace, entries["hash"][piece].tolist())
            different[piece] = [
                place is None or (place.segment, place.slot, place.slot_bytes) != new
                for place, new in zip(known, _places(entries[piece]), strict=True)
            ]
        self._apply(self._undamaged(entries[different]), gone)

    def _undamaged(self, entries: Entries) -> Entries:
        """Leave out what was taken out as damaged and is where it was."""
        blocks = (BlockId(self._namespace, digest) for digest in entries["hash"].tolist())
        pairs = enumerate(zip(blocks, _places(entries), strict=True))
        sound = [row for row, (block, at) in pairs if self._damaged.get(block) != Location(*at)]
        return entries[np.array(sound, dtype=np.intp)]

    def _apply(self, put: Entries, removed: Sequence[BlockId]) -> None:
        leaving = iter(removed)
        while some := list(islice(leaving, _APPLIED_AT_ONCE)):
            with self._catalog.changed:
                for block in some:
                    self._damaged.pop(block, None)
                    self._remove(block)
        for start in range(0, len(put), _APPLIED_AT_ONCE):
            self._enter(put[start : start + _APPLIED_AT_ONCE])

    def _remove(self, block: BlockId) -> None:
        row = self._catalog.find(block)
        if row is None:
            return
        if self._in_memory(row):
            self._leaving.add(block)
        if self._catalog.state(row, Tier.SSD) is CopyState.READY:
            self._catalog.end(row, Tier.SSD, "drop")

    def _enter(self, entries: Entries) -> None:
        catalog = self._catalog
        names = ("hash", "tenant", "position", "expiry_ns")
        columns = [entries[name].tolist() for name in names]
        with catalog.changed:
            for place, digest, tenant, position, expiry_ns in zip(
                _places(entries), *columns, strict=True
            ):
                where = Location(*place)
                block = BlockId(self._namespace, digest)
                self._damaged.pop(block, None)
                self._leaving.discard(block)
                row = catalog.find(block)
                if row is not None and catalog.state(row, Tier.SSD) is CopyState.READY:
                    catalog.relocate(row, where)
                    catalog.retain(row, 0, expiry_ns)
                    continue
                row = catalog.begin(
                    block,
                    Tier.SSD,
                    "write",
                    tenant_digest=tenant,
                    position=position,
                    expiry_ns=expiry_ns,
                )
                catalog.commit(row, Tier.SSD, where)

    def _in_memory(self, row: int) -> bool:
        tiers = (Tier.DEVICE, Tier.HOST)
        return any(self._catalog.state(row, tier) is not CopyState.ABSENT for tier in tiers)

    def _drop_leaving(self) -> None:
        """Drop the copies in memory of what was removed, except those that are in use."""
        if not self._leaving:
            return

        def select() -> list[int]:
            rows = map(self._catalog.find, self._leaving)
            return [row for row in rows if row is not None]

        with self._catalog.changed:
            self._promoter.purge(select)
            self._mover.purge_host(select)
            self._leaving = {self._catalog.id(row) for row in select() if self._in_memory(row)}


class FollowedReads:
    """Reads of a store's segments, of which another process may reuse any slot at any time.

    ``io`` says how the disk is accessed, once that is known.
    """

    def __init__(
        self, segments: int, fs: FileSystem, follower: Follower, *, integrity_key: bytes
    ) -> None:
        self._segments = segments
        self._fs = fs
        self._follower = follower
        self._key = integrity_key
        self._records: RecordIo | None = None

    @property
    def io(self) -> str:
        """How the disk is accessed: "direct", "buffered", or "unknown" before the first read."""
        return "unknown" if self._records is None else self._records.abilities.io

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Fetch blocks, each verified; GONE only for one that the index still has there."""
        return [
            self._read_one(block, where, target)
            for block, where, target in zip(ids, locations, into, strict=True)
        ]

    def _read_one(self, block: BlockId, where: Location, into: memoryview) -> ReadResult:
        self._follower.used()
        result, fault = self._try(block, where, into)
        if result is not ReadResult.GONE:
            return result
        if not self._follower.look():
            self._follower.lose(block, where)
            return ReadResult.FAILED
        now = self._follower.place(block)
        if now is None:
            return ReadResult.FAILED
        # Also where the place is the same: the block may have left it and come back to it.
        result, fault = self._try(block, now, into)
        if result is ReadResult.GONE and now != where:
            return ReadResult.FAILED
        if result is ReadResult.GONE:
            log.warning("block %s %s", block, fault)
        return result

    def _try(self, block: BlockId, where: Location, into: memoryview) -> tuple[ReadResult, str]:
        records = self._records
        if records is None:
            found = probe_reads(self._segments, self._fs, where.segment)
            abilities = found or Abilities(direct=False, punch=False)
            records = RecordIo(self._segments, self._fs, abilities)
            if found:
                self._records = records
        return read_record(records, self._key, block, where, into)


def _places(entries: Entries) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of each entry's ``Location``."""
    columns = (entries[name].tolist() for name in ("segment", "slot", "slot_bytes"))
    return zip(*columns, strict=True)
