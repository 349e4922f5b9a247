"""kvtier beside what one would use instead, on the same machine, in the same run, by turns.

Storage: the same blocks of 32 MiB (Llama-3-8B, 256 tokens) are written and read by kvtier, by a
file per block (torch.save, safetensors), by LMDB, and on request by LMCache and Mooncake Store
(``--with lmcache,mooncake``), each in an environment and a process of its own, kept in ``--env``.
Rivals are compared within their durability class: "synced" survives a power cut, "unsynced" a
killed process, "memory" nothing. Reads from a disk are cold (neither the reader's memory nor the
page cache has anything) and warm (from the page cache, or the memory of its own that it has); every
byte is compared after the clock stopped, and in the end each one's files are spoilt to see whether
it notices. Each round is on fresh stores and in fresh processes, in which everything was used once
before it counts: how quick direct I/O is depends on how scattered the memory is that a process
happened to get. Of several ways to read, the one that was quickest by its median counts.

Restores (``_strategies.py``): kvtier's plan beside what others do with a stored prefix, over one
real model.

A rival that cannot be installed or run is skipped with the reason; if it was asked for, the exit
status is 3.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import torch
from _blocks import Subject
from _disk import file_system, need_free, work_folder
from _harness import Bar, Bench, parse
from _rivals_kvtier import CHECKS, DURABLE, damage
from _rivals_process import RivalMissing
from _rivals_run import lmcache_ratios, meet
from _rivals_sources import PLAIN, sources
from _rivals_table import Row, class_ratios, record, sentence, show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PARTS: Final = ("storage", "strategies")
BLOCK_MIB: Final = 32
SMOKE_MIB: Final = 1
COPIES: Final = 20
"""Disk that one round takes, in passes: LMCache's backends each store the blocks for themselves."""
LMCACHE_BARS: Final = {
    "ssd_read_vs_lmcache_odirect": Bar(low=2.0),
    "ssd_read_vs_lmcache_best": Bar(low=0.9),
}
MISSING: Final = 3
"""Exit status if a rival that was asked for is missing, and no bar was missed."""


def storage(bench: Bench, wanted: Sequence[str]) -> list[str]:
    """Measure every rival's storage; returns the names of those that were skipped."""
    options = bench.options
    mib = SMOKE_MIB if options.smoke else BLOCK_MIB
    subject = Subject(mib, 8 if options.quick or options.smoke else 32)
    pass_bytes = subject.bytes
    rows: list[Row] = []
    missing = []
    with work_folder(options.paths["dir"], bench.console) as folder:
        need_free(folder, COPIES * pass_bytes)
        bench.settings |= {
            "file_system": file_system(folder), "pass_bytes": pass_bytes, "block_mib": mib,
        }  # fmt: skip
        for name in wanted:
            try:
                rows += one_rival(bench, folder, subject, name)
                bench.save()
            except RivalMissing as error:
                missing.append(name)
                bench.settings.setdefault("skipped", {})[name] = str(error)
                bench.console.print(f"{name} is skipped: {error}", style="bold red", markup=False)
        checks = f"{CHECKS}: {damage(subject, folder)}"
    stands = class_ratios(rows)
    bench.add(*(ratio for _, ratio in stands))
    record(bench, rows, pass_bytes)
    ours = {"synced": (checks, DURABLE), "memory": (CHECKS, "-")}
    show(bench.console, rows, pass_bytes, {**ours, "unsynced": ours["synced"]})
    said = sentence(stands)
    bench.results.append({"case": "verdict", "text": said})
    bench.console.print(said, markup=False)
    bench.console.print(
        f"{subject.blocks} blocks of {mib} MiB, {bench.settings.get('io')} I/O, "
        f"{bench.settings['file_system']}; red is ahead of kvtier, yellow within the spread. "
        "kvtier has no unsynced mode: its writes are durable there, too; and its cold reads have "
        "checked every byte, which counts in their CPU time."
    )
    return missing


def one_rival(bench: Bench, folder: Path, subject: Subject, name: str) -> list[Row]:
    """Measure one rival; returns a row for each of its backends."""
    source = sources()[name]
    met = meet(bench, folder, source, subject, bench.options.paths["env"])
    bench.settings["io"] = met.io
    for backend, reason in met.skipped.items():
        bench.settings.setdefault("skipped", {})[f"{name} {backend}"] = reason
        bench.console.print(f"{name} {backend} is skipped: {reason}", style="red", markup=False)
    for kind, trials in met.trials.items():
        bench.record("ways", trials, rival=name, package=source.package, kind=kind)
    if name == "lmcache":
        ratios, chosen = lmcache_ratios(met, LMCACHE_BARS)
        bench.add(*ratios)
        bench.settings["lmcache_ways"] = chosen
    return met.rows("" if name == PLAIN else name)


def asked_for(text: str) -> list[str]:
    """Return the rivals of ``--with``, the one that needs nothing first."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [name for name in sources() if name != PLAIN]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--with: {', '.join(unknown)} is none of {', '.join(known)}")
    return [PLAIN, *dict.fromkeys(names)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare storage and restores, or say what was not possible."""
    paths = {
        "dir": "where to write: a folder on the disk to measure (default: $TMPDIR or here)",
        "env": "where the rivals are installed (default: kvtier-bench in the user's cache)",
    }
    values = {"with": "rivals that need an environment: lmcache, mooncake, or both with a comma"}
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths, values)
    wanted = asked_for(options.values["with"])
    torch.set_num_threads(1)
    bench = Bench("rivals", options, rivals=wanted)
    missing = storage(bench, wanted) if options.wants("storage") else []
    bench.save()
    if options.wants("strategies"):
        from _strategies import strategies  # transformers are not needed for storage

        strategies(bench)
    return bench.finish() or (MISSING if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
