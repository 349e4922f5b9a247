"""What one restore leaves behind: a report, and its events in a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plan import Step
    from kvtier.trace import Trace

__all__ = ["RestoreNotes", "RestoreReport"]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did, in blocks, bytes and seconds.

    ``measured_s`` runs from the start of the session to the last block in place; None until then.
    """

    loaded: int
    recomputed: int
    failed: int
    loaded_bytes: int
    predicted_s: float
    measured_s: float | None


class RestoreNotes:
    """The compute side of one restore in a trace; without one it notes nothing. Its owner locks.

    ``number`` is the restore's in the trace, 0 without one.
    """

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace
        self.number = 0 if trace is None else trace.session()
        self._arrived: dict[int, int] = {}  # the event of each loaded block that no step built on
        self._waiting_since: float | None = None

    def arrived(self, block: int, event: int) -> None:
        """Note that a block was loaded; ``event`` is its copy into the slot, 0 if nobody noted."""
        if event:
            self._arrived[block] = event

    def placed(self, blocks: Sequence[int], begun: float, now: float, block_bytes: int) -> None:
        """Note the copy of blocks that a device tier of the store's own had."""
        if self._trace is not None and blocks:
            self._trace.add(
                "copy", "device", begun, now, session=self.number, start=min(blocks),
                stop=max(blocks) + 1, nbytes=len(blocks) * block_bytes,
            )  # fmt: skip

    def waits(self, now: float) -> None:
        """Note that the compute side has nothing to do from now on."""
        if self._trace is not None and self._waiting_since is None:
            self._waiting_since = now

    def goes_on(self, now: float) -> None:
        """Note the wait that ends now, if there was one."""
        if self._trace is not None and self._waiting_since is not None:
            self._trace.add("wait", "compute", self._waiting_since, now, session=self.number)
            self._waiting_since = None

    def computed(self, step: Step, begun: float, now: float) -> None:
        """Note a step, and the loads that it is the first one to build on."""
        if self._trace is not None:
            built_on = [block for block in self._arrived if block < step.start]
            self._trace.add(
                "recompute", "compute", begun, now,
                session=self.number, start=step.start, stop=step.stop,
                after=tuple(self._arrived.pop(block) for block in built_on),
            )  # fmt: skip
