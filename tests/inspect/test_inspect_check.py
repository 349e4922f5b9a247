"""`check` finds what is damaged, all of it and nothing else, closed or beside a writer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SLOT_BYTES, SPEC, WAIT_S, FaultyFileSystem, flip, prompt, put, segment_files

import kvtier
from kvtier.tiers.entries import id_at, location_at
from kvtier.tiers.index import LmdbIndex
from kvtier.tiers.segment import PAGE_BYTES, SegmentHeader, encode_segment
from kvtier_inspect import check as check_module
from kvtier_inspect import slots
from kvtier_inspect.check import check
from kvtier_inspect.opened import opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.base import BlockId
    from kvtier_inspect.check import Report

    Run = Callable[..., tuple[int, str, str]]
    RunJson = Callable[..., tuple[int, dict[str, Any]]]

LIVE_BYTES = PAGE_BYTES + SPEC.block_layout.block_bytes
"""What of a slot is a record: the rest is not read by anybody."""


def report_of(path: str | Path) -> Report:
    """Check a store."""
    with opened(path) as store:
        return check(store)


def offset_of(slot: int) -> int:
    """Return where in its segment a slot of the tiny spec begins."""
    return PAGE_BYTES + slot * SLOT_BYTES


def block_in(path: str | Path, slot: int) -> BlockId:
    """Return the block that the index has in a slot of the only segment."""
    with opened(path) as store:
        (row,) = np.flatnonzero(store.entries["slot"] == slot).tolist()
        return id_at(store.entries, row)


def test_a_sound_store_has_no_problem(small: Path) -> None:
    """Every block is read to the last byte and found as it was written."""
    report = report_of(small)
    assert report.problems == ()
    assert (report.blocks, report.changed) == (24, 0)
    assert report.read_bytes == 24 * SLOT_BYTES


@settings(max_examples=40)
@given(slot=st.integers(0, 23), offset=st.integers(0, LIVE_BYTES - 1), mask=st.integers(1, 255))
def test_any_flip_in_a_record_is_that_blocks_problem(
    slot: int, offset: int, mask: int, made_once: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whichever byte is altered, the one block is named, and the others are sound."""
    path = Path(shutil.copytree(made_once, tmp_path_factory.mktemp("flip") / "store"))
    block = block_in(path, slot)
    flip(segment_files(path)[0], offset_of(slot) + offset, mask)
    report = report_of(path)
    shutil.rmtree(path)
    assert [(each.block, each.slot) for each in report.problems] == [(block, slot)]
    assert report.blocks == 23


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: flip_in(data, offset_of(3) + PAGE_BYTES), "layer 0 fails its checksum"),
        (lambda data: flip_in(data, offset_of(3) + 140), "header fails its checksum"),
        (lambda data: data.__setitem__(slice(offset_of(3), offset_of(4)), bytes(SLOT_BYTES)),
         "its slot is empty"),
        (lambda data: data.__setitem__(slice(offset_of(3), offset_of(4)),
                                       data[offset_of(5) : offset_of(6)]), "its slot holds block"),
        (lambda data: data.__setitem__(slice(offset_of(3), None),
                                       data[offset_of(3) : offset_of(3) + 5000]), "ends after"),
    ],
)  # fmt: skip
def test_what_happened_is_said(
    damage: Callable[[bytearray], None], words: str, small: Path, inspect: Run
) -> None:
    """Each kind of damage has its own words, with segment, slot and block, and ends with 1."""
    block = block_in(small, 3)
    segment = Path(segment_files(small)[0])
    data = bytearray(segment.read_bytes())
    damage(data)
    segment.write_bytes(data)
    code, out, _err = inspect("check", small)
    assert code == 1
    (line,) = [line for line in out.splitlines() if "slot 3," in line]
    assert line.startswith(f"segments/{segment.name}, slot 3, block {block}: ")
    assert words in line
    assert out.splitlines()[-1].split()[1] in ("problem", "problems")


