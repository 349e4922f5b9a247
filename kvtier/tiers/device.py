"""The engine's side of a copy: its own KV tensors, addressed by block."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtier.errors import SpecMismatch
from kvtier.layout import page_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from kvtier.identity import KVSpec
    from kvtier.layout import BlockLayout

__all__ = [
    "KVSlots",
    "TensorSlots",
    "check_slots",
    "copy_block",
    "fill_bytes",
    "layer_copies",
    "read_block",
    "read_bytes",
    "wait_for_copies",
    "write_block",
]


class KVSlots(Protocol):
    """Where an engine keeps the KV of one prompt.

    ``parts(block)`` returns the block's tensors in the record's byte order (layer by layer, K then
    V), each of the shape that ``layout.tensors`` gives; strides are free except that the last axis
    is contiguous. The tensors must stay valid until the copy that uses them is done.

    Slots in CPU memory may also have ``arrays(block)``: numpy arrays of unsigned integers of the
    values' width whose elements, one array after the other in row-major order, are the block. The
    fewer and larger they are, the less a copy costs. Slots that know a better way to copy a whole
    block have ``gather(block, into)`` and ``scatter(block, source)`` between it and its payload's
    bytes, which return once the bytes are in place.
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
    [heads, blocks * block_tokens, width] for the hnd layout, tokens first for nhd. A layout in
    pages has a tensor for each page of a block, [heads, blocks * page tokens, width].
    """

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._tensors = tuple(tensors)
        self._axis = 0 if layout.order == "nhd" else 1
        self._tokens = page_tokens(layout.order) or layout.block_tokens
        self._arrays: list[np.ndarray[Any, Any]] | None = None
        if len(self._tensors) != len(layout.tensors):
            raise SpecMismatch(
                f"tensors: {len(self._tensors)} given, the layout has {len(layout.tensors)}"
            )

    @classmethod
    def empty(cls, spec: KVSpec, blocks: int, device: str = "cpu") -> TensorSlots:
        """Allocate zeroed slots for ``blocks`` blocks of ``spec``, in one piece if alike."""
        import torch

        layout, shapes = spec.block_layout, []
        for part in layout.tensors:
            shape = list(part.shape)
            shape[0 if layout.order == "nhd" else 1] *= blocks
            shapes.append(shape)
        dtype = getattr(torch, layout.dtype)
        if all(shape == shapes[0] for shape in shapes):
            whole = torch.zeros([len(shapes), *shapes[0]], dtype=dtype, device=device)
            return cls(layout, whole.unbind(0))
        return cls(layout, [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes])

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
        tokens = self._tokens
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
            whole = _in_one_piece(self._tensors)
            each = self._tensors if whole is None else [whole]
            self._arrays = [_as_numpy(tensor) for tensor in each]
        tokens = self._tokens
        part = slice(block * tokens, (block + 1) * tokens)
        index = (..., part, slice(None)) if self._axis else (..., part, slice(None), slice(None))
        return [array[index] for array in self._arrays]

    def _check(self, block: int) -> None:
        if not 0 <= block < self._tensors[0].shape[self._axis] // self._tokens:
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
    gather = getattr(slots, "gather", None)
    if gather is not None:
        gather(block, into)
        return
    arrays = _arrays(slots, block)
    if arrays is not None:
        for array, flat in zip(arrays, _cut(arrays, slots.layout, into), strict=True):
            np.copyto(flat, array)
        return
    places = _places(slots.layout, into)
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
    scatter = getattr(slots, "scatter", None)
    if scatter is not None:
        scatter(block, source)
        return
    arrays = _arrays(slots, block)
    if arrays is not None:
        for array, flat in zip(arrays, _cut(arrays, slots.layout, source), strict=True):
            np.copyto(array, flat)
        return
    places = _places(slots.layout, source)
    device = slots.device
    for tensor, flat in zip(_tensors(slots, block), places, strict=True):
        if tensor.device.type == "cpu":
            np.copyto(_as_numpy(tensor), flat)
        else:
            tensor.copy_(_as_torch(flat, tensor), non_blocking=True)
    wait_for_copies(device)


def layer_copies(slots: KVSlots, block: int, source: memoryview) -> Callable[[int], None]:
    """Return what copies one layer of a block's payload into the engine's tensors.

    A copy returns when its bytes are in place. Raises ``SpecMismatch`` if the tensors do not fit.
    """
    layers: dict[int, list[tuple[torch.Tensor, np.ndarray[Any, Any]]]] = {}
    places = _places(slots.layout, source)
    for tensor, flat, part in zip(
        _tensors(slots, block), places, slots.layout.tensors, strict=True
    ):
        layers.setdefault(part.layer, []).append((tensor, flat))

    def copy(layer: int) -> None:
        for tensor, flat in layers.get(layer, ()):
            if tensor.device.type == "cpu":
                np.copyto(_as_numpy(tensor), flat)
            else:
                tensor.copy_(_as_torch(flat, tensor), non_blocking=True)
        wait_for_copies(slots.device)

    return copy


def copy_block(slots: KVSlots, block: int, source: torch.Tensor) -> None:
    """Copy a block's payload, a tensor of bytes, into the engine's tensors.

    On CUDA the copies are queued on the current stream: ``wait_for_copies`` returns once they are
    done.
    """
    if source.device.type == "cpu":
        payload: np.ndarray[Any, Any] = source.numpy()
        write_block(slots, block, payload.data)
    else:
        _copy_tensors(slots, block, source)


def _copy_tensors(slots: KVSlots, block: int, source: torch.Tensor) -> None:
    for tensor, part in zip(_tensors(slots, block), slots.layout.tensors, strict=True):
        flat = source[part.offset : part.offset + part.nbytes]
        tensor.detach().copy_(flat.view(tensor.dtype).view(part.shape), non_blocking=True)


def fill_bytes(into: torch.Tensor, payload: memoryview) -> None:
    """Copy a payload into a tensor of as many bytes; returns when they are there."""
    if into.device.type == "cpu":
        np.copyto(into.numpy(), np.frombuffer(payload, np.uint8))
        return
    import torch

    into.copy_(torch.frombuffer(payload, dtype=torch.uint8), non_blocking=True)
    wait_for_copies(into.device)


def read_bytes(source: torch.Tensor, into: memoryview) -> None:
    """Copy a tensor of bytes into a buffer of as many; returns when they are there."""
    np.copyto(np.frombuffer(into, np.uint8), source.cpu().numpy())


def wait_for_copies(device: torch.device) -> None:
    """Return when what this thread has queued on a CUDA device's current stream is done."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()


