"""Which blocks are worth a write: rules to compare by what they save and what they write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.history import USES_MAX, History
from kvtier.prices import USES_PRICED
from kvtier.write_rule import WritePrice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _replay_traces import Trace
    from _replay_ttft import Outcome

    from kvtier.prices import Prices


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
    """The store's own rule while its budget affords ``share`` of all blocks offered."""

    def __init__(self, trace: Trace, prices: Prices, share: float) -> None:
        self._seen = _Seen(trace)
        self._values = prices.last
        self._share = share
        self._price = WritePrice()

    def admitted(self, number: int, missing: Sequence[int], outcome: Outcome) -> list[int]:
        """Return the missing blocks that are worth their write."""
        del outcome
        uses, values, price = self._seen.uses(number), self._values, self._price
        chosen = []
        for at in missing:
            value = min(uses[at], USES_PRICED) * values[min(at, len(values) - 1)]
            written = value >= price.now
            if written:
                chosen.append(at)
            price.follow(self._share, written=written)
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
