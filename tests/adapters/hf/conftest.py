from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from transformers import DynamicCache, logging

import kvtier_hf
from kvtier_hf import cache as cache_module
from kvtier_hf.forward import Body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    import kvtier

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
        # Ids 0 and 1 are padding in some families, and generate() masks padding by itself.
        return torch.randint(2, SIZES["vocab_size"], (1, tokens), generator=generator)

    return make


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every new cache with NaN, so that a slot that nobody wrote cannot pass for KV."""
    make = cache_module._PreallocatedLayer.__init__

    def poisoned(self: object, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        for buffer in self.buffers:
            buffer.fill_(float("nan"))

    monkeypatch.setattr(cache_module._PreallocatedLayer, "__init__", poisoned)


@pytest.fixture
def open_kv(tmp_path: Path) -> Iterator[Callable[..., kvtier_hf.Adapter]]:
    """Open a store under a model for the test's duration; its books are checked at the end."""
    with contextlib.ExitStack() as scope:

        def open_adapter(model: PreTrainedModel, **settings: object) -> kvtier_hf.Adapter:
            own = {"host_bytes": 0, "ssd_bytes": "1GiB", "block_tokens": 64, "calibrate": False}
            path = tmp_path / str(settings.pop("path", "store"))
            adapter = scope.enter_context(kvtier_hf.open(model, path, **{**own, **settings}))
            scope.callback(lambda: check(adapter.store))
            return adapter

        def check(store: kvtier.Store) -> None:
            store.flush(30)
            assert store.check() == []

        yield open_adapter


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., torch.Tensor]:
    """First-token logits [vocab]: by an adapter's cache, or by the same chunks without a store."""

    def logits(
        model: PreTrainedModel,
        ids: torch.Tensor,
        cache: object = None,
        block_tokens: int = 64,
    ) -> torch.Tensor:
        body = Body.of(model)
        with torch.no_grad():
            if cache is None:
                cache = DynamicCache(config=model.config)
                for start in range(0, ids.shape[1] // block_tokens * block_tokens, block_tokens):
                    body.run(ids[0, start : start + block_tokens], cache)
                if cache.get_seq_length() == ids.shape[1]:
                    cache.crop(-1)
            rest = ids[:, cache.get_seq_length() :]
            output = model(rest, **{body.cache_name: cache})
        return output.logits[0, -1]

    return logits


@pytest.fixture(scope="session")
def greedy() -> Callable[..., torch.Tensor]:
    """Greedy tokens of a plain ``generate``, or of one over an adapter's cache."""

    def generate(
        model: PreTrainedModel, ids: torch.Tensor, cache: object = None, tokens: int = 12
    ) -> torch.Tensor:
        given = {} if cache is None else {Body.of(model).cache_name: cache}
        return model.generate(ids, max_new_tokens=tokens, do_sample=False, **given)

    return generate
