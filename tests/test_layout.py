from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import BlockLayout, KVSpec
from kvtier.layout import DTYPE_BYTES, LAYOUTS, TensorSlice, page_tokens

SIZES = st.integers(1, 40)
PARTS = st.lists(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4), min_size=1, max_size=6)


def test_mha() -> None:
    """A float32 layer with as many KV heads as query heads: exact bytes of every tensor."""
    spec = KVSpec(
        model="m", weights="w", dtype="float32", layers=2, kv_heads=3, head_dim=5, block_tokens=4
    )
    layout = spec.block_layout
    assert BlockLayout("float32", 4, "hnd", (((3, 5), (3, 5)),) * 2) == layout
    assert layout.itemsize == 4
    assert layout.part_bytes == (480, 480)
    assert layout.block_bytes == 960
    assert (
        TensorSlice(0, 0, (3, 4, 5), 0, 240),
        TensorSlice(0, 1, (3, 4, 5), 240, 240),
        TensorSlice(1, 0, (3, 4, 5), 480, 240),
        TensorSlice(1, 1, (3, 4, 5), 720, 240),
    ) == layout.tensors


def test_gqa_of_a_real_model() -> None:
    """Llama-3-8B in bfloat16: 128 KiB a token, 32 MiB a block, 1 MiB a part."""
    spec = KVSpec(
        model="llama-3-8b", weights="w", dtype="bfloat16", layers=32, kv_heads=8, head_dim=128
    )
    layout = spec.block_layout
    assert layout.part_bytes == (1 << 20,) * 32
    assert 32 << 20 == layout.block_bytes == 256 * (128 << 10)
    assert len(layout.tensors) == 64
    assert layout.tensors[0].shape == (8, 256, 128)


def test_narrower_values() -> None:
    """K and V of different width lie one after the other, each with its own size."""
    spec = KVSpec(
        model="m", weights="w", dtype="float16", layers=1, kv_heads=2, head_dim=6, v_head_dim=4,
        block_tokens=8,
    )  # fmt: skip
    k, v = spec.block_layout.tensors
    assert (k.offset, k.nbytes, k.shape) == (0, 192, (2, 8, 6))
    assert (v.offset, v.nbytes, v.shape) == (192, 128, (2, 8, 4))
    assert spec.block_layout.part_bytes == (320,)


def test_layers_that_differ() -> None:
    """Parts of different sizes, one with a single latent tensor, follow in layer order."""
    layout = BlockLayout(
        "uint8", 10, "hnd", (((1, 7), (1, 3)), ((1, 9),), ((4, 2), (4, 2), (1, 1)))
    )
    assert layout.part_bytes == (100, 90, 170)
    assert [tensor.offset for tensor in layout.tensors] == [0, 70, 100, 190, 270, 350]
    assert [(tensor.layer, tensor.index) for tensor in layout.tensors] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_nhd_puts_tokens_first() -> None:
    """The nhd order changes shapes and neither sizes nor places."""
    parts = (((2, 6), (2, 4)), ((3, 5), (3, 5)))
    hnd, nhd = (BlockLayout("bfloat16", 8, order, parts) for order in LAYOUTS)
    assert hnd.part_bytes == nhd.part_bytes
    assert [t.shape for t in nhd.tensors] == [(8, 2, 6), (8, 2, 4), (8, 3, 5), (8, 3, 5)]
    assert [(t.offset, t.nbytes) for t in hnd.tensors] == [
        (t.offset, t.nbytes) for t in nhd.tensors
    ]


def test_pages_follow_in_token_order() -> None:
    """A part in pages is page after page, each with all its tensors; sizes stay the same."""
    parts = (((2, 6), (2, 4)), ((3, 5),))
    layout = BlockLayout("uint8", 8, "cpu_attn-lbhnc/4", parts)
    assert layout.part_bytes == BlockLayout("uint8", 8, "hnd", parts).part_bytes
    assert [(t.layer, t.index, t.shape, t.offset) for t in layout.tensors] == [
        (0, 0, (2, 4, 6), 0),
        (0, 1, (2, 4, 4), 48),
        (0, 2, (2, 4, 6), 80),
        (0, 3, (2, 4, 4), 128),
        (1, 0, (3, 4, 5), 160),
        (1, 1, (3, 4, 5), 220),
    ]


def test_a_page_of_a_whole_block_has_the_places_of_hnd() -> None:
    """With one page in a block the tensors lie where the hnd layout has them."""
    parts = (((2, 6), (2, 4)), ((3, 5), (3, 5)))
    assert (
        BlockLayout("bfloat16", 8, "hnd", parts).tensors
        == BlockLayout("bfloat16", 8, "x/8", parts).tensors
    )


def test_item_sizes_are_those_of_torch() -> None:
    """Every dtype name is torch's, with torch's size."""
    import torch

    for name, size in DTYPE_BYTES.items():
        assert size == torch.empty(0, dtype=getattr(torch, name)).element_size()


@settings(max_examples=60, deadline=None)
@given(
    PARTS,
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.integers(1, 64),
    st.sampled_from((*LAYOUTS, "paged/1", "paged/4")),
)
def test_tensors_tile_the_payload(
    parts: list[list[tuple[int, int]]], dtype: str, block_tokens: int, order: str
) -> None:
    """Tensors lie back to back from 0 to the block's end, and parts are their sums."""
    tokens = page_tokens(order)
    if tokens:
        block_tokens *= tokens
    layout = BlockLayout(dtype, block_tokens, order, tuple(tuple(part) for part in parts))
    assert sum(len(p) for p in parts) * (block_tokens // (tokens or block_tokens)) == len(
        layout.tensors
    )
    end = 0
    for tensor in layout.tensors:
        assert end == tensor.offset
        assert math.prod(tensor.shape) * layout.itemsize == tensor.nbytes
        heads, width = parts[tensor.layer][tensor.index % len(parts[tensor.layer])]
        assert sorted((heads, tokens or block_tokens, width)) == sorted(tensor.shape)
        end += tensor.nbytes
    assert layout.block_bytes == end == sum(layout.part_bytes)
    for layer, nbytes in enumerate(layout.part_bytes):
        assert nbytes == sum(t.nbytes for t in layout.tensors if t.layer == layer)
