from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import torch
from support import (
    HOST_SLOT_BYTES,
    POISON,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    assert_sound,
    bring_back,
    disk_bytes,
    eventually,
    expected,
    filled_slots,
    flip,
    in_thread,
    is_right,
    poisoned_slots,
    prompt,
    prompt_keys,
    put,
    random_bytes,
    read_slots,
    run_python,
    segment_files,
    tiny_budget,
    variant,
)

import kvtier
from kvtier import PutResult, SpecMismatch, StoreClosed, Tier, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Open = Any

TIERS = {
    "host": {"host_bytes": "1MiB", "ssd_bytes": 0},
    "ssd": {"host_bytes": 0, "ssd_bytes": "8MiB"},
    "both": {"host_bytes": "1MiB", "ssd_bytes": "8MiB"},
}


@pytest.fixture(params=sorted(TIERS))
def store(request: pytest.FixtureRequest, open_store: Open) -> kvtier.Store:
    """Open a store with one tier or both."""
    return open_store(**TIERS[request.param])


# -- round trips


def test_what_was_put_is_restored_bit_for_bit(store: kvtier.Store) -> None:
    """Every full block of a prompt comes back as it was, into slots that held NaN."""
    keys = prompt_keys(7)
    assert put(store, keys) == PutResult(stored=7, present=0, dropped=0)
    store.flush()
    assert store.lookup(keys).stored == 7
    assert bring_back(store, keys).loaded == 7


def test_a_miss_is_recomputed(store: kvtier.Store) -> None:
    """A prompt that was never stored is handed out whole."""
    keys = prompt_keys(3, seed=99)
    assert store.lookup(keys).stored == 0
    assert bring_back(store, keys, way="best").recomputed == [0, 1, 2]


def test_present_blocks_are_counted_not_copied(store: kvtier.Store) -> None:
    """A second put of the same blocks stores nothing and reads nothing from the engine."""
    keys = prompt_keys(4)
    put(store, keys)
    store.flush()
    garbage = poisoned_slots(4)
    assert store.put(keys, garbage).result(WAIT_S) == PutResult(0, 4, 0)
    assert bring_back(store, keys).loaded == 4


def test_only_the_new_tail_is_stored(store: kvtier.Store) -> None:
    """A longer prompt shares its head with the shorter one."""
    tokens = prompt(6)
    head = store.keys(tokens[: 3 * SPEC.block_tokens])
    put(store, head)
    whole = head.extend(tokens[3 * SPEC.block_tokens :])
    assert put(store, whole) == PutResult(stored=3, present=3, dropped=0)
    assert bring_back(store, whole).loaded == 6


def test_the_unfinished_block_is_never_stored(store: kvtier.Store) -> None:
    """Tokens after the last full block are nobody's block."""
    keys = store.keys(prompt(2, extra=SPEC.block_tokens - 1))
    assert len(keys) == 2
    assert put(store, keys).stored == 2
    assert put(store, store.keys(prompt(1)[:5])) == PutResult(0, 0, 0)


def test_holes_are_allowed(store: kvtier.Store) -> None:
    """A put of a range leaves the rest missing, and a restore recomputes exactly that."""
    keys = prompt_keys(8)
    assert put(store, keys, range(2, 5)) == PutResult(3, 0, 0)
    store.flush()
    found = store.lookup(keys).tiers
    assert [tier is not None for tier in found] == [False] * 2 + [True] * 3 + [False] * 3
    back = bring_back(store, keys)
    assert back.recomputed == [0, 1, 5, 6, 7]
    assert back.loaded == 3


@pytest.mark.parametrize("blocks", [range(0), range(3, 3), range(6, 0, -2), range(1, 7, 3)])
def test_any_range_of_blocks(open_store: Open, blocks: range) -> None:
    """Empty, stepped and backward ranges store what they name."""
    store = open_store()
    keys = prompt_keys(7)
    assert put(store, keys, blocks).stored == len(blocks)
    assert {b for b, tier in enumerate(store.lookup(keys).tiers) if tier} == set(blocks)


@pytest.mark.parametrize("blocks", [range(8), range(-1, 2), range(7, 8), range(100, 101)])
def test_blocks_outside_the_prompt_are_refused(open_store: Open, blocks: range) -> None:
    """A range beyond the prompt's full blocks is a ValueError that names it; nothing is stored."""
    store = open_store()
    keys = prompt_keys(7)
    with pytest.raises(ValueError, match="blocks"):
        store.put(keys, filled_slots(keys), blocks=blocks)
    assert store.lookup(keys).stored == 0


