"""What the scheduler's side and the workers' side of the connector tell each other: values only.

One ``Orders`` goes out with every engine step, the same to every rank, and each rank answers with
at most one ``RankReport``. A rank's store is the truth about what is stored on that rank; the
scheduler mirrors it. Prompts appear as block hashes only, never as token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier import BlockKeys, CatalogChanges, CostModel, Tier

__all__ = [
    "Hello",
    "Hint",
    "Load",
    "Measured",
    "Orders",
    "RankReport",
    "Save",
]


@dataclass(frozen=True, slots=True)
class Load:
    """Bring one block into the engine's pages; answered by ``landed`` or ``failed``."""

    restore: int
    """Numbers the restore, ever upwards."""
    block: int
    """Which block of the prompt."""
    hash: bytes
    tier: Tier
    pages: tuple[int, ...]
    """The engine's blocks, in token order, that hold this block."""


@dataclass(frozen=True, slots=True)
class Save:
    """Store blocks [start, stop) of a prompt once this step has been computed.

    Answered by ``released`` when the pages may be reused; whether the blocks were stored or
    declined shows in the changes.
    """

    save: int
    keys: BlockKeys
    """Of any rank, without unfinished tokens: the worker puts its own namespace in."""
    start: int
    stop: int
    pages: tuple[int, ...]
    """All pages of [start, stop), in token order."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A waiting request will want these blocks: promote them to host memory."""

    hint: int
    keys: BlockKeys


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine's own steps taught about the cost of computing."""

    start: int
    """The first token's position."""
    tokens: int
    seconds: float
    overlap: float
    """The share of the step during which loads were under way."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What every rank is to do with this step."""

    loads: tuple[Load, ...] = ()
    cancels: tuple[tuple[int, int], ...] = ()
    """(restore, block) of loads to stop if they can still be stopped."""
    ends: tuple[int, ...] = ()
    """Restores of which nothing more will be asked; answered by ``ended``."""
    saves: tuple[Save, ...] = ()
    hints: tuple[Hint, ...] = ()
    unhints: tuple[int, ...] = ()
    measured: tuple[Measured, ...] = ()
    resets: int = 0
    """How many times the cache was reset so far: a worker that has seen fewer starts afresh, with
    the weights' fingerprint as they are now; answered by a new ``hello``."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says about its store when it opened, before the first step or after a reset."""

    rank: int
    spec: bytes
    """``KVSpec.to_bytes()``: every rank's differs in its rank only."""
    block_bytes: int
    stored: CatalogChanges
    """A snapshot."""
    costs: CostModel
    resets: int = 0
    io: str = ""
    """How the SSD is accessed: "direct" or "buffered"."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What happened on one rank since its last report."""

    landed: tuple[tuple[int, int], ...] = ()
    """(restore, block): the bytes are in the pages."""
    failed: tuple[tuple[int, int], ...] = ()
    """(restore, block): not loaded, and nothing writes to the pages any more."""
    ended: tuple[int, ...] = ()
    """Restores of which nothing writes to any page any more."""
    released: tuple[int, ...] = ()
    """Saves whose pages may be reused."""
    changes: CatalogChanges | None = None
    costs: CostModel | None = None
    """If they moved."""
    hello: Hello | None = None
    """After a reset."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counters of this rank, as they stand; empty if they were not looked at."""
    stale: bool = False
    """The weights changed without a reset: loads fail and saves are dropped until there is one."""
