"""A restored prompt goes on exactly like the same chunks computed without a store."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import kvtier
import kvtier_hf
from kvtier.tiers.fs import PosixFileSystem
from kvtier_hf import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from kvtier import RestorePlan

    MakeModel = Callable[..., PreTrainedModel]
    OpenKV = Callable[..., kvtier_hf.Adapter]
    TensorOf = Callable[..., torch.Tensor]


T = 64  # block_tokens where a test does not need the real size
FAMILIES = ["llama", "gpt2", "phi", "qwen2", "qwen3", "opt", "bloom", "neox", "mixtral", "mla"]


def forced(plan: RestorePlan, recompute: tuple[int, ...]) -> RestorePlan:
    """Return the plan that recomputes exactly these blocks and loads the others."""
    load = tuple(b for b in reversed(range(len(plan.hashes))) if b not in recompute)
    return dataclasses.replace(plan, recompute=tuple(recompute), load=load, adaptive=False)


def stored(kv: kvtier_hf.Adapter, ids: torch.Tensor) -> None:
    """Prefill a prompt, store its blocks, and wait until only the SSD holds them."""
    kv.put(kv.prefill(ids)).result(30)
    kv.store.flush(30)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [(), (0, 1), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_any_split_is_bitwise_and_greedy_equal(
    make_model: MakeModel,
    make_prompt: TensorOf,
    open_kv: OpenKV,
    logits_of: TensorOf,
    greedy: TensorOf,
    family: str,
    recompute: tuple[int, ...],
) -> None:
    """All loaded, a computed head, holes in between, all computed: logits and tokens are equal."""
    model, ids = make_model(family), make_prompt(5 * 256 + 77)
    kv = open_kv(model, block_tokens=256)
    stored(kv, ids)
    expected = logits_of(model, ids, block_tokens=256)
    plan = forced(kv.plan(ids), recompute)
    cache = kv.prefill(ids, plan=plan)
    assert cache.get_seq_length() == 5 * 256
    assert (cache.report.loaded, cache.report.recomputed) == (5 - len(recompute), len(recompute))
    assert torch.equal(logits_of(model, ids, cache), expected)
    assert torch.equal(greedy(model, ids, kv.prefill(ids, plan=plan)), greedy(model, ids))


@pytest.mark.parametrize("tokens", [1, T - 1, T, T + 1, 2 * T, 2 * T + 17, 8 * T, 8 * T + 63])
def test_every_length_leaves_a_token_and_is_equal(
    llama: PreTrainedModel,
    make_prompt: TensorOf,
    open_kv: OpenKV,
    logits_of: TensorOf,
    greedy: TensorOf,
    tokens: int,
) -> None:
    """Shorter than a block, whole blocks (one token computed again), and anything between."""
    kv, ids = open_kv(llama), make_prompt(tokens)
    for loaded in (0, tokens // T):
        plan = forced(kv.plan(ids), range(tokens // T - loaded))
        cache = kv.prefill(ids, plan=plan)
        assert cache.get_seq_length() == min(tokens // T * T, tokens - 1)
        if tokens >= T:
            assert cache.report.loaded == loaded
        else:
            assert cache.report is None
        assert torch.equal(logits_of(llama, ids, cache), logits_of(llama, ids))
        again = kv.prefill(ids, plan=plan)
        assert torch.equal(greedy(llama, ids, again), greedy(llama, ids))
        stored(kv, ids)


def test_a_slow_link_gives_a_hybrid(
    make_model: MakeModel, make_prompt: TensorOf, open_kv: OpenKV, logits_of: TensorOf
) -> None:
    """With a link about as fast as recomputing, the adapter does both and the result is equal."""
    model, ids = make_model("llama", hidden_size=256, intermediate_size=1024), make_prompt(2100)
    block_bytes = spec_of(model).block_layout.block_bytes
    link = kvtier.LinkThrottle(block_bytes / 0.02)
    kv = open_kv(model, block_tokens=256, links={"ssd": link}, calibrate=True)
    stored(kv, ids)
    plan = kv.plan(ids)
    split = forced(plan, range(3))
    cache = kv.prefill(ids, plan=split)
    assert cache.report.loaded == 5
    assert torch.equal(logits_of(model, ids, cache), logits_of(model, ids, block_tokens=256))
    cache = kv.prefill(ids)  # whatever the machine's speed makes of it now
    assert cache.report.loaded + cache.report.recomputed == 8
    assert torch.equal(logits_of(model, ids, cache), logits_of(model, ids, block_tokens=256))


def test_price_and_deadline_reach_the_plan(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, logits_of: TensorOf
) -> None:
    """Dear compute, or time enough, and what is stored is loaded; else a head is recomputed."""
    kv, ids = open_kv(llama), make_prompt(8 * T + 1)
    stored(kv, ids)
    block_bytes = kv.store.spec.block_layout.block_bytes
    for block in range(4):
        kv.store._profiler.computed(block * T, T, 1.0)
    kv.store._profiler.loaded(kvtier.Tier.SSD, block_bytes, 1.0)
    assert 0 < len(kv.plan(ids).recompute) < 8
    assert kv.plan(ids, compute_price=100.0).recompute == ()
    assert kv.plan(ids, deadline_s=1000.0).recompute == ()
    kv.store.compute_price = 100.0
    assert kv.plan(ids).recompute == ()
    assert kv.plan(ids, compute_price=0.0).recompute
    cache = kv.prefill(ids, compute_price=100.0)
    assert (cache.report.loaded, cache.report.recomputed) == (8, 0)
    assert torch.equal(logits_of(llama, ids, cache), logits_of(llama, ids))


class FailingDisk(PosixFileSystem):
    """A disk that cannot read one record."""

    def __init__(self) -> None:
        self.bad = set()

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read, unless it is the record that cannot be read."""
        count = super().read(fd, into, offset)
        # A record's header holds its own hash and its parent's.
        if self.bad and all(digest in bytes(into[0]) for digest in self.bad):
            raise OSError(errno.EIO, "injected")
        return count