@pytest.mark.parametrize(
    "spec",
    [
        variant(dtype="bfloat16"),
        variant(dtype="int8"),
        variant(dtype="float8_e4m3fn"),
        variant(dtype="float64", layout="nhd"),
        variant(v_head_dim=24),
        variant(layers=70),
        kvtier.KVSpec(
            model="test/uneven", weights="w", dtype="float16", layers=3, block_tokens=8,
            parts=(((1, 5),), ((2, 8), (2, 4)), ((3, 1), (1, 1), (1, 2))),
        ),
    ],
    ids=lambda spec: f"{spec.model}-{spec.dtype}-{spec.layout}-{spec.layers}",
)  # fmt: skip
def test_every_layout_comes_back(open_store: Open, spec: kvtier.KVSpec) -> None:
    """dtypes, orders, uneven layers and headers of several pages survive memory and disk."""
    for host_bytes in ("1MiB", 0):
        store = open_store(spec=spec, host_bytes=host_bytes)
        keys = prompt_keys(3, spec=spec)
        put(store, keys)
        store.flush()
        assert bring_back(store, keys).loaded == 3
        store.close()


def test_strided_slots(open_store: Open) -> None:
    """Slots may be views into larger tensors: their strides are the engine's business."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(3)
    source = filled_slots(keys)
    wide = [torch.full((2, 64, 16), float("nan")) for _ in source.tensors]
    views = [tensor[:, 5 : 5 + 48, 4:12] for tensor in wide]
    for view, tensor in zip(views, source.tensors, strict=True):
        view.copy_(tensor)
    strided = kvtier.TensorSlots(SPEC.block_layout, views)
    store.put(keys, strided).result(WAIT_S)
    store.flush()
    assert bring_back(store, keys).loaded == 3
    for view in views:
        view.fill_(float("nan"))
    with store.restore(store.plan(store.lookup(keys), way="load"), into=strided) as session:
        assert session.next_step(WAIT_S) is None
    assert all(is_right(strided, keys, block) for block in range(3))
    assert all(torch.isnan(tensor[:, :5]).all() for tensor in wide)
    assert all(torch.isnan(tensor[..., :4]).all() for tensor in wide)


def test_the_source_may_change_once_released(open_store: Open) -> None:
    """What is stored is what the slots held at the put, whatever they hold after ``released``."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(6)
    source = filled_slots(keys)
    transfer = store.put(keys, source)
    assert transfer.released.wait(WAIT_S)
    for tensor in source.tensors:
        tensor.fill_(float("nan"))
    assert transfer.result(WAIT_S).stored == 6
    assert bring_back(store, keys).loaded == 6


def test_put_waits_for_the_engines_event(open_store: Open) -> None:
    """Nothing is read from the source before ``after`` has happened."""
    store = open_store()
    keys = prompt_keys(2)
    source = poisoned_slots(2)

    class Event:
        def synchronize(self) -> None:
            for mine, right in zip(source.tensors, filled_slots(keys).tensors, strict=True):
                mine.copy_(right)

    assert store.put(keys, source, after=Event()).result(WAIT_S).stored == 2
    assert bring_back(store, keys).loaded == 2


async def test_a_put_is_awaited(open_store: Open) -> None:
    """A put's transfer works in a coroutine."""
    store = open_store()
    keys = prompt_keys(2)
    assert await store.put(keys, filled_slots(keys)) == PutResult(2, 0, 0)


# -- durability


def test_another_process_finds_every_block(open_store: Open) -> None:
    """What one process stored and closed, another one restores."""
    store = open_store()
    keys = prompt_keys(9)
    put(store, keys)
    store.close()
    code = """
import sys, kvtier
from support import SPEC, bring_back, prompt_keys
with kvtier.open(sys.argv[1], SPEC, host_bytes=0, ssd_bytes="8MiB") as store:
    print(bring_back(store, prompt_keys(9)).loaded, store.check())
"""
    assert run_python(code, store.path).stdout == "9 []\n"


def test_flushed_is_durable(store_path: str, open_store: Open) -> None:
    """A process killed right after ``flush`` returned has lost nothing."""
    code = """
import os, sys, kvtier
from support import SPEC, filled_slots, prompt_keys
store = kvtier.open(sys.argv[1], SPEC, ssd_bytes="8MiB")
for seed in range(4):
    store.put(prompt_keys(10, seed), filled_slots(prompt_keys(10, seed)))
store.flush()
os.kill(os.getpid(), 9)
"""
    assert run_python(code, store_path, check=False).returncode == -9
    store = open_store(host_bytes=0)
    for seed in range(4):
        assert bring_back(store, prompt_keys(10, seed)).loaded == 10


def test_close_makes_everything_durable(open_store: Open) -> None:
    """Closing right after a put loses nothing of it."""
    store = open_store()
    keys = prompt_keys(20)
    transfer = store.put(keys, filled_slots(keys))
    store.close()
    assert transfer.result(0) == PutResult(20, 0, 0)
    assert bring_back(open_store(host_bytes=0), keys).loaded == 20


