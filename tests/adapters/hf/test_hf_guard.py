"""Ways to use a prefilled cache that transformers takes silently, with wrong text as the result."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvtier_hf
from kvtier_hf.forward import Body

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    MakeModel = Callable[..., PreTrainedModel]
    OpenKV = Callable[..., kvtier_hf.Adapter]
    TensorOf = Callable[..., torch.Tensor]


T = 64


@pytest.fixture
def kv(llama: PreTrainedModel, open_kv: OpenKV) -> kvtier_hf.Adapter:
    """Attach the shared model to a store whose blocks lie on the SSD only."""
    return open_kv(llama)


def name(model: PreTrainedModel) -> str:
    """Return what the model calls its cache argument."""
    return Body.of(model).cache_name


def test_the_prompt_twice_is_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """A cache as long as the prompt makes generate feed the whole prompt again on top."""
    ids = make_prompt(3 * T + 5)
    cache = kv.prefill(ids)
    first = greedy(llama, ids, cache)
    with pytest.raises(ValueError, match="FULL prompt ids"):
        greedy(llama, ids, cache)  # the cache holds the answer by now
    with pytest.raises(ValueError, match="FULL prompt ids"):
        greedy(llama, first[:, :-1], cache)  # exactly as long as the cache: TRAP 1
    assert torch.equal(greedy(llama, first, cache)[:, : first.shape[1]], first)


def test_only_the_suffix_is_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """The rest of the prompt without a mask over all of it: TRAP 2."""
    for extra in (5, 40):
        ids = make_prompt(3 * T + extra)
        with pytest.raises(ValueError, match="FULL prompt ids"):
            greedy(llama, ids[:, 3 * T :], kv.prefill(ids))
    short = make_prompt(3 * T + 2)
    with pytest.raises(ValueError, match="FULL prompt ids"):
        greedy(llama, short[:, -1:], kv.prefill(short))


def test_the_suffix_with_a_full_mask_is_right(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Transformers' own form for a suffix works and gives the same tokens."""
    ids = make_prompt(3 * T + 5)
    out = llama.generate(
        ids[:, 3 * T :],
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        **{name(llama): kv.prefill(ids)},
    )
    assert torch.equal(out[0, 5:], greedy(llama, ids, tokens=8)[0, ids.shape[1] :])


def test_another_prompt_is_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """TensorOf that do not follow the cached ones in the prompt are refused without being named."""
    ids = make_prompt(3 * T + 5)
    with pytest.raises(ValueError, match="not the 5 that follow") as caught:
        greedy(llama, make_prompt(3 * T + 5), kv.prefill(ids))
    assert not any(str(int(token)) in str(caught.value).split() for token in ids[0] if token > 99)


