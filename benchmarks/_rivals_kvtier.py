"""kvtier's side of the comparison: the same writes and reads, in this process.

``write`` is a put to the moment that all of it is durable, into a full store, so that every block
evicts one. ``cold`` is a prefetch from the SSD into host memory, checked by kvtier; ``warm`` a
restore from there into an engine's tensors. ``memory`` is a store without an SSD: a put to the
moment that it can be looked up, and the restore of it.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from _blocks import COLD_PROMPTS, WAIT_S_MAX, Subject, cold_reads, io_mode, segments
from _disk import CpuClock, drop_cache
from _harness import Trial
from _rivals_worker import flip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _blocks import ColdReads

    from kvtier.identity import BlockKeys
    from kvtier.store import Store

FULL_PROMPTS: Final = 2
MEMORY_PROMPTS: Final = 1.0
CHECKS: Final = "xxh3"
DURABLE: Final = "fdatasync"


class Ours:
    """Stores for each kind of trial, everything used once before it counts."""

    def __init__(
        self, subject: Subject, *, reads: ColdReads, reading: Store, writing: Store, memory: Store
    ) -> None:
        self._subject = subject
        self._reads = reads
        self._writing = writing
        self._memory = memory
        self._held: BlockKeys | None = None
        self.io = io_mode(reading)
        subject.fill(writing)
        for _ in range(2):
            self.memory_write()
            self.memory_read()

    def write(self) -> Trial:
        """Store a new prompt durably."""
        cpu = CpuClock()
        seconds = self._subject.put(self._writing).seconds
        return Trial(seconds, detail={"cpu_s": cpu.spent()})

    def cold(self) -> Trial:
        """Read a prompt from the SSD into host memory; all were read just before, as rivals do."""
        for _ in range(COLD_PROMPTS):
            self._reads.trial()
        trial = self._reads.trial()
        return Trial(trial.seconds, detail={"cpu_s": trial.detail["cpu_s"]})

    def warm(self) -> Trial:
        """Restore a prompt from host memory into an engine's tensors."""
        return self._reads.warm()

    def memory_write(self) -> Trial:
        """Store a new prompt in host memory only."""
        keys = self._subject.prompt()
        cpu, begun = CpuClock(), time.perf_counter()
        result = self._memory.put(keys, self._subject.source).result(WAIT_S_MAX)
        seconds, spent = time.perf_counter() - begun, cpu.spent()
        assert result.stored == self._subject.blocks, f"{result} of {self._subject.blocks} blocks"
        self._memory.flush(WAIT_S_MAX)
        self._held = keys
        return Trial(seconds, detail={"cpu_s": spent})

    def memory_read(self) -> Trial:
        """Restore the prompt stored last from host memory."""
        assert self._held is not None
        return self._subject.restored(self._memory, self._held)


@contextmanager
def ours(subject: Subject, folder: Path) -> Iterator[Ours]:
    """Open everything that the trials need."""
    with ExitStack() as stack:
        reads, reading = stack.enter_context(cold_reads(subject, folder))
        writing = stack.enter_context(subject.open(folder / "write", prompts=FULL_PROMPTS))
        memory = stack.enter_context(
            subject.open(folder / "memory", prompts=0, host=MEMORY_PROMPTS)
        )
        yield Ours(subject, reads=reads, reading=reading, writing=writing, memory=memory)


def damage(subject: Subject, folder: Path) -> str:
    """Spoil a store's segments as the rivals' files; returns what a read made of it."""
    with _unsaid(), subject.open(folder / "damage", prompts=COLD_PROMPTS, host=0.0) as store:
        keys = subject.put(store).detail["keys"]
        flip(os.fspath(segments(store)))
        drop_cache(segments(store))
        for tensor in subject.target.tensors:
            tensor.zero_()
        plan = store.plan(store.lookup(keys), way="load")
        with store.restore(plan, into=subject.target) as session:
            step = session.next_step(WAIT_S_MAX)
        return "served" if step is None else "a miss"


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep warnings of damaged blocks, which are meant here, from the terminal."""
    log = logging.getLogger("kvtier")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