@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("head", [0, 3])
def test_a_load_that_fails_is_recomputed(
    llama: PreTrainedModel,
    make_prompt: TensorOf,
    open_kv: OpenKV,
    logits_of: TensorOf,
    greedy: TensorOf,
    block: int,
    head: int,
) -> None:
    """A read error at any block costs a recompute of that block and changes no bit."""
    disk, ids = FailingDisk(), make_prompt(6 * T + 5)
    kv = open_kv(llama, fs=disk)
    stored(kv, ids)
    plan = forced(kv.plan(ids), range(head))
    disk.bad = {plan.hashes[block], kv.store.keys(ids).parent(block)}
    cache = kv.prefill(ids, plan=plan)
    assert cache.report.failed == (0 if block < head else 1)
    assert cache.report.loaded == 6 - head - cache.report.failed
    assert torch.equal(logits_of(llama, ids, cache), logits_of(llama, ids))
    disk.bad = set()
    assert torch.equal(greedy(llama, ids, kv.prefill(ids)), greedy(llama, ids))


def flip(store: kvtier.Store, digest: bytes) -> None:
    """Flip one byte in the middle of a block's payload on disk."""
    for path in Path(store.path, "segments").iterdir():
        data = path.read_bytes()
        at = data.find(digest)
        if at >= 0:
            middle = at // 4096 * 4096 + 4096 + store.spec.block_layout.block_bytes // 2
            with path.open("r+b") as file:
                file.seek(middle)
                file.write(bytes([data[middle] ^ 1]))
            return
    pytest.fail("the block is in no segment")


@pytest.mark.parametrize("block", [0, 2, 5])
def test_a_damaged_block_is_a_miss(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, logits_of: TensorOf, block: int
) -> None:
    """A flipped bit on disk is found and recomputed; afterwards the block is stored anew."""
    kv, ids = open_kv(llama), make_prompt(6 * T + 5)
    stored(kv, ids)
    plan = forced(kv.plan(ids), ())
    flip(kv.store, plan.hashes[block])
    cache = kv.prefill(ids, plan=plan)
    assert (cache.report.loaded, cache.report.failed) == (5, 1)
    assert torch.equal(logits_of(llama, ids, cache), logits_of(llama, ids))
    assert kv.put(cache).result(30).stored == 1
    kv.store.flush(30)
    assert kv.prefill(ids, plan=plan).report.loaded == 6


def test_holes_are_recomputed(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, logits_of: TensorOf
) -> None:
    """Blocks that were never stored are computed, those behind them still loaded."""
    kv, ids = open_kv(llama), make_prompt(6 * T + 9)
    cache = kv.prefill(ids)
    keys = kv.store.keys(ids)
    for blocks in (range(1, 2), range(4, 6)):
        kv.store.put(keys, cache.slots, blocks=blocks).result(30)
    kv.store.flush(30)
    cache = kv.prefill(ids, plan=forced(kv.plan(ids), (0, 2, 3)))
    assert (cache.report.loaded, cache.report.recomputed) == (3, 3)
    assert torch.equal(logits_of(llama, ids, cache), logits_of(llama, ids))


@pytest.mark.parametrize("host_bytes", [0, "64MiB"])
def test_loaded_kv_is_what_was_stored(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, host_bytes: int | str
) -> None:
    """Bytes come back as they were, from the SSD and from host memory, after a restart too."""
    ids = make_prompt(4 * T + 1)
    with torch.no_grad():
        kv = open_kv(llama, host_bytes=host_bytes)
        first = kv.prefill(ids)
        kv.put(first).result(30)
        kv.store.flush(30)
        again = kv.prefill(ids, plan=forced(kv.plan(ids), ()))
    for before, after in zip(first.slots.tensors, again.slots.tensors, strict=True):
        assert torch.equal(before[:, : 4 * T], after[:, : 4 * T])


