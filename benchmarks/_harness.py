"""What every benchmark shares: options, interleaved pairs, verdicts, a table and one JSON object.

A ratio is the median over interleaved pairs of one run. Its spread is what the same thing shows
against itself in the same run (A/A); a miss within the spread is "not decided", never "met".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier_demo.show import commit, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PAIRS_MIN: Final = 5
"""Fewer pairs decide nothing."""
HELD_MIN: Final = 0.93
"""A trial whose computing thread held a core for less of its time was starved by strangers."""
ATTEMPTS_MAX: Final = 4
"""How often a trial is run at most until it was not starved."""
STARVED_MAX: Final = 0.2
"""A ratio of which more trials than this were starved all the same decides nothing."""
COLOURS: Final = {"met": "green", "missed": "bold red", "not decided": "yellow", "no bar": "dim"}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line; ``only`` names parts, all if empty."""

    quick: bool = False
    json: str = ""
    only: tuple[str, ...] = ()
    smoke: bool = False
    """One pair of the smallest cases: whether it runs at all, for the tests."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Where things are, by option name; "" for what was not given."""
    values: Mapping[str, str] = field(default_factory=dict)
    """What a benchmark's own options were set to, by name; "" for what was not given."""

    @property
    def pairs(self) -> int:
        """How many interleaved pairs a ratio is measured by."""
        return 1 if self.smoke else PAIRS_MIN

    def wants(self, part: str) -> bool:
        """Whether ``part`` is to be run."""
        return not self.only or part in self.only


def parse(
    description: str,
    parts: Sequence[str] = (),
    argv: Sequence[str] | None = None,
    paths: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
) -> Options:
    """Read the options that every benchmark has, ``paths`` and ``values``: by name, with a help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smaller cases, for a first look")
    parser.add_argument("--json", metavar="FILE", default="", help="write the result; - is stdout")
    for name, what in (paths or {}).items():
        parser.add_argument(f"--{name}", metavar="DIR", default="", help=what)
    for name, what in (values or {}).items():
        parser.add_argument(f"--{name}", metavar="VALUE", default="", help=what)
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}
    parser.add_argument("--only", action="append", default=[], choices=parts or None, **hidden)
    parser.add_argument("--smoke", action="store_true", **hidden)
    found = parser.parse_args(argv)
    places = {name: getattr(found, name) for name in paths or {}}
    own = {name: getattr(found, name.replace("-", "_")) for name in values or {}}
    return Options(found.quick, found.json, tuple(found.only), found.smoke, places, own)


# -- measuring


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one thing; ``held`` is the share of its computing in which it had its core."""

    seconds: float
    held: float = 1.0
    detail: dict[str, Any] = field(default_factory=dict)
    attempts: int = 1

    @property
    def starved(self) -> bool:
        """Whether others kept the computing thread from its core."""
        return self.held < HELD_MIN


class Stopwatch:
    """Adds up wall time, CPU time and the wait for a core of the thread that runs inside of it."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = self.delay_s = 0.0

    def __enter__(self) -> Self:
        self._delay_s = _run_delay_s()
        self._cpu_s = time.thread_time()
        self._wall_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s = time.perf_counter() - self._wall_s
        cpu_s = time.thread_time() - self._cpu_s
        delay_s = _run_delay_s()
        self.wall_s += wall_s
        self.cpu_s += cpu_s
        # Waiting for a lock that our own threads hold is part of what is measured, waiting for a
        # core is not; a kernel that does not tell them apart has both counted.
        self.delay_s += max(delay_s - self._delay_s if delay_s else wall_s - cpu_s, 0.0)

    @property
    def held(self) -> float:
        """The share of the time in which this thread had the core that it wanted."""
        wanted_s = self.cpu_s + self.delay_s
        return self.cpu_s / wanted_s if wanted_s else 1.0


def _run_delay_s() -> float:
    """Return how long this thread waited for a core so far; 0 if the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def measure(run: Callable[[], Trial], attempts_max: int = ATTEMPTS_MAX) -> Trial:
    """Run until a trial was not starved; returns it, or the least starved one."""
    trials = [run()]
    while trials[-1].starved and len(trials) < attempts_max:
        trials.append(run())
    return replace(max(trials, key=lambda trial: trial.held), attempts=len(trials))


