"""Where each layer's bytes lie within a block: pure arithmetic over shapes.

A block's payload is its parts in layer order, and a part is its tensors in order (K, then V), each
contiguous in row-major order with no padding in between. ``hnd`` stores a tensor as
[heads, tokens, width], ``nhd`` as [tokens, heads, width].

``<label>/<page tokens>`` is the layout of an engine that keeps KV in pages and does not say how the
bytes lie within one: a part is its pages in token order, a page its tensors in order, each
[heads, page tokens, width] in shape and private to the engine in content. The label names whose
bytes they are: two engines that use one label understand each other's pages.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

__all__ = [
    "DTYPE_BYTES",
    "LAYOUTS",
    "BlockLayout",
    "PartShape",
    "TensorSlice",
    "check_layout",
    "page_tokens",
]

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
LAYOUTS: Final = ("hnd", "nhd")
_PAGED: Final = re.compile(r"([a-z0-9._-]{1,64})/([1-9][0-9]{0,4})")

PartShape = tuple[tuple[int, int], ...]
"""The tensors of one layer as (heads, width) pairs: ((8, 128), (8, 128)) for K and V of GQA."""


def page_tokens(layout: str) -> int | None:
    """Return how many tokens a page of a paged layout holds; None for the others."""
    paged = _PAGED.fullmatch(layout)
    return None if paged is None else int(paged[2])


def check_layout(layout: object, block_tokens: int) -> None:
    """Raise ``ValueError`` unless blocks of so many tokens can have this layout."""
    tokens = page_tokens(layout) if isinstance(layout, str) else None
    if layout not in LAYOUTS and tokens is None:
        raise ValueError(
            f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}, nor '<label>/<page tokens>' "
            "with a label of lower-case letters, digits, '.', '_' and '-'"
        )
    if tokens is not None and block_tokens % tokens:
        raise ValueError(f"layout: pages of {tokens} tokens do not fill a block of {block_tokens}")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor's place in a block: its layer, its index in the part, shape, and byte range."""

    layer: int
    index: int
    shape: tuple[int, int, int]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The resolved byte layout of one block; ``order`` is that of the axes, or of pages."""

    dtype: str
    block_tokens: int
    order: str
    parts: tuple[PartShape, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part, in layer order."""
        unit = self.block_tokens * self.itemsize
        return tuple(sum(heads * width for heads, width in part) * unit for part in self.parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's payload."""
        return sum(self.part_bytes)

    @property
    def tensors(self) -> tuple[TensorSlice, ...]:
        """Every tensor in the record's byte order; offsets are relative to the payload."""
        slices = []
        offset = 0
        tokens = page_tokens(self.order) or self.block_tokens
        for layer, part in enumerate(self.parts):
            for index, (heads, width) in enumerate(part * (self.block_tokens // tokens)):
                shape = (tokens, heads, width) if self.order == "nhd" else (heads, tokens, width)
                nbytes = math.prod(shape) * self.itemsize
                slices.append(TensorSlice(layer, index, shape, offset, nbytes))
                offset += nbytes
        return tuple(slices)
