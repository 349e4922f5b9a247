"""Space, writes and uses of the SSD tier, seen through the store."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    WAIT_S,
    FaultyFileSystem,
    bring_back,
    disk_bytes,
    eventually,
    expected,
    faulty_index,
    filled_slots,
    flip,
    prompt,
    prompt_keys,
    put,
    segment_files,
    settle,
    tiny_budget,
    variant,
)

import kvtier
from kvtier import Tier
from kvtier.tiers.base import BlockId
from kvtier.tiers.index import INDEX_COMMIT_BYTES_MAX, LmdbIndex
from kvtier.tiers.keeper import CHANGES_KEPT

Open = Any


# -- other sizes


@pytest.mark.parametrize("punch", [True, False])
def test_one_size_class_gives_way_to_another(
    open_store: Open, store_path: str, *, punch: bool
) -> None:
    """A directory full of one model's blocks takes another's, with and without hole punching.

    By recency: to ``priced`` the block just put is worth less than those put and restored before,
    and may be what goes first when a commit makes room ahead of the next writes.
    """
    fs = FaultyFileSystem()
    if not punch:
        fs.fail("punch", 95)
    other = variant(model="test/wide", kv_heads=4)
    budget = tiny_budget(24, 6)
    with contextlib.closing(kvtier.open(store_path, other, host_bytes=0, **budget)) as before:
        for seed in range(4):
            put(before, kvtier.BlockKeys.of(other, prompt(6, seed)))
        assert before.stats()["tiers"]["ssd"]["blocks"] > 8
    store = open_store(host_bytes=0, fs=fs, policy="lru", **budget)
    for seed in range(4):
        assert put(store, prompt_keys(6, seed)).stored == 6
        assert bring_back(store, prompt_keys(6, seed)).loaded == 6
        assert disk_bytes(store.path) <= budget["ssd_bytes"]


def test_a_copy_without_holes_shrinks_into_its_budget(open_store: Open, tmp_path: Path) -> None:
    """A directory whose holes were filled by copying opens, and gives the bytes back."""
    budget = tiny_budget(24, 6)
    store = open_store(host_bytes=0, **budget)
    for seed in range(4):
        put(store, store.keys(prompt(6, seed), tenant=str(seed % 2)))
    kept = store.keys(prompt(6, 3), tenant="1")
    there = store.lookup(kept).stored
    store.purge(tenant="0")
    assert store.stats()["tiers"]["ssd"]["used_bytes"] < budget["ssd_bytes"] - 6 * SLOT_BYTES
    full = disk_bytes(store.path)
    store.close()
    copy = tmp_path / "copy"
    copy.mkdir()
    for folder, _, names in os.walk(store.path):
        target = copy / os.path.relpath(folder, store.path)
        target.mkdir(exist_ok=True)
        for name in names:
            (target / name).write_bytes(Path(folder, name).read_bytes())
    assert disk_bytes(copy) > full
    small = {**budget, "ssd_bytes": budget["ssd_bytes"] - 12 * SLOT_BYTES}
    store = open_store(path=str(copy), host_bytes=0, **small)
    assert bring_back(store, kept).loaded == there
    assert disk_bytes(copy) <= small["ssd_bytes"]
    assert disk_bytes(copy) <= store.stats()["tiers"]["ssd"]["used_bytes"]


def test_holes_are_known_after_a_restart(open_store: Open) -> None:
    """What a purge gave back is not counted as used by the next process."""
    budget = tiny_budget(24, 6)
    store = open_store(host_bytes=0, **budget)
    put(store, store.keys(prompt(6, 1), tenant="a"))
    put(store, store.keys(prompt(6, 2), tenant="b"))
    put(store, store.keys(prompt(3, 3), tenant="a"))
    store.purge(tenant="a")
    used = store.stats()["tiers"]["ssd"]["used_bytes"]
    store.close()
    store = open_store(host_bytes=0, **budget)
    assert abs(store.stats()["tiers"]["ssd"]["used_bytes"] - used) <= 32 << 10
    assert bring_back(store, store.keys(prompt(6, 2), tenant="b")).loaded == 6
    assert disk_bytes(store.path) <= store.stats()["tiers"]["ssd"]["used_bytes"]


def test_a_dead_writers_probe_is_removed(open_store: Open) -> None:
    """The file by which a writer tried out the disk does not outlive the next open."""
    store = open_store()
    store.close()
    left = os.path.join(store.path, "segments", "probe.new")
    with open(left, "wb") as file:
        file.write(b"x" * 4096)
    open_store()
    assert not os.path.exists(left)


# -- how the disk is accessed


def test_the_way_of_access_is_reported(open_store: Open) -> None:
    """Direct where the file system allows it; else buffered, and both give the same bytes."""
    fs = FaultyFileSystem()
    fs.fail("open_file", 22, name="probe.new", nth=2)
    store = open_store(host_bytes=0, fs=fs)
    assert store.stats()["tiers"]["ssd"]["io"] == "buffered"
    put(store, prompt_keys(4))
    assert bring_back(store, prompt_keys(4)).loaded == 4
    store.close()
    store = open_store(host_bytes=0)
    assert store.stats()["tiers"]["ssd"]["io"] in ("direct", "buffered")
    assert bring_back(store, prompt_keys(4)).loaded == 4


def test_a_directory_that_cannot_be_probed_opens(open_store: Open) -> None:
    """A probe that fails costs direct I/O, not the store."""
    fs = FaultyFileSystem()
    fs.fail("create", 28, name="probe.new")
    store = open_store(host_bytes=0, fs=fs)
    assert store.stats()["tiers"]["ssd"]["io"] == "buffered"
    assert put(store, prompt_keys(4)).stored == 4


# -- the write budget


def test_a_spent_write_budget_stops_writes_not_the_store(open_store: Open) -> None:
    """Beyond the day's bytes nothing is written; host memory goes on, and it is counted."""
    store = open_store(ssd_write_bytes_per_day=4 * SLOT_BYTES)
    put(store, prompt_keys(8))
    stats = store.stats()
    assert stats["tiers"]["ssd"]["blocks"] <= 4
    assert stats["counters"]["ssd_written_bytes"] <= 4 * SLOT_BYTES
    assert stats["counters"]["ssd_declined_blocks"] == 8 - stats["tiers"]["ssd"]["blocks"]
    assert bring_back(store, prompt_keys(8)).loaded == 8
    store.close()
    store = open_store(ssd_write_bytes_per_day=4 * SLOT_BYTES)
    put(store, prompt_keys(8, seed=1))
    assert store.stats()["counters"]["ssd_written_bytes"] <= SLOT_BYTES


