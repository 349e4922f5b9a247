"""Flip bytes under an open store and see that it answers with right bytes, or with a miss.

    python tests/flip_harness.py --flips 10000 --reopens 300 --json -

Every flip goes into a segment file or into the index's file while the store is open; then what it
hit is restored. Where a flip lies in a stored record, the record must be a miss; where it lies in a
slot's padding or in nothing at all, it must still be loaded. In between the store is reopened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from support import SPEC, WAIT_S, bring_back, disk_bytes, flip, prompt_keys, put

import kvtier
from kvtier import Tier
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.scan import record_offset, segment_name
from kvtier.tiers.segment import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS: Final = 12
BLOCKS: Final = 4
INDEX_SHARE: Final = 0.3
"""How many of the flips go into the index."""
INDEX_PAGE_HEADER_BYTES: Final = 32
"""Every other flip in the index goes here: it hits a pointer more often than a value."""
BURST_MAX: Final = 4
"""Bytes that one flip changes at most, next to each other."""
RECORD_BYTES: Final = PAGE_BYTES + SPEC.block_layout.block_bytes
OPTIONS: Final[dict[str, Any]] = {
    "host_bytes": 0,
    "ssd_bytes": "8MiB",
    "segment_bytes_max": 256 << 10,
}


@dataclass(frozen=True, slots=True)
class Hit:
    """What a flip lay in: a stored block's record, or ``what`` else."""

    what: str
    prompt: int = 0
    block: int = 0


