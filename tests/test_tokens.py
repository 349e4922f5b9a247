from __future__ import annotations

import struct
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tokens import PIECE_TOKENS, PIECES_TOKENS_MAX, TOKEN_ID_MAX, token_bytes

DTYPES = ("i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8")
LENGTHS = (0, 1, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS + 7)
LONG = PIECES_TOKENS_MAX + 1


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_array_of_every_length_is_read(dtype: str) -> None:
    """Up to the largest id that its type can hold, whole and strided, as the list is."""
    most = min(TOKEN_ID_MAX, int(np.iinfo(dtype).max))
    for length in (*LENGTHS, LONG):
        ids = [most - number % (most + 1) for number in range(length)]
        array = np.array(ids, dtype)
        assert struct.pack(f"<{length}I", *ids) == token_bytes(array) == token_bytes(ids)
        assert token_bytes(ids[::3]) == token_bytes(array[::3])


@pytest.mark.parametrize("length", [3 * PIECE_TOKENS, LONG])
@pytest.mark.parametrize("index", [0, PIECE_TOKENS - 1, PIECE_TOKENS, 2 * PIECE_TOKENS + 3])
def test_a_bad_id_is_named_wherever_it_stands(index: int, length: int) -> None:
    """In a long prompt too: the index is the prompt's, of a list and of an array."""
    good: list[Any] = [number % 3 for number in range(length)]
    for bad in (-1, TOKEN_ID_MAX + 1):
        ids = [*good[:index], bad, *good[index:]]
        for form in (ids, np.array(ids)):
            with pytest.raises(ValueError, match=rf"token_ids\[{index}\]: {bad} "):
                token_bytes(form)
    with pytest.raises(TypeError, match=rf"token_ids\[{index}\]: bool"):
        token_bytes([*good[:index], True, *good[index:]])


@pytest.mark.parametrize(
    "form", [list, np.array, lambda ids: np.array(ids, "i4")], ids=["list", "i8", "i4"]
)
def test_no_other_thread_gets_in_between(form: Any) -> None:
    """A prompt of 8,192 tokens is read without letting go of the interpreter.

    Where copies hold every core, an engine would wait milliseconds to have it back.
    """
    ids = form(list(range(8192)))
    turns, ended = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is made to let go: only who does so by itself
    other = threading.Thread(target=take_turns)
    try:
        other.start()
        for _ in range(300):
            time.sleep(0)  # the other one gets here, and waits for its next turn
            seen = turns
            token_bytes(ids)
            assert turns == seen
    finally:
        ended.set()
        sys.setswitchinterval(before)
        other.join()
