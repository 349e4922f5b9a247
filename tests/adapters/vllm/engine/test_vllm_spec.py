"""What a configuration of vLLM's says about stored KV, and which ones are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtier import UnsupportedModel
from kvtier_vllm.identity import _rope, block_tokens_of, check_supported


def full(**changes: Any) -> Any:
    """Return the KV of a full-attention layer."""
    own = {"block_size": 32, "num_kv_heads": 3, "head_size": 64, "dtype": torch.float32}
    return FullAttentionSpec(**{**own, **changes})


def configs(*specs: Any, **changes: Any) -> tuple[Any, Any]:
    """Return a configuration, with dotted names changed, and the KV cache of these groups."""
    model = {"is_encoder_decoder": False, "runner_type": "generate", "architecture": "M"}
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_eplb": False,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(calculate_kv_scales=False),
        speculative_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (full(),)]
    return config, SimpleNamespace(kv_cache_groups=groups)


def test_full_attention_is_held() -> None:
    """A plain decoder is held, with speculation that has no KV of its own as well."""
    check_supported(*configs())
    check_supported(*configs(speculative_config=SimpleNamespace(method="ngram")))


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "encoder": ((), {"model_config__is_encoder_decoder": True}),
    "pooling": ((), {"model_config__runner_type": "pooling"}),
    "pipeline": ((), {"parallel_config__pipeline_parallel_size": 2}),
    "decode context": ((), {"parallel_config__decode_context_parallel_size": 2}),
    "prefill context": ((), {"parallel_config__prefill_context_parallel_size": 2}),
    "load balancing": ((), {"parallel_config__enable_eplb": True}),
    "2 kinds of KV": ((full(), full()), {}),
    "sliding-window": (
        (
            SlidingWindowSpec(
                block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32, sliding_window=64
            ),
        ),
        {},
    ),
    "MLA": (
        (MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32),),
        {},
    ),
    "512 tokens": ((full(sliding_window=512),), {}),
    "not causal": ((full(non_causal=True),), {}),
    "padded": ((full(page_size_padded=1 << 20),), {}),
    "float8_e8m0fnu": ((full(dtype=torch.float8_e8m0fnu),), {}),
    "scales": ((), {"cache_config__calculate_kv_scales": True}),
    "'eagle'": ((), {"speculative_config": SimpleNamespace(method="eagle")}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_held_is_refused_with_the_reason(reason: str) -> None:
    """Each engine whose KV cannot be held is refused, and the error says why and what to do."""
    specs, changes = REFUSED[reason]
    with pytest.raises(UnsupportedModel, match=f"{reason}.*start without the connector"):
        check_supported(*configs(*specs, **changes))


@pytest.mark.parametrize(
    ("page", "block"), [(16, 256), (32, 256), (256, 256), (48, 240), (128, 256), (512, 512)]
)
def test_a_block_is_whole_pages(page: int, block: int) -> None:
    """A block is 256 tokens, or as many whole pages as fit, or one that is larger."""
    assert block_tokens_of(page) == block


def roped(max_model_len: int = 1000, **config: Any) -> Any:
    """Return a configuration with these rope settings."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**config), max_model_len=max_model_len
        )
    )


def test_rope_is_flat_whatever_wrote_it() -> None:
    """Nested parameters, lists and the older names become pairs of scalars."""
    new = roped(rope_parameters={"rope_type": "yarn", "factor": 4.0, "deep": {"x": [1, 2]}})
    assert dict(_rope(new)) == {"rope_type": "yarn", "factor": 4.0, "deep.x": "[1, 2]"}
    old = roped(rope_theta=5e5, rope_scaling={"type": "linear"}, partial_rotary_factor=None)
    assert dict(_rope(old)) == {"rope_theta": 5e5, "rope_scaling.type": "linear"}
    assert _rope(roped()) == ()


def test_a_longer_limit_may_change_the_frequencies() -> None:
    """The longest prompt is not identity, but where vLLM takes other rope factors for it."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    short, longer, longest = (
        _rope(roped(length, rope_parameters=rope)) for length in (4096, 4097, 9999)
    )
    assert short != longer == longest
    plain = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    assert _rope(roped(10, rope_parameters=plain)) == _rope(roped(9999, rope_parameters=plain))
