from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import HOST_SLOT_BYTES, SPEC

import kvtier
from kvtier.tiers.memory import (
    MachineMemory,
    MemoryLimit,
    check_host_bytes,
    machine_memory,
    read_text,
)

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def memory(**texts: str) -> MachineMemory:
    """Read a machine whose files are these, by their paths or the last parts of those."""
    known = {"/proc/meminfo": "meminfo", "/proc/self/cgroup": "cgroup"}
    known["/proc/self/mountinfo"] = "mountinfo"
    return machine_memory(lambda path: texts.get(known.get(path, path)))


def least(found: MachineMemory) -> MemoryLimit:
    """Return the limit that binds."""
    return min(found.limits, key=lambda limit: limit.nbytes)


def test_the_machine_is_a_limit() -> None:
    """Without control groups the machine's memory is the limit, and what is free is known."""
    found = memory(meminfo=MEMINFO)
    assert found == MachineMemory((MemoryLimit(16 * GIB, "MemTotal in /proc/meminfo"),), 8 * GIB)


@pytest.mark.parametrize("holder", ["", "/kube", "/kube/pod", "/kube/pod/box"])
def test_every_parent_of_a_group_counts_in_version_2(holder: str) -> None:
    """A limit holds for the groups below: the smallest on the way up is the one."""
    files = {
        f"/sys/fs/cgroup{group}/memory.max": f"{9 * GIB}\n" if group == holder else "max\n"
        for group in ("/kube", "/kube/pod", "/kube/pod/box", "/other", "/kube/sibling", "")
    }
    files["/sys/fs/cgroup/other/memory.max"] = "1\n"
    files["/sys/fs/cgroup/kube/sibling/memory.max"] = "1\n"
    found = memory(meminfo=MEMINFO, cgroup="0::/kube/pod/box\n", mountinfo=V2, **files)
    assert least(found) == MemoryLimit(9 * GIB, f"/sys/fs/cgroup{holder}/memory.max")


@pytest.mark.parametrize("holder", ["", "/docker", "/docker/1f"])
def test_every_parent_of_a_group_counts_in_version_1(holder: str) -> None:
    """Version 1 has another file, another mount, and a number for no limit."""
    files = {
        f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes": str(
            3 * GIB if group == holder else (1 << 63) - 4096
        )
        for group in ("", "/docker", "/docker/1f")
    }
    found = memory(
        meminfo=MEMINFO,
        cgroup="9:name=systemd:/\n4:memory,hugetlb:/docker/1f\n2:cpu:/x\n0::/\n",
        mountinfo="bad line\n36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" + V1,
        **files,
    )
    assert least(found).nbytes == 3 * GIB
    assert holder in least(found).source


@pytest.mark.parametrize(
    ("group", "root", "point", "path"),
    [
        ("/docker/1f", "/docker/1f", "/sys/fs/cgroup", "/sys/fs/cgroup/memory.max"),
        ("/docker/1f/in", "/docker/1f", "/sys/fs/cgroup", "/sys/fs/cgroup/in/memory.max"),
        ("/docker/1fe", "/docker/1f", "/sys/fs/cgroup", "/sys/fs/cgroup/memory.max"),
        ("/../../pod", "/", "/sys/fs/cgroup", "/sys/fs/cgroup/memory.max"),
        ("/", "/", "/sys/fs/cgroup", "/sys/fs/cgroup/memory.max"),
        ("/a b", "/", r"/my\040groups", "/my groups/a b/memory.max"),
        ("/a", "/", "/", "/a/memory.max"),
    ],
)
def test_a_group_is_found_where_it_is_mounted(group: str, root: str, point: str, path: str) -> None:
    """What a container sees of its group is looked for below the mount, not below the path."""
    mountinfo = f"30 23 0:26 {root} {point} rw shared:4 - cgroup2 cgroup2 rw\n"
    files = {path: "4096"}
    found = memory(meminfo=MEMINFO, cgroup=f"0::{group}\n", mountinfo=mountinfo, **files)
    assert least(found) == MemoryLimit(4096, path)


@given(st.text(), st.text(), st.text(), st.text())
def test_any_text_is_tolerated(meminfo: str, cgroup: str, mountinfo: str, limit: str) -> None:
    """Files that say something else are no limit and no error."""
    texts = {"/proc/meminfo": meminfo, "/proc/self/cgroup": cgroup}
    machine_memory(lambda path: texts.get(path, mountinfo if "mountinfo" in path else limit))


def test_a_system_without_these_files_refuses_nothing() -> None:
    """What is not known is no limit."""
    found = machine_memory(lambda _: None)
    assert found == MachineMemory((), None)
    assert check_host_bytes(1 << 60, 0, found) is None


def test_this_machine_is_read() -> None:
    """On a real machine the total is found, and is no less than what is free."""
    found = machine_memory()
    (total,) = [limit.nbytes for limit in found.limits if "MemTotal" in limit.source]
    assert 0 < found.available <= total


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    """The reader of files answers, whatever the path."""
    assert read_text(str(tmp_path / "none")) is None
    assert read_text(str(tmp_path)) is None


# -- what is refused


@given(
    st.lists(st.integers(0, 1 << 40), max_size=4),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
)
def test_refused_is_exactly_what_exceeds_a_limit(
    limits: list[int], host_bytes: int, beside: int
) -> None:
    """More than any limit is refused; the value that the error names is the largest accepted."""
    known = MachineMemory(tuple(MemoryLimit(n, f"file {n}") for n in limits), None)
    fits = all(host_bytes + beside <= limit for limit in limits)
    if fits:
        assert check_host_bytes(host_bytes, beside, known) is None
        return
    with pytest.raises(ValueError, match="host_bytes") as caught:
        check_host_bytes(host_bytes, beside, known)
    text = str(caught.value)
    assert f"{min(limits)} that file {min(limits)} allows" in text
    if min(limits) < beside:
        assert "staging_blocks_max" in text
        return
    most = int(re.search(r"host_bytes=(\d+)", text)[1])
    assert check_host_bytes(most, beside, known) is None
    with pytest.raises(ValueError, match="host_bytes"):
        check_host_bytes(most + 1, beside, known)


def test_what_is_not_free_now_is_a_warning() -> None:
    """Memory that others have is worth a word, not an error: it may be free when it is used."""
    found = memory(meminfo=MEMINFO)
    assert check_host_bytes(8 * GIB, 0, found) is None
    warning = check_host_bytes(8 * GIB, 1, found)
    assert warning is not None
    assert "host_bytes" in warning
    assert "MemAvailable" in warning


@pytest.mark.parametrize("opened", [kvtier.open, kvtier.open_reader], ids=["store", "reader"])
def test_a_store_does_not_take_more_than_there_is(
    opened: Any, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At open, staging counted: the error names the setting and the most that would do."""
    limit = least(machine_memory())
    total = limit.nbytes
    staging = 3 * HOST_SLOT_BYTES
    options = {"staging_blocks_max": 3, "loads_inflight_max": 2}
    kvtier.open(store_path, SPEC, **options).close()
    with pytest.raises(ValueError, match=rf"host_bytes.*host_bytes={total - staging} is the most"):
        opened(store_path, SPEC, host_bytes=total - staging + 1, **options)
    with pytest.raises(ValueError, match="device_bytes"):
        opened(store_path, SPEC, host_bytes=0, device_bytes=total, **options)
    caplog.clear()
    opened(store_path, SPEC, host_bytes=total - staging, **options).close()
    if "MemTotal" in limit.source:  # so much is never free
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "MemAvailable" in caplog.text
