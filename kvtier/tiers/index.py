"""The SSD tier's index: block id -> where its record is, kept by a process that may die for it.

The index is a hint, the record's header is the truth. A damaged LMDB file kills whoever reads it;
here that is the keeper (``keeper.py``), and the caller gets an error.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers import keeper
from kvtier.tiers.base import BlockId
from kvtier.tiers.entries import ENTRY, KEY_BYTES, Entries, table
from kvtier.tiers.link import Answer, Link

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "INDEX_COMMIT_BYTES_MAX",
    "REBUILD_COMMIT_ENTRIES",
    "Changes",
    "Index",
    "LmdbIndex",
    "LmdbIndexReader",
    "Use",
    "journal_bytes_max",
]

REBUILD_COMMIT_ENTRIES: Final = 4096
"""Entries in one commit of a rebuild."""
_UNFINISHED: Final = "rebuilding"
INDEX_COMMIT_BYTES_MAX: Final = 1 << 20
"""What one commit may add to the index file before the tier looks at its size again."""
SNAPSHOT_TRIES: Final = 3
"""How often a snapshot starts over because the journal lost what changed while it was read."""
ONLOOKER_TRIES: Final = 20
"""The same for an onlooker, whose process may also end at a torn page: beside a busy writer no
rare event."""
_KEYS: Final = np.dtype({"names": ["key"], "formats": ["S64"], "itemsize": ENTRY.itemsize})


def journal_bytes_max(bytes_max: int) -> int:
    """Return what the journal of an index of at most so many bytes takes of it once it is full."""
    return keeper.changes_kept(bytes_max) * keeper.CHANGE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Use:
    """That a block was used: hits to add to its entry, and when it last was, in ns since 1970."""

    id: BlockId
    hits: int
    last_use_ns: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What led to ``sequence``: each block once, with what became of it last."""

    sequence: int
    put: Entries
    removed: list[BlockId]


class Index(Protocol):
    """A durable map of entries; thread-safe. What fails once does not hang: waits are bounded."""

    def entries(self) -> Entries:
        """Return all entries as a table; ``FormatError`` if the index cannot be read."""

    def commit(
        self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use] = ()
    ) -> None:
        """Apply removals, then packed entries, then uses, in one durable transaction.

        ``OSError`` if that did not happen, or nobody knows: then ``healthy`` is False.
        """

    def rebuild(self, entries: Sequence[bytes]) -> None:
        """Replace everything by these packed entries; cut short, the index is unreadable."""

    def reset(self) -> None:
        """Start over empty, because what is there cannot be read."""

    def reopen(self) -> None:
        """Start over with what is on disk, because nobody knows what became of a commit."""

    def healthy(self) -> bool:
        """Return whether commits can succeed; ``reset`` or ``reopen`` may mend it if not."""

    def disk_bytes(self) -> int:
        """Return what the index occupied on disk after the last answer; never blocks."""

    def write_bytes(self) -> int:
        """Return what commits have written so far, where the system tells; never blocks."""

    def close(self) -> None:
        """Close the index; idempotent."""


class LmdbIndex:
    """LMDB in ``path``, growing up to ``bytes_max`` bytes, in a process of its own.

    That process ends with this one, after the commit that it is at work on; until then it keeps
    ``lock_fd`` open, and with it an flock. It is killed if an answer takes ``reply_s_max`` seconds.
    """

    def __init__(
        self,
        path: str,
        bytes_max: int,
        *,
        lock_fd: int | None = None,
        reply_s_max: float = 60.0,
    ) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._lock_fd = lock_fd
        self._reply_s_max = reply_s_max
        self._written_before = 0
        self._closed = False
        self._restart = threading.Lock()
        self._link = self._linked()

    def _linked(self) -> Link:
        # Not its parents: a store that was removed must not come back as an index alone.
        with suppress(FileExistsError):
            os.mkdir(self._path, 0o700)
        return Link(
            self._path, self._bytes_max, lock_fd=self._lock_fd, reply_s_max=self._reply_s_max
        )

    def entries(self) -> Entries:
        """Return all entries as a table; ``FormatError`` if the index cannot be read."""
        link = self._usable()
        if os.path.lexists(f"{self._path}/{_UNFINISHED}"):
            raise FormatError(f"{self._path}: a rebuild of the index was cut short")
        try:
            return _walked(link)[2]
        except OSError as error:
            if link.fault is None:
                raise
            raise FormatError(f"{error.strerror}; the index cannot be read") from error

    def commit(
        self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use] = ()
    ) -> None:
        """Apply removals, then packed entries, then uses, in one durable transaction.

        ``OSError`` if that did not happen, or nobody knows: then ``healthy`` is False.
        """
        keys = [block.namespace + block.hash for block in remove]
        if any(len(key) != KEY_BYTES for key in keys) or any(
            len(entry) != ENTRY.itemsize for entry in put
        ):
            raise ValueError(f"an entry is {ENTRY.itemsize} bytes, and a key {KEY_BYTES}")
        used = [
            keeper.USE.pack(use.id.namespace + use.id.hash, use.hits, use.last_use_ns)
            for use in uses
        ]
        counts = keeper.COMMITTED.pack(len(keys), len(put), len(used))
        try:
            self._usable().ask(keeper.COMMIT, b"".join((counts, *keys, *put, *used)))
        except FormatError as error:
            raise OSError(errno.EIO, str(error)) from error

    def rebuild(self, entries: Sequence[bytes]) -> None:
        """Replace everything by these packed entries; cut short, the index is unreadable."""
        mark = f"{self._path}/{_UNFINISHED}"
        with suppress(FileExistsError):
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _sync_directory(self._path)
        self.reset()
        # In any other order than that of the keys each commit would touch most of the pages.
        ordered = sorted(entries)
        for start in range(0, len(ordered), REBUILD_COMMIT_ENTRIES):
            self.commit(ordered[start : start + REBUILD_COMMIT_ENTRIES], ())
        os.unlink(mark)
        _sync_directory(self._path)

    def reset(self) -> None:
        """Start over empty, because what is there cannot be read."""
        with self._restart:
            self._usable()
            self._end(kill=True)
            # The lock first: whoever finds the new data finds the new lock.
            for name in reversed(keeper.FILES):
                _remove(f"{self._path}/{name}")
            self._link = self._linked()

    def reopen(self) -> None:
        """Start over with what is on disk, because nobody knows what became of a commit."""
        with self._restart:
            self._usable()
            self._end(kill=False)
            self._link = self._linked()

    def healthy(self) -> bool:
        """Return whether commits can succeed; ``reset`` or ``reopen`` may mend it if not."""
        return self._link.fault is None

    def disk_bytes(self) -> int:
        """Return what the index occupied on disk after the last answer; never blocks."""
        return self._link.disk_bytes

    def write_bytes(self) -> int:
        """Return what commits have written so far, where the system tells; never blocks."""
        return self._written_before + self._link.write_bytes

    def close(self) -> None:
        """Close the index; idempotent."""
        self._closed = True
        self._link.close()

    def _usable(self) -> Link:
        link = self._link
        link.check_owner()
        if self._closed:
            raise OSError(errno.EBADF, f"{self._path}: the index is closed")
        return link

    def _end(self, *, kill: bool) -> None:
        link = self._link
        link.close(kill=kill)
        self._written_before += link.write_bytes
        link.write_bytes = 0


