"""Kill inspectors at any moment beside a writer, and look what they leave behind: nothing.

A writer puts and evicts all the time. Inspectors are started one after the other, each with another
command, and killed with SIGKILL after a random time, together with the process that reads the index
for them or without it. At the end no process is left, no file changed but by the writer, no slot of
the index's reader table is taken, and the index is no larger than its content needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lmdb
from support import SPEC, prompt, put

import kvtier

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = ("check", "info", "ls", "tree", "du", "stats")
LIFE_S_MAX: Final = 1.0
"""An inspector lives for less; it takes about as long to be done by itself."""
GONE_S_MAX: Final = 30.0
"""How long the keeper of a killed inspector may take to notice."""
WARM_PROMPTS: Final = 400
"""Prompts of 8 blocks after which the store is full and the index's journal is trimmed."""


def keepers(path: Path) -> list[int]:
    """Return the processes that read or write the index in a store."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if str(path / "index").encode() in words:
                found.append(int(each.parent.name))
    return found


def write_until(done: threading.Event, store: kvtier.Store) -> None:
    """Put prompt after prompt into a store that is full."""
    seed = 0
    while not done.is_set():
        put(store, store.keys(prompt(8, seed)))
        seed += 1


def kill_one(path: Path, command: str, life_s: float) -> bool:
    """Start an inspector and kill it; False if it was done before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier_inspect.cli", command, str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(life_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def run(folder: Path, inspectors: int, seed: int) -> dict[str, Any]:
    """Run it all; returns what was seen."""
    path = folder / "store"
    chance = random.Random(seed)  # noqa: S311 - moments
    done = threading.Event()
    with kvtier.open(path, SPEC, host_bytes="1MiB", ssd_bytes="2MiB") as store:
        for number in range(WARM_PROMPTS):
            put(store, store.keys(prompt(8, 10**6 + number)))
        store.flush()
        before = index_bytes(path)
        writer = threading.Thread(target=write_until, args=(done, store))
        writer.start()
        killed = 0
        for number in range(inspectors):
            life_s = chance.random() * LIFE_S_MAX
            killed += kill_one(path, COMMANDS[number % len(COMMANDS)], life_s)
        deadline = time.monotonic() + GONE_S_MAX
        while len(left := keepers(path)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        done.set()
        writer.join()
        store.flush()
        after = index_bytes(path)
        names = sorted(os.listdir(path)) + sorted(os.listdir(path / "index"))
        names = [name for name in names if name != "live.msgpack"]  # the writer's, for as long
        problems = store.check()
    return {
        "inspectors": inspectors,
        "killed": killed,
        "keepers_left": len(left) - 1,
        "readers_left": readers_of(path),
        "index_bytes_before": before,
        "index_bytes_after": after,
        "names": names,
        "problems": problems,
    }


def index_bytes(path: Path) -> int:
    """Return what the index occupies."""
    return (path / "index" / "data.mdb").stat().st_blocks * 512


def readers_of(path: Path) -> int:
    """Return how many slots of the closed index's reader table are taken."""
    with lmdb.open(str(path / "index"), readonly=True, max_dbs=2) as environment:
        return len(environment.readers().splitlines()) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inspectors", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    report = run(given.dir, given.inspectors, given.seed)
    given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
