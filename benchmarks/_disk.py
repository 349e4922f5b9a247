"""The disk without a store: the same records, depth, threads and buffers, and nothing else.

Records lie in segment files as a store's do: a header of whole pages, then the payload, slot after
slot, as many slots a file. Threads share the records in turn, so that the ones in flight are next
to each other. Buffers are page-aligned in memory that was asked to be in huge pages, and were all
touched before anything is timed.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

PAGE: Final = mmap.PAGESIZE
NOT_A_DISK: Final = ("tmpfs", "ramfs", "devtmpfs")


def arena(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return page-aligned memory, every page of it in place."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[::PAGE] = 1
    return array


def drop_cache(folder: Path) -> None:
    """Take a folder's files out of the page cache, as far as they are on the disk."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


# -- raw passes


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pass moves: ``blocks`` records in segments of at most ``segment_bytes``."""

    blocks: int
    header_bytes: int
    payload_bytes: int
    segment_bytes: int
    depth: int
    direct: bool

    @property
    def slot_bytes(self) -> int:
        """Bytes of one record, whole pages."""
        return self.header_bytes + -(-self.payload_bytes // PAGE) * PAGE

    @property
    def slots(self) -> int:
        """Slots of one segment file."""
        return max(1, (self.segment_bytes - PAGE) // self.slot_bytes)

    @property
    def segments(self) -> int:
        """Segment files of one pass."""
        return -(-self.blocks // self.slots)

    def place(self, block: int) -> tuple[int, int]:
        """Return a record's segment and its offset there."""
        segment, slot = divmod(block, self.slots)
        return segment, PAGE + slot * self.slot_bytes


class RawDisk:
    """Records in files of their own under ``folder``; every pass returns its seconds."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._folder = folder
        self._shape = shape
        self._files: list[int] = []
        self._payloads = arena(shape.blocks * (shape.slot_bytes - shape.header_bytes))
        words = self._payloads.view(np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 1 << 64, words.size, dtype=np.uint64)
        self._headers = arena(shape.depth * shape.header_bytes)
        self._threads = ThreadPoolExecutor(shape.depth)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._remove()

    def fresh(self) -> float:
        """Write into files that did not exist; they stay until the next fresh pass."""
        self._remove()
        begun = time.perf_counter()
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | (os.O_DIRECT if self._shape.direct else 0)
        self._files = [os.open(self._name(i), flags, 0o600) for i in range(self._shape.segments)]
        for fd in self._files:
            assert os.pwritev(fd, [self._headers[:PAGE].data], 0) == PAGE
        self._run(os.pwritev)
        self._sync()
        return time.perf_counter() - begun

    def overwrite(self) -> float:
        """Write over the records of the last fresh pass."""
        begun = time.perf_counter()
        self._run(os.pwritev)
        self._sync()
        return time.perf_counter() - begun

    def read(self) -> float:
        """Read the records of the last fresh pass, cold."""
        drop_cache(self._folder)
        begun = time.perf_counter()
        self._run(os.preadv)
        return time.perf_counter() - begun

    def _run(self, move: Callable[[int, list[Any], int], int]) -> None:
        shape = self._shape
        payload_bytes = shape.slot_bytes - shape.header_bytes

        def share(thread: int) -> None:
            start = thread * shape.header_bytes
            header = self._headers[start : start + shape.header_bytes]
            for block in range(thread, shape.blocks, shape.depth):
                payload = self._payloads[block * payload_bytes : (block + 1) * payload_bytes]
                segment, offset = shape.place(block)
                moved = move(self._files[segment], [header, payload], offset)
                assert moved == shape.slot_bytes, f"{moved} of {shape.slot_bytes} bytes moved"

        list(self._threads.map(share, range(shape.depth)))

    def _sync(self) -> None:
        for fd in self._files:
            os.fdatasync(fd)

    def _name(self, segment: int) -> Path:
        return self._folder / f"raw-{segment}"

    def _remove(self) -> None:
        for segment, fd in enumerate(self._files):
            os.close(fd)
            self._name(segment).unlink()
        self._files = []


# -- where, and what it costs


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is on; "unknown" if the kernel does not say.

    The mount whose path is the longest one above it.
    """
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    found = {line.split()[1]: line.split()[2] for line in mounts}
    real = path.resolve()
    above = [mount for mount in found if real.is_relative_to(mount)]
    return found[max(above, key=len)] if above else "unknown"


@contextmanager
def work_folder(where: str, console: Console) -> Iterator[Path]:
    """Yield a folder of its own below ``where`` (or $TMPDIR, or here), gone at the end."""
    above = Path(where or os.environ.get("TMPDIR", "") or ".")
    above.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=above)).resolve()
    kind = file_system(folder)
    if kind in NOT_A_DISK:
        console.print(f"{above} is {kind}, which is memory: give a disk with --dir", style="yellow")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def need_free(folder: Path, nbytes: int) -> None:
    """Stop with a word about it if the disk has less room than a run takes."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise SystemExit(
            f"{folder}: {free >> 20} MiB are free, {nbytes >> 20} MiB are needed: "
            "give another disk with --dir, or try --quick"
        )


def process_cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that live: the store's index."""
    return _children_cpu_s() + time.process_time()


class CpuClock:
    """CPU seconds of this process and of its children that live, from now on.

    Looking for the children takes a millisecond or two; what it takes is not in the result.
    """

    def __init__(self) -> None:
        self._children_s = _children_cpu_s()
        self._own_s = time.process_time()

    def spent(self) -> float:
        """Return what was spent so far."""
        own_s = time.process_time() - self._own_s
        return own_s + _children_cpu_s() - self._children_s


def _children_cpu_s() -> float:
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in _children())
    return ticks / os.sysconf("SC_CLK_TCK")


def process_write_bytes() -> int | None:
    """Return what this process and its living children had written to the disk so far, or None."""
    total = 0
    for pid in ["self", *(pid for pid, _ in _children())]:
        try:
            lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        values = dict(line.split(": ") for line in lines)
        total += int(values["write_bytes"])
    return total


def _children() -> list[tuple[str, list[str]]]:
    """Return (pid, fields of its stat from the state on) of this process's living children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended while we looked
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append((path.parent.name, fields))
    return found
