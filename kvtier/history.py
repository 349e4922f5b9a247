"""How often blocks that have no copy any more were asked for, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def note(self, hashes: Sequence[bytes], uses: Sequence[int]) -> None:
        """Remember the uses of blocks, up to ``USES_MAX``."""
        words, last = self._words, self._last
        for bits, count in zip(_bits(hashes), uses, strict=True):
            words[bits & last] = (bits >> 32 & _PRINT_MASK) << 8 | count

    def recall(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the uses of blocks; 0 of those that are not known."""
        words, last = self._words, self._last
        return [
            word & USES_MAX if (word := words[bits & last]) >> 8 == bits >> 32 & _PRINT_MASK else 0
            for bits in _bits(hashes)
        ]


def _bits(hashes: Sequence[bytes]) -> list[int]:
    """Return the first 64 bits of each 32-byte hash."""
    words: list[int] = memoryview(b"".join(hashes)).cast("Q")[::4].tolist()
    return words
