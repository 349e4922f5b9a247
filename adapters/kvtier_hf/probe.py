"""What a model keeps per token, found by running it on a few tokens rather than by its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvtier.errors import UnsupportedModel
from kvtier.layout import DTYPE_BYTES, BlockLayout, PartShape
from kvtier_hf.cache import KVTierCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from kvtier_hf.forward import Body

__all__ = ["KVShape", "probe"]

Pair = tuple[torch.Tensor, torch.Tensor]

HALF: Final = 4  # tokens of each half of the probe
# Rounding between two runs of the same shape, as a share of the largest value.
TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_NARROW: Final = 5e-2


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of a model: (heads, width) of K and V of each layer, dtype, and where it lies."""

    parts: tuple[PartShape, ...]
    dtype: str
    device: torch.device


def probe(body: Body, config: PreTrainedConfig) -> KVShape:
    """Return the shape of the KV, and prove on a few tokens that the KV is all the state there is.

    Raises ``UnsupportedModel`` naming the layer or what failed. Nothing in the model changes.
    """
    device = next(body.module.parameters()).device
    ids = (torch.arange(1, 2 * HALF + 1, device=device) * 7) % config.vocab_size
    other = torch.cat([ids[:HALF], (ids[HALF:] + 1) % config.vocab_size])
    whole = _held(_run(body, config, ids))
    shape = _shape(whole)
    # Some causal models (GPT-NeoX) say is_decoder=False and ignore it; BERT means it.
    exact = getattr(config, "is_decoder", None) is False
    _check_causal(whole, _held(_run(body, config, other)), 0.0 if exact else None)
    _check_complete(body, config, ids, shape)
    return shape


def _run(body: Body, config: PreTrainedConfig, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=config)
    for layer, held in enumerate(cache.layers):
        # Only a plain DynamicLayer keeps all of K and V and nothing else; a subclass keeps more,
        # less, or something packed.
        if type(held) is not DynamicLayer:
            raise UnsupportedModel(
                f"layer {layer}: its cache is a {type(held).__name__}; only full attention "
                "(DynamicLayer) is held yet"
            )
    body.run(ids, cache)
    return cache


def _held(cache: DynamicCache) -> list[Pair]:
    pairs = []
    for layer, held in enumerate(cache.layers):
        keys, values = getattr(held, "keys", None), getattr(held, "values", None)
        if type(held) is not DynamicLayer or keys is None or values is None:
            raise UnsupportedModel(f"layer {layer}: its state is not K and V in the cache")
        pairs.append((keys, values))
    return pairs


def _shape(pairs: list[Pair]) -> KVShape:
    first = pairs[0][0]
    for layer, pair in enumerate(pairs):
        for name, tensor in zip(("K", "V"), pair, strict=True):
            if tensor.ndim != 4 or tensor.shape[0] != 1 or tensor.shape[2] != 2 * HALF:  # noqa: PLR2004 - [1, heads, tokens, width]
                raise UnsupportedModel(
                    f"layer {layer}: {name} of {2 * HALF} tokens has shape {list(tensor.shape)}, "
                    f"[1, heads, {2 * HALF}, width] wanted"
                )
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise UnsupportedModel(
                    f"layer {layer}: {name} is {tensor.dtype} on {tensor.device}, layer 0 is "
                    f"{first.dtype} on {first.device}; one dtype and one device are wanted"
                )
            if not bool(tensor.isfinite().all()):
                raise UnsupportedModel(f"layer {layer}: {name} is not finite; are weights loaded?")
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"KV of {first.dtype}: one of {', '.join(DTYPE_BYTES)} wanted")
    parts = tuple(tuple((t.shape[1], t.shape[3]) for t in pair) for pair in pairs)
    return KVShape(parts, dtype, first.device)


def _check_causal(whole: list[Pair], other: list[Pair], tolerance: float | None) -> None:
    # A token's KV may follow only from the tokens up to it: two runs that differ in their second
    # half agree in the first.
    for layer, pairs in enumerate(zip(whole, other, strict=True)):
        for name, one, two in zip(("K", "V"), *pairs, strict=True):
            if not _close(one[:, :, :HALF], two[:, :, :HALF], tolerance):
                raise UnsupportedModel(
                    f"layer {layer}: {name} of a token changes with later tokens; the model is not "
                    "causal (is_decoder=False?), or not deterministic"
                )


def _check_complete(
    body: Body, config: PreTrainedConfig, ids: torch.Tensor, shape: KVShape
) -> None:
    # If K and V are all the state, a cache filled with nothing else goes on exactly like the one
    # that they were taken from.
    cache = _run(body, config, ids[:HALF])
    layout = BlockLayout(shape.dtype, HALF, "hnd", shape.parts)
    rebuilt = KVTierCache(layout, shape.device, 2 * HALF)
    sources = [tensor for pair in _held(cache) for tensor in pair]
    for target, source in zip(rebuilt.slots.parts(0), sources, strict=True):
        target.copy_(source[0])
    expected = body.run(ids[HALF:], cache)
    rebuilt.start(ids, HALF, HALF)
    rebuilt.promise(2 * HALF)
    if not _close(expected, body.run(ids[HALF:], rebuilt)):
        raise UnsupportedModel(
            f"{type(body.module).__name__} goes on differently from the same K and V: it keeps "
            "state outside of its cache"
        )


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float | None = None) -> bool:
    if tolerance is None:
        tolerance = TOLERANCE.get(a.dtype, TOLERANCE_NARROW)
    a, b = a.to(torch.float64), b.to(torch.float64)
    return bool((a - b).abs().max() <= tolerance * a.abs().max())
