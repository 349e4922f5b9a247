from __future__ import annotations

from typing import Any

import pytest
import torch
from support import (
    POISON,
    SPEC,
    expected,
    payload,
    poisoned_slots,
    prompt_keys,
    read_slots,
    record_of,
    variant,
)

from kvtier import SpecMismatch, TensorSlots
from kvtier.layout import DTYPE_BYTES
from kvtier.tiers.device import _copy_tensors as copy_as_on_cuda
from kvtier.tiers.device import copy_block, wait_for_copies
from kvtier.tiers.device_pool import DevicePool, device_slot_bytes

BLOCK_BYTES = SPEC.block_layout.block_bytes
SLOT_BYTES = device_slot_bytes(BLOCK_BYTES)


def row_of(data: bytes) -> torch.Tensor:
    """Return bytes as the tensor that a pool keeps them in."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("copy", [copy_block, copy_as_on_cuda])
@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_bits_pass_from_the_pool_into_slots(copy: Any, layout: str, dtype: str) -> None:
    """Every bit pattern of every dtype arrives, in its block and nowhere else."""
    spec = variant(dtype=dtype, layout=layout)
    keys = prompt_keys(3, spec=spec)
    slots = poisoned_slots(3, spec)
    copy(slots, 1, row_of(expected(keys, 1, spec)))
    assert read_slots(slots, 1) == expected(keys, 1, spec)
    for other in (0, 2):
        assert set(read_slots(slots, other)) == {0xFF}


@pytest.mark.parametrize("copy", [copy_block, copy_as_on_cuda])
def test_slots_that_do_not_fit_are_refused(copy: Any) -> None:
    """Tensors of another shape are named, not written."""
    slots = poisoned_slots(2)
    with pytest.raises(SpecMismatch, match="beyond"):
        copy(slots, 2, row_of(POISON))
    lying = TensorSlots(SPEC.block_layout, [t[:, :, :4] for t in slots.tensors])
    with pytest.raises(SpecMismatch):
        copy(lying, 0, row_of(POISON))


def pool_of(slots: int) -> DevicePool:
    """Return a pool of so many blocks of SPEC."""
    return DevicePool(BLOCK_BYTES, slots * SLOT_BYTES, "cpu")


def test_a_slot_answers_to_its_block_only() -> None:
    """Neither another block, nor an earlier holder, nor a closed pool gives bytes out."""
    pool, slots = pool_of(2), poisoned_slots(1)
    one, other = record_of(1), record_of(2)
    (where,) = pool.write([one], [payload(one)])
    assert not pool.copy_out(where.slot, other.id, slots, 0)
    assert not pool.copy_out(where.slot + 1, one.id, slots, 0)
    pool.drop([one.id], [where])
    assert pool.write([other], [payload(other)]) == [where]
    assert not pool.copy_out(where.slot, one.id, slots, 0)
    assert read_slots(slots, 0) == POISON
    assert pool.copy_out(where.slot, other.id, slots, 0)
    assert read_slots(slots, 0) == bytes(payload(other))
    pool.close()
    assert not pool.copy_out(where.slot, other.id, slots, 0)
    with pytest.raises(ValueError, match="closed"):
        pool.fill(where.slot, other.id, payload(other))


@pytest.mark.parametrize(
    ("nbytes", "slots"), [(0, 0), (SLOT_BYTES - 1, 0), (SLOT_BYTES, 1), (5 * SLOT_BYTES - 1, 4)]
)
def test_the_limit_holds(nbytes: int, slots: int) -> None:
    """A pool has as many slots as fit into its bytes, and none more."""
    pool = DevicePool(BLOCK_BYTES, nbytes, "cpu")
    assert pool.slots == slots
    assert list(iter(pool.reserve, None)) == list(range(slots))
    assert pool.usage().used_bytes <= pool.usage().limit_bytes == nbytes


def test_a_pool_of_nothing_needs_no_device() -> None:
    """Without bytes the device's name is anybody's: it also stands for what recomputes."""
    assert DevicePool(BLOCK_BYTES, 0, "an accelerator of another kind").slots == 0


@pytest.mark.parametrize("device", ["an accelerator of another kind", "", "cpu:x"])
def test_a_device_that_torch_does_not_know(device: str) -> None:
    """The error names the setting and what it should be."""
    with pytest.raises(ValueError, match=r"^device: .*device_bytes"):
        DevicePool(BLOCK_BYTES, SLOT_BYTES, device)


def test_more_than_the_device_has() -> None:
    """The error names the setting and the device."""
    with pytest.raises(ValueError, match=r"^device_bytes: .* on cpu"):
        DevicePool(BLOCK_BYTES, 1 << 60, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    """Without CUDA a pool on it is an error that names the setting."""
    with pytest.raises(ValueError, match=r"^device_bytes: .* on cuda:0"):
        DevicePool(BLOCK_BYTES, SLOT_BYTES, "cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_pool_on_a_gpu() -> None:
    """The same bytes come back from a GPU's memory, into CPU memory and into a GPU's slots."""
    pool = DevicePool(BLOCK_BYTES, 4 * SLOT_BYTES, "cuda:0")
    slots = TensorSlots.empty(SPEC, 2, "cuda:0")
    for number in range(3):
        record = record_of(number)
        (where,) = pool.write([record], [memoryview(bytearray(payload(record)))])
        into = bytearray(BLOCK_BYTES)
        pool.read([record.id], [where], [memoryview(into)])
        assert bytes(into) == bytes(payload(record))
        assert pool.copy_out(where.slot, record.id, slots, 1)
        wait_for_copies(slots.device)
        back = b"".join(
            t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in slots.parts(1)
        )
        assert back == bytes(payload(record))
