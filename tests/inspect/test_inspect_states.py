"""Every looking command on every kind of store, and what it leaves behind there: nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from support import SPEC, WAIT_S, flip, prompt, put, segment_files, variant

import kvtier
from kvtier_inspect.opened import opened, writer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]
    RunJson = Callable[..., tuple[int, dict[str, Any]]]

COMMANDS = ("info", "ls", "tree", "check", "du", "stats")
FINE, PROBLEMS, USAGE, CANNOT_OPEN = range(4)


def contents(path: str | Path) -> dict[str, tuple[Any, ...]]:
    """Return everything that a command could change about a directory but access times.

    What an open store shows while somebody looks is its writer's doing, and so is the time of the
    directory that it is in.
    """
    found = {}
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names, "."):
            each = Path(folder, name)
            if name.startswith("live.msgpack"):
                continue
            status = each.lstat()
            data = b"" if each.is_dir() else each.read_bytes()
            found[str(each)] = (status.st_mode, status.st_size, status.st_mtime_ns, data)
    if Path(path, "live.msgpack").exists():
        del found[str(Path(path))]
    return found


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_sound_store_is_fine_and_stays_as_it_is(
    command: str, as_json: tuple[str, ...], small: Path, inspect: Run
) -> None:
    """A command on a closed store ends with 0 and changes no byte, size, mode or time."""
    before = contents(small)
    code, out, err = inspect(command, small, *as_json)
    assert (code, err) == (FINE, "")
    assert out
    assert contents(small) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_store_is_fine(command: str, tmp_path: Path, inspect_json: RunJson) -> None:
    """A store without blocks is one, and no error."""
    kvtier.open(tmp_path / "store", SPEC, host_bytes=0, ssd_bytes="8MiB").close()
    code, value = inspect_json(command, tmp_path / "store")
    assert code == FINE
    assert value.get("total", 0) == value.get("blocks", 0) == 0 or command in ("ls", "tree")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_live_store_is_fine(command: str, live: kvtier.Store, inspect: Run) -> None:
    """A command beside a writer sees what is stored, changes nothing, and the writer goes on."""
    inspect("info", live.path)
    wait_for(Path(live.path, "live.msgpack").exists)
    before = contents(live.path)
    code, _out, err = inspect(command, live.path)
    assert (code, err) == (FINE, "")
    assert contents(live.path) == before
    assert put(live, live.keys(prompt(2, 77))).stored == 2
    live.flush(WAIT_S)
    with opened(live.path) as store:
        assert len(store.entries) == 26


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir() or (path / "letter.txt").write_text("no store"),
        lambda path: path.write_text("a file"),
        lambda path: None,
        lambda path: path.mkdir(),
    ],
    ids=["something else", "a file", "nothing", "an empty directory"],
)
def test_no_store_is_a_message(
    command: str, make: Callable[[Path], object], tmp_path: Path, inspect: Run
) -> None:
    """What is no store ends with 3 and one line that names the path; nothing is made there."""
    path = tmp_path / "there"
    make(path)
    before = contents(tmp_path)
    code, out, err = inspect(command, path)
    assert (code, out) == (CANNOT_OPEN, "")
    assert err.startswith(f"kvtier-inspect: {path}: ")
    assert err.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_format_is_a_message(command: str, small: Path, inspect: Run) -> None:
    """A store of another format ends with 3 and names both numbers."""
    (small / "FORMAT").write_text("kvtier store, format 7\n")
    code, out, err = inspect(command, small)
    assert (code, out) == (CANNOT_OPEN, "")
    assert "format 7" in err
    assert "reads 1" in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", ["magic", "cut", "garbage", "gone", "empty", "rebuilding"])
def test_a_damaged_index_is_said_and_made_up_for(
    command: str, damage: str, small: Path, inspect_json: RunJson
) -> None:
    """Without a readable index every block is found by its header, and a finding says why."""
    data = small / "index" / "data.mdb"
    if damage == "gone":
        shutil.rmtree(small / "index")
    elif damage == "rebuilding":
        (small / "index" / "rebuilding").touch()
    else:
        kept = data.read_bytes()
        data.write_bytes(
            {"cut": kept[:5000], "garbage": b"\xff" * len(kept), "empty": b""}.get(
                damage, bytes(8192) + kept[8192:]
            )
        )
    code, value = inspect_json(command, small)
    assert code == (PROBLEMS if command in ("info", "check") else FINE)
    faults = value["findings"] if "findings" in value else value["problems"]
    assert [fault["where"] for fault in faults] == ["index"]
    blocks = value.get("total") or value.get("blocks") or value.get("tiers", {}).get("ssd")
    wanted = {"tree": 6, "du": None, "info": None}.get(command, 24)
    if wanted:
        assert blocks == wanted
    elif command == "info":
        assert value["entries_from"] == "headers"
        assert value["tiers"]["ssd"]["blocks"] == 24
    else:
        assert sum(owner["blocks"] for owner in value["owners"]) == 24


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_segment_is_no_traceback(command: str, small: Path, inspect: Run) -> None:
    """A segment whose first page is garbage is a problem for `check` and nothing for the others."""
    Path(segment_files(small)[0]).write_bytes(os.urandom(30_000))
    code, _out, err = inspect(command, small)
    assert (code, err) == (PROBLEMS if command == "check" else FINE, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_spec_is_no_traceback(command: str, small: Path, inspect: Run) -> None:
    """A spec that cannot be read is a finding; its blocks are listed all the same."""
    (spec,) = (small / "specs").iterdir()
    flip(spec, 20)
    code, _out, err = inspect(command, small)
    assert (code, err) == (PROBLEMS if command in ("info", "check") else FINE, "")


@pytest.mark.skipif(not shutil.which("setpriv") and os.geteuid() == 0, reason="root may all")
@pytest.mark.parametrize("command", COMMANDS)
def test_whoever_may_only_read_can_look(command: str, small: Path) -> None:
    """A user whom the modes let read but not write sees everything; one whom they keep out, 3."""
    for folder, _, names in os.walk(small):
        for name in names:
            os.chmod(os.path.join(folder, name), 0o400)
        os.chmod(folder, 0o500)
    try:
        done = run_without_privileges(command, small)
        assert (done.returncode, done.stderr) == (FINE, "")
        os.chmod(small, 0o000)
        done = run_without_privileges(command, small)
        assert (done.returncode, done.stdout) == (CANNOT_OPEN, "")
        assert done.stderr == (
            f"kvtier-inspect: {small}: cannot be opened for reading: Permission denied; "
            "a writer (kvtier.open) makes the store\n"
        )
    finally:
        for folder, _, _names in os.walk(small):
            os.chmod(folder, 0o700)
        os.chmod(small, 0o700)


def run_without_privileges(command: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody whom file modes bind."""
    words = [sys.executable, "-m", "kvtier_inspect.cli", command, str(path)]
    if os.geteuid() == 0:
        caps = "-dac_override,-dac_read_search"
        words = ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}", *words]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_mount_can_be_looked_at(command: str, small: Path) -> None:
    """Where nothing can be written nothing needs to be."""
    where, python = shlex.quote(str(small)), shlex.quote(sys.executable)
    program = f"{python} -m kvtier_inspect.cli {command} {where}"
    mount = f"mount --bind {where} {where} && mount -o remount,ro,bind {where}"
    script = f"({mount}) 2>/dev/null || exit 77; touch {where}/x 2>/dev/null && exit 78; {program}"
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    done = subprocess.run(
        [shutil.which("unshare") or "", "-m", "sh", "-c", script],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mounts here")
    assert (done.returncode, done.stderr) == (FINE, "")


def test_a_writer_is_seen_without_its_lock(live: kvtier.Store, inspect_json: RunJson) -> None:
    """The process that holds LOCK is named while it does, and the lock is never tried."""
    if writer_of(live.path) is None:
        pytest.skip("no /proc/locks")
    assert inspect_json("info", live.path)[1]["writer_pid"] == os.getpid()
    live.close()
    assert inspect_json("info", live.path)[1]["writer_pid"] == 0


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def test_a_writer_shows_its_host_tier_and_budget(live: kvtier.Store, inspect_json: RunJson) -> None:
    """While a store is open, looking at it is answered with what only its writer knows."""
    seen: list[Any] = []

    def shown() -> bool:
        seen.append(inspect_json("info", live.path)[1]["writer_shows"])
        return seen[-1] is not None

    wait_for(shown)
    assert (seen[-1]["host_blocks"], seen[-1]["ssd_limit_bytes"]) == (24, 8 << 20)
    live.close()
    assert inspect_json("info", live.path)[1]["writer_shows"] is None


def test_what_a_writer_shows_is_not_taken_at_its_word(small: Path, inspect: Run) -> None:
    """A made-up live.msgpack is no traceback, whatever is in it."""
    for shown in (b"", b"\xc1", msgpack.packb({"tiers": 7}), msgpack.packb([1, 2])):
        packed = msgpack.packb([1, time.time_ns(), shown])
        (small / "live.msgpack").write_bytes(packed)
        assert inspect("info", small, "--json")[0] == FINE


def test_names_from_a_store_are_never_obeyed(tmp_path: Path, inspect: Run) -> None:
    """A model's name with escapes, markup and HTML is shown as text, in JSON harmless in a page."""
    name = "\x1b[31m\x9bJ[bold]<script>\u202e:smile:\r\n" + "long" * 200
    spec = variant(model=name)
    kvtier.open(tmp_path / "store", spec, host_bytes=0, ssd_bytes="8MiB").close()
    for command in COMMANDS:
        for as_json in ((), ("--json",)):
            _code, out, _err = inspect(command, tmp_path / "store", *as_json)
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
            assert "<script>" not in out or not as_json
            if command == "info" and not as_json:
                assert "\\x1b[31m\\x9bJ[bold]<script>\\u202e:smile:\\x0d\\x0a" in out.replace(
                    "\n", ""
                ).replace(" ", "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], USAGE),
        (["info"], USAGE),
        (["ls", "STORE", "--limit", "0"], USAGE),
        (["ls", "STORE", "--sort", "nonsense"], USAGE),
        (["tree", "STORE", "--sort", "nonsense"], USAGE),
        (["ls", "STORE", "--namespace", "xyz"], USAGE),
        (["show", "STORE", "not hex"], USAGE),
        (["show", "STORE", "ffffffffffffffff"], PROBLEMS),
        (["--help"], FINE),
        *(([command, "--help"], FINE) for command in (*COMMANDS, "show")),
    ],
)
def test_exit_codes(arguments: list[str], code: int, small: Path, inspect: Run) -> None:
    """Wrong usage is 2 with a hint, a block that is not there is 1, help is 0 with examples."""
    given = [str(small) if word == "STORE" else word for word in arguments]
    was, out, err = inspect(*given)
    assert was == code
    assert bool(err) == (code == USAGE)
    if len(arguments) == 2 and "--help" in arguments:
        assert "Examples:" in out
        assert "Exit codes: 0 fine" in out


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [(["--help"], ("torch", "numpy", "rich")), (["info", "STORE"], ("torch", "asyncio.events"))],
)
def test_what_is_not_needed_is_not_imported(
    arguments: list[str], absent: tuple[str, ...], small: Path
) -> None:
    """Help costs no numpy and no rich, looking no torch."""
    code = (
        "import sys\nfrom kvtier_inspect import cli\nassert cli.run(sys.argv[2:]) == 0\n"
        "sys.exit(' '.join(set(sys.argv[1].split()) & set(sys.modules)))"
    )
    absent = tuple(name for name in absent if name != "asyncio.events")
    given = [str(small) if word == "STORE" else word for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", code, " ".join(absent), *given],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr.strip() == ""
