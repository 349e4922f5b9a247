from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvtier_hf
from kvtier.errors import UnsupportedModel
from kvtier_hf import spec_of
from kvtier_hf.spec import _known
from kvtier_hf.weights import weights_signature

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from kvtier.layout import PartShape

    MakeModel = Callable[..., PreTrainedModel]


def weights(model: PreTrainedModel) -> str:
    """Return the fingerprint as a caller sees it."""
    return spec_of(model).weights


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", ((2, 16), (2, 16))),
        ("gpt2", ((4, 16), (4, 16))),
        ("phi", ((4, 16), (4, 16))),
        ("qwen2", ((2, 16), (2, 16))),
        ("qwen3", ((2, 16), (2, 16))),
        ("opt", ((4, 16), (4, 16))),
        ("bloom", ((4, 16), (4, 16))),
        ("neox", ((4, 16), (4, 16))),
        ("mixtral", ((2, 16), (2, 16))),
        ("mla", ((1, 16), (1, 8))),
    ],
)
def test_kv_shapes_are_what_the_model_caches(
    make_model: MakeModel, family: str, part: PartShape
) -> None:
    """MHA, GQA and MLA models get the shape and dtype that they really cache, layer by layer."""
    model = make_model(family)
    spec = spec_of(model)
    assert spec.parts == (part,) * 4
    assert spec.dtype == "float32"
    assert spec.model == type(model).__name__
    assert spec.weights.startswith("sha256:")
    assert spec.quantization == "none"


def test_rope_parameters_are_flat_floats(make_model: MakeModel) -> None:
    """Every rope parameter is a field of the spec, lists numbered, numbers as floats."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    spec = spec_of(make_model("llama", rope_parameters=rope))
    assert dict(spec.rope) == rope
    assert all(type(value) in (str, float) for _, value in spec.rope)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("gemma3", {}, "layer 0 is sliding_attention"),
        ("mistral", {"sliding_window": 64}, "sliding_window=64"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            "layer 2",
        ),
        ("llama4", {}, "attention_chunk_size"),
        ("qwen3next", {}, "layer 0 is linear_attention"),
        ("mamba", {}, "linear_attention"),
        ("xlstm", {}, "recurrent state"),
        ("t5", {}, "is_encoder_decoder"),
        ("bert", {}, "is_decoder=False"),
        ("bert-mlm", {}, "cannot generate"),
        ("roberta", {}, "positions without padding"),
        ("gemma3n", {}, "kv_sharing_modes"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 2048,
                }
            },
            "'longrope'",
        ),
    ],
)
def test_a_model_with_other_state_is_refused_by_name(
    make_model: MakeModel, family: str, settings: dict[str, Any], named: str
) -> None:
    """A model whose state is more or less than full-attention KV is refused by name."""
    with pytest.raises(UnsupportedModel, match=named):
        spec_of(make_model(family, **settings))


def test_nested_rope_types_are_seen(make_model: MakeModel) -> None:
    """A rope type that depends on the length is found in per-layer-type parameters too."""
    model = make_model("qwen3")
    model.config.rope_parameters = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    }
    with pytest.raises(UnsupportedModel, match=r"full_attention\.rope_type"):
        spec_of(model)


def test_a_bare_body_and_other_objects_are_refused(llama: PreTrainedModel) -> None:
    """Only a causal model with its head is taken; anything else says what is wanted."""
    with pytest.raises(UnsupportedModel, match="cannot generate"):
        spec_of(llama.model)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        spec_of(torch.nn.Linear(2, 2))


def test_state_outside_of_the_cache_is_found(make_model: MakeModel) -> None:
    """A model that remembers a sequence anywhere but in its cache is refused by running it."""
    model = make_model("llama")
    memory = weakref.WeakKeyDictionary()
    running = []

    def enter(_module: object, _args: object, kwargs: dict[str, Any]) -> None:
        running[:] = [kwargs.get("cache") or kwargs.get("past_key_values")]

    def remember(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        before = memory.get(running[0], 0.0) if running[0] is not None else 0.0
        if running[0] is not None:
            memory[running[0]] = output[:, -1:]
        return output + before

    model.model.register_forward_pre_hook(enter, with_kwargs=True)
    model.model.layers[0].mlp.register_forward_hook(remember)
    with pytest.raises(UnsupportedModel, match="state outside of its cache"):
        spec_of(model)


def test_a_model_that_looks_ahead_is_refused(make_model: MakeModel) -> None:
    """A token's KV that depends on later tokens is found whatever the config says."""
    model = make_model("llama")

    def mix(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        return output + output.mean(dim=1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(mix)
    with pytest.raises(UnsupportedModel, match="layer 1: K of a token changes with later tokens"):
        spec_of(model)


def test_weights_that_cannot_be_read_are_refused(make_model: MakeModel) -> None:
    """Meta tensors and tensor subclasses have no readable content, hence no fingerprint."""
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**make_model("llama").config.to_diff_dict())).eval()
    with pytest.raises(UnsupportedModel, match="meta tensor"):
        spec_of(empty)

    class Packed(torch.nn.Parameter):
        pass

    model = make_model("llama")
    model.lm_head.weight = Packed(model.lm_head.weight.detach())
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight: a Packed tensor"):
        spec_of(model)


def test_an_attached_lora_is_refused(make_model: MakeModel) -> None:
    """A LoRA layer's scale and active adapters are not weights, so it must be merged first."""
    lora = type("LoraLinear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj = lora(64, 96, bias=False)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj.*merge it"):
        spec_of(model)


