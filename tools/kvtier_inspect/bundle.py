r"""A bundle: blocks on their way between stores in one file, made so that nothing in it is trusted.

::

    0        magic `KVTBND\r\n`, u32 version 1, u32 zero
    16       one zstd frame; its content:
                 u32 specs, then for each: u32 bytes, a KVSpec's canonical encoding
                 for each block: u32 header bytes, a record's header, its payload
    end - 56 magic `KVTEND\r\n`, u64 blocks, u64 bytes of the content
    end - 32 SHA-256 of all that comes before it

Integers are little-endian; headers and payloads are those of FORMAT.md, so that every block carries
its identity and its checksums. Blocks are in the order of (namespace, created, position, hash): a
bundle of the same blocks is the same file, whatever the store around them. A bundle that was cut
short or added to fails its digest. The digest finds damage, not malice: who may write a bundle may
make one up, and only the keyed tag of an `integrity_key` tells.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final, Self

import xxhash
import zstandard

from kvtier.errors import FormatError
from kvtier.identity import SPEC_BYTES_MAX, KVSpec
from kvtier.tiers.segment import (
    HEADER_PAGES_MAX,
    PAGE_BYTES,
    decode_header,
    header_tag,
    keyed_tag,
)
from kvtier_inspect.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from kvtier.tiers.base import Record

__all__ = [
    "BLOCK_BYTES_MAX",
    "Block",
    "BundleReader",
    "Contents",
    "check_record",
    "place",
    "write_bundle",
]

VERSION: Final = 1
SPECS_MAX: Final = 4096
BLOCK_BYTES_MAX: Final = 4 << 30
"""Payload of one block; 256 tokens of OPT-66B are 0.6 GB."""
PIECE_BYTES: Final = 1 << 20
"""How much is read, decompressed or hashed at once."""
WINDOW_BYTES_MAX: Final = 8 << 20
"""What a zstd frame may make its reader keep; level 3 asks for 2 MiB."""
LEVEL: Final = 3

_MAGIC: Final = b"KVTBND\r\n"
_END: Final = b"KVTEND\r\n"
_PREAMBLE: Final = struct.Struct("<8sII")
_TRAILER: Final = struct.Struct("<8sQQ")
_DIGEST_BYTES: Final = 32
_U32: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Block:
    """A record's header as it is on disk, and its payload."""

    header: bytes | memoryview
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Contents:
    """A verified block of a bundle: its record, and its payload unless only verified."""

    record: Record
    payload: bytearray | None


# -- writing


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.written = 0

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        self._file.write(data)
        self.written += len(data)
        return len(data)


def write_bundle(
    file: BinaryIO,
    specs: Iterable[KVSpec],
    blocks: Iterable[Block],
    wrote: Callable[[int], None] = lambda _: None,
) -> Summary:
    """Write a bundle; ``wrote`` is told the bytes of each block.

    The caller orders the blocks and drops those whose spec is not given. Memory: one block and the
    compressor's window.
    """
    by_namespace = {spec.namespace: spec for spec in specs}
    out = _Hashed(file)
    out.write(_PREAMBLE.pack(_MAGIC, VERSION, 0))
    count = content = 0
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with compressor.stream_writer(out, closefd=False) as frame:  # type: ignore[arg-type]

        def put(data: bytes | memoryview) -> None:
            nonlocal content
            frame.write(data)
            content += len(data)

        put(_U32.pack(len(by_namespace)))
        for _, spec in sorted(by_namespace.items()):
            encoded = spec.to_bytes()
            put(_U32.pack(len(encoded)))
            put(encoded)
        for block in blocks:
            put(_U32.pack(len(block.header)))
            put(block.header)
            put(block.payload)
            count += 1
            wrote(len(block.payload))
    out.write(_TRAILER.pack(_END, count, content))
    digest = out.sha256.digest()
    file.write(digest)
    size = out.written + _DIGEST_BYTES
    return Summary(by_namespace, count, content, size, digest.hex())


# -- reading


