"""Real file systems that are full, read-only, lack something, or go away under a live store."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import (
    SPEC,
    WAIT_S,
    bring_back,
    disk_bytes,
    expected,
    prompt,
    prompt_keys,
    put,
    segment_files,
    variant,
)

import kvtier
from kvtier.tiers.segment import PAGE_BYTES
from kvtier.tiers.slabs import SEGMENT_METADATA_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCKS = 16
PROMPTS_MAX = 200
"""What the file systems here hold is less: a bound for filling them, never reached."""
IMAGE_BYTES = 24 << 20
FREE_BYTES = 3 << 20
"""What the ballast leaves free: a few dozen blocks and the index."""


def run_tool(name: str, *arguments: str) -> None:
    """Run a system tool; ``OSError`` if it is missing, ``CalledProcessError`` if it refuses."""
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(name)
    subprocess.run([path, *arguments], check=True, capture_output=True, text=True)


def mounted(*arguments: str, on: Path) -> None:
    """Mount, or skip the test with the reason why that is not possible here."""
    try:
        run_tool("mount", *arguments, str(on))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount: {getattr(error, 'stderr', '') or error}")


@contextlib.contextmanager
def unmounted_after(folder: Path) -> Iterator[Path]:
    """Make a mount point; whatever is mounted there at the end is unmounted."""
    folder.mkdir()
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            run_tool("umount", "--lazy", str(folder))


def mount_tmpfs(folder: Path) -> None:
    """Mount a file system in memory."""
    mounted("-t", "tmpfs", "-o", f"size={IMAGE_BYTES},mode=0700", "tmpfs", on=folder)


def mount_ext4(folder: Path) -> None:
    """Mount an image with ext4 that becomes read-only at its first error."""
    image = folder.with_name("image")
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        run_tool("mkfs.ext4", "-q", "-m", "0", "-e", "remount-ro", str(image))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make an ext4 image: {error}")
    mounted("-o", "loop", str(image), on=folder)


def mount_ramfs(folder: Path) -> None:
    """Mount a file system that neither punches holes nor does direct I/O."""
    mounted("-t", "ramfs", "-o", "mode=0700", "ramfs", on=folder)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount the file system that the test is parametrised with."""
    mount: Callable[[Path], None] = request.param
    with unmounted_after(tmp_path / "disk") as folder:
        mount(folder)
        yield folder


def of(*mounts: Callable[[Path], None]) -> pytest.MarkDecorator:
    """Run a test on each of these file systems."""
    names = [mount.__name__.removeprefix("mount_") for mount in mounts]
    return pytest.mark.parametrize("disk", mounts, ids=names, indirect=True)


def open_on(disk: Path, **own: Any) -> kvtier.Store:
    """Open a store whose budget is larger than the disk."""
    return kvtier.open(str(disk / "store"), SPEC, **{"host_bytes": 0, "ssd_bytes": "1GiB", **own})


def ballast(disk: Path, free_bytes: int = FREE_BYTES) -> Path:
    """Fill the disk but for ``free_bytes``."""
    heavy = disk / "ballast"
    with heavy.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := os.statvfs(disk)).f_bavail * room.f_frsize > free_bytes:
            file.write(bytes(PAGE_BYTES))
    return heavy


def put_until_dropped(store: kvtier.Store, first: int = 0) -> list[int]:
    """Store prompts until blocks are dropped; returns the seeds of those that were stored whole."""
    whole = []
    for seed in range(first, PROMPTS_MAX):
        result = put(store, prompt_keys(BLOCKS, seed))
        assert result.stored + result.dropped == BLOCKS
        if result.dropped:
            return whole
        whole.append(seed)
    pytest.fail(f"{PROMPTS_MAX} prompts found room")


def counted(store: kvtier.Store, name: str) -> int:
    """Return a counter."""
    return int(store.stats()["counters"].get(name, 0))


@of(mount_tmpfs, mount_ext4)
def test_a_full_disk_drops_blocks_until_there_is_room_again(disk: Path) -> None:
    """ENOSPC: puts are dropped and counted, restores go on, and freed space is used again."""
    store = open_on(disk)
    heavy = ballast(disk)
    whole = put_until_dropped(store)
    assert whole
    assert counted(store, "put_blocks_dropped") > 0
    assert counted(store, "ssd_write_errors") > 0
    for _ in range(3):
        put(store, prompt_keys(BLOCKS, 900))
    assert all(bring_back(store, prompt_keys(BLOCKS, seed)).loaded == BLOCKS for seed in whole)
    heavy.unlink()
    assert put(store, prompt_keys(BLOCKS, 1000)).dropped == 0
    assert bring_back(store, prompt_keys(BLOCKS, 1000)).loaded == BLOCKS
    assert store.check() == []
    store.close()
    with open_on(disk) as again:
        for seed in (*whole, 1000):
            assert bring_back(again, prompt_keys(BLOCKS, seed)).loaded == BLOCKS
        assert again.check() == []


@of(mount_tmpfs, mount_ext4)
def test_a_full_disk_opens(disk: Path) -> None:
    """A store on a disk that is full to the last byte opens, restores, and closes."""
    with open_on(disk) as store:
        put(store, prompt_keys(BLOCKS))
    ballast(disk, 0)
    with open_on(disk) as store:
        assert bring_back(store, prompt_keys(BLOCKS)).loaded == BLOCKS
        put_until_dropped(store, first=1)
        assert store.check() == []


