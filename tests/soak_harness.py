"""Use a store for as long as told while its disk fails, and see that all stays flat.

    python tests/soak_harness.py --seconds 600 --seed 7 --json -

Threads and asyncio tasks put, restore, cancel, pin, prefetch, purge and flush on one store under
eviction pressure on both tiers; readers, one of them in a process of its own, follow it. Meanwhile
the disk fails, fills up, slows down, and bits flip at rest. After every round all is let go of, the
books are checked and what the process holds is sampled. What a thread does follows from the seed;
when it does it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import faulthandler
import gc
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from soak_users import ACTS, POOL, WAIT_S, User, pool_keys
from support import (
    HOST_SLOT_BYTES,
    SPEC,
    FaultyFileSystem,
    bring_back,
    disk_bytes,
    flip,
    segment_files,
    settle,
    tiny_budget,
)

import kvtier
from kvtier.tiers.throttle import LinkThrottle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREADS: Final = 3
TASKS: Final = 4
HANG_S_MAX: Final = 180.0
"""A round that does not end within so much more than it should prints all stacks and exits."""
REOPEN: Final = 0.25
"""How often a round ends with a restart."""
WARM_UP: Final = 1 / 3
"""The part of the samples in which caches, lanes and arenas may still grow."""
GROWTH_MAX: Final = {"rss_mib": 8.0, "index_rss_mib": 8.0, "descriptors": 1.0, "threads": 1.0}
"""By how much the trend of what is sampled may rise over all samples after the warm-up."""
LIVES: Final[tuple[dict[str, Any], ...]] = (
    {"host_bytes": 0, "blocks": 30},
    {"host_bytes": 6 * HOST_SLOT_BYTES, "blocks": 30},
    {"host_bytes": 24 * HOST_SLOT_BYTES, "blocks": 60},
    {"host_bytes": 6 * HOST_SLOT_BYTES, "blocks": 30, "rate": 8e6},
)
"""What a store is opened with: room for so many ``blocks`` on the SSD, and ``rate`` if its link is
throttled, in bytes a second."""
INDEX_BYTES: Final = 1 << 20
"""Room for an index that has lived: the last 4,096 changes take most of it."""
WEATHER: Final[dict[str, tuple[str, int | BaseException]]] = {
    "reads fail": ("read", errno.EIO),
    "writes fail": ("write", errno.EIO),
    "the disk is full": ("write", errno.ENOSPC),
    "syncs fail": ("sync", errno.EIO),
    "no descriptors": ("open_file", errno.EMFILE),
    "holes fail": ("punch", errno.EIO),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds between two rounds, with nothing under way."""

    seconds: float
    operations: int
    rss_mib: float
    index_rss_mib: float
    descriptors: int
    threads: int
    pins: int
    slots_used: int
    slots_ready: int
    ssd_blocks: int
    disk_kib: int
    limit_kib: int


# -- the soak


