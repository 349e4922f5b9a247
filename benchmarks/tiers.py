"""What the tiers cost: SSD against the raw disk, host memory against memcpy, a million blocks.

Everything goes through the store's public calls, checksums on, and every byte read is compared.

* A write is ``put`` of a whole prompt from an engine's tensors and then ``flush``: the copy into
  host memory, the checksums, the syncs and the index commits are part of it. Into fresh slots of a
  growing store, and into a store that is full, where each write has to evict as much.
* A read is ``prefetch`` of a whole prompt from the SSD into host memory. It is cold: reads before
  it pushed the prompt out of host memory, direct I/O bypasses the page cache, and where I/O is
  buffered the cache is dropped first. Host memory itself is warm, as in an engine that runs.
* "raw" is the same with nothing but the disk (see ``_disk``): same slots, record size, segment
  files, threads, depth and buffers, one fdatasync for each file at the end.
* The CPU cost of a read is that of this process and of the store's child, the worst of the sizes
  from 3 MiB on. Writes beside reads evict all the time; the reads' prompts are pinned.
* Host ``put`` ends when the engine's memory may be reused; the store's SSD has no room, so that
  nothing else is written meanwhile. Host ``get`` is a restore into an engine's tensors.
* ``gather`` and ``scatter`` are copies between an engine's tensors and a block, without a store,
  next to copies of each block in one piece.

``--quick`` moves a quarter of the bytes. ``--dir`` says which disk is measured.
"""

from __future__ import annotations

import statistics
import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import torch
from _blocks import COLD_PROMPTS, MIB, WAIT_S_MAX, ColdReads, Subject, cold_reads, counter, io_mode
from _disk import (
    RawDisk,
    file_system,
    need_free,
    process_cpu_s,
    process_write_bytes,
    work_folder,
)
from _harness import (
    NO_BAR,
    Bar,
    Bench,
    Ratio,
    Trial,
    interleave,
    parse,
)
from _tiers_memory import host, million, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvtier.store import Store

PARTS: Final = ("write", "full", "read", "pieces", "mixed", "host", "lookup", "open")
SIZES: Final = (1, 3, 14, 32)
MIDDLE: Final = 14
"""The block size in MiB of what is measured for one size only."""
SMALL_LOW: Final = 0.8
LOW: Final = 0.9
CPU_SIZES_MIN: Final = 3
MIXED_PROMPTS: Final = 4
"""Prompts that are read in turn beside writes."""
MIXED_HOST_PROMPTS: Final = 2
"""Host memory there: what is read and what is written do not wait for each other's slots."""
WRITER_PUTS_MAX: Final = 2
"""Puts of the writer beside reads that are under way at once."""


def low(mib: int) -> Bar:
    """Return the bar of a ratio over raw."""
    return Bar(low=SMALL_LOW if mib == 1 else LOW)


# -- the SSD


def add_vs_raw(bench: Bench, name: str, mib: int, trials: Mapping[str, Sequence[Trial]]) -> None:
    """Add raw / store over one size."""
    same = trials["store"], trials["again"]
    bench.add(
        Ratio.of_pairs(f"{name}_{mib}MiB", trials["raw"], trials["store"], same, low(mib)),
    )


def vs_raw(
    bench: Bench, what: str, subject: Subject, raw: Callable[[], Trial], run: Callable[[], Trial]
) -> dict[str, list[Trial]]:
    """Interleave raw passes with the store's."""
    ways = {"raw": raw, "store": run, "again": run}
    with bench.progress(f"{what}, {subject.mib} MiB", 3 * bench.options.pairs) as tick:
        trials = interleave(ways, bench.options.pairs, tick)
    gb = subject.bytes / 1e9
    rates = {way: gb / statistics.median(t.seconds for t in trials[way]) for way in ways}
    bench.record(what, trials, mib=subject.mib, blocks=subject.blocks, gb_per_s=rates)
    return trials