def test_a_restart_keeps_the_books(open_store: Open) -> None:
    """Blocks and bytes in use are the same after closing and opening."""
    store = open_store(**tiny_budget(30))
    for seed in range(6):
        put(store, prompt_keys(7, seed))
        store.flush()
    before = {**store.stats()["tiers"]["ssd"], "medium_written_bytes": 0}
    store.close()
    store = open_store(**tiny_budget(30))
    assert store.stats()["tiers"]["ssd"] == before
    assert store.stats()["tiers"]["host"]["ready"] == 0


def test_eviction_order_survives_a_restart(open_store: Open) -> None:
    """After a restart the blocks stored first are still the first to go."""
    store = open_store(host_bytes=0, **tiny_budget(24))
    for seed in range(3):
        put(store, prompt_keys(6, seed))
        store.flush()
    store.close()
    store = open_store(host_bytes=0, **tiny_budget(24))
    before = [store.lookup(prompt_keys(6, seed)).stored for seed in range(3)]
    put(store, prompt_keys(12, 9))
    store.flush()
    after = [store.lookup(prompt_keys(6, seed)).stored for seed in range(3)]
    assert before == [6, 6, 6]
    assert after[0] < 6
    assert after[0] <= after[1] <= after[2]


# -- budgets


def test_the_disk_budget_holds_under_pressure(open_store: Open) -> None:
    """Under steady eviction ``du`` never exceeds ``ssd_bytes``, and what is there is right."""
    budget = tiny_budget(30)
    store = open_store(host_bytes=0, **budget)
    for seed in range(25):
        put(store, prompt_keys(5, seed))
        assert disk_bytes(store.path) <= budget["ssd_bytes"]
    store.flush()
    counters = store.stats()["counters"]
    assert counters["evicted_blocks_ssd"] > 50
    assert counters["put_blocks_dropped"] == 0
    last = [store.lookup(prompt_keys(5, seed)).stored for seed in range(25)]
    assert last[-3:] == [5, 5, 5]
    assert sum(last) >= 20
    for seed in range(25):
        assert bring_back(store, prompt_keys(5, seed)).loaded == last[seed]
    assert_sound(store)


def test_host_eviction_keeps_serving(open_store: Open) -> None:
    """With host memory for three blocks everything comes back, the rest from the SSD."""
    store = open_store(host_bytes=3 * HOST_SLOT_BYTES)
    for seed in range(4):
        put(store, prompt_keys(6, seed))
    store.flush()
    assert store.stats()["tiers"]["host"]["ready"] <= 3
    for seed in range(4):
        assert bring_back(store, prompt_keys(6, seed)).loaded == 6
    assert store.stats()["tiers"]["host"]["ready"] <= 3
    assert store.stats()["counters"]["evicted_blocks_host"] > 0


