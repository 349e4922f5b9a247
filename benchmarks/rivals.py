"""kvtier's SSD reads against LMCache's, on the same machine, in the same run, by turns.

Both read the same number of 32 MiB blocks (Llama-3-8B, 256 tokens) from files on the same disk into
host memory, cold: neither side finds anything in its own memory or in the page cache. kvtier reads
through ``prefetch``, checks every checksum meanwhile, and stored the blocks durably; LMCache does
not check or sync anything. What either side read is compared byte by byte after the clock stopped.

LMCache runs in an environment and a process of its own, made on the first run and kept in ``--env``
(about 1 GB). Every way that it has to read from an SSD without a GPU is driven: the in-process
engine's disk backend (block by block, its thread pool, its event loop) and the server's ``fs`` and
``fs_native`` adapters (all blocks as one task, each as a task of its own), all of them with the
page cache and with O_DIRECT. Each pair is measured on stores and processes of its own: how quick
direct I/O is depends on how scattered the memory is that a process happened to get. A ratio is over
the way that was quickest by its median: of the disk backend with O_DIRECT, and of all.
If LMCache cannot be installed or run, the exit status is 3 and there are no ratios.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from _blocks import MIB, SHAPES, Subject, cold_reads, io_mode
from _disk import file_system, need_free, work_folder
from _harness import Bar, Bench, Ratio, Trial, interleave, parse
from _lmcache_env import LMCACHE, STEPS, Rival, RivalMissing, default_folder, environment
from rich.box import SIMPLE
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BLOCK_MIB: Final = 32
ODIRECT: Final = "disk_odirect."
"""How the names begin of what ``ssd_read_vs_lmcache_odirect`` is measured against."""
WAYS: Final = 16
"""LMCache's ways to read, and kvtier's twice."""
COPIES: Final = 6
"""LMCache's backends each store the blocks for themselves."""
ODIRECT_BAR: Final = Bar(low=2.0)
BEST_BAR: Final = Bar(low=0.9)
MISSING: Final = 3
"""Exit status if there is no rival."""


def median_s(trials: Sequence[Trial]) -> float:
    """Return the median time."""
    return statistics.median(trial.seconds for trial in trials)


def one_round(
    bench: Bench,
    folder: Path,
    python: Path,
    subject: Subject,
    tick: Callable[[], None],
    *,
    backwards: bool,
) -> dict[str, list[Trial]]:
    """Store the blocks on both sides, then read them once over every way."""
    layers, kv_heads, head_dim = SHAPES[subject.mib]
    settings = {
        "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim,
        "blocks": subject.blocks, "seed": subject.mib,
    }  # fmt: skip
    with ExitStack() as stack:
        reads, store = stack.enter_context(cold_reads(subject, folder))
        bench.settings["io"] = io_mode(store)
        rival = stack.enter_context(Rival(python, folder, settings))
        for path in rival.paths:  # every way was used once before it counts
            rival.load(path)
        ways = {"kvtier": reads.trial}
        ways |= {path: partial(loaded, rival, path) for path in rival.paths}
        ways["again"] = reads.trial
        order = reversed(ways) if backwards else iter(ways)
        return interleave({name: ways[name] for name in order}, 1, tick)


def compare(bench: Bench, folder: Path, python: Path, subject: Subject) -> None:
    """Measure all ways by turns and add the ratios."""
    trials: dict[str, list[Trial]] = {}
    with bench.progress("kvtier and LMCache by turns", WAYS * bench.options.pairs) as tick:
        for number in range(bench.options.pairs):
            with work_folder(str(folder / f"round-{number}"), bench.console) as inside:
                found = one_round(bench, inside, python, subject, tick, backwards=number % 2 == 1)
            for name, more in found.items():
                trials.setdefault(name, []).extend(more)
    same = trials["kvtier"], trials["again"]
    paths = [name for name in trials if name not in ("kvtier", "again")]
    best = min(paths, key=lambda name: median_s(trials[name]))
    odirect = min(
        (name for name in paths if name.startswith(ODIRECT)),
        key=lambda name: median_s(trials[name]),
    )
    for name, path, bar in (
        ("ssd_read_vs_lmcache_odirect", odirect, ODIRECT_BAR),
        ("ssd_read_vs_lmcache_best", best, BEST_BAR),
    ):
        bench.add(Ratio.of_pairs(name, trials[path], trials["kvtier"], same, bar))
    bench.record(
        "read", trials, mib=subject.mib, blocks=subject.blocks, best=best, odirect=odirect,
        checks={"kvtier": "xxh3 of every part", "lmcache": "none"},
        durable={"kvtier": "fdatasync, then index commit", "lmcache": "no sync"},
    )  # fmt: skip
    print_paths(bench, trials, subject.bytes, (best, odirect))


def loaded(rival: Rival, path: str) -> Trial:
    """Load over one of LMCache's paths."""
    return Trial(rival.load(path))


def print_paths(
    bench: Bench, trials: Mapping[str, Sequence[Trial]], nbytes: int, chosen: Sequence[str]
) -> None:
    """Print every path's rate; the ones that the ratios are made of stand out."""
    table = Table(title=f"cold reads, {BLOCK_MIB} MiB blocks, GB/s", box=SIMPLE)
    for column in ("way", "median", "slowest", "quickest"):
        table.add_column(column, no_wrap=True, justify="left" if column == "way" else "right")
    for name in ("kvtier", "again", *sorted(set(trials) - {"kvtier", "again"})):
        series = trials[name]
        seconds = [trial.seconds for trial in series]
        ends = median_s(series), max(seconds), min(seconds)
        rates = [f"{nbytes / 1e9 / each:.2f}" for each in ends]
        stands_out = name in ("kvtier", *chosen)
        shown = "kvtier, again" if name == "again" else name
        table.add_row(shown, *rates, style="bold" if stands_out else None)
    bench.console.print(table)
    bench.console.print(
        "kvtier checks all checksums within that time, and what it stored is durable; LMCache has "
        "no checksums and syncs nothing. Every byte was compared afterwards, on both sides."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare with LMCache, or say why that is not possible."""
    paths = {
        "dir": "where to write: a folder on the disk to measure (default: $TMPDIR or here)",
        "env": f"where LMCache is installed (default: {default_folder()})",
    }
    options = parse(__doc__.partition("\n")[0], (), argv, paths)
    torch.set_num_threads(1)
    pass_bytes = (4 if options.smoke else 8 if options.quick else 32) * BLOCK_MIB * MIB
    bench = Bench("rivals", options, pass_bytes=pass_bytes, rival=LMCACHE)
    try:
        with bench.progress("LMCache's environment", STEPS) as tick:
            python = environment(Path(options.paths["env"] or default_folder()).resolve(), tick)
        with work_folder(options.paths["dir"], bench.console) as folder:
            bench.settings["file_system"] = file_system(folder)
            need_free(folder, (COPIES + 3) * pass_bytes)
            compare(bench, folder, python, Subject(BLOCK_MIB, pass_bytes // (BLOCK_MIB * MIB)))
    except RivalMissing as error:
        bench.console.print(f"LMCache cannot be compared with here: {error}", style="bold red")
        return MISSING
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
