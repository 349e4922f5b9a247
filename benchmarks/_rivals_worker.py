"""The rivals' side of the comparison: one process per rival, in an environment of its own.

Reads one JSON request a line from standard input and answers each with one JSON line on what was
standard output. Requests: {"op": "open", ...} once, then {"op": "write", "backend": NAME},
{"op": "read", "backend": NAME, "way": WAY, "cold": BOOL} and {"op": "damage", "backend": NAME}.
Needs numpy only; nothing of kvtier is imported here, and its folder is on the path.

A write counts from the caller's memory to the moment that the backend calls done. A read counts
from the call to the last byte in memory of the reader; afterwards every byte is compared.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from _disk import CpuClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TextIO

PAGE: Final = 4096
DAMAGE_START: Final = 512 << 10
"""Where the first spoilt bytes of a file are: behind what its format begins with."""
DAMAGE_STRIDE: Final = 4 << 20
DAMAGE_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend is: read ways by name, and what it promises."""

    durability: str
    """"synced": survives a power cut; "unsynced": survives a killed process; "memory": neither."""
    ways: tuple[str, ...]
    checks: str
    durable: str
    cold: bool = True
    """Whether it reads from a disk, so that there is such a thing as a cold read."""


class Backend(Protocol):
    """Blocks in one place, which are stored as a whole and read as a whole."""

    facts: Facts
    folder: str
    """Where its files are; "" if it has none."""

    def clear(self) -> None:
        """Forget what the last write stored; never counted."""

    def write(self) -> None:
        """Store all blocks."""

    def spoil(self, *, cold: bool) -> None:
        """Make the memory that is read into differ from the blocks; unmap files for a cold read."""

    def read(self, way: str) -> Sequence[Any]:
        """Read all blocks; returns what ``array`` understands."""

    def array(self, block: Any) -> np.ndarray[Any, Any]:
        """Return a block's bytes."""

    def release(self, blocks: Sequence[Any]) -> None:
        """Take back what ``read`` returned."""


class Rows:
    """Reads into memory of the reader's own: ``into``, one row per block, every page touched."""

    def __init__(self, into: np.ndarray[Any, Any]) -> None:
        self.into = into

    def spoil(self, *, cold: bool) -> None:  # noqa: ARG002 - nothing stays mapped
        """Make every page differ."""
        self.into[:, ::PAGE] ^= 0xFF

    @staticmethod
    def array(block: Any) -> np.ndarray[Any, Any]:
        """Return a block's bytes."""
        row: np.ndarray[Any, Any] = block
        return row

    @staticmethod
    def release(blocks: Sequence[Any]) -> None:
        """Nothing was lent."""


def private_stdout() -> TextIO:
    """Keep the real standard output for answers: libraries print on it."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def blocks_of(settings: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes of all blocks, one row each."""
    layers, heads, width = settings["layers"], settings["kv_heads"], settings["head_dim"]
    blocks: int = settings["blocks"]
    words = blocks * 2 * layers * 256 * heads * width * 2 // 8
    rng = np.random.default_rng(settings["seed"])
    values = rng.integers(0, 1 << 64, words, dtype=np.uint64).view(np.uint8)
    rows: np.ndarray[Any, Any] = values.reshape(blocks, -1)
    return rows


def files(folder: str) -> list[Path]:
    """Return all files below a folder."""
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def drop_cache(folder: str, *, sync: bool) -> None:
    """Take a folder's files out of the page cache; what is not on the disk yet stays there."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        if sync:
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def flip(folder: str, start: int = DAMAGE_START) -> None:
    """Change some bytes of every few MiB of every file, on the disk."""
    for path in files(folder):
        fd = os.open(path, os.O_RDWR)
        for offset in range(start, os.fstat(fd).st_size - DAMAGE_BYTES, DAMAGE_STRIDE):
            old = np.frombuffer(os.pread(fd, DAMAGE_BYTES, offset), np.uint8)
            os.pwrite(fd, (old ^ 0xFF).tobytes(), offset)
        os.fsync(fd)
        os.close(fd)


class Server:
    """Answers requests about backends; whatever goes wrong is an answer too."""

    def __init__(
        self,
        make: Callable[[Mapping[str, Any]], tuple[Mapping[str, Backend], Mapping[str, str]]],
        damage_start: int = DAMAGE_START,
    ) -> None:
        self._make = make
        self._damage_start = damage_start
        self._backends: Mapping[str, Backend] = {}
        self._kept: set[Backend] = set()
        """What was read since it was written: whatever it keeps in memory is there."""
        self._expected: np.ndarray[Any, Any] = np.empty((0, 0), np.uint8)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry one request out."""
        if request["op"] == "open":
            return self._open(request)
        backend = self._backends[request["backend"]]
        if request["op"] == "write":
            return self._write(backend)
        if request["op"] == "read":
            return self._read(backend, request["way"], cold=request["cold"])
        return self._damage(backend)

    def _open(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._expected = blocks_of(settings)
        self._backends, skipped = self._make({**settings, "expected": self._expected})
        facts = {name: asdict(backend.facts) for name, backend in self._backends.items()}
        return {"backends": facts, "skipped": dict(skipped)}

    def _write(self, backend: Backend) -> dict[str, Any]:
        backend.clear()
        self._kept.discard(backend)
        cpu, begun = CpuClock(), time.perf_counter()
        backend.write()
        seconds, spent = time.perf_counter() - begun, cpu.spent()
        if backend.folder:  # nobody else's turn is to pay for what is still to be written
            drop_cache(backend.folder, sync=True)
        return {"seconds": seconds, "cpu_s": spent}

    def _read(self, backend: Backend, way: str, *, cold: bool) -> dict[str, Any]:
        # A disk may have a cache that nobody here can drop: what is read cold was read just before,
        # so that it holds this for everybody or for nobody.
        if cold or backend not in self._kept:
            backend.release(backend.read(way))
        backend.spoil(cold=cold)
        if cold and backend.folder:
            drop_cache(backend.folder, sync=False)
        cpu, begun = CpuClock(), time.perf_counter()
        found = backend.read(way)
        seconds, spent = time.perf_counter() - begun, cpu.spent()
        assert self._wrong(backend, found) == 0, f"{way}: wrong bytes"
        backend.release(found)
        self._kept.add(backend)
        return {"seconds": seconds, "cpu_s": spent}

    def _wrong(self, backend: Backend, found: Sequence[Any]) -> int:
        """Return how many blocks are not what was stored."""
        assert len(found) == len(self._expected), f"{len(found)} of {len(self._expected)} blocks"
        assert all(block is not None for block in found), "a block was not found"
        same = [
            np.array_equal(backend.array(block), row)
            for block, row in zip(found, self._expected, strict=True)
        ]
        return same.count(False)

    def _damage(self, backend: Backend) -> dict[str, Any]:
        """Say what comes of spoilt files; the backend is of no further use."""
        if not backend.folder:
            return {"outcome": ""}
        backend.spoil(cold=True)
        flip(backend.folder, self._damage_start)
        drop_cache(backend.folder, sync=True)
        try:
            wrong = self._wrong(backend, backend.read(backend.facts.ways[0]))
        except Exception as error:  # noqa: BLE001 - whatever it was, it was noticed
            return {"outcome": f"{type(error).__name__}"}
        return {"outcome": "wrong bytes" if wrong else "untouched"}


def serve(server: Server, answers: TextIO) -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        try:
            answer = server.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever it was, the other side reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if os.getpgid(0) == os.getpid():  # whoever asked is gone: so is what was started for it
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # threads and loops of the rivals do not end by themselves