def test_a_short_write_budget_admits_what_comes_twice(open_store: Open) -> None:
    """With less than a quarter left, a block is written when it is put for the second time."""
    store = open_store(ssd_write_bytes_per_day=20 * SLOT_BYTES)
    put(store, prompt_keys(16))
    store.flush()
    once, twice = prompt_keys(2, seed=1), prompt_keys(2, seed=2)
    for keys in (once, twice, twice):
        put(store, keys)
        store.flush()
    catalog = store._catalog

    def stored(keys: kvtier.BlockKeys) -> int:
        rows = [catalog.find(BlockId(keys.namespace, digest)) for digest in keys.hashes]
        return sum(row is not None and catalog.state(row, Tier.SSD) == 3 for row in rows)

    assert stored(once) == 0
    assert stored(twice) == 2


def test_a_block_that_missed_the_disk_is_written_when_put_again(open_store: Open) -> None:
    """A block that is only in host memory because its write failed reaches the SSD later."""
    fs = FaultyFileSystem()
    store = open_store(fs=fs)
    keys = prompt_keys(4)
    fs.fail("write", 28, name=".seg")
    put(store, keys)
    store.flush()
    assert store.stats()["tiers"]["ssd"]["blocks"] == 0
    fs.heal()
    assert put(store, keys).present == 4
    store.flush()
    assert store.stats()["tiers"]["ssd"]["blocks"] == 4
    store.close()
    assert bring_back(open_store(), keys).loaded == 4