def plain(trial: Trial) -> Trial:
    """Return a trial without what cannot be written as JSON."""
    return Trial(trial.seconds, trial.held, {k: v for k, v in trial.detail.items() if k != "keys"})


def write(bench: Bench, folder: Path, subject: Subject) -> None:
    """Write into slots that were never used."""
    passes = 2 * bench.options.pairs + 2
    with ExitStack() as stack:
        store = stack.enter_context(subject.open(folder / "write", prompts=passes))
        raw = stack.enter_context(RawDisk(made(folder / "raw"), subject.shape(store, writes=True)))
        subject.put(store)  # host memory is in place from here on
        raw.fresh()
        trials = vs_raw(
            bench,
            "write into fresh slots",
            subject,
            lambda: Trial(raw.fresh()),
            lambda: plain(subject.put(store)),
        )
        bench.settings["io"] = io_mode(store)
    add_vs_raw(bench, "ssd_write_vs_raw", subject.mib, trials)


def full(bench: Bench, folder: Path, subject: Subject) -> None:
    """Write into a store that is full: as much is evicted, and its slots are used again."""

    def put() -> Trial:
        evicted = counter(store, "evicted_blocks_ssd")
        before = process_write_bytes()
        trial = plain(subject.put(store))
        after = process_write_bytes()
        assert counter(store, "evicted_blocks_ssd") > evicted, "the store is not full"
        if before is not None and after is not None:
            trial.detail["written_bytes"] = after - before
        return trial

    with ExitStack() as stack:
        store = stack.enter_context(subject.open(folder / "full", prompts=2))
        raw = stack.enter_context(RawDisk(made(folder / "raw"), subject.shape(store, writes=True)))
        subject.verify(store, subject.fill(store).detail["keys"])
        raw.fresh()
        raw.overwrite()
        trials = vs_raw(
            bench, "write into a full store", subject, lambda: Trial(raw.overwrite()), put
        )
    add_vs_raw(bench, "ssd_write_full_vs_raw", subject.mib, trials)
    written = [t.detail["written_bytes"] for t in trials["store"] if "written_bytes" in t.detail]
    if written and (subject.mib == MIDDLE or bench.options.smoke):
        amplification = [each / subject.bytes for each in written]
        bench.add(Ratio.of_series("write_amplification", amplification, NO_BAR))


def read(bench: Bench, folder: Path, subject: Subject) -> None:
    """Read cold prompts."""
    with ExitStack() as stack:
        reads, store = stack.enter_context(cold_reads(subject, folder))
        raw = stack.enter_context(RawDisk(made(folder / "raw"), subject.shape(store, writes=False)))
        raw.fresh()
        raw.read()

        def raw_read() -> Trial:
            cpu_s = process_cpu_s()
            seconds = raw.read()
            return Trial(seconds, detail={"cpu_s": process_cpu_s() - cpu_s})

        trials = vs_raw(bench, "read", subject, raw_read, reads.trial)
        bench.settings["io"] = io_mode(store)
    add_vs_raw(bench, "ssd_read_vs_raw", subject.mib, trials)


def add_read_cost(bench: Bench) -> None:
    """Add the CPU cost of reads: that of the size where it is highest."""
    worst: Ratio | None = None
    for case in bench.results:
        if case["case"] == "read" and (case["mib"] >= CPU_SIZES_MIN or bench.options.smoke):
            gib = case["mib"] * case["blocks"] / 1024
            each = [t["cpu_s"] / gib for way in ("store", "again") for t in case["trials"][way]]
            case["core_s_per_gib"] = statistics.median(each)
            cost = Ratio.of_series("ssd_read_core_s_per_gib", each, Bar(high=0.2))
            if worst is None or cost.value > worst.value:
                worst = cost
    if worst is not None:
        bench.add(worst)