def test_chunked_prefill_is_right(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Generate may feed the rest of the prompt in several forwards."""
    ids = make_prompt(3 * T + 40)
    cache = kv.prefill(ids)
    out = llama.generate(
        ids, max_new_tokens=8, do_sample=False, prefill_chunk_size=16, **{name(llama): cache}
    )
    assert torch.equal(out, greedy(llama, ids, tokens=8))


def test_assisted_decoding_is_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """Transformers feeds the whole prompt again to verify a draft on a prefilled cache."""
    ids = make_prompt(2 * T + 10)
    ids[:, -20:] = ids[:, -40:-20]  # so that a lookup in the prompt drafts something
    with pytest.raises(ValueError, match="FULL prompt ids"):
        llama.generate(
            ids, max_new_tokens=20, prompt_lookup_num_tokens=4, **{name(llama): kv.prefill(ids)}
        )


def test_a_draft_may_follow_the_prompt_and_be_taken_back(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Several tokens fed ahead and cropped again leave the cache as if they had never been."""
    ids = make_prompt(2 * T + 10)
    cache = kv.prefill(ids)
    llama(torch.cat([ids[:, 2 * T :], make_prompt(4)], dim=1), **{name(llama): cache})
    cache.crop(-5)
    assert torch.equal(greedy(llama, ids, cache), greedy(llama, ids))
    held = cache.token_ids()
    assert torch.equal(held[: ids.shape[1]], ids[0])
    assert held.numel() == cache.get_seq_length()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 5)}, "attention_mask: shape"),
        ({"attention_mask": torch.ones(1, 1, 5, 3 * T + 5)}, "2-D mask"),
        ({"position_ids": torch.arange(5)[None]}, "position_ids"),
        ({"position_ids": torch.arange(4)[None]}, "position_ids: shape"),
        ({"use_cache": False}, "use_cache"),
        ({"token_type_ids": torch.zeros(1, 5)}, "token_type_ids"),
    ],
)
def test_a_forward_that_does_not_continue_the_cache_is_refused(
    llama: PreTrainedModel,
    kv: kvtier_hf.Adapter,
    make_prompt: TensorOf,
    change: dict[str, Any],
    message: str,
) -> None:
    """Masks, positions and other inputs that change KV behind its tokens are refused."""
    ids = make_prompt(3 * T + 5)
    cache = kv.prefill(ids)
    with pytest.raises(ValueError, match=message):
        llama.model(ids[:, 3 * T :], **{name(llama): cache}, **change)


def test_padding_is_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """A mask with a zero changes KV; in the first forwards and in later ones."""
    ids = make_prompt(3 * T + 5)
    cache = kv.prefill(ids)
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="without padding"):
        llama(ids[:, 3 * T :], attention_mask=mask, **{name(llama): cache})
    llama(ids[:, 3 * T :], **{name(llama): cache})
    with pytest.raises(ValueError, match="without padding"):
        llama(
            ids[:, :1],
            attention_mask=torch.cat([mask, mask[:, :1]], dim=1),
            **{name(llama): cache},
        )


def test_embeddings_are_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """Embeddings have no tokens to store KV under."""
    cache = kv.prefill(make_prompt(T + 5))
    with pytest.raises(ValueError, match="inputs_embeds"):
        llama(inputs_embeds=torch.zeros(1, 5, 64), **{name(llama): cache})


def test_batches_and_beams_are_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """One cache holds one sequence, however it is asked for more."""
    ids = make_prompt(T + 5)
    with pytest.raises(ValueError, match="batch of 2"):
        llama(ids[:, T:].repeat(2, 1), **{name(llama): kv.prefill(ids)})
    for settings in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ValueError, match="one sequence"):
            llama.generate(ids, max_new_tokens=4, **settings, **{name(llama): kv.prefill(ids)})


def test_another_models_forward_is_refused(
    make_model: MakeModel,
    llama: PreTrainedModel,
    kv: kvtier_hf.Adapter,
    make_prompt: TensorOf,
    open_kv: OpenKV,
) -> None:
    """A cache runs on the model it was made for: with or without an adapter, others are refused."""
    ids = make_prompt(T + 5)
    other = make_model("llama")
    with pytest.raises(ValueError, match="did not see"):
        other(ids[:, T:], **{name(other): kv.prefill(ids)})
    open_kv(other, path="other")
    with pytest.raises(ValueError, match="another model"):
        other(ids[:, T:], **{name(other): kv.prefill(ids)})


