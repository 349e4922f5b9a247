"""The engine's side of a copy: its own KV tensors, addressed by block."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtier.errors import SpecMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvtier.identity import KVSpec
    from kvtier.layout import BlockLayout

__all__ = ["KVSlots", "TensorSlots", "check_slots", "read_block", "write_block"]


class KVSlots(Protocol):
    """Where an engine keeps the KV of one prompt.

    ``parts(block)`` returns the block's tensors in the record's byte order (layer by layer, K then
    V), each of the shape that ``layout.tensors`` gives; strides are free except that the last axis
    is contiguous. The tensors must stay valid until the copy that uses them is done.
    """

    @property
    def layout(self) -> BlockLayout:
        """The layout of each block."""

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Return block ``block``'s tensors in the record's byte order."""


class TensorSlots:
    """KVSlots over plain tensors, one per K or V of a layer, holding ``blocks`` blocks in a row.

    ``tensors`` are in the record's order (K of layer 0, V of layer 0, K of layer 1, ...), each
    [heads, blocks * block_tokens, width] for the hnd layout, tokens first for nhd.
    """

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._tensors = tuple(tensors)
        self._axis = 1 if layout.order == "hnd" else 0
        self._arrays: list[np.ndarray[Any, Any]] | None = None
        if len(self._tensors) != len(layout.tensors):
            raise SpecMismatch(
                f"tensors: {len(self._tensors)} given, the layout has {len(layout.tensors)}"
            )

    @classmethod
    def empty(cls, spec: KVSpec, blocks: int, device: str = "cpu") -> TensorSlots:
        """Allocate zeroed slots for ``blocks`` blocks of ``spec``."""
        import torch

        layout = spec.block_layout
        tensors = []
        for part in layout.tensors:
            shape = list(part.shape)
            shape[1 if layout.order == "hnd" else 0] *= blocks
            tensors.append(torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device))
        return cls(layout, tensors)

    @property
    def layout(self) -> BlockLayout:
        """The layout of each block."""
        return self._layout

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._tensors[0].device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The whole tensors, in the record's order."""
        return self._tensors

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Return views of block ``block``; ``SpecMismatch`` if the tensors end before it."""
        tokens = self._layout.block_tokens
        self._check(block)
        return [t.narrow(self._axis, block * tokens, tokens) for t in self._tensors]

    def arrays(self, block: int) -> Sequence[np.ndarray[Any, Any]] | None:
        """Return block ``block`` as numpy arrays; None if the tensors are not in CPU memory."""
        self._check(block)
        if self._arrays is None:
            if self.device.type != "cpu":
                return None
            for _ in _tensors(self, block):  # raises if shapes or dtypes do not fit
                pass
            self._arrays = [_as_numpy(tensor) for tensor in self._tensors]
        tokens = self._layout.block_tokens
        start, stop = block * tokens, (block + 1) * tokens
        if self._axis:
            return [array[:, start:stop] for array in self._arrays]
        return [array[start:stop] for array in self._arrays]

    def _check(self, block: int) -> None:
        tokens = self._layout.block_tokens
        if not 0 <= block < self._tensors[0].shape[self._axis] // tokens:
            raise SpecMismatch(f"block {block} lies beyond the slots' tensors")


def check_slots(slots: KVSlots, layout: BlockLayout) -> None:
    """Raise ``SpecMismatch`` if ``slots`` do not hold blocks of ``layout``."""
    if slots.layout != layout:
        raise SpecMismatch(
            f"the slots hold blocks of {slots.layout.block_bytes} bytes ({slots.layout.dtype}, "
            f"{slots.layout.order}), the store's have {layout.block_bytes} ({layout.dtype}, "
            f"{layout.order})"
        )


def read_block(slots: KVSlots, block: int, into: memoryview) -> None:
    """Copy a block from the engine's tensors into ``into`` (the payload's bytes)."""
    places = _places(slots.layout, into)
    arrays = _arrays(slots, block)
    if arrays is not None:
        for array, flat in zip(arrays, places, strict=True):
            np.copyto(flat, array)
        return
    for tensor, flat in zip(_tensors(slots, block), places, strict=True):
        if tensor.device.type == "cpu":
            np.copyto(flat, _as_numpy(tensor))
        else:
            _as_torch(flat, tensor).copy_(tensor)


def write_block(slots: KVSlots, block: int, source: memoryview) -> None:
    """Copy a block's payload into the engine's tensors; returns when the bytes are in place.

    On CUDA the copies are queued on the current stream and waited for; the caller runs this on a
    thread of its own, under a side stream.
    """
    places = _places(slots.layout, source)
    arrays = _arrays(slots, block)
    if arrays is not None:
        for array, flat in zip(arrays, places, strict=True):
            np.copyto(array, flat)
        return
    device = slots.device
    for tensor, flat in zip(_tensors(slots, block), places, strict=True):
        if tensor.device.type == "cpu":
            np.copyto(_as_numpy(tensor), flat)
        else:
            tensor.copy_(_as_torch(flat, tensor), non_blocking=True)
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()


def _arrays(slots: KVSlots, block: int) -> Sequence[np.ndarray[Any, Any]] | None:
    give = getattr(slots, "arrays", None)
    return None if give is None else give(block)


def _places(layout: BlockLayout, payload: memoryview) -> list[np.ndarray[Any, Any]]:
    """Return where each tensor of a block lies in its payload."""
    carrier = np.frombuffer(payload, dtype=f"u{layout.itemsize}")
    return [carrier[start:stop].reshape(shape) for start, stop, shape in _slices(layout)]


@lru_cache(maxsize=64)
def _slices(layout: BlockLayout) -> list[tuple[int, int, tuple[int, int, int]]]:
    size = layout.itemsize
    return [
        (part.offset // size, (part.offset + part.nbytes) // size, part.shape)
        for part in layout.tensors
    ]


def _tensors(slots: KVSlots, block: int) -> Iterator[torch.Tensor]:
    """Yield a block's tensors, each checked against the layout."""
    layout = slots.layout
    tensors = slots.parts(block)
    expected = layout.tensors
    if len(tensors) != len(expected):
        raise SpecMismatch(f"block {block}: {len(tensors)} tensors, {len(expected)} wanted")
    for tensor, part in zip(tensors, expected, strict=True):
        if tuple(tensor.shape) != part.shape or str(tensor.dtype) != f"torch.{layout.dtype}":
            raise SpecMismatch(
                f"block {block}, layer {part.layer}: {tensor.dtype} {list(tensor.shape)} given, "
                f"{layout.dtype} {list(part.shape)} wanted"
            )
        yield tensor


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # numpy has no bfloat16: bits are copied through an integer of the same width. numpy copies also
    # release the GIL without starting an OpenMP team in the copying thread.
    import torch

    carrier = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    itemsize = tensor.element_size()
    array: np.ndarray[Any, Any] = tensor.detach().view(carrier[itemsize]).numpy()
    return array.view(f"u{itemsize}")


def _as_torch(flat: np.ndarray[Any, Any], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(flat.view(np.uint8)).view(like.dtype)