def test_no_host_memory_keeps_no_host_copies(open_store: Open) -> None:
    """With ``host_bytes=0`` nothing stays in host memory once its copy is done."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(20)
    put(store, keys)
    store.flush()
    bring_back(store, keys)
    assert set(store.lookup(keys).tiers) == {Tier.SSD}
    assert store.stats()["tiers"]["host"]["blocks"] == 0


@pytest.mark.parametrize("ssd_bytes", [0, 1, 100_000, 1 << 20])
def test_an_ssd_budget_below_one_block(open_store: Open, ssd_bytes: int) -> None:
    """A budget too small for anything drops and counts puts; the store works as memory."""
    store = kvtier.open(open_store().path + "2", SPEC, host_bytes=0, ssd_bytes=ssd_bytes)
    keys = prompt_keys(5)
    assert put(store, keys) == PutResult(0, 0, 5)
    store.flush()
    assert store.stats()["counters"]["put_blocks_dropped"] == 5
    assert segment_files(store.path) == []
    assert bring_back(store, keys).recomputed == [0, 1, 2, 3, 4]
    assert store.check() == []
    store.close()


def test_a_put_larger_than_staging(open_store: Open) -> None:
    """A put of many more blocks than there are host slots is stored whole."""
    store = open_store(host_bytes=0, staging_blocks_max=3, loads_inflight_max=2)
    keys = prompt_keys(100)
    assert put(store, keys) == PutResult(100, 0, 0)
    assert bring_back(store, keys).loaded == 100


def test_a_full_write_queue_drops(open_store: Open) -> None:
    """More blocks than may wait are dropped and counted, the first ones are kept."""
    store = open_store(write_queue_blocks_max=4)
    keys = prompt_keys(10)
    assert put(store, keys) == PutResult(stored=4, present=0, dropped=6)
    assert [tier is not None for tier in store.lookup(keys).tiers] == [True] * 4 + [False] * 6
    assert put(store, keys).stored == 4


@pytest.mark.parametrize("blocks", [40, 20, 8, 1, 0])
def test_a_smaller_budget_shrinks_the_store(open_store: Open, blocks: int) -> None:
    """Reopened with less, the store gives up what does not fit and serves the rest right."""
    store = open_store(host_bytes=0, **tiny_budget(40))
    for seed in range(5):
        put(store, prompt_keys(6, seed))
        store.flush()
    store.close()
    budget = {**tiny_budget(40), "ssd_bytes": tiny_budget(blocks)["ssd_bytes"] - (1 << 20)}
    store = open_store(host_bytes=0, **budget)
    assert disk_bytes(store.path) <= budget["ssd_bytes"]
    stored = [store.lookup(prompt_keys(6, seed)).stored for seed in range(5)]
    for seed in range(5):
        assert bring_back(store, prompt_keys(6, seed)).loaded == stored[seed]
    for seed in range(10, 16):
        put(store, prompt_keys(6, seed))
        store.flush()
        assert store.check() == []
        assert disk_bytes(store.path) <= budget["ssd_bytes"]


def test_a_budget_of_exactly_what_is_used(open_store: Open) -> None:
    """Reopened with exactly the bytes in use, the store goes on within them."""
    store = open_store(host_bytes=0, **tiny_budget(40))
    for seed in range(5):
        put(store, prompt_keys(6, seed))
        store.flush()
    used = store.stats()["tiers"]["ssd"]["used_bytes"]
    store.close()
    store = open_store(host_bytes=0, **{**tiny_budget(40), "ssd_bytes": used})
    for seed in range(10, 40):
        put(store, prompt_keys(6, seed))
        store.flush()
        assert store.check() == []
        assert disk_bytes(store.path) <= used


def test_a_full_directory_gives_way_to_another_block_size(open_store: Open) -> None:
    """A directory full of one spec's blocks makes room for another spec, whatever its size."""
    own = {"host_bytes": 0, **tiny_budget(20)}
    store = open_store(**own)
    for seed in range(8):
        put(store, prompt_keys(5, seed))
    store.close()
    store = open_store(spec=variant(dtype="bfloat16"), **own)
    keys = prompt_keys(5, spec=store.spec)
    for _ in range(3):  # at the latest once room was made for the first
        put(store, keys)
        store.flush()
    assert bring_back(store, keys).loaded == 5


# -- identity

FIELDS: dict[str, Any] = {
    "model": "test/other",
    "weights": "sha256:1",
    "quantization": "int4",
    "kv_scales": "per-head",
    "layout": "nhd",
    "rope": (("theta", 10000.0),),
    "tp": {"tp_size": 2},
    "tp_rank": {"tp_size": 2, "tp_rank": 1},
    "pp": {"pp_size": 2},
    "heads": {"kv_heads": 1, "head_dim": 16},
    "layers": {"layers": 6, "head_dim": 4},
    "block_tokens": {"block_tokens": 8, "head_dim": 16},
    "dtype": {"dtype": "bfloat16", "head_dim": 16},
}


@pytest.mark.parametrize("field", FIELDS)
def test_another_spec_is_a_miss(open_store: Open, field: str) -> None:
    """A spec that differs in one field never sees the other's blocks, however alike in size."""
    change = FIELDS[field]
    other = variant(**(change if isinstance(change, dict) else {field: change}))
    tokens = prompt(4)
    store = open_store(host_bytes=0)
    put(store, store.keys(tokens))
    store.close()
    store = open_store(spec=other, host_bytes=0)
    keys = store.keys(tokens)
    assert store.lookup(keys).stored == 0
    assert bring_back(store, keys).loaded == 0
    assert put(store, keys).stored == len(keys)
    store.flush()
    assert bring_back(store, keys).loaded == len(keys)
    store.close()
    store = open_store(host_bytes=0)
    assert bring_back(store, store.keys(tokens)).loaded == 4


@pytest.mark.parametrize("own", [{"tenant": "a"}, {"adapter": "b"}, {"extra": ["image"]}])
def test_tenants_adapters_and_images_are_apart(open_store: Open, own: dict[str, Any]) -> None:
    """The same tokens under another tenant, adapter or image are another prompt."""
    store = open_store()
    tokens = prompt(3)
    put(store, store.keys(tokens))
    keys = store.keys(tokens, **own)
    assert store.lookup(keys).stored == 0
    put(store, keys)
    assert bring_back(store, keys).loaded == 3
    assert bring_back(store, store.keys(tokens)).loaded == 3


