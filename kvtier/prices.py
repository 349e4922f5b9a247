"""What the loss of a copy costs, by the block's position in its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from kvtier.history import USES_MAX
from kvtier.plan import Tier

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from kvtier.cost import CostModel

__all__ = ["POSITIONS_PRICED", "USES_PRICED", "HostValues", "Prices", "SsdValues"]

POSITIONS_PRICED: Final = 4096
"""Positions with a price of their own, in blocks; further ones cost what the last of them does."""
PRICE_MIN: Final = 1 / 16
"""What every copy is worth: to load a block that is cheaper to recompute still spares the GPU."""
USES_PRICED: Final = 4
"""More uses make a copy no dearer: what was asked for often, once, must not stay for ever."""
_COUNTED: Final = (*range(USES_PRICED), *[USES_PRICED] * (USES_MAX + 1 - USES_PRICED))
"""What so many uses count as."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices relative to recomputing a prompt's first block, so that they outlive a calibration.

    ``last[position]`` is that of a block's last copy, ``faster`` that of a host copy whose block is
    on the SSD too. ``slot_bytes`` is the size that they hold for; a copy of another size costs in
    proportion, per byte. 0: sizes count nothing.
    """

    last: tuple[float, ...] = (1.0,)
    faster: float = 1.0
    slot_bytes: int = 0

    @classmethod
    def of(cls, costs: CostModel, block_tokens: int, block_bytes: int, slot_bytes: int = 0) -> Self:
        """Price a loss by what it costs next time: recompute - load, or SSD load - host load.

        As long as the cost of recomputing is not known, position counts nothing.
        """
        ssd, host = (costs.load_seconds(tier, block_bytes) for tier in (Tier.SSD, Tier.HOST))
        seconds = costs.block_seconds(block_tokens, 0, POSITIONS_PRICED)
        first = float(seconds[0])
        if not costs.compute.known or not first > 0:
            return cls(slot_bytes=slot_bytes)
        last = np.maximum((seconds - ssd) / first, PRICE_MIN)
        faster = max((ssd - host) / first, PRICE_MIN)
        return cls(tuple(last.tolist()), faster, slot_bytes)


class SsdValues:
    """The values of copies on the SSD: uses times the price of a last copy, per byte.

    No more than ``USES_PRICED`` uses count, here and in ``HostValues``.
    """

    def __init__(
        self, uses: array[int], positions: array[int], slot_bytes: array[int], prices: Prices
    ) -> None:
        self._uses = uses
        self._positions = positions
        self._slot_bytes = slot_bytes
        self._prices = prices

    def reprice(self, prices: Prices) -> None:
        """Use other prices from now on."""
        self._prices = prices

    def of(self, rows: Sequence[int]) -> list[float]:
        """Return the value of each row's copy."""
        uses, positions, last = self._uses, self._positions, self._prices.last
        end, size = len(last) - 1, self._prices.slot_bytes
        values = [
            _COUNTED[uses[row]] * last[at if (at := positions[row]) < end else end] for row in rows
        ]
        if size:
            sizes = self._slot_bytes
            for at, row in enumerate(rows):
                if sizes[row] not in (size, 0):  # 0: it has no place yet
                    values[at] *= size / sizes[row]
        return values

    def of_all(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the same for many rows at once."""
        last, size = np.array(self._prices.last), self._prices.slot_bytes
        positions = np.minimum(np.asarray(self._positions)[rows], len(last) - 1)
        values: np.ndarray[Any, Any] = (
            np.minimum(np.asarray(self._uses)[rows], USES_PRICED) * last[positions]
        )
        if size:
            sizes = np.asarray(self._slot_bytes)[rows]
            values *= size / np.where(sizes > 0, sizes, size)
        return values


class HostValues:
    """The values of copies in host memory; those of blocks on the SSD, or on their way, are low."""

    def __init__(
        self,
        uses: array[int],
        positions: array[int],
        ordered: array[int],
        ssd_bit: int,
        prices: Prices,
    ) -> None:
        self._uses = uses
        self._positions = positions
        self._ordered = ordered  # has this bit where a copy is on the SSD, or on its way
        self._ssd_bit = ssd_bit
        self._prices = prices

    def reprice(self, prices: Prices) -> None:
        """Use other prices from now on."""
        self._prices = prices

    def of(self, rows: Sequence[int]) -> list[float]:
        """Return the value of each row's copy."""
        uses, positions, last = self._uses, self._positions, self._prices.last
        end, faster = len(last) - 1, self._prices.faster
        ordered, bit = self._ordered, self._ssd_bit
        return [
            _COUNTED[uses[row]] * (faster if ordered[row] & bit else last[min(positions[row], end)])
            for row in rows
        ]

    def of_all(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the same for many rows at once."""
        values: np.ndarray[Any, Any] = np.array(self.of(rows.tolist()))
        return values
