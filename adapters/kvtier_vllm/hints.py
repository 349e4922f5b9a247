"""Requests that wait: what is stored of them is promoted to host memory meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier import Tier
from kvtier_vllm.messages import Hint
from kvtier_vllm.tracked import confirmed

if TYPE_CHECKING:
    from kvtier_vllm.mirror import Mirror
    from kvtier_vllm.tracked import Tracked

__all__ = ["HINTS_MAX", "Hints"]

HINTS_MAX: Final = 64
"""Waiting requests for which blocks are prefetched at once."""


class Hints:
    """Hints from their order until they are taken back; the scheduler's thread."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[str, Tracked] = {}
        self._of: dict[str, int] = {}
        self._given: list[Hint] = []
        self._taken_back: list[int] = []

    @property
    def waits(self) -> bool:
        """Whether something is to be ordered."""
        return bool(self._given or self._taken_back)

    def wait(self, tracked: Tracked) -> None:
        """Note that a request waits; with the next hints it is looked at, once."""
        self._waiting[tracked.request.request_id] = tracked

    def give(self, mirror: Mirror) -> None:
        """Have blocks promoted that would have to come from the SSD; the bound's rest waits."""
        for request_id in list(self._waiting):
            if len(self._of) >= HINTS_MAX:
                return
            tracked = self._waiting.pop(request_id)
            keys = tracked.known_keys(mirror.spec)
            if tracked.asked.prefetch:
                keys = tracked.keys_of(mirror.spec, tracked.asked.prefetch)
            if request_id not in self._of and Tier.SSD in mirror.tiers(keys.hashes):
                self._of[request_id] = self._next
                self._given.append(Hint(self._next, confirmed(keys, len(keys))))
                self._next += 1

    def take_back(self, request_id: str) -> None:
        """Need a request's blocks in host memory no longer."""
        self._waiting.pop(request_id, None)
        number = self._of.pop(request_id, None)
        if number is not None:
            self._taken_back.append(number)

    def orders(self) -> tuple[tuple[Hint, ...], tuple[int, ...]]:
        """Return the hints to give and those to take back with this step."""
        given, self._given = tuple(self._given), []
        taken_back, self._taken_back = tuple(self._taken_back), []
        return given, taken_back