def test_keys_of_another_spec(open_store: Open) -> None:
    """Looking them up is a miss; putting or restoring them is a SpecMismatch."""
    store = open_store()
    other = variant(weights="sha256:1")
    keys = prompt_keys(3, spec=other)
    put(store, prompt_keys(3))
    assert store.lookup(keys).stored == 0
    with pytest.raises(SpecMismatch):
        store.put(keys, filled_slots(prompt_keys(3)))
    with pytest.raises(SpecMismatch):
        store.restore(store.plan(store.lookup(keys)), into=poisoned_slots(3))
    assert store.prefetch(keys).result(WAIT_S) == 0


@pytest.mark.parametrize(
    "other",
    [
        variant(dtype="bfloat16"),
        variant(layout="nhd"),
        variant(layers=2),
        variant(kv_heads=1, head_dim=16),
    ],
    ids=["dtype", "order", "layers", "shape"],
)
def test_slots_of_another_layout(open_store: Open, other: kvtier.KVSpec) -> None:
    """Slots that hold blocks of another layout are refused before anything is read or written."""
    store = open_store()
    keys = prompt_keys(3)
    with pytest.raises(SpecMismatch):
        store.put(keys, poisoned_slots(3, other))
    put(store, keys)
    plan = store.plan(store.lookup(keys))
    slots = poisoned_slots(3, other)
    with pytest.raises(SpecMismatch):
        store.restore(plan, into=slots)
    assert set(read_slots(slots, 0)) == {0xFF}


def test_slots_that_lie_about_their_tensors(open_store: Open) -> None:
    """A put whose tensors are not what its layout says fails alone; the store goes on."""
    store = open_store()
    keys = prompt_keys(3)
    tensors = [t[..., :4] for t in filled_slots(keys).tensors]
    transfer = store.put(keys, kvtier.TensorSlots(SPEC.block_layout, tensors))
    with pytest.raises(TransferFailed, match="wanted"):
        transfer.result(WAIT_S)
    assert transfer.released.is_set()
    assert store.lookup(keys).stored == 0
    assert put(store, keys).stored == 3
    assert bring_back(store, keys).loaded == 3


def test_slots_shorter_than_the_prompt(open_store: Open) -> None:
    """A put of more blocks than the slots hold fails; what was copied before it is right."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(5)
    short = kvtier.TensorSlots(
        SPEC.block_layout, [t[:, : 3 * SPEC.block_tokens] for t in filled_slots(keys).tensors]
    )
    with pytest.raises(TransferFailed, match="block 3"):
        store.put(keys, short).result(WAIT_S)
    store.flush()
    bring_back(store, keys)
    assert put(store, keys).dropped == 0
    assert bring_back(store, keys).loaded == 5


def test_slots_that_raise(open_store: Open) -> None:
    """Whatever the engine's own code raises during a put is that put's failure."""
    store = open_store()
    keys = prompt_keys(3)

    class Broken:
        layout = SPEC.block_layout
        device = torch.device("cpu")

        def parts(self, block: int) -> Any:
            raise RuntimeError("engine bug")

    with pytest.raises(TransferFailed, match="engine bug"):
        store.put(keys, Broken()).result(WAIT_S)
    assert put(store, keys).stored == 3


# -- scopes, books, the end


def test_pins_protect_under_pressure(open_store: Open) -> None:
    """What is pinned survives any number of puts; what is not goes."""
    store = open_store(host_bytes=0, **tiny_budget(18))
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    with store.pin(keys) as residency:
        assert residency.stored == 6
        assert store.stats()["pins"] == 6
        for seed in range(1, 9):
            put(store, prompt_keys(6, seed))
            store.flush()
        assert store.lookup(keys).stored == 6
        assert bring_back(store, keys).loaded == 6
    for seed in range(9, 15):
        put(store, prompt_keys(6, seed))
        store.flush()
    assert store.lookup(keys).stored == 0


def test_a_lookup_extends_nobodys_life(open_store: Open) -> None:
    """Looking a prompt up again and again does not keep it."""
    store = open_store(host_bytes=0, **tiny_budget(18))
    put(store, prompt_keys(6))
    for seed in range(1, 7):
        store.lookup(prompt_keys(6))
        put(store, prompt_keys(6, seed))
        store.flush()
    assert store.lookup(prompt_keys(6)).stored == 0


def test_a_restore_extends_life(open_store: Open) -> None:
    """A prompt that is used stays, while those that are not go."""
    store = open_store(host_bytes=0, **tiny_budget(24))
    put(store, prompt_keys(6))
    for seed in range(1, 9):
        store.flush()
        assert bring_back(store, prompt_keys(6)).loaded == 6
        put(store, prompt_keys(6, seed))


def test_counters_add_up(open_store: Open) -> None:
    """Every block that was put, loaded or recomputed is counted once."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(8)
    results = [put(store, keys, range(2, 6)), put(store, keys, range(8)), put(store, keys)]
    store.flush()
    bring_back(store, keys)
    bring_back(store, prompt_keys(3, seed=5))
    counters = store.stats()["counters"]
    assert counters["put_blocks_stored"] == sum(r.stored for r in results) == 8
    assert counters["put_blocks_present"] == sum(r.present for r in results) == 12
    assert counters["put_blocks_dropped"] == 0
    assert counters["ssd_written_blocks"] == 8
    assert counters["ssd_written_bytes"] >= 8 * SPEC.block_layout.block_bytes
    assert counters["loaded_blocks_ssd"] == counters["ssd_read_blocks"] == 8
    assert counters["loaded_bytes_ssd"] == 8 * SPEC.block_layout.block_bytes
    assert counters["loaded_blocks_host"] == 0
    assert counters["recomputed_blocks"] == 3
    assert counters["restores"] == 2
    assert counters["load_failures"] == counters["damaged_blocks"] == 0
    tiers = store.stats()["tiers"]
    assert tiers["ssd"]["ready"] == tiers["ssd"]["blocks"] == 8
    assert tiers["ssd"]["used_bytes"] <= tiers["ssd"]["limit_bytes"]


