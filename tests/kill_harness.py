"""Kill a process that uses a store, at random moments, and see that the next one finds it sound.

    python tests/kill_harness.py --kills 1000 --json -

A warm parent, which opens no store itself, forks one life after the other. A life opens the store,
checks what the lives before it made durable, then puts, restores and purges until it is killed with
SIGKILL: while it opens, works or closes. Half of the stores have room for everything, so that a
block that is missing was lost; in the other half blocks are evicted all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from support import SPEC, bring_back, disk_bytes, expected, filled_slots, prompt, tiny_budget

import kvtier
from kvtier import Tier
from kvtier.catalog import CopyState
from kvtier.tiers.base import BlockId, ReadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LIVES_PER_STORE: Final = 40
LOST_INDEX_EVERY: Final = 9
"""After every so many kills of a roomy store its index is deleted too."""
HANG_S_MAX: Final = 60.0
"""A life that says nothing for so long has hung: a safety net, never a measurement."""
LOCKED_S_MAX: Final = 20.0
"""How long a life waits for the one before it to let go of the lock."""
RESTORED_PROMPTS: Final = 3
"""Known prompts that each life restores before it goes on; a store's last one reads all."""
TENANTS: Final = ("a", "b", "c", "d")
MOMENTS: Final = {"open": 0.15, "work": 0.65, "close": 0.2}
DELAY_S_MAX: Final = {"open": 0.08, "work": 0.1, "close": 0.02}
BUDGETS: Final[dict[str, dict[str, Any]]] = {
    "roomy": {"ssd_bytes": 1 << 30, "segment_bytes_max": 1 << 20},
    "tight": tiny_budget(40, per_segment=6),
}


@dataclass(slots=True)
class Prompt:
    """A prompt that some life put. ``state`` is maybe, durable or purged."""

    keys: kvtier.BlockKeys
    tenant: str
    state: str = "maybe"


@dataclass(slots=True)
class Book:
    """What the parent knows of one store; a life inherits it with the fork."""

    prompts: dict[int, Prompt] = field(default_factory=dict)

    def learn(self, words: Sequence[str]) -> None:
        """Take over what a life said."""
        match words:
            case ["put", seed, blocks, tenant]:
                if int(seed) not in self.prompts:
                    tokens = prompt(int(blocks), int(seed))
                    keys = kvtier.BlockKeys.of(SPEC, tokens, tenant)
                    self.prompts[int(seed)] = Prompt(keys, tenant)
                elif self.prompts[int(seed)].state == "purged":
                    self.prompts[int(seed)].state = "maybe"
            case ["flushed", seed]:
                self.prompts[int(seed)].state = "durable"
            case ["purging", tenant]:
                self._move(tenant, "maybe")
            case ["purged", tenant]:
                self._move(tenant, "purged")

    def _move(self, tenant: str, state: str) -> None:
        for each in self.prompts.values():
            if each.tenant == tenant and each.state != "purged":
                each.state = state


@dataclass(slots=True)
class Life:
    """One child process: what it does with the store until it is killed."""

    path: str
    budget: str
    book: Book
    number: int
    chance: random.Random
    say: Callable[[str], None]
    seeds: int = 0

    def run(self, moment: str) -> None:
        """Open, verify, work; close only if that is when the kill comes."""
        store = open_patiently(self.path, self.budget)
        self.say(f"verified {verify(store, self.book, self.budget, self.chance)}")
        turns = self.chance.randrange(1, 6) if moment == "close" else 1 << 30
        for _ in range(turns):
            self._turn(store)
        self.say("closing")
        store.close()

    def finish(self) -> None:
        """Verify once more, read every block that is stored, and close."""
        with open_patiently(self.path, self.budget) as store:
            restored = verify(store, self.book, self.budget, self.chance)
            restored += read_all(store, self.book, self.budget)
        used = disk_bytes(self.path)
        assert used <= BUDGETS[self.budget]["ssd_bytes"], f"{used} bytes on disk when closed"
        self.say(f"verified {restored}")

    def _turn(self, store: kvtier.Store) -> None:
        roll = self.chance.random()
        known = sorted(self.book.prompts)
        if roll < 0.6 or not known:
            new = [1000 * self.number + self.seeds + i for i in range(self.chance.randrange(1, 4))]
            self.seeds += len(new)
            self._put(store, new)
        elif roll < 0.7:
            self._put(store, self.chance.sample(known, min(3, len(known))))
        elif roll < 0.9:
            bring_back(store, self.book.prompts[self.chance.choice(known)].keys)
        else:
            tenant = self.chance.choice(TENANTS)
            self._tell(f"purging {tenant}")
            store.purge(tenant=tenant)
            self._tell(f"purged {tenant}")

    def _put(self, store: kvtier.Store, seeds: Iterable[int]) -> None:
        transfers = {}
        for seed in seeds:
            known = self.book.prompts.get(seed)
            blocks = len(known.keys) if known else self.chance.randrange(1, 7)
            tenant = known.tenant if known else self.chance.choice(TENANTS)
            self._tell(f"put {seed} {blocks} {tenant}")
            keys = self.book.prompts[seed].keys
            transfers[seed] = store.put(keys, filled_slots(keys))
        store.flush()
        for seed, transfer in transfers.items():
            result = transfer.result(HANG_S_MAX)
            if self.budget == "roomy":
                assert result.dropped == 0, f"{result} with room for all; {store.stats()}"
            if result.dropped == 0:
                self._tell(f"flushed {seed}")

    def _tell(self, line: str) -> None:
        self.book.learn(line.split())
        self.say(line)


