"""Figures as PNG and SVG: one look for all, colours that colour-blind readers can tell apart.

Markers and hatches tell apart once more what colours do. In a page, colours are CSS variables, so
that the page decides between light and dark.
"""

from __future__ import annotations

import io
import math
import re
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from _report_colours import FAINT, HUES, INK, PAPER
from _report_read import shown
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

if TYPE_CHECKING:
    from pathlib import Path

    from _report_figures import Curve, Figure, Panel
    from matplotlib.axes import Axes

NAMED: Final = {
    "recompute": "orange",
    "load": "blue",
    "planned": "green",
    "raw disk": "grey",
    "store": "blue",
    "kvtier": "green",
    "lookup": "purple",
    "waiting": "grey",
    "read from the slow tier": "blue",
    "copy in host memory": "sky",
    "copy to the device": "vermilion",
    "new tokens": "brown",
}
"""What is drawn in many figures has the same colour in all of them."""
MARKERS: Final = "os^DvPX*"
HATCHES: Final = ("", "///", "...", "\\\\\\", "xxx", "---", "+++", "ooo")
COLUMNS_MAX: Final = 3
"""Panels beside each other; more go into further rows."""
TICKS_MAX: Final = 8
"""So many places have a tick each; of more, some have."""
DECADE: Final = (1.0, 2.0, 5.0)
"""Ticks of a logarithmic axis within a factor of ten."""
WIDTH_IN, PANEL_IN, BAR_IN, DPI = 9.0, 3.1, 0.26, 160
LABEL_CHARS: Final = 100
"""Characters of a label that fit below the whole width."""
LABEL_SHARE_MIN: Final = 0.07
"""A part of a stacked bar has its number written on it from this share of the longest bar on."""
STYLE: Final = {
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=[INK]),  # what nobody gave a hue is ink
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "xtick.color": INK,
    "ytick.color": INK,
}


def write(figure: Figure, folder: Path) -> list[Path]:
    """Write a figure as PNG and SVG; returns the two files."""
    found = []
    for kind in ("png", "svg"):
        path = folder / f"{figure.slug}.{kind}"
        path.write_bytes(_rendered(figure, kind, titled=True))
        found.append(path)
    return found


def inline(figure: Figure) -> str:
    """Return an ``svg`` element for a page that sets the variables of ``_report_colours``."""
    text = _rendered(figure, "svg", titled=False).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"(<svg[^>]*?) (?:width|height)=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg[^>]*?) (?:width|height)=\"[^\"]*\"", r"\1", text, count=1)
    # Several figures share a page, and an id is there once.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{figure.slug}-", text)
    names = {"ink": INK, "faint": FAINT, "paper": PAPER}
    for name, value in (names | {name: light for name, (light, _) in HUES.items()}).items():
        text = text.replace(value, f"var(--{name})")
    return text


def _rendered(figure: Figure, kind: str, *, titled: bool) -> bytes:
    with mpl.rc_context(STYLE | {"svg.hashsalt": figure.slug}):
        canvas = draw(figure, titled=titled)
        FigureCanvasAgg(canvas)
        out = io.BytesIO()
        # Without a date, the same result gives the same file.
        metadata = {"Date": None} if kind == "svg" else {}
        clear = kind == "svg" and not titled
        canvas.savefig(out, format=kind, dpi=DPI, metadata=metadata, transparent=clear)
    return out.getvalue()


