"""Requests that wait: what is stored of them is promoted to host memory meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier import Tier
from kvtier_vllm.messages import Hint
from kvtier_vllm.tracked import confirmed

if TYPE_CHECKING:
    from kvtier import BlockKeys
    from kvtier_vllm.mirror import Mirror

__all__ = ["HINTS_MAX", "Hints"]

HINTS_MAX: Final = 64
"""Waiting requests for which blocks are prefetched at once."""


class Hints:
    """Hints from their order until they are taken back; the scheduler's thread."""

    def __init__(self) -> None:
        self._next = 0
        self._of: dict[str, int] = {}
        self._given: list[Hint] = []
        self._taken_back: list[int] = []

    @property
    def waits(self) -> bool:
        """Whether something is to be ordered."""
        return bool(self._given or self._taken_back)

    @property
    def full(self) -> bool:
        """Whether there may be no more of them."""
        return len(self._of) >= HINTS_MAX

    def give(self, request_id: str, keys: BlockKeys, mirror: Mirror) -> None:
        """Have a request's blocks promoted, if any would have to come from the SSD."""
        if request_id in self._of or Tier.SSD not in mirror.tiers(keys.hashes):
            return
        self._of[request_id] = self._next
        self._given.append(Hint(self._next, confirmed(keys, len(keys))))
        self._next += 1

    def take_back(self, request_id: str) -> None:
        """Need a request's blocks in host memory no longer."""
        number = self._of.pop(request_id, None)
        if number is not None:
            self._taken_back.append(number)

    def orders(self) -> tuple[tuple[Hint, ...], tuple[int, ...]]:
        """Return the hints to give and those to take back with this step."""
        given, self._given = tuple(self._given), []
        taken_back, self._taken_back = tuple(self._taken_back), []
        return given, taken_back