def open_patiently(path: str, budget: str) -> kvtier.Store:
    """Open the store; what is left of a killed life may hold the lock for a moment."""
    deadline = time.monotonic() + LOCKED_S_MAX
    while True:
        try:
            return kvtier.open(path, SPEC, host_bytes=0, **BUDGETS[budget])
        except kvtier.StoreLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def verify(store: kvtier.Store, book: Book, budget: str, chance: random.Random) -> int:
    """Assert what must hold after a kill; returns how many blocks were restored."""
    assert (problems := store.check()) == [], problems
    used, limit = disk_bytes(store.path), BUDGETS[budget]["ssd_bytes"]
    assert used <= limit, f"{used} bytes on disk, {limit} allowed"
    for seed, each in book.prompts.items():
        tiers = store.lookup(each.keys).tiers
        if each.state == "purged":
            assert set(tiers) == {None}, f"prompt {seed} was purged: {tiers}"
        elif each.state == "durable" and budget == "roomy":
            assert None not in tiers, f"prompt {seed} was durable: {tiers}"
    known = sorted(book.prompts)
    chosen = {*known[-1:], *chance.sample(known, min(RESTORED_PROMPTS, len(known)))}
    restored = 0
    for seed in sorted(chosen):
        each = book.prompts[seed]
        loaded = bring_back(store, each.keys).loaded
        if each.state == "durable" and budget == "roomy":
            assert loaded == len(each.keys), f"prompt {seed}: {loaded} of {len(each.keys)} loaded"
        restored += loaded
    return restored


def read_all(store: kvtier.Store, book: Book, budget: str) -> int:
    """Assert that every block on the SSD has its bytes; returns how many there are."""
    count = 0
    room = bytearray(SPEC.block_layout.block_bytes)
    for seed, each in book.prompts.items():
        for block in range(len(each.keys)):
            block_id = BlockId(each.keys.namespace, each.keys[block])
            row = store._catalog.find(block_id)
            if row is None or store._catalog.state(row, Tier.SSD) is not CopyState.READY:
                continue
            where = store._catalog.location(row, Tier.SSD)
            (result,) = store._ssd.read([block_id], [where], [memoryview(room)])
            if each.state == "durable" and budget == "roomy":
                assert result is ReadResult.OK, f"prompt {seed}, block {block}: {result}"
            if result is ReadResult.OK:
                assert room == expected(each.keys, block), f"prompt {seed}, block {block} is WRONG"
            count += 1
    return count


# -- the parent


