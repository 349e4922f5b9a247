"""Published configurations by name: of each model's config.json the fields that decide its KV.

Sources: the config.json of each model's repository; OPT-66B and the Llama-2 models also in their
papers' tables of hyperparameters.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PUBLISHED"]


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, dtype: str = "bfloat16"
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": dtype,
    }


def _qwen(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int = 128
) -> dict[str, Any]:
    return {
        **_llama(layers, hidden, heads, kv_heads),
        "head_dim": head_dim,
        "use_sliding_window": False,
        "sliding_window": 131072,
    }


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "torch_dtype": "float16",
    }


def _deepseek(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }


PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Llama-2-7B": _llama(32, 4096, 32, 32, "float16"),
        "Llama-2-13B": _llama(40, 5120, 40, 40, "float16"),
        "Llama-2-70B": _llama(80, 8192, 64, 8, "float16"),
        "Llama-3-8B": _llama(32, 4096, 32, 8),
        "Llama-3-70B": _llama(80, 8192, 64, 8),
        "Llama-3.1-8B": _llama(32, 4096, 32, 8),
        "Llama-3.1-70B": _llama(80, 8192, 64, 8),
        "Llama-3.1-405B": _llama(126, 16384, 128, 8),
        "Llama-3.2-1B": {**_llama(16, 2048, 32, 8), "head_dim": 64},
        "Llama-3.2-3B": {**_llama(28, 3072, 24, 8), "head_dim": 128},
        "Llama-3.3-70B": _llama(80, 8192, 64, 8),
        "SmolLM2-135M": _llama(30, 576, 9, 3),
        "Qwen2.5-0.5B": _qwen(24, 896, 14, 2, 64),
        "Qwen2.5-7B": _qwen(28, 3584, 28, 4),
        "Qwen2.5-14B": _qwen(48, 5120, 40, 8),
        "Qwen2.5-32B": _qwen(64, 5120, 40, 8),
        "Qwen2.5-72B": _qwen(80, 8192, 64, 8),
        "Qwen3-8B": _qwen(36, 4096, 32, 8),
        "Qwen3-32B": _qwen(64, 5120, 64, 8),
        "Mistral-7B": {**_llama(32, 4096, 32, 8), "model_type": "mistral", "sliding_window": None},
        "Mistral-7B-v0.1": {
            **_llama(32, 4096, 32, 8), "model_type": "mistral", "sliding_window": 4096,
        },
        "Mixtral-8x7B": {**_llama(32, 4096, 32, 8), "model_type": "mixtral"},
        "Gemma-2-9B": {
            **_llama(42, 3584, 16, 8), "model_type": "gemma2", "head_dim": 256,
            "sliding_window": 4096,
        },
        "OPT-13B": _opt(40, 5120, 40),
        "OPT-30B": _opt(48, 7168, 56),
        "OPT-66B": _opt(64, 9216, 72),
        "DeepSeek-V3": _deepseek(61, 7168),
        "DeepSeek-R1": _deepseek(61, 7168),
    }
)  # fmt: skip
"""Configurations by name."""
