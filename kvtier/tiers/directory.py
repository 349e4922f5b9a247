"""The store's directory: what it must look like, who may write, and its few small files."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.errors import FormatError, StoreFailed, StoreLocked
from kvtier.identity import SPEC_BYTES_MAX, KVSpec
from kvtier.tiers.segment import FORMAT_VERSION
from kvtier.tiers.write_budget import SAVED_BYTES_MAX

if TYPE_CHECKING:
    from kvtier.tiers.fs import FileSystem

__all__ = ["ReadDirectory", "StoreDirectory"]

log = logging.getLogger(__name__)

_FORMAT_LINE: Final = re.compile(rb"kvtier store, format (\d{1,9})\n")
_FORMAT_BYTES_MAX: Final = 64
COSTS_BYTES_MAX: Final = 1 << 20
LIVE_BYTES_MAX: Final = 1 << 16
LOCK_S_MAX: Final = 1.0
"""How long an open waits for a writer that is going away."""
LOCK_RETRY_S: Final = 0.01
OTHERS_MODE: Final = 0o077
_TEMPORARY: Final = ".new"
# What a process that died while it made a new store may leave behind, or a new file system has.
_BEFORE_FORMAT: Final = frozenset({"LOCK", "FORMAT.new", "lost+found"})


class StoreDirectory:
    """An open store directory, locked for one writer until ``close``.

    Raises ``FormatError`` if the path is no store or of a newer format, ``StoreLocked`` if it has a
    writer, ``StoreFailed`` if the file system refuses; each names the path.
    """

    def __init__(self, path: str, fs: FileSystem) -> None:
        self.path = path
        self._fs = fs
        self._open: list[int] = []
        self._lock: int | None = None
        _LOCKED.add(self)
        try:
            self._enter()
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
                raise FormatError(f"{path}: it, or a part of it, is no directory") from error
            raise StoreFailed(
                f"{path}: cannot be opened for writing: {error.strerror or error}; "
                "check permissions, mount and free space"
            ) from error
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        fs = self._fs
        self.root = self._keep(fs.open_directory(self.path))
        names = set(fs.names(self.root))
        if "FORMAT" in names:
            _check_format(fs, self.root, self.path)
        elif names - _BEFORE_FORMAT:
            raise FormatError(
                f"{self.path}: not a kvtier store (no FORMAT file) and not empty; "
                "name an empty or a new directory"
            )
        lock = self._keep(fs.open_file(self.root, "LOCK", write=True, create="LOCK" not in names))
        if not self._wait_for(lock):
            raise StoreLocked(f"{self.path}: another writer holds this store; one at a time")
        self._lock = lock
        if "FORMAT" not in names:
            line = b"kvtier store, format %d\n" % FORMAT_VERSION
            self._replace(self.root, "FORMAT", line)
        mode = fs.mode(self.root)
        if mode & OTHERS_MODE:
            log.warning(
                "%s: others may enter this directory (mode %04o): KV is as private as the prompts "
                "it was made from; chmod 0700 it, or set integrity_key if it must be shared",
                self.path,
                mode,
            )
        self.specs = self._keep(fs.open_subdirectory(self.root, "specs"))
        self.segments = self._keep(fs.open_subdirectory(self.root, "segments"))
        self._keep(fs.open_subdirectory(self.root, "index"))  # LMDB opens it by path, if it is one
        fs.sync_directory(self.root)

    def _wait_for(self, lock: int) -> bool:
        """Take the lock; a killed writer's index may hold it until its last commit has ended."""
        deadline = time.monotonic() + LOCK_S_MAX
        while not self._fs.lock(lock):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_RETRY_S)
        return True

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    @property
    def lock_fd(self) -> int:
        """The descriptor of LOCK: whoever else holds it keeps the store locked."""
        if self._lock is None:
            raise StoreFailed(f"{self.path}: the directory is closed")
        return self._lock

    @property
    def index_path(self) -> str:
        """Where the index lives."""
        return f"{self.path}/index"

    def keep_spec(self, spec: KVSpec) -> None:
        """Make the spec durable under its namespace, before its first record."""
        name, data = f"{spec.namespace.hex()}.msgpack", spec.to_bytes()
        if _read_if_there(self._fs, self.specs, name, SPEC_BYTES_MAX) != data:
            self._replace(self.specs, name, data)

    def read_specs(self) -> dict[bytes, KVSpec]:
        """Return every readable spec that this directory has held, by namespace."""
        return _read_specs(self._fs, self.specs)[0]

    def read_costs(self) -> bytes:
        """Return the cost file, empty if there is none or it cannot be read."""
        return _read_if_there(self._fs, self.root, "costs.msgpack", COSTS_BYTES_MAX)

    def write_costs(self, data: bytes) -> None:
        """Replace the cost file."""
        if len(data) <= COSTS_BYTES_MAX:
            self._replace(self.root, "costs.msgpack", data)

    def read_writes(self) -> bytes:
        """Return what the write budget saved, empty if nothing or if it cannot be read."""
        return _read_if_there(self._fs, self.root, "writes.msgpack", SAVED_BYTES_MAX)

    def write_writes(self, data: bytes) -> None:
        """Replace what the write budget saved, durably."""
        self._replace(self.root, "writes.msgpack", data)

    def write_live(self, data: bytes) -> None:
        """Replace what is shown to others while the store is open; not durable."""
        self._replace(self.root, "live.msgpack", data, durable=False)

    def remove_live(self) -> None:
        """Show nothing any more."""
        with suppress(OSError):
            self._fs.unlink(self.root, "live.msgpack")

    def _replace(self, directory: int, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a small file so that a reader or a crash sees the old one or the new one, whole."""
        fs = self._fs
        temporary = name + _TEMPORARY
        if temporary in fs.names(directory):
            fs.unlink(directory, temporary)
        fd = fs.open_file(directory, temporary, write=True, create=True)
        try:
            fs.write(fd, [memoryview(data)], 0)
            if durable:
                fs.sync(fd)
        finally:
            fs.close(fd)
        fs.rename(directory, temporary, name)
        if durable:
            fs.sync_directory(directory)

    def leave(self) -> None:
        """Let go of the lock's descriptor in a forked child: the store is its parent's alone."""
        if self._lock is not None:
            self._open.remove(self._lock)
            self._fs.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._lock is not None:
            self._fs.unlock(self._lock)
            self._lock = None
        while self._open:
            self._fs.close(self._open.pop())


class ReadDirectory:
    """A store's directory as a reader opens it: nothing is locked, made or changed.

    Raises ``FormatError`` if the path is no store or of a newer format, ``StoreFailed`` if it is
    not there or the file system refuses; each names the path.
    """

    def __init__(self, path: str, fs: FileSystem) -> None:
        self.path = path
        self._fs = fs
        self._open: list[int] = []
        try:
            self._enter()
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise FormatError(f"{path}: it, or a part of it, is no directory") from error
            raise StoreFailed(
                f"{path}: cannot be opened for reading: {error.strerror or error}; "
                "a writer (kvtier.open) makes the store"
            ) from error
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        fs = self._fs
        self._root = self._keep(fs.open_existing_directory(self.path))
        if "FORMAT" not in fs.names(self._root):
            raise FormatError(f"{self.path}: not a kvtier store (no FORMAT file)")
        _check_format(fs, self._root, self.path)
        self.segments = self._keep(fs.open_existing_directory("segments", self._root))
        with suppress(FileNotFoundError):  # as unreadable as a damaged one
            self._keep(fs.open_existing_directory("index", self._root))  # not a link to one

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    @property
    def index_path(self) -> str:
        """Where the index lives."""
        return f"{self.path}/index"

    def read_specs(self) -> tuple[dict[bytes, KVSpec], dict[str, str]]:
        """Return the specs by namespace, and by file name what is wrong with the other ones."""
        try:
            specs = self._fs.open_existing_directory("specs", self._root)
        except FileNotFoundError:
            return {}, {}
        except OSError as error:
            return {}, {"specs": error.strerror or str(error)}
        try:
            return _read_specs(self._fs, specs)
        finally:
            self._fs.close(specs)

    def read_costs(self) -> bytes:
        """Return the cost file, empty if there is none or it cannot be read."""
        return _read_if_there(self._fs, self._root, "costs.msgpack", COSTS_BYTES_MAX)

    def read_writes(self) -> bytes:
        """Return what the write budget saved, empty if nothing or if it cannot be read."""
        return _read_if_there(self._fs, self._root, "writes.msgpack", SAVED_BYTES_MAX)

    def read_live(self) -> bytes:
        """Return what the store's writer shows, empty if nothing or if it cannot be read."""
        return _read_if_there(self._fs, self._root, "live.msgpack", LIVE_BYTES_MAX)

    def close(self) -> None:
        """Close the directory; idempotent."""
        while self._open:
            self._fs.close(self._open.pop())


def _check_format(fs: FileSystem, root: int, path: str) -> None:
    match = _FORMAT_LINE.fullmatch(_read(fs, root, "FORMAT", _FORMAT_BYTES_MAX))
    if match is None:
        raise FormatError(f"{path}: FORMAT does not say 'kvtier store, format N'")
    version = int(match[1])
    if version != FORMAT_VERSION:
        raise FormatError(f"{path}: store of format {version}; this kvtier reads {FORMAT_VERSION}")


def _read_specs(fs: FileSystem, specs: int) -> tuple[dict[bytes, KVSpec], dict[str, str]]:
    found: dict[bytes, KVSpec] = {}
    faults: dict[str, str] = {}
    for name in fs.names(specs):
        if not name.endswith(".msgpack"):
            continue
        try:
            spec = KVSpec.from_bytes(_read(fs, specs, name, SPEC_BYTES_MAX))
        except FormatError as error:
            faults[name] = str(error)
        except OSError as error:
            faults[name] = error.strerror or str(error)
        else:
            found[spec.namespace] = spec
            if name != f"{spec.namespace.hex()}.msgpack":
                faults[name] = f"holds the spec of namespace {spec.namespace.hex()}"
    return found, faults


def _read(fs: FileSystem, directory: int, name: str, limit: int) -> bytes:
    fd = fs.open_file(directory, name, write=False, create=False)
    try:
        size = fs.size(fd)
        if size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
        data = bytearray(size)
        count = fs.read(fd, [memoryview(data)], 0)
        return bytes(data[:count])
    finally:
        fs.close(fd)


def _read_if_there(fs: FileSystem, directory: int, name: str, limit: int) -> bytes:
    try:
        return _read(fs, directory, name, limit)
    except OSError:
        return b""


_LOCKED: Final[weakref.WeakSet[StoreDirectory]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A child that outlives a killed parent would otherwise keep the store locked.
    for directory in list(_LOCKED):
        directory.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)
