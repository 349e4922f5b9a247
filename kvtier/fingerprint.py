"""The part of a model's configuration that can change its KV, in one encoding."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import msgpack

from kvtier.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["config_bytes"]

# Settings that cannot change the KV of given tokens, or that KVSpec holds by itself. Every other
# field of a config is in the digest, so that an unknown one makes a miss and never a wrong hit.
NO_EFFECT_ON_KV: Final = frozenset({
    # where the model came from and which code wrote it
    "_name_or_path", "architectures", "auto_map", "name_or_path", "transformers_version",
    # how it is run
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_experts_implementation", "attn_implementation", "experts_implementation",
    "chunk_size_feed_forward", "use_cache", "initializer_range", "initializer_factor",
    # what it returns
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    # how far it goes; a model with a table of positions has the table's length in its weights
    "max_position_embeddings", "max_sequence_length", "max_seq_len", "n_ctx", "n_positions",
    # which ids generation treats specially
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    # the tensors' own dtypes are in the digest, the rope parameters are a field of KVSpec
    "dtype", "torch_dtype", "rope_parameters",
})  # fmt: skip


def config_bytes(values: Mapping[str, Any]) -> bytes:
    """Return a config, as plain values by name, without what cannot change the KV of given tokens.

    One config has one encoding, whatever wrote it. Raises ``UnsupportedModel`` naming a field that
    is not a plain value.
    """
    relevant = {name: value for name, value in values.items() if name not in NO_EFFECT_ON_KV}
    return bytes(msgpack.packb(_canonical("config", relevant)))


def _canonical(name: str, value: object) -> Any:
    # A mapping becomes sorted pairs, so that one config has one encoding whatever wrote it.
    if isinstance(value, dict):
        pairs = sorted((str(key), item) for key, item in value.items())
        return ["map", *([key, _canonical(f"{name}.{key}", item)] for key, item in pairs)]
    if isinstance(value, (list, tuple)):
        return ["list", *(_canonical(f"{name}[{i}]", item) for i, item in enumerate(value))]
    if isinstance(value, Enum):
        return _canonical(name, value.value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)  # without importing torch
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    raise UnsupportedModel(
        f"{name}: a {type(value).__name__}; only plain values in a config can be fingerprinted"
    )
