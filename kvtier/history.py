"""How often blocks that have no copy any more were asked for, in bounded memory."""

from __future__ import annotations

from typing import Final

__all__ = ["HISTORY_PLACES", "USES_MAX", "History"]

HISTORY_PLACES: Final = 1 << 20
"""Blocks that can be remembered at most, a power of two; 4 bytes each, taken as they are used."""
USES_MAX: Final = 255
"""More uses of a block than this are not counted."""
_PRINT_MASK: Final = 0xFFFFFF


class History:
    """A direct-mapped table: place and fingerprint are bits of the block's hash, the newest wins.

    Of two blocks that share a place the older is forgotten; one in 2**24 of those is mistaken for
    the other. Its owner locks.
    """

    def __init__(self, places: int = HISTORY_PLACES) -> None:
        if places < 1 or places & (places - 1):
            raise ValueError(f"places: {places} is not a power of two")
        self._last = places - 1
        self._words = memoryview(bytearray(4 * places)).cast("I")  # fingerprint, then uses

    def note(self, digest: bytes, uses: int) -> None:
        """Remember the uses of a block."""
        bits = int.from_bytes(digest[:8], "little")
        mark = bits >> 32 & _PRINT_MASK
        self._words[bits & self._last] = mark << 8 | min(uses, USES_MAX)

    def recall(self, digest: bytes) -> int:
        """Return the uses of a block; 0 if they are not known."""
        bits = int.from_bytes(digest[:8], "little")
        word = self._words[bits & self._last]
        return word & USES_MAX if word >> 8 == bits >> 32 & _PRINT_MASK else 0
