"""Run benchmarks one after the other and report on all of them: what ``tools/bench`` calls.

Each has a process and a limit of its own, and what those before it left of theirs; one that fails,
hangs or misses a bar stops no other and is named at the end. The exit status is 0 if all is fine,
1 if a bar was missed, 2 if a benchmark failed or was stopped, 130 after Ctrl-C. Results and report
lie in ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GRACE_S: Final = 20.0
"""How long a benchmark that is stopped may take to remove its files, before it is killed."""
LEFT_OUT: Final = 3
"""A benchmark's own exit status where what it compares with is not to be had."""
OUT: Final = Path(__file__).resolve().parents[1] / "build" / "bench"
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One script; its limits in seconds are some times what it takes on two idle cores."""

    name: str
    quick_s: float
    full_s: float
    disk: bool = False
    """Whether it takes ``--dir``."""
    extras: tuple[str, ...] = ()
    """What it compares with in environments of their own, if asked with ``--with``."""
    needs: str = ""
    """An environment without which it is left out."""


BENCHMARKS: Final = (
    Benchmark("breakdown", 150, 1800, disk=True),
    Benchmark("tiers", 150, 900, disk=True),
    Benchmark("load", 90, 900, disk=True),
    Benchmark("restore", 560, 3600),
    Benchmark("prefetch", 60, 300, disk=True),
    Benchmark("replay", 210, 3600),
    Benchmark("inspector", 100, 600, disk=True),
    Benchmark("tracing", 30, 120),
    Benchmark("rivals", 420, 3600, disk=True, extras=("lmcache", "mooncake")),
    Benchmark("vllm_ttft", 1500, 5400, needs="vllm"),
)
"""In the order of what to know first: is it worth it here, what can the disk do, under load."""
EXTRA_S: Final = 900.0
"""What making an environment and comparing with it may take beyond a benchmark's own limit."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to run: how, with which extras, on which disk, where results go."""

    out: Path
    quick: bool = False
    smoke: bool = False
    extras: tuple[str, ...] = ()
    disk: str = ""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """The interpreters of environments that a benchmark needs, by the environment's name."""

    def limit_s(self, benchmark: Benchmark) -> float:
        """Return after how long a benchmark is stopped."""
        more = sum(EXTRA_S for extra in self.extras if extra in benchmark.extras)
        return (benchmark.quick_s if self.quick or self.smoke else benchmark.full_s) + more

    def json(self, benchmark: Benchmark) -> Path:
        """Return the file of a benchmark's result."""
        return self.out / f"{benchmark.name}.json"

    def command(self, benchmark: Benchmark, folder: Path) -> list[str]:
        """Return how to start a benchmark."""
        python = self.pythons.get(benchmark.needs, sys.executable)
        command = [python, str(folder / f"{benchmark.name}.py"), "--json"]
        command.append(str(self.json(benchmark)))
        command += ["--quick"] * self.quick + ["--smoke"] * self.smoke
        if benchmark.disk and self.disk:
            command += ["--dir", self.disk]
        extras = [extra for extra in self.extras if extra in benchmark.extras]
        return command + (["--with", ",".join(extras)] if extras else [])


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one benchmark."""

    name: str
    said: str
    seconds: float
    status: int
    """0 fine or left out, 1 missed a bar, 2 failed."""


def run(benchmark: Benchmark, asked: Asked, folder: Path, spare_s: float = 0.0) -> Ended:
    """Run one benchmark to its end or its limit and the spare time; it prints where we do."""
    asked.json(benchmark).unlink(missing_ok=True)  # an old result is not this run's
    begun = time.monotonic()
    limit_s = asked.limit_s(benchmark) + spare_s
    command = asked.command(benchmark, folder)
    # A group of its own: what it started is stopped with it.
    with subprocess.Popen(command, process_group=0) as child:  # noqa: S603 - our own scripts
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(child)
    seconds = time.monotonic() - begun
    if status is None:
        return Ended(benchmark.name, f"STOPPED after its limit of {limit_s:.0f} s", seconds, 2)
    written = asked.json(benchmark).is_file()
    if status == 0 and written:
        return Ended(benchmark.name, "fine", seconds, 0)
    if status == 1 and written:  # without a result, 1 is the interpreter's word for an exception
        return Ended(benchmark.name, "missed a bar", seconds, 1)
    if status == LEFT_OUT:
        said = f"left out{' in part' if written else ''}: it says what and why above"
        return Ended(benchmark.name, said, seconds, 0)
    said = f"FAILED with exit status {status}" + ("" if status else " and no result")
    return Ended(benchmark.name, said, seconds, 2)


def stop(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End a child that still runs and everything it started; it may tidy up first."""
    if child.poll() is None:
        _signal(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    _signal(child.pid, signal.SIGKILL)
    child.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def choose(
    names: Sequence[str], asked: Asked, folder: Path, known: Sequence[Benchmark] = BENCHMARKS
) -> tuple[list[Benchmark], list[str]]:
    """Return what to run, and what was left out and why; raises SystemExit for unknown names."""
    by_name = {benchmark.name: benchmark for benchmark in known}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(by_name)}")
    chosen, left_out = [], []
    for benchmark in [by_name[name] for name in dict.fromkeys(names)] or known:
        if not (folder / f"{benchmark.name}.py").is_file():
            left_out.append(f"{benchmark.name}: left out: there is no {benchmark.name}.py")
        elif benchmark.needs and benchmark.needs not in asked.pythons:
            left_out.append(f"{benchmark.name}: left out: needs --with {benchmark.needs}")
        else:
            chosen.append(benchmark)
    return chosen, left_out


