"""What the engine's own steps teach about the cost of computing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier_vllm.messages import Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Steps", "learnable"]

CHUNK_TOKENS_MIN: Final = 16
"""Chunks of fewer tokens are decodes, or too short to say anything about prefill."""
PREFILL_SHARE_MIN: Final = 0.75
"""The part of a step's tokens that must be prefill for its time to teach what prefill costs."""
COVER_STEPS: Final = 2.0
"""Loads in flight cover this many steps: the scheduler decides once per step, and hears late."""


@dataclass(frozen=True, slots=True)
class _Out:
    chunk: tuple[int, int] | None
    began: float
    loading: bool


class Steps:
    """The steps that are out, oldest first; the scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._out: deque[_Out] = deque()
        self._ended = 0.0
        self._measured: list[Measured] = []
        self.cover_s = 0.0
        """How much time the loads in flight must cover."""

    def began(self, chunks: Sequence[tuple[int, int]], *, loading: bool) -> None:
        """Note a step of (first token, tokens) for each of its requests."""
        self._out.append(_Out(learnable(chunks), self._clock(), loading))

    def ended(self, *, loading: bool) -> None:
        """Note the end of the oldest step that is out.

        A pipelined one began when the one before it ended.
        """
        if not self._out:
            return
        step, now = self._out.popleft(), self._clock()
        seconds, self._ended = now - max(step.began, self._ended), now
        if step.chunk is not None and seconds > 0:
            start, tokens = step.chunk
            overlap = (step.loading + loading) / 2
            self._measured.append(Measured(start, tokens, seconds, overlap))
            self.cover_s = COVER_STEPS * seconds

    def take(self) -> tuple[Measured, ...]:
        """Return what was measured since the last call."""
        measured, self._measured = tuple(self._measured), []
        return measured


def learnable(chunks: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the one chunk that costs what a step's prefill costs; None if it was not prefill.

    Several chunks in one step are as one of as many tokens whose start makes for as much attention.
    """
    prefill = [(start, tokens) for start, tokens in chunks if tokens >= CHUNK_TOKENS_MIN]
    total = sum(tokens for _, tokens in prefill)
    if not total or total < PREFILL_SHARE_MIN * sum(tokens for _, tokens in chunks):
        return None
    attention = sum(tokens * (start + (tokens - 1) / 2) for start, tokens in prefill)
    return max(0, round(attention / total - (total - 1) / 2)), total
