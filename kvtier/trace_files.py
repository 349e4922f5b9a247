"""Traces as files: JSON lines, and the Chrome trace format that Perfetto opens. Pure functions.

Chrome trace format: "Trace Event Format" (Google, 2016), complete events ("X") in microseconds with
flow arrows ("s", "f") for dependencies across lanes; https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import FormatError
from kvtier.trace import LANES, TraceEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["FORMAT", "chrome_trace", "from_json_lines", "to_json_lines"]

FORMAT: Final = "kvtier-trace-1"
_US: Final = 1e6
_COLOURS: Final = {
    "recompute": "thread_state_running",
    "read": "thread_state_iowait",
    "copy": "thread_state_runnable",
    "write": "thread_state_uninterruptible",
    "wait": "grey",
}


def to_json_lines(events: Iterable[TraceEvent]) -> Iterator[str]:
    """Yield a head line that names the format, then one line per event, each with its newline."""
    yield json.dumps({"format": FORMAT}) + "\n"
    for event in events:
        yield json.dumps(asdict(event), separators=(",", ":")) + "\n"


def from_json_lines(lines: Iterable[str]) -> list[TraceEvent]:
    """Decode ``to_json_lines``; ``FormatError`` names the line that is not one."""
    rows = iter(lines)
    if _head(next(rows, "")) != {"format": FORMAT}:
        raise FormatError(f"line 1: the first line of a {FORMAT} file names its format")
    events = []
    for number, line in enumerate(rows, start=2):
        try:
            events.append(_event(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError, FormatError) as error:
            raise FormatError(f"line {number}: not a line of a {FORMAT} file: {error}") from error
    return events


def _head(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _event(value: dict[str, Any]) -> TraceEvent:
    whole = ("id", "session", "start", "stop", "nbytes")
    if any(type(value[name]) is not int for name in whole):
        raise ValueError(f"{', '.join(whole)} are whole numbers")
    times = {name: float(value[name]) for name in ("begin_s", "end_s")}
    return TraceEvent(**{**value, **times, "after": tuple(map(int, value["after"]))})


def chrome_trace(events: Sequence[TraceEvent]) -> dict[str, Any]:
    """Return the Chrome trace object: a process per restore, a thread per lane, arrows between.

    Overlapping events of one lane (several reads in flight) go to threads of their own.
    """
    origin = min((event.begin_s for event in events), default=0.0)
    rows: list[dict[str, Any]] = []
    threads: dict[tuple[int, str, int], int] = {}
    where: dict[int, tuple[TraceEvent, int]] = {}
    for event, depth in _stacked(events):
        key = (event.session, event.lane, depth)
        thread = threads.setdefault(key, LANES.index(event.lane) * len(events) + depth)
        where[event.id] = (event, thread)
        blocks = f" [{event.start}, {event.stop})" if event.stop > event.start else ""
        rows.append(
            {
                "ph": "X",
                "name": f"{event.what}{blocks}",
                "cat": event.what,
                "cname": _COLOURS[event.what],
                "pid": event.session,
                "tid": thread,
                "ts": (event.begin_s - origin) * _US,
                "dur": event.seconds * _US,
                "args": {"id": event.id, "bytes": event.nbytes, "after": list(event.after)},
            }
        )
    rows += _arrows(where, origin)
    rows += _names(threads)
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"format": FORMAT}}


def _stacked(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, int]]:
    """Yield each event with the first row of its lane that is free when it begins."""
    free: dict[tuple[int, str], list[float]] = {}
    for event in sorted(events, key=lambda event: (event.begin_s, event.id)):
        rows = free.setdefault((event.session, event.lane), [])
        depth = next((i for i, until in enumerate(rows) if until <= event.begin_s), len(rows))
        rows[depth : depth + 1] = [event.end_s]
        yield event, depth


def _arrows(where: dict[int, tuple[TraceEvent, int]], origin: float) -> Iterator[dict[str, Any]]:
    for event, thread in where.values():
        for earlier, its_thread in (where[name] for name in event.after if name in where):
            if earlier.lane == event.lane:
                continue  # a lane's own order needs no arrow
            common = {"name": "after", "cat": "after", "id": earlier.id * len(where) + event.id}
            begin_us = (min(earlier.end_s, event.begin_s) - origin) * _US
            yield {
                "ph": "s", "pid": earlier.session, "tid": its_thread, "ts": begin_us, **common
            }  # fmt: skip
            yield {
                "ph": "f", "bp": "e", "pid": event.session, "tid": thread,
                "ts": (event.begin_s - origin) * _US, **common,
            }  # fmt: skip


def _names(threads: dict[tuple[int, str, int], int]) -> Iterator[dict[str, Any]]:
    for session in sorted({session for session, _, _ in threads}):
        name = f"restore {session}" if session else "store"
        yield {"ph": "M", "name": "process_name", "pid": session, "args": {"name": name}}
    for (session, lane, depth), thread in threads.items():
        label = f"{lane} {depth + 1}" if depth else lane
        common = {"ph": "M", "pid": session, "tid": thread}
        yield {**common, "name": "thread_name", "args": {"name": label}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}
