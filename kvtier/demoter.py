"""Relief of host memory: between two marks, in the background, to the SSD first where it must.

Above the high mark copies go, least valuable first, until the low one is met. A copy that the SSD
was not given yet is written first and pinned meanwhile: at every instant a block is in host memory,
or durable. One that the SSD refuses goes all the same: a failing disk must not fill host memory.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtier.lane import Lane
from kvtier.plan import Tier
from kvtier.ssd_writer import COMMIT_BATCHES_MAX, SsdWriter
from kvtier.write_rule import PendingWrite

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.catalog import Catalog
    from kvtier.config import StoreConfig
    from kvtier.mover import Mover, Unsaved
    from kvtier.tiers.base import Location

__all__ = ["Demoter"]


class Demoter:
    """Owns the demotion lane and the writes of unsaved host copies, a bounded number at once.

    Lock order: the catalog's, then this one's.
    """

    def __init__(
        self,
        catalog: Catalog,
        writer: SsdWriter,
        config: StoreConfig,
        *,
        host_blocks_max: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._high = math.ceil(config.host_high_water * host_blocks_max)
        self._low = math.ceil(config.host_low_water * host_blocks_max)
        self._writes_max = COMMIT_BATCHES_MAX * config.write_batch_blocks_max
        self._mover: Mover
        self._work = threading.Condition()
        self._writing: set[int] = set()  # rows that the writer was given and has not answered for
        self._relieving = False  # above the high mark, and not yet down to the low one
        self._nudged = False
        self._stopped = False
        self._lane = Lane("demote", self._relieve_next, failed)

    def start(self, mover: Mover) -> None:
        """Start the lane, which lets go of ``mover``'s host copies."""
        self._mover = mover
        self._lane.start()

    # -- what others call, from any thread

    def nudge(self) -> None:
        """Take note that host copies came, or may go now; never waits for a disk."""
        if not self._high:
            return  # no host tier: copies in passing go with their last use
        with self._catalog.changed:
            ready = self._catalog.ready(Tier.HOST)
            with self._work:
                if ready > (self._low if self._relieving else self._high):
                    self._nudged = True
                    self._work.notify_all()

    def flush(self, timeout: float) -> int:
        """Offer the SSD every host copy that it was not given yet; returns the blocks still open.

        A block that the SSD refuses is not open; it is offered again by the next flush.
        """
        deadline = time.monotonic() + timeout
        wanted = self._mover.unsaved()
        begun: set[int] = set()
        # Heads first: a caller of contiguous prefixes has no use for a tail alone.
        for row, unsaved in sorted(wanted.items(), key=lambda item: item[1].record.position):
            with self._work:
                if not self._work.wait_for(self._has_room, deadline - time.monotonic()):
                    return len(wanted) - len(begun - self._writing)
            begun.add(row)
            self._save(row, unsaved)
        with self._work:
            self._work.wait_for(
                lambda: self._stopped or begun.isdisjoint(self._writing),
                deadline - time.monotonic(),
            )
            return len(begun & self._writing)

    def stop(self) -> None:
        """Wake whoever waits and begin no more writes: the store closes, or a lane failed."""
        with self._work:
            self._stopped = True
            self._work.notify_all()

    def close(self) -> None:
        """Stop the lane."""
        self.stop()
        self._lane.join()

    # -- the lane

    def _relieve_next(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._nudged or self._stopped)
            if self._stopped:
                return False
            self._nudged = False
        with self._catalog.changed:
            # Copies that are being written will go without a decision of their own.
            unsaved = self._mover.let_go(self._excess())
            with self._work:
                room = self._writes_max - len(self._writing)
            if self._catalog.contiguous:
                unsaved = self._mover.with_heads(unsaved)
            due = [row for row in unsaved if row not in self._writing]
            writes = [self._begin(row, unsaved[row]) for row in due[: max(room, 0)]]
        for write in writes:
            self._writer.submit(write)
        return True

    def _excess(self) -> int:
        ready = self._catalog.ready(Tier.HOST)
        with self._work:
            self._relieving = ready > (self._low if self._relieving else self._high)
            return max(ready - self._low - len(self._writing), 0) if self._relieving else 0

    # -- writes

    def _has_room(self) -> bool:
        return self._stopped or len(self._writing) < self._writes_max

    def _save(self, row: int, unsaved: Unsaved) -> None:
        """Offer the SSD a copy unless it has gone, was saved or is being written."""
        with self._catalog.changed:
            with self._work:
                idle = row not in self._writing and not self._stopped
            wanted = idle and self._mover.is_unsaved(row, unsaved)
            wanted = wanted and not self._catalog.expired(row)
            write = self._begin(row, unsaved) if wanted else None
        if write is not None:
            self._writer.submit(write)

    def _begin(self, row: int, unsaved: Unsaved) -> PendingWrite:
        """Pin a copy for its write; holds the catalog's lock."""
        self._catalog.pin(row, Tier.HOST)
        with self._work:
            self._writing.add(row)
        # Retention may have been raised since the put.
        priority, expiry_ns = self._catalog.retention(row)
        record = replace(unsaved.record, priority=priority, expiry_ns=expiry_ns)
        done = partial(self._written, row)
        return PendingWrite(row, record, done, recomputed=unsaved.recomputed)

    def _written(self, row: int, where: Location | None) -> None:
        with self._catalog.changed:
            self._mover.offered(row, saved=where is not None)
            with self._work:
                self._writing.discard(row)
                self._work.notify_all()
            self.nudge()
