from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from kvtier.trace import Trace, TraceEvent
from kvtier_inspect.timeline import draw_html, draw_svg, draw_text, shares

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def events() -> list[TraceEvent]:
    """Two reads at once, a copy after each, a step meanwhile and a wait after it."""
    trace = Trace()
    first = trace.add("read", "ssd", 10.0, 12.0, session=1, start=7, stop=8, nbytes=100)
    trace.add("copy", "host", 12.0, 12.5, session=1, start=7, stop=8, nbytes=100, after=(first,))
    second = trace.add("read", "ssd", 11.0, 13.0, session=1, start=6, stop=7, nbytes=100)
    trace.add("recompute", "compute", 10.0, 12.0, session=1, start=0, stop=2)
    trace.add("copy", "host", 13.0, 14.0, session=1, start=6, stop=7, nbytes=100, after=(second,))
    trace.add("wait", "compute", 12.0, 14.0, session=1)
    return trace.events


def test_shares_are_unions_and_overlaps(events: list[TraceEvent]) -> None:
    """Reads that overlap count once; what compute did meanwhile is the overlap; waits are none."""
    by_lane = {share.lane: share for share in shares(events)}
    assert by_lane["ssd"].busy_s == pytest.approx(3.0)
    assert by_lane["ssd"].overlap_s == pytest.approx(2.0)
    assert by_lane["host"].busy_s == pytest.approx(1.5)
    assert by_lane["host"].overlap_s == pytest.approx(0.0)
    assert by_lane["compute"].busy_s == pytest.approx(2.0)
    assert by_lane["ssd"].nbytes == 200
    assert "write" not in by_lane


def test_the_picture_has_every_event_at_its_place(events: list[TraceEvent]) -> None:
    """One rectangle per event, as wide as it was long, and none over another."""
    root = ET.fromstring(draw_svg(events, width=530))  # noqa: S314 - our own text; 100 px a second
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(boxes) == len(events)
    found = sorted((float(b.get("x", 0)), float(b.get("width", 0)), b.get("y")) for b in boxes)
    assert {(round(x - 110), round(width)) for x, width, _ in found} == {
        (0, 200), (100, 200), (200, 50), (300, 100), (200, 200),
    }  # fmt: skip
    for x, width, y in found:
        others = [(ox, oy) for ox, _, oy in found if oy == y and ox > x]
        assert all(ox >= x + width - 0.01 for ox, _ in others)


def test_the_page_stands_alone_and_escapes_its_title(events: list[TraceEvent]) -> None:
    """Nothing is fetched from elsewhere, and a title is text, never markup."""
    page = draw_html(events, title="<script>alert(1)</script>")
    assert "<script" not in page
    assert "src=" not in page
    assert "href=" not in page
    assert page.count("<rect") == len(events) + 1


def test_the_terminal_picture_fits_and_shows_each_lane(events: list[TraceEvent]) -> None:
    """No line is wider than asked for; steps, reads, copies and waits have their characters."""
    text = draw_text(events, width=60)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    compute, host, ssd = lines[:3]
    assert compute.startswith("compute 1")
    assert compute.count("#") == compute.count(".")
    assert "-" in host
    assert "=" in ssd


def test_an_empty_trace_is_drawn_as_nothing() -> None:
    """No event, no error."""
    assert "0 events" in draw_html([])
    assert draw_text([])
    assert shares([]) == []
