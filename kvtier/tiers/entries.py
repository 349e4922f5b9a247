"""What the index says of a block: 204 packed bytes, alone or as the rows of a table.

A million entries are one numpy array, not a million objects; the columns are the fields of
``ENTRY``, in the order of FORMAT.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.tiers.base import BlockId, Location, Record

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ENTRY",
    "ENTRY_VERSION",
    "KEY_BYTES",
    "Entries",
    "entry_of",
    "id_at",
    "location_at",
    "table",
]

ENTRY_VERSION: Final = 1
KEY_BYTES: Final = 64
ENTRY: Final = np.dtype(
    [
        ("namespace", "V32"),
        ("hash", "V32"),
        ("version", "<u2"),
        ("kind", "<u2"),
        ("codec", "<u2"),
        ("reserved", "<u2"),
        ("position", "<u8"),
        ("segment", "<u8"),
        ("slot", "<u4"),
        ("slot_bytes", "<u8"),
        ("payload_bytes", "<u8"),
        ("created_ns", "<u8"),
        ("expiry_ns", "<u8"),
        ("priority", "<i4"),
        ("hits", "<u4"),
        ("last_use_ns", "<u8"),
        ("tenant", "V32"),
        ("parent", "V32"),
    ]
)
"""One entry: the first 64 bytes are its key in the index, the rest its value."""

Entries = np.ndarray[Any, np.dtype[np.void]]
"""A table of entries: a one-dimensional array of ``ENTRY``."""


def entry_of(record: Record, where: Location, last_use_ns: int) -> bytes:
    """Return the packed entry of a record at ``where``."""
    row = np.zeros(1, dtype=ENTRY)
    row["namespace"] = np.void(record.id.namespace)
    row["hash"] = np.void(record.id.hash)
    row["version"] = ENTRY_VERSION
    row["kind"] = int(record.kind)
    row["codec"] = record.codec
    row["position"] = record.position
    row["segment"] = where.segment
    row["slot"] = where.slot
    row["slot_bytes"] = where.slot_bytes
    row["payload_bytes"] = record.payload_bytes
    row["created_ns"] = record.created_ns
    row["expiry_ns"] = record.expiry_ns
    row["priority"] = record.priority
    row["last_use_ns"] = last_use_ns
    row["tenant"] = np.void(record.tenant_digest)
    row["parent"] = np.void(record.parent)
    return row.tobytes()


def table(packed: bytes | bytearray | memoryview | Iterable[bytes]) -> Entries:
    """Return packed entries, in one piece or one by one, as a table."""
    if not isinstance(packed, (bytes, bytearray, memoryview)):
        packed = b"".join(packed)
    return np.frombuffer(packed, dtype=ENTRY)


def id_at(entries: Entries, row: int) -> BlockId:
    """Return the block of a row."""
    entry = entries[row]
    return BlockId(entry["namespace"].tobytes(), entry["hash"].tobytes())


def location_at(entries: Entries, row: int) -> Location:
    """Return where a row says that its block is."""
    entry = entries[row]
    return Location(int(entry["segment"]), int(entry["slot"]), int(entry["slot_bytes"]))
