"""What makes stored bytes interchangeable: ``KVSpec``, its namespace, and ``BlockKeys``.

Two encodings are frozen here and guarded by golden vectors; changing one is a new format version:

* a spec is the msgpack array ``["kvtier.spec", version, [name, value], ...]`` with the fields in
  declaration order. msgpack tags every value with its type and prefixes its length, and the encoder
  always picks the shortest form, so the encoding is canonical. Its SHA-256 is the namespace.
* the root of a hash chain is the SHA-256 of the msgpack array ``["kvtier.root", version, model,
  weights, tenant, adapter, [extra, ...]]``; each block's hash is the SHA-256 of the previous hash
  followed by the block's token ids as little-endian u32.

The root leaves out rank, dtype and layout so that every rank derives the same keys; those are in
the namespace, and a stored block is addressed by (namespace, block hash).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import msgpack

from kvtier.errors import FormatError
from kvtier.fields import Extra, Scalar, check_count, check_label, extra_items, part_shapes, rope
from kvtier.layout import DTYPE_BYTES, BlockLayout, PartShape, check_layout
from kvtier.tokens import TokenIds, token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BLOCK_TOKENS", "HASH_BYTES", "BlockKeys", "KVSpec", "spec_differences"]

BLOCK_TOKENS: Final = 256
HASH_BYTES: Final = 32
SPEC_VERSION: Final = 1
SPEC_BYTES_MAX: Final = 1 << 20
LAYERS_MAX: Final = 4096
BLOCK_TOKENS_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Everything that makes two stored blocks interchangeable; its digest is the namespace.

    ``layers, kv_heads, head_dim`` (and ``v_head_dim`` where V is narrower or wider than K) are the
    short form of ``parts``, one tuple of (heads, width) pairs per layer; models whose layers differ
    give ``parts``. ``weights`` is a digest over the weights' content, never a path. ``rope`` holds
    (name, value) pairs. ``layout`` is "hnd", "nhd", or an engine's own pages (``kvtier.layout``).
    Maximum length, thread count, chunk size and attention implementation do not change what is
    stored and are not here.

    Raises ``ValueError`` naming the field.
    """

    model: str
    weights: str
    dtype: str
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    parts: tuple[PartShape, ...] = ()
    quantization: str = "none"
    kv_scales: str = "none"
    layout: str = "hnd"
    rope: tuple[tuple[str, Scalar], ...] = ()
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    block_tokens: int = BLOCK_TOKENS
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        for name in ("model", "weights", "quantization", "kv_scales"):
            check_label(name, getattr(self, name), empty_allowed=False)
        if self.dtype not in tuple(DTYPE_BYTES):  # a value that cannot be hashed is refused alike
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if type(self.version) is not int or self.version != SPEC_VERSION:
            raise ValueError(f"version: {self.version!r} is not {SPEC_VERSION}")
        check_count("layers", self.layers, LAYERS_MAX)
        check_count("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX)
        check_layout(self.layout, self.block_tokens)
        for axis in ("tp", "pp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            check_count(f"{axis}_size", size)
            if type(rank) is not int or not 0 <= rank < size:
                raise ValueError(f"{axis}_rank: {rank!r} is not in [0, {axis}_size={size})")
        object.__setattr__(self, "rope", rope(self.rope))
        self._resolve_parts()

    def _resolve_parts(self) -> None:
        # Invariant after this: `parts` is the truth for every layer, and the three numbers are set
        # exactly where it has the short form, so that both spellings of one spec are equal.
        if self.parts:
            parts = part_shapes(self.parts, self.layers)
        else:
            width = self.v_head_dim or self.head_dim
            names = ("kv_heads", "head_dim", "v_head_dim")
            for name, value in zip(names, (self.kv_heads, self.head_dim, width), strict=True):
                check_count(name, value)
            parts = (((self.kv_heads, self.head_dim), (self.kv_heads, width)),) * self.layers
        first = parts[0]
        short = (0, 0, 0)
        match first:
            case ((heads, k_width), (v_heads, v_width)):
                if heads == v_heads and set(parts) == {first}:
                    short = (heads, k_width, v_width)
        names = ("kv_heads", "head_dim", "v_head_dim")
        for name, value in zip(names, short, strict=True):
            given = getattr(self, name)
            if given not in (0, value):
                raise ValueError(f"{name}: {given} contradicts parts")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "parts", parts)

    @property
    def block_layout(self) -> BlockLayout:
        """The byte layout of one block under this spec."""
        return BlockLayout(self.dtype, self.block_tokens, self.layout, self.parts)

    @property
    def namespace(self) -> bytes:
        """The 32-byte digest under which blocks of this spec are stored."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """Return the canonical encoding (module docstring)."""
        pairs = [[field.name, getattr(self, field.name)] for field in fields(self)]
        return bytes(msgpack.packb(["kvtier.spec", SPEC_VERSION, *pairs]))

    @classmethod
    def from_bytes(cls, data: bytes) -> KVSpec:
        """Decode ``to_bytes``; what does not encode back to ``data`` is ``FormatError``."""
        try:
            tag, version, *pairs = _unpack(data)
            if tag != "kvtier.spec" or version != SPEC_VERSION:
                raise FormatError(f"spec of version {version!r}; this kvtier reads {SPEC_VERSION}")
            spec = cls(**{name: _tuples(value) for name, value in pairs})
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"not an encoded KVSpec: {error}") from error
        if spec.to_bytes() != data:
            raise FormatError("not a canonical KVSpec encoding")
        return spec


def spec_differences(a: KVSpec, b: KVSpec) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two specs differ, for messages: {field: (a's, b's)}."""
    return {
        field.name: (getattr(a, field.name), getattr(b, field.name))
        for field in fields(KVSpec)
        if getattr(a, field.name) != getattr(b, field.name)
    }


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The chained hashes of one prompt's full blocks, one 32-byte SHA-256 per block.

    Immutable: ``extend`` returns new keys and rehashes only the unfinished block. ``pending`` are
    the tokens after the last full block as little-endian u32; a serialised value carries them too,
    so treat it like the prompt.
    """

    namespace: bytes
    block_tokens: int
    root: bytes
    tenant_digest: bytes
    hashes: tuple[bytes, ...]
    pending: bytes

    @classmethod
    def of(
        cls,
        spec: KVSpec,
        token_ids: TokenIds,
        tenant: str = "",
        adapter: str = "",
        extra: Sequence[Extra] = (),
    ) -> BlockKeys:
        """Hash a prompt's full blocks under ``spec``.

        ``token_ids``: a list or tuple of ints, an integer numpy array or a torch tensor, [n] or
        [1, n]. ``tenant`` separates users who must not see each other's hits, ``adapter`` names a
        LoRA by content digest, ``extra`` adds e.g. image hashes. Bad ids raise naming the index.
        """
        items = extra_items(extra)
        check_label("tenant", tenant)
        check_label("adapter", adapter)
        root = ["kvtier.root", SPEC_VERSION, spec.model, spec.weights, tenant, adapter, items]
        empty = cls(
            namespace=spec.namespace,
            block_tokens=spec.block_tokens,
            root=hashlib.sha256(msgpack.packb(root)).digest(),
            tenant_digest=hashlib.sha256(tenant.encode()).digest(),
            hashes=(),
            pending=b"",
        )
        return empty.extend(token_ids)

    def extend(self, token_ids: TokenIds) -> BlockKeys:
        """Return the keys of this prompt followed by ``token_ids``; finished blocks keep theirs."""
        data = token_bytes(token_ids)
        if self.pending:
            data = memoryview(self.pending + data)
        width = self.block_tokens * 4
        full = len(data) // width * width
        previous = self.hashes[-1] if self.hashes else self.root
        hashes = []
        for start in range(0, full, width):
            digest = hashlib.sha256(previous)
            digest.update(data[start : start + width])
            previous = digest.digest()
            hashes.append(previous)
        return BlockKeys(
            self.namespace,
            self.block_tokens,
            self.root,
            self.tenant_digest,
            (*self.hashes, *hashes),
            bytes(data[full:]),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt, the unfinished block included."""
        return len(self.hashes) * self.block_tokens + len(self.pending) // 4

    def parent(self, block: int) -> bytes:
        """Return the hash that block ``block`` is chained to; the root for the first."""
        return self.hashes[block - 1] if block else self.root

    def to_bytes(self) -> bytes:
        """Serialise (msgpack); holds the unfinished block's token ids."""
        return bytes(
            msgpack.packb(
                [
                    "kvtier.keys",
                    SPEC_VERSION,
                    self.namespace,
                    self.block_tokens,
                    self.root,
                    self.tenant_digest,
                    b"".join(self.hashes),
                    self.pending,
                ]
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> BlockKeys:
        """Decode ``to_bytes``; anything else is ``FormatError``."""
        try:
            tag, version, namespace, block_tokens, root, tenant, hashes, pending = _unpack(data)
            sound = (
                tag == "kvtier.keys"
                and type(version) is type(block_tokens) is int
                and version == SPEC_VERSION
                and all(len(digest) == HASH_BYTES for digest in (namespace, root, tenant))
                and 0 < block_tokens <= BLOCK_TOKENS_MAX
                and len(hashes) % HASH_BYTES == 0
                and len(pending) % 4 == 0
                and len(pending) < block_tokens * 4
                and all(isinstance(b, bytes) for b in (namespace, root, tenant, hashes, pending))
            )
        except (ValueError, TypeError) as error:
            raise FormatError(f"not serialised BlockKeys: {error}") from error
        if not sound:
            raise FormatError(f"not serialised BlockKeys of version {SPEC_VERSION}")
        chain = tuple(
            hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)
        )
        return cls(namespace, block_tokens, root, tenant, chain, pending)

    def __len__(self) -> int:
        return len(self.hashes)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.hashes)

    def __getitem__(self, block: int) -> bytes:
        return self.hashes[block]

    def __repr__(self) -> str:
        # Token ids are prompt text: they never reach a log.
        return f"BlockKeys({len(self)} blocks, {self.num_tokens} tokens)"


def _unpack(data: bytes) -> list[Any]:
    if len(data) > SPEC_BYTES_MAX << 4:
        raise ValueError(f"{len(data)} bytes, at most {SPEC_BYTES_MAX << 4}")
    try:
        value = msgpack.unpackb(data)
    except (msgpack.UnpackException, UnicodeDecodeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(value, list):
        raise TypeError("not an array")
    return value


def _tuples(value: object) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
