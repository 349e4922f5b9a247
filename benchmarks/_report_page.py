"""One HTML page of runs, their ratios, settings, plots and cases; needs nothing from outside.

Text that came from a file is escaped by construction: only ``element`` makes markup.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Final

from _report_colours import css
from _report_read import UNKNOWN, VERDICTS, shown
from _report_tables import Table, cases

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from _report_read import Measured, Run

SIGNS: Final = {"met": "✓", "missed": "✗", "not decided": "≈", "no bar": "·", UNKNOWN: "?"}
"""A verdict is never told by colour alone."""
OPEN_ROWS_MAX: Final = 12
"""A table of cases is folded away from so many rows on."""
SPREADS: Final = "Of several measurements: the median (least to most); trials are in seconds."
LONG_CHARS: Final = 40
"""From so many characters on, a cell's text has room to be read."""
GAUGE_PX: Final = (132, 16)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One run on the page: its plots as (title, note, svg)."""

    run: Run
    plots: Sequence[tuple[str, str, str]] = ()
    problems: Sequence[str] = ()


def element(tag: str, *inside: str, **attributes: str) -> Markup:
    """Return an element; plain text in it is escaped. ``class_`` is the attribute ``class``."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
    )
    return Markup(f"<{tag}{said}>{joined(inside)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Return parts one after the other, plain text escaped."""
    return Markup("".join(p if isinstance(p, Markup) else html.escape(p) for p in parts))


def slugged(text: str) -> str:
    """Return text as a part of an id and of a file's name."""
    return "".join(each if each.isalnum() else "-" for each in text.lower())


# -- a ratio


def gauge(ratio: Measured) -> Markup:
    """Draw where a number lies, how far it spreads, and where its bar would have it."""
    low, high = ratio.ends
    ends = [end for end in (low, high) if math.isfinite(end)]
    if not ends or not math.isfinite(ratio.value):
        return Markup("")
    spread = ratio.spread or 0.0
    seen = (0.0, *ends, ratio.value - spread, ratio.value + spread)
    least, most = min(seen), max(seen)
    width, height = GAUGE_PX
    scale = (width - 8) / ((most - least) * 1.3 or 1.0)

    def at(value: float) -> float:
        return min(max(4 + (value - least) * scale, 0.0), float(width))

    start, stop = (at(end) if math.isfinite(end) else edge
                   for end, edge in ((low, 0.0), (high, float(width))))  # fmt: skip
    left, right, middle = at(ratio.value - spread), at(ratio.value + spread), height / 2
    parts = (
        f'<rect class="bar" x="{start:.1f}" y="1" width="{stop - start:.1f}" '
        f'height="{height - 2}"/>'
        f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<circle cx="{at(ratio.value):.1f}" cy="{middle}" r="3.5"/>'
    )
    return element(
        "svg", Markup(parts), class_="gauge", width=str(width), height=str(height), role="img",
        aria_label=f"{shown(ratio.value)} with a bar of {ratio.bar}",
    )  # fmt: skip


def verdict(ratio: Measured) -> Markup:
    """Say what came of a ratio."""
    kind = ratio.verdict.replace(" ", "-")
    return element("span", f"{SIGNS[ratio.verdict]} {ratio.verdict}", class_=f"verdict {kind}")


def ratio_table(ratios: Sequence[Measured]) -> Markup:
    """List ratios, each with its bar, spread, pairs and verdict."""
    heads = ("ratio", "measured", "bar", "A/A spread", "pairs", "starved", "", "verdict")
    lines = []
    for ratio in ratios:
        cells = (
            shown(ratio.value),
            ratio.bar or "not recorded",
            "" if ratio.spread is None else f"± {shown(float(f'{ratio.spread:.2g}'))}",
            shown(ratio.pairs),
            f"{ratio.starved:.0%}" if ratio.starved else "",
        )
        line = [element("th", ratio.name, scope="row")]
        line += [element("td", cell, class_="number") for cell in cells]
        line += [element("td", gauge(ratio)), element("td", verdict(ratio))]
        lines.append(element("tr", *line))
    return _table(heads, lines, numeric=heads[1:6])


def _table(heads: Iterable[str], lines: Iterable[str], numeric: Iterable[str] = ()) -> Markup:
    right = set(numeric)
    head = element(
        "tr",
        *(element("th", h, scope="col", class_="number" if h in right else "") for h in heads),
    )
    inside = element("table", element("thead", head), element("tbody", *lines))
    return element("div", inside, class_="wide")


# -- a run


def case_table(table: Table) -> Markup:
    """Show the cases of one kind; many of them are folded away."""

    def kind(text: str, *, numeric: bool) -> str:
        return "number" if numeric else "long" if len(text) > LONG_CHARS else ""

    lines = [
        element("tr", *(element("td", t, class_=kind(t, numeric=number)) for t, number in row))
        for row in table.rows
    ]
    columns = zip(table.heads, zip(*table.rows, strict=True), strict=True)
    numeric = [head for head, cells in columns if any(is_number for _, is_number in cells)]
    inside = _table(table.heads, lines, numeric)
    said = f"{table.name} ({len(table.rows)})"
    fold = {} if len(table.rows) > OPEN_ROWS_MAX else {"open": ""}
    note = [element("p", table.note, class_="note")] if table.note else []
    return element("details", element("summary", said), *note, inside, **fold)


def settings(run: Run) -> Markup:
    """Say under which settings a run was done."""
    facts = {
        "commit": run.commit + (" (with changes that are not in it)" if run.changed else ""),
        "machine": run.machine,
        "file": run.source,
    }
    facts |= {str(name): shown(value) for name, value in run.settings.items()}
    pairs = (joined((element("dt", name), element("dd", value))) for name, value in facts.items())
    return element("dl", *pairs, class_="settings")


def said(run: Run) -> list[Markup]:
    """Return the sentences with which a run sums itself up."""
    found = [row.get("text") for row in run.rows("verdict")]
    return [element("p", text, class_="sentence") for text in found if isinstance(text, str)]


def section(each: Section, anchor: str) -> Markup:
    """Show one run."""
    run = each.run
    title = f"{run.name}{', quick' if run.quick else ''}"
    parts = [element("h2", title), *said(run)]
    if run.ratios:
        parts.append(ratio_table(run.ratios))
    parts.append(settings(run))
    for name, note, svg in each.plots:
        inside = (element("h3", name), element("div", Markup(svg), class_="wide plot"))
        parts.append(element("figure", *inside, element("figcaption", note)))
    parts += [element("p", problem, class_="problem") for problem in each.problems]
    rows = [row for row in run.results if row.get("case") != "verdict"]
    tables = [case_table(table) for table in cases(rows)]
    if tables:
        parts += [element("h3", "Case by case"), element("p", SPREADS, class_="note"), *tables]
    return element("section", *parts, id=anchor)


# -- the page


def tally(ratios: Iterable[Measured]) -> str:
    """Count verdicts."""
    counts = Counter(ratio.verdict for ratio in ratios)
    if not counts:
        return "no ratios"
    return ", ".join(f"{counts[name]} {name}" for name in (*VERDICTS, UNKNOWN) if counts[name])


def warnings(runs: Sequence[Run]) -> list[str]:
    """Return what would mislead somebody who compares these runs."""
    found = []
    for what, values in (
        ("commits", sorted({run.commit for run in runs})),
        ("machines", sorted({run.machine for run in runs})),
    ):
        if len(values) > 1:
            found.append(f"These runs are of {len(values)} {what}: {'; '.join(values)}.")
    for what, names in (
        ("had changes that are not in their commit", [r.name for r in runs if r.changed]),
        ("were quick: smaller cases, for a first look", [r.name for r in runs if r.quick]),
    ):
        if names:
            found.append(f"Some {what}: {', '.join(dict.fromkeys(names))}.")
    return found


def contents(sections: Mapping[str, Section]) -> Markup:
    """List the runs with what came of each, and name every ratio that did not meet its bar."""
    lines = []
    for anchor, each in sections.items():
        run = each.run
        open_ = [r for r in run.ratios if r.verdict in ("missed", "not decided")]
        marks = [
            element("span", f"{SIGNS[r.verdict]} {r.name}", class_=f"verdict {r.verdict[:3]}")
            for r in open_
        ]
        lines.append(
            element(
                "tr",
                element("th", element("a", run.name, href=f"#{anchor}"), scope="row"),
                element("td", tally(run.ratios)),
                element("td", *(joined((mark, " ")) for mark in marks)),
                element("td", run.commit),
            )
        )
    return _table(("benchmark", "verdicts", "missed or not decided", "commit"), lines)


def page(sections: Sequence[Section], problems: Sequence[str] = ()) -> str:
    """Return the whole page; ``problems`` are what could not be read."""
    runs = [each.run for each in sections]
    anchors = {f"run-{at}-{slugged(each.run.name)}": each for at, each in enumerate(sections, 1)}
    every = [ratio for run in runs for ratio in run.ratios]
    parts = [
        element("h1", "kvtier benchmarks"),
        element("p", f"{len(runs)} runs, {len(every)} ratios: {tally(every)}.", class_="sentence"),
    ]
    if problems:
        items = (element("li", problem) for problem in problems)
        parts.append(element("ul", *items, class_="problems"))
    parts += [element("p", text, class_="problem") for text in warnings(runs)]
    parts.append(contents(anchors))
    parts.append(Markup(READING))
    parts += [section(each, anchor) for anchor, each in anchors.items()]
    return PAGE.substitute(light=css(dark=False), dark=css(dark=True), body=joined(parts))


READING: Final = """<details class="reading"><summary>How to read this</summary><ul>
<li><b>measured</b> is the median over interleaved pairs of one run; <b>A/A spread</b> is what the
same thing shows against itself in that run, in the ratio's own unit.</li>
<li><b>bar</b> is where the number has to be (shaded in the strip; the dot is the number, the line
its spread). <b>met</b>: inside. <b>missed</b>: outside by more than the spread. <b>not decided</b>:
outside by less, or too few pairs, or too many trials starved of their core. <b>no bar</b>: the
number only informs.</li>
<li><b>starved</b> is the share of trials whose computing thread was kept from its core by
strangers: a busy machine.</li>
<li>A figure that says <b>simulated</b> was computed from a profile, not measured; one that is
<b>quoted</b> is its source's.</li>
<li>Compare numbers of one run. Between runs the machine, and above all its disk, may have
changed.</li></ul></details>
"""

PAGE: Final = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>kvtier benchmarks</title>
<style>
:root{$light--good:#00694d;--bad:#b03a00;--open:#7a5200;--soft:#f3f5f8;--shade:#cfeadf}
@media (prefers-color-scheme:dark){
:root{$dark--good:#57d6ae;--bad:#ff9a6b;--open:#f2c260;--soft:#21262c;--shade:#1d4a3c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.5rem 1.2rem 4rem;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
h1{font-size:1.7rem;margin:.2rem 0}h2{font-size:1.35rem;margin:3rem 0 .5rem;padding-top:.6rem;
border-top:2px solid var(--faint)}h3{font-size:1.05rem;margin:1.4rem 0 .3rem}
a{color:var(--blue)}.sentence{font-size:1.08rem;font-weight:600;max-width:70ch}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.86rem;margin:.5rem 0}
th,td{padding:.22rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--faint);
max-width:30rem}
thead th{font-weight:600;vertical-align:bottom;background:var(--soft)}
tbody th{font-weight:500;white-space:nowrap}
.number{text-align:right}
td.number{font-variant-numeric:tabular-nums;white-space:nowrap}
td.long{min-width:17rem}
.verdict{white-space:nowrap}.verdict.met{color:var(--good)}
.verdict.missed,.verdict.mis{color:var(--bad);font-weight:600}
.verdict.not-decided,.verdict.not{color:var(--open)}
.gauge .bar{fill:var(--shade)}.gauge line{stroke:var(--ink);stroke-width:1.5}
.gauge circle{fill:var(--ink)}
.settings{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:.8rem 0;
padding:.6rem .9rem;background:var(--soft);border-radius:6px;font-size:.86rem}
dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}
figure{margin:1.2rem 0}.plot svg{display:block;width:100%;min-width:36rem;max-width:64rem;
height:auto}
figcaption,.note{font-size:.86rem;max-width:80ch;opacity:.85;margin:.2rem 0}
details{margin:.4rem 0}summary{cursor:pointer;font-weight:600;font-size:.95rem}
.reading{background:var(--soft);border-radius:6px;padding:.5rem .9rem;font-size:.9rem}
.problem,.problems{color:var(--open);font-size:.92rem;overflow-wrap:anywhere}
@media print{details:not([open])>*{display:block}}
</style></head><body>
$body
</body></html>
"""
)
