from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from support import SPEC, FaultyFileSystem, bring_back, prompt_keys, put, run_python, segment_files

import kvtier
from kvtier import FormatError, StoreFailed, StoreLocked
from kvtier.tiers.directory import StoreDirectory
from kvtier.tiers.fs import PosixFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Open = Any


def enter(path: str | Path, fs: Any = None) -> StoreDirectory:
    """Open a store directory."""
    return StoreDirectory(str(path), fs or PosixFileSystem())


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Return everything about a folder's content that opening a store could change."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        content = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        )
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, content)
    return found


def test_a_new_directory_becomes_a_store(tmp_path: Path) -> None:
    """A path that does not exist yet is made, with the format's files."""
    directory = enter(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "FORMAT").read_bytes() == b"kvtier store, format 1\n"
    assert {"FORMAT", "LOCK", "segments", "specs"} <= set(os.listdir(tmp_path / "a" / "b"))
    directory.close()


def test_an_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    """An empty folder is taken."""
    enter(tmp_path).close()
    assert (tmp_path / "FORMAT").exists()


def test_a_store_is_opened_again(tmp_path: Path) -> None:
    """Opening, closing and opening again changes nothing."""
    enter(tmp_path).close()
    before = snapshot(tmp_path)
    enter(tmp_path).close()
    assert snapshot(tmp_path) == before


def test_close_twice(tmp_path: Path) -> None:
    """Closing is idempotent and gives the lock back."""
    directory = enter(tmp_path)
    directory.close()
    directory.close()
    enter(tmp_path).close()


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    """A folder that is not empty and not a store is refused by name, and nothing in it changes."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "segments").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(FormatError, match=str(tmp_path)):
        kvtier.open(tmp_path, SPEC)
    assert snapshot(tmp_path) == before


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    """A file as path, or above it, is refused by name and stays as it is."""
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    for wrong in (path, path / "below"):
        with pytest.raises(FormatError, match=str(wrong)):
            kvtier.open(wrong, SPEC)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("version", [2, 17, 999_999_999])
def test_a_newer_format_names_both_versions(tmp_path: Path, version: int) -> None:
    """A store of another format is refused, naming its version and the one read here."""
    enter(tmp_path).close()
    (tmp_path / "FORMAT").write_bytes(b"kvtier store, format %d\n" % version)
    before = snapshot(tmp_path)
    with pytest.raises(FormatError, match=rf"format {version};.* 1$") as info:
        kvtier.open(tmp_path, SPEC)
    assert str(tmp_path) in str(info.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"kvtier store, format 1",
        b"kvtier store, format 1\n\n",
        b"kvtier store, format -1\n",
        b"kvtier store, format 10000000000\n",
        b"\xff\xfe\x00",
        b"kvtier store, format 1\n" + b"x" * 60,
        bytes(1 << 20),
    ],
)
def test_a_damaged_format_file_is_refused(tmp_path: Path, line: bytes) -> None:
    """Whatever else FORMAT says, the store is refused by name and nothing changes."""
    enter(tmp_path).close()
    (tmp_path / "FORMAT").write_bytes(line)
    before = snapshot(tmp_path)
    with pytest.raises((FormatError, StoreFailed), match=str(tmp_path)):
        kvtier.open(tmp_path, SPEC)
    assert snapshot(tmp_path) == before


def test_a_second_writer_in_this_process_is_refused(tmp_path: Path) -> None:
    """Two writers in one process cannot hold one directory; the first goes on."""
    with kvtier.open(tmp_path / "s", SPEC, ssd_bytes="4MiB", host_bytes=0) as store:
        with pytest.raises(StoreLocked, match=str(tmp_path / "s")):
            kvtier.open(tmp_path / "s", SPEC)
        put(store, prompt_keys(2))
        assert bring_back(store, prompt_keys(2)).loaded == 2
    kvtier.open(tmp_path / "s", SPEC).close()


def test_a_second_writer_in_another_process_is_refused(tmp_path: Path) -> None:
    """Two processes cannot hold one directory."""
    code = """
