from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tokens import TOKEN_ID_MAX, token_bytes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, TOKEN_ID_MAX), max_size=50))
def test_bytes_are_little_endian_u32(ids: list[int]) -> None:
    """Ids become four little-endian bytes each, from a list, an int64 and a uint32 array alike."""
    wanted = struct.pack(f"<{len(ids)}I", *ids)
    assert wanted == token_bytes(ids)
    assert wanted == token_bytes(np.array(ids, np.int64))
    assert wanted == token_bytes(np.array(ids, np.uint32)[None])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.one_of(
        st.integers(max_value=-1),
        st.integers(min_value=TOKEN_ID_MAX + 1),
        st.floats(),
        st.booleans(),
        st.none(),
        st.text(max_size=2),
        st.lists(st.integers(), max_size=1),
    ),
    st.data(),
)
def test_the_first_bad_id_is_named(ids: list[Any], bad: object, data: st.DataObject) -> None:
    """Wherever one bad id stands, the error names that index and never another."""
    index = data.draw(st.integers(0, len(ids)))
    ids.insert(index, bad)
    with pytest.raises((TypeError, ValueError), match=rf"token_ids\[{index}\]"):
        token_bytes(ids)


def test_the_first_of_several_bad_ids_is_named() -> None:
    """With several bad ids of different kinds, the first one is named."""
    for ids in ([1, -1, 2.0, True], [1, True, -1, 2.0], [1, 2.0, True, -1], [0, None, None]):
        with pytest.raises((TypeError, ValueError), match=r"token_ids\[1\]"):
            token_bytes(ids)


def test_a_tensor_that_needs_a_gradient_is_refused_by_type() -> None:
    """Only float tensors can need a gradient; they are refused as floats are."""
    import torch

    with pytest.raises(TypeError, match="token_ids"):
        token_bytes(torch.zeros(3, requires_grad=True))


def test_bool_and_bfloat16_tensors_are_refused() -> None:
    """A bool tensor, and a float one that numpy cannot hold, give a TypeError about token_ids."""
    import torch

    for dtype in (torch.bool, torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match="token_ids"):
            token_bytes(torch.ones(3, dtype=dtype))


def test_the_source_is_not_changed() -> None:
    """Big-endian, strided and read-only arrays are read as they are."""
    array = np.arange(10, dtype=">i8")[::-2]
    before = array.copy()
    assert struct.pack("<5I", 9, 7, 5, 3, 1) == token_bytes(array)
    assert (before == array).all()
