"""Which blocks are worth a write: rules to compare by what they save and what they write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvtier.history import USES_MAX, History

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _replay_traces import Trace
    from _replay_ttft import Outcome

    from kvtier.prices import Prices

STEP: Final = 0.01
"""By how much of itself the price of a write changes with one block that is written."""
PRICE_MIN: Final = 1e-3


class _Seen:
    """How often each block was asked for, this time included; as bounded as a store's memory."""

    def __init__(self, trace: Trace) -> None:
        self._requests = trace.requests
        self._history = History()

    def uses(self, number: int) -> list[int]:
        """Count a request, and return the uses of each of its blocks."""
        hashes = self._requests[number].hashes
        uses = [min(each + 1, USES_MAX) for each in self._history.recall(hashes)]
        self._history.note(hashes, uses)
        return uses


class SecondUse:
    """Only what was asked for before."""

    def __init__(self, trace: Trace) -> None:
        self._seen = _Seen(trace)

    def admitted(self, number: int, missing: Sequence[int], outcome: Outcome) -> list[int]:
        """Return the missing blocks that were seen before."""
        del outcome
        uses = self._seen.uses(number)
        return [at for at in missing if uses[at] > 1]


class PricedWrites:
    """Writes have a price, which follows from a budget: ``share`` of all blocks offered.

    A block is written if its value, uses x (recompute - load), is at least the price. The price
    rises with every write by ``STEP`` and falls with every block offered by ``share`` of that: the
    multiplier of the budget's constraint, found by subgradient steps on its logarithm.
    """

    def __init__(self, trace: Trace, prices: Prices, share: float) -> None:
        self._seen = _Seen(trace)
        self._values = prices.last
        self._share = share
        self._price = 1.0  # that of a first block

    def admitted(self, number: int, missing: Sequence[int], outcome: Outcome) -> list[int]:
        """Return the missing blocks that are worth their write."""
        del outcome
        uses, values = self._seen.uses(number), self._values
        chosen = []
        for at in missing:
            value = uses[at] * values[min(at, len(values) - 1)]
            admits = value >= self._price
            if admits:
                chosen.append(at)
            self._price = max(self._price * math.exp(STEP * (admits - self._share)), PRICE_MIN)
        return chosen


class TailsOnly:
    """What the prompt's own plan would recompute anyway is not written when seen once.

    ``splits`` says for a prompt of so many blocks, all stored, how many of them that is.
    """

    def __init__(self, trace: Trace, splits: Sequence[int]) -> None:
        self._seen = _Seen(trace)
        self._splits = splits

    def admitted(self, number: int, missing: Sequence[int], outcome: Outcome) -> list[int]:
        """Return the missing blocks behind the split, and those that were seen before."""
        del outcome
        uses = self._seen.uses(number)
        split = self._splits[len(uses)]
        return [at for at in missing if at >= split or uses[at] > 1]
