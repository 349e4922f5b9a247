"""Which figures are drawn of which benchmark; a run that lacks the rows for one says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import _report_bytes as nbytes
import _report_restores as restores
from _report_figures import NotDrawn

if TYPE_CHECKING:
    from collections.abc import Callable

    from _report_figures import Figure
    from _report_read import Run

FIGURES: Final[dict[str, tuple[Callable[[Run], Figure], ...]]] = {
    "breakdown": (
        restores.shares,
        restores.lengths,
        restores.sweep,
        restores.shares_here,
        restores.block_sizes,
        nbytes.pieces,
    ),
    "demo": (restores.demo_ttft,),
    "load": (nbytes.throughput, nbytes.latencies),
    "replay": (restores.saved,),
    "restore": (restores.ttft_by_link, restores.ttft_by_length),
    "rivals": (nbytes.rivals, nbytes.rivals_cpu, nbytes.strategies),
    "tiers": (nbytes.bandwidth,),
}
"""Of a benchmark that is not here, only its tables are shown."""


def figures(run: Run) -> tuple[list[Figure], list[str]]:
    """Return what can be drawn of a run, and what cannot and why."""
    drawn, problems = [], []
    for make in FIGURES.get(run.name, ()):
        try:
            drawn.append(make(run))
        except NotDrawn as error:
            problems.append(f"{run.source}: {error}")
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            what = (make.__doc__ or "").removeprefix("Draw ").rstrip(".")
            problems.append(f"{run.source}: no plot of {what}: a row lacks or has a wrong {error}")
    return drawn, problems
