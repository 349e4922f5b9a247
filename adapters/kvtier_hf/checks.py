"""Which models kvtier can hold correctly, told from their settings; the rest is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedModel

from kvtier.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedConfig

__all__ = ["check_runnable", "check_supported", "positions_max", "rope_pairs"]

# Frequencies fixed by the config. "dynamic" and "longrope" pick them by the total length, so that
# the keys of one prefix differ from prompt to prompt; a type that is not listed might do the same.
FIXED_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "proportional", "yarn"})

# setting: (the values that are fine, what is wrong with the others)
SETTINGS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "is_encoder_decoder": ((False, None), "the decoder's KV depends on the encoder's input"),
    "is_causal": ((True, None), "the model is not run as a causal decoder"),
    "add_cross_attention": ((False, None), "KV depends on another model's states"),
    "use_bidirectional_attention": ((False, None), "a token's KV depends on later tokens"),
    "attention_chunk_size": ((None,), "chunked attention keeps only a part of the KV"),
    "kv_sharing_modes": ((None,), "layers that share KV are not held yet"),
    "num_kv_shared_layers": ((0, None), "layers that share KV are not held yet"),
}


def check_supported(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of a model whose whole state is full-attention KV, as far as settings tell.

    Raises ``UnsupportedModel`` naming the setting or layer.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: {type(model).__name__} given, a transformers PreTrainedModel wanted "
            "(merge a LoRA into it first)"
        )
    config = model.config
    for name, (fine, reason) in SETTINGS.items():
        value = getattr(config, name, None)
        if value not in fine:
            raise UnsupportedModel(f"{name}={value}: {reason}")
    if not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} cannot generate: a causal decoder (...ForCausalLM) is wanted"
        )
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModel(
            f"{type(config).__name__} holds a config within: what images or audio add to the KV is "
            "not in the keys yet, load the text model alone"
        )
    _check_layers(config)
    if model._is_stateful:  # noqa: SLF001 - transformers' own mark of a recurrent model
        raise UnsupportedModel(f"{type(model).__name__}: recurrent state is not held yet")
    _check_modules(model)
    rope_pairs(config)
    return config


def check_runnable(model: PreTrainedModel) -> None:
    """Refuse a state of the model or thread in which KV would differ from what its spec says."""
    if any(module.training for module in model.modules()):
        raise ValueError("in training mode dropout changes KV: call model.eval()")
    kind = model.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        raise ValueError(
            "autocast changes the precision of KV behind the spec: leave its scope and load the "
            "model in the dtype to compute in"
        )


def positions_max(config: PreTrainedConfig) -> int | None:
    """Return how many tokens the model takes, or None if its config names no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def rope_pairs(config: PreTrainedConfig) -> tuple[tuple[str, Any], ...]:
    """Return the rope parameters as flat (name, scalar) pairs; nested names are joined by dots.

    Raises ``UnsupportedModel`` for a type whose frequencies depend on the prompt's length.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not parameters:
        return ()
    pairs = tuple(_flatten("", parameters))
    for name, value in pairs:
        if name.split(".")[-1] in ("rope_type", "type") and value not in FIXED_ROPE_TYPES:
            raise UnsupportedModel(
                f"rope_parameters {name}={value!r}: its frequencies may depend on the total "
                "length, so the KV of a prefix cannot be reused"
            )
    return pairs


def _check_layers(config: PreTrainedConfig) -> None:
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ("attention", "full_attention"):
            raise UnsupportedModel(f"layer {layer} is {kind}: only full_attention is held yet")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(
            f"sliding_window={window}: a layer that forgets is not held yet; a model that is never "
            "used beyond its window can be loaded with sliding_window=None"
        )


def _check_modules(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise UnsupportedModel(
                f"{name}: a {type(module).__name__} whose scale and active adapters are not in the "
                "weights; merge it into the model first"
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedModel(
                f"{name}: {type(module).__name__} counts positions without padding tokens, so a "
                "token's KV does not follow from its index"
            )


def _flatten(prefix: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        items: Mapping[str, Any] = value
        for key, item in items.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _flatten(f"{prefix}.{index}", item)
    elif value is None or isinstance(value, (str, bool, int, float)):
        yield prefix, value
    else:
        raise UnsupportedModel(f"rope_parameters {prefix}: a {type(value).__name__}, not a scalar")
