"""Draw a trace: which lane did what when, as a picture or in the terminal. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

from kvtier.trace import LANES, TraceEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LaneShare", "draw_html", "draw_svg", "draw_text", "shares"]

ROW: Final = 22
GAP: Final = 10
LEFT: Final = 110
RIGHT: Final = 20
TOP: Final = 34
TICKS: Final = 8
_COLOURS: Final = {
    "recompute": "#d1603d",
    "read": "#3b7ea1",
    "copy": "#6fae5f",
    "write": "#8a6fae",
    "wait": "#d9d9d9",
}
_LETTERS: Final = {"recompute": "#", "read": "=", "copy": "-", "write": "w", "wait": "."}


@dataclass(frozen=True, slots=True)
class LaneShare:
    """How long a lane was at work: the union of its events, waits left out.

    ``overlap_s`` is the part during which the compute lane was at work as well.
    """

    lane: str
    events: int
    busy_s: float
    overlap_s: float
    nbytes: int


def shares(events: Sequence[TraceEvent]) -> list[LaneShare]:
    """Return what each lane did, in the order of ``LANES``; lanes without events are left out."""
    work = [event for event in events if event.what != "wait"]
    spans = {lane: _union([(e.begin_s, e.end_s) for e in work if e.lane == lane]) for lane in LANES}
    return [
        LaneShare(
            lane,
            sum(event.lane == lane for event in work),
            sum(end - begin for begin, end in spans[lane]),
            _common(spans[lane], spans["compute"]),
            sum(event.nbytes for event in work if event.lane == lane),
        )
        for lane in LANES
        if spans[lane]
    ]


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _common(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    common, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        common += max(end - begin, 0.0)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _rows(events: Sequence[TraceEvent]) -> list[tuple[int, str, int, list[TraceEvent]]]:
    """Return (restore, lane, depth, events) rows in which events do not overlap."""
    rows: dict[tuple[int, int, int], list[TraceEvent]] = {}
    for event in sorted(events, key=lambda event: (event.begin_s, event.id)):
        lane, depth = LANES.index(event.lane), 0
        while True:
            row = rows.setdefault((event.session, lane, depth), [])
            if not row or row[-1].end_s <= event.begin_s:
                row.append(event)
                break
            depth += 1
    return [
        (session, LANES[lane], depth, row) for (session, lane, depth), row in sorted(rows.items())
    ]


def _extent(events: Sequence[TraceEvent]) -> tuple[float, float]:
    begin = min((event.begin_s for event in events), default=0.0)
    return begin, max((event.end_s for event in events), default=begin)


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError


def draw_svg(events: Sequence[TraceEvent], *, width: int = 1000) -> str:
    """Return a Gantt picture: a row per lane and restore, seconds from the first event."""
    rows, (origin, end) = _rows(events), _extent(events)
    scale = (width - LEFT - RIGHT) / ((end - origin) or 1.0)
    out, y, last = [], TOP, None
    for session, lane, depth, row in rows:
        if last is not None and session != last:
            y += GAP
        label = "" if depth else f"{lane} {session}" if session else lane
        out.append(f'<text x="{LEFT - 8}" y="{y + ROW * 0.68:.1f}" class="lane">{label}</text>')
        for event in row:
            x, length = LEFT + (event.begin_s - origin) * scale, max(event.seconds * scale, 0.5)
            blocks = f" [{event.start}, {event.stop})" if event.stop > event.start else ""
            title = f"{event.what}{blocks}: {_seconds(event.seconds)}, {event.nbytes} bytes"
            out.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{length:.2f}" height="{ROW - 4}" '
                f'fill="{_COLOURS[event.what]}"><title>{escape(title)}</title></rect>'
            )
        y, last = y + ROW, session
    height = y + GAP
    grid = []
    for tick in range(TICKS + 1):
        x = LEFT + (width - LEFT - RIGHT) * tick / TICKS
        at = _seconds((end - origin) * tick / TICKS) if tick else "0"
        grid.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y}" class="grid"/>')
        grid.append(f'<text x="{x:.1f}" y="{TOP - 8}" class="tick">{at}</text>')
    style = (
        "text{font:12px system-ui,sans-serif;fill:#333}.lane{text-anchor:end}"
        ".tick{text-anchor:middle;fill:#777;font-size:11px}.grid{stroke:#e8e8e8}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="timeline">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(grid)}{''.join(out)}</svg>\n"
    )


def draw_html(events: Sequence[TraceEvent], *, title: str = "kvtier timeline") -> str:
    """Return a page of its own: the picture, its colours, and a table of what each lane did."""
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{what}</span>'
        for what, colour in _COLOURS.items()
    )
    begin, end = _extent(events)
    table = "".join(
        f"<tr><td>{share.lane}</td><td>{share.events}</td><td>{_seconds(share.busy_s)}</td>"
        f"<td>{_seconds(share.overlap_s)}</td><td>{share.nbytes:,}</td></tr>"
        for share in shares(events)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font:14px system-ui,sans-serif;margin:2em;color:#222}"
        "i{display:inline-block;width:1em;height:1em;margin:0 .4em 0 1em;vertical-align:-.1em}"
        "td,th{padding:.2em .9em;text-align:right}td:first-child{text-align:left}"
        "svg{max-width:100%;height:auto}</style>"
        f"<h1>{escape(title)}</h1><p>{len(events)} events in {_seconds(end - begin)}. {legend}</p>"
        f"{draw_svg(events)}<table><tr><th>lane</th><th>events</th><th>at work</th>"
        f"<th>while compute was</th><th>bytes</th></tr>{table}</table></html>\n"
    )


def draw_text(events: Sequence[TraceEvent], *, width: int = 80) -> str:
    """Return the picture in characters, ``width`` columns wide, one line per lane and restore."""
    origin, end = _extent(events)
    lines: dict[tuple[int, int], list[str]] = {}
    columns = max(width - 16, 10)
    scale = columns / ((end - origin) or 1.0)
    # What is drawn last wins a column: waits first, long events before short ones.
    for event in sorted(events, key=lambda e: (e.what != "wait", -e.seconds)):
        line = lines.setdefault((event.session, LANES.index(event.lane)), [" "] * columns)
        first = min(int((event.begin_s - origin) * scale), columns - 1)
        stop = max(min(round((event.end_s - origin) * scale), columns), first + 1)
        line[first:stop] = _LETTERS[event.what] * (stop - first)
    out = []
    for (session, lane), line in sorted(lines.items()):
        label = f"{LANES[lane]} {session}" if session else LANES[lane]
        out.append(f"{label:<14}|{''.join(line)}|")
    keys = "  ".join(f"{letter} {what}" for what, letter in _LETTERS.items())
    out.append(f"{'':<14} 0{_seconds(end - origin):>{columns - 1}}")
    out.append(f"{'':<14} {keys}")
    return "\n".join(out) + "\n"
