"""What was done when, by which lane, and what it waited for: a bounded record, off by default.

An event is noted once it has ended. What depends on it ends later, so an event's ``after`` always
names lower ids.

::

    ssd      read 7  ==========            after ()
    host     copy 7            ====        after (read 7)
    compute  recompute [0, 2) ==========   after (what brought or computed all before it)
    compute  wait                       == after ()   the compute side had nothing to do
    device   copy [9, 12)  =               after ()   from a device tier that the store owns
    write    write 3            =======    after ()   until it is durable on the SSD
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvtier.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["EVENTS_MAX", "LANES", "Trace", "TraceEvent", "TraceLane", "What", "lane_order"]

What = Literal["read", "copy", "recompute", "wait", "write"]
TraceLane = Literal["compute", "device", "host", "ssd", "write"]
LANES: Final[tuple[TraceLane, ...]] = get_args(TraceLane)

EVENTS_MAX: Final = 1 << 18
"""Events that a trace keeps, the last ones; about 200 bytes each."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One read, copy, recompute, wait or write.

    ``begin_s`` and ``end_s`` are of the store's clock. ``session`` numbers the restore that it was
    done for, 0 if for none; ``start`` and ``stop`` are its blocks, as positions in their prompt;
    ``after`` are the ids of the events that had to end first.
    """

    id: int
    what: What
    lane: TraceLane
    begin_s: float
    end_s: float
    session: int = 0
    start: int = 0
    stop: int = 0
    nbytes: int = 0
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.what not in get_args(What) or self.lane not in LANES:
            raise FormatError(f"event {self.id}: {self.what!r} on lane {self.lane!r} is unknown")
        if not 0 <= self.end_s - self.begin_s < float("inf"):
            raise FormatError(f"event {self.id}: it ends at {self.end_s}, before {self.begin_s}")
        if not 0 <= self.start <= self.stop or self.nbytes < 0 or self.session < 0:
            raise FormatError(f"event {self.id}: blocks [{self.start}, {self.stop}), {self.nbytes}")
        if any(not 0 < earlier < self.id for earlier in self.after):
            raise FormatError(f"event {self.id}: it depends on {self.after}, which come no earlier")

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class Trace:
    """The last ``events_max`` events of one store; thread-safe, never blocks.

    Whoever has something to note holds a ``Trace | None``, so that a store without one pays for a
    comparison.
    """

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        if events_max <= 0:
            raise ValueError(f"events_max: {events_max} is not positive")
        # One append of a tuple: a thread that notes something is never made to wait for another.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=events_max)
        self._append = self._events.append
        self._ids = itertools.count(1)
        self._sessions = itertools.count(1)

    def add(
        self,
        what: What,
        lane: TraceLane,
        begin_s: float,
        end_s: float,
        *,
        session: int = 0,
        start: int = 0,
        stop: int = 0,
        nbytes: int = 0,
        after: tuple[int, ...] = (),
    ) -> int:
        """Note an event that has ended; returns its id."""
        event = next(self._ids)
        self._append((event, what, lane, begin_s, end_s, session, start, stop, nbytes, after))
        return event

    def session(self) -> int:
        """Return a number for a restore that begins."""
        return next(self._sessions)

    @property
    def events(self) -> list[TraceEvent]:
        """What is kept, in the order of the ids; dependencies on what is not kept are left out."""
        kept = sorted(self._events.copy())
        names = {event[0] for event in kept}
        return [
            TraceEvent(*(*event[:-1], tuple(sorted(names.intersection(event[-1])))))
            for event in kept
        ]

    def clear(self) -> None:
        """Forget everything noted so far."""
        self._events.clear()


def lane_order(events: Iterable[TraceEvent]) -> dict[int, int]:
    """Return for each event the last one of its lane and restore that ended before it began.

    By event id; the first ones of a lane have none. This is the control dependency of a lane that
    has room for a few events at once: what made room for an event is what ended last before it.
    """
    lanes: dict[tuple[int, str], list[TraceEvent]] = {}
    for event in events:
        lanes.setdefault((event.session, event.lane), []).append(event)
    earlier: dict[int, int] = {}
    for lane in lanes.values():
        ended = sorted(lane, key=lambda event: (event.end_s, event.id))
        ends = [event.end_s for event in ended]
        for event in lane:
            at = bisect_right(ends, event.begin_s) - 1
            while at >= 0 and ended[at].id >= event.id:  # of no length, or at the same instant
                at -= 1
            if at >= 0:
                earlier[event.id] = ended[at].id
    return earlier
