"""Who tells others what is stored: vLLM's event stream, or nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Announcements", "Silence"]


class Announcements(Protocol):
    """Who tells others what is stored."""

    def note(self, request: Any, hashes: Sequence[bytes], blocks: Iterable[int]) -> None:
        """Take in that a request holds blocks of a prompt with these hashes."""

    def moved(self, hashes: Iterable[bytes]) -> None:
        """Take in that blocks may be stored elsewhere by now."""

    def cleared(self) -> None:
        """Take in that nothing is stored any more."""


class Silence:
    """Announcements where nobody listens."""

    def note(self, request: Any, hashes: Sequence[bytes], blocks: Iterable[int]) -> None:
        """Say nothing."""

    def moved(self, hashes: Iterable[bytes]) -> None:
        """Say nothing."""

    def cleared(self) -> None:
        """Say nothing."""