def test_training_mode_is_refused(make_model: MakeModel) -> None:
    """Dropout changes KV, so a model in training mode is refused, in whole or in part."""
    model = make_model("llama")
    model.model.layers[2].train()
    with pytest.raises(ValueError, match=r"model\.eval"):
        spec_of(model)


def test_autocast_is_refused(llama: PreTrainedModel) -> None:
    """Autocast changes the precision of KV without changing the model."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        spec_of(llama)


def test_one_changed_number_changes_the_fingerprint(make_model: MakeModel) -> None:
    """Two checkpoints that differ in one number never share a namespace."""
    model = make_model("llama")
    before = spec_of(model)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[5, 7] += 1e-3
    after = spec_of(model)
    assert after.weights != before.weights
    assert after.namespace != before.namespace


@pytest.mark.parametrize(
    "settings",
    [{"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"num_attention_heads": 2, "head_dim": 16}],
)
def test_a_config_field_that_changes_kv_changes_the_fingerprint(
    make_model: MakeModel, settings: dict[str, Any]
) -> None:
    """A field that changes what is computed counts although no weight changes."""
    model = make_model("llama")
    other = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(other.config, name, value)
    assert weights_of_config(other) != weights_of_config(model)


def weights_of_config(model: PreTrainedModel) -> str:
    """Return the digest without running the model, whose modules were built for another config."""
    from kvtier_hf.weights import weights_digest

    return weights_digest(model, model.config)


def test_another_path_is_the_same_model(make_model: MakeModel, tmp_path: Path) -> None:
    """The same weights saved under two paths share a namespace."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "two").eval()
    assert spec_of(one) == spec_of(two) == spec_of(model)


def test_length_and_attention_implementation_do_not_matter(make_model: MakeModel) -> None:
    """Maximum length, attention implementation and special tokens are not identity."""
    expected = spec_of(make_model("llama"))
    assert spec_of(make_model("llama", max_position_embeddings=8192)) == expected
    assert spec_of(make_model("llama", attn_implementation="eager")) == expected
    model = make_model("llama", use_cache=False)
    model.config.eos_token_id, model.config.pad_token_id = 7, 7
    assert spec_of(model) == expected


def test_tied_weights_are_one_weight(make_model: MakeModel, tmp_path: Path) -> None:
    """A tied model whose head is not in its file has the same fingerprint once loaded."""
    model = make_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert weights(AutoModelForCausalLM.from_pretrained(tmp_path).eval()) == weights(model)
    assert weights(model) != weights(make_model("llama"))


def test_bfloat16_is_another_spec(make_model: MakeModel) -> None:
    """The same model in another dtype has another dtype and another fingerprint."""
    wide, narrow = make_model("llama"), make_model("llama").to(torch.bfloat16)
    assert spec_of(narrow).dtype == "bfloat16"
    assert weights(narrow) != weights(wide)


def test_rounded_rotary_frequencies_are_another_model(make_model: MakeModel) -> None:
    """A cast rounds the rotary frequencies, which no checkpoint holds, for good."""
    model = make_model("llama").to(torch.bfloat16).float()
    rounded = spec_of(model)
    model.model.rotary_emb.inv_freq = make_model("llama").model.rotary_emb.inv_freq
    assert spec_of(model).weights != rounded.weights


def test_buffers_and_inference_tensors_are_covered(make_model: MakeModel) -> None:
    """A persistent buffer counts, and weights made under inference_mode can be fingerprinted."""
    model = make_model("llama")
    plain = weights(model)
    model.model.register_buffer("scale", torch.ones(()))
    assert weights(model) != plain
    with torch.inference_mode():
        inferred = make_model("llama")
    assert weights(inferred) == plain


@pytest.mark.parametrize("change", ["add_", "data", "load_state_dict", "swap"])
def test_a_change_in_memory_is_noticed(make_model: MakeModel, change: str) -> None:
    """Each way of changing a weight in place or by exchange is noticed without a full digest."""
    model = make_model("llama")
    before = weights_signature(model)
    assert weights_signature(model) == before
    layer = model.model.layers[1].self_attn.q_proj
    with torch.no_grad():
        if change == "add_":
            layer.weight[0, 0] += 1
        elif change == "data":
            layer.weight.data += torch.randn(64, 64) * 1e-3
        elif change == "load_state_dict":
            model.load_state_dict(make_model("llama").state_dict())
        else:
            layer.weight = torch.nn.Parameter(layer.weight.clone())
    assert weights_signature(model) != before


def test_the_spec_is_remembered_but_the_model_is_not_kept(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is read once per state of the weights, and forgetting the model frees it."""
    from kvtier_hf import spec as module

    model = make_model("llama")
    first = spec_of(model)
    monkeypatch.setattr(module, "weights_digest", lambda *_: pytest.fail("read again"))
    assert spec_of(model) == first
    assert spec_of(model, block_tokens=64).block_tokens == 64
    alive = weakref.ref(model)
    assert model in _known
    del model
    gc.collect()
    assert alive() is None


def test_probing_leaves_the_model_as_it_was(make_model: MakeModel) -> None:
    """Nothing of the model changes, and no hook stays."""
    model = make_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spec_of(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not model.training


def test_quantization_method_is_in_the_spec(make_model: MakeModel) -> None:
    """A config that says how weights are quantised gives the spec its method."""
    model = make_model("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert spec_of(model).quantization == "gptq"


def test_public_names_are_complete_and_sorted() -> None:
    """Every public name is listed once, sorted, and exists."""
    assert kvtier_hf.__all__ == sorted(kvtier_hf.__all__)
    assert all(hasattr(kvtier_hf, name) for name in kvtier_hf.__all__)
