from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache

import kvtier_hf
from kvtier import BlockLayout
from kvtier_hf import KVTierCache
from kvtier_hf.forward import Body

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    OpenKV = Callable[..., kvtier_hf.Adapter]
    TensorOf = Callable[..., torch.Tensor]


T = 64


class Slow:
    """A transfer that is under way until it is told otherwise."""

    def __init__(self) -> None:
        self.finished = False

    def done(self) -> bool:
        """Whether the copy is over."""
        return self.finished


@pytest.fixture
def kv(llama: PreTrainedModel, open_kv: OpenKV) -> kvtier_hf.Adapter:
    """Attach the shared model to a store whose blocks lie on the SSD only."""
    return open_kv(llama)


def name(model: PreTrainedModel) -> str:
    """Return what the model calls its cache argument."""
    return Body.of(model).cache_name


def test_blocks_are_views_in_the_records_order() -> None:
    """parts(b) are views [H, T, D] of block b: K and V of layer 0, then of layer 1."""
    layout = BlockLayout("float32", 8, "hnd", (((2, 4), (2, 6)), ((1, 3), (1, 3))))
    cache = KVTierCache(layout, torch.device("cpu"), 20)
    parts = cache.slots.parts(1)
    assert [tuple(part.shape) for part in parts] == [(2, 8, 4), (2, 8, 6), (1, 8, 3), (1, 8, 3)]
    parts[1].fill_(7)
    assert bool((cache.layers[0].buffers[1][0, :, 8:16] == 7).all())
    assert cache.slots.layout == layout