def flip_in(data: bytearray, offset: int) -> None:
    """Alter one byte."""
    data[offset] ^= 0xFF


def test_all_problems_come_before_their_number(small: Path, inspect: Run) -> None:
    """Every damaged block has its line, and the last line counts them."""
    for slot in range(0, 24, 2):
        flip(segment_files(small)[0], offset_of(slot) + 5000)
    code, out, _err = inspect("check", small)
    assert code == 1
    assert sum("fails its checksum" in line for line in out.splitlines()) == 12
    assert out.splitlines()[-1].strip() == "12 problems"


def rewrite(path: Path, *, put: Any = (), remove: Any = ()) -> None:
    """Commit something to a closed store's index."""
    index = LmdbIndex(str(path / "index"), 64 << 20)
    index.commit(list(put), list(remove))
    index.close()


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("segment", 99, "its segment is gone"),
        ("slot", 500, "its segment ends before it"),
        ("slot_bytes", 8192, "another slot size"),
        ("version", 2, "another version"),
        ("position", 77, "another position"),
        ("parent", np.void(b"\7" * 32), "another parent"),
        ("created_ns", 5, "another created_ns"),
        ("payload_bytes", 77, "another payload_bytes"),
    ],
)
def test_an_entry_that_is_wrong_is_a_problem(
    column: str, value: Any, words: str, small: Path
) -> None:
    """What an index says and no record bears out is said, for that block alone."""
    with opened(small) as store:
        row = store.entries[4:5].copy()
    block = id_at(row, 0)
    row[column] = value
    rewrite(small, put=[row.tobytes()])
    report = report_of(small)
    assert [each.block for each in report.problems] == [block]
    assert words in report.problems[0].what
    assert report.blocks == 23


def test_two_claims_to_a_slot_are_problems(small: Path) -> None:
    """Of two entries for one slot neither can be trusted."""
    with opened(small) as store:
        rows = store.entries[4:6].copy()
    rows["slot"][1] = rows["slot"][0]
    rewrite(small, put=[rows[1:].tobytes()])
    report = report_of(small)
    assert {each.block for each in report.problems} == {id_at(rows, 0), id_at(rows, 1)}


def test_records_without_an_entry_are_counted_and_no_problem(small: Path) -> None:
    """An evicted block's record lies in a free slot: that is how a store works."""
    gone = [block_in(small, slot) for slot in (2, 7)]
    rewrite(small, remove=gone)
    segment = Path(segment_files(small)[0])
    data = bytearray(segment.read_bytes())
    data += data[offset_of(5) : offset_of(6)]  # a block that is stored elsewhere
    data += b"\xff" * SLOT_BYTES  # half of a write
    data += bytes(SLOT_BYTES)
    segment.write_bytes(data)
    report = report_of(small)
    assert report.problems == ()
    unnamed = report.unnamed
    assert (unnamed.records, unnamed.twins, unnamed.unsound) == (3, 1, 1)


def test_a_segment_that_cannot_be_used_is_one_problem_and_its_blocks_others(small: Path) -> None:
    """The file is named with what is wrong with it, and so is each block that it held."""
    flip(segment_files(small)[0], 20)
    (small / "segments" / "notes.txt").write_text("hello")
    report = report_of(small)
    files = [each for each in report.problems if each.block is None]
    assert [each.where.rpartition("/")[2] for each in files] == [
        Path(segment_files(small)[0]).name, "notes.txt",
    ]  # fmt: skip
    assert len(report.problems) - len(files) == 24
    assert report.blocks == 0


def test_sizes_that_nobody_can_hold_are_not_taken_at_their_word(small: Path) -> None:
    """A segment of slots of a terabyte is a message, not an allocation."""
    huge = 1 << 40
    with opened(small) as store:
        row = store.entries[4:5].copy()
    row["segment"], row["slot"], row["slot_bytes"] = 7, 0, huge
    path = small / "segments" / f"{7:016x}.seg"
    path.write_bytes(encode_segment(SegmentHeader(7, 1, huge)))
    os.truncate(path, PAGE_BYTES + huge)
    rewrite(small, put=[row.tobytes()])
    (problem,) = report_of(small).problems
    assert "over" in problem.what