def draw(figure: Figure, *, titled: bool = True) -> Canvas:
    """Return a drawn figure; a file needs its title, a page has its own."""
    across, down = _grid(figure)
    heights = [_height(figure, panel) for panel in figure.panels[::across]]
    legend = _legend_rows(figure)
    size = (WIDTH_IN, sum(heights) + 0.25 * legend + (0.3 if titled else 0.0))
    canvas = Canvas(figsize=size, layout="constrained")
    grid = canvas.subplots(down, across, squeeze=False, sharey="row" if _level(figure) else False,
                           height_ratios=heights)  # fmt: skip
    hues = _hues(figure)
    for number, axes in enumerate(grid.flat):
        if number >= len(figure.panels):
            axes.set_visible(False)
            continue
        panel = figure.panels[number]
        if figure.kind == "lines":
            _lines(axes, figure, panel, hues)
            axes.set_ylabel(figure.y if number % across == 0 else "")
            below = number + across < len(figure.panels)
            axes.set_xlabel("" if below else fill(figure.x, LABEL_CHARS // across))
        else:
            (_bars if figure.kind == "bars" else _stacked)(axes, panel, hues)
            axes.set_xlabel(figure.y)
        axes.set_title(panel.title)
        axes.set_axisbelow(True)
    if figure.kind == "lines" and not figure.log_y:
        _from_zero(figure, grid)
    if legend:
        handles = {
            label: handle
            for axes in grid.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
            if handle != ()  # bars of which this panel has none have no colour
        }
        canvas.legend(handles.values(), handles.keys(), loc="outside lower center",
                      ncols=_legend_columns(figure))  # fmt: skip
    if titled:
        canvas.suptitle(figure.title, fontsize=11, fontweight="bold")
    return canvas


# -- what is where


def _names(figure: Figure) -> list[str]:
    return list(dict.fromkeys(curve.name for panel in figure.panels for curve in panel.curves))


def _hues(figure: Figure) -> dict[str, tuple[str, int]]:
    """Return each curve's colour and its number, by which markers and hatches go."""
    names = _names(figure)
    taken = {NAMED[name] for name in names if name in NAMED}
    free = [hue for hue in HUES if hue not in taken] or list(HUES)
    others = iter(range(len(names)))
    found = {}
    for name in names:
        at = 0 if name in NAMED else next(others)
        hue = NAMED.get(name) or free[at % len(free)]
        found[name] = (HUES[hue][0], list(HUES).index(hue) + at // len(free))
    return found


def _grid(figure: Figure) -> tuple[int, int]:
    """Return how many panels are beside and below each other."""
    count = len(figure.panels)
    across = 1 if figure.kind != "lines" else 2 if count == 4 else min(count, COLUMNS_MAX)
    return across, math.ceil(count / across)


def _height(figure: Figure, panel: Panel) -> float:
    if figure.kind == "lines":
        return PANEL_IN
    beside = len(panel.curves) if figure.kind == "bars" else 1
    return 0.75 + BAR_IN * len(panel.labels) * (beside + (0.4 if beside > 1 else 0.25))


def _level(figure: Figure) -> bool:
    """Whether panels beside each other share their y axis: where no one is far above another."""
    if figure.log_y:
        return True
    tops = [max((max(c.y, default=0.0) for c in p.curves), default=0.0) for p in figure.panels]
    return figure.kind == "lines" and 0 < max(tops, default=0.0) <= 4 * min(tops, default=0.0)


def _legend_columns(figure: Figure) -> int:
    longest = max(map(len, _names(figure)), default=1)
    return max(1, min(6, round(100 / (longest + 8))))


def _legend_rows(figure: Figure) -> int:
    names = _names(figure)
    return math.ceil(len(names) / _legend_columns(figure)) if len(names) > 1 else 0


# -- drawing


def _errors(curve: Curve) -> Any:
    if not curve.low:
        return None
    lower = [max(y - low, 0.0) for y, low in zip(curve.y, curve.low, strict=True)]
    upper = [max(high - y, 0.0) for y, high in zip(curve.y, curve.high, strict=True)]
    return [lower, upper]


def _lines(axes: Axes, figure: Figure, panel: Panel, hues: dict[str, tuple[str, int]]) -> None:
    for curve in panel.curves:
        hue, number = hues[curve.name]
        if curve.dashed:
            axes.plot(curve.x, curve.y, "--", color=INK, linewidth=1.4, label=curve.name, zorder=4)
            continue
        axes.errorbar(
            curve.x, curve.y, yerr=_errors(curve), color=hue, label=curve.name,
            marker=MARKERS[number % len(MARKERS)], markersize=5, linewidth=1.6,
            elinewidth=1.0, capsize=2.5, zorder=3,
        )  # fmt: skip
    places = sorted({x for curve in panel.curves for x in curve.x})
    if figure.log_x and places and places[0] > 0:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if 0 < len(places) <= TICKS_MAX:
        axes.xaxis.set_major_locator(FixedLocator(places))
    elif figure.log_x:
        axes.xaxis.set_major_locator(LogLocator(subs=DECADE))
    tokens = "tokens" in figure.x
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _place(x, tokens=tokens)))
    lowest = min((y for curve in panel.curves for y in (*curve.low, *curve.y)), default=0.0)
    if figure.log_y and lowest > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=DECADE))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: shown(float(f"{y:.6g}"))))