@of(mount_ext4)
def test_holes_are_punched_and_direct_io_is_used(disk: Path) -> None:
    """On ext4 the page cache is bypassed, and a purge gives the disk back to others at once."""
    with open_on(disk) as store:
        assert store.stats()["tiers"]["ssd"]["io"] == "direct"
        for seed in range(8):
            keys = kvtier.BlockKeys.of(SPEC, prompt(BLOCKS, seed), tenant=str(seed % 2))
            assert put(store, keys).stored == BLOCKS
        before = disk_bytes(f"{store.path}/segments")
        purged = store.purge(tenant="1")
        assert purged.blocks == 4 * BLOCKS
        freed = before - disk_bytes(f"{store.path}/segments")
        # Holes cost the file system a few extents.
        assert purged.nbytes - SEGMENT_METADATA_BYTES <= freed <= purged.nbytes
        for seed in range(8):
            keys = kvtier.BlockKeys.of(SPEC, prompt(BLOCKS, seed), tenant=str(seed % 2))
            assert bring_back(store, keys).loaded == (0 if seed % 2 else BLOCKS)


@of(mount_ramfs)
def test_without_punching_and_direct_io(disk: Path) -> None:
    """Where neither is supported the store works, and a purge overwrites what it removes."""
    keys = [kvtier.BlockKeys.of(SPEC, prompt(4, seed), tenant=str(seed)) for seed in range(2)]
    with open_on(disk) as store:
        assert store.stats()["tiers"]["ssd"]["io"] == "buffered"
        for each in keys:
            assert put(store, each).stored == 4
        assert store.purge(tenant="1").blocks == 4
        stored = b"".join(Path(name).read_bytes() for name in segment_files(store.path))
        assert all(expected(keys[0], block)[:64] in stored for block in range(4))
        assert not any(expected(keys[1], block)[:64] in stored for block in range(4))
        assert bring_back(store, keys[0]).loaded == 4
        assert bring_back(store, keys[1]).loaded == 0


@of(mount_ramfs, mount_ext4)
def test_slots_of_another_size_get_the_disk(disk: Path) -> None:
    """When blocks of another size want the whole budget, they get it, with and without holes.

    In the order of their use: a policy that weighs a byte's worth may decline some of the larger.
    """
    other = variant(layers=5)
    limit = {"ssd_bytes": "4MiB", "segment_bytes_max": 128 << 10, "policy": "lru"}
    with open_on(disk, **limit) as store:
        for seed in range(20):
            put(store, prompt_keys(BLOCKS, seed))
    store = kvtier.open(str(disk / "store"), other, host_bytes=0, **limit)
    with store:
        for seed in range(20):
            result = put(store, prompt_keys(BLOCKS, seed, spec=other))
            assert result.stored == BLOCKS, f"prompt {seed}: {result}"
            assert disk_bytes(store.path) <= 4 << 20
        # Not a few slots that they take from each other, but what older blocks held.
        for seed in range(16, 20):
            assert bring_back(store, prompt_keys(BLOCKS, seed, spec=other)).loaded == BLOCKS
        assert store.check() == []


def make_read_only(disk: Path) -> None:
    """Let ext4 find an error, after which it is read-only."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    (device,) = (line[0] for line in mounts if line[1] == str(disk))
    try:
        trigger = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
        trigger.write_text("1")
    except OSError as error:
        pytest.skip(f"cannot make ext4 fail: {error}")
    with pytest.raises(OSError, match="Read-only"):
        (disk / "probe").touch()


@of(mount_ext4)
def test_a_disk_that_becomes_read_only(disk: Path) -> None:
    """EROFS under a live store: restores go on, puts are dropped and counted, close comes back."""
    store = open_on(disk)
    for seed in range(3):
        put(store, prompt_keys(BLOCKS, seed))
    make_read_only(disk)
    for seed in range(3, 6):
        assert put(store, prompt_keys(BLOCKS, seed)).dropped == BLOCKS
    assert counted(store, "ssd_write_errors") > 0
    for seed in range(3):
        assert bring_back(store, prompt_keys(BLOCKS, seed)).loaded == BLOCKS
    with pytest.raises(kvtier.TransferFailed):
        store.purge(tenant="")
    for seed in range(3):
        bring_back(store, prompt_keys(BLOCKS, seed))
    assert store.check() == []
    store.close()
    with pytest.raises(kvtier.StoreFailed, match="store"):
        open_on(disk)


def test_a_directory_that_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without its directory a live store misses and drops, says so, and closes."""
    store = open_on(tmp_path)
    keys = prompt_keys(BLOCKS)
    put(store, keys)
    shutil.rmtree(store.path)
    for _ in range(2):
        assert bring_back(store, keys).loaded == 0
    for seed in range(1, 4):
        put(store, prompt_keys(BLOCKS, seed))
        bring_back(store, prompt_keys(BLOCKS, seed))
    store.flush(WAIT_S)
    assert store.check() == []
    assert any("could not be read" in record.getMessage() for record in caplog.records)
    store.close()
    with open_on(tmp_path) as again:
        assert put(again, keys).stored == BLOCKS
        assert bring_back(again, keys).loaded == BLOCKS


def test_segments_that_are_removed(tmp_path: Path) -> None:
    """Segment files that disappear cost their blocks; what is stored next is stored."""
    with open_on(tmp_path) as store:
        keys = prompt_keys(BLOCKS)
        put(store, keys)
        for name in segment_files(store.path):
            Path(name).unlink()
        assert bring_back(store, keys).loaded == 0
        for seed in range(1, 6):
            put(store, prompt_keys(BLOCKS, seed))
        assert bring_back(store, prompt_keys(BLOCKS, 5)).loaded == BLOCKS
        assert store.check() == []