def test_stats_are_plain_values(open_store: Open) -> None:
    """Statistics can be written out as they are."""
    assert msgpack.packb(open_store().stats())


CALLS: dict[str, Callable[[kvtier.Store], Any]] = {
    "lookup": lambda store: store.lookup(prompt_keys(2)),
    "put": lambda store: store.put(prompt_keys(2), poisoned_slots(2)),
    "prefetch": lambda store: store.prefetch(prompt_keys(2)),
    "pin": lambda store: store.pin(prompt_keys(2)).__enter__(),
    "flush": lambda store: store.flush(),
    "stats": lambda store: store.stats(),
    "check": lambda store: store.check(),
    "calibrate": lambda store: store.calibrate(lambda step: None),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_store_says_so(open_store: Open, call: str) -> None:
    """Every call after close raises StoreClosed with the path."""
    store = open_store()
    store.close()
    with pytest.raises(StoreClosed, match=store.path):
        CALLS[call](store)


def test_restore_on_a_closed_store(open_store: Open) -> None:
    """A plan cannot be carried out, nor a session entered, once the store is closed."""
    store = open_store()
    put(store, prompt_keys(2))
    plan = store.plan(store.lookup(prompt_keys(2)))
    session = store.restore(plan, into=poisoned_slots(2))
    store.close()
    with pytest.raises(StoreClosed):
        store.restore(plan, into=poisoned_slots(2))
    with pytest.raises(StoreClosed):
        session.__enter__()


def test_close_twice_and_at_once(open_store: Open) -> None:
    """Closing is idempotent, also from several threads."""
    store = open_store()
    put(store, prompt_keys(5))
    for one in [in_thread(store.close) for _ in range(4)]:
        one()
    store.close()
    kvtier.open(store.path, SPEC).close()


def test_a_store_is_a_scope(store_path: str) -> None:
    """Leaving the scope closes the store, also by an exception."""

    def inside() -> None:
        with kvtier.open(store_path, SPEC) as store:
            put(store, prompt_keys(2))
            raise KeyError("inside")

    with pytest.raises(KeyError):
        inside()
    kvtier.open(store_path, SPEC).close()


def test_a_forked_child_has_no_store(store_path: str) -> None:
    """In a forked child every call raises StoreClosed, close does nothing, the parent goes on."""
    code = """
import os, sys, warnings
import kvtier
from support import SPEC, assert_sound, bring_back, filled_slots, prompt_keys, put
from test_store import CALLS
warnings.simplefilter("ignore", DeprecationWarning)
store = kvtier.open(sys.argv[1], SPEC, ssd_bytes="8MiB")
put(store, prompt_keys(4))
plan = store.plan(store.lookup(prompt_keys(4)))
child = os.fork()
if child == 0:
    wrong = 0
    for name, call in [*CALLS.items(), ("restore", lambda s: s.restore(plan, into=None))]:
        try:
            call(store)
            wrong += 1
        except kvtier.StoreClosed:
            pass
    store.close()
    os._exit(wrong)
assert os.waitpid(child, 0)[1] == 0
put(store, prompt_keys(4, 1))
assert bring_back(store, prompt_keys(4)).loaded == 4
store.flush()
assert_sound(store)
store.close()
store = kvtier.open(sys.argv[1], SPEC, host_bytes=0, ssd_bytes="8MiB")
assert bring_back(store, prompt_keys(4, 1)).loaded == 4
store.close()
print("good")
"""
    assert run_python(code, store_path).stdout == "good\n"


def test_a_forked_child_does_not_hold_the_lock(store_path: str) -> None:
    """A child that outlives the parent's store does not keep others from opening it."""
    code = """
import os, sys, warnings
import kvtier
from support import SPEC
warnings.simplefilter("ignore", DeprecationWarning)
store = kvtier.open(sys.argv[1], SPEC)
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.read(read, 1)
    os._exit(0)
store.close()
try:
    kvtier.open(sys.argv[1], SPEC).close()
    print("good")
finally:
    os.write(write, b"x")
    os.waitpid(child, 0)
"""
    assert run_python(code, store_path).stdout == "good\n"


def test_a_killed_parent_leaves_no_lock_to_its_child(store_path: str, open_store: Open) -> None:
    """A forked child that lives on when the engine is killed does not keep the store locked."""
    code = """
import os, signal, sys, time, warnings
import kvtier
from support import SPEC
warnings.simplefilter("ignore", DeprecationWarning)
store = kvtier.open(sys.argv[1], SPEC)
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    child = int(run_python(code, store_path, check=False).stdout)
    try:
        assert put(open_store(), prompt_keys(2)).stored == 2
    finally:
        os.kill(child, signal.SIGKILL)


# -- learned costs


def known(cost: kvtier.CostModel) -> tuple[int, int]:
    """Return how many samples a cost model rests on."""
    return cost.compute.samples, cost.ssd.samples


def test_costs_survive_a_restart(open_store: Open) -> None:
    """What was learned is there after closing and opening, for the same spec and device."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(4))
    store.flush()
    bring_back(store, prompt_keys(4))
    bring_back(store, prompt_keys(3, seed=1))
    learned = store.costs
    assert known(learned) == (3, 4)
    store.close()
    assert open_store(host_bytes=0).costs == learned


def test_costs_are_kept_per_device(open_store: Open) -> None:
    """Another device starts with nothing known about its own compute, and takes nothing away."""
    store = open_store()
    bring_back(store, prompt_keys(3))
    learned = store.costs
    store.close()
    store = open_store(device="cuda:0 of another kind")
    assert store.costs.compute.samples == 0
    store.close()
    assert open_store().costs == learned


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        random_bytes(1, 300),
        msgpack.packb([1, 2]),
        msgpack.packb({"a": 1}),
        msgpack.packb("x"),
        bytes(2 << 20),
    ],
    ids=["empty", "bad", "random", "list", "dict", "string", "large"],
)
def test_any_cost_file_is_tolerated(open_store: Open, content: bytes) -> None:
    """Losing or garbling the cost file loses a calibration, nothing else."""
    store = open_store()
    bring_back(store, prompt_keys(3))
    store.close()
    with open(os.path.join(store.path, "costs.msgpack"), "wb") as file:
        file.write(content)
    store = open_store()
    assert store.costs == kvtier.CostModel()
    bring_back(store, prompt_keys(3))
    learned = store.costs
    store.close()
    assert open_store().costs == learned


