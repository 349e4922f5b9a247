"""Reading a record: its header is the truth, and every byte of it is checked."""

from __future__ import annotations

import errno
import hmac
from typing import TYPE_CHECKING, Final

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location, ReadResult
from kvtier.tiers.segment import header_tag, keyed_tag, part_digests, read_digests

if TYPE_CHECKING:
    from kvtier.tiers.record_io import RecordIo

__all__ = ["read_record"]

_GONE: Final = (errno.ENOENT, errno.EIO, errno.ELOOP, errno.EINVAL)
"""Errors of a read after which the bytes are not expected to come back."""


def read_record(
    io: RecordIo, key: bytes, block: BlockId, where: Location, into: memoryview
) -> tuple[ReadResult, str]:
    """Fill ``into`` with a block's payload; what is wrong with it, in words, unless it is OK.

    With ``key`` only a record that carries that key's tag is OK.
    """
    try:
        header, count = io.read(where, into)
    except OSError as error:
        gone = error.errno in _GONE
        return ReadResult.GONE if gone else ReadResult.FAILED, f"could not be read: {error}"
    if count < header.nbytes + into.nbytes or not header.nbytes:
        return ReadResult.GONE, f"ends after {count} bytes"
    fault = _fault(block, header, into, key)
    return ReadResult.GONE if fault else ReadResult.OK, fault


def _fault(block: BlockId, header: memoryview, payload: memoryview, key: bytes) -> str:
    """Return what is wrong with a record, in words; empty if it is the block's."""
    try:
        found, part_bytes, digests = read_digests(header)
    except FormatError as error:
        return f"is damaged: {error}"
    if found != block or sum(part_bytes) != payload.nbytes:
        return "is not there: its slot holds another block"
    if part_digests(part_bytes, payload) != digests:
        return "is damaged: a part fails its checksum"
    if key and not hmac.compare_digest(keyed_tag(key, header, payload), header_tag(header)):
        return "was not written with this store's integrity_key"
    return ""
