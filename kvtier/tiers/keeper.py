"""The index's own process: LMDB over 64-byte keys and 140-byte values, and a journal of changes.

LMDB ends the process that reads a damaged page (SIGABRT, SIGBUS, SIGSEGV), so it runs in one that
may die. This file is a script that ``link.py`` starts, and the definition of what the two say to
each other: ``REQUEST`` and a body, ``ANSWER`` and a body, over the socket at descriptor 0, whose
end is the keeper's end. It imports nothing of kvtier and is the only file that knows LMDB.
"""

from __future__ import annotations

import errno
import itertools
import operator
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Final, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    import lmdb

    Transaction = lmdb.Transaction[bytes]
    Cursor = lmdb.Cursor[bytes]
    Database = lmdb._Database  # noqa: SLF001 - the stubs' only name for it

__all__ = ["Index", "Keeper", "Unreadable", "changes_kept", "disk_bytes", "main"]

T = TypeVar("T")

REQUEST: Final = struct.Struct("<BQ")
"""Which request, and the bytes of its body."""
ANSWER: Final = struct.Struct("<BiQQQ")
"""How it ended, errno, disk bytes, bytes written so far, and the bytes of the body."""
WALK: Final = 1  # -> WALKED, with the descriptor of a file of rows
COMMIT: Final = 2  # COMMITTED, keys, rows, uses -> nothing
SINCE: Final = 3  # u64 sequence -> JOURNAL, records
OK: Final = 0
UNREADABLE: Final = 1  # the index is damaged; the body says how
FAILED: Final = 2  # it did not happen, the index is as before; errno, and the body says why

WALKED: Final = struct.Struct("<16sQQ")
"""The index's identity, the sequence number before the walk, rows."""
COMMITTED: Final = struct.Struct("<III")
"""How many removals, rows and uses follow."""
USE: Final = struct.Struct("<64sIQ")
"""Key, hits to add, last use in ns."""
JOURNAL: Final = struct.Struct("<16sQq")
"""The index's identity, its sequence number, records or -1: no longer there."""
PUT: Final = 1
REMOVE: Final = 2

KEY_BYTES: Final = 64
VALUE_BYTES: Final = 140
ROW_BYTES: Final = KEY_BYTES + VALUE_BYTES
RECORD_BYTES: Final = 1 + ROW_BYTES  # PUT or REMOVE, key, value (zeros for REMOVE)
_USED: Final = struct.Struct("<IQ")
_USED_OFFSET: Final = 64  # hits and last use within a value
_HITS_MAX: Final = (1 << 32) - 1

CHANGES_KEPT: Final = 4096
CHANGE_SHARE_BYTES: Final = 1 << 10
"""Records of the journal, and of a small index one per so much: it leaves room for entries."""
CHANGE_BYTES_MAX: Final = 256
"""What a record takes of the file at most: key, value, LMDB's node, and pages to be reused."""
CHUNK_ROWS: Final = 8192
"""Rows that one read transaction copies, some milliseconds: it pins the pages it reads."""
READ_AHEAD_BYTES: Final = 128 << 10
"""What Linux reads for one advice at the least, by default."""
ONLOOKER: Final = -1
"""In the place of ``bytes_max``: a reader that nobody knows of. It changes no file, so it may read
where it may not write, and pins no page: what it read counts only if it was still there then."""
ONLOOKER_TRIES_MAX: Final = 200
"""How often it reads a piece again, smaller and smaller, because it changed meanwhile."""
_CHUNK_HALVINGS_MAX: Final = 7
MAP_BYTES_FIRST: Final = 16 << 20
"""The map at first, doubled on demand; puts leave an eighth of the limit to removals."""
DATA_BYTES_MAX: Final = 2 << 30
"""The keeper's memory: a damaged length kills the keeper, not the machine."""

FILES: Final = ("data.mdb", "lock.mdb")
_DISK_UNIT: Final = 512
SEQUENCE: Final = struct.Struct(">Q")  # big-endian: the journal is in order of its keys
_BIRTH: Final = SEQUENCE.pack(0)  # where the journal keeps the index's identity
_SYSTEM: Final = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
}  # fmt: skip
"""Errors that say nothing about the index; EIO does, except for a commit."""


class Unreadable(Exception):
    """The index's files are not an index, or a damaged one."""


