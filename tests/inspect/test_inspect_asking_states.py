"""The commands that ask or move on every kind of store: code and words, never a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import SPEC, flip, segment_files

import kvtier

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]

FINE, PROBLEMS, USAGE, CANNOT_OPEN, REFUSED = range(5)
READING = ("export", "plan", "diff")
WRITING = ("import", "purge", "repair")


def words(command: str, store: object, folder: Path) -> list[str]:
    """Return a command with everything that it needs, on a store."""
    given = str(store)
    return {
        "export": ["export", given, str(folder / "out.kvtb")],
        "plan": ["plan", "--tokens", "99", "--store", given, "--prefill-rate", "9"],
        "diff": ["diff", given, given],
        "import": ["import", given, str(folder / "in.kvtb")],
        "purge": ["purge", given, "--older-than", "0s", "--yes"],
        "repair": ["repair", given, "--yes"],
    }[command]


@pytest.fixture
def folder(small: Path, tmp_path: Path, inspect: Run) -> Path:
    """Return a folder beside the store with a bundle of all its blocks."""
    assert inspect("export", small, tmp_path / "in.kvtb")[0] == FINE
    return tmp_path


def contents(path: Path) -> dict[str, tuple[Any, ...]]:
    """Return every file of a store, with its times."""
    files = [each for each in path.rglob("*") if each.is_file()]
    return {str(each): (each.stat().st_mtime_ns, each.read_bytes()) for each in files}


@pytest.mark.parametrize("command", READING)
def test_a_store_that_is_read_stays_as_it_is(
    command: str, small: Path, folder: Path, inspect: Run
) -> None:
    """No byte and no time of a file changes."""
    before = contents(small)
    assert inspect(*words(command, small, folder))[::2] == (FINE, "")
    assert contents(small) == before


@pytest.mark.parametrize(
    ("command", "code"),
    [("export", PROBLEMS), ("plan", FINE), ("diff", FINE), ("import", FINE), ("purge", PROBLEMS),
     ("repair", FINE)],
)  # fmt: skip
def test_an_empty_store(command: str, code: int, folder: Path, inspect: Run) -> None:
    """It is a store; where blocks were asked for, there are none to be had."""
    kvtier.open(folder / "store", SPEC, host_bytes=0, ssd_bytes="8MiB").close()
    assert inspect(*words(command, folder / "store", folder))[::2] == (code, "")


@pytest.mark.parametrize("command", READING)
def test_a_live_store(command: str, live: kvtier.Store, folder: Path, inspect: Run) -> None:
    """Beside a writer it can be read."""
    assert inspect(*words(command, live.path, folder))[::2] == (FINE, "")


@pytest.mark.parametrize("command", WRITING)
def test_a_live_store_is_not_written(
    command: str, live: kvtier.Store, folder: Path, inspect: Run
) -> None:
    """Beside a writer it cannot be written, and the message says why."""
    code, _out, err = inspect(*words(command, live.path, folder))
    assert code == REFUSED
    assert "another writer" in err


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_a_newer_format(command: str, small: Path, folder: Path, inspect: Run) -> None:
    """A store of another format is left alone, and both numbers are named."""
    (small / "FORMAT").write_text("kvtier store, format 7\n")
    before = contents(small)
    code, _out, err = inspect(*words(command, small, folder))
    assert code == CANNOT_OPEN
    assert "format 7" in err
    assert "reads 1" in err
    assert contents(small) == before


@pytest.mark.parametrize("command", [*READING, *WRITING])
@pytest.mark.parametrize("kind", ["something else", "a file", "nothing"])
def test_no_store(command: str, kind: str, folder: Path, inspect: Run) -> None:
    """What is no store is a message that names it; only an import makes one where nothing is."""
    path = folder / "there"
    if kind == "something else":
        path.mkdir()
        (path / "letter.txt").write_text("no store")
    elif kind == "a file":
        path.write_text("no spec either")
    code, _out, err = inspect(*words(command, path, folder))
    if (command, kind) == ("import", "nothing"):
        assert code == FINE
        return
    assert code == (USAGE if (command, kind) == ("diff", "a file") else CANNOT_OPEN)
    assert str(path) in err
    assert not (folder / "out.kvtb").exists()
    assert sorted(os.listdir(path) if path.is_dir() else []) == (
        ["letter.txt"] if kind == "something else" else []
    )


@pytest.mark.parametrize("command", [*READING, *WRITING])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "gone"])
def test_a_damaged_index(
    command: str, damage: str, small: Path, folder: Path, inspect: Run
) -> None:
    """Every command finds the blocks by their headers, or mends the index on its way."""
    data = small / "index" / "data.mdb"
    if damage == "gone":
        shutil.rmtree(small / "index")
    else:
        kept = data.read_bytes()
        changed = {"cut": kept[:5000], "garbage": b"\xff" * len(kept), "empty": b""}
        data.write_bytes(changed[damage])
    assert inspect(*words(command, small, folder))[0] == FINE


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_a_damaged_segment(command: str, small: Path, folder: Path, inspect: Run) -> None:
    """What it held is gone: an export says so, an import brings it back, a purge has no block."""
    Path(segment_files(small)[0]).write_bytes(os.urandom(30_000))
    code, _out, _err = inspect(*words(command, small, folder))
    assert code == (PROBLEMS if command in ("export", "purge") else FINE)
    if command == "import":
        assert inspect("check", small)[0] == FINE


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_a_damaged_spec(command: str, small: Path, folder: Path, inspect: Run) -> None:
    """Blocks that nobody can tell the meaning of are not exported; there is nothing to compare."""
    (spec,) = (small / "specs").iterdir()
    flip(spec, 20)
    codes = {"export": PROBLEMS, "plan": USAGE, "diff": USAGE}
    assert inspect(*words(command, small, folder))[0] == codes.get(command, FINE)


@pytest.mark.skipif(not shutil.which("setpriv") and os.geteuid() == 0, reason="root may all")
@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_no_permission(command: str, small: Path, folder: Path) -> None:
    """A user whom the modes keep out gets a message that names the store."""
    program = [sys.executable, "-m", "kvtier_inspect.cli", *words(command, small, folder)]
    if os.geteuid() == 0:
        caps = "-dac_override,-dac_read_search"
        program = ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}", *program]
    os.chmod(small, 0o000)
    try:
        done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)
    finally:
        os.chmod(small, 0o700)
    assert (done.returncode, done.stdout) == (CANNOT_OPEN, "")
    assert str(small) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [*READING, *WRITING, "size"])
def test_no_command_needs_torch(command: str, small: Path, folder: Path) -> None:
    """Blocks are moved as bytes."""
    code = (
        "import sys\nfrom kvtier_inspect import cli\nassert cli.run(sys.argv[1:]) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    asked = ["size", "Llama-2-7B", "--tokens", "9"]
    given = asked if command == "size" else words(command, small, folder)
    done = subprocess.run(
        [sys.executable, "-c", code, *given],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [*READING, *WRITING, "size"])
def test_help_has_examples_and_codes(command: str, inspect: Run) -> None:
    """Every command says how it is called, what its exit codes mean, and whether it writes."""
    code, out, err = inspect(command, "--help")
    assert (code, err) == (FINE, "")
    assert f"kvtier-inspect {command}" in out
    assert "Exit codes: 0 fine" in out
    assert ("CHANGES THE STORE" in out) == (command in WRITING)