def test_two_adapters_share_a_model(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Each adapter's guard looks at its own caches only."""
    with kvtier_hf.attach(llama, kv.store, tenant="b", calibrate=False) as other:
        ids = make_prompt(T + 5)
        assert torch.equal(greedy(llama, ids, other.prefill(ids)), greedy(llama, ids))
        assert torch.equal(greedy(llama, ids, kv.prefill(ids)), greedy(llama, ids))
        with pytest.raises(ValueError, match="not made by this adapter"):
            kv.put(other.prefill(ids))


def test_other_caches_are_left_alone(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """The guard does not look at forwards over transformers' own caches."""
    ids = make_prompt(20)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    llama.generate(
        ids.repeat(3, 1), attention_mask=mask.repeat(3, 1), max_new_tokens=2, num_beams=2
    )


def test_close_takes_the_guard_off(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf
) -> None:
    """After close the model has no hook of ours, and old caches say so instead of decoding."""
    model = make_model("llama")
    store = open_kv(model).store
    adapter = kvtier_hf.attach(model, store, calibrate=False)
    hooks = len(model.model._forward_pre_hooks)
    ids = make_prompt(T + 5)
    cache = adapter.prefill(ids)
    adapter.close()
    adapter.close()
    assert len(model.model._forward_pre_hooks) == hooks - 1
    with pytest.raises(ValueError, match="keep the adapter open"):
        model(ids[:, T:], **{name(model): cache})
    with pytest.raises(ValueError, match="attach again"):
        adapter.prefill(ids)


def test_a_cache_keeps_its_adapter(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """A forgotten adapter lives as long as its caches; afterwards its guard is gone by itself."""
    model = make_model("llama")
    store = open_kv(model).store
    hooks = len(model.model._forward_pre_hooks)
    ids = make_prompt(T + 5)
    cache = kvtier_hf.attach(model, store, calibrate=False).prefill(ids)
    gc.collect()
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))
    del cache
    gc.collect()
    assert len(model.model._forward_pre_hooks) == hooks


def test_an_unfinished_forward_is_noticed(
    make_model: MakeModel, open_kv: OpenKV, make_prompt: TensorOf
) -> None:
    """After a forward that died half-way the cache is refused, not stored and not gone on with."""
    model = make_model("llama")
    kv, ids = open_kv(model), make_prompt(T + 5)
    cache = kv.prefill(ids)

    def die(*_: object) -> None:
        raise RuntimeError("out of memory")

    argument = name(model)
    hook = model.model.layers[2].register_forward_pre_hook(die)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, T:], **{argument: cache})
    hook.remove()
    for attempt in (lambda: model(ids[:, T:], **{argument: cache}), lambda: kv.put(cache)):
        with pytest.raises(ValueError, match="did not finish"):
            attempt()


def test_a_wrong_position_is_never_stored(
    llama: PreTrainedModel,
    kv: kvtier_hf.Adapter,
    make_prompt: TensorOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be checked without waiting for a GPU is checked before anything is stored."""
    ids = make_prompt(2 * T)
    cache = kv.prefill(ids[:, : T + 1])
    llama(ids[:, T : T + 1], **{name(llama): cache})
    for position in range(T + 1, 2 * T):
        fed = ids[:, position : position + 1]
        wrong = torch.tensor([[position + (position == T + 9)]])
        cache.record(fed[0], [(wrong == position).all()])  # as the guard does on a GPU
        cache._promise.tokens -= 1
        cache._tokens.pop()
        kv.guard.driving = True
        cache.promise(position + 1)
        llama(fed, position_ids=wrong, **{name(llama): cache})
        kv.guard.driving = False
        cache._tokens.append(fed[0])
    with pytest.raises(ValueError, match="did not continue the cache"):
        kv.put(cache)
    with pytest.raises(ValueError, match="do not continue"):
        llama(ids[:, :1], position_ids=torch.tensor([[3]]), **{name(llama): cache})


def test_decoding_asks_nothing_of_a_gpu(
    llama: PreTrainedModel,
    kv: kvtier_hf.Adapter,
    make_prompt: TensorOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While single tokens are decoded the guard reads no tensor's value."""
    ids = make_prompt(T + 5)
    cache = kv.prefill(ids)
    llama(ids[:, T:], **{name(llama): cache})
    reads = []
    real = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(1) or real(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("waited"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waited"))
    kv.guard(llama.model, (), {"input_ids": ids[:, :1], name(llama): cache})
    assert not reads


def test_no_warning_is_given(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """The one-call form is free of deprecated arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kv.generate(make_prompt(T + 3), max_new_tokens=3, do_sample=False)
