"""What is purged is gone: from every tier, from the disk, and from what a rebuild can find."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from support import (
    SLOT_BYTES,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    bring_back,
    expected,
    faulty_index,
    filled_slots,
    in_thread,
    poisoned_slots,
    prompt,
    prompt_keys,
    put,
    segment_files,
    tiny_budget,
    variant,
)

import kvtier
from kvtier import TransferFailed

Open = Any


def tenant_keys(store: kvtier.Store, tenant: str, blocks: int = 4, seed: int = 0) -> Any:
    """Return the keys of a prompt of a tenant."""
    return store.keys(prompt(blocks, seed), tenant=tenant)


def on_disk(path: str, needle: bytes) -> bool:
    """Whether some segment holds these bytes."""
    return any(needle in Path(name).read_bytes() for name in segment_files(path))


def test_a_tenants_blocks_go_and_the_others_stay(open_store: Open) -> None:
    """A purge by tenant removes every block of that tenant, from both tiers, and says how many."""
    store = open_store()
    mine, theirs = tenant_keys(store, "me"), tenant_keys(store, "you")
    put(store, mine)
    put(store, theirs)
    result = store.purge(tenant="me")
    assert (result.blocks, result.left) == (4, 0)
    assert result.nbytes == 4 * SLOT_BYTES
    assert store.lookup(mine).stored == 0
    assert bring_back(store, theirs).loaded == 4
    assert not any(on_disk(store.path, expected(mine, block)[:64]) for block in range(4))
    assert on_disk(store.path, expected(theirs, 0)[:64])
    assert store.stats()["counters"]["purged_blocks_ssd"] == 4


def test_a_namespace_goes(open_store: Open, store_path: str) -> None:
    """A purge by namespace removes the blocks of another spec in the same directory too."""
    other = variant(model="test/other")
    with contextlib.closing(kvtier.open(store_path, other, ssd_bytes="8MiB")) as before:
        keys = kvtier.BlockKeys.of(other, prompt(3))
        put(before, keys)
    store = open_store()
    put(store, prompt_keys(4))
    result = store.purge(namespace=other.namespace)
    assert result.blocks == 3
    assert not on_disk(store.path, expected(keys, 0, other)[:64])
    assert bring_back(store, prompt_keys(4)).loaded == 4


def test_the_old_go(open_store: Open) -> None:
    """A purge by age takes what was not used for so long, and nothing that was."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(4))
    assert store.purge(older_than_s=3600.0).blocks == 0
    assert store.lookup(prompt_keys(4)).stored == 4
    assert store.purge(older_than_s=0.0).blocks == 4


def test_what_must_match_is_everything_that_is_given(open_store: Open) -> None:
    """Filters are combined, and at least one is needed."""
    store = open_store()
    keys = tenant_keys(store, "me")
    put(store, keys)
    assert store.purge(tenant="me", older_than_s=3600.0).blocks == 0
    assert store.purge(tenant="me", namespace=bytes(32)).blocks == 0
    assert store.lookup(keys).stored == 4
    with pytest.raises(ValueError, match="purge: name"):
        store.purge()
    with pytest.raises(ValueError, match="older_than_s"):
        store.purge(older_than_s=float("nan"))
    with pytest.raises(ValueError, match="namespace"):
        store.purge(namespace=b"short")


def test_what_was_evicted_earlier_is_destroyed_too(open_store: Open) -> None:
    """Bytes that an evicted block left in a free slot do not survive a purge."""
    store = open_store(host_bytes=0, **tiny_budget(6, 6))
    first = prompt_keys(6, seed=1)
    put(store, first)
    put(store, prompt_keys(6, seed=2))
    gone = [n for n, tier in enumerate(store.lookup(first).tiers) if tier is None]
    assert gone
    store.purge(tenant="nobody at all")
    assert not any(on_disk(store.path, expected(first, block)[:64]) for block in gone)


def test_a_rebuild_finds_nothing_that_was_purged(open_store: Open) -> None:
    """With the index lost, the purged blocks do not come back from their headers."""
    store = open_store(host_bytes=0)
    mine, theirs = tenant_keys(store, "me"), tenant_keys(store, "you")
    put(store, mine)
    put(store, theirs)
    store.purge(tenant="me")
    store.close()
    for name in ("data.mdb", "lock.mdb"):
        os.unlink(os.path.join(store.path, "index", name))
    store = open_store(host_bytes=0)
    assert store.lookup(mine).stored == 0
    assert bring_back(store, theirs).loaded == 4


def test_a_purge_waits_for_a_restore(open_store: Open) -> None:
    """Blocks that a restore holds go once it lets go of them; the restore gets its bytes."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(4)
    put(store, keys)
    with store.restore(store.plan(store.lookup(keys), way="load"), poisoned_slots(4)) as session:
        result = store.purge(tenant="", timeout=0.05)
        assert result.blocks + result.left == 4
        assert result.left > 0
        later = in_thread(lambda: store.purge(tenant="", timeout=WAIT_S))
        assert session.next_step(WAIT_S) is None
        assert session.report.loaded == 4
    assert later().left == 0
    assert store.lookup(keys).stored == 0


def test_a_purge_that_the_disk_refuses_is_reported(open_store: Open) -> None:
    """If the index or the disk refuses, the caller is told and nothing is half known."""
    fs = FaultyFileSystem()
    store = open_store(host_bytes=0, fs=fs)
    keys = prompt_keys(4)
    put(store, keys)
    index = faulty_index(store)
    index.error = OSError(5, "no commit")
    with pytest.raises(TransferFailed, match="not complete"):
        store.purge(tenant="")
    index.error = None
    assert bring_back(store, keys).loaded == 4
    fs.fail("punch")
    with pytest.raises(TransferFailed, match="not complete"):
        store.purge(tenant="")
    fs.heal()
    assert store.purge(tenant="").nbytes == 4 * SLOT_BYTES
    assert not on_disk(store.path, expected(keys, 0)[:64])


def test_without_punching_a_purge_overwrites(open_store: Open) -> None:
    """Where the file system cannot give back parts of a file, the slots are overwritten."""
    fs = FaultyFileSystem()
    fs.fail("punch", 95)
    store = open_store(host_bytes=0, fs=fs)
    mine, theirs = tenant_keys(store, "me"), tenant_keys(store, "you")
    put(store, mine)
    put(store, theirs)
    assert store.purge(tenant="me").nbytes == 4 * SLOT_BYTES
    assert not any(on_disk(store.path, expected(mine, block)[:64]) for block in range(4))
    assert bring_back(store, theirs).loaded == 4
    assert put(store, mine).stored == 4


def test_what_is_put_meanwhile_is_whole(open_store: Open) -> None:
    """A purge beside puts removes what was there, and never the bytes of what comes after."""
    store = open_store(host_bytes=0)
    for seed in range(12):
        transfer = store.put(prompt_keys(4, seed), filled_slots(prompt_keys(4, seed)))
        store.purge(tenant="")
        transfer.result(WAIT_S)
        put(store, prompt_keys(4, seed))
        assert bring_back(store, prompt_keys(4, seed)).loaded == 4
    assert SPEC.namespace == prompt_keys(1).namespace
