"""A model's weights: a digest of their whole content, and a cheap sign that they changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgpack
import torch

from kvtier.errors import UnsupportedModel
from kvtier.fingerprint import config_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["WeightSignature", "weights_digest", "weights_signature"]

SAMPLES_PER_TENSOR: Final = 16


@dataclass(frozen=True, slots=True)
class WeightSignature:
    """A cheap fingerprint of the weights in memory; equal as long as nobody changed them."""

    tensors: tuple[tuple[str, int, int], ...]
    """Name, address and in-place version of each tensor."""
    sample: bytes
    """Digest of a few values of each: an edit through ``.data`` leaves the rest alone."""


def weights_digest(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Return "sha256:..." over every weight's name, dtype, shape and bytes and over the config.

    Tensors are read one at a time, on any device. ``UnsupportedModel`` names a weight whose content
    cannot be read (meta, sparse, distributed, or packed in a tensor subclass).
    """
    digest = hashlib.sha256(b"kvtier.hf.weights.1")
    digest.update(config_bytes(config.to_dict()))
    for name, tensor in sorted(_weights(model), key=lambda pair: pair[0]):
        head = msgpack.packb([name, str(tensor.dtype), list(tensor.shape)])
        digest.update(head)
        digest.update(_flat_bytes(tensor).cpu().numpy().data)
    return f"sha256:{digest.hexdigest()}"


def weights_signature(model: PreTrainedModel) -> WeightSignature:
    """Return the signature of the weights as they are; reads few values, waits for a GPU once."""
    tensors = []
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _weights(model):
        # An inference tensor keeps no version; its address and values remain.
        version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch's only name for it
        tensors.append((name, tensor.data_ptr(), version))
        stride = max(1, tensor.numel() // SAMPLES_PER_TENSOR)
        few = tensor.detach().reshape(-1)[::stride][:SAMPLES_PER_TENSOR]
        samples.setdefault(tensor.device, []).append(_flat_bytes(few))
    digest = hashlib.sha256()
    for parts in samples.values():
        digest.update(torch.cat(parts).cpu().numpy().data)
    return WeightSignature(tuple(tensors), digest.digest())


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    # Parameters and persistent buffers, tied ones once, and the rotary frequencies: those are not
    # saved, and a cast such as model.bfloat16() changes them without changing any saved weight.
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModel(
                f"{name}: extra state of type {type(value).__name__}; its content cannot be "
                "fingerprinted, use a model whose state is tensors"
            )
        if id(value) not in seen:
            seen.add(id(value))
            yield name, _readable(name, value)
    for name, value in model.named_buffers():
        if name.endswith("inv_freq") and id(value) not in seen:
            seen.add(id(value))
            yield name, _readable(name, value)


def _readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.is_meta or tensor.layout is not torch.strided:
        kind = "meta" if tensor.is_meta else type(tensor).__name__
        raise UnsupportedModel(
            f"{name}: a {kind} tensor of layout {tensor.layout}; its content cannot be "
            "fingerprinted, load the whole model in memory with plain weights"
        )
    return tensor


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
