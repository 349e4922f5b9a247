"""KV whose every byte follows from its block's hash: nothing has to be kept to compare with it.

A layer's part of a block is a piece of one pool of random words; where it begins follows from the
block's hash and the layer. So a block in another's place, a layer in another's place and a byte
that changed all differ from what is expected, and what is put is read where it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from _disk import arena

import kvtier
from kvtier.profiles import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.identity import BlockKeys, KVSpec
    from kvtier.layout import BlockLayout

Words = np.ndarray[Any, np.dtype[np.uint64]]

POOL_BYTES: Final = 256 << 20
"""More than a cache holds, so that what is put comes from memory."""
STEP_BYTES: Final = 64
"""Parts begin at multiples of it."""
POISON_BYTES: Final = 4096
"""So far apart are the words of a slot that are spoiled before it is filled."""
POISON: Final = 0xDEADBEEFDEADBEEF
PRESETS: Final[dict[str, tuple[int, int, int]]] = {
    "qwen2.5-0.5b": (24, 2, 64),
    "qwen2.5-1.5b": (28, 2, 128),
    **{
        name.lower(): (model.layers, model.kv_heads, model.head_dim)
        for name, model in MODELS.items()
        if not model.latent
    },
}
"""Layers, KV heads and head width of models by name, KV in bfloat16."""


def spec_of(text: str) -> KVSpec:
    """Return the spec of a model by name, or of "layers,heads,dim,dtype"."""
    shape = PRESETS.get(text.lower())
    dtype = "bfloat16"
    if shape is None:
        given = text.split(",")
        try:
            layers, heads, width, dtype = *map(int, given[:3]), given[3]
            shape = layers, heads, width
        except (ValueError, IndexError):
            names = ", ".join(PRESETS)
            raise ValueError(
                f"shape: {text!r} is neither 'layers,heads,dim,dtype' nor one of {names}"
            ) from None
    return kvtier.KVSpec(
        model=f"load/{text}", weights="sha256:0", dtype=dtype,
        layers=shape[0], kv_heads=shape[1], head_dim=shape[2],
    )  # fmt: skip


class Slots:
    """KVSlots over CPU memory: ``pieces(block)`` is a block in order, one piece or one a layer."""

    def __init__(self, layout: BlockLayout, pieces: Callable[[int], Sequence[Words]]) -> None:
        self._layout = layout
        self._pieces = pieces

    @property
    def layout(self) -> BlockLayout:
        """The layout of each block."""
        return self._layout

    @property
    def device(self) -> torch.device:
        """Memory of the CPU."""
        return torch.device("cpu")

    def arrays(self, block: int) -> list[np.ndarray[Any, Any]]:
        """Return a block as integers of the values' width."""
        return [piece.view(f"u{self._layout.itemsize}") for piece in self._pieces(block)]

    def parts(self, block: int) -> list[torch.Tensor]:
        """Return a block's tensors, copied: nothing here is restored by layers."""
        data = np.concatenate([piece.view(np.uint8) for piece in self._pieces(block)])
        dtype = getattr(torch, self._layout.dtype)
        return [
            torch.from_numpy(data[each.offset : each.offset + each.nbytes])
            .view(dtype)
            .view(each.shape)
            for each in self._layout.tensors
        ]


class Content:
    """What each block of a spec has to hold. ``pool_bytes`` of random words are all it keeps."""

    def __init__(self, spec: KVSpec, pool_bytes: int = POOL_BYTES, seed: int = 1) -> None:
        self.layout = spec.block_layout
        if any(nbytes % 8 for nbytes in self.layout.part_bytes):
            raise ValueError(f"shape: layers of {self.layout.part_bytes[0]} bytes, not whole words")
        self._steps = pool_bytes // STEP_BYTES
        self._pool = arena(pool_bytes + max(self.layout.part_bytes)).view(np.uint64)
        self._pool[:] = np.random.default_rng(seed).integers(
            0, 1 << 64, self._pool.size, dtype=np.uint64
        )

    def layers(self, digest: bytes) -> list[Words]:
        """Return what a block holds, layer by layer."""
        first, stride = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]) | 1
        found = []
        for number, nbytes in enumerate(self.layout.part_bytes):
            start = (first + number * stride) % self._steps * (STEP_BYTES // 8)
            found.append(self._pool[start : start + nbytes // 8])
        return found

    def source(self, keys: BlockKeys) -> Slots:
        """Return slots that hold a prompt's blocks, to put them from."""
        return Slots(self.layout, lambda block: self.layers(keys.hashes[block]))

    def differing(self, keys: BlockKeys, memory: Words, blocks: Iterable[int], first: int) -> int:
        """Return how many of a prompt's blocks in ``memory`` are not what they have to be.

        Every byte is compared. Block ``first`` is where the memory begins.
        """
        return sum(not self._same(keys.hashes[each], memory, each - first) for each in blocks)

    def _same(self, digest: bytes, memory: Words, place: int) -> bool:
        words = place * self.layout.block_bytes // 8
        for expected in self.layers(digest):
            if not np.array_equal(expected, memory[words : words + expected.size]):
                return False
            words += expected.size
        return True


def target(layout: BlockLayout, memory: Words, first: int = 0) -> Slots:
    """Return an engine's slots for the blocks of one prompt from block ``first`` on."""
    size = layout.block_bytes // 8
    return Slots(layout, lambda block: [memory[(block - first) * size :][:size]])


def spoil(memory: Words) -> None:
    """Make sure that no block is what it was: what is not written is found out."""
    memory[:: POISON_BYTES // 8] = POISON
