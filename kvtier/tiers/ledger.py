"""The index and what keeps it usable: one commit at a time, and repair when its keeper dies.

The slots' books know which slots hold a block; the records' headers know which block that is. So an
index that was lost or altered while the store was open can always be made anew from the two.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvtier.errors import FormatError
from kvtier.tiers.entries import id_at, location_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.tiers.base import BlockId, Location
    from kvtier.tiers.index import Index, Use
    from kvtier.tiers.slabs import Slabs

__all__ = ["Ledger"]

log = logging.getLogger(__name__)


class Ledger:
    """Commits to ``index``; thread-safe.

    ``scan(locations)`` reads records' headers and returns their entries. If the keeper of the index
    dies in a commit, the index is repaired from what is on disk and the commit is tried again; if
    it dies again, the index is made anew. Only then does a commit fail for that reason.
    """

    def __init__(
        self, index: Index, slabs: Slabs, scan: Callable[[Iterable[Location]], list[bytes]]
    ) -> None:
        self._index = index
        self._slabs = slabs
        self._scan = scan
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        self.repairs = 0

    def commit(
        self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use] = ()
    ) -> None:
        """Apply removals, additions and uses in one durable transaction, or raise ``OSError``."""
        with self._lock:
            try:
                self._index.commit(put, remove, uses)
            except OSError as error:
                if self._index.healthy():
                    raise
                log.warning("the index is repaired: %s", error)
            else:
                return
            for repair in (self._reconcile, self._rebuild):
                try:
                    repair()
                    self._index.commit(put, remove, uses)
                except (OSError, FormatError) as error:
                    log.warning("the index could not be repaired: %s", error)
                    failure = error
                else:
                    self.repairs += 1
                    return
            raise OSError(f"the index did not commit and could not be repaired: {failure}")

    def _reconcile(self) -> None:
        """Reopen the index and make it agree with the slots' books."""
        self._index.reopen()
        entries = self._index.entries()
        known: set[Location] = set()
        stale: list[BlockId] = []
        for row in range(len(entries)):
            where = location_at(entries, row)
            if self._slabs.holds(id_at(entries, row), where):
                known.add(where)
            else:
                stale.append(id_at(entries, row))
        missing = [where for where in self._slabs.live() if where not in known]
        self._index.commit(self._scan(missing), stale)

    def _rebuild(self) -> None:
        """Make the index anew from the headers of all slots that hold a block."""
        self._index.rebuild(self._scan(self._slabs.live()))
