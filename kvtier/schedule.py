"""How long a restore takes for a given choice, and which choice is best: pure arithmetic.

A choice is two numbers, one per source tier: the earliest so many blocks of that tier are
recomputed, the rest is loaded. Recomputing gets dearer with position and needs everything before it
in place, so of two blocks of one tier the earlier one is never the worse to recompute; in
exhaustive search over sets and load orders no other choice was ever better. Missing blocks are
always recomputed.

::

    ssd  --read s--> host --copy c--> device     a two-stage path; the copy link is shared
    host ------------copy c---------> device

Times are in seconds from now; ``Clock`` says what is still busy with earlier work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Busy", "Choice", "Layout", "load_order"]

EXACT_BLOCKS_MAX: Final = 64
"""Up to so many blocks the closed form's choice is checked against its neighbours by list schedule;
beyond, what one block's granularity can cost is below 2 %."""

GRID_POINTS: Final = 2048
"""Choices evaluated at once; more are searched from coarse to fine."""

REFINE_STEPS: Final = 2
"""How many coarse steps around the best choice are looked at again."""

Run = tuple[Tier | None, int, int]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """Recompute the earliest ``ssd`` and ``host`` blocks of these tiers; ``seconds`` until done."""

    ssd: int
    host: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Busy:
    """When compute and links are free, in seconds from now."""

    compute_s: float = 0.0
    ssd_s: float = 0.0
    host_s: float = 0.0


def load_order(
    tiers: Sequence[Tier | None], load: Sequence[int], recompute: Sequence[int]
) -> tuple[int, ...]:
    """Return ``load`` in the order in which loads start.

    Blocks that the compute front must pass come first, ascending; then host memory; then the SSD
    from the tail, so that whatever is late lies next to the front, which can still recompute it.
    """
    last = max(recompute, default=-1)
    ahead, host, tail = [], [], []
    for block in sorted(load):
        if block < last:
            ahead.append(block)
        elif tiers[block] is Tier.HOST:
            host.append(block)
        else:
            tail.append(block)
    return (*ahead, *host, *reversed(tail))


