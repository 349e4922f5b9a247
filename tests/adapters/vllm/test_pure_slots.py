from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import KVSpec, SpecMismatch, UnsupportedModel
from kvtier.tiers.device import layer_copies, read_block, write_block
from kvtier_vllm.slots import EnginePages, GpuLane, PagedSlots, _runs, _steps

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, PAGES, HEADS, PAGE_TOKENS, WIDTH = 3, 13, 2, 4, 6
PER_BLOCK = 4
ORDERS = {"lbhnc": (0, 1, 2, 3, 4), "lbnhc": (0, 1, 3, 2, 4), "blhnc": (1, 0, 2, 3, 4)}
"""Where vLLM's axes [layers, pages, heads, tokens, width] are in memory, outermost first."""


def spec_of(dtype: str = "float32", layers: int = LAYERS) -> KVSpec:
    """Return the spec of the engine's KV."""
    return KVSpec(
        model="m", weights="w", dtype=dtype, layers=layers, parts=(((HEADS, WIDTH),),) * layers,
        layout=f"test/{PAGE_TOKENS}", block_tokens=PER_BLOCK * PAGE_TOKENS,
    )  # fmt: skip


def engine_tensors(order: str, dtype: str = "float32", split: int = 1) -> dict[str, torch.Tensor]:
    """Return vLLM's tensors by layer, every value its own, axes as vLLM shows them.

    ``split``: the backend has so many blocks in one page.
    """
    logical = (LAYERS, PAGES * split, HEADS, PAGE_TOKENS // split, WIDTH)
    permutation = ORDERS[order]
    raw = torch.arange(int(np.prod(logical)), dtype=torch.int64) % 251
    raw = raw.to(getattr(torch, dtype)).reshape([logical[axis] for axis in permutation])
    whole = raw.permute([permutation.index(axis) for axis in range(5)])
    assert whole.shape == logical
    return {f"layer.{layer}": whole[layer] for layer in range(LAYERS)}


def page_bytes(tensor: torch.Tensor, page: int, split: int = 1) -> bytes:
    """Return the bytes of one page as they lie in memory, read without kvtier's code."""
    inner = tensor[page * split : (page + 1) * split]
    flat = [
        (int(sum(i * s for i, s in zip(index, inner.stride(), strict=True))), inner[index].item())
        for index in np.ndindex(*inner.shape)
    ]
    values = torch.tensor([value for _, value in sorted(flat)], dtype=tensor.dtype)
    return values.view(torch.uint8).numpy().tobytes()


class HostLane(GpuLane):
    """The way of a GPU, over memory that needs none."""

    def __init__(self, stage_bytes: int) -> None:
        super().__init__(stage_bytes)
        self.waited: list[object] = []

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[HostLane]:
        """Be the stream oneself."""
        yield self

    def wait_event(self, event: object) -> None:
        """Note what a copy waits for."""
        self.waited.append(event)


def gathered(slots: PagedSlots, block: int) -> bytes:
    """Return a block as a put reads it."""
    into = bytearray(b"\xff" * slots.layout.block_bytes)
    read_block(slots, block, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@settings(max_examples=10, deadline=None)
@given(pages=st.permutations(range(PAGES)))
def test_a_block_is_its_pages_bytes(dtype: str, order: str, split: int, pages: list[int]) -> None:
    """A record holds, layer by layer, each page's bytes in token order; writing it brings all back.

    Whatever the order of the axes and of the pages; pages of others stay as they were.
    """
    if order == "blhnc" and split > 1:
        return  # vLLM does not split pages there
    tensors = engine_tensors(order, dtype, split)
    slots = PagedSlots(EnginePages(spec_of(dtype).block_layout, tensors, PAGES))
    mine, other = pages[:PER_BLOCK], pages[PER_BLOCK : 2 * PER_BLOCK]
    slots.place(7, mine)
    slots.place(2, other)
    expected = b"".join(page_bytes(t, page, split) for t in tensors.values() for page in mine)
    assert gathered(slots, 7) == expected
    parts = b"".join(
        p.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in slots.parts(7)
    )
    assert parts == expected
    before = gathered(slots, 2)
    new = bytes(reversed(expected))
    write_block(slots, 7, memoryview(new))
    assert gathered(slots, 7) == new
    assert gathered(slots, 2) == before
    for layer in range(LAYERS):
        layer_copies(slots, 7, memoryview(expected))(layer)
    assert gathered(slots, 7) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("stage_bytes", [1, 400, 1 << 20])
def test_a_gpu_moves_the_same_bytes(dtype: str, stage_bytes: int) -> None:
    """Pages gathered on a device, in pieces of any size, are the bytes that single parts are.

    A copy into pages waits for what the engine had queued; one out of them does not.
    """
    tensors = engine_tensors("lbhnc", "uint8" if dtype.startswith("float8") else dtype)
    tensors = {name: t.view(getattr(torch, dtype)) for name, t in tensors.items()}
    layout, lane = spec_of(dtype).block_layout, HostLane(stage_bytes)
    slots = PagedSlots(EnginePages(layout, tensors, PAGES, lane))
    slots.place(0, [8, 2, 3, 11], after="a fence")
    plain = PagedSlots(EnginePages(layout, tensors, PAGES))
    plain.place(0, [8, 2, 3, 11])
    before = gathered(slots, 0)
    assert before == gathered(plain, 0)
    assert lane.waited == []
    new = bytearray(reversed(before))
    write_block(slots, 0, memoryview(new))
    assert gathered(plain, 0) == new
    assert lane.waited == ["a fence"]


def test_pages_by_parts_and_at_once_agree() -> None:
    """A copy of whole runs has the bytes that the single parts have, with kvtier's own checks."""
    tensors = engine_tensors("lbhnc")
    slots = PagedSlots(EnginePages(spec_of().block_layout, tensors, PAGES))
    slots.place(0, [3, 1, 12, 4])
    shapes = {part.shape for part in slots.layout.tensors}
    assert {tuple(part.shape) for part in slots.parts(0)} == shapes
    assert len(slots.parts(0)) == len(slots.layout.tensors)


@given(st.lists(st.integers(0, 40), unique=True, max_size=20))
def test_stretches_cover_the_pages(pages: list[int]) -> None:
    """Stretches at equal distances are exactly the pages, in order."""
    column = np.arange(41)
    found = []
    for at, count, run in _steps(pages):
        assert at == len(found)
        assert len(column[run]) == count
        found += column[run].tolist()
    assert found == pages


def test_layers_of_one_memory_are_one_run() -> None:
    """Layers of one allocation are copied as one array; those of several are not mixed up."""
    together = EnginePages(spec_of().block_layout, engine_tensors("lbhnc"), PAGES)
    assert [run.shape for run in together.runs] == [(LAYERS, PAGES, 24)]
    apart = {name: tensor.clone() for name, tensor in engine_tensors("lbhnc").items()}
    slots = PagedSlots(EnginePages(spec_of().block_layout, apart, PAGES))
    assert len(EnginePages(spec_of().block_layout, apart, PAGES).runs) == LAYERS
    slots.place(0, [0, 2, 4, 5])
    same = PagedSlots(together)
    same.place(0, [0, 2, 4, 5])
    assert gathered(slots, 0) == gathered(same, 0)


def test_runs_keep_the_order_of_layers() -> None:
    """Layers that lie backwards, or at other distances, are runs of their own, in their order."""
    raw = torch.arange(6 * 8.0).view(6, 4, 2)
    for wanted in ([5, 3, 1], [0, 1, 3, 5], [0, 4, 5], [2]):
        runs = _runs([raw[layer] for layer in wanted])
        assert torch.equal(torch.cat([run.reshape(-1, 4, 2) for run in runs]), raw[wanted])


def test_pages_that_do_not_fit_are_refused() -> None:
    """Pages in pieces, other sizes, other dtypes and pages beyond the engine's are refused."""
    layout, tensors = spec_of().block_layout, engine_tensors("lbhnc")
    pieces = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in tensors.items()}
    with pytest.raises(UnsupportedModel, match=r"layer\.0.*VLLM_KV_CACHE_LAYOUT"):
        EnginePages(layout, pieces, PAGES)
    with pytest.raises(SpecMismatch, match="float16"):
        EnginePages(layout, {n: t.to(torch.float16) for n, t in tensors.items()}, PAGES)
    with pytest.raises(UnsupportedModel, match="rows"):
        EnginePages(layout, tensors, PAGES - 1)
    with pytest.raises(SpecMismatch):
        EnginePages(spec_of(layers=2).block_layout, tensors, PAGES)
    slots = PagedSlots(EnginePages(layout, tensors, PAGES))
    for wrong in ([0, 1, 2], [0, 1, 2, PAGES], [-1, 0, 1, 2]):
        with pytest.raises(SpecMismatch, match="block 3"):
            slots.place(3, wrong)
    with pytest.raises(SpecMismatch, match="block 3"):
        gathered(slots, 3)
