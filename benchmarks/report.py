"""Turn results of benchmarks into one page and plots: ``report.py FILE.json... --html OUT``.

The page needs nothing from outside: it can be mailed, and opened without a network. ``--plots``
writes every figure as PNG and SVG as well. What cannot be read or drawn is named, in the page and
on standard error, and the rest is made all the same. The exit status is 0 if everything was, 1 if
something was left out, 2 if nothing could be read. Plots need matplotlib (``kvtier[bench]``).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _report_catalogue import figures
from _report_page import Section, page, slugged
from _report_read import Run, Unreadable, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NO_PLOTS = "no plots: matplotlib is missing; pip install 'kvtier[bench]'"


def plotter() -> Any:
    """Return what draws, or None without matplotlib."""
    try:
        return importlib.import_module("_plots")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return None


def runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read files; returns the runs, and what could not be read and why."""
    found, problems = [], []
    for path in paths:
        try:
            found.append(read(path))
        except Unreadable as error:
            problems.append(str(error))
    return found, problems


def section(run: Run, draws: Any, plots: Path | None, taken: set[str]) -> Section:
    """Draw what can be drawn of one run; a slug that another run has gets the file's name."""
    if draws is None:
        return Section(run)
    drawn, problems = figures(run)
    shown = []
    for figure in drawn:
        slug, own = figure.slug, f"{figure.slug}-{slugged(Path(run.source).stem)}"
        for number in range(len(taken) + 1):
            if slug not in taken:
                break
            slug = f"{own}-{number + 1}" if number else own
        taken.add(slug)
        each = replace(figure, slug=slug)
        shown.append((each.title, each.note, draws.inline(each)))
        if plots is not None:
            draws.write(each, plots)
    return Section(run, shown, problems)


def report(
    paths: Sequence[Path],
    out: Path | None,
    plots: Path | None,
    say: Callable[[str], object],
    find: Callable[[], Any] = plotter,
) -> int:
    """Make the page and the plots; returns the exit status."""
    found, problems = runs(paths)
    draws = find()
    if draws is None:
        problems.append(NO_PLOTS)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    sections = [section(run, draws, plots, taken) for run in found]
    every = [*problems, *(problem for each in sections for problem in each.problems)]
    for problem in every:
        say(problem)
    if not found:
        say("nothing to report: give files that benchmarks wrote with --json")
        return 2
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(sections, problems), encoding="utf-8")
    return int(bool(every))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json wrote")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write the page")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG and SVG of each plot")
    options = parser.parse_args(argv)
    if options.html is None and options.plots is None:
        parser.error("give --html, --plots or both: nothing else is written")
    status = report(
        options.files, options.html, options.plots, lambda text: print(text, file=sys.stderr)
    )
    for path in (options.html, options.plots):
        if path is not None and status < 2:
            print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