class Ear:
    """The reading end of a life's pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""
        self._open = True

    def wait_for(self, word: str) -> bool:
        """Wait until the life says ``word``, or ends; False if it says nothing for too long."""
        while self._open and f"\n{word}" not in "\n" + self._text.decode():
            if not self._listen(HANG_S_MAX):
                return False
        return True

    def rest(self) -> list[list[str]]:
        """Return all that was said, whole lines only; the life is over."""
        while self._open:
            self._listen(HANG_S_MAX)
        os.close(self._fd)
        return [line.decode().split(" ") for line in self._text.split(b"\n")[:-1]]

    def _listen(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if ready:
            heard = os.read(self._fd, 1 << 16)
            self._text += heard
            self._open = bool(heard)
        return bool(ready)


class Harness:
    """Forks lives and kills them; ``problems`` is what went wrong, in words."""

    def __init__(self, folder: str, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)  # noqa: S311 - the moment of a kill
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, kills: int) -> None:
        """Kill so many lives, on one store after the other."""
        while self.counts["kills"] < kills and not self.problems:
            budget = "roomy" if self.counts["stores"] % 2 == 0 else "tight"
            path = os.path.join(self._folder, f"store{self.counts['stores']}")
            self.counts["stores"] += 1
            book = Book()
            for _ in range(min(LIVES_PER_STORE, kills - self.counts["kills"])):
                self._kill_one(path, budget, book)
                if self.problems:
                    return
            self._live(path, budget, book, "finish")
            shutil.rmtree(path)

    def _kill_one(self, path: str, budget: str, book: Book) -> None:
        moment = self._chance.choices([*MOMENTS], [*MOMENTS.values()])[0]
        self._live(path, budget, book, moment)
        self.counts["kills"] += 1
        self.counts[f"kills in {moment}"] += 1
        if budget == "roomy" and self.counts["kills"] % LOST_INDEX_EVERY == 0:
            self._lose_index(path)

    def _live(self, path: str, budget: str, book: Book, moment: str) -> None:
        heard, said = os.pipe()
        number = self.counts["lives"] = self.counts["lives"] + 1
        seed = self._chance.randrange(1 << 30)
        pid = os.fork()
        if pid == 0:
            os.close(heard)
            _child(said, moment, path, budget, book, number, seed)
        os.close(said)
        ear = Ear(heard)
        finishing = moment == "finish"
        hung = moment != "open" and not ear.wait_for("closing" if moment == "close" else "verified")
        if finishing and not hung:
            self.counts["finished"] += 1
        else:
            time.sleep(self._chance.uniform(0, DELAY_S_MAX.get(moment, 0.0)))
            if hung:
                os.kill(pid, signal.SIGUSR1)  # its threads' stacks
                time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        lines = ear.rest()
        for words in lines:
            self._learn(words, book)
        where = f"life {number} ({budget}, {moment}) in {path}"
        if hung:
            self.problems.append(f"{where}: hung after {lines[-1:]}")
        if finishing and status != 0:
            self.problems.append(f"{where}: ended with {status}")

    def _learn(self, words: list[str], book: Book) -> None:
        self.counts[words[0]] += 1
        if words[0] == "verified":
            self.counts["blocks restored"] += int(words[1])
        elif words[0] == "failed":
            self.problems.append(json.loads(" ".join(words[1:])))
        else:
            book.learn(words)

    def _lose_index(self, path: str) -> None:
        """Delete the index, once nobody is left who writes to it."""
        with contextlib.suppress(FileNotFoundError), open(f"{path}/LOCK", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.unlink(f"{path}/index/data.mdb")
            self.counts["indexes lost"] += 1


def _child(
    said: int, moment: str, path: str, budget: str, book: Book, number: int, seed: int
) -> None:
    """Live; never returns."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def say(line: str) -> None:
        os.write(said, line.encode() + b"\n")

    life = Life(path, budget, book, number, random.Random(seed), say)  # noqa: S311
    try:
        if moment == "finish":
            life.finish()
        else:
            life.run(moment)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent reports it
        say("failed " + json.dumps(f"life {number} ({budget}, {moment}): {traceback.format_exc()}"))
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness; exit status 1 if anything was lost, wrong or left behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default=None, help="where the stores are made (default: TMPDIR)")
    parser.add_argument("--json", default="-", help="a file for the result, - for stdout")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvtier-kill-", dir=options.dir) as folder:
        harness = Harness(folder, options.seed)
        harness.run(options.kills)
    result = json.dumps({**harness.counts, "problems": harness.problems}, indent=1)
    if options.json == "-":
        sys.stdout.write(result + "\n")
    else:
        with open(options.json, "w") as file:
            file.write(result + "\n")
    return 1 if harness.problems else 0


if __name__ == "__main__":
    sys.exit(main())