def test_every_flipped_byte_of_the_costs_is_tolerated(open_store: Open) -> None:
    """Whatever byte of the cost file changes, the store opens with numbers that plans can use."""
    store = open_store()
    bring_back(store, prompt_keys(3))
    store.close()
    path = os.path.join(store.path, "costs.msgpack")
    keep = store.path + ".costs"
    shutil.copy(path, keep)
    for offset in range(0, os.path.getsize(path), 3):
        shutil.copy(keep, path)
        flip(path, offset)
        store = open_store(host_bytes=0)
        plan = store.plan(store.lookup(prompt_keys(3)))
        assert plan.predicted.planned >= 0
        store.close()


# -- many at once


def test_many_threads_on_overlapping_prompts(open_store: Open) -> None:
    """Eight threads that put, look up and restore prompts with shared heads get right bytes."""
    store = open_store(host_bytes=10 * HOST_SLOT_BYTES, **tiny_budget(60))
    heads = prompt(4, seed=1)

    def work(number: int) -> int:
        loaded = 0
        for turn in range(6):
            tail = prompt(1 + (number + turn) % 4, seed=(number * turn) % 5)
            keys = store.keys(heads + tail)
            transfer = store.put(keys, filled_slots(keys))
            loaded += bring_back(store, keys, way="best" if turn % 2 else "load").loaded
            transfer.result(WAIT_S)
        return loaded

    threads = [in_thread(lambda number=number: work(number)) for number in range(8)]
    assert sum(thread() for thread in threads) > 0
    assert_sound(store)


