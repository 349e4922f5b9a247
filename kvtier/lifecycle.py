"""The life of one block's copy in one tier, as a table.

::

    ABSENT --write--> WRITING --commit--> READY      bytes come from the engine or a faster tier
    ABSENT --load---> LOADING --commit--> READY      bytes come from a slower tier
    WRITING, LOADING --abort--> ABSENT
    WRITING --decline--> ABSENT                      worth less than what it would displace
    READY --evict--> EVICTING --evicted--> ABSENT    and back with --keep--> READY
    READY --drop--> ABSENT                           damaged or gone
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["CopyState", "after", "moves"]


class CopyState(IntEnum):
    """The state of one block's copy in one tier."""

    ABSENT = 0
    WRITING = 1
    LOADING = 2
    READY = 3
    EVICTING = 4


_MOVES: Final = {
    (CopyState.ABSENT, "write"): CopyState.WRITING,
    (CopyState.ABSENT, "load"): CopyState.LOADING,
    (CopyState.WRITING, "commit"): CopyState.READY,
    (CopyState.LOADING, "commit"): CopyState.READY,
    (CopyState.WRITING, "abort"): CopyState.ABSENT,
    (CopyState.LOADING, "abort"): CopyState.ABSENT,
    (CopyState.WRITING, "decline"): CopyState.ABSENT,
    (CopyState.READY, "evict"): CopyState.EVICTING,
    (CopyState.EVICTING, "evicted"): CopyState.ABSENT,
    (CopyState.EVICTING, "keep"): CopyState.READY,
    (CopyState.READY, "drop"): CopyState.ABSENT,
}


def after(state: CopyState, what: str) -> CopyState:
    """Return the state that a move leads to; ``ValueError`` if ``state`` has no such move."""
    try:
        return _MOVES[state, what]
    except KeyError:
        raise ValueError(f"a copy that is {state.name} cannot {what}") from None


def moves(what: str) -> tuple[int, ...]:
    """Return the state that ``what`` leads to from each state; -1 where there is no such move."""
    return _BY_NAME.get(what, _NOWHERE)


_NOWHERE: Final = (-1,) * len(CopyState)
_BY_NAME: Final[dict[str, tuple[int, ...]]] = {
    what: tuple(int(_MOVES.get((state, what), -1)) for state in CopyState) for _, what in _MOVES
}