@contextmanager
def writing(store: Store, subject: Subject) -> Iterator[None]:
    """Put new prompts all the time, two under way; what is written is durable as always."""
    stop, begun = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        under_way = [store.put(subject.prompt(), subject.source) for _ in range(WRITER_PUTS_MAX)]
        try:
            while not stop.is_set():
                under_way.pop(0).result(WAIT_S_MAX)
                begun.set()
                under_way.append(store.put(subject.prompt(), subject.source))
            for transfer in under_way:
                transfer.result(WAIT_S_MAX)
        except BaseException as error:  # noqa: BLE001 - raised again on the measuring thread
            failures.append(error)
            begun.set()

    thread = threading.Thread(target=work, name="writer")
    thread.start()
    try:
        begun.wait(WAIT_S_MAX)
        yield
    finally:
        stop.set()
        thread.join(WAIT_S_MAX)
    if failures:
        raise failures[0]


def mixed(bench: Bench, folder: Path, subject: Subject) -> None:
    """Read cold prompts with and without writes beside them."""
    writer = Subject(subject.mib, max(1, subject.blocks // 4))
    with ExitStack() as stack:
        store = stack.enter_context(
            subject.open(folder / "mixed", prompts=MIXED_PROMPTS + 2, host=MIXED_HOST_PROMPTS)
        )
        prompts = [subject.put(store).detail["keys"] for _ in range(MIXED_PROMPTS)]
        for _ in range(MIXED_HOST_PROMPTS):  # these push the others out of host memory
            subject.put(store)
        for keys in prompts:
            stack.enter_context(store.pin(keys))
        subject.fill(store)
        reads = ColdReads(subject, store, prompts)

        def beside() -> Trial:
            with writing(store, writer):
                return reads.trial()

        for run in (reads.trial, beside):
            run()
        ways = {"alone": reads.trial, "beside": beside, "again": reads.trial}
        with bench.progress("reads beside writes", 3 * bench.options.pairs) as tick:
            trials = interleave(ways, bench.options.pairs, tick)
    same = trials["alone"], trials["again"]
    bar = Bar(low=0.6)
    name = "ssd_read_while_writing"
    bench.add(Ratio.of_pairs(name, trials["alone"], trials["beside"], same, bar))
    bench.record("mixed", trials, mib=subject.mib, blocks=subject.blocks)


# -- all of it


def made(folder: Path) -> Path:
    """Return a folder that exists."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cases(bench: Bench) -> list[tuple[int, Callable[[Bench, Path, Subject], None]]]:
    """Return what is measured over which block size, in MiB."""
    options = bench.options
    sizes = (1,) if options.smoke else SIZES
    middle = 1 if options.smoke else MIDDLE
    by_size = {"write": write, "full": full, "read": read, "pieces": pieces}
    once = {"mixed": mixed, "host": host}
    return [
        *((mib, run) for mib in sizes for part, run in by_size.items() if options.wants(part)),
        *((middle, run) for part, run in once.items() if options.wants(part)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    paths = {"dir": "where to write: a folder on the disk to measure (default: $TMPDIR or here)"}
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths)
    torch.set_num_threads(1)
    pass_bytes = 8 * MIB if options.smoke else 256 * MIB if options.quick else 1024 * MIB
    bench = Bench("tiers", options, pass_bytes=pass_bytes)
    with work_folder(options.paths["dir"], bench.console) as folder:
        bench.settings["file_system"] = file_system(folder)
        wanted = cases(bench)
        if wanted:
            need_free(folder, (2 * options.pairs + 4) * (pass_bytes + 64 * MIB))
        subject = None
        for number, (mib, run) in enumerate(wanted):
            if subject is None or subject.mib != mib:
                subject = Subject(mib, max(COLD_PROMPTS * 2, pass_bytes // (mib * MIB)))
            with work_folder(str(folder / f"case-{number}"), bench.console) as inside:
                run(bench, inside, subject)
        add_read_cost(bench)
        if options.wants("lookup") or options.wants("open"):
            million(bench, folder)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
