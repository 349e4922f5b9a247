"""A store opened for writing without an engine: by its lock, whatever specs it holds.

There is no host memory, no catalog and no torch: index and segments, kept in step by the same tier
that an engine uses. Its budget is not known here and so does not count: nothing is evicted. Opening
recovers as every open does: damaged segments are unlinked, entries in doubt are dropped.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.config import BYTES_MAX
from kvtier.errors import FormatError, StoreFailed
from kvtier.tiers import keeper
from kvtier.tiers.directory import ReadDirectory, StoreDirectory
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.index import LmdbIndex
from kvtier.tiers.ssd import SsdTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.tiers.fs import FileSystem

__all__ = ["SEGMENT_BYTES_MAX", "LockedStore", "locked", "must_exist"]

SEGMENT_BYTES_MAX: Final = 256 << 20
"""Size of a new segment file, as an engine makes them by default."""
INDEX_BYTES_MAX: Final = 1 << 30
"""Least room for the index; one that is larger already gets twice its size."""


@dataclass(frozen=True, slots=True)
class LockedStore:
    """A store's directory, whose lock this process holds."""

    directory: StoreDirectory
    fs: FileSystem

    def open_index(self) -> LmdbIndex:
        """Open the index; whoever opens it closes it."""
        path = self.directory.index_path
        room = max(INDEX_BYTES_MAX, 2 * keeper.disk_bytes(path))
        return LmdbIndex(path, room, lock_fd=self.directory.lock_fd)

    @contextmanager
    def reading(self) -> Iterator[ReadDirectory]:
        """Open the directory for looking, before anything in it is changed."""
        directory = ReadDirectory(self.directory.path, self.fs)
        try:
            yield directory
        finally:
            directory.close()

    @contextmanager
    def open_tier(
        self, *, limit_bytes: int = BYTES_MAX, integrity_key: bytes = b""
    ) -> Iterator[SsdTier]:
        """Open the blocks; ``StoreFailed`` if the file system refuses."""
        index = self.open_index()
        try:
            tier = SsdTier(
                self.directory.segments,
                index,
                self.fs,
                limit_bytes=limit_bytes,
                segment_bytes_max=SEGMENT_BYTES_MAX,
                integrity_key=integrity_key,
            )
        except BaseException as error:
            index.close()
            if isinstance(error, OSError):
                words = f"{self.directory.path}: cannot be opened: {error.strerror or error}"
                raise StoreFailed(words) from error
            raise
        try:
            yield tier
        finally:
            tier.close()


@contextmanager
def locked(path: str) -> Iterator[LockedStore]:
    """Hold a store's lock; ``StoreLocked`` if an engine has it.

    A path that is empty or not there becomes a store, as for an engine.
    """
    fs = PosixFileSystem()
    directory = StoreDirectory(path, fs)
    try:
        yield LockedStore(directory, fs)
    finally:
        directory.close()


def must_exist(path: str) -> None:
    """Raise ``FormatError`` unless there is a store: a mistyped path must not become one."""
    if not os.path.lexists(os.path.join(path, "FORMAT")):
        raise FormatError(f"{path}: not a kvtier store (no FORMAT file)")
