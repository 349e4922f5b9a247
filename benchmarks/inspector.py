"""What looking costs: check against the raw disk, a million blocks, and the writer beside it.

* A check reads a cold store of blocks of one model size, checksums included; it is timed from the
  open directory to its report, the start of the interpreter is not part of it. "raw" reads as many
  records of the same size with nothing but the disk (see ``_disk``), four threads.
* ``info``, ``ls`` and ``tree`` of a million blocks are whole commands, from the start of their
  process to its end; so is ``--help``.
* A writer fills prompt after prompt into a store that is full, once alone and once while another
  process runs ``info`` and ``ls`` on the store without a pause. Its throughput must stay.

``--quick`` moves a quarter of the bytes. ``--dir`` says which disk is measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import _million
import torch
from _blocks import MIB, WAIT_S_MAX, Subject, io_mode
from _disk import RawDisk, drop_cache, file_system, need_free, work_folder
from _harness import Bar, Bench, Ratio, Stopwatch, Trial, interleave, parse, spread_of

from kvtier_inspect.check import check
from kvtier_inspect.opened import opened
from kvtier_inspect.slots import READERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtier.store import Store

PARTS: Final = ("check", "million", "writer")
CHECK_MIB: Final = 14
WRITER_MIB: Final = 3
WRITER_PAIRS: Final = 10
WRITER_PASS_S_MIN: Final = 1.0
"""A pass of the writer takes at least so long: several commands run beside it."""
COMMAND_S_MAX: Final = 120.0
COMMANDS: Final = {"help": 0.3, "info": 2.0, "ls": 2.0, "tree": 2.0}
"""Commands with the most seconds that they may take for a million blocks."""


def command(name: str, path: Path) -> list[str]:
    """Return the words of a command."""
    words = ["--help"] if name == "help" else [name, str(path)]
    return [sys.executable, "-m", "kvtier_inspect.cli", *words]


def checks(bench: Bench, folder: Path) -> None:
    """Read everything that a store holds, and as much from the disk alone."""
    options = bench.options
    mib = 1 if options.smoke else CHECK_MIB
    nbytes = 8 * MIB if options.smoke else 256 * MIB if options.quick else 1024 * MIB
    subject = Subject(mib, nbytes // (mib * MIB))
    need_free(folder, 3 * nbytes + 64 * MIB)
    path = folder / "check"
    with subject.open(path, prompts=1) as store:
        subject.put(store)
        shape = subject.shape(store, writes=False)
        bench.settings["io"] = io_mode(store)
    raw_folder = folder / "raw"
    raw_folder.mkdir()

    def once() -> Trial:
        drop_cache(path / "segments")
        with opened(path) as store:
            report = check(store)
        assert not report.problems, report.problems[0]
        assert report.blocks == subject.blocks
        return Trial(report.seconds)

    with RawDisk(raw_folder, shape) as raw:
        raw.fresh()
        once()
        ways = {"raw": lambda: Trial(raw.read()), "check": once, "again": once}
        with bench.progress(f"check, {mib} MiB", 3 * options.pairs) as tick:
            trials = interleave(ways, options.pairs, tick)
    same = trials["check"], trials["again"]
    name = f"check_vs_raw_{mib}MiB"
    bench.add(Ratio.of_pairs(name, trials["raw"], trials["check"], same, Bar(low=0.8)))
    rates = {
        way: subject.bytes / 1e9 / statistics.median(t.seconds for t in series)
        for way, series in trials.items()
    }
    bench.record("check", trials, mib=mib, blocks=subject.blocks, readers=READERS, gb_per_s=rates)


def million(bench: Bench, folder: Path) -> None:
    """Time whole commands on a store of a million blocks."""
    blocks = 4096 if bench.options.smoke else 1_000_000
    path = folder / "million"
    need_free(folder, blocks * (_million.SLOT_BYTES + 512))
    with bench.progress("making a million blocks", -(-blocks // _million.COMMIT_ENTRIES)) as tick:
        for _ in _million.build(path, blocks):
            tick()
    bench.settings["million_blocks"] = blocks
    for name, high in COMMANDS.items():

        def once(name: str = name) -> Trial:
            began = time.perf_counter()
            subprocess.run(  # noqa: S603 - our own command
                command(name, path), check=True, stdout=subprocess.DEVNULL, timeout=COMMAND_S_MAX
            )
            return Trial(time.perf_counter() - began)

        once()
        trials = interleave({"command": once, "again": once}, bench.options.pairs)
        seconds = statistics.median(trial.seconds for trial in trials["command"])
        spread = seconds * spread_of(trials["command"], trials["again"])
        full = f"{name}_s" if name == "help" else f"{name}_1m_s"
        bench.add(Ratio(full, seconds, Bar(high=high), spread, bench.options.pairs))
        bench.record(full, trials)


@contextmanager
def inspecting(path: Path) -> Iterator[list[int]]:
    """Run commands without a pause for the length of a scope; yields a list of their exit codes."""
    done = threading.Event()
    codes: list[int] = []

    def loop() -> None:
        while not done.is_set():
            for name in ("info", "ls"):
                words = command(name, path)
                quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                codes.append(subprocess.run(words, check=False, **quiet).returncode)  # noqa: S603

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield codes
    finally:
        done.set()
        thread.join(COMMAND_S_MAX)


def writes(bench: Bench, folder: Path) -> None:
    """Fill prompts into a full store, alone and while somebody looks on."""
    options = bench.options
    mib = 1 if options.smoke else WRITER_MIB
    nbytes = 8 * MIB if options.smoke else 64 * MIB if options.quick else 256 * MIB
    subject = Subject(mib, nbytes // (mib * MIB))
    need_free(folder, 4 * nbytes)
    path = folder / "writer"
    pairs = 1 if options.smoke else WRITER_PAIRS
    with subject.open(path, prompts=2) as store:
        subject.fill(store)
        puts = 1 if options.smoke else _puts(subject, store)

        def alone() -> Trial:
            return Trial(_seconds(subject, store, puts))

        def beside() -> Trial:
            with inspecting(path) as codes:
                seconds = _seconds(subject, store, puts)
            assert not any(codes), f"exit codes {codes}"
            return Trial(seconds, detail={"commands": len(codes)})

        beside()
        ways = {"alone": alone, "beside": beside, "again": alone}
        with bench.progress("a writer beside inspectors", 3 * pairs) as tick:
            trials = interleave(ways, pairs, tick)
    same = trials["alone"], trials["again"]
    name = "write_beside_inspector"
    bench.add(Ratio.of_pairs(name, trials["alone"], trials["beside"], same, Bar(low=0.95)))
    bench.record("writer", trials, mib=mib, blocks=subject.blocks, puts=puts, cores=os.cpu_count())


def _puts(subject: Subject, store: Store) -> int:
    return max(1, round(WRITER_PASS_S_MIN / _seconds(subject, store, 2) * 2 + 0.5))


def _seconds(subject: Subject, store: Store, puts: int) -> float:
    watch = Stopwatch()
    with watch:
        for _ in range(puts):
            subject.put(store)
        store.flush(WAIT_S_MAX)
    return watch.wall_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    paths = {"dir": "where to write: a folder on the disk to measure (default: $TMPDIR or here)"}
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths)
    torch.set_num_threads(1)
    bench = Bench("inspector", options)
    with work_folder(options.paths["dir"], bench.console) as folder:
        bench.settings["file_system"] = file_system(folder)
        for part, run in (("check", checks), ("million", million), ("writer", writes)):
            if options.wants(part):
                run(bench, folder)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