class Layout:
    """The blocks still to be brought into place, and what each way costs.

    ``runs`` are maximal runs (tier, start, stop) of blocks that are to be loaded or recomputed, in
    order; blocks outside of them are in place or on their way. ``compute_s`` is the cost per block,
    to which every step of up to ``step_blocks`` blocks adds ``step_s``. ``ready_s`` says per run
    when what is on its way before it will be in place.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        compute_s: Array,
        *,
        ssd_s: float,
        host_s: float,
        latency_s: float = 0.0,
        step_s: float = 0.0,
        step_blocks: int = 1,
        busy: Busy | None = None,
        ready_s: Sequence[float] | None = None,
    ) -> None:
        self.runs = tuple(runs)
        self._ready_s = tuple(ready_s) if ready_s is not None else (0.0,) * len(self.runs)
        self.busy = busy or Busy()
        self._compute_s = compute_s
        self._sums = np.concatenate(([0.0], np.cumsum(compute_s)))
        self._ssd_s = ssd_s
        self._host_s = host_s
        self._latency_s = latency_s
        self._step_s = step_s
        self._step_blocks = step_blocks
        self.counts = {
            tier: sum(stop - start for t, start, stop in runs if t is tier)
            for tier in (Tier.SSD, Tier.HOST, None)
        }

    def blocks(self, tier: Tier | None) -> list[int]:
        """Return the blocks of one tier, ascending."""
        return [b for t, start, stop in self.runs if t is tier for b in range(start, stop)]

    def recomputed(self, choice: Choice) -> list[int]:
        """Return the blocks that a choice recomputes, ascending."""
        return sorted(
            [
                *self.blocks(Tier.SSD)[: choice.ssd],
                *self.blocks(Tier.HOST)[: choice.host],
                *self.blocks(None),
            ]
        )

    # -- how long

    def choices(self, *counts: tuple[int, int]) -> list[Choice]:
        """Return choices with their times: list schedules if blocks are few, else closed form."""
        if sum(self.counts.values()) <= EXACT_BLOCKS_MAX:
            return [Choice(ssd, host, self.list_schedule(ssd, host)) for ssd, host in counts]
        times = self.closed_form(*np.array(counts).T)
        return [Choice(*pair, float(t)) for pair, t in zip(counts, times, strict=True)]

    def arrival(self, ssd: Array, host: Array) -> Array:
        """Return when the first ``ssd`` and ``host`` blocks of a load order are in place.

        F = max(latency + ssd * max(s, c) + min(s, c), (ssd + host) * c): the pipeline is bound by
        the SSD or by the copy link that both tiers share.
        """
        s, c, busy = self._ssd_s, self._host_s, self.busy
        first = busy.ssd_s + self._latency_s + min(s, c)
        read = np.where(ssd > 0, first + ssd * max(s, c), 0.0)
        copied = np.where(ssd + host > 0, busy.host_s + (ssd + host) * c, 0.0)
        arrival: Array = np.maximum(read, copied)
        return arrival

    def closed_form(self, ssd: Array, host: Array) -> Array:
        """Return the times of many choices at once; exact but for waits within one block's copy."""
        done = np.full(ssd.shape, self.busy.compute_s)
        loaded_ssd = np.zeros_like(ssd)
        loaded_host = np.zeros_like(host)
        anything = False  # whether a run so far may have loaded blocks
        for (tier, start, stop), ready_s in zip(self.runs, self._ready_s, strict=True):
            length = stop - start
            head: Array
            if tier is None:
                head = np.full_like(ssd, length)
            elif tier is Tier.SSD:
                head = np.minimum(ssd, length)
                ssd = ssd - head
            else:
                head = np.minimum(host, length)
                host = host - head
            if anything or ready_s:
                waits = np.maximum(self.arrival(loaded_ssd, loaded_host), ready_s)
                done = np.where(head > 0, np.maximum(done, waits), done)
            done = done + (self._sums[start + head] - self._sums[start])
            if self._step_s:
                done = done - (-head // self._step_blocks) * self._step_s
            anything = anything or tier is not None
            if tier is Tier.SSD:
                loaded_ssd = loaded_ssd + (length - head)
            elif tier is Tier.HOST:
                loaded_host = loaded_host + (length - head)
        under_way = max(self.busy.ssd_s, self.busy.host_s)
        finish: Array = np.maximum(
            np.maximum(done, under_way), self.arrival(loaded_ssd, loaded_host)
        )
        return finish

    def list_schedule(self, ssd: int, host: int) -> float:
        """Return the end of the exact schedule.

        The SSD serves its blocks in load order; the copy link serves the ready block that comes
        first in that order and never idles while one is ready; compute takes its blocks ascending,
        each one after all blocks before it are in place.
        """
        recompute = self.recomputed(Choice(ssd, host, 0.0))
        tiers = dict.fromkeys(self.blocks(Tier.SSD), Tier.SSD)
        tiers |= dict.fromkeys(self.blocks(Tier.HOST), Tier.HOST)
        chosen = set(recompute)
        n = max((stop for _, _, stop in self.runs), default=0)
        order = load_order(
            [tiers.get(b) for b in range(n)], [b for b in tiers if b not in chosen], recompute
        )
        arrival = self._arrivals(order, tiers)
        done = self.busy.compute_s
        ready = {
            block: ready_s
            for (_, start, stop), ready_s in zip(self.runs, self._ready_s, strict=True)
            for block in range(start, stop)
        }
        present, upto, inside = 0.0, -1, 0
        for block in recompute:
            for before in range(max(upto, 0), block):
                present = max(present, arrival.get(before, 0.0))
            waits = max(present, ready[block])
            # A step goes on while its blocks adjoin and nothing has to be waited for.
            if block != upto or inside == self._step_blocks or waits > done:
                done, inside = max(done, waits) + self._step_s, 0
            upto, inside = block + 1, inside + 1
            done += float(self._compute_s[block])
        loaded = max(arrival.values(), default=max(self.busy.ssd_s, self.busy.host_s))
        return max(done, loaded)

    def _arrivals(self, order: Sequence[int], tiers: dict[int, Tier]) -> dict[int, float]:
        ready: dict[int, float] = {}
        read = self.busy.ssd_s + self._latency_s
        for block in order:
            if tiers[block] is Tier.SSD:
                read += self._ssd_s
            ready[block] = read if tiers[block] is Tier.SSD else 0.0
        waiting = list(order)
        now, arrival = self.busy.host_s, {}
        while waiting:
            first = next((b for b in waiting if ready[b] <= now), None)
            if first is None:
                now = min(ready[b] for b in waiting)
                continue
            waiting.remove(first)
            now += self._host_s
            arrival[first] = now
        return arrival

    # -- which choice

    def worth(self, price: float) -> tuple[int, int]:
        """Return how many blocks of each tier cost less to recompute at ``price`` than to load.

        c(i) <= l / price: beyond, a second of waiting saved costs more compute than it is worth.
        """
        counts = []
        for tier, load_s in ((Tier.SSD, self._ssd_s), (Tier.HOST, self._host_s)):
            compute_s = self._compute_s[self.blocks(tier)] if price > 0 else np.zeros(0)
            compute_s = compute_s + self._step_s / self._step_blocks
            dear = np.flatnonzero(compute_s * price > load_s)
            counts.append(int(dear[0]) if dear.size else self.counts[tier])
        return counts[0], counts[1]

    def cheapest(self, choice: Choice, deadline_s: float) -> Choice:
        """Return the choice with fewest recomputed SSD blocks that still ends by the deadline."""
        ssd = np.arange(choice.ssd + 1)
        times = self.closed_form(ssd, np.full(len(ssd), choice.host))
        met = np.flatnonzero(times <= deadline_s)
        least = int(met[0]) if met.size else choice.ssd
        return self.choices((least, choice.host))[0]

    def best(self, ssd_max: int | None = None, host_max: int | None = None) -> Choice:
        """Return the fastest choice that recomputes at most so many blocks of each tier."""
        limits = (
            self.counts[Tier.SSD] if ssd_max is None else min(ssd_max, self.counts[Tier.SSD]),
            self.counts[Tier.HOST] if host_max is None else min(host_max, self.counts[Tier.HOST]),
        )
        choice = self.estimate(limits)
        if sum(self.counts.values()) > EXACT_BLOCKS_MAX:
            return choice
        near = [
            (self.list_schedule(a, b), a, b)
            for a in range(max(choice.ssd - 1, 0), min(choice.ssd + 1, limits[0]) + 1)
            for b in range(max(choice.host - 1, 0), min(choice.host + 1, limits[1]) + 1)
        ]
        seconds, ssd, host = min(near)
        return Choice(ssd, host, seconds)

    def estimate(self, limits: tuple[int, int] | None = None) -> Choice:
        """Return the closed form's choice; many are searched from coarse to fine."""
        top = (self.counts[Tier.SSD], self.counts[Tier.HOST]) if limits is None else limits
        low, high = (0, 0), top
        while True:
            steps = _steps(high[0] - low[0], high[1] - low[1])
            axes = [
                np.append(np.arange(a, b, step), b)
                for a, b, step in zip(low, high, steps, strict=True)
            ]
            ssd = np.repeat(axes[0], len(axes[1]))
            host = np.tile(axes[1], len(axes[0]))
            times = self.closed_form(ssd, host)
            # Of equal times the one that recomputes least.
            equal = np.flatnonzero(times == times.min())
            at = int(equal[np.argmin(ssd[equal] + host[equal])])
            found = (int(ssd[at]), int(host[at]))
            if steps == (1, 1):
                return Choice(*found, float(times[at]))
            reach = (REFINE_STEPS * steps[0], REFINE_STEPS * steps[1])
            low = (max(found[0] - reach[0], 0), max(found[1] - reach[1], 0))
            high = (min(found[0] + reach[0], top[0]), min(found[1] + reach[1], top[1]))


def _steps(ssd: int, host: int) -> tuple[int, int]:
    """Return how far apart choices are tried, so that they are at most ``GRID_POINTS``."""
    steps = [1, 1]
    while (ssd // steps[0] + 2) * (host // steps[1] + 2) > GRID_POINTS:
        widest = 0 if ssd // steps[0] >= host // steps[1] else 1
        steps[widest] *= 2
    return steps[0], steps[1]
