from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GenerationConfig

import kvtier
import kvtier_hf
from kvtier.errors import SpecMismatch, StoreClosed, UnsupportedModel
from kvtier_hf import attach, spec_of
from kvtier_hf.forward import Body

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    MakeModel = Callable[..., PreTrainedModel]
    OpenKV = Callable[..., kvtier_hf.Adapter]
    TensorOf = Callable[..., torch.Tensor]


T = 64


@pytest.fixture
def kv(llama: PreTrainedModel, open_kv: OpenKV) -> kvtier_hf.Adapter:
    """Attach the shared model to a store whose blocks lie on the SSD only."""
    return open_kv(llama)


def test_generate_in_one_call(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Prefill, generate and put in one call give plain generate's result and a report."""
    ids = make_prompt(3 * T + 9)
    expected = greedy(llama, ids, tokens=T)
    for loaded in (0, 3):
        out = kv.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=T,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected)
        assert kv.last_report.loaded + kv.last_report.recomputed == 3
        kv.store.flush(30)
        assert kv.last_put.result(30).stored == (4 if loaded == 0 else 0)
        assert kv.store.lookup(kv.store.keys(ids)).stored == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"cache": object()}, "cache: the adapter makes"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens=4"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
        ({"position_ids": torch.zeros(1, 3)}, "position_ids"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache=False"),
    ],
)
def test_generate_refuses_what_one_prefilled_sequence_cannot_do(
    kv: kvtier_hf.Adapter, make_prompt: TensorOf, settings: dict[str, Any], named: str
) -> None:
    """Beams, several answers, other caches are refused before any work, by name."""
    with pytest.raises(ValueError, match=named):
        kv.generate(make_prompt(T), max_new_tokens=4, **settings)


def test_a_setting_of_the_models_own_config_is_seen(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf
) -> None:
    """What the model's generation config says counts like an argument, and an argument wins."""
    model = make_model("llama")
    kv, ids = open_kv(model), make_prompt(T)
    model.generation_config.num_beams = 2
    with pytest.raises(ValueError, match="num_beams=2"):
        kv.generate(ids, max_new_tokens=4)
    kv.generate(ids, max_new_tokens=4, num_beams=1)