def test_concurrent_puts_of_one_prompt_store_it_once(open_store: Open) -> None:
    """However many put the same blocks at once, each is stored once and all are answered."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(12)
    threads = [in_thread(lambda: put(store, keys)) for _ in range(6)]
    results = [thread() for thread in threads]
    assert sum(result.stored for result in results) == 12
    assert all(result.stored + result.present == 12 for result in results)
    assert store.stats()["tiers"]["ssd"]["blocks"] == 12


def test_close_while_busy(open_store: Open) -> None:
    """Closing while others use the store ends their calls with StoreClosed or success."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(6))

    def work(number: int) -> int:
        turn = 0
        try:
            for turn in range(1000):
                keys = prompt_keys(6, seed=number * 1000 + turn)
                store.put(keys, filled_slots(keys))
                bring_back(store, prompt_keys(6))
        except StoreClosed:
            return turn
        return -1

    threads = [in_thread(lambda number=number: work(number)) for number in range(3)]
    put(store, prompt_keys(6, seed=77))
    store.close()
    assert [thread() >= 0 for thread in threads] == [True] * 3
    store = open_store(host_bytes=0)
    assert bring_back(store, prompt_keys(6)).loaded == 6
    assert bring_back(store, prompt_keys(6, seed=77)).loaded == 6


def test_close_with_a_session_open(open_store: Open) -> None:
    """A session that is open when the store closes ends with StoreClosed or recomputes."""
    fs = FaultyFileSystem()
    store = open_store(host_bytes=0, fs=fs, loads_inflight_max=2)
    keys = prompt_keys(8)
    put(store, keys)
    store.flush()
    slots = poisoned_slots(8)
    gate = fs.hold("read", name=".seg")
    session = store.restore(store.plan(store.lookup(keys), way="load"), into=slots)
    session.__enter__()
    gate.wait_reached()
    closing = in_thread(store.close)
    gate.open()
    closing()
    try:
        while step := session.next_step(WAIT_S):
            session.computed(step)
    except StoreClosed:
        pass
    session.__exit__(None, None, None)
    for block in range(8):
        assert read_slots(slots, block) in (POISON, expected(keys, block))


def test_close_gives_up_at_its_deadline(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs does not hang close; what was not written is reported as dropped."""
    monkeypatch.setattr("kvtier.lane.JOIN_S_MAX", 0.2)
    fs = FaultyFileSystem()
    store = open_store(host_bytes=0, fs=fs, close_s_max=0.1, write_batch_blocks_max=2)
    first, second = prompt_keys(2), prompt_keys(5, seed=1)
    put(store, first)
    gate = fs.hold("write", name=".seg")
    stuck = store.put(prompt_keys(2, seed=2), filled_slots(prompt_keys(2, seed=2)))
    gate.wait_reached()
    queued = store.put(second, filled_slots(second))
    assert queued.released.wait(WAIT_S)
    closing = in_thread(store.close)
    closing()
    assert queued.result(WAIT_S).dropped == 5
    gate.open()
    assert stuck.result(WAIT_S).present == 0


def test_flush_has_a_deadline(open_store: Open) -> None:
    """A flush that cannot end says how much is left, and the store goes on."""
    fs = FaultyFileSystem()
    store = open_store(host_bytes=0, fs=fs)
    gate = fs.hold("sync", name=".seg")
    keys = prompt_keys(3)
    transfer = store.put(keys, filled_slots(keys))
    gate.wait_reached()
    with pytest.raises(TransferFailed, match="3 blocks"):
        store.flush(0.01)
    gate.open()
    assert transfer.result(WAIT_S).stored == 3
    store.flush()


def test_no_token_ids_in_logs(open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a restore nor damage nor a drop writes prompt text to a log."""
    caplog.set_level("DEBUG")
    store = open_store(host_bytes=0)
    tokens = [4242] * (3 * SPEC.block_tokens)
    keys = store.keys(tokens)
    put(store, keys)
    store.close()
    flip(segment_files(store.path)[0], 4096 + 5000)
    store = open_store(host_bytes=0)
    bring_back(store, keys)
    assert "4242" not in caplog.text
    assert (
        "4242"
        not in repr(keys) + str(store.lookup(keys)) + store.plan(store.lookup(keys)).explain()
    )


def test_a_store_leaves_no_thread(open_store: Open) -> None:
    """Closing ends every thread and descriptor that opening made."""
    import threading

    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    open_store().close()
    before = count()
    for seed in range(3):
        store = open_store()
        put(store, prompt_keys(4, seed))
        bring_back(store, prompt_keys(4, seed))
        store.close()
    # The threads that write are told to end, not waited for: one that hangs must not hang a close.
    eventually(lambda: count() == before)


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    """A host budget that the machine cannot map names the store, and leaves nothing behind."""
    path = str(tmp_path / "s")
    with pytest.raises((kvtier.StoreFailed, ValueError), match=r"host_bytes|s: "):
        kvtier.open(path, SPEC, host_bytes="4096TiB")
    kvtier.open(path, SPEC).close()
