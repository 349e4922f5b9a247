"""What prefetches are worth: restores of what was prefetched, and one prefix that many share.

Every restore is of a whole prompt into an engine's tensors, checksums on, every byte compared.

* ``prefetched_vs_host``: a prompt that is only on the SSD is prefetched, with a deadline, and then
  restored; over the restore of a prompt that is in host memory anyway. Reads are cold. Once with
  the disk as it is and once with a slow one (a throttled link). ``unhinted_vs_host`` is the same
  prompt without a prefetch.
* ``shared_prefix_p99``: 64 restores of one 8,192-token prefix that is only on the SSD start at
  once. The slowest of them over what it may take: one restore alone, and 64 times 1.25 copies of
  the prefix from host memory into tensors, by one thread. The SSD is read once.

``--quick`` takes smaller blocks. ``--dir`` says which disk is used.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import torch
from _blocks import BY_TURNS, COLD_PROMPTS, MIB, WAIT_S_MAX, Subject, counter, segments
from _disk import arena, drop_cache, file_system, need_free, work_folder
from _harness import NO_BAR, Bar, Bench, Ratio, Trial, interleave, parse

import kvtier
from kvtier.plan import Tier
from kvtier.tiers.device import write_block

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtier.identity import BlockKeys
    from kvtier.store import Store

PARTS: Final = ("prefetched", "shared")
DEADLINE_S: Final = 60.0
SLOW_BYTES_PER_S: Final = 400e6
"""The rate of the throttled link: a slow disk, or a share of a network."""
RESTORES: Final = 64
PREFIX_BLOCKS: Final = 32
"""8,192 tokens."""
COPY_FACTOR: Final = 1.25


class Prompts:
    """Prompts on the SSD that are used in turn: each pushes the other one out of host memory."""

    def __init__(self, subject: Subject, store: Store) -> None:
        self._subject = subject
        self._store = store
        self._prompts = [subject.put(store).detail["keys"] for _ in range(COLD_PROMPTS)]
        self.warm: BlockKeys | None = None

    def cold(self) -> BlockKeys:
        """Return a prompt that is only on the SSD, and not in the page cache."""
        self.warm = keys = self._prompts[0]
        self._prompts.append(self._prompts.pop(0))
        tiers = set(self._store.lookup(keys).tiers)
        assert tiers == {Tier.SSD}, f"the prompt is not cold: {tiers}"
        drop_cache(segments(self._store))
        return keys

    def prefetched(self) -> Trial:
        """Restore a prompt that was prefetched."""
        keys = self.cold()
        found = self._store.prefetch(keys, deadline_s=DEADLINE_S).result(WAIT_S_MAX)
        assert found == len(keys), f"{found} of {len(keys)} blocks were prefetched"
        return Trial(self._subject.verify(self._store, keys))

    def unhinted(self) -> Trial:
        """Restore a prompt from the SSD."""
        return Trial(self._subject.verify(self._store, self.cold()))

    def host(self) -> Trial:
        """Restore the prompt that is in host memory."""
        assert self.warm is not None
        tiers = set(self._store.lookup(self.warm).tiers)
        assert tiers == {Tier.HOST}, f"the prompt is not in host memory: {tiers}"
        return Trial(self._subject.verify(self._store, self.warm))


def prefetched(bench: Bench, folder: Path, subject: Subject, rate: float | None) -> None:
    """Restore what was prefetched, and what is in host memory."""
    suffix = "" if rate is None else "_slow"
    links = {} if rate is None else {Tier.SSD: kvtier.LinkThrottle(rate)}
    with ExitStack() as stack:
        store = stack.enter_context(
            kvtier.open(
                folder / f"prefetched{suffix}",
                subject.spec,
                host_bytes=subject.bytes,
                ssd_bytes=2 * COLD_PROMPTS * subject.record_bytes,
                links=links,
                **BY_TURNS,
            )
        )
        prompts = Prompts(subject, store)
        prompts.prefetched()
        ways = {
            "prefetched": prompts.prefetched,
            "host": prompts.host,
            "again": prompts.host,
            "unhinted": prompts.unhinted,
        }
        with bench.progress(f"prefetched{suffix}", len(ways) * bench.options.pairs) as tick:
            trials = interleave(ways, bench.options.pairs, tick)
    same = trials["host"], trials["again"]
    for way, bar in (("prefetched", Bar(high=1.1)), ("unhinted", NO_BAR)):
        name = f"{way}_vs_host{suffix}"
        bench.add(Ratio.of_pairs(name, trials[way], trials["host"], same, bar))
    bench.record(f"prefetched{suffix}", trials, mib=subject.mib, blocks=subject.blocks)


# -- one prefix that many share


def copy_s(subject: Subject) -> float:
    """Return how long one thread takes to copy the prefix from host memory into tensors."""
    block_bytes = subject.mib * MIB
    memory = memoryview(arena(subject.bytes))
    begun = time.perf_counter()
    for block in range(subject.blocks):
        start = block * block_bytes
        write_block(subject.target, block, memory[start : start + block_bytes])
    return time.perf_counter() - begun


def together(
    subject: Subject, store: Store, keys: BlockKeys, slots: Sequence[kvtier.TensorSlots]
) -> list[float]:
    """Restore one prompt many times at once; returns when each was in place."""
    seconds = [math.inf] * RESTORES
    start = threading.Barrier(RESTORES + 1)
    plan = store.plan(store.lookup(keys), way="load")

    def restore(number: int) -> None:
        start.wait(WAIT_S_MAX)
        begun = time.perf_counter()
        with store.restore(plan, into=slots[number % len(slots)]) as session:
            step = session.next_step(WAIT_S_MAX)
        if step is None and session.report.loaded == subject.blocks:
            seconds[number] = time.perf_counter() - begun

    threads = [threading.Thread(target=restore, args=(number,)) for number in range(RESTORES)]
    for thread in threads:
        thread.start()
    start.wait(WAIT_S_MAX)
    for thread in threads:
        thread.join(WAIT_S_MAX)
    for each in slots:
        for got, stored in zip(each.tensors, subject.source.tensors, strict=True):
            assert torch.equal(got.view(torch.int16), stored.view(torch.int16)), "wrong bytes"
    assert max(seconds) < math.inf, "a restore did not load everything"
    return seconds


def shared(bench: Bench, folder: Path, subject: Subject) -> None:
    """Let many restore one prefix at once."""
    values: list[float] = []
    with ExitStack() as stack:
        store = stack.enter_context(subject.open(folder / "shared", prompts=COLD_PROMPTS))
        prompts = Prompts(subject, store)
        # A few sets of slots are shared, of bytes that are the same anyway: 64 would not fit here.
        slots = [kvtier.TensorSlots.empty(subject.spec, subject.blocks) for _ in range(8)]
        rounds = bench.options.pairs + 1  # a series decides by its steps from one to the next
        with bench.progress("one prefix, many restores", rounds) as tick:
            for _ in range(rounds):
                alone = prompts.unhinted().seconds
                copy = min(copy_s(subject) for _ in range(3))
                keys, before = prompts.cold(), counter(store, "ssd_read_blocks")
                seconds = sorted(together(subject, store, keys, slots))
                read = counter(store, "ssd_read_blocks") - before
                assert read == subject.blocks, f"{read} reads of {subject.blocks} blocks"
                slowest = seconds[math.ceil(0.99 * RESTORES) - 1]
                values.append(slowest / (alone + RESTORES * COPY_FACTOR * copy))
                bench.results.append(
                    {"case": "shared", "alone_s": alone, "copy_s": copy, "seconds": seconds}
                )
                tick()
    bench.add(Ratio.of_series("shared_prefix_p99", values, Bar(high=1.0)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    paths = {"dir": "where to write: a folder on the disk to use (default: $TMPDIR or here)"}
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths)
    torch.set_num_threads(1)
    mib = 1 if options.quick or options.smoke else 3
    bench = Bench("prefetch", options, block_bytes=mib * MIB, blocks=PREFIX_BLOCKS)
    with work_folder(options.paths["dir"], bench.console) as folder:
        bench.settings["file_system"] = file_system(folder)
        need_free(folder, 8 * PREFIX_BLOCKS * mib * MIB)
        subject = Subject(mib, PREFIX_BLOCKS)
        if options.wants("prefetched"):
            for rate in (None, SLOW_BYTES_PER_S):
                prefetched(bench, folder, subject, rate)
        if options.wants("shared"):
            shared(bench, folder, subject)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