def test_it_is_a_cache_like_any_other(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """Lengths, mask sizes, batch size and crop are those of transformers' own cache."""
    ids = make_prompt(2 * T + 7)
    ours, theirs = kv.prefill(ids), DynamicCache(config=llama.config)
    for cache, rest in ((ours, ids[:, 2 * T :]), (theirs, ids)):
        llama(rest, **{name(llama): cache})
    for cut in (0, -5, -T):
        ours.crop(cut)
        theirs.crop(cut)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert mine.keys.shape == other.keys.shape
            assert torch.allclose(mine.values, other.values, atol=1e-4)
    assert ours.batch_size == 1
    assert not ours.is_compileable
    assert all(not layer.is_compileable for layer in ours.layers)
    with pytest.raises(ValueError, match="negative"):
        ours.crop(5)


def test_beams_and_batches_say_what_to_do(kv: kvtier_hf.Adapter, make_prompt: TensorOf) -> None:
    """Whatever makes several sequences of one raises and names the settings."""
    cache = kv.prefill(make_prompt(T + 1))
    for attempt in (cache.reorder_cache, cache.batch_repeat_interleave, cache.batch_select_indices):
        with pytest.raises(ValueError, match="num_beams=1"):
            attempt(2)


def test_growth_keeps_everything(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """Decoding past the reserved room grows the buffers and changes no token."""
    ids = make_prompt(2 * T + 3)
    cache = kv.prefill(ids, reserve=4)
    before = cache.capacity
    assert torch.equal(greedy(llama, ids, cache, tokens=20), greedy(llama, ids, tokens=20))
    assert cache.capacity == int(before * 1.5)
    cache = kv.prefill(ids, reserve=0)
    assert torch.equal(greedy(llama, ids, cache, tokens=200), greedy(llama, ids, tokens=200))
    held = cache.token_ids()
    assert held.numel() == ids.shape[1] + 199
    assert kv.put(cache).result(30).stored == held.numel() // T
    with pytest.raises(ValueError, match="reserve: -1"):
        kv.prefill(ids, reserve=-1)


def test_slots_stay_valid_when_the_cache_grows(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """A snapshot of the slots keeps the old buffers, whose blocks do not change."""
    ids = make_prompt(T + 1)
    cache = kv.prefill(ids, reserve=1)
    slots = cache.slots
    before = [part.clone() for part in slots.parts(0)]
    llama(ids[:, T:], **{name(llama): cache})
    for step in range(5):
        llama(ids[:, step : step + 1], **{name(llama): cache})
    assert cache.slots.tensors[0].data_ptr() != slots.tensors[0].data_ptr()
    assert all(map(torch.equal, before, slots.parts(0)))
    assert all(map(torch.equal, before, cache.slots.parts(0)))


def test_tokens_are_those_fed(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """Prompt, generated and cropped tokens are remembered in order."""
    ids = make_prompt(2 * T + 7)
    cache = kv.prefill(ids)
    assert torch.equal(cache.token_ids(), ids[0, : 2 * T])
    llama(ids[:, 2 * T :], **{name(llama): cache})
    llama(torch.tensor([[5]]), **{name(llama): cache})
    assert cache.token_ids().tolist() == [*ids[0].tolist(), 5]
    cache.crop(-3)
    assert torch.equal(cache.token_ids(), ids[0, :-2])
    llama(torch.tensor([[6, 7]]), **{name(llama): cache})
    assert cache.token_ids().tolist() == [*ids[0, :-2].tolist(), 6, 7]
    cache.crop(-10_000)
    assert cache.token_ids().numel() == cache.get_seq_length() == 0
    cache.reset()
    llama(ids[:, :9], **{name(llama): cache})
    assert torch.equal(cache.token_ids(), ids[0, :9])


def test_tokens_are_remembered_by_value(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """A caller that reuses its tensors does not change what the cache says it holds."""
    ids = make_prompt(T + 7)
    expected = ids[0].clone()
    cache = kv.prefill(ids)
    fed = ids[:, T:].clone()
    llama(fed, **{name(llama): cache})
    ids.fill_(3)
    fed.fill_(3)
    assert torch.equal(cache.token_ids(), expected)


def test_a_prompt_of_whole_blocks_is_stored_whole(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """The last token is taken back to be fed again, yet its block is in place and stored."""
    ids = make_prompt(3 * T)
    cache = kv.prefill(ids)
    assert cache.get_seq_length() == 3 * T - 1
    assert torch.equal(cache.token_ids(), ids[0])
    assert kv.put(cache).result(30).stored == 3
    again = kv.prefill(ids)
    again.crop(-1)
    assert again.token_ids().numel() == 3 * T - 2


def test_a_copy_under_way_is_never_overwritten(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """After a crop new tokens go to new buffers while a put still reads the old ones."""
    ids = make_prompt(2 * T + 7)
    cache = kv.prefill(ids)
    slots = cache.slots
    before = [tensor.clone() for tensor in slots.tensors]
    slow = Slow()
    cache.lend(slow, 2 * T)
    llama(ids[:, 2 * T :], **{name(llama): cache})
    assert cache.slots.tensors[0].data_ptr() == slots.tensors[0].data_ptr()  # appended behind
    cache.crop(-T)
    llama(ids[:, :9], **{name(llama): cache})
    assert cache.slots.tensors[0].data_ptr() != slots.tensors[0].data_ptr()
    for old, tensor in zip(before, slots.tensors, strict=True):
        assert torch.equal(old[:, : 2 * T], tensor[:, : 2 * T])
    slow.finished = True
    cache.lend(slow, T)
    here = cache.slots.tensors[0].data_ptr()
    cache.reset()
    llama(ids[:, :9], **{name(llama): cache})
    assert cache.slots.tensors[0].data_ptr() == here  # the copy is done: nothing to protect


def test_deepcopy_is_a_cache_of_its_own(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf, greedy: TensorOf
) -> None:
    """The recipe for sharing a prefix works: each copy goes on alone, and can be stored."""
    ids = make_prompt(3 * T + 5)
    cache = kv.prefill(ids)
    kv.put(cache)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    expected = greedy(llama, ids)
    for each in (*copies, cache):
        assert torch.equal(greedy(llama, ids, each), expected)
        assert torch.equal(each.token_ids(), expected[0, :-1])
        assert kv.put(each).result(30).dropped == 0


def test_inference_mode_and_no_grad_mix(
    llama: PreTrainedModel,
    kv: kvtier_hf.Adapter,
    make_prompt: TensorOf,
    greedy: TensorOf,
    logits_of: TensorOf,
) -> None:
    """A cache made under inference_mode goes on outside of it, and the other way round."""
    ids = make_prompt(2 * T + 5)
    with torch.inference_mode():
        inside = kv.prefill(ids, reserve=1)
    outside = kv.prefill(ids, reserve=1)
    expected = greedy(llama, ids)
    assert torch.equal(greedy(llama, ids, inside), expected)
    with torch.inference_mode():
        assert torch.equal(greedy(llama, ids, outside), expected)
    kv.put(inside).result(30)


def test_gradients_do_not_grow_through_the_cache(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """A forward with gradients on leaves none in the buffers."""
    ids = make_prompt(T + 5)
    cache = kv.prefill(ids)
    with torch.enable_grad():
        llama(ids[:, T:], **{name(llama): cache})
    assert not any(buffer.requires_grad for layer in cache.layers for buffer in layer.buffers)


def test_another_dtype_is_refused(
    llama: PreTrainedModel, kv: kvtier_hf.Adapter, make_prompt: TensorOf
) -> None:
    """KV of another dtype than the cache's is refused, never cast in silence."""
    ids = make_prompt(T + 5)
    cache = kv.prefill(ids)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        llama(ids[:, T:], **{name(llama): cache})