class _Frame:
    """The frame's bytes of a bundle, hashed as they are read; it ends where the trailer begins."""

    def __init__(self, file: BinaryIO, nbytes: int, sha256: hashlib._Hash | None) -> None:
        self._file = file
        self.left = nbytes
        self._sha256 = sha256

    def read(self, size: int = -1) -> bytes:
        wanted = min(PIECE_BYTES if size < 0 else size, self.left)
        data = self._file.read(wanted)
        if len(data) != wanted:
            raise FormatError("it became shorter while it was read")
        self.left -= wanted
        if self._sha256 is not None:
            self._sha256.update(data)
        return data


class BundleReader:
    """A bundle in a regular file: ``verify`` everything, and only then take ``blocks``.

    ``key`` is the integrity key that every block must carry the tag of, if given. Every fault is a
    ``FormatError`` that says what is wrong; memory is bounded whatever the file says.
    """

    def __init__(self, path: str, key: bytes = b"") -> None:
        self._path = path
        self._key = key
        # A pipe that nobody writes to must not hold us; a bundle is read twice, so it is a file.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FormatError(f"{path}: a bundle is read twice: it must be a file")
        self._file = os.fdopen(fd, "rb")
        try:
            with self._named():
                self._file_bytes, self.blocks_count, self.content_bytes = self._ends()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in what is wrong with it."""
        try:
            yield
        except FormatError as error:
            raise FormatError(f"{self._path}: {error}; nothing of it is trusted") from None

    def _ends(self) -> tuple[int, int, int]:
        """Return the file's bytes, and what its trailer says: blocks, bytes of the content."""
        size = os.fstat(self._file.fileno()).st_size
        least = _PREAMBLE.size + _TRAILER.size + _DIGEST_BYTES
        head = self._file.read(_PREAMBLE.size)
        if len(head) < _PREAMBLE.size or head[:8] != _MAGIC:
            raise FormatError("not a bundle of kvtier: wrong magic")
        _, version, zero = _PREAMBLE.unpack(head)
        if version != VERSION or zero:
            raise FormatError(f"a bundle of version {version}; this kvtier reads {VERSION}")
        if size < least:
            raise FormatError("it is cut short")
        self._file.seek(size - _TRAILER.size - _DIGEST_BYTES)
        end, blocks, content = _TRAILER.unpack(self._file.read(_TRAILER.size))
        if end != _END:
            raise FormatError("it is cut short, or something was added to it")
        return size, blocks, content

    def verify(self, read: Callable[[int], None] = lambda _: None) -> Summary:
        """Check every byte of the bundle; ``read`` is told the payload bytes of each block."""
        specs: dict[bytes, KVSpec] = {}
        blocks = 0
        before: tuple[bytes, int, int, bytes] | None = None
        sha256 = hashlib.sha256()
        with self._named():
            for found in self._walk(sha256, specs, keep=False):
                order = place(found.record)
                if before is not None and order <= before:
                    raise FormatError(f"block {found.record.id} is out of order")
                before = order
                blocks += 1
                read(found.record.payload_bytes)
            sha256.update(_TRAILER.pack(_END, self.blocks_count, self.content_bytes))
            self._file.seek(self._file_bytes - _DIGEST_BYTES)
            if not hmac.compare_digest(self._file.read(_DIGEST_BYTES), sha256.digest()):
                raise FormatError("it fails its digest: it is damaged")
        return Summary(specs, blocks, self.content_bytes, self._file_bytes, sha256.hexdigest())

    def blocks(self) -> Iterator[Contents]:
        """Return the blocks in turn; each one's checksums are verified again as it is read."""
        with self._named():
            yield from self._walk(None, {}, keep=True)

    def _walk(
        self, sha256: hashlib._Hash | None, specs: dict[bytes, KVSpec], *, keep: bool
    ) -> Iterator[Contents]:
        self._file.seek(0)
        preamble = self._file.read(_PREAMBLE.size)
        if sha256 is not None:
            sha256.update(preamble)
        frame_bytes = self._file_bytes - _PREAMBLE.size - _TRAILER.size - _DIGEST_BYTES
        frame = _Frame(self._file, frame_bytes, sha256)
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        with decompressor.stream_reader(
            frame,  # type: ignore[arg-type]
            read_size=PIECE_BYTES,
            read_across_frames=True,
            closefd=False,
        ) as stream:
            content = _Content(stream, self.content_bytes)
            specs.update(_read_specs(content))
            for _ in range(self.blocks_count):
                yield self._block(content, specs, keep=keep)
            content.expect_end()
            while frame.left:  # what follows the last frame belongs to the digest too
                frame.read()

    def _block(self, content: _Content, specs: dict[bytes, KVSpec], *, keep: bool) -> Contents:
        size = content.count(4)
        if size % PAGE_BYTES or not PAGE_BYTES <= size <= HEADER_PAGES_MAX * PAGE_BYTES:
            raise FormatError(f"a record header of {size} bytes")
        header = content.take(size)
        record, digests = decode_header(header)
        spec = specs.get(record.id.namespace)
        if spec is None:
            raise FormatError(f"block {record.id}: its spec is not in the bundle")
        check_record(record, spec)
        payload = bytearray() if keep or self._key else None
        for nbytes, digest in zip(record.part_bytes, digests, strict=True):
            hashed = xxhash.xxh3_64()
            for piece in content.pieces(nbytes):
                hashed.update(piece)
                if payload is not None:
                    payload += piece
            if hashed.intdigest() != digest:
                raise FormatError(f"block {record.id}: a part fails its checksum")
        if self._key and payload is not None:
            tag = keyed_tag(self._key, header, memoryview(payload))
            if not hmac.compare_digest(tag, header_tag(header)):
                raise FormatError(f"block {record.id} does not carry the tag of this integrity key")
        return Contents(record, payload if keep else None)


