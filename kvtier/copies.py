"""The state of every copy, and which of them are shown; the catalog's columns and moves."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.lifecycle import CopyState, after, moves
from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtier.changes import BlockTiers, ChangeLog
    from kvtier.rows import BlockRows

__all__ = ["BIT", "SHOWN", "TIERS", "Copies"]

TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.SSD)
BIT: Final = {Tier.HOST: 1, Tier.SSD: 2, Tier.DEVICE: 4}
SHOWN: Final[tuple[tuple[Tier, ...], ...]] = tuple(
    tuple(tier for tier in TIERS if bits & BIT[tier]) for bits in range(8)
)
"""The tiers that a sum of bits stands for, fastest first."""
_READY: Final = {
    tier: tuple(BIT[tier] if state is CopyState.READY else 0 for state in CopyState)
    for tier in TIERS
}
_TURNS: Final = {"commit": 1, "keep": 1, "evict": -1, "drop": -1}
"""What a move adds to the number of READY copies."""


class Copies:
    """One state a tier for each row, as columns; its owner locks, and grows ``columns``.

    A block is shown in the tiers in which its copy is READY, unless it is hidden.
    """

    def __init__(self, rows: BlockRows, changes: ChangeLog) -> None:
        self._rows = rows
        self._changes = changes
        self.states = {tier: array("B") for tier in TIERS}
        self.shown = array("B")  # the sum of the bits of the tiers in which a block is shown
        self.columns = (*self.states.values(), self.shown)
        self.ready = dict.fromkeys(TIERS, 0)
        self.hidden: set[int] = set()

    def legal(self, rows: Sequence[int], tier: Tier, what: str) -> list[int]:
        """Return where a move leads each row; ``ValueError`` if one has no such move."""
        states, to = self.states[tier], moves(what)
        led = [to[states[row]] for row in rows]
        if -1 in led:
            row = rows[led.index(-1)]
            try:
                after(CopyState(states[row]), what)
            except ValueError as error:
                raise ValueError(f"catalog row {row}, {tier}: {error}") from None
        return led

    def move(self, rows: Sequence[int], tier: Tier, what: str) -> None:
        """Make a move with all rows, or with none."""
        states = self.states[tier]
        for row, state in zip(rows, self.legal(rows, tier, what), strict=True):
            states[row] = state
        turns = _TURNS.get(what, 0)
        if turns:
            self.ready[tier] += turns * len(rows)
            self.show(rows)

    def show(self, rows: Sequence[int]) -> None:
        """Show blocks where they are READY, and note what that changes."""
        device, host, ssd = (self.states[tier] for tier in TIERS)
        on_device, in_host, on_ssd = (_READY[tier] for tier in TIERS)
        shown, hidden = self.shown, self.hidden
        turned: list[int] = []
        tiers: list[tuple[Tier, ...]] = []
        states = [in_host[host[row]] | on_ssd[ssd[row]] | on_device[device[row]] for row in rows]
        if hidden:
            states = [0 if row in hidden else now for row, now in zip(rows, states, strict=True)]
        for row, now in zip(rows, states, strict=True):
            if now != shown[row]:
                shown[row] = now
                turned.append(row)
                tiers.append(SHOWN[now])
        self._changes.add_all(
            [
                (name, digest, in_)
                for (name, digest), in_ in zip(self._rows.keys(turned), tiers, strict=True)
            ]
        )

    def unused(self, rows: Iterable[int]) -> list[int]:
        """Return those of the rows that have no copy in any state."""
        device, host, ssd = (self.states[tier] for tier in TIERS)
        return [row for row in rows if not (host[row] or ssd[row] or device[row])]

    def present(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each row whether it has a copy in any state."""
        states = [np.asarray(self.states[tier]) for tier in TIERS]
        present: np.ndarray[Any, np.dtype[np.bool_]]
        present = np.bitwise_or.reduce(states) != CopyState.ABSENT
        return present

    def snapshot(self) -> Iterator[BlockTiers]:
        """Return all that is shown now; what is shown later changes nothing in it."""
        shown = bytes(self.shown)
        spaces = [
            (namespace, list(rows), list(rows.values()))
            for namespace, rows in self._rows.spaces().items()
        ]
        return (
            (namespace, digest, SHOWN[shown[row]])
            for namespace, hashes, rows in spaces
            for digest, row in zip(hashes, rows, strict=True)
            if shown[row]
        )

    def check(self) -> list[str]:
        """Return what is wrong, in words."""
        problems = []
        shown = np.zeros(len(self.shown), dtype=np.uint8)
        for tier in TIERS:
            is_ready = np.asarray(self.states[tier]) == CopyState.READY
            shown += is_ready.view(np.uint8) * BIT[tier]
            if is_ready.sum() != self.ready[tier]:
                problems.append(
                    f"catalog: {is_ready.sum()} ready in {tier}, {self.ready[tier]} counted"
                )
        shown[list(self.hidden)] = 0
        if (np.asarray(self.shown) != shown).any():
            problems.append("catalog: a block is shown where it is not ready")
        return problems
