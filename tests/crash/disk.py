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
from crash.nodes import PAGE, File, Folder, Survival

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence


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


@dataclass(frozen=True, slots=True)
class _Handle:
    node: File | Folder
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
        root: Folder | None = None,
    ) -> None:
        self.points = Points() if points is None else points
        self.peak_bytes = 0
        self._direct = direct
        self._punching = punching
        self._root = Folder() if root is None else root
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
                if isinstance(handle.node, File)
            }
            return sum(len(node.now.pages) for node in files.values()) * PAGE

    def open_handles(self) -> int:
        """Return how many files are open."""
        with self._lock:
            return sum(isinstance(handle.node, File) for handle in self._handles.values())

    def _all_files(self, *, durable: bool = True) -> list[tuple[str, File]]:
        found: dict[int, tuple[str, File]] = {}
        folders = [self._root]
        while folders:
            folder = folders.pop()
            versions = [folder.now]
            if durable:
                versions += [folder.durable, *folder.pending]  # type: ignore[list-item]
            for name, node in (item for names in versions for item in names.items()):
                if isinstance(node, Folder):
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
                node = File()
                folder.change(**{name: node})
                self.points.reach("create")
            if node is None:
                raise _error(errno.ENOENT, name)
            if isinstance(node, Folder):
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
            return len(node.now.pages) * PAGE if isinstance(node, File) else PAGE

    def evict_cache(self, fd: int, offset: int, nbytes: int) -> None:
        """Nothing is cached here."""

    def mode(self, fd: int) -> int:
        """Return the permission bits."""
        with self._lock:
            return 0o700 if isinstance(self._handles[fd].node, Folder) else 0o600

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

    def _subfolder(self, folder: Folder, name: str) -> Folder:
        if name not in folder.now:
            folder.change(**{name: Folder()})
            self.points.reach("create")
        node = folder.now[name]
        if not isinstance(node, Folder):
            raise _error(errno.ENOTDIR, name)
        return node

    def _folder(self, fd: int) -> Folder:
        handle = self._handles.get(fd)
        if handle is None or not isinstance(handle.node, Folder):
            raise _error(errno.EBADF, str(fd))
        return handle.node

    def _file(self, fd: int) -> tuple[_Handle, File]:
        handle = self._handles.get(fd)
        if handle is None or not isinstance(handle.node, File):
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
