"""``timeline``: what a trace shows, in the terminal, as a picture, or for another program."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.chakra import from_chakra, to_chakra
from kvtier.errors import FormatError
from kvtier.simulator import replay
from kvtier.trace import LANES
from kvtier.trace_files import chrome_trace, from_json_lines, to_json_lines
from kvtier_inspect.render import columns, console, count, emit, size, span
from kvtier_inspect.timeline import draw_html, draw_svg, draw_text, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.trace import TraceEvent, TraceLane

__all__ = ["read_trace", "run", "speeds"]

TRACE_BYTES_MAX: Final = 1 << 30
"""Bytes of a trace that is read."""


def run(
    trace: str, outputs: Mapping[str, str], faster: Sequence[str], *, session: int, as_json: bool
) -> int:
    """Read a trace, let it happen again with faster lanes if asked to, and show or write it.

    ``outputs`` are files by kind: svg, html, perfetto, chakra, jsonl; "" for none.
    """
    events = read_trace(trace)
    if session >= 0:
        events = [event for event in events if event.session == session]
    if factors := speeds(faster):
        events = list(replay(events, factors))
    for kind, path in outputs.items():
        if path:
            _write(path, _AS[kind](events))
    begin, end = (pick((e.begin_s, e.end_s)[i] for e in events) if events else 0.0
                  for i, pick in enumerate((min, max)))  # fmt: skip
    lanes = shares(events)
    if as_json:
        each = [
            {"lane": s.lane, "events": s.events, "busy_s": s.busy_s, "overlap_s": s.overlap_s,
             "bytes": s.nbytes} for s in lanes
        ]  # fmt: skip
        emit({"events": len(events), "seconds": end - begin, "lanes": each})
        return 0
    out = console()
    width = min(out.width, 120)
    out.print(draw_text(events, width=width), end="", soft_wrap=True)
    rows = [
        (s.lane, count(s.events), span(s.busy_s), span(s.overlap_s), size(s.nbytes)) for s in lanes
    ]
    names = ("lane", "events", "at work", "while compute was", "bytes")
    out.print(columns(names, rows, left=("lane",)))
    return 0


def read_trace(path: str) -> list[TraceEvent]:
    """Read JSON lines or a Chakra execution trace; ``FormatError`` names the file."""
    file = Path(path)
    nbytes = file.stat().st_size
    if nbytes > TRACE_BYTES_MAX:
        raise FormatError(f"{path}: {nbytes} bytes; at most {TRACE_BYTES_MAX} are read")
    data = file.read_bytes()
    try:
        if data.startswith(b"{"):
            return from_json_lines(data.decode("utf-8", "replace").splitlines())
        return from_chakra(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def speeds(asked: Sequence[str]) -> dict[TraceLane, float]:
    """Return the factors of ``lane=factor`` options; ``ValueError`` names one that is not."""
    found: dict[TraceLane, float] = {}
    for each in asked:
        name, _, factor = each.partition("=")
        lane = next((lane for lane in LANES if lane == name), None)
        try:
            found[lane or LANES[0]] = float(factor)
        except ValueError:
            lane = None
        if lane is None:
            raise ValueError(f"--faster {each}: LANE=FACTOR wanted, a lane of {', '.join(LANES)}")
    return found


def _write(path: str, data: bytes) -> None:
    # What a trace shows of a store is for its owner, as the store is.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


_AS: Final[dict[str, Callable[[Sequence[TraceEvent]], bytes]]] = {
    "svg": lambda events: draw_svg(events).encode(),
    "html": lambda events: draw_html(events).encode(),
    "perfetto": lambda events: json.dumps(chrome_trace(events)).encode(),
    "chakra": to_chakra,
    "jsonl": lambda events: "".join(to_json_lines(events)).encode(),
}
