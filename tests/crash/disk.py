"""A disk in memory that knows what is durable, and what may be left of the rest after a crash.

A write that was not synced may be lost, kept, torn at sectors or pages, or kept while an earlier
one is lost; a name that was not synced may be the old one or the new one. ``points`` is told of
every step at which the machine may stop, so that a test looks at what would be left there while
the course of operations itself goes on.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

PAGE = 4096
SECTOR = 512


@dataclass(frozen=True, slots=True)
class Survival:
    """How a crash treats what was not synced.

    ``granule`` is the size (bytes) of what is kept or lost as one, ``data`` and ``names`` the
    probability that a granule or a change of a directory is kept.
    """

    granule: int
    data: float
    names: float


SURVIVALS = {
    "nothing": Survival(PAGE, 0.0, 0.0),
    "everything": Survival(PAGE, 1.0, 1.0),
    "bytes without names": Survival(PAGE, 1.0, 0.0),
    "names without bytes": Survival(PAGE, 0.0, 1.0),
    "torn sectors": Survival(SECTOR, 0.5, 0.5),
    "torn pages": Survival(PAGE, 0.5, 0.5),
    "few sectors": Survival(SECTOR, 0.1, 0.9),
    "whole writes in any order": Survival(1 << 40, 0.5, 0.5),
}


@dataclass(slots=True)
class Points:
    """Counts the steps at which the machine may stop, by kind, and tells ``watch`` of each."""

    watch: Callable[[str], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def reach(self, what: str) -> None:
        """Come to a step."""
        self.counts[what] += 1
        if self.watch is not None:
            self.watch(what)


@dataclass(slots=True, eq=False)
class _Image:
    """A file's bytes, and which of its pages occupy disk."""

    data: bytearray = field(default_factory=bytearray)
    pages: set[int] = field(default_factory=set)

    def apply(self, offset: int, piece: bytes | None, nbytes: int) -> None:
        """Write ``piece``, or punch ``nbytes`` if there is none."""
        first, last = offset // PAGE, -(-(offset + nbytes) // PAGE)
        if piece is None:
            stop = min(offset + nbytes, len(self.data))
            self.data[offset:stop] = bytes(max(stop - offset, 0))
            inside = range(-(-offset // PAGE), (offset + nbytes) // PAGE)
            self.pages.difference_update(inside)
            return
        if len(self.data) < offset + nbytes:
            self.data.extend(bytes(offset + nbytes - len(self.data)))
        self.data[offset : offset + nbytes] = piece
        self.pages.update(range(first, last))

    def copy(self) -> _Image:
        return _Image(bytearray(self.data), set(self.pages))


@dataclass(slots=True, eq=False)
class _File:
    now: _Image = field(default_factory=_Image)
    durable: _Image = field(default_factory=_Image)
    pending: list[tuple[int, bytes | None, int]] = field(default_factory=list)

    def change(self, offset: int, piece: bytes | None, nbytes: int) -> None:
        self.now.apply(offset, piece, nbytes)
        self.pending.append((offset, piece, nbytes))

    def survive(self, how: Survival, chance: random.Random) -> _File:
        image = self.durable.copy()
        for offset, piece, nbytes in self.pending:
            # A hole is punched by whole pages; a write is torn where the granules meet.
            granule = how.granule if piece is not None else max(how.granule, PAGE)
            for start, stop in _granules(offset, offset + nbytes, granule):
                if chance.random() < how.data:
                    part = None if piece is None else piece[start - offset : stop - offset]
                    image.apply(start, part, stop - start)
        if len(image.data) < len(self.now.data) and chance.random() < how.data:
            image.data.extend(bytes(len(self.now.data) - len(image.data)))
        return _File(image, image.copy())


def _granules(start: int, stop: int, granule: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min((start // granule + 1) * granule, stop)
        yield start, end
        start = end


@dataclass(slots=True, eq=False)
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)

    def change(self, **names: _File | _Folder | None) -> None:
        _rename(self.now, names)
        self.pending.append(names)

    def survive(self, how: Survival, chance: random.Random) -> _Folder:
        names = dict(self.durable)
        for change in self.pending:
            if chance.random() < how.names:
                _rename(names, change)
        kept = {name: node.survive(how, chance) for name, node in sorted(names.items())}
        return _Folder(kept, dict(kept))


def _rename(names: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@dataclass(frozen=True, slots=True)
class _Handle:
    node: _File | _Folder
    write: bool = False
    direct: bool = False


class CrashFileSystem:
    """A file system in memory; ``survive`` returns what a crash would leave of it now.

    ``direct`` and ``punching`` say what it supports; unaligned direct I/O is EINVAL, as it would be
    on a disk. ``peak_bytes`` is the most that its files ever occupied.
    """

    def __init__(
        self,
        points: Points | None = None,
        *,
        direct: bool = True,
        punching: bool = True,
        root: _Folder | None = None,
    ) -> None:
        self.points = Points() if points is None else points
        self.peak_bytes = 0
        self._direct = direct
        self._punching = punching
        self._root = _Folder() if root is None else root
        self._lock = threading.RLock()
        self._handles: dict[int, _Handle] = {}
        self._next = 1000

    # -- what a test asks

    def survive(self, how: Survival, chance: random.Random) -> CrashFileSystem:
        """Return a file system as it may be found after a crash at this moment."""
        with self._lock:
            root = self._root.survive(how, chance)
        return CrashFileSystem(direct=self._direct, punching=self._punching, root=root)

    def traces(self, needle: bytes) -> list[str]:
        """Return where bytes may still be found now or after a crash: file and state."""
        with self._lock:
            return [
                f"{name}: {state}"
                for name, node in self._all_files()
                for state, data in (
                    ("now", node.now.data),
                    ("durable", node.durable.data),
                    *(("pending", piece) for _, piece, _ in node.pending if piece is not None),
                )
                if needle in data
            ]

    def used_bytes(self) -> int:
        """Return what the files occupy, those included that are open and have no name."""
        with self._lock:
            files = {id(node): node for _, node in self._all_files(durable=False)}
            files |= {
                id(handle.node): handle.node
                for handle in self._handles.values()
                if isinstance(handle.node, _File)
            }
            return sum(len(node.now.pages) for node in files.values()) * PAGE

    def open_handles(self) -> int:
        """Return how many files are open."""
        with self._lock:
            return sum(isinstance(handle.node, _File) for handle in self._handles.values())

    def _all_files(self, *, durable: bool = True) -> list[tuple[str, _File]]:
        found: dict[int, tuple[str, _File]] = {}
        folders = [self._root]
        while folders:
            folder = folders.pop()
            versions = [folder.now]
            if durable:
                versions += [folder.durable, *folder.pending]  # type: ignore[list-item]
            for name, node in (item for names in versions for item in names.items()):
                if isinstance(node, _Folder):
                    folders.append(node)
                elif node is not None:
                    found[id(node)] = (name, node)
        return list(found.values())

    # -- the file system

    def open_directory(self, path: str) -> int:
        """Open a directory, making it and its parents where they are missing."""
        with self._lock:
            folder = self._root
            for name in filter(None, path.split("/")):
                folder = self._subfolder(folder, name)
            return self._open(_Handle(folder))

    def open_subdirectory(self, directory: int, name: str) -> int:
        """Open a directory within another one, making it if it is missing."""
        with self._lock:
            return self._open(_Handle(self._subfolder(self._folder(directory), name)))

    def open_file(
        self, directory: int, name: str, *, write: bool, create: bool, direct: bool = False
    ) -> int:
        """Open a file; ``create`` fails if it exists."""
        with self._lock:
            folder = self._folder(directory)
            if direct and not self._direct:
                raise _error(errno.EINVAL, name)
            node = folder.now.get(name)
            if create:
                if node is not None:
                    raise _error(errno.EEXIST, name)
                node = _File()
                folder.change(**{name: node})
                self.points.reach("create")
            if node is None:
                raise _error(errno.ENOENT, name)
            if isinstance(node, _Folder):
                raise _error(errno.EINVAL, name)
            return self._open(_Handle(node, write, direct))

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from ``offset``."""
        with self._lock:
            handle, node = self._file(fd)
            _check_aligned(handle, into, offset)
            total = 0
            for buffer in into:
                part = node.now.data[offset + total : offset + total + buffer.nbytes]
                buffer.cast("B")[: len(part)] = part
                total += len(part)
            return total

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """Write all buffers at ``offset``."""
        with self._lock:
            handle, node = self._file(fd)
            if not handle.write:
                raise _error(errno.EBADF, "opened for reading")
            _check_aligned(handle, data, offset)
            piece = b"".join(bytes(buffer) for buffer in data)
            node.change(offset, piece, len(piece))
            self._changed("write")

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give a range's disk space back."""
        with self._lock:
            handle, node = self._file(fd)
            if not self._punching:
                raise _error(errno.EOPNOTSUPP, "punch")
            if not handle.write:
                raise _error(errno.EBADF, "opened for reading")
            node.change(offset, None, nbytes)
            self._changed("punch")

    def sync(self, fd: int) -> None:
        """Make a file's data and size durable."""
        with self._lock:
            _, node = self._file(fd)
            self.points.reach("sync")
            node.durable = node.now.copy()
            node.pending.clear()

    def sync_directory(self, directory: int) -> None:
        """Make names in a directory durable."""
        with self._lock:
            folder = self._folder(directory)
            self.points.reach("sync_directory")
            folder.durable = dict(folder.now)
            folder.pending.clear()

    def rename(self, directory: int, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` atomically."""
        with self._lock:
            folder = self._folder(directory)
            if old not in folder.now:
                raise _error(errno.ENOENT, old)
            folder.change(**{new: folder.now[old], old: None})
            self.points.reach("rename")

    def unlink(self, directory: int, name: str) -> None:
        """Remove a file's name."""
        with self._lock:
            folder = self._folder(directory)
            if name not in folder.now:
                raise _error(errno.ENOENT, name)
            folder.change(**{name: None})
            self.points.reach("unlink")

    def names(self, directory: int) -> list[str]:
        """List a directory, sorted."""
        with self._lock:
            return sorted(self._folder(directory).now)

    def size(self, fd: int) -> int:
        """Return a file's length in bytes."""
        with self._lock:
            return len(self._file(fd)[1].now.data)

    def data_ranges(self, fd: int) -> list[tuple[int, int]]:
        """Return the ranges that occupy disk."""
        with self._lock:
            image = self._file(fd)[1].now
            ranges: list[tuple[int, int]] = []
            for page in sorted(image.pages):
                start, stop = page * PAGE, min((page + 1) * PAGE, len(image.data))
                if ranges and ranges[-1][1] == start:
                    start = ranges.pop()[0]
                ranges.append((start, stop))
            return ranges

    def disk_bytes(self, directory: int, name: str) -> int:
        """Return what a file occupies."""
        with self._lock:
            node = self._folder(directory).now.get(name)
            if node is None:
                raise _error(errno.ENOENT, name)
            return len(node.now.pages) * PAGE if isinstance(node, _File) else PAGE

    def evict_cache(self, fd: int, offset: int, nbytes: int) -> None:
        """Nothing is cached here."""

    def mode(self, fd: int) -> int:
        """Return the permission bits."""
        with self._lock:
            return 0o700 if isinstance(self._handles[fd].node, _Folder) else 0o600

    def lock(self, fd: int) -> bool:
        """Take the lock: nobody else is here."""
        return True

    def unlock(self, fd: int) -> None:
        """Release the lock."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        with self._lock:
            if self._handles.pop(fd, None) is None:
                raise _error(errno.EBADF, str(fd))

    # -- inside

    def _open(self, handle: _Handle) -> int:
        self._next += 1
        self._handles[self._next] = handle
        return self._next

    def _subfolder(self, folder: _Folder, name: str) -> _Folder:
        if name not in folder.now:
            folder.change(**{name: _Folder()})
            self.points.reach("create")
        node = folder.now[name]
        if not isinstance(node, _Folder):
            raise _error(errno.ENOTDIR, name)
        return node

    def _folder(self, fd: int) -> _Folder:
        handle = self._handles.get(fd)
        if handle is None or not isinstance(handle.node, _Folder):
            raise _error(errno.EBADF, str(fd))
        return handle.node

    def _file(self, fd: int) -> tuple[_Handle, _File]:
        handle = self._handles.get(fd)
        if handle is None or not isinstance(handle.node, _File):
            raise _error(errno.EBADF, str(fd))
        return handle, handle.node

    def _changed(self, what: str) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        self.points.reach(what)


def _check_aligned(handle: _Handle, buffers: Sequence[memoryview], offset: int) -> None:
    if not handle.direct:
        return
    where = [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers]
    if any(n % PAGE for n in (offset, *where, *(buffer.nbytes for buffer in buffers))):
        raise _error(errno.EINVAL, "direct I/O that is not aligned to pages")


def _error(code: int, what: str) -> OSError:
    return OSError(code, os.strerror(code), what)