def test_a_bad_sector_is_one_blocks_problem(small: Path) -> None:
    """Where neighbours cannot be read at once, each is read alone."""

    class BadSector(FaultyFileSystem):
        def read(self, fd: int, into: Any, offset: int) -> int:
            end = offset + sum(piece.nbytes for piece in into)
            if offset <= offset_of(6) + 5000 < end and end - offset > PAGE_BYTES:
                raise OSError(5, os.strerror(5))
            return super().read(fd, into, offset)

    block = block_in(small, 6)
    with opened(small, BadSector()) as store:
        report = check(store)
    assert [each.block for each in report.problems] == [block]
    assert report.blocks == 23
    assert "could not be read" in report.problems[0].what


def test_more_than_fits_in_one_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few neighbours are read at once, every block is read once."""
    for nbytes in (1, SLOT_BYTES, 5 * SLOT_BYTES):
        monkeypatch.setattr(slots, "READ_BYTES_MAX", nbytes)
        done: list[int] = []
        with opened(small) as store:
            report = check(store, advance=done.append)
        assert (report.blocks, report.problems) == (24, ())
        assert sum(done) == report.read_bytes == 24 * SLOT_BYTES
        assert len(done) == -(-24 // max(nbytes // SLOT_BYTES, 1))


def test_a_writer_that_reuses_slots_is_no_damage(tmp_path: Path) -> None:
    """A check beside a writer that evicts and reuses all the time finds no damage."""
    path = tmp_path / "store"
    with kvtier.open(path, SPEC, host_bytes="1MiB", ssd_bytes="1MiB") as store:
        for seed in range(60):
            put(store, store.keys(prompt(8, seed)))
            if seed % 6 == 5:
                with opened(path) as snapshot:
                    put(store, store.keys(prompt(8, 1000 + seed)))  # after the index was read
                    put(store, store.keys(prompt(8, 2000 + seed)))
                    report = check(snapshot)
                assert report.problems == ()
                assert report.blocks + report.changed >= len(snapshot.entries)


def test_damage_beside_a_writer_is_found(live: kvtier.Store) -> None:
    """A block that is damaged while an engine has the store open is named, and only that one."""
    block = block_in(live.path, 6)
    flip(segment_files(live.path)[0], offset_of(6) + 5000)
    report = report_of(live.path)
    assert [each.block for each in report.problems] == [block]
    assert (report.blocks, report.changed) == (23, 0)


def test_a_block_that_moves_while_it_is_looked_at_again_is_not_damage(
    live: kvtier.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage counts only where the index says the same before and after the second look."""
    block = block_in(live.path, 6)
    flip(segment_files(live.path)[0], offset_of(6) + 5000)
    read_index = check_module.read_index
    with opened(live.path) as store:
        entries = store.entries
        (row,) = [r for r in range(24) if id_at(entries, r) == block]
        answers = 0

        def moving(*args: Any, **options: Any) -> Any:
            nonlocal answers
            answers += 1
            now = read_index(*args, **options).copy()
            now["created_ns"][row] += answers
            return now

        monkeypatch.setattr(check_module, "read_index", moving)
        report = check(store)
    assert report.problems == ()
    assert report.changed == 1
    assert answers == 2 * check_module.SECOND_LOOKS


def test_damage_is_said_where_the_index_cannot_be_asked_again(
    small: Path,
) -> None:
    """An index that is gone by the second look does not excuse a damaged record."""
    block = block_in(small, 6)
    flip(segment_files(small)[0], offset_of(6) + 5000)
    with opened(small) as store:
        shutil.rmtree(small / "index")
        report = check(store)
    assert [each.block for each in report.problems] == [block]
    assert (report.blocks, report.changed) == (23, 0)


