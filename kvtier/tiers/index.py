"""The SSD tier's index in LMDB: block id -> where its record is; the only module that knows LMDB.

The index is a hint, the record's header is the truth. Keys are namespace and block hash (64 bytes);
values are fixed structs (FORMAT.md). One write transaction per commit, synced before it returns.
"""

from __future__ import annotations

import logging
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import lmdb

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.fs import DISK_UNIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Entry", "Index", "LmdbIndex"]

log = logging.getLogger(__name__)

_VALUE: Final = struct.Struct("<HHHHQQIQQQQiIQ32s32s")
_VERSION: Final = 1
_FILES: Final = ("data.mdb", "lock.mdb")
_KEY_BYTES: Final = 64
INDEX_COMMIT_BYTES_MAX: Final = 1 << 20
"""What one commit may add to the index file before the tier looks at its size again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored block as the index knows it."""

    id: BlockId
    location: Location
    payload_bytes: int
    position: int
    parent: bytes
    tenant_digest: bytes
    kind: int = 0
    codec: int = 0
    priority: int = 0
    created_ns: int = 0
    expiry_ns: int = 0
    hits: int = 0
    last_use_ns: int = 0


class Index(Protocol):
    """A durable map of entries."""

    def entries(self) -> Iterator[Entry]:
        """Walk all entries; ``FormatError`` if the index cannot be read."""

    def commit(self, put: Iterable[Entry], remove: Iterable[BlockId]) -> None:
        """Apply removals and additions in one durable transaction; ``OSError`` if it did not."""

    def reset(self) -> None:
        """Start over empty, because what is there cannot be read."""

    def disk_bytes(self) -> int:
        """Return what the index occupies on disk."""

    def close(self) -> None:
        """Close the index; idempotent."""


class LmdbIndex:
    """LMDB in ``path``, growing up to ``bytes_max`` of address space.

    An index that cannot be opened or read is not an error of the store: ``entries`` raises
    ``FormatError``, and after ``reset`` it is rebuilt from the records' headers.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._env: lmdb.Environment | None = None
        os.makedirs(path, mode=0o700, exist_ok=True)
        try:
            self._env = self._open()
        except (lmdb.Error, FormatError) as error:
            log.warning("%s: the index cannot be opened: %s", path, error)

    def _open(self) -> lmdb.Environment:
        env = lmdb.open(
            self._path, map_size=self._bytes_max, mode=0o600, max_dbs=0, readahead=False
        )
        # A file shorter than its last page would be a SIGBUS later, not an error.
        wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        size = os.stat(f"{self._path}/data.mdb").st_size
        if size and size < wanted:
            env.close()
            raise FormatError(f"data.mdb has {size} of {wanted} bytes")
        return env

    def entries(self) -> Iterator[Entry]:
        """Walk all entries; ``FormatError`` if the index cannot be read."""
        if self._env is None:
            raise FormatError(f"{self._path}: the index cannot be opened")
        try:
            with self._env.begin(buffers=False) as transaction:
                for key, value in transaction.cursor():
                    yield _decode(key, value)
        except (lmdb.Error, struct.error, ValueError) as error:
            raise FormatError(f"{self._path}: the index cannot be read: {error}") from error

    def reset(self) -> None:
        """Start over empty, because what is there cannot be read."""
        self.close()
        for name in _FILES:
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}/{name}")
        self._env = self._open()

    def commit(self, put: Iterable[Entry], remove: Iterable[BlockId]) -> None:
        """Apply removals and additions in one durable transaction; ``OSError`` if it did not."""
        if self._env is None:
            raise OSError(f"{self._path}: the index is closed")
        try:
            with self._env.begin(write=True) as transaction:
                for block in remove:
                    transaction.delete(block.namespace + block.hash)
                for entry in put:
                    transaction.put(entry.id.namespace + entry.id.hash, _encode(entry))
        except lmdb.Error as error:
            raise OSError(f"{self._path}: the index did not commit: {error}") from error

    def disk_bytes(self) -> int:
        """Return what the index occupies on disk."""
        total = 0
        for name in _FILES:
            with suppress(FileNotFoundError):
                total += os.stat(f"{self._path}/{name}").st_blocks * DISK_UNIT
        return total

    def close(self) -> None:
        """Close the index; idempotent."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _encode(entry: Entry) -> bytes:
    return _VALUE.pack(
        _VERSION,
        entry.kind,
        entry.codec,
        0,
        entry.position,
        entry.location.segment,
        entry.location.slot,
        entry.location.slot_bytes,
        entry.payload_bytes,
        entry.created_ns,
        entry.expiry_ns,
        entry.priority,
        entry.hits,
        entry.last_use_ns,
        entry.tenant_digest,
        entry.parent,
    )


def _decode(key: bytes, value: bytes) -> Entry:
    if len(key) != _KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes")
    (
        version, kind, codec, _reserved, position, segment, slot, slot_bytes, payload,
        created, expiry, priority, hits, last_use, tenant, parent,
    ) = _VALUE.unpack(value)  # fmt: skip
    if version != _VERSION:
        raise ValueError(f"an entry of version {version}")
    return Entry(
        id=BlockId(key[:32], key[32:]),
        location=Location(segment, slot, slot_bytes),
        payload_bytes=payload,
        position=position,
        parent=parent,
        tenant_digest=tenant,
        kind=kind,
        codec=codec,
        priority=priority,
        created_ns=created,
        expiry_ns=expiry,
        hits=hits,
        last_use_ns=last_use,
    )