import sys, kvtier
from support import SPEC
try:
    kvtier.open(sys.argv[1], SPEC)
except kvtier.StoreLocked as error:
    print(error)
"""
    with kvtier.open(tmp_path / "s", SPEC):
        assert str(tmp_path / "s") in run_python(code, str(tmp_path / "s")).stdout


def test_a_dead_writers_lock_is_no_lock(tmp_path: Path) -> None:
    """A writer that was killed leaves a directory that opens."""
    code = "import sys, os, kvtier; from support import SPEC; kvtier.open(sys.argv[1], SPEC); "
    run_python(code + "os.kill(os.getpid(), 9)", str(tmp_path / "s"), check=False)
    assert (tmp_path / "s" / "LOCK").exists()
    kvtier.open(tmp_path / "s", SPEC).close()


@pytest.mark.parametrize(
    "error", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO, errno.EDQUOT]
)
@pytest.mark.parametrize("operation", ["open_directory", "create", "write", "sync", "rename"])
def test_what_the_file_system_refuses_is_named(tmp_path: Path, operation: str, error: int) -> None:
    """Whatever the file system refuses while a store is made: StoreFailed, the path, the reason."""
    path = tmp_path / "s"
    fs = FaultyFileSystem()
    fs.fail(operation, error)
    with pytest.raises(StoreFailed, match=os.strerror(error)) as info:
        kvtier.open(path, SPEC, fs=fs)
    assert str(path) in str(info.value)
    # Whatever was left behind is no obstacle, although the error is still held here.
    kvtier.open(path, SPEC).close()


def test_no_failed_open_leaks(tmp_path: Path) -> None:
    """Whichever operation of an open fails, no descriptor, lock or index stays open."""
    operations = ("open_directory", "open_file", "create", "write", "sync", "rename", "names")
    counter = FaultyFileSystem()
    kvtier.open(tmp_path / "count", SPEC, fs=counter).close()
    kvtier.open(tmp_path / "warm", SPEC).close()
    before = len(os.listdir("/proc/self/fd"))
    held = []
    for operation in operations:
        for nth in range(1, counter.counts[operation] + 1):
            path = tmp_path / f"{operation}-{nth}"
            fs = FaultyFileSystem()
            fs.fail(operation, errno.EIO, nth=nth)
            try:
                kvtier.open(path, SPEC, fs=fs).close()
            except StoreFailed as error:
                held.append(error)
            kvtier.open(path, SPEC).close()
    assert held
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("leftovers", [("LOCK",), ("FORMAT.new",), ("LOCK", "FORMAT.new")])
def test_what_a_dead_maker_left_is_no_obstacle(tmp_path: Path, leftovers: tuple[str, ...]) -> None:
    """A process that died while it made the store leaves a directory that becomes one."""
    for name in leftovers:
        (tmp_path / name).write_bytes(b"kvt" if name == "FORMAT.new" else b"")
    enter(tmp_path).close()
    assert (tmp_path / "FORMAT").read_bytes() == b"kvtier store, format 1\n"


def test_leftover_small_files_are_overwritten(tmp_path: Path) -> None:
    """A small file that was not renamed in time is ignored, and the next one replaces it."""
    kvtier.open(tmp_path, SPEC).close()
    name = f"{SPEC.namespace.hex()}.msgpack"
    (tmp_path / "specs" / name).unlink()
    (tmp_path / "specs" / f"{name}.new").write_bytes(b"half")
    (tmp_path / "costs.msgpack.new").write_bytes(b"half")
    kvtier.open(tmp_path, SPEC).close()
    assert (tmp_path / "specs" / name).read_bytes() == SPEC.to_bytes()
    assert not (tmp_path / "costs.msgpack.new").exists()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600 whatever the umask, parents that were made included."""
    old = os.umask(0)
    try:
        with kvtier.open(tmp_path / "a" / "s", SPEC, ssd_bytes="4MiB") as store:
            put(store, prompt_keys(2))
            store.flush()
    finally:
        os.umask(old)
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path.name}: {mode:o}"


