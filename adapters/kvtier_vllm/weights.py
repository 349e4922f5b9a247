"""The weights that a worker holds: a digest of their content, and a cheap look at whether it moved.

Backends may have packed a weight away where nothing can read it, and left an empty parameter. Then
the checkpoint that it was loaded from stands for it, as long as nobody has touched the model since.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgpack
import torch

from kvtier import UnsupportedModel
from kvtier_vllm.slots import CARRIER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Look",
    "WeightWatch",
    "checkpoint_digest",
    "has_packed",
    "unknown_digest",
    "weights_digest",
]

PIECE_BYTES: Final = 64 << 20
"""What of a tensor is brought to CPU memory at once, on each hashing thread."""
THREADS_MAX: Final = 8
SAMPLES: Final = 8
"""Neighbouring values that are looked at in each place of a tensor."""
SAMPLED_AT: Final = (1 / 3, 2 / 3)
"""Where in a tensor's memory those places are."""
ROTARY_ROWS: Final = 64
"""Rows of a rotary table that are hashed: it is as long as the model may run, but begins alike."""


def weights_digest(model: torch.nn.Module, packed: bytes = b"") -> str:
    """Return "sha256:..." over the name, dtype, shape and bytes of all that a model holds.

    ``packed`` stands for what is packed away, if anything is (``has_packed``). Raises
    ``UnsupportedModel`` naming a tensor that cannot be read.
    """
    digest = hashlib.sha256(b"kvtier.vllm.weights.1")
    # A model that may wrap its layers for LoRA has the same weights under longer names.
    held = [(name.replace(".base_layer.", "."), tensor) for name, tensor in _tensors(model)]
    with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1)) as threads:
        contents = threads.map(lambda pair: _content(*pair), held)
        for head in sorted(zip((name for name, _ in held), contents, strict=True)):
            digest.update(msgpack.packb(head))
    digest.update(packed)
    return f"sha256:{digest.hexdigest()}"


def has_packed(model: torch.nn.Module) -> bool:
    """Whether some weights are packed away where nothing can read them."""
    return bool(_packed(model))


def checkpoint_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Return a digest over what a model is loaded from, whatever the order of its files."""
    contents = sorted((name, _content(name, tensor)) for name, tensor in tensors)
    return hashlib.sha256(msgpack.packb(contents)).digest()


def unknown_digest() -> bytes:
    """Return what stands for weights that cannot be known any more: equal to nothing else."""
    return secrets.token_bytes(32)


class Look:
    """One look at the weights, which a GPU answers when it comes to it."""

    def __init__(self, same: torch.Tensor, moved: bool) -> None:  # noqa: FBT001 - built here only
        self._moved = moved
        self._same = same
        self._event: Any = None
        if same.device.type == "cuda":
            self._same = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._same.copy_(same, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the answer is there without waiting."""
        return self._event is None or bool(self._event.query())

    @property
    def changed(self) -> bool:
        """Whether the weights are other ones than at first; waits for the GPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._moved or not bool(self._same)


class WeightWatch:
    """Remembers the weights as they are now, by where they are and a few values of each.

    A look costs a walk over the tensors' addresses and two small kernels per dtype. It finds
    weights that were replaced, and those that were written over as training does: nearly all.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._held = [
            (held, name, tensor, tensor.data_ptr())
            for module in model.modules()
            for held in (module._parameters, module._buffers)  # noqa: SLF001 - the dicts, not copies
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._packers = [(module, _packer(module)) for module in _packed(model)]
        self._views = _samples(model)
        self._first = [_bits(views) for views in self._views]

    def look(self) -> Look:
        """Compare the weights with what they were, without waiting for a GPU."""
        moved = any(
            held.get(name) is not tensor or tensor.data_ptr() != place
            for held, name, tensor, place in self._held
        ) or any(_packer(module) is not packer for module, packer in self._packers)
        # What was moved may be gone: its old memory is not read.
        pairs = [] if moved else list(zip(self._views, self._first, strict=True))
        same = [(_bits(views) == first).all() for views, first in pairs]
        return Look(torch.stack(same).all() if same else torch.ones((), dtype=torch.bool), moved)


def _content(name: str, tensor: torch.Tensor) -> bytes:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, read in pieces."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise UnsupportedModel(
            f"{name}: a {'meta' if tensor.is_meta else tensor.layout} tensor; its content cannot "
            "be fingerprinted, so that nothing of this model can be stored"
        )
    if name.endswith("cos_sin_cache"):
        tensor = tensor[:ROTARY_ROWS]
    digest = hashlib.sha256(msgpack.packb([str(tensor.dtype), list(tensor.shape)]))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        digest.update(flat[start : start + PIECE_BYTES].cpu().numpy().data)
    return digest.digest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, those that are shared once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _packed(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose weights are packed away where nothing can read them."""
    return [
        module
        for module in model.modules()
        if any(not held.numel() for held in module.parameters(recurse=False))
    ]


def _packer(module: torch.nn.Module) -> object:
    """Return what holds a module's packed weights; another one once they were loaded again."""
    return getattr(module, "cpu_linear", None)


def _bits(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(views).view(torch.uint8)


def _samples(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """Return views of a few values of each tensor, as bits, by their size and device.

    As bits, so that a NaN is equal to itself; of values that are neighbours, since a GPU puts
    many such views together in one kernel.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for _, tensor in _tensors(model):
        held = tensor.detach()
        if held.numel():
            steps = zip(held.shape, held.stride(), strict=True)
            span = 1 + sum((size - 1) * stride for size, stride in steps)
            line = held.as_strided((span,), (1,), held.storage_offset())
            for at in SAMPLED_AT:
                few = line[int(at * span) :][:SAMPLES].view(CARRIER[held.element_size()])
                groups.setdefault((few.dtype, few.device), []).append(few)
    return list(groups.values())
