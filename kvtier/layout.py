"""Where each layer's bytes lie within a block: pure arithmetic over shapes.

A block's payload is its parts in layer order, and a part is its tensors in order (K, then V), each
contiguous in row-major order with no padding in between. ``hnd`` stores a tensor as
[heads, tokens, width], ``nhd`` as [tokens, heads, width].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["DTYPE_BYTES", "LAYOUTS", "BlockLayout", "PartShape", "TensorSlice"]

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

PartShape = tuple[tuple[int, int], ...]
"""The tensors of one layer as (heads, width) pairs: ((8, 128), (8, 128)) for K and V of GQA."""


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
    """The resolved byte layout of one block; ``order`` is that of the axes."""

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
        for layer, part in enumerate(self.parts):
            for index, (heads, width) in enumerate(part):
                shape = (
                    (heads, self.block_tokens, width)
                    if self.order == "hnd"
                    else (self.block_tokens, heads, width)
                )
                nbytes = math.prod(shape) * self.itemsize
                slices.append(TensorSlice(layer, index, shape, offset, nbytes))
                offset += nbytes
        return tuple(slices)