@pytest.mark.parametrize("name", ["LOCK", "FORMAT"])
def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    """A symlink where the store's own file should be is not followed."""
    path = tmp_path / "s"
    kvtier.open(path, SPEC).close()
    target = tmp_path / "target"
    target.write_bytes((path / name).read_bytes())
    (path / name).unlink()
    (path / name).symlink_to(target)
    before = target.read_bytes()
    with pytest.raises((StoreFailed, FormatError), match=str(path)):
        kvtier.open(path, SPEC)
    assert target.read_bytes() == before


def test_a_dangling_lock_link_makes_no_file(tmp_path: Path) -> None:
    """A planted link does not make the store create a file elsewhere."""
    path = tmp_path / "s"
    path.mkdir()
    (path / "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((StoreFailed, FormatError), match=str(path)):
        kvtier.open(path, SPEC)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["segments", "specs", "index"])
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    """A symlink where the store's own folder should be is not followed."""
    path = tmp_path / "s"
    kvtier.open(path, SPEC).close()
    os.rename(path / name, tmp_path / "moved")
    (path / name).symlink_to(tmp_path / "moved")
    before = snapshot(tmp_path / "moved")
    with pytest.raises((StoreFailed, FormatError), match=str(path)):
        kvtier.open(path, SPEC)
    assert snapshot(tmp_path / "moved") == before


def test_a_linked_segment_is_a_miss(
    open_store: Callable[..., kvtier.Store], tmp_path: Path
) -> None:
    """A symlink in place of a segment is not read, and what it leads to is not written."""
    store = open_store(host_bytes=0)
    keys = prompt_keys(4)
    put(store, keys)
    store.close()
    (path,) = segment_files(store.path)
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    before = (tmp_path / "elsewhere").read_bytes()
    store = open_store(host_bytes=0)
    assert store.lookup(keys).stored == 0
    assert bring_back(store, keys).recomputed == [0, 1, 2, 3]
    put(store, prompt_keys(4, seed=1))
    store.flush()
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_specs_are_kept_by_their_namespace(tmp_path: Path) -> None:
    """Every spec that the directory has held is there, durable before its first record."""
    other = kvtier.KVSpec(
        model="test/other", weights="sha256:1", dtype="int8", layers=1, kv_heads=1, head_dim=8
    )
    fs = FaultyFileSystem()
    for spec in (SPEC, other):
        kvtier.open(tmp_path, spec, fs=fs).close()
    directory = enter(tmp_path)
    assert directory.read_specs() == {SPEC.namespace: SPEC, other.namespace: other}
    (tmp_path / "specs" / "junk.msgpack").write_bytes(b"junk")
    assert len(directory.read_specs()) == 2
    directory.close()


def test_a_damaged_spec_is_written_anew(tmp_path: Path) -> None:
    """A spec's file is what it must be whenever its store is open, whatever it was before."""
    kvtier.open(tmp_path, SPEC).close()
    file = tmp_path / "specs" / f"{SPEC.namespace.hex()}.msgpack"
    for damaged in (b"", b"junk", SPEC.to_bytes()[:-1], bytes(2 << 20)):
        file.write_bytes(damaged)
        kvtier.open(tmp_path, SPEC).close()
        assert file.read_bytes() == SPEC.to_bytes()


def test_the_store_is_opened_by_any_kind_of_path(tmp_path: Path) -> None:
    """A relative path and a path through a link to the store's folder work."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    kvtier.open(tmp_path / "link", SPEC).close()
    assert (tmp_path / "real" / "FORMAT").exists()
