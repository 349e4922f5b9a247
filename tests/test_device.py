from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    POISON,
    SPEC,
    expected,
    fill_slots,
    filled_slots,
    is_right,
    poisoned_slots,
    prompt_keys,
    read_slots,
    variant,
)

import kvtier
from kvtier import SpecMismatch, TensorSlots
from kvtier.layout import DTYPE_BYTES
from kvtier.tiers.device import read_block, write_block


def copy_out(slots: Any, block: int) -> bytes:
    """Read a block as a put does."""
    into = bytearray(b"\xff" * slots.layout.block_bytes)
    read_block(slots, block, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("layout", ["hnd", "nhd", "paged/4"])
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_bits_pass_through(dtype: str, layout: str) -> None:
    """Every bit pattern of every dtype, NaN payloads included, survives both directions."""
    spec = variant(dtype=dtype, layout=layout)
    keys = prompt_keys(3, spec=spec)
    source = filled_slots(keys, spec)
    target = poisoned_slots(3, spec)
    for block in range(3):
        data = copy_out(source, block)
        assert data == expected(keys, block, spec)
        write_block(target, block, memoryview(data))
    assert all(is_right(target, keys, block, spec) for block in range(3))


def test_a_block_touches_nothing_but_its_own_tokens() -> None:
    """Writing one block leaves its neighbours as they were."""
    keys = prompt_keys(3)
    slots = poisoned_slots(3)
    write_block(slots, 1, memoryview(expected(keys, 1)))
    assert read_slots(slots, 0) == read_slots(slots, 2) == POISON
    assert is_right(slots, keys, 1)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_the_payload_is_laid_out_as_the_format_says(layout: str) -> None:
    """Layer by layer, K then V, each [heads, tokens, width] (or tokens first), row-major."""
    spec = variant(layout=layout, dtype="float32", layers=2, v_head_dim=4)
    slots = poisoned_slots(2, spec)
    for number, tensor in enumerate(slots.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10_000 * number)
    data = copy_out(slots, 1)
    whole = b"".join(
        (tensor[:, 16:32] if layout == "hnd" else tensor[16:32]).contiguous().numpy().tobytes()
        for tensor in slots.tensors
    )
    assert data == whole


def test_tensors_that_ask_for_gradients() -> None:
    """Tensors that belong to a graph are read and written like any others."""
    keys = prompt_keys(1)
    tensors = [t.requires_grad_() for t in filled_slots(keys).tensors]
    slots = TensorSlots(SPEC.block_layout, tensors)
    assert copy_out(slots, 0) == expected(keys, 0)
    write_block(slots, 0, memoryview(expected(keys, 0)))


@pytest.mark.parametrize("block", [-1, 3, 1000])
def test_a_block_beyond_the_tensors(block: int) -> None:
    """A block that the slots do not have is a SpecMismatch that names it."""
    slots = poisoned_slots(3)
    with pytest.raises(SpecMismatch, match=str(block)):
        slots.parts(block)


def test_the_number_of_tensors() -> None:
    """Slots need one tensor per K or V of a layer."""
    tensors = list(poisoned_slots(1).tensors)
    with pytest.raises(SpecMismatch, match="5 given"):
        TensorSlots(SPEC.block_layout, tensors[:-1])


class Odd:
    """Slots whose parts are whatever a test says."""

    layout = SPEC.block_layout
    device = torch.device("cpu")

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = parts

    def parts(self, block: int) -> list[torch.Tensor]:
        """Return the same tensors for every block."""
        return self._parts


@pytest.mark.parametrize("wrong", ["few", "many", "shape", "dtype", "transposed"])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_parts_that_do_not_fit_the_layout(direction: str, wrong: str) -> None:
    """Parts of another number, shape or dtype are a SpecMismatch before any byte of them moves."""
    parts = list(poisoned_slots(1).parts(0))
    match wrong:
        case "few":
            parts.pop()
        case "many":
            parts.append(parts[0])
        case "shape":
            parts[0] = parts[0][:, :-1]
        case "dtype":
            parts[0] = parts[0].view(torch.int32)
        case _:
            parts[0] = parts[0].transpose(0, 1)
    payload = bytearray(SPEC.block_layout.block_bytes)
    move = read_block if direction == "read" else write_block
    with pytest.raises(SpecMismatch, match="wanted"):
        move(Odd(parts), 0, memoryview(payload))
    assert not any(payload)
    assert all((part.contiguous().view(torch.uint8) == 0xFF).all() for part in parts[:1])


def test_a_view_with_any_strides() -> None:
    """Heads and tokens may have any strides."""
    keys = prompt_keys(1)
    parts = [
        torch.full((16, 2, 8), float("nan")).transpose(0, 1) for _ in SPEC.block_layout.tensors
    ]
    write_block(Odd(parts), 0, memoryview(expected(keys, 0)))
    assert copy_out(Odd(parts), 0) == expected(keys, 0)


class AtOnce:
    """Slots that copy whole blocks in a way of their own."""

    def __init__(self) -> None:
        self.layout = SPEC.block_layout
        self.device = torch.device("cpu")
        self.blocks: dict[int, bytes] = {}

    def parts(self, block: int) -> list[torch.Tensor]:
        """Fail: these slots are not copied by parts."""
        raise AssertionError(block)

    def gather(self, block: int, into: memoryview) -> None:
        """Copy a block out."""
        into[:] = self.blocks[block]

    def scatter(self, block: int, source: memoryview) -> None:
        """Copy a block in."""
        self.blocks[block] = bytes(source)


def test_slots_with_a_better_way_are_asked_for_it() -> None:
    """Slots that can copy a whole block do so, in both directions, and nothing asks for parts."""
    slots, data = AtOnce(), expected(prompt_keys(1), 0)
    write_block(slots, 3, memoryview(data))
    assert slots.blocks == {3: data}
    assert copy_out(slots, 3) == data


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.data())
def test_any_shape(
    layers: int, heads: int, k_width: int, v_width: int, data: st.DataObject
) -> None:
    """Whatever the shapes, a payload written is the payload read."""
    spec = kvtier.KVSpec(
        model="m", weights="w", dtype=data.draw(st.sampled_from(["float16", "uint8", "float64"])),
        layers=layers, block_tokens=data.draw(st.integers(1, 9)),
        layout=data.draw(st.sampled_from(["hnd", "nhd", "paged/1"])),
        parts=(((heads, k_width), (heads, v_width)),) * layers,
    )  # fmt: skip
    keys = prompt_keys(2, spec=spec)
    slots = poisoned_slots(2, spec)
    write_block(slots, 1, memoryview(expected(keys, 1, spec)))
    assert copy_out(slots, 1) == read_slots(slots, 1) == expected(keys, 1, spec)
    fill_slots(slots, keys, [0], spec)
    assert copy_out(slots, 0) == expected(keys, 0, spec)