def run_all(
    chosen: Sequence[Benchmark], asked: Asked, folder: Path, say: Callable[[str], object]
) -> tuple[list[Ended], bool]:
    """Run benchmarks by turns; returns what became of each, and whether Ctrl-C ended it."""
    ended: list[Ended] = []
    spare_s = 0.0
    most = sum(map(asked.limit_s, chosen)) / 60
    say(f"{len(chosen)} benchmarks, at most {most:.0f} min in all; results in {asked.out}")
    for number, benchmark in enumerate(chosen, 1):
        where = f"[{number}/{len(chosen)}] {benchmark.name}"
        limit_s = asked.limit_s(benchmark) + spare_s
        say(f"{where}: running, at most {limit_s:.0f} s")
        try:
            ended.append(run(benchmark, asked, folder, spare_s))
        except KeyboardInterrupt:
            return ended, True
        spare_s = max(0.0, limit_s - ended[-1].seconds)
        say(f"{where}: {ended[-1].said}, {ended[-1].seconds:.0f} s")
    return ended, False


def results(out: Path, known: Sequence[Benchmark] = BENCHMARKS) -> list[Path]:
    """Return the results that lie in a folder, in the order of the benchmarks."""
    order = {benchmark.name: at for at, benchmark in enumerate(known)}
    return sorted(out.glob("*.json"), key=lambda path: (order.get(path.stem, len(order)), path))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, run, report, and say what became of each."""
    names = ", ".join(benchmark.name for benchmark in BENCHMARKS)
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"all if none: {names}")
    parser.add_argument("--quick", action="store_true", help="less than half an hour in all")
    help_out = "where results and the report go (default: build/bench in the repository)"
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=help_out)
    parser.add_argument("--dir", default="", help="a folder on the disk to measure")
    help_with = "also compare with what needs an environment of its own: lmcache, mooncake, vllm"
    parser.add_argument("--with", dest="extras", default="", metavar="A,B", help=help_with)
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--vllm-python", default="", help=argparse.SUPPRESS)
    found = parser.parse_args(argv)
    extras = tuple(each for each in found.extras.split(",") if each)
    allowed = {each for one in BENCHMARKS for each in (*one.extras, one.needs) if each}
    if set(extras) - allowed:
        parser.error(f"--with knows {', '.join(sorted(allowed))}")
    pythons = {"vllm": found.vllm_python} if found.vllm_python else {}
    asked = Asked(found.out.resolve(), found.quick, found.smoke, extras, found.dir, pythons)
    folder = Path(__file__).resolve().parent
    asked.out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, flush=True)  # in order with what the children print

    chosen, left_out = choose(found.names, asked, folder)
    ended, interrupted = run_all(chosen, asked, folder, say)
    page, plots = asked.out / "report.html", asked.out / "plots"
    reported = report.report(results(asked.out), page, plots, say)
    for each in ended:
        say(f"{each.name}: {each.said}, {each.seconds:.0f} s")
    for line in left_out:
        say(line)
    if reported < 2:
        say(f"report: {page}")
    return INTERRUPTED if interrupted else max((each.status for each in ended), default=0)


if __name__ == "__main__":
    sys.exit(main())