def test_what_is_written_is_counted(open_store: Open) -> None:
    """The medium's bytes are those of the slots and of the index: the write amplification."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(8))
    written = store.stats()["tiers"]["ssd"]["medium_written_bytes"]
    assert written >= 8 * SLOT_BYTES


# -- uses


def test_uses_survive_a_restart(open_store: Open) -> None:
    """What was restored often outlives what was only stored, also over a restart."""
    budget = tiny_budget(12, 6)
    store = open_store(host_bytes=0, **budget)
    put(store, prompt_keys(4, seed=1))
    put(store, prompt_keys(4, seed=2))
    bring_back(store, prompt_keys(4, seed=1))
    store.close()
    index = LmdbIndex(os.path.join(store.path, "index"), 1 << 30)
    hits = {bytes(row["hash"].tobytes()): int(row["hits"]) for row in index.entries()}
    index.close()
    assert [hits[digest] for digest in prompt_keys(4, seed=1).hashes] == [1] * 4
    assert [hits[digest] for digest in prompt_keys(4, seed=2).hashes] == [0] * 4
    store = open_store(host_bytes=0, **budget)
    put(store, prompt_keys(9, seed=3))
    assert store.lookup(prompt_keys(4, seed=1)).stored > store.lookup(prompt_keys(4, seed=2)).stored


# -- keyed tags

KEY = b"k" * 32


def test_a_record_of_another_key_is_a_miss(open_store: Open) -> None:
    """With an integrity key only records written under it are read; without one, all are."""
    store = open_store(host_bytes=0, integrity_key=KEY)
    put(store, prompt_keys(4, seed=1))
    assert bring_back(store, prompt_keys(4, seed=1)).loaded == 4
    store.close()
    store = open_store(host_bytes=0)
    assert bring_back(store, prompt_keys(4, seed=1)).loaded == 4
    put(store, prompt_keys(4, seed=2))
    store.close()
    store = open_store(host_bytes=0, integrity_key=KEY)
    assert bring_back(store, prompt_keys(4, seed=2)).loaded == 0
    assert bring_back(store, prompt_keys(4, seed=1)).loaded == 4
    store.close()
    store = open_store(host_bytes=0, integrity_key=b"another key of some length")
    assert bring_back(store, prompt_keys(4, seed=1)).loaded == 0


def test_a_forged_payload_fails_the_tag(open_store: Open) -> None:
    """Whoever makes header, checksums and payload fit still cannot make the tag."""
    from kvtier.tiers.segment import (
        PAGE_BYTES,
        decode_header,
        encode_header,
        header_tag,
        part_digests,
    )

    store = open_store(host_bytes=0, integrity_key=KEY)
    keys = prompt_keys(1)
    put(store, keys)
    store.close()
    with open(segment_files(store.path)[0], "r+b") as file:
        file.seek(PAGE_BYTES)
        page = file.read(PAGE_BYTES)
        record, _ = decode_header(page)
        forged = memoryview(b"\0" * record.payload_bytes)
        digests = part_digests(record.part_bytes, forged)
        file.seek(PAGE_BYTES)
        file.write(encode_header(record, digests, header_tag(page)) + forged)
    store = open_store(host_bytes=0, integrity_key=KEY)
    assert bring_back(store, keys).recomputed == [0]


def test_a_wide_directory_is_warned_of(
    open_store: Open, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that others may enter opens with a warning; a private one without."""
    open_store().close()
    with caplog.at_level(logging.WARNING):
        open_store().close()
        assert "others may enter" not in caplog.text
        os.chmod(store_path, 0o750)  # noqa: S103 - that is what is warned of
        open_store().close()
    assert "others may enter" in caplog.text


