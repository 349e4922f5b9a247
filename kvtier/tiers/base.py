"""What every tier that kvtier owns can do with blocks; all batch, all blocking."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockId", "BlockTier", "Kind", "Location", "ReadResult", "Record", "Usage"]


class Kind(IntEnum):
    """What a record holds; only prefix blocks are written so far, the rest is reserved."""

    PREFIX = 0
    CHUNK = 1
    STATE = 2
    HIDDEN = 3


class ReadResult(IntEnum):
    """How a read ended. Only OK means that the buffer holds the block."""

    OK = 0
    GONE = 1
    """The bytes are damaged, replaced or gone for good."""
    FAILED = 2
    """The medium did not answer this time; the block may still be there."""


@dataclass(frozen=True, slots=True)
class BlockId:
    """A stored block's address: (namespace, block hash), 32 bytes each."""

    namespace: bytes
    hash: bytes

    def __str__(self) -> str:
        return f"{self.namespace.hex()[:8]}/{self.hash.hex()[:16]}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tier keeps a block. Host memory is one segment, numbered 0."""

    segment: int
    slot: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A block's identity as it is written beside its bytes."""

    id: BlockId
    parent: bytes
    position: int
    tenant_digest: bytes
    part_bytes: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, int], ...], ...]
    kind: Kind = Kind.PREFIX
    codec: int = 0
    priority: int = 0
    created_ns: int = 0
    expiry_ns: int = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.part_bytes)


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is. ``limit_bytes`` is what it may occupy, ``used_bytes`` what it does."""

    blocks: int
    used_bytes: int
    limit_bytes: int


class BlockTier(Protocol):
    """Bytes by location. A tier never evicts by itself: what has no room is not written.

    ``write`` returns one location per record, None where there was no room or the medium failed;
    once it returns, the written blocks are as durable as the tier gets. ``read`` fills a buffer
    with exactly the bytes that were written for that block, or does not return OK for it. ``drop``
    frees the locations for reuse.
    """

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store blocks."""

    def read(
        self,
        ids: Sequence[BlockId],
        locations: Sequence[Location],
        into: Sequence[memoryview],
    ) -> list[ReadResult]:
        """Fetch blocks into buffers of their payload's size."""

    def drop(self, ids: Sequence[BlockId], locations: Sequence[Location]) -> None:
        """Forget blocks."""

    def usage(self) -> Usage:
        """Return how full the tier is."""

    def check(self) -> list[str]:
        """Return what is wrong with the tier's own books, in words; empty if sound."""

    def close(self) -> None:
        """Release memory, files and locks; idempotent."""