def _arrays(slots: KVSlots, block: int) -> Sequence[np.ndarray[Any, Any]] | None:
    give = getattr(slots, "arrays", None)
    return None if give is None else give(block)


def _cut(
    arrays: Sequence[np.ndarray[Any, Any]], layout: BlockLayout, payload: memoryview
) -> list[np.ndarray[Any, Any]]:
    """Return the payload in pieces of the arrays' shapes; ``SpecMismatch`` if they leave a rest."""
    carrier = np.frombuffer(payload, dtype=f"u{layout.itemsize}")
    if sum(array.size for array in arrays) != carrier.size:
        raise SpecMismatch(
            f"arrays: {[array.shape for array in arrays]} given, a block has {carrier.size} values"
        )
    pieces, start = [], 0
    for array in arrays:
        pieces.append(carrier[start : start + array.size].reshape(array.shape))
        start += array.size
    return pieces


def _in_one_piece(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that lie in one memory at equal distances as a single one, or None."""
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    offsets = [tensor.storage_offset() for tensor in tensors]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    alike = all(
        tensor.untyped_storage().data_ptr() == storage
        and tensor.shape == first.shape
        and tensor.stride() == first.stride()
        and offset == offsets[0] + index * step
        for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True))
    )
    if not alike or step < 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), offsets[0])


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
