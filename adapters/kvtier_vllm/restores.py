"""The restores under way: their pages, the blocks that they bring, and how each of them ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier_vllm.holds import Holds
    from kvtier_vllm.messages import Load, RankReport
    from kvtier_vllm.restore import Restore

__all__ = ["Restores"]

RESTORE: Final = "restore"


@dataclass(slots=True)
class _Ending:
    request_id: str
    waiting: set[int]
    owes: bool


class Restores:
    """From a restore's start until every rank says that nothing writes for it any more.

    Its pages are held all that time, whatever becomes of its request. The scheduler's thread.
    """

    def __init__(self, holds: Holds, ranks: int) -> None:
        self._holds = holds
        self._ranks = ranks
        self._next = 0
        self._active: dict[int, Restore] = {}
        self._bringing: dict[bytes, Restore] = {}
        self._ending: dict[int, _Ending] = {}
        self._ends: list[int] = []
        self._owed: list[str] = []

    def __bool__(self) -> bool:
        """Whether any is under way whose request still wants it."""
        return bool(self._active)

    def __iter__(self) -> Iterator[Restore]:
        return iter(list(self._active.values()))

    @property
    def ending(self) -> bool:
        """Whether ranks have yet to say that nothing writes for one that was ended."""
        return bool(self._ending)

    def start(self, restore: Restore, pages_per_block: int) -> None:
        """Begin a restore whose request has its pages."""
        pages = self._holds.engine.of(restore.request_id)
        restore.start(self._next, pages, pages_per_block)
        self._next += 1
        first, last = restore.first_loadable, len(restore.plan.hashes)
        self._holds.take(
            RESTORE, restore.number, pages[first * pages_per_block : last * pages_per_block]
        )
        self._active[restore.number] = restore
        self._bringing.update(dict.fromkeys(restore.plan.hashes, restore))

    def bring(self, digest: bytes, block: int) -> bool:
        """Whether a restore will have that block in place, and has not yet."""
        restore = self._bringing.get(digest)
        return restore is not None and restore.front <= block

    def orders(self) -> tuple[list[Load], list[tuple[int, int]], tuple[int, ...]]:
        """Return the loads to start, those to stop, and the restores to end."""
        loads, cancels = [], []
        for restore in self._active.values():
            started, stopped = restore.take_orders()
            loads += started
            cancels += stopped
        ends, self._ends = tuple(self._ends), []
        return loads, cancels, ends

    def report(self, rank: int, report: RankReport, now: float) -> None:
        """Take a rank's answers; what it says of a restore that was ended is of no interest."""
        for answers, landed in ((report.landed, True), (report.failed, False)):
            for number, block in answers:
                if (restore := self._active.get(number)) is not None:
                    restore.answered(rank, block, now, landed=landed)
        for restore in self._active.values():
            restore.settled()
        for number in report.ended:
            self._ended(rank, number)

    def end(self, restore: Restore, *, owes: bool = False) -> None:
        """Ask nothing more of a restore.

        ``owes``: the engine keeps its request's pages until it is told that the loads are over.
        """
        del self._active[restore.number]
        for digest in restore.plan.hashes:
            if self._bringing.get(digest) is restore:
                del self._bringing[digest]
        ranks = set(range(self._ranks))
        self._ending[restore.number] = _Ending(restore.request_id, ranks, owes)
        self._ends.append(restore.number)

    def take_owed(self) -> list[str]:
        """Return the requests whose pages the engine kept for loads that are over now."""
        owed, self._owed = self._owed, []
        return owed

    def _ended(self, rank: int, number: int) -> None:
        ending = self._ending.get(number)
        if ending is None:
            return
        ending.waiting.discard(rank)
        if ending.waiting:
            return
        del self._ending[number]
        self._holds.drop(RESTORE, number)
        if ending.owes:
            self._owed.append(ending.request_id)
