"""What can be drawn from a run: values only, nothing of how it looks (see ``_plots``).

What each benchmark has drawn is in ``_report_catalogue``.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from _report_read import Run

MIB: Final = 1 << 20
GIB: Final = 1 << 30
RECOMPUTE, LOAD, PLANNED, OPTIMUM = "recompute", "load", "planned", "best split"


class NotDrawn(Exception):
    """A figure that a run does not hold the rows for; says which rows."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One thing over several places; ``low`` and ``high`` are the ends of what was measured.

    A reference (``dashed``) is what others are compared with: an optimum, a bound.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; with ``labels``, x counts in them, and those ``marked`` stand out."""

    title: str
    curves: Sequence[Curve]
    labels: Sequence[str] = ()
    marked: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that share their axes' meaning.

    ``lines``: curves over x. ``bars``: for each label one bar of each curve. ``stacked``: for each
    label the curves' bars one on the other.
    """

    slug: str
    title: str
    x: str
    y: str
    panels: Sequence[Panel]
    note: str
    """What was done to get these numbers: measured here, simulated, or whose they are."""
    kind: Literal["lines", "bars", "stacked"] = "lines"
    log_x: bool = False
    log_y: bool = False


def rows(run: Run, what: str, *cases: str) -> list[Mapping[str, Any]]:
    """Return the rows of these cases; raises NotDrawn if there are none."""
    found = run.rows(*cases)
    if not found:
        named = " or ".join(repr(case) for case in cases)
        raise NotDrawn(f"no plot of {what}: no result of case {named}; run that part as well")
    return found


def measured(name: str, points: Iterable[tuple[float, Sequence[float]]]) -> Curve:
    """Return the medians of several measurements at each place, with the ends of each."""
    ordered = sorted((x, list(values)) for x, values in points)
    return Curve(
        name,
        tuple(x for x, _ in ordered),
        tuple(statistics.median(values) for _, values in ordered),
        tuple(min(values) for _, values in ordered),
        tuple(max(values) for _, values in ordered),
    )