def test_the_pad_token_in_a_prompt_is_refused(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Generate takes pad tokens for padding unless a mask says that they are text."""
    model = make_model("llama")
    model.generation_config.pad_token_id = 1
    kv, ids = open_kv(model), make_prompt(T + 9)
    ids[0, 7] = 1
    with pytest.raises(ValueError, match="holds the pad token"):
        kv.generate(ids, max_new_tokens=4)
    with pytest.raises(ValueError, match="pad token"):
        greedy(model, ids, kv.prefill(ids))
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    out = kv.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("ids", "mask", "error", "named"),
    [
        ([[1, 2]], None, TypeError, "list given"),
        (torch.ones(1, 4), None, TypeError, "float32"),
        (torch.ones(4, dtype=torch.int64), None, ValueError, r"shape \[4\]"),
        (torch.ones(2, 4, dtype=torch.int64), None, ValueError, "batch of 2"),
        (torch.ones(1, 0, dtype=torch.int64), None, ValueError, "empty"),
        (
            torch.ones(1, 4097, dtype=torch.int64),
            None,
            ValueError,
            "max_position_embeddings is 4096",
        ),
        (torch.tensor([[1, 500]]), None, ValueError, r"input_ids\[0, 1\].*vocabulary of 500"),
        (torch.tensor([[-1, 5]]), None, ValueError, r"input_ids\[0, 0\]"),
        (torch.tensor([[1, 5]]), torch.tensor([[0, 1]]), ValueError, "padding"),
        (torch.tensor([[1, 5]]), torch.tensor([[1]]), ValueError, "attention_mask: shape"),
    ],
)
def test_a_bad_prompt_is_refused(
    kv: kvtier_hf.Adapter,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    error: type[Exception],
    named: str,
) -> None:
    """A prompt that cannot be prefilled is refused with the limit or the shape that is wanted."""
    with pytest.raises(error, match=named):
        kv.prefill(ids, attention_mask=mask)
    if mask is None:
        with pytest.raises(error, match=named):
            kv.generate(ids)


def test_int32_and_one_token(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """int32 ids are as good as int64, and one token is a prompt."""
    ids = make_prompt(1)
    assert torch.equal(greedy(llama, ids, kv.prefill(ids.int())), greedy(llama, ids))
    assert kv.put(kv.prefill(ids)).result(30).stored == 0


def test_a_store_of_another_spec_is_refused(
    make_model: MakeModel, llama: PreTrainedModel, tmp_path: Path
) -> None:
    """The fields that differ are named."""
    other = make_model("qwen2")
    with (
        kvtier.open(tmp_path, spec_of(llama), ssd_bytes="64MiB") as store,
        pytest.raises(SpecMismatch, match="model, weights"),
    ):
        attach(other, store, calibrate=False)


@pytest.mark.parametrize("how", ["add_", "data", "load_state_dict"])
def test_changed_weights_are_noticed(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf, how: str
) -> None:
    """After a change neither prefill nor put goes on; attaching again finds another spec."""
    model = make_model("llama")
    kv, ids = open_kv(model), make_prompt(T + 3)
    cache = kv.prefill(ids)
    with torch.no_grad():
        if how == "add_":
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        elif how == "data":
            model.model.layers[0].mlp.up_proj.weight.data *= 1.01
        else:
            model.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()})
    for attempt in (lambda: kv.prefill(ids), lambda: kv.put(cache), lambda: kv.generate(ids)):
        with pytest.raises(SpecMismatch, match="attach again"):
            attempt()
    with pytest.raises(SpecMismatch, match="weights"):
        attach(model, kv.store, calibrate=False)


def test_training_mode_and_autocast_are_refused(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf
) -> None:
    """A state in which KV is not what the spec says is refused at every prefill and put."""
    model = make_model("gpt2")
    kv, ids = open_kv(model), make_prompt(T + 3)
    cache = kv.prefill(ids)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        kv.prefill(ids)
    model.train()
    with pytest.raises(ValueError, match=r"model\.eval"):
        kv.prefill(ids)
    with pytest.raises(ValueError, match=r"model\.eval"):
        kv.put(cache)


def test_an_unsupported_model_is_refused_at_attach(make_model: MakeModel, tmp_path: Path) -> None:
    """No store is made for a model that cannot be held."""
    with pytest.raises(UnsupportedModel), kvtier_hf.open(make_model("gemma3"), tmp_path / "no"):
        pytest.fail("opened")
    assert not (tmp_path / "no").exists()


def test_calibration_teaches_the_cost_model(
    llama: PreTrainedModel, open_kv: OpenKV, make_prompt: TensorOf
) -> None:
    """Attach times recomputing once; the scratch KV is neither stored nor seen."""
    kv = open_kv(llama, calibrate=True)
    assert kv.store.costs.compute.known
    assert kv.store.stats()["tiers"]["ssd"]["ready"] == 0


def test_a_model_shorter_than_two_blocks_needs_no_calibration(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf
) -> None:
    """A table of positions is not read beyond its end."""
    model = make_model("gpt2", max_position_embeddings=100)
    kv = open_kv(model, calibrate=True)
    assert not kv.store.costs.compute.known
    kv.generate(make_prompt(80), max_new_tokens=4, do_sample=False)


def test_a_plan_is_a_value(kv: kvtier_hf.Adapter, make_prompt: TensorOf) -> None:
    """A plan can be looked at first, and one of another prompt is refused."""
    one, two = make_prompt(3 * T + 1), make_prompt(3 * T + 1)
    plan = kv.plan(one)
    assert plan.recompute == (0, 1, 2)
    assert "3 blocks" in plan.explain()
    kv.prefill(one, plan=plan)
    with pytest.raises(SpecMismatch, match="another prompt"):
        kv.prefill(two, plan=plan)


def test_a_store_that_fails_costs_no_answer(
    llama: PreTrainedModel,
    kv: kvtier_hf.Adapter,
    make_prompt: TensorOf,
    greedy: TensorOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If storing fails after generation the answer is returned with a warning."""
    ids = make_prompt(T + 3)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise StoreClosed("closed meanwhile")

    monkeypatch.setattr(kv.store, "put", fail)
    with pytest.warns(RuntimeWarning, match="nothing was stored: closed meanwhile"):
        out = kv.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(out, greedy(llama, ids))


def test_put_wants_its_own_cache(
    kv: kvtier_hf.Adapter, llama: PreTrainedModel, make_prompt: TensorOf
) -> None:
    """Anything but a cache of this adapter's prefill is refused."""
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="not made by this adapter"):
        kv.put(DynamicCache(config=llama.config))


def test_the_head_is_not_run_for_chunks(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """Recomputed blocks run the model's body only; no logits are made for them."""
    calls = []
    hook = llama.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    kv.prefill(make_prompt(3 * T))
    hook.remove()
    assert not calls
    assert Body.of(llama).module is llama.model
