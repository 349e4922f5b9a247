from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from transformers import logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"word_embed_proj_dim": 64, "pad_token_id": 1}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_head": 4, "n_layer": 4}),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_key_value_heads": 2, "sliding_window": None},
    ),
    "mla": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    # not supported
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 500,
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "qwen3next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {}),
    "xlstm": ("xLSTMConfig", "xLSTMForCausalLM", {"num_heads": 4, "num_blocks": 2}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "pad_token_id": 0},
    ),
    "bert": ("BertConfig", "BertLMHeadModel", {"pad_token_id": 0}),
    "bert-mlm": ("BertConfig", "BertForMaskedLM", {"pad_token_id": 0}),
    "roberta": ("RobertaConfig", "RobertaForCausalLM", {"is_decoder": True, "pad_token_id": 1}),
}

_seeds = itertools.count(1)


@pytest.fixture(autouse=True)
def _one_quiet_thread() -> Iterator[None]:
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """Build a tiny random model of a family: 4 layers, hidden 64, float32, always the same one."""

    def make(family: str, **settings: object) -> PreTrainedModel:
        config, model, own = FAMILIES[family]
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        torch.manual_seed(0)
        built = getattr(transformers, model)(
            getattr(transformers, config)(**{**SIZES, **own, **settings})
        )
        logging.set_verbosity(verbosity)
        return built.eval()

    return make


@pytest.fixture(scope="session")
def llama(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """One tiny Llama with GQA, shared: tests that change a model make their own."""
    return make_model("llama")


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., torch.Tensor]:
    """Build a prompt [1, n] that no other test uses, unless a seed is given."""

    def make(tokens: int, seed: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(next(_seeds) + 1000 if seed is None else seed)
        return torch.randint(0, SIZES["vocab_size"], (1, tokens), generator=generator)

    return make