@dataclass(slots=True)
class Soak:
    """One course of lives and rounds; ``problems`` is what went wrong, in words."""

    folder: str
    seed: int
    seconds: float
    round_s: float
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    closed: list[tuple[int, int]] = field(default_factory=list)
    _begun: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Live until the time is over or something went wrong."""
        self._begun = time.monotonic()
        number = 0
        while not self._over():
            chance = random.Random(f"{self.seed}/{number}")  # noqa: S311 - what is done
            number = self._live(number, chance)
            self._sample_closed()
        self._judge()

    def _over(self) -> bool:
        return bool(self.problems) or time.monotonic() - self._begun >= self.seconds

    def count(self, what: str, number: int = 1) -> None:
        """Count what was done, from any thread."""
        with self._lock:
            self.counts[what] += number

    def blame(self, what: str) -> None:
        """Note what went wrong, from any thread."""
        with self._lock:
            self.problems.append(what)

    def _live(self, number: int, chance: random.Random) -> int:
        """Open the store, go through some rounds and close it; returns the next round's number."""
        settings = dict(chance.choice(LIVES))
        settings |= tiny_budget(settings.pop("blocks"))
        settings["ssd_bytes"] += INDEX_BYTES
        rate = settings.pop("rate", None)
        links = {"ssd": LinkThrottle(rate), "host": LinkThrottle(10 * rate)} if rate else None
        fs = FaultyFileSystem()
        path = os.path.join(self.folder, "store")
        with kvtier.open(path, SPEC, fs=fs, links=links, slot_wait_s_max=5.0, **settings) as store:
            follower = _Follower(path, self.seed + number)
            with kvtier.open_reader(path, SPEC, host_bytes=4 * HOST_SLOT_BYTES) as reader:
                while True:
                    faulthandler.dump_traceback_later(self.round_s + HANG_S_MAX, exit=True)
                    self._round(store, reader, fs, number)
                    number += 1
                    if self._over() or chance.random() < REOPEN:
                        break
            self.problems += follower.end(self.count)
        faulthandler.cancel_dump_traceback_later()
        self.count("lives")
        return number

    def _round(
        self, store: kvtier.Store, reader: kvtier.StoreReader, fs: FaultyFileSystem, number: int
    ) -> None:
        """Let everybody use the store for a while; then see what is left of that."""
        stop = threading.Event()

        def chance(who: str) -> random.Random:
            return random.Random(f"{self.seed}/{number}/{who}")  # noqa: S311 - what is done

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - reported with the seed
                self.blame(f"round {number}: {traceback.format_exc()}")
                stop.set()

        users = [User(store, chance(f"thread{n}"), self.count) for n in range(THREADS)]
        tasks = [User(store, chance(f"task{n}"), self.count) for n in range(TASKS)]
        works = [
            *(partial(self._use, user, stop) for user in users),
            partial(self._follow, reader, chance("reader"), stop),
            lambda: asyncio.run(self._await(tasks, stop)),
        ]
        with ThreadPoolExecutor(len(works)) as pool:
            for work in works:
                pool.submit(guarded, work)
            guarded(lambda: self._weather(store, fs, chance("weather"), stop))
            stop.set()
        guarded(lambda: self._rest(store, reader))

    def _use(self, user: User, stop: threading.Event) -> None:
        while not stop.is_set():
            user.turn()

    def _follow(
        self, reader: kvtier.StoreReader, chance: random.Random, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            done = bring_back(reader, pool_keys(chance.randrange(POOL)), timeout=WAIT_S)
            self.count("blocks loaded by readers", done.loaded)

    async def _await(self, users: Sequence[User], stop: threading.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.blame(f"asyncio: {context}")
        )
        while not stop.is_set():
            await asyncio.gather(*(user.async_turn() for user in users))

    def _weather(
        self,
        store: kvtier.Store,
        fs: FaultyFileSystem,
        chance: random.Random,
        stop: threading.Event,
    ) -> None:
        """Let the disk be as it is for a while, then otherwise, until the round is over."""
        end = time.monotonic() + self.round_s
        while (left := end - time.monotonic()) > 0 and not stop.is_set():
            what = chance.choice(["calm", "calm", "slow", "bits flip", "index dies", *WEATHER])
            if what in WEATHER:
                operation, error = WEATHER[what]
                times = chance.choice([1, 3, 1 << 30])
                fs.fail(operation, error, nth=chance.randrange(1, 4), times=times, name=".seg")
            elif what == "slow":
                fs.delay(chance.choice(["read", "write", "sync"]), 0.01)
            elif what == "bits flip":
                files = segment_files(store.path)
                if files:
                    path = chance.choice(files)
                    flip(path, int(chance.random() * os.path.getsize(path)), 1)
            elif what == "index dies":
                store._ssd._ledger._index._link._process.kill()
            self.count(what)
            stop.wait(min(left, chance.choice([0.05, 0.2, 0.4])))
            fs.heal()

    def _rest(self, store: kvtier.Store, reader: kvtier.StoreReader) -> None:
        """Let everything end; then books balance, nothing is held, and the budget is kept."""
        store.flush(WAIT_S)
        for view in (store, reader):
            settle(view)
            assert (problems := view.check()) == [], problems
        sample = self._sample(store)
        self.samples.append(sample)
        assert sample.pins == 0, f"{sample.pins} pins are left"
        assert sample.slots_used == sample.slots_ready, f"host slots are left: {sample}"
        assert sample.disk_kib <= sample.limit_kib, f"the budget is exceeded: {sample}"

    def _sample(self, store: kvtier.Store) -> Sample:
        gc.collect()
        stats = store.stats()
        index = store._ssd._ledger._index._link._process.pid
        return Sample(
            seconds=round(time.monotonic() - self._begun, 1),
            operations=sum(self.counts[act] for act in ACTS),
            rss_mib=rss_mib("self"),
            index_rss_mib=rss_mib(index),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            pins=stats["pins"],
            slots_used=stats["tiers"]["host"]["blocks"],
            slots_ready=stats["tiers"]["host"]["ready"],
            ssd_blocks=stats["tiers"]["ssd"]["blocks"],
            disk_kib=disk_bytes(store.path) >> 10,
            limit_kib=store.config.ssd_bytes >> 10,
        )

    def _sample_closed(self) -> None:
        """Assert that a closed store left no thread and no descriptor, whatever happened to it."""
        deadline = time.monotonic() + WAIT_S

        def held() -> tuple[int, int]:
            gc.collect()
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        # The SSD's lane is told to end, not waited for: a write that hangs must not hang a close.
        while (now := held()) != (self.closed or [now])[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        self.closed.append(now)
        if now != self.closed[0]:
            names = [thread.name for thread in threading.enumerate()]
            self.blame(f"closed: {self.closed[0]} threads and descriptors, now {now}; {names}")

    def _judge(self) -> None:
        for name, limit in GROWTH_MAX.items():
            if (grown := growth(self.samples, name)) > limit:
                self.blame(f"{name} rises: {grown:+.2f} after the warm-up, {limit} allowed")


def growth(samples: Sequence[Sample], name: str) -> float:
    """Return by how much the trend (the median of all slopes) of a column rises after warm-up."""
    late = samples[int(len(samples) * WARM_UP) :]
    points = [(sample.seconds, getattr(sample, name)) for sample in late]
    slopes = [
        (y - x) / (b - a) for i, (a, x) in enumerate(points) for b, y in points[i + 1 :] if b > a
    ]
    span = points[-1][0] - points[0][0] if points else 0.0
    return statistics.median(slopes) * span if slopes else 0.0


def rss_mib(process: int | str) -> float:
    """Return the memory that a process has, in MiB; 0 if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/statm") as file:
        return round(int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20), 1)
    return 0.0


# -- a reader in a process of its own


class _Follower:
    """A process that restores from the store until it is told to end, or is killed."""

    def __init__(self, path: str, seed: int) -> None:
        self._killed = seed % 3 == 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--follow", path, "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, count: Callable[[str, int], None]) -> list[str]:
        """End it; returns its problems."""
        if self._killed:
            self._process.kill()
            self._process.communicate()
            count("readers killed", 1)
            return []
        said, _ = self._process.communicate("end\n", timeout=WAIT_S)
        if self._process.returncode:
            return [f"a reader's process: {said}"]
        count("blocks loaded by readers", int(said.split()[-1]))
        return []


def follow(path: str, seed: int) -> int:
    """Restore what a store of another process has until the standard input says so."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    numbers = random.Random(seed)  # noqa: S311 - which prompts
    loaded = 0
    with kvtier.open_reader(path, SPEC, host_bytes=4 * HOST_SLOT_BYTES) as reader:
        while not ended.is_set():
            loaded += bring_back(reader, pool_keys(numbers.randrange(POOL)), timeout=WAIT_S).loaded
    sys.stdout.write(f"{loaded}\n")
    return 0


# -- the command


class _Errors(logging.Handler):
    """Turns what is logged as an error into a problem."""

    def __init__(self, blame: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._blame = blame

    def emit(self, record: logging.LogRecord) -> None:
        self._blame(f"logged by {record.name}: {self.format(record)}")


def listen(soak: Soak) -> None:
    """Hear what is usually only printed: errors in threads, callbacks, finalisers; warnings."""
    warnings.simplefilter("error")
    logging.getLogger("kvtier").setLevel(logging.ERROR)
    logging.getLogger().addHandler(_Errors(soak.blame))
    threading.excepthook = lambda args: soak.blame(f"in {args.thread}: {args.exc_value!r}")
    sys.unraisablehook = lambda args: soak.blame(f"{args.err_msg}: {args.exc_value!r}")


def show_progress(soak: Soak, done: threading.Event) -> None:
    """Draw a bar on a terminal."""
    while sys.stderr.isatty() and not done.wait(1.0):
        share = min((time.monotonic() - soak._begun) / soak.seconds, 1.0)
        bar = "#" * int(40 * share)
        sys.stderr.write(f"\r[{bar:40}] {share:4.0%}, {len(soak.samples)} rounds ")
        sys.stderr.flush()


def table(samples: Sequence[Sample], rows_max: int = 40) -> str:
    """Return the samples as text, thinned out to so many rows."""
    names = list(Sample.__dataclass_fields__)
    every = max(1, -(-len(samples) // rows_max))
    lines = [" ".join(f"{name:>13}" for name in names)]
    lines += [
        " ".join(f"{value:>13}" for value in asdict(sample).values()) for sample in samples[::every]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; exit status 1 if anything was wrong, lost or left behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--round", type=float, default=4.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--dir", default=None, help="where the store is made (default: TMPDIR)")
    parser.add_argument("--json", default="", help="a file for the result, - for stdout")
    parser.add_argument("--follow", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.follow:
        return follow(options.follow, options.seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-", dir=options.dir) as folder:
        soak = Soak(folder, options.seed, options.seconds, options.round)
        listen(soak)
        done = threading.Event()
        threading.Thread(target=show_progress, args=(soak, done), daemon=True).start()
        soak.run()
        done.set()
    grown = {name: round(growth(soak.samples, name), 2) for name in GROWTH_MAX}
    sys.stderr.write(f"\n{table(soak.samples)}\nafter warm-up: {grown}\n{dict(soak.counts)}\n")
    for problem in soak.problems:
        sys.stderr.write(f"seed {soak.seed}: {problem}\n")
    report = {
        "seed": soak.seed, "seconds": soak.seconds, **soak.counts, "growth": grown,
        "samples": [asdict(sample) for sample in soak.samples], "problems": soak.problems,
    }  # fmt: skip
    if options.json == "-":
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    elif options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(report, indent=1) + "\n")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
