"""The KVSpec of a transformers model: what makes its stored KV interchangeable."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvtier.identity import BLOCK_TOKENS, KVSpec
from kvtier_hf.checks import check_runnable, check_supported, rope_pairs
from kvtier_hf.forward import Body
from kvtier_hf.probe import KVShape, probe
from kvtier_hf.weights import WeightSignature, weights_digest, weights_signature

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["Described", "describe", "spec_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """A model as it was when looked at: its spec, its KV and its weights."""

    spec: KVSpec
    body: Body
    device: torch.device
    signature: WeightSignature


# Reading all weights takes seconds, so it is done once per model and state of its weights. A body
# refers to the model's own module; only the outer model is the key, and it must be free to die.
_known: WeakKeyDictionary[PreTrainedModel, tuple[WeightSignature, KVSpec, KVShape]] = (
    WeakKeyDictionary()
)


def spec_of(model: PreTrainedModel, *, block_tokens: int = BLOCK_TOKENS) -> KVSpec:
    """Return the KVSpec of a full-attention causal model, as it is in memory now.

    Per-layer K and V shapes and the dtype come from running the model on a few tokens; the weights
    fingerprint covers every weight and every config field that can change KV. It reads all weights
    once per model and is remembered while they stay unchanged. Forward hooks and attributes that
    are not tensors are not covered: do not steer a model behind an attached store.

    Raises ``UnsupportedModel`` naming the layer or setting that kvtier cannot hold correctly yet,
    ``ValueError`` if the model is in training mode or autocast is on.
    """
    return describe(model, block_tokens).spec


def describe(model: PreTrainedModel, block_tokens: int) -> Described:
    """Return the model's spec with what the adapter needs beside it; errors as for ``spec_of``."""
    config = check_supported(model)
    check_runnable(model)
    body = Body.of(model)
    signature = weights_signature(model)
    known = _known.get(model)
    if known is None or known[0] != signature:
        shape = probe(body, config)
        known = (signature, _spec(model, config, shape), shape)
        _known[model] = known
    spec = dataclasses.replace(known[1], block_tokens=block_tokens)
    return Described(spec, body, known[2].device, signature)


def _spec(model: PreTrainedModel, config: PreTrainedConfig, shape: KVShape) -> KVSpec:
    return KVSpec(
        model=type(model).__name__,
        weights=weights_digest(model, config),
        dtype=shape.dtype,
        layers=len(shape.parts),
        parts=shape.parts,
        quantization=_quantization(config),
        rope=rope_pairs(config),
    )


def _quantization(config: PreTrainedConfig) -> str:
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return "none"
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method) or "unknown")
