"""The store's directory: what it must look like, who may write, and its few small files."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from typing import TYPE_CHECKING, Final

from kvtier.errors import FormatError, StoreFailed, StoreLocked
from kvtier.identity import SPEC_BYTES_MAX, KVSpec
from kvtier.tiers.segment import FORMAT_VERSION
from kvtier.tiers.write_budget import SAVED_BYTES_MAX

if TYPE_CHECKING:
    from kvtier.tiers.fs import FileSystem

__all__ = ["StoreDirectory"]

log = logging.getLogger(__name__)

_FORMAT_LINE: Final = re.compile(rb"kvtier store, format (\d{1,9})\n")
_FORMAT_BYTES_MAX: Final = 64
COSTS_BYTES_MAX: Final = 1 << 20
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
            self._check_format()
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

    def _check_format(self) -> None:
        line = self._read(self.root, "FORMAT", _FORMAT_BYTES_MAX)
        match = _FORMAT_LINE.fullmatch(line)
        if match is None:
            raise FormatError(f"{self.path}: FORMAT does not say 'kvtier store, format N'")
        version = int(match[1])
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{self.path}: store of format {version}; this kvtier reads {FORMAT_VERSION}"
            )

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
        name = f"{spec.namespace.hex()}.msgpack"
        if name in self._fs.names(self.specs):
            return
        self._replace(self.specs, name, spec.to_bytes())

    def read_specs(self) -> dict[bytes, KVSpec]:
        """Return every readable spec that this directory has held, by namespace."""
        found = {}
        for name in self._fs.names(self.specs):
            if not name.endswith(".msgpack"):
                continue
            try:
                spec = KVSpec.from_bytes(self._read(self.specs, name, SPEC_BYTES_MAX))
            except (FormatError, OSError):
                continue
            found[spec.namespace] = spec
        return found

    def read_costs(self) -> bytes:
        """Return the cost file, empty if there is none or it cannot be read."""
        try:
            return self._read(self.root, "costs.msgpack", COSTS_BYTES_MAX)
        except OSError:
            return b""

    def write_costs(self, data: bytes) -> None:
        """Replace the cost file."""
        if len(data) <= COSTS_BYTES_MAX:
            self._replace(self.root, "costs.msgpack", data)

    def read_writes(self) -> bytes:
        """Return what the write budget saved, empty if nothing or if it cannot be read."""
        try:
            return self._read(self.root, "writes.msgpack", SAVED_BYTES_MAX)
        except OSError:
            return b""

    def write_writes(self, data: bytes) -> None:
        """Replace what the write budget saved, durably."""
        self._replace(self.root, "writes.msgpack", data)

    def _read(self, directory: int, name: str, limit: int) -> bytes:
        fd = self._fs.open_file(directory, name, write=False, create=False)
        try:
            size = self._fs.size(fd)
            if size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            data = bytearray(size)
            count = self._fs.read(fd, [memoryview(data)], 0)
            return bytes(data[:count])
        finally:
            self._fs.close(fd)

    def _replace(self, directory: int, name: str, data: bytes) -> None:
        """Write a small file so that a reader or a crash sees the old one or the new one, whole."""
        fs = self._fs
        temporary = name + _TEMPORARY
        if temporary in fs.names(directory):
            fs.unlink(directory, temporary)
        fd = fs.open_file(directory, temporary, write=True, create=True)
        try:
            fs.write(fd, [memoryview(data)], 0)
            fs.sync(fd)
        finally:
            fs.close(fd)
        fs.rename(directory, temporary, name)
        fs.sync_directory(directory)

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._lock is not None:
            self._fs.unlock(self._lock)
            self._lock = None
        while self._open:
            self._fs.close(self._open.pop())