class Flipper:
    """An open store of known prompts, and the flips; ``problems`` is what went wrong, in words."""

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._chance = random.Random(seed)  # noqa: S311 - where a flip goes
        self._keys = [prompt_keys(BLOCKS, number) for number in range(PROMPTS)]
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._store = self._open()
        self._fill(range(PROMPTS))

    def _open(self) -> kvtier.Store:
        return kvtier.open(self._path, SPEC, **OPTIONS)

    def run(self, flips: int, reopens: int) -> None:
        """Flip so many times, reopening every so often."""
        every = max(flips // max(reopens, 1), 1)
        for number in range(flips):
            if number and number % every == 0:
                self._reopen()
            self._flip_one()
            if self.problems:
                return
        self._reopen()
        self._store.close()

    def _flip_one(self) -> None:
        self.counts["flips"] += 1
        live = self._live()
        files = [segment_name(segment) for segment in sorted({at.segment for at in live})]
        if not files or self._chance.random() < INDEX_SHARE:
            self._flip_index(live)
            return
        name = self._chance.choice(files)
        path = os.path.join(self._path, "segments", name)
        offset = self._chance.randrange(os.path.getsize(path))
        count = self._change(path, offset)
        hits = {self._hit(live, name, at) for at in range(offset, offset + count)}
        for hit in hits:
            self.counts[f"in {hit.what}"] += 1
        damaged = {(hit.prompt, hit.block) for hit in hits if hit.what == "a record"}
        near = {number for number, _ in damaged} or {self._chance.randrange(PROMPTS)}
        for number in near:
            self._restore(number, {block for each, block in damaged if each == number})

    def _flip_index(self, live: dict[Location, tuple[int, int]]) -> None:
        """Damage the index, then let it commit: nothing that is stored may be lost by it."""
        path = os.path.join(self._path, "index", "data.mdb")
        with open(path, "rb") as file:
            contents = enumerate(iter(lambda: file.read(PAGE_BYTES), b""))
            pages = [number for number, content in contents if any(content)]
        within = self._chance.choice([INDEX_PAGE_HEADER_BYTES, PAGE_BYTES])
        self.counts["in the index"] += 1
        self._change(path, PAGE_BYTES * self._chance.choice(pages) + self._chance.randrange(within))
        number = self._chance.randrange(PROMPTS)
        self._restore(number, set())
        # A stored block is damaged too, so that the index must forget it and store it anew.
        if live and self._chance.random() < 0.5:
            where, (number, block) = self._chance.choice(sorted(live.items(), key=str))
            name = segment_name(where.segment)
            flip(os.path.join(self._path, "segments", name), record_offset(where) + 16)
            self._restore(number, {block})

    def _change(self, path: str, offset: int) -> int:
        count = min(self._chance.randrange(1, BURST_MAX + 1), os.path.getsize(path) - offset)
        for at in range(offset, offset + count):
            flip(path, at, self._chance.randrange(1, 256))
        return count

    def _hit(self, live: dict[Location, tuple[int, int]], name: str, offset: int) -> Hit:
        for where, (number, block) in live.items():
            start = record_offset(where)
            if segment_name(where.segment) == name and start <= offset < start + where.slot_bytes:
                if offset < start + RECORD_BYTES:
                    return Hit("a record", number, block)
                return Hit("padding")
        return Hit("a segment's first page" if offset < PAGE_BYTES else "an empty slot")

    def _live(self) -> dict[Location, tuple[int, int]]:
        """Return where every stored block lies: (prompt, block)."""
        catalog = self._store._catalog
        found = {}
        for number, keys in enumerate(self._keys):
            for block, tier in enumerate(self._store.lookup(keys).tiers):
                if tier is Tier.SSD:
                    row = catalog.find(BlockId(keys.namespace, keys[block]))
                    assert row is not None
                    found[catalog.location(row, Tier.SSD)] = (number, block)
        return found

    def _restore(self, number: int, damaged: set[int]) -> None:
        """Restore a prompt; exactly its damaged blocks are recomputed, then stored again."""
        keys = self._keys[number]
        stored = {b for b, tier in enumerate(self._store.lookup(keys).tiers) if tier is not None}
        try:
            recomputed = set(bring_back(self._store, keys).recomputed)
        except AssertionError as error:
            self.problems.append(f"flip {self.counts['flips']}, prompt {number}: {error}")
            return
        self.counts["restores"] += 1
        self.counts["blocks missed"] += len(recomputed & stored)
        if recomputed & stored != damaged & stored:
            self.problems.append(
                f"flip {self.counts['flips']}, prompt {number}: {sorted(damaged)} were damaged, "
                f"{sorted(recomputed & stored)} of {sorted(stored)} were misses"
            )
        if recomputed:
            self._fill([number])

    def _fill(self, numbers: Sequence[int] | range) -> None:
        """Store prompts again; a damaged index may drop a block now and then, and says so."""
        for number in numbers:
            result = put(self._store, self._keys[number])
            self.counts["blocks stored"] += result.stored
            self.counts["blocks dropped"] += result.dropped
        self._store.flush(WAIT_S)

    def _reopen(self) -> None:
        """Reopen and restore everything: whatever was damaged costs blocks, never bytes."""
        self._check("before closing")
        self.counts["index repairs"] += self._store.stats()["tiers"]["ssd"]["index_repairs"]
        self._store.close()
        self._store = self._open()
        self.counts["reopens"] += 1
        for number in range(PROMPTS):
            before = self._store.stats()["tiers"]["ssd"]["ready"]
            try:
                loaded = bring_back(self._store, self._keys[number]).loaded
            except AssertionError as error:
                self.problems.append(f"reopen {self.counts['reopens']}, prompt {number}: {error}")
                return
            self.counts["blocks missed after reopening"] += BLOCKS - loaded if before else BLOCKS
        self._fill(range(PROMPTS))
        self._check("after reopening")

    def _check(self, when: str) -> None:
        self._store.flush(WAIT_S)
        self.problems += [f"{when}: {problem}" for problem in self._store.check()]
        used = disk_bytes(self._path)
        if used > self._store.config.ssd_bytes:
            self.problems.append(f"{when}: {used} bytes on disk")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness; exit status 1 if a byte was wrong or a block lost without reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--reopens", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default=None, help="where the store is made (default: TMPDIR)")
    parser.add_argument("--json", default="-", help="a file for the result, - for stdout")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvtier-flip-", dir=options.dir) as folder:
        flipper = Flipper(os.path.join(folder, "store"), options.seed)
        try:
            flipper.run(options.flips, options.reopens)
        except Exception:  # noqa: BLE001 - whatever it is, a flip caused it
            flipper.problems.append(traceback.format_exc())
    result = json.dumps({**flipper.counts, "problems": flipper.problems}, indent=1)
    if options.json == "-":
        sys.stdout.write(result + "\n")
    else:
        with open(options.json, "w") as file:
            file.write(result + "\n")
    return 1 if flipper.problems else 0


if __name__ == "__main__":
    sys.exit(main())