def test_a_second_question_on_the_same_document(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, greedy: TensorOf
) -> None:
    """The document's blocks are found under another question, the differing block is not."""
    kv, document = open_kv(llama), make_prompt(5 * T)
    first = torch.cat([document, make_prompt(30)], dim=1)
    second = torch.cat([document, make_prompt(100)], dim=1)
    stored(kv, first)
    assert kv.store.lookup(kv.store.keys(second)).stored == 5
    assert torch.equal(
        kv.generate(second, max_new_tokens=12, do_sample=False), greedy(llama, second)
    )
    assert kv.last_report.loaded + kv.last_report.recomputed == 6


def test_documents_that_share_a_prefix_share_blocks(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, greedy: TensorOf
) -> None:
    """Only the blocks up to the first difference are shared."""
    kv, shared = open_kv(llama), make_prompt(3 * T + 10)
    one, two = (torch.cat([shared, make_prompt(2 * T)], dim=1) for _ in range(2))
    stored(kv, one)
    assert kv.store.lookup(kv.store.keys(two)).stored == 3
    cache = kv.prefill(two)
    assert torch.equal(greedy(llama, two, cache), greedy(llama, two))
    assert kv.put(cache).result(30).present == 3


def test_a_second_turn_finds_the_first_answer(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, greedy: TensorOf
) -> None:
    """Generated tokens' full blocks are stored, so the next turn loads prompt and answer."""
    kv, prompt = open_kv(llama), make_prompt(2 * T + 40)
    answer = kv.generate(prompt, max_new_tokens=2 * T, do_sample=False)
    assert torch.equal(answer, greedy(llama, prompt, tokens=2 * T))
    assert kv.last_put.result(30).stored == 4
    kv.store.flush(30)
    turn = torch.cat([answer, make_prompt(20)], dim=1)
    cache = kv.prefill(turn, plan=forced(kv.plan(turn), ()))
    assert cache.report.loaded == 4
    assert torch.equal(greedy(llama, turn, cache), greedy(llama, turn))


def test_a_conversation_on_one_cache(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV, greedy: TensorOf
) -> None:
    """The cache of one turn serves the next as any transformers cache does, and is stored whole."""
    kv, prompt = open_kv(llama), make_prompt(2 * T + 5)
    cache = kv.prefill(prompt)
    first = greedy(llama, prompt, cache)
    assert torch.equal(first, greedy(llama, prompt))
    turn = torch.cat([first, make_prompt(T)], dim=1)
    assert torch.equal(greedy(llama, turn, cache), greedy(llama, turn))
    assert kv.put(cache).result(30).stored == 3


def test_tenants_do_not_see_each_other(
    llama: PreTrainedModel, make_prompt: TensorOf, open_kv: OpenKV
) -> None:
    """A block stored for one tenant or adapter is a miss for every other."""
    ids = make_prompt(3 * T)
    kv = open_kv(llama, tenant="a")
    stored(kv, ids)
    assert kv.store.lookup(kv.store.keys(ids, tenant="a")).stored == 3
    assert kv.store.lookup(kv.store.keys(ids, tenant="b")).stored == 0
    assert kv.store.lookup(kv.store.keys(ids)).stored == 0
    from kvtier_hf import attach

    with attach(llama, kv.store, tenant="a", adapter="sha256:1", calibrate=False) as other:
        assert other.prefill(ids).report.loaded == 0


def test_bfloat16_is_bitwise(
    make_model: MakeModel, make_prompt: TensorOf, open_kv: OpenKV, logits_of: TensorOf
) -> None:
    """In bfloat16 a restored prompt is bit for bit the same chunks computed afresh."""
    model, ids = make_model("llama").to(torch.bfloat16), make_prompt(4 * T + 11)
    kv = open_kv(model)
    stored(kv, ids)
    cache = kv.prefill(ids, plan=forced(kv.plan(ids), (0,)))
    assert cache.report.loaded == 3
    assert torch.equal(logits_of(model, ids, cache), logits_of(model, ids))


def test_a_restart_finds_everything(
    llama: PreTrainedModel,
    make_prompt: TensorOf,
    open_kv: OpenKV,
    logits_of: TensorOf,
    tmp_path: Path,
) -> None:
    """What was stored by a closed store is loaded by the next one of the same model."""
    import kvtier_hf

    ids = make_prompt(4 * T + 3)
    path = tmp_path / "again"
    with kvtier_hf.open(llama, path, host_bytes="8MiB", block_tokens=T, calibrate=False) as kv:
        kv.put(kv.prefill(ids))
    with kvtier_hf.open(llama, path, host_bytes="8MiB", block_tokens=T, calibrate=False) as kv:
        cache = kv.prefill(ids, plan=forced(kv.plan(ids), ()))
        assert cache.report.loaded == 4
        assert torch.equal(logits_of(llama, ids, cache), logits_of(llama, ids))