def changes_kept(bytes_max: int) -> int:
    """Return how many records the journal of an index of at most so many bytes has."""
    return max(min(CHANGES_KEPT, bytes_max // CHANGE_SHARE_BYTES), 1)


def _expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - a condition, not a choice
    if not holds:
        raise Unreadable(otherwise)


def disk_bytes(path: str) -> int:
    """Return what the index in a directory occupies on disk."""
    total = 0
    for name in FILES:
        with suppress(OSError):
            total += os.lstat(f"{path}/{name}").st_blocks * _DISK_UNIT
    return total


class Index:
    """The index in ``path``; its only writer makes it.

    ``bytes_max`` is 0 for a reader, and ``ONLOOKER`` for one that is not in the reader table.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self._path = path
        self._onlooker = bytes_max == ONLOOKER
        self._bytes_max = bytes_max = max(bytes_max, 0)
        self._put_bytes_max = bytes_max - bytes_max // 8
        self._file = _inode(path)
        first = min(MAP_BYTES_FIRST, self._put_bytes_max or MAP_BYTES_FIRST)
        self._env = _environment(path, first, readonly=not bytes_max, lock=not self._onlooker)
        if bytes_max:
            self._entries, self._changes = self._make()
        else:
            self._entries = self._env.open_db(b"entries", create=False)
            self._changes = self._env.open_db(b"changes", create=False)

    def _make(self) -> tuple[Database, Database]:
        # A page beyond the end would be a SIGBUS later, not an error now.
        size = os.stat(f"{self._path}/data.mdb").st_size
        _expect(size >= self._wanted_bytes(), "data.mdb is truncated")
        with self._env.begin(write=True) as transaction:
            names = list(itertools.islice(transaction.cursor().iternext(values=False), 3))
            _expect(names in ([], [b"changes", b"entries"]), "data.mdb holds something else")
            entries = self._env.open_db(b"entries", txn=transaction)
            changes = self._env.open_db(b"changes", txn=transaction)
            if not names:
                transaction.put(_BIRTH, os.urandom(16), db=changes)
        if self._file is None:
            self._file = _inode(self._path)
            directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(directory)  # LMDB syncs a new file, not its name
            os.close(directory)
        return entries, changes

    def current(self) -> bool:
        """Return whether the file is still the one that was opened."""
        return _inode(self._path) == self._file

    def close(self) -> None:
        """Close the index."""
        self._env.close()

    def _begin(self) -> Transaction:
        import lmdb

        try:
            return self._env.begin(buffers=False)
        except lmdb.MapResizedError:
            self._env.set_mapsize(0)  # the writer's
            return self._env.begin(buffers=False)

    def _read(self, what: Callable[[Transaction, int], T]) -> T:
        """Return what a read transaction finds; ``what`` also gets how often it was tried before.

        An onlooker's transaction N keeps nobody from reusing pages. Transaction W reuses what was
        freed up to W - 2, so the first to write over a page of N is N + 3, once N + 2 is committed.
        """
        import lmdb

        for attempt in range(ONLOOKER_TRIES_MAX):
            with self._begin() as transaction:
                found: T | None = None
                failure: Exception | None = None
                try:
                    found = what(transaction, attempt)
                except (lmdb.Error, Unreadable, struct.error) as error:
                    failure = error
                still = self._env.info()["last_txnid"] <= transaction.id() + 1
            if self._onlooker and not still:
                continue
            if failure is not None:
                raise failure
            return cast("T", found)
        raise Unreadable("it changes faster than it can be read")

    def walk(self) -> tuple[bytes, int]:
        """Copy all rows, in the order of their keys, to a file that has no name."""
        self._read_ahead()
        birth, before = self._read(self._head)
        rows = 0
        key = b""
        with _nameless() as out:
            while chunk := self._read(partial(self._chunk, key)):
                out.write(b"".join(chunk))
                rows += len(chunk) // 2
                key = chunk[-2]
            out.flush()
            last, counted = self._read(self._counted)
            complete = last != before or counted == rows
            _expect(complete, f"{rows} of its {counted} entries are there")
            return WALKED.pack(birth, before, rows), os.dup(out.fileno())

    def _read_ahead(self) -> None:
        # In the order of its keys the file is read a page here and a page there: forty times as
        # long, where it is not in memory.
        fd = os.open(f"{self._path}/{FILES[0]}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in range(0, os.fstat(fd).st_size, READ_AHEAD_BYTES):
                os.posix_fadvise(fd, start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

    def _head(self, transaction: Transaction, _attempt: int) -> tuple[bytes, int]:
        birth = transaction.get(_BIRTH, b"", db=self._changes)
        return birth, _last(transaction.cursor(self._changes))

    def _counted(self, transaction: Transaction, _attempt: int) -> tuple[int, int]:
        entries = transaction.stat(self._entries)["entries"]
        return _last(transaction.cursor(self._changes)), entries

    def _chunk(self, after: bytes, transaction: Transaction, attempt: int) -> list[bytes]:
        """Return keys and values in turn, of the rows after a key; keys rise, so a walk ends."""
        cursor = transaction.cursor(self._entries)
        if not cursor.set_range(after) or (cursor.key() == after and not cursor.next()):
            return []
        count = CHUNK_ROWS >> min(attempt, _CHUNK_HALVINGS_MAX)
        flat = list(itertools.chain.from_iterable(itertools.islice(cursor, count)))
        keys = flat[0::2]
        _expect(set(map(len, keys)) == {KEY_BYTES}, "a key has another size")
        _expect(set(map(len, flat[1::2])) == {VALUE_BYTES}, "an entry has another size")
        rising = after < keys[0] and all(map(operator.lt, keys, keys[1:]))
        _expect(rising, "its entries are out of order")
        return flat

    def since(self, sequence: int) -> bytes:
        """Return the changes after a sequence number."""
        return self._read(partial(self._journal, sequence))

    def _journal(self, sequence: int, transaction: Transaction, _attempt: int) -> bytes:
        records: list[bytes] = []
        birth = transaction.get(_BIRTH, b"", db=self._changes)
        changes = transaction.cursor(self._changes)
        last = _last(changes)
        if sequence < last and changes.set_range(SEQUENCE.pack(sequence + 1)):
            for key, record in itertools.islice(changes, CHANGES_KEPT):
                if key != SEQUENCE.pack(sequence + 1 + len(records)):
                    break  # trimmed
                _expect(len(record) in (1 + KEY_BYTES, RECORD_BYTES), "a change's size")
                records.append(record.ljust(RECORD_BYTES, b"\0"))
        count = len(records) if sequence + len(records) == last else -1
        return JOURNAL.pack(birth, last, count) + b"".join(records[: max(count, 0)])

    def commit(self, removed: list[bytes], put: list[bytes], used: list[bytes]) -> None:
        """Apply removals, then rows, then uses, durably and all or none."""
        import lmdb

        _expect(self.current(), "data.mdb was replaced or removed")
        self._env.reader_check()  # what dead readers pin cannot be reused
        # Removals take pages before they free any: a map that puts may fill could not be emptied.
        limit = self._put_bytes_max if put else self._bytes_max
        if self._env.info()["map_size"] > limit:
            self._env.set_mapsize(limit)
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    self._apply(transaction, removed, put, used)
                break
            except lmdb.MapFullError:
                map_bytes = self._env.info()["map_size"]
                if map_bytes >= limit:
                    raise
                self._env.set_mapsize(min(2 * map_bytes, limit))
            except lmdb.Error:
                self._env.begin(write=True).abort()  # fails where nobody knows what was committed
                raise
        # A page taken at the end and not needed after all is counted but never written; the next
        # open would take the file for a truncated one.
        wanted = self._wanted_bytes()
        if os.stat(f"{self._path}/data.mdb").st_size < wanted:
            os.truncate(f"{self._path}/data.mdb", wanted)

    def _wanted_bytes(self) -> int:
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def _apply(
        self, transaction: Transaction, removed: list[bytes], put: list[bytes], used: list[bytes]
    ) -> None:
        entries = self._entries
        for key in removed:
            transaction.delete(key, db=entries)
        # In the order of their keys they touch each page once; of two for one key the last wins.
        for row in sorted(put, key=operator.itemgetter(slice(KEY_BYTES))):
            transaction.put(row[:KEY_BYTES], row[KEY_BYTES:], db=entries)
        for use in used:
            key, hits, last_use = USE.unpack(use)
            value = bytearray(transaction.get(key, b"", db=entries))
            if len(value) == VALUE_BYTES:
                hits_before, last_before = _USED.unpack_from(value, _USED_OFFSET)
                hits = min(hits_before + hits, _HITS_MAX)
                _USED.pack_into(value, _USED_OFFSET, hits, max(last_before, last_use))
                transaction.put(key, value, db=entries)
        if removed or put:
            self._record(transaction.cursor(self._changes), removed, put)

    def _record(self, changes: Cursor, removed: list[bytes], put: list[bytes]) -> None:
        last = _last(changes) + len(removed) + len(put)
        kept = changes_kept(self._bytes_max)
        records = [bytes((REMOVE,)) + key for key in removed[-kept:]]
        records = (records + [bytes((PUT,)) + row for row in put[-kept:]])[-kept:]
        for sequence, record in enumerate(records, last - len(records) + 1):
            changes.put(SEQUENCE.pack(sequence), record, append=True)
        oldest = SEQUENCE.pack(max(last - kept + 1, 0))
        there = changes.set_range(SEQUENCE.pack(1))
        while there and changes.key() < oldest:
            there = changes.delete() and bool(changes.key())


def _environment(
    path: str, map_bytes: int, *, readonly: bool = False, lock: bool = True
) -> lmdb.Environment:
    """Open what is there; ``Unreadable`` where LMDB would take it for something else."""
    import lmdb

    for name in FILES:
        with suppress(FileNotFoundError):
            status = os.lstat(f"{path}/{name}")
            _expect(stat.S_ISREG(status.st_mode), f"{name} is not a regular file")
            # In an empty file LMDB would begin a new index.
            _expect(name != FILES[0] or status.st_size > 0, f"{name} is empty")
    return lmdb.open(
        path,
        map_size=map_bytes,
        readonly=readonly,
        lock=lock,
        create=False,
        mode=0o600,
        max_dbs=2,
        readahead=False,
    )


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(f"{path}/data.mdb")
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _last(cursor: Cursor) -> int:
    _expect(cursor.last(), "its journal has no beginning")
    return int(SEQUENCE.unpack(cursor.key())[0])


def _cut(body: bytes) -> list[list[bytes]]:
    """Return the keys, rows and uses of a commit."""
    cuts = []
    offset = COMMITTED.size
    sizes = (KEY_BYTES, ROW_BYTES, USE.size)
    for count, size in zip(COMMITTED.unpack_from(body), sizes, strict=True):
        end = offset + count * size
        cuts.append([body[start : start + size] for start in range(offset, end, size)])
        offset = end
    return cuts


def _nameless() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("kvtier-index"), "wb")
    import tempfile

    return tempfile.TemporaryFile()


def _written_bytes() -> int:
    """Return what this process gave to write calls; ``write_bytes`` counts whole folios instead."""
    with suppress(OSError, ValueError), open("/proc/self/io", "rb") as file:
        return int(dict(line.split(b": ") for line in file)[b"wchar"])
    return 0


class Keeper:
    """Opens the index when it is asked for, and says how each request ended."""

    def __init__(self, path: str, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._index: Index | None = None
        self._written = 0

    def answer(self, request: int, body: bytes) -> tuple[bytes, int | None]:
        """Return the answer to a request, and the descriptor that goes with it."""
        import lmdb

        status, code, fd = OK, 0, None
        written_before = _written_bytes()
        try:
            reply, fd = self._serve(request, body)
        except OSError as error:
            status, code = FAILED, error.errno or errno.EIO
            reply = str(error.strerror or error).encode()
        except lmdb.MapFullError:
            status, code = FAILED, errno.EFBIG  # not ENOSPC: that is the disk's
            reply = b"the index is full: index_bytes_max is %d; raise it" % self._bytes_max
        except (lmdb.Error, Unreadable, struct.error, ValueError) as error:
            # By its words: old lmdb has no codes. A short write, for want of space, is LMDB's EIO.
            code = next((n for n in _SYSTEM if os.strerror(n) in str(error)), 0)
            system = code and (request == COMMIT or code != errno.EIO)
            status, code = (FAILED, code) if system else (UNREADABLE, 0)
            reply = str(error).encode()
        if request == COMMIT:
            self._written += _written_bytes() - written_before
        disk = disk_bytes(self._path)
        return ANSWER.pack(status, code, disk, self._written, len(reply)) + reply, fd

    def _serve(self, request: int, body: bytes) -> tuple[bytes, int | None]:
        if self._index is not None and self._bytes_max <= 0 and not self._index.current():
            self._index.close()
            self._index = None
        if self._index is None:
            self._index = Index(self._path, self._bytes_max)
        index = self._index
        if request == WALK:
            return index.walk()
        if request == SINCE:
            return index.since(*SEQUENCE.unpack(body)), None
        index.commit(*_cut(body))
        return b"", None


def main() -> None:
    """Answer requests until the other side is gone; arguments as ``link.py`` gives them."""
    import resource

    packages, path, bytes_max = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # there is a lower limit already
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES_MAX, DATA_BYTES_MAX))
    sys.path.append(packages)
    import lmdb  # noqa: F401 - while the engine does something else

    keeper = Keeper(path, int(bytes_max))
    with socket.socket(fileno=0) as end, end.makefile("rb") as requests:
        while len(header := requests.read(REQUEST.size)) == REQUEST.size:
            request, length = REQUEST.unpack(header)
            if len(body := requests.read(length)) != length:
                return
            answer, fd = keeper.answer(request, body)
            if fd is not None:  # it goes with the first byte
                socket.send_fds(end, [answer[:1]], [fd])
                os.close(fd)
                answer = answer[1:]
            end.sendall(answer)


if __name__ == "__main__":
    main()
