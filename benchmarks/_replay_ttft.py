"""Time to first token of one prompt, by the planner's own arithmetic (``kvtier.schedule``).

Idle compute and links, every block of the prompt to be brought into place. The closed form of all
choices is taken, not the neighbours by list schedule that a plan for few blocks looks at as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.plan import Tier, runs
from kvtier.profiles import DEVICES, LINKS, MODELS, block_bytes, cost_model
from kvtier.schedule import Choice, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cost import CostModel

STEP_TOKENS: Final = 8192
"""Tokens that an engine computes in one step at most."""
OUTCOMES_KEPT: Final = 1 << 16
"""Outcomes that are remembered: many prompts are stored alike."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What restores: names of ``kvtier.profiles``."""

    model: str = "Llama-3-8B"
    device: str = "H100"
    ssd: str = "SSD 7 GB/s"
    host: str = "PCIe 5 x16"

    def __str__(self) -> str:
        return f"{self.model}, {self.device}, {self.ssd}"

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes of one block."""
        return block_bytes(MODELS[self.model], block_tokens)

    def costs(self, block_tokens: int) -> CostModel:
        """Return what its plans are made from."""
        return cost_model(
            MODELS[self.model],
            DEVICES[self.device],
            ssd=LINKS[self.ssd],
            host=LINKS[self.host],
            block_tokens=block_tokens,
            step_blocks=STEP_TOKENS // block_tokens,
        )


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine restores.

    ``holes``: it uses what is stored behind a missing block; else only the prefix that has none.
    ``hybrid``: it recomputes a head while the tail loads; else it loads all that it can use.
    ``price``: what a second of compute is worth in seconds of waiting (``kvtier.plan``).
    """

    holes: bool = True
    hybrid: bool = True
    price: float = 0.0

    def __str__(self) -> str:
        kind = "hybrid" if self.hybrid else "load"
        return f"{kind}{', holes' if self.holes else ''}"


TODAY: Final = Way(holes=False, hybrid=False)
CONTIGUOUS: Final = Way(holes=False)
HOLES: Final = Way()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt's time to first token, with and without the cache; compute seconds; loads.

    ``used`` is how many blocks from the head on could be used; ``split`` the first block that is
    not recomputed although it could have been loaded.
    """

    seconds: float
    recompute_s: float
    compute_s: float
    recomputed: frozenset[int]
    ssd: int
    host: int

    @property
    def saved_s(self) -> float:
        """How much sooner than by recomputing everything."""
        return self.recompute_s - self.seconds


class Ttft:
    """Outcomes for prompts of up to ``longest`` blocks, restored in one way at given costs."""

    def __init__(
        self, costs: CostModel, way: Way, *, block_tokens: int, block_bytes: int, longest: int
    ) -> None:
        self._way = way
        self._compute_s = costs.block_seconds(block_tokens, 0, longest)
        self._step_s = costs.compute.fixed_s
        self._step_blocks = max(STEP_TOKENS // block_tokens, 1)
        self._ssd_s = costs.load_seconds(Tier.SSD, block_bytes)
        self._host_s = costs.load_seconds(Tier.HOST, block_bytes)
        self._known: dict[tuple[tuple[Tier | None, int, int], ...], Outcome] = {}

    def of(self, tiers: Sequence[Tier | None]) -> Outcome:
        """Return the outcome for a prompt of whose blocks these are the fastest tiers."""
        if not self._way.holes and None in tiers:
            prefix = tiers.index(None)
            tiers = (*tiers[:prefix], *[None] * (len(tiers) - prefix))
        spans = tuple(runs(tiers))
        found = self._known.get(spans)
        if found is None:
            if len(self._known) >= OUTCOMES_KEPT:
                self._known.clear()
            found = self._known[spans] = self._plan(spans)
        return found

    def _plan(self, spans: tuple[tuple[Tier | None, int, int], ...]) -> Outcome:
        blocks = spans[-1][2] if spans else 0
        layout = self._layout(spans)
        if self._way.hybrid:
            choice = layout.estimate(layout.worth(self._way.price))
        else:
            seconds = layout.closed_form(np.zeros(1, dtype=int), np.zeros(1, dtype=int))
            choice = Choice(0, 0, float(seconds[0]))
        whole = self._layout(((None, 0, blocks),)).closed_form(*np.zeros((2, 1), dtype=int))
        recomputed = layout.recomputed(choice)
        return Outcome(
            choice.seconds,
            float(whole[0]),
            float(self._compute_s[recomputed].sum()),
            frozenset(recomputed),
            ssd=layout.counts[Tier.SSD] - choice.ssd,
            host=layout.counts[Tier.HOST] - choice.host,
        )

    def _layout(self, spans: Sequence[tuple[Tier | None, int, int]]) -> Layout:
        return Layout(
            spans,
            self._compute_s,
            ssd_s=self._ssd_s,
            host_s=self._host_s,
            step_s=self._step_s,
            step_blocks=self._step_blocks,
        )