def test_show_says_what_is_known_of_a_block(small: Path, inspect_json: RunJson) -> None:
    """Identity, place, parts and neighbours of a block; damage ends with 1."""
    with opened(small) as store:
        entries = store.entries
        row = int(np.flatnonzero(entries["slot"] == 5)[0])
        block, where = id_at(entries, row), location_at(entries, row)
    code, value = inspect_json("show", small, f"{block.namespace.hex()[:6]}/{block.hash.hex()[:9]}")
    assert code == 0
    assert value["hash"] == block.hash.hex()
    assert (value["segment"], value["slot"]) == (where.segment, 5)
    assert (value["position"], value["stored_before"], value["branches"]) == (5, 5, 3)
    assert len(value["followers"]) == 3
    assert value["model"] == SPEC.model
    assert [part["bytes"] for part in value["parts"]] == list(SPEC.block_layout.part_bytes)
    assert value["fault"] is None
    flip(segment_files(small)[0], offset_of(5) + 5000)
    code, value = inspect_json("show", small, block.hash.hex())
    assert code == 1
    assert "fails its checksum" in value["fault"]


def test_show_lists_what_may_be_meant(made_once: Path, inspect: Run) -> None:
    """A beginning that several blocks share ends with 1 and lists them."""
    code, out, _err = inspect(
        "show", made_once, block_in(made_once, 0).namespace.hex()[:1] * 0 + "0"
    )
    assert code == 1
    with opened(made_once) as store:
        some = [h.hex() for h in store.entries["hash"].tolist() if h.hex().startswith("0")]
    assert sum(each in out for each in some) == len(some) > 1


def test_du_accounts_for_every_byte(small: Path, inspect_json: RunJson) -> None:
    """The parts add up to what the directory occupies; owners to the blocks."""
    from support import disk_bytes

    rewrite(small, remove=[block_in(small, 2)])
    code, value = inspect_json("du", small)
    assert code == 0
    assert value["disk_bytes"] == disk_bytes(small)
    parts = ("live_bytes", "free_bytes", "index_bytes", "other_bytes")
    assert sum(value[name] for name in parts) == value["disk_bytes"]
    assert (value["live_bytes"], value["free_bytes"]) == (23 * SLOT_BYTES, SLOT_BYTES)
    assert sum(owner["slot_bytes"] for owner in value["owners"]) == value["live_bytes"]
    assert inspect_json("du", small, "--tenant", "acme")[1]["owners"][0]["blocks"] == 5


def test_info_has_every_field_of_the_spec(small: Path, inspect: Run, inspect_json: RunJson) -> None:
    """A namespace is shown with all that makes it one."""
    from dataclasses import fields

    _code, value = inspect_json("info", small)
    (namespace,) = value["namespaces"]
    assert namespace["namespace"] == SPEC.namespace.hex()
    assert namespace["blocks"] == value["tiers"]["ssd"]["blocks"] == 24
    assert namespace["tenants"] == 2
    assert set(namespace["spec"]) == {field.name for field in fields(kvtier.KVSpec)}
    assert namespace["spec"]["model"] == SPEC.model
    out = inspect("info", small)[1]
    assert all(f"  {field.name} " in out for field in fields(kvtier.KVSpec))


def test_a_missing_segment_is_said_by_info(small: Path, inspect_json: RunJson) -> None:
    """Health names a file that the index counts on and that is gone."""
    os.unlink(segment_files(small)[0])
    code, value = inspect_json("info", small)
    assert code == 1
    assert "is gone, with 24 blocks" in value["findings"][0]["what"]


def test_hits_are_seen(live: kvtier.Store, inspect_json: RunJson) -> None:
    """What was restored has hits, once the store has written them down."""
    from support import bring_back

    keys = live.keys(prompt(6, 1) + prompt(3, 2))
    bring_back(live, keys)
    live.flush(WAIT_S)
    live.close()
    page = inspect_json("ls", live.path, "--sort", "hits", "--limit", "9")[1]["blocks"]
    assert {block["hash"] for block in page} == {each.hex() for each in keys}