# -- the index's process


def test_a_killed_index_process_costs_nothing(open_store: Open) -> None:
    """If the index's process dies, it is started again; puts, restores and books go on."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(4, seed=1))
    kill_index(store)
    assert put(store, prompt_keys(4, seed=2)).stored == 4
    assert store.stats()["tiers"]["ssd"]["index_repairs"] == 1
    kill_index(store)
    store.purge(tenant="nobody")
    assert put(store, prompt_keys(4, seed=3)).stored == 4
    store.close()
    store = open_store(host_bytes=0)
    for seed in (1, 2, 3):
        assert bring_back(store, prompt_keys(4, seed)).loaded == 4


def test_an_index_lost_while_open_is_made_anew(open_store: Open) -> None:
    """An index that is ruined under an open store is rebuilt from what the slots hold."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(6, seed=1))
    kill_index(store)
    with open(os.path.join(store.path, "index", "data.mdb"), "r+b") as file:
        file.write(b"\xff" * 20_000)
    assert put(store, prompt_keys(6, seed=2)).stored == 6
    assert bring_back(store, prompt_keys(6, seed=1)).loaded == 6
    store.close()
    store = open_store(host_bytes=0)
    for seed in (1, 2):
        assert bring_back(store, prompt_keys(6, seed)).loaded == 6


def test_an_index_that_cannot_be_repaired_drops_writes_only(open_store: Open) -> None:
    """Without a working index nothing new reaches the SSD; what is there is still restored."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(4, seed=1))
    index = faulty_index(store)
    index.error = OSError(5, "no commit")
    assert put(store, prompt_keys(4, seed=2)).stored == 0
    assert bring_back(store, prompt_keys(4, seed=1)).loaded == 4
    index.error = None
    assert put(store, prompt_keys(4, seed=2)).stored == 4


def kill_index(store: kvtier.Store) -> None:
    """End the process that keeps the index, as a damaged page would."""
    keeper = store._ssd._ledger._index._link._process
    keeper.kill()
    keeper.wait(WAIT_S)


# -- following


def test_changes_tell_what_came_and_went(open_store: Open) -> None:
    """Asked again from where it was, a follower gets exactly what became different."""
    store = open_store(host_bytes=0)
    first = store.changes(0)
    assert first.complete
    put(store, prompt_keys(3))
    eventually(lambda: store._catalog.ready(Tier.HOST) == 0)
    second = store.changes(first.sequence)
    assert not second.complete
    assert {(digest, tiers) for _, digest, tiers in second.blocks} == {
        (digest, (Tier.SSD,)) for digest in prompt_keys(3).hashes
    }
    store.purge(tenant="")
    third = store.changes(second.sequence)
    assert {tiers for _, _, tiers in third.blocks} == {()}
    assert store.changes(third.sequence).blocks == ()


def test_a_follower_of_an_earlier_life_is_told(open_store: Open) -> None:
    """A sequence number of before a restart gives everything, not a difference."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(3))
    before = store.changes(0)
    store.close()
    store = open_store(host_bytes=0)
    again = store.changes(before.sequence)
    assert again.complete
    assert len(again.blocks) == 3
    assert store.changes(again.sequence + 1).complete


def test_damage_is_still_found_without_asserts(open_store: Open) -> None:
    """A flipped payload byte is a miss also where assert statements do nothing."""
    from support import run_python

    store = open_store(host_bytes=0)
    put(store, prompt_keys(4))
    store.close()
    flip(segment_files(store.path)[0], 3 * 4096)
    code = (
        "import sys, kvtier; from support import SPEC, prompt_keys, bring_back\n"
        "with kvtier.open(sys.argv[1], SPEC, host_bytes=0) as s:\n"
        "    back = bring_back(s, prompt_keys(4))\n"
        "    print(back.report.loaded, back.report.recomputed, __debug__)\n"
    )
    done = run_python(code, store.path, flags=["-O"])
    assert done.stdout.split() == ["3", "1", "False"]