def _from_zero(figure: Figure, grid: Any) -> None:
    """Let axes begin at 0, after all of them are drawn: some share their scale."""
    lows = [y for panel in figure.panels for curve in panel.curves for y in (*curve.low, *curve.y)]
    if min(lows, default=-1.0) >= 0:
        for axes in grid.flat:
            axes.set_ylim(bottom=0)


def _place(x: float, *, tokens: bool) -> str:
    if tokens and x >= 1024 and x % 1024 == 0:
        return f"{x / 1024:.0f}K"
    return shown(float(f"{x:.4g}"))


def _bars(axes: Axes, panel: Panel, hues: dict[str, tuple[str, int]]) -> None:
    beside = max(len(panel.curves), 1)
    thick = 0.8 / beside
    for at, curve in enumerate(panel.curves):
        hue, number = hues[curve.name]
        places = [x + (at - (beside - 1) / 2) * thick for x in curve.x]
        bars = axes.barh(
            places, curve.y, height=thick * 0.92, color=hue, label=curve.name, xerr=_errors(curve),
            hatch=HATCHES[number % len(HATCHES)], edgecolor=PAPER, linewidth=0,
            error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 2},
        )  # fmt: skip
        ends = curve.high or curve.y
        if len(panel.curves) == 1:
            for x, bar in zip(curve.x, bars, strict=True):
                if panel.labels[int(x)] in panel.marked:
                    bar.set_color(HUES["green"][0])
        for place, y, end in zip(places, curve.y, ends, strict=True):
            axes.annotate(
                shown(float(f"{y:.3g}")), (max(end, y), place), (5, 0),
                textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
    _labelled(axes, panel)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)


def _stacked(axes: Axes, panel: Panel, hues: dict[str, tuple[str, int]]) -> None:
    lefts = [0.0] * len(panel.labels)
    whole = [0.0] * len(panel.labels)
    for curve in panel.curves:
        for x, y in zip(curve.x, curve.y, strict=True):
            whole[int(x)] += y
    longest = max(whole, default=0.0)
    for curve in panel.curves:
        hue, number = hues[curve.name]
        starts = [lefts[int(x)] for x in curve.x]
        axes.barh(
            curve.x, curve.y, left=starts, height=0.78, color=hue, label=curve.name,
            hatch=HATCHES[number % len(HATCHES)], edgecolor=PAPER, linewidth=0,
        )  # fmt: skip
        for x, y, left in zip(curve.x, curve.y, starts, strict=True):
            if longest and y / longest >= LABEL_SHARE_MIN:
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
                axes.text(left + y / 2, x, shown(float(f"{y:.3g}")), ha="center", va="center",
                          fontsize=7.5, bbox=box)  # fmt: skip
            lefts[int(x)] = left + y
    _labelled(axes, panel)
    axes.set_xlim(0, longest * 1.02 or 1.0)


def _labelled(axes: Axes, panel: Panel) -> None:
    axes.set_yticks(range(len(panel.labels)), panel.labels)
    axes.set_ylim(len(panel.labels) - 0.4, -0.6)  # the first one is at the top
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
