"""What is drawn of which benchmark's results, and that it can be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from report_results import (
    EVERY,
    Outline,
    breakdown,
    cell,
    loaded,
    replayed,
    result,
    rivals,
    tiers,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def reading(modules: Any) -> Any:
    """Import what reads results."""
    return modules("_report_read")


@pytest.fixture
def catalogue(modules: Any) -> Any:
    """Import what says what is drawn of which benchmark."""
    return modules("_report_catalogue")


def drawn(modules: Any, value: dict[str, Any]) -> list[Any]:
    """Return what can be drawn of a result, without problems."""
    run = modules("_report_read").run_of(value, "x.json")
    found, problems = modules("_report_catalogue").figures(run)
    assert problems == []
    return list(found)


def test_bandwidth_is_bytes_over_seconds(modules: Any) -> None:
    """The median of passes with the slowest and the quickest, by block size."""
    (figure,) = drawn(modules, tiers())
    (panel,) = figure.panels
    raw, store = panel.curves
    gb = 1000 * (1 << 20) / 1e9
    assert (raw.name, raw.x, raw.y) == ("raw disk", (1, 10), (gb, gb))
    assert (raw.low, raw.high) == ((gb / 2, gb / 2), (gb * 2, gb * 2))
    assert store.y == (gb / 2, gb / 2)


def test_restore_times_with_the_optimum(modules: Any) -> None:
    """Over link speed for each length, and over length for each link speed."""
    cells = [cell(b, f, optimal_s=[0.5, 0.7]) for b in (4, 8) for f in (2.0, 0.5)]
    link, length = drawn(modules, result("restore", *cells))
    assert [panel.title for panel in link.panels] == ["1,024 tokens", "2,048 tokens"]
    recompute, load, planned, best = link.panels[0].curves
    assert (load.x, load.y) == ((0.5, 2.0), (2.0, 0.5))
    assert (recompute.y, planned.y) == ((1.0, 1.0), (0.625, 0.625))
    assert (best.name, best.y, best.dashed) == ("best split", (0.6, 0.6), True)
    assert [panel.title for panel in length.panels] == ["link speed 0.5", "link speed 2"]
    assert length.panels[0].curves[0].x == (1024, 2048)
    older, _ = drawn(modules, result("restore", cell(4, 1.0)))
    assert [curve.name for curve in older.panels[0].curves] == ["recompute", "load", "planned"]


def test_saved_seconds_against_budget(modules: Any) -> None:
    """Budgets in bytes, in order; a cache without bounds is a line over all of them."""
    (figure,) = drawn(modules, replayed())
    lru, priced, bound = figure.panels[0].curves
    assert (lru.name, lru.x, lru.y) == ("lru, load only", (2, 4), (10.0, 20.0))
    assert priced.name == "priced, hybrid"
    assert (bound.x, bound.y, bound.dashed) == ((2, 4), (40.0, 40.0), True)


def test_rivals_by_class_with_kvtier_first(modules: Any) -> None:
    """Kvtier's own trials of all rounds together; what nobody measured has no bar."""
    rates, cpu, strategies = drawn(modules, rivals())
    (panel,) = rates.panels
    assert panel.labels == ["kvtier", "file", "lmdb"]
    assert panel.title == "synced: survives a power cut"
    write, cold, warm = panel.curves
    assert (write.x, write.y) == ((0, 1, 2), (2.0, 1.0, 0.5))
    assert cold.y == (2.0, 0.5, 0.25)
    assert (warm.x, warm.y) == ((0,), (2.0,))
    gib = 2**30 / 1e9
    assert cpu.panels[0].curves[1].y == pytest.approx((0.1 * gib, 0.2 * gib, 0.2 * gib))
    (panel,) = strategies.panels
    assert (panel.labels, panel.marked) == (["kvtier", "load"], ("kvtier",))
    assert panel.curves[0].y == (1.0, 2.0)


def test_shares_are_percent_of_the_whole(modules: Any) -> None:
    """Of some lengths, the first and the last among them; what takes no time is not named."""
    shares, lengths, sweep, here, blocks, pieces = drawn(modules, breakdown())
    (panel,) = shares.panels
    assert [curve.name for curve in panel.curves] == ["read from the slow tier", "recompute"]
    assert all(share == 50.0 for curve in panel.curves for share in curve.y)
    assert panel.labels[:2] == ["1K, load: 2.00 s", "1K, planned: 2.00 s"]
    assert [label.partition(",")[0] for label in panel.labels[::2]] == ["1K", "4K", "32K", "128K"]
    assert len(lengths.panels[0].curves[1].x) == 8
    assert here.panels[0].labels == ["2,000, load, 4 at once: 2.00 s"]
    recompute, load, planned, best = sweep.panels[0].curves
    assert (best.x, best.y, best.dashed) == ((1.0, 2.0), (1.4, 1.4), True)
    assert (recompute.dashed, load.y, planned.y) == (False, (2.0, 2.0), (1.5, 1.5))
    assert [curve.x for panel in blocks.panels for curve in panel.curves] == [(16, 256)] * 3
    assert pieces.panels[0].curves[0].y == pytest.approx((10.24, 20.48))