def test_sizes_on_disk_do_not_depend_on_how_it_got_there(open_store: Open) -> None:
    """``expected`` bytes are what a copy of the directory elsewhere restores too."""
    store = open_store(host_bytes=0)
    put(store, prompt_keys(4))
    store.close()
    copy = store.path + "-copy"
    shutil.copytree(store.path, copy)
    assert bring_back(open_store(path=copy, host_bytes=0), prompt_keys(4)).loaded == 4
    assert expected(prompt_keys(4), 0) != expected(prompt_keys(4), 1)


# -- blocks that can never fit


WIDE = variant(model="test/huge", head_dim=2048)
WIDE_BYTES = WIDE.block_layout.block_bytes


def test_a_block_that_never_fits_evicts_nothing(
    open_store: Open, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A block larger than the tier is declined and counted; other models' blocks stay."""
    budget = tiny_budget(40, per_segment=20)
    assert budget["ssd_bytes"] < WIDE_BYTES + INDEX_COMMIT_BYTES_MAX + (64 << 10)
    others = prompt_keys(20)
    store = open_store(host_bytes=0, **budget)
    put(store, others)
    store.close()
    caplog.clear()  # that one is told that it will not last
    with caplog.at_level(logging.WARNING):
        store = open_store(spec=WIDE, host_bytes=0, **budget)
    (said,) = [line for line in caplog.messages if "ssd_bytes" in line]
    keys = prompt_keys(2, spec=WIDE)
    assert put(store, keys) == kvtier.PutResult(0, 0, 2)
    counters = store.stats()["counters"]
    assert (counters["ssd_declined_blocks"], counters["evicted_blocks_ssd"]) == (2, 0)
    store.close()
    assert open_store(host_bytes=0, **budget).lookup(others).stored == 20
    assert f"ssd_bytes={budget['ssd_bytes']}" in said
    least = int(said.split("; ")[1].split()[0])

    def alone(path: str, limit: int) -> kvtier.PutResult:
        own = {**budget, "ssd_bytes": limit}
        return put(open_store(path=path, spec=WIDE, host_bytes=0, **own), prompt_keys(1, spec=WIDE))

    # The least value that would do is that of a store with an index like this one.
    assert alone(store_path + "-ample", least) == kvtier.PutResult(1, 0, 0)
    assert alone(store_path + "-scarce", least - (96 << 10)) == kvtier.PutResult(0, 0, 1)


def lasting_bytes(open_store: Open, caplog: pytest.LogCaptureFixture, path: str) -> int:
    """Return the ``ssd_bytes`` that a store too small for its index is told it needs."""
    with caplog.at_level(logging.WARNING):
        open_store(path=path, host_bytes=0, **tiny_budget(6)).close()
    (said,) = [line for line in caplog.messages if "ssd_bytes" in line]
    caplog.clear()
    assert f"ssd_bytes={tiny_budget(6)['ssd_bytes']}" in said
    return int(said.split("; ")[1].split()[0])


def test_a_store_that_its_index_will_crowd_out_says_so(
    open_store: Open, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the least size that lasts; a store of that size opens without one."""
    least = lasting_bytes(open_store, caplog, store_path)
    with caplog.at_level(logging.WARNING):
        open_store(path=store_path + "-least", host_bytes=0, ssd_bytes=least)
        assert "ssd_bytes" not in caplog.text
        open_store(path=store_path + "-less", host_bytes=0, ssd_bytes=least - 1)
        assert f"ssd_bytes={least - 1}" in caplog.text


@pytest.mark.slow
def test_the_least_size_that_is_named_lasts(
    open_store: Open, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After 10,000 changes, twice what the journal holds, a store of that size drops nothing."""
    least = lasting_bytes(open_store, caplog, store_path)
    store = open_store(path=store_path + "-least", host_bytes=0, ssd_bytes=least)
    blocks, changes = 250, 0
    for seed in range(100):
        assert put(store, prompt_keys(blocks, seed)) == kvtier.PutResult(blocks, 0, 0)
        counters = store.stats()["counters"]
        changes = counters["ssd_written_blocks"] + counters["evicted_blocks_ssd"]
        if changes > 10_000:
            break
    assert changes > 10_000 > 2 * CHANGES_KEPT
    assert disk_bytes(store.path) <= least


def test_no_ssd_at_all_is_nothing_to_warn_of(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """ssd_bytes=0 and host_bytes=0 are choices; a size that holds no block is a slip, and said."""
    with caplog.at_level(logging.WARNING):
        open_store(host_bytes=0, ssd_bytes=0).close()
        assert "_bytes" not in caplog.text
        open_store(host_bytes=HOST_SLOT_BYTES - 1)
    assert f"host_bytes={HOST_SLOT_BYTES - 1}" in caplog.text
    assert f"{HOST_SLOT_BYTES} would hold one" in caplog.text


def test_a_block_put_while_its_old_copy_goes_is_written(open_store: Open) -> None:
    """A put that meets the eviction of the same block waits for its end, and is durable then."""
    store = open_store(host_bytes="1MiB", **tiny_budget(24, per_segment=6))
    keys = prompt_keys(4)
    put(store, keys)
    store.flush()
    catalog = store._catalog
    rows = [catalog.find(BlockId(keys.namespace, digest)) for digest in keys.hashes]
    places = [catalog.location(row, Tier.SSD) for row in rows]
    # What a commit does that takes victims along, stopped in the middle.
    assert catalog.take_out(rows, Tier.SSD) == rows
    assert put_begun(store, keys) == kvtier.PutResult(0, 4, 0)
    store._mover.purge_host(lambda: rows)
    waiting = store.put(keys, filled_slots(keys))
    eventually(lambda: len(store._writeback._writing) == 4)
    store._ssd.drop([catalog.id(row) for row in rows], places)
    for row in rows:
        catalog.end(row, Tier.SSD, "evicted")
    assert waiting.result(WAIT_S).stored == 4
    store.flush()
    assert store._catalog.ready(Tier.SSD) == 4
    store.close()
    assert bring_back(open_store(host_bytes=0), keys).loaded == 4


def put_begun(store: kvtier.Store, keys: kvtier.BlockKeys) -> kvtier.PutResult:
    """Put blocks that are present: nothing is written, nothing waits."""
    return store.put(keys, filled_slots(keys)).result(WAIT_S)


def test_a_full_prefix_closed_store_holds_prefixes(open_store: Open) -> None:
    """Whatever is put into a full store and used, what it has of each prompt is its beginning."""
    store = open_store(host_bytes=0, policy="prefix-closed", **tiny_budget(24))
    prompts = [prompt_keys(blocks, seed) for seed, blocks in enumerate((6, 9, 4, 12, 7, 3, 15, 8))]
    for again in range(3):
        for keys in prompts:
            bring_back(store, keys)
            put(store, keys)
            settle(store)
            for each in prompts:
                found = [tier is not None for tier in store.lookup(each).tiers]
                assert found == sorted(found, reverse=True), f"round {again}"
    assert store.stats()["counters"]["evicted_blocks_ssd"] > 0


def test_a_prefix_closed_store_writes_nothing_that_cannot_be_reached(open_store: Open) -> None:
    """A block whose beginning is not stored is dropped; with its beginning it is kept."""
    store = open_store(host_bytes=0, policy="prefix-closed")
    keys = prompt_keys(4)
    slots = filled_slots(keys)
    assert store.put(keys, slots, blocks=range(2, 4)).result(30).dropped == 2
    assert store.put(keys, slots, blocks=range(2)).result(30).stored == 2
    assert store.put(keys, slots, blocks=range(2, 4)).result(30).stored == 2
