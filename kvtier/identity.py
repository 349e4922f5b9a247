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
from kvtier.layout import DTYPE_BYTES, LAYOUTS, BlockLayout, PartShape
from kvtier.tokens import TokenIds, token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BLOCK_TOKENS", "HASH_BYTES", "BlockKeys", "KVSpec", "spec_differences"]

BLOCK_TOKENS: Final = 256
HASH_BYTES: Final = 32
SPEC_VERSION: Final = 1
SPEC_BYTES_MAX: Final = 1 << 20
LABEL_BYTES_MAX: Final = 1024  # a tenant, an adapter or an extra item
EXTRA_ITEMS_MAX: Final = 4096
LAYERS_MAX: Final = 4096
TENSORS_PER_PART_MAX: Final = 4
DIMENSION_MAX: Final = 1 << 24
BLOCK_TOKENS_MAX: Final = 1 << 16

Scalar = str | int | float | bool | None
Extra = str | bytes | int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Everything that makes two stored blocks interchangeable; its digest is the namespace.

    ``layers, kv_heads, head_dim`` (and ``v_head_dim`` where V is narrower or wider than K) are the
    short form of ``parts``, one tuple of (heads, width) pairs per layer; models whose layers differ
    give ``parts``. ``weights`` is a digest over the weights' content, never a path. ``rope`` holds
    (name, value) pairs. Maximum length, thread count, chunk size and attention implementation do
    not change what is stored and are not here.

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
            _label(name, getattr(self, name), empty_allowed=False)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.version != SPEC_VERSION:
            raise ValueError(f"version: {self.version} is not {SPEC_VERSION}")
        _count("layers", self.layers, LAYERS_MAX)
        _count("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX)
        for axis in ("tp", "pp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            _count(f"{axis}_size", size, DIMENSION_MAX)
            if type(rank) is not int or not 0 <= rank < size:
                raise ValueError(f"{axis}_rank: {rank!r} is not in [0, {axis}_size={size})")
        object.__setattr__(self, "rope", _rope(self.rope))
        self._resolve_parts()

    def _resolve_parts(self) -> None:
        # Invariant after this: `parts` is the truth for every layer, and the three numbers are set
        # exactly where it has the short form, so that both spellings of one spec are equal.
        if self.parts:
            parts = tuple(tuple((heads, width) for heads, width in part) for part in self.parts)
            if len(parts) != self.layers:
                raise ValueError(f"parts: {len(parts)} layers given, layers={self.layers}")
        else:
            _count("kv_heads", self.kv_heads, DIMENSION_MAX)
            _count("head_dim", self.head_dim, DIMENSION_MAX)
            width = self.v_head_dim or self.head_dim
            parts = (((self.kv_heads, self.head_dim), (self.kv_heads, width)),) * self.layers
        for layer, part in enumerate(parts):
            if not 1 <= len(part) <= TENSORS_PER_PART_MAX:
                raise ValueError(
                    f"parts[{layer}]: {len(part)} tensors, 1 to {TENSORS_PER_PART_MAX} allowed"
                )
            for heads, width in part:
                _count(f"parts[{layer}] heads", heads, DIMENSION_MAX)
                _count(f"parts[{layer}] width", width, DIMENSION_MAX)
        first = parts[0]
        match first:
            case ((heads, k_width), (v_heads, v_width)) if heads == v_heads and set(parts) == {
                first
            }:
                short = (heads, k_width, v_width)
            case _:
                short = (0, 0, 0)
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
        except (ValueError, TypeError) as error:
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
        items = tuple(extra)
        if len(items) > EXTRA_ITEMS_MAX:
            raise ValueError(f"extra: {len(items)} items, at most {EXTRA_ITEMS_MAX}")
        for index, item in enumerate(items):
            _extra(index, item)
        _label("tenant", tenant)
        _label("adapter", adapter)
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
        data = self.pending + token_bytes(token_ids)
        width = self.block_tokens * 4
        full = len(data) // width * width
        view = memoryview(data)
        previous = self.hashes[-1] if self.hashes else self.root
        hashes = []
        for start in range(0, full, width):
            digest = hashlib.sha256(previous)
            digest.update(view[start : start + width])
            previous = digest.digest()
            hashes.append(previous)
        return BlockKeys(
            self.namespace,
            self.block_tokens,
            self.root,
            self.tenant_digest,
            (*self.hashes, *hashes),
            data[full:],
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


def _label(name: str, value: object, *, empty_allowed: bool = True) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {type(value).__name__} given, a string wanted")
    if not value and not empty_allowed:
        raise ValueError(f"{name}: empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not valid Unicode ({error.reason})") from None
    if size > LABEL_BYTES_MAX:
        raise ValueError(f"{name}: {size} bytes, at most {LABEL_BYTES_MAX}")


def _extra(index: int, item: object) -> None:
    if isinstance(item, bool) or not isinstance(item, (str, bytes, int)):
        raise TypeError(f"extra[{index}]: {type(item).__name__} given; str, bytes or int wanted")
    if isinstance(item, str):
        _label(f"extra[{index}]", item)
    elif isinstance(item, bytes) and len(item) > LABEL_BYTES_MAX:
        raise ValueError(f"extra[{index}]: {len(item)} bytes, at most {LABEL_BYTES_MAX}")
    elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
        raise ValueError(f"extra[{index}]: {item} does not fit 64 bits")


def _count(name: str, value: object, limit: int) -> None:
    if type(value) is not int or not 1 <= value <= limit:
        raise ValueError(f"{name}: {value!r} is not an integer from 1 to {limit}")


def _rope(pairs: Sequence[tuple[str, Scalar]]) -> tuple[tuple[str, Scalar], ...]:
    # Numbers become floats, so that 10000 and 10000.0 in two configs are one identity.
    result: list[tuple[str, Scalar]] = []
    for name, value in pairs:
        _label("rope name", name, empty_allowed=False)
        plain = float(value) if type(value) is int else value
        if not (plain is None or isinstance(plain, (str, float, bool))):
            raise TypeError(f"rope {name!r}: {type(value).__name__} given, a scalar wanted")
        result.append((name, plain))
    if len({name for name, _ in result}) != len(result):
        raise ValueError("rope: a name given twice")
    return tuple(sorted(result, key=lambda pair: pair[0]))


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
