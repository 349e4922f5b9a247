"""What the machine gives: the disk and memory alone, and how much of its cores others took."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _blocks import io_mode
from _disk import RawDisk, Shape, arena, process_cpu_s

from kvtier.tiers.segment import header_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.store import Store

NOT_WORK: Final = (3, 4, 8, 9)
"""Columns of /proc/stat that are no work of others: idle, waiting for I/O, and guests, which are
counted before already."""


def shape_of(store: Store, blocks: int, *, writes: bool) -> Shape:
    """Return what the disk alone has to move to do what a store does with so many blocks."""
    layout, config = store.spec.block_layout, store.config
    return Shape(
        blocks=blocks,
        header_bytes=header_bytes(len(layout.parts)),
        payload_bytes=layout.block_bytes,
        segment_bytes=config.segment_bytes_max,
        depth=config.writes_inflight_max if writes else config.loads_inflight_max,
        direct=io_mode(store) == "direct",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second of payload: the disk alone, and one thread that copies memory."""

    read: float
    write: float
    memcpy: float

    @classmethod
    def middle(cls, measured: Sequence[Limits]) -> Limits:
        """Return the median of each."""
        return cls(
            statistics.median(each.read for each in measured),
            statistics.median(each.write for each in measured),
            statistics.median(each.memcpy for each in measured),
        )

    def disk_s(self, read_bytes: int, written_bytes: int) -> float:
        """Return how long the disk alone would have taken for these bytes, one after the other."""
        return read_bytes / self.read + written_bytes / self.write


@contextmanager
def limits(folder: Path, store: Store, blocks: int) -> Iterator[Callable[[], Limits]]:
    """Yield what measures the limits, over so many records of a store's."""
    shape = shape_of(store, blocks, writes=True)
    nbytes = shape.blocks * shape.payload_bytes
    source, copy = arena(nbytes), arena(nbytes)
    folder.mkdir()
    with RawDisk(folder, shape) as raw:
        raw.fresh()
        raw.overwrite()
        raw.read()

        def once() -> Limits:
            begun = time.perf_counter()
            np.copyto(copy, source)
            copied_s = time.perf_counter() - begun
            return Limits(nbytes / raw.read(), nbytes / raw.overwrite(), nbytes / copied_s)

        yield once


class Others:
    """How much of the machine's cores went to other processes, from its making on."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), _busy_s(), process_cpu_s()

    def share(self) -> float:
        """Return the part of all cores' time that others took since; 0 if the kernel won't say."""
        wall_s, busy_s, own_s = self._begun
        wall_s = time.perf_counter() - wall_s
        others_s = (_busy_s() - busy_s) - (process_cpu_s() - own_s)
        return min(max(others_s / (wall_s * (os.cpu_count() or 1)), 0.0), 1.0)


def _busy_s() -> float:
    try:
        columns: list[Any] = Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()
    except OSError:
        return 0.0
    ticks = [int(each) for number, each in enumerate(columns[1:]) if number not in NOT_WORK]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")
