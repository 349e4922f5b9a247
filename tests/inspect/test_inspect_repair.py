"""`repair`: after it the index and the records agree, and what is there is right."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    SLOT_BYTES,
    SPEC,
    assert_sound,
    bring_back,
    flip,
    prompt_keys,
    put,
    random_bytes,
    segment_files,
)

import kvtier
from kvtier.tiers.entries import id_at, location_at
from kvtier.tiers.fs import PosixFileSystem
from kvtier_inspect import cli
from kvtier_inspect.check import check
from kvtier_inspect.locked import locked
from kvtier_inspect.opened import opened
from kvtier_inspect.repair import repair, survey

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 8
PAGE = 4096


def made(path: str) -> str:
    """Make a closed store of eight blocks."""
    with contextlib.closing(kvtier.open(path, SPEC, ssd_bytes="8MiB")) as store:
        put(store, prompt_keys(BLOCKS))
    return path


def repaired(path: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Run `repair --yes --json`, see that `check` finds nothing after it, return what it said."""
    assert cli.run(["repair", path, "--yes", "--json", *options]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    with opened(path) as store:
        report = check(store)
        assert report.problems == ()
        assert store.source == "index"
        assert report.blocks == value["kept"] == len(store.entries)
    return value


def restored(path: str) -> int:
    """Open the store as an engine, restore the prompt, and return how many blocks were loaded."""
    with contextlib.closing(kvtier.open(path, SPEC, ssd_bytes="8MiB")) as store:
        loaded = bring_back(store, prompt_keys(BLOCKS)).loaded
        assert_sound(store)
        return loaded


def content(path: str) -> dict[str, bytes]:
    """Return every file of a store."""
    files = (each for each in Path(path).rglob("*") if each.is_file())
    return {str(each): each.read_bytes() for each in files}


def test_a_sound_store_is_left_alone(store_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to repair, nothing is asked, and no file changes."""
    path = made(store_path)
    before = content(path)
    assert cli.run(["repair", path]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert content(path) == before


def test_damaged_records_go_for_good(store_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A record that fails its checksums is a miss, also after the index is lost."""
    path = made(store_path)
    flip(segment_files(path)[0], PAGE + 2 * SLOT_BYTES + PAGE + 50)
    value = repaired(path, capsys)
    assert (len(value["damaged"]), value["lost"], value["found"], value["kept"]) == (1, 1, 0, 7)
    os.unlink(f"{path}/index/data.mdb")
    value = repaired(path, capsys)
    assert (value["damaged"], value["kept"]) == ([], 7)
    assert restored(path) == 7


@pytest.mark.parametrize("how", ["gone", "junk", "empty", "cut", "unfinished", "folder"])
def test_an_index_is_made_anew(
    store_path: str, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """However the index is damaged, every block comes back from its header."""
    path = made(store_path)
    index = Path(path) / "index"
    match how:
        case "gone":
            (index / "data.mdb").unlink()
        case "junk":
            (index / "data.mdb").write_bytes(random_bytes(1, 40_000))
        case "empty":
            (index / "data.mdb").write_bytes(b"")
        case "cut":
            os.truncate(index / "data.mdb", 5000)
        case "unfinished":
            (index / "rebuilding").touch()
        case "folder":
            for each in index.iterdir():
                each.unlink()
            index.rmdir()
    value = repaired(path, capsys)
    assert value["index_fault"]
    assert (value["kept"], value["damaged"]) == (BLOCKS, [])
    assert restored(path) == BLOCKS


def test_hits_and_last_uses_survive(store_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An index that can be read gives what the headers do not have."""
    path = made(store_path)
    restored(path)
    flip(segment_files(path)[0], PAGE + PAGE + 50)
    with opened(path) as store:
        before = {row["hash"].tobytes(): row.tobytes() for row in store.entries}
    repaired(path, capsys)
    with opened(path) as store:
        after = {row["hash"].tobytes(): row.tobytes() for row in store.entries}
        assert store.entries["hits"].min() > 0
    assert after.items() < before.items()


def test_segments_that_cannot_be_used(store_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A segment whose first page is damaged, and one that is gone, take their entries with them."""
    path = store_path
    with contextlib.closing(
        kvtier.open(path, SPEC, ssd_bytes="8MiB", segment_bytes_max=4 * SLOT_BYTES)
    ) as store:
        put(store, prompt_keys(BLOCKS))
    first, second, *others = segment_files(path)
    assert others
    flip(first, 20)
    os.unlink(second)
    value = repaired(path, capsys)
    assert list(value["segment_faults"]) == [os.path.basename(first)]
    assert value["lost"] == BLOCKS - value["kept"] > 0
    assert not os.path.exists(first)
    assert restored(path) == value["kept"]


def test_evicted_records_are_found_again(
    store_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sound record that the index did not name any more is right, and so a hit."""
    path = made(store_path)
    with locked(path) as held, held.open_tier() as tier:
        entries = tier.take_entries()
        tier.drop([id_at(entries, 0)], [location_at(entries, 0)])
    value = repaired(path, capsys)
    assert (value["found"], value["lost"], value["kept"]) == (1, 0, BLOCKS)
    assert restored(path) == BLOCKS


class DeafDisk(PosixFileSystem):
    """A disk that gives headers and the first slot, and errors for anything else."""

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read, or fail."""
        nbytes = sum(each.nbytes for each in into)
        if nbytes > SLOT_BYTES or (nbytes > PAGE and offset > PAGE):
            raise OSError(errno.EIO, "deaf")
        return super().read(fd, into, offset)


def test_what_cannot_be_read_is_not_destroyed(
    store_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fails today takes blocks out of the index, and gives them back another day."""
    path = made(store_path)
    with locked(path) as held:
        with held.reading() as directory:
            found = survey(directory, DeafDisk())
        assert len(found.damaged) == BLOCKS - 1
        assert not any(each.readable for each in found.damaged)
        assert repair(held, found)[0] == 1
    value = repaired(path, capsys)
    assert value["kept"] == BLOCKS
    assert restored(path) == BLOCKS


def test_dry_run_changes_nothing(store_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what would be done, and the code says that there is something."""
    path = made(store_path)
    flip(segment_files(path)[0], PAGE + PAGE + 50)
    before = content(path)
    assert cli.run(["repair", path, "--dry-run"]) == 1
    shown = capsys.readouterr().out
    assert "slot 0" in shown
    assert content(path) == before


def test_it_asks_first(
    store_path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a yes nothing changes, and the code is 4."""
    path = made(store_path)
    flip(segment_files(path)[0], PAGE + PAGE + 50)
    before = content(path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert cli.run(["repair", path]) == 4
    assert "aborted" in capfd.readouterr().err
    assert content(path) == before


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_is_damaged_what_is_kept_is_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes changed anywhere, in the index or in records: a repair ends with a sound store."""
    path = made(str(tmp_path_factory.mktemp("damaged") / "store"))
    files = [f"{path}/index/data.mdb", *segment_files(path)]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(files) - 1))
        file, size = files[place], (1 << 14, 1 << 16)[place]
        edges = st.sampled_from([8, 16, 24, 40, PAGE + 20, PAGE + 200, PAGE + 300, 2 * PAGE])
        flip(file, data.draw(edges | st.integers(0, size - 1)), data.draw(st.integers(1, 255)))
    assert cli.run(["repair", path, "--yes", "--json"]) == 0
    with opened(path) as store:
        assert check(store).problems == ()
        kept = len(store.entries)
    assert restored(path) == kept