def test_load_is_drawn_beside_the_raw_disk(modules: Any) -> None:
    """Percentiles for each call; a workload that never put has no bar for it."""
    rates, latency = drawn(modules, loaded())
    assert [(curve.name, curve.y) for curve in rates.panels[0].curves] == [
        ("restored", (2.0, 2.0)), ("put", (1.0, 1.0)),
        ("raw disk, read", (3.0, 3.0)), ("raw disk, write", (2.0, 2.0)),
    ]  # fmt: skip
    lookup, _, put = latency.panels
    assert [(curve.name, curve.y) for curve in lookup.curves] == [
        ("p50", (1, 1)), ("p95", (2, 2)), ("p99", (3, 3))
    ]  # fmt: skip
    assert [(curve.x, curve.y) for curve in put.curves] == [
        ((1,), (7,)),
        ((1,), (8,)),
        ((1,), (9,)),
    ]


def test_missing_rows_are_named(catalogue: Any, reading: Any) -> None:
    """No figure, and which case it would have needed; a wrong row is named by what it lacks."""
    run = reading.run_of(result("restore", {"case": "plan"}), "r.json")
    found, problems = catalogue.figures(run)
    assert found == []
    assert (
        "r.json: no plot of restore time against link speed: no result of case 'grid'"
        in (problems[0])
    )
    run = reading.run_of(result("tiers", {"case": "read", "mib": 1}), "t.json")
    found, problems = catalogue.figures(run)
    assert found == []
    assert problems == [
        "t.json: no plot of bandwidth against block size: a row lacks or has a wrong 'blocks'"
    ]
    assert catalogue.figures(reading.run_of(result("unheard of"), "u.json")) == ([], [])


@pytest.mark.parametrize("make", EVERY)
def test_every_figure_is_drawn_in_both_kinds(
    modules: Any, tmp_path: Path, make: Callable[[], dict[str, Any]]
) -> None:
    """A file of each; an element whose colours the page sets, without what would name the day."""
    pytest.importorskip("matplotlib")
    plots = modules("_plots")
    found = drawn(modules, make())
    assert found
    for figure in found:
        png, svg = plots.write(figure, tmp_path)
        assert png.read_bytes().startswith(b"\x89PNG")
        assert b"<dc:date>" not in svg.read_bytes()
        text = plots.inline(figure)
        outline = Outline(text)
        assert outline.open == []
        assert text.startswith("<svg")
        assert "var(--ink)" in text
        assert all(link.startswith("#") for link in outline.links)
        colours = set(re.findall(r"(?:fill|stroke): (#\w+)", text))
        assert colours <= {"#ffffff", "#000000"}, "a colour that the page cannot change"


def test_every_benchmark_with_figures_is_drawn_here(catalogue: Any) -> None:
    """The results above cover the catalogue."""
    assert {make()["name"] for make in EVERY} == set(catalogue.FIGURES)


def test_names_are_not_taken_for_formulas(modules: Any) -> None:
    """A dollar sign, an angle bracket: drawn as they are."""
    pytest.importorskip("matplotlib")
    figures = modules("_report_figures")
    panel = figures.Panel("a $x$ <b>", [figures.Curve("$\\frac{", [0], [1.0])], ["$^$ & <i>"])
    figure = figures.Figure("s", "t", "", "y", [panel], "n", kind="stacked")
    text = "".join(Outline(modules("_plots").inline(figure)).text)
    assert "a $x$ <b>" in text
    assert "$^$ & <i>" in text


@pytest.mark.parametrize("empty_first", [False, True])
def test_the_legend_has_the_bars_colours(modules: Any, empty_first: bool) -> None:  # noqa: FBT001
    """A panel without any bar of a name takes nothing from the legend."""
    pytest.importorskip("matplotlib")
    figures, plots = modules("_report_figures"), modules("_plots")
    names = ("a", "b")
    full = figures.Panel("full", [figures.Curve(name, [0], [1.0]) for name in names], ["x"])
    lacks = figures.Panel(
        "lacks", [figures.Curve("a", [0], [1.0]), figures.Curve("b", [], [])], ["x"]
    )
    panels = [lacks, full] if empty_first else [full, lacks]
    canvas = plots.draw(figures.Figure("s", "t", "", "y", panels, "n", kind="bars"))
    axes = canvas.axes[empty_first]
    bars = {
        bar.get_label(): bar.patches[0].get_facecolor() for bar in axes.containers if bar.patches
    }
    (legend,) = canvas.legends
    shown = [patch.get_facecolor() for patch in legend.get_patches()]
    named = [text.get_text() for text in legend.get_texts()]
    assert dict(zip(named, shown, strict=True)) == bars
    assert set(bars) == set(names)
    assert bars["a"] != bars["b"]
