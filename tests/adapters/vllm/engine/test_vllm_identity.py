"""What makes stored blocks another engine's, what does not, and models that are refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, engine, prompt, tiny_model, transfer
from vllm_process import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
PROMPT = prompt(1, 1300)
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}


@pytest.fixture(scope="module")
def filled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name a store that holds the prompt, and that no engine has open."""
    path = tmp_path_factory.mktemp("kv")
    with engine(tiny, transfer(path), scheduler=HYBRID) as llm:
        llm.run(PROMPT)
    return path


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "bfloat16"}, {"block_size": 64}, {"hf_overrides": ROPE}],
    ids=["dtype", "block_size", "rope"],
)
def test_what_changes_the_bytes_is_a_miss(
    tiny: Path, filled: Path, changed: dict[str, Any]
) -> None:
    """Another dtype, another block size of the engine, another rope: nothing is found."""
    with engine(tiny, transfer(filled), scheduler=HYBRID, **changed) as llm:
        assert llm.run(PROMPT)[0].cached == 0


def test_other_weights_are_a_miss(tiny: Path, filled: Path, tmp_path: Path) -> None:
    """A model of the same shape in another folder hits if its weights are the same, else not."""
    same = shutil.copytree(tiny, tmp_path / "same")
    other = tiny_model(tmp_path / "other", initializer_range=0.21)
    for model, cached in ((same, 5 * BLOCK), (other, 0)):
        with engine(model, transfer(filled), scheduler=HYBRID) as llm:
            assert llm.run(PROMPT)[0].cached == cached


def test_what_changes_no_byte_hits(tiny: Path, expected: Expected, filled: Path) -> None:
    """The longest prompt, the step's budget and the number of requests are not identity."""
    own = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 4}
    with engine(tiny, transfer(filled), scheduler=HYBRID, **own) as llm:
        answer = llm.run(PROMPT, answer=8)[0]
    assert answer.cached >= 4 * BLOCK
    assert answer.tokens == expected[tuple(PROMPT)]


def test_threads_are_not_identity(tiny: Path, filled: Path) -> None:
    """An engine that was started with two threads finds what was stored with one."""
    with Remote(tiny, transfer(filled, hybrid=False), scheduler=HYBRID, threads=2) as two:
        assert two.threads() == 2
        assert two.run(PROMPT)[0].cached == 5 * BLOCK


def adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA for the tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, width in (("q_proj", 384), ("k_proj", 192), ("v_proj", 192)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, 384, generator=made) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=made) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_is_its_content(tiny: Path, tmp_path: Path) -> None:
    """Blocks of a LoRA are found under any name for the same content, and under nothing else."""
    from vllm.lora.request import LoRARequest

    one = adapter(tmp_path / "one", 1)
    other = adapter(tmp_path / "other", 2)
    copy = shutil.copytree(one, tmp_path / "copy")
    kv = transfer(tmp_path / "kv")
    with engine(tiny, kv, scheduler=HYBRID, enable_lora=True, max_lora_rank=8, max_loras=1) as llm:
        for lora, cached in (
            (LoRARequest("first", 1, str(one)), 0),
            (None, 0),
            (LoRARequest("second", 2, str(other)), 0),
            (LoRARequest("third", 3, str(copy)), 5 * BLOCK),
            (None, 5 * BLOCK),
        ):
            assert llm.run(PROMPT, lora=lora)[0].cached == cached
            llm.forget()


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    """A model whose layers forget is refused when the engine starts, and the error says why."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=512,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path / "window")
    started = engine(tmp_path / "window", transfer(tmp_path / "kv"), scheduler=HYBRID)
    with pytest.raises(Exception, match=r"[Ss]liding"), started:
        pass