class _Content:
    """What a frame decompresses to, in pieces; it never gives more than was promised."""

    def __init__(self, stream: zstandard.ZstdDecompressionReader, nbytes: int) -> None:
        self._stream = stream
        self._left = nbytes

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        if nbytes > self._left:
            raise FormatError("its content ends within a block")
        self._left -= nbytes
        while nbytes:
            piece = self._read(min(nbytes, PIECE_BYTES))
            if not piece:
                raise FormatError("its content ends within a block")
            nbytes -= len(piece)
            yield piece

    def take(self, nbytes: int) -> bytes:
        return b"".join(self.pieces(nbytes))

    def count(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def expect_end(self) -> None:
        if self._left or self._read(1):
            raise FormatError("its content does not end after its last block")

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._stream.read(nbytes)
        except zstandard.ZstdError as error:
            raise FormatError(f"it cannot be decompressed: {error}") from None


def _read_specs(content: _Content) -> dict[bytes, KVSpec]:
    count = content.count(4)
    if count > SPECS_MAX:
        raise FormatError(f"{count} specs, at most {SPECS_MAX}")
    specs: dict[bytes, KVSpec] = {}
    for _ in range(count):
        size = content.count(4)
        if size > SPEC_BYTES_MAX:
            raise FormatError(f"a spec of {size} bytes, at most {SPEC_BYTES_MAX}")
        spec = KVSpec.from_bytes(content.take(size))
        specs[spec.namespace] = spec
    return specs


def check_record(record: Record, spec: KVSpec) -> None:
    """Raise unless a record is one that a store of this spec could have written."""
    layout = spec.block_layout
    if record.codec or record.kind:
        raise FormatError(f"block {record.id}: kind {record.kind}, codec {record.codec}; 0 wanted")
    if record.part_bytes != layout.part_bytes or record.shapes != layout.parts:
        raise FormatError(f"block {record.id}: its parts are not those of its spec")
    if record.payload_bytes > BLOCK_BYTES_MAX:
        raise FormatError(f"block {record.id}: over {BLOCK_BYTES_MAX} bytes")


def place(record: Record) -> tuple[bytes, int, int, bytes]:
    """Return what a bundle's blocks are in the order of: each comes after the one before it."""
    return record.id.namespace, record.created_ns, record.position, record.id.hash