def interleave(
    ways: Mapping[str, Callable[[], Trial]],
    pairs: int,
    tick: Callable[[], None] = lambda: None,
    attempts_max: int = ATTEMPTS_MAX,
) -> dict[str, list[Trial]]:
    """Run every way once per round, every other round in reverse order."""
    trials: dict[str, list[Trial]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(pairs):
        for name in names:
            trials[name].append(measure(ways[name], attempts_max))
            tick()
        names.reverse()
    return trials


def quotients(over: Sequence[Trial], under: Sequence[Trial]) -> list[float]:
    """Return the quotient of each pair."""
    return [a.seconds / b.seconds for a, b in zip(over, under, strict=True)]


def spread_of(first: Sequence[Trial], again: Sequence[Trial]) -> float:
    """Return the median distance from 1 of the same thing against itself."""
    return statistics.median(abs(each - 1) for each in quotients(first, again))


def starved_share(*series: Sequence[Trial]) -> float:
    """Return which share of all trials was starved."""
    trials = [trial for each in series for trial in each]
    return sum(trial.starved for trial in trials) / len(trials)


# -- judging


@dataclass(frozen=True, slots=True)
class Bar:
    """Where a number has to be; both ends belong to it."""

    low: float = float("-inf")
    high: float = float("inf")

    def miss(self, value: float) -> float:
        """Return how far ``value`` lies outside; 0 if it does not."""
        return max(self.low - value, value - self.high, 0.0)

    def __str__(self) -> str:
        if self == NO_BAR:
            return "none"
        if self.low == float("-inf"):
            return f"<= {self.high:g}"
        return f">= {self.low:g}" if self.high == float("inf") else f"{self.low:g}..{self.high:g}"


NO_BAR: Final = Bar()
"""For numbers that only inform."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number with its bar; ``spread`` is in the number's own unit."""

    name: str
    value: float
    bar: Bar
    spread: float
    pairs: int
    starved: float = 0.0

    @classmethod
    def of_pairs(
        cls,
        name: str,
        over: Sequence[Trial],
        under: Sequence[Trial],
        same: tuple[Sequence[Trial], Sequence[Trial]],
        bar: Bar,
    ) -> Self:
        """Return the median of over / under; ``same`` is one of them twice."""
        value = statistics.median(quotients(over, under))
        spread = value * spread_of(*same)
        return cls(name, value, bar, spread, len(over), starved_share(over, under, *same))

    @classmethod
    def of_series(cls, name: str, values: Sequence[float], bar: Bar, starved: float = 0.0) -> Self:
        """Return the median of numbers measured one after the other, each next to the one before.

        The spread is the median change from one to the next.
        """
        value = statistics.median(values)
        changes = [abs(after - before) for before, after in pairwise(values)]
        spread = statistics.median(changes) if changes else 0.0
        return cls(name, value, bar, spread, len(values) - 1, starved)

    @property
    def verdict(self) -> str:
        """Say "met", "missed", "not decided" or "no bar"."""
        if self.bar == NO_BAR:
            return "no bar"
        miss = self.bar.miss(self.value)
        if self.pairs < PAIRS_MIN or self.starved > STARVED_MAX or 0 < miss <= self.spread:
            return "not decided"
        return "missed" if miss else "met"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "bar": str(self.bar), "verdict": self.verdict}


class Bench:
    """One run of one benchmark: what it measured, and how that is shown."""

    def __init__(self, name: str, options: Options, threads: int = 1, **settings: Any) -> None:
        self.name = name
        self.options = options
        self.threads = threads
        self.settings = {"quick": options.quick, "pairs": options.pairs, **settings}
        self.ratios: list[Ratio] = []
        self.results: list[dict[str, Any]] = []
        # With the result on standard output, everything else goes to the other one.
        self.console = Console(stderr=options.json == "-")

    @contextmanager
    def progress(
        self, description: str, total: int, per_s: float = 10.0
    ) -> Iterator[Callable[[], None]]:
        """Show a bar; what is yielded moves it on by one. ``per_s``: how often it is drawn.

        Drawing holds the interpreter for a millisecond or two, which a latency's tail may show.
        """
        columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn())
        columns = (*columns, TimeElapsedColumn())
        with Progress(
            *columns, console=self.console, transient=True, refresh_per_second=per_s
        ) as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)

    def add(self, *ratios: Ratio) -> None:
        """Take ratios over."""
        self.ratios += ratios

    def record(self, case: str, trials: Mapping[str, Sequence[Trial]], **values: Any) -> None:
        """Keep what single trials took."""
        each = {
            way: [
                {"seconds": t.seconds, "held": t.held, "attempts": t.attempts, **t.detail}
                for t in series
            ]
            for way, series in trials.items()
        }
        self.results.append({"case": case, **values, "trials": each})

    def to_json(self) -> dict[str, Any]:
        """Return the one object that a benchmark writes."""
        values = {ratio.name: ratio.value for ratio in self.ratios}
        results = [*(ratio.to_json() for ratio in self.ratios), *self.results]
        head = {"name": self.name, "commit": commit(), "machine": machine(self.threads)}
        return {**head, "settings": self.settings, "ratios": values, "results": results}

    def print_table(self) -> None:
        """Print each ratio with its bar, A/A spread and verdict."""
        quick = ", quick" if self.options.quick else ""
        table = Table(title=f"{self.name}{quick}", box=SIMPLE, pad_edge=False)
        for column in ("ratio", "bar", "measured", "A/A", "pairs", "verdict"):
            table.add_column(
                column, no_wrap=True, justify="left" if column in ("ratio", "verdict") else "right"
            )
        for ratio in self.ratios:
            numbers = f"{ratio.value:.3f}", f"{ratio.spread:.3f}", str(ratio.pairs)
            colour = COLOURS[ratio.verdict]
            table.add_row(ratio.name, str(ratio.bar), *numbers, ratio.verdict, style=colour)
        self.console.print(table)
        for ratio in self.ratios:
            if ratio.starved:
                self.console.print(f"{ratio.name}: {ratio.starved:.0%} of its trials were starved")

    def save(self) -> None:
        """Write the file that was asked for: a run that is stopped keeps what it had measured."""
        if self.options.json not in ("", "-"):
            text = json.dumps(self.to_json(), indent=1, allow_nan=False)
            Path(self.options.json).write_text(text + "\n", encoding="utf-8")

    def finish(self) -> int:
        """Print and write everything; returns the exit status, 1 if a ratio missed its bar."""
        value = self.to_json()
        self.print_table()
        self.console.print(f"commit {value['commit']}, {value['machine']}", highlight=False)
        if self.options.json == "-":
            print(json.dumps(value, indent=1, allow_nan=False))
        self.save()
        return int(any(ratio.verdict == "missed" for ratio in self.ratios))