class LmdbIndexReader:
    """The index in ``path`` as another process than its writer's follows it; thread-safe.

    A process of its own reads it, in transactions of milliseconds, and is started again when it
    died. It finds the index by itself when its writer starts over. With ``onlooker`` it changes no
    file: the writer does not know of it, and it works where this process may not write.
    """

    def __init__(self, path: str, *, onlooker: bool = False, reply_s_max: float = 60.0) -> None:
        self._path = path
        self._bytes_max = keeper.ONLOOKER if onlooker else 0
        self._reply_s_max = reply_s_max
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._link: Link | None = None
        self._birth = b""

    def snapshot(self) -> tuple[int, Entries]:
        """Return a sequence number and all entries as of then; ``FormatError`` if unreadable."""
        failure: OSError | None = None
        onlooker = self._bytes_max == keeper.ONLOOKER
        for _ in range(ONLOOKER_TRIES if onlooker else SNAPSHOT_TRIES):
            link = self._usable()
            try:
                birth, sequence, entries = _walked(link)
                with self._lock:
                    self._birth = birth
                changes = self._since(link, sequence)
            except OSError as error:
                failure = error
                if not onlooker:
                    break
                continue  # a page that is written anew under an onlooker may end its process
            if changes is not None:
                return changes.sequence, _merged(entries, changes)
        if failure is not None:
            raise FormatError(f"{failure.strerror}; the index cannot be read") from failure
        raise FormatError(f"{self._path}: the index changes faster than it can be read")

    def since(self, sequence: int) -> Changes | None:
        """Return what changed after ``sequence``; None if only a snapshot can tell."""
        link = self._usable()
        try:
            return self._since(link, sequence)
        except (OSError, FormatError):
            return None  # the snapshot says why

    def close(self) -> None:
        """Close the reader; idempotent."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()

    def _since(self, link: Link, sequence: int) -> Changes | None:
        body = link.ask(keeper.SINCE, keeper.SEQUENCE.pack(sequence)).body
        birth, last, count = keeper.JOURNAL.unpack_from(body)
        if count < 0 or birth != self._birth:
            return None
        folded: dict[bytes, bytes] = {}
        for start in range(keeper.JOURNAL.size, len(body), keeper.RECORD_BYTES):
            record = body[start : start + keeper.RECORD_BYTES]
            folded[record[1 : 1 + KEY_BYTES]] = record
        put = [record[1:] for record in folded.values() if record[0] == keeper.PUT]
        removed = [
            BlockId(key[:32], key[32:]) for key, record in folded.items() if record[0] != keeper.PUT
        ]
        return Changes(last, table(put), removed)

    def _usable(self) -> Link:
        if os.getpid() != self._owner:
            raise OSError(errno.EPERM, f"{self._path}: the index belongs to this process's parent")
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, f"{self._path}: the index is closed")
            if self._link is None or self._link.fault is not None:
                self._link = Link(
                    self._path, self._bytes_max, lock_fd=None, reply_s_max=self._reply_s_max
                )
            return self._link


def _walked(link: Link) -> tuple[bytes, int, Entries]:
    answer: Answer = link.ask(keeper.WALK, b"")
    birth, sequence, rows = keeper.WALKED.unpack(answer.body)
    return birth, sequence, answer.rows(rows)


def _merged(entries: Entries, changes: Changes) -> Entries:
    """Return a table that rises by key with changes applied, whether or not it has them already."""
    changed = np.frombuffer(
        b"".join(
            [*(row.tobytes()[:KEY_BYTES] for row in changes.put)]
            + [block.namespace + block.hash for block in changes.removed]
        ),
        dtype="S64",
    )
    if not changed.size:
        return entries
    keys = entries.view(_KEYS)["key"]
    rows = np.searchsorted(keys, changed)
    found = rows[rows < keys.size]
    found = found[keys[found] == changed[rows < keys.size]]
    kept = np.ones(keys.size, dtype=bool)
    kept[found] = False
    return np.concatenate([entries[kept], changes.put])


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.unlink(path)
