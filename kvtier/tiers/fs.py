"""The few file operations that the SSD tier is built from; the seam where tests inject faults.

All names are relative to an open directory and opened with O_NOFOLLOW; files are 0600, directories
0700. Errors are ``OSError``: the tier decides what they mean.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DISK_UNIT", "FileSystem", "PosixFileSystem"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
DISK_UNIT = 512  # st_blocks counts in this unit whatever the file system's block size
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class FileSystem(Protocol):
    """File operations; descriptors are ints, ``directory`` is an open directory's descriptor."""

    def open_directory(self, path: str) -> int:
        """Open a directory, making it and its parents (0700) where they are missing."""

    def open_subdirectory(self, directory: int, name: str) -> int:
        """Open a directory within another one, making it (0700) if it is missing."""

    def open_existing_directory(self, path: str, within: int | None = None) -> int:
        """Open a directory that is there; ``within`` another one, it may not be a link."""

    def open_file(
        self, directory: int, name: str, *, write: bool, create: bool, direct: bool = False
    ) -> int:
        """Open a regular file; ``create`` fails if it exists.

        ``direct`` bypasses the page cache: addresses, lengths and offsets are then whole pages.
        """

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from ``offset``; returns the bytes read, fewer only at the end."""

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """Write all buffers at ``offset``."""

    def sync(self, fd: int) -> None:
        """Make a file's data and size durable."""

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give a range's disk space back; it reads as zeros from then on."""

    def data_ranges(self, fd: int) -> list[tuple[int, int]]:
        """Return the ranges (start, stop) of a file that occupy disk; all of it if unknown."""

    def evict_cache(self, fd: int, offset: int, nbytes: int) -> None:
        """Advise that a range will not be read again soon."""

    def sync_directory(self, directory: int) -> None:
        """Make names in a directory durable."""

    def rename(self, directory: int, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` atomically."""

    def unlink(self, directory: int, name: str) -> None:
        """Remove a file's name."""

    def names(self, directory: int) -> list[str]:
        """List a directory, sorted."""

    def size(self, fd: int) -> int:
        """Return a file's length in bytes."""

    def disk_bytes(self, directory: int, name: str) -> int:
        """Return what a file occupies on disk, as du counts it."""

    def mode(self, fd: int) -> int:
        """Return the permission bits of an open file or directory."""

    def lock(self, fd: int) -> bool:
        """Take an exclusive lock without waiting; False if someone holds it."""

    def unlock(self, fd: int) -> None:
        """Release the lock, also if a forked child still has the descriptor."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""


class PosixFileSystem:
    """The real one."""

    def open_directory(self, path: str) -> int:
        """Open a directory, making it and its parents (0700) where they are missing."""
        missing = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            with suppress(FileExistsError):  # another process made it; what it is shows below
                os.mkdir(each, 0o700)
        return os.open(missing[0] if missing else path, _DIRECTORY)

    def open_subdirectory(self, directory: int, name: str) -> int:
        """Open a directory within another one, making it (0700) if it is missing."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)

    def open_existing_directory(self, path: str, within: int | None = None) -> int:
        """Open a directory that is there; ``within`` another one, it may not be a link."""
        follow = os.O_NOFOLLOW if within is not None else 0
        return os.open(path, _DIRECTORY | follow, dir_fd=within)

    def open_file(
        self, directory: int, name: str, *, write: bool, create: bool, direct: bool = False
    ) -> int:
        """Open a regular file; ``create`` fails if it exists."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR if write else os.O_RDONLY)
        if direct:
            flags |= os.O_DIRECT
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        fd = os.open(name, flags | os.O_NONBLOCK, 0o600, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from ``offset``; returns the bytes read, fewer only at the end."""
        left = list(into)
        total = 0
        while left:
            count = os.preadv(fd, left, offset + total)
            if count == 0:
                break
            total += count
            left = _after(left, count)
        return total

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """Write all buffers at ``offset``."""
        left = list(data)
        total = 0
        while left:
            count = os.pwritev(fd, left, offset + total)
            total += count
            left = _after(left, count)

    def sync(self, fd: int) -> None:
        """Make a file's data and size durable."""
        os.fdatasync(fd)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give a range's disk space back; it reads as zeros from then on."""
        libc = ctypes.CDLL(None, use_errno=True)
        call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
        if call is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if call(fd, _PUNCH, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def data_ranges(self, fd: int) -> list[tuple[int, int]]:
        """Return the ranges (start, stop) of a file that occupy disk; all of it if unknown."""
        size = os.fstat(fd).st_size
        ranges: list[tuple[int, int]] = []
        stop = 0
        while stop < size:
            try:
                start = os.lseek(fd, stop, os.SEEK_DATA)
                stop = os.lseek(fd, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                    return ranges
                return [(0, size)]
            ranges.append((start, stop))
        return ranges

    def evict_cache(self, fd: int, offset: int, nbytes: int) -> None:
        """Advise that a range will not be read again soon."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def sync_directory(self, directory: int) -> None:
        """Make names in a directory durable."""
        os.fsync(directory)

    def rename(self, directory: int, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` atomically."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def unlink(self, directory: int, name: str) -> None:
        """Remove a file's name."""
        os.unlink(name, dir_fd=directory)

    def names(self, directory: int) -> list[str]:
        """List a directory, sorted."""
        return sorted(os.listdir(directory))

    def size(self, fd: int) -> int:
        """Return a file's length in bytes."""
        return os.fstat(fd).st_size

    def disk_bytes(self, directory: int, name: str) -> int:
        """Return what a file occupies on disk, as du counts it."""
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return found.st_blocks * DISK_UNIT

    def mode(self, fd: int) -> int:
        """Return the permission bits of an open file or directory."""
        return stat.S_IMODE(os.fstat(fd).st_mode)

    def lock(self, fd: int) -> bool:
        """Take an exclusive lock without waiting; False if someone holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Release the lock, also if a forked child still has the descriptor."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of ``buffers`` once their first ``count`` bytes are done."""
    rest = []
    for buffer in buffers:
        if count >= buffer.nbytes:
            count -= buffer.nbytes
        else:
            rest.append(buffer[count:])
            count = 0
    return rest
