"""How much memory this machine, and the control groups that the process is in, can give.

Pure functions over the texts of /proc and /sys: ``read`` is the seam. Without them (another system
than Linux) nothing is known and nothing refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MachineMemory", "MemoryLimit", "check_host_bytes", "machine_memory", "read_text"]

TEXT_BYTES_MAX: Final = 4 << 20
"""What is read of one file; a list of mounts may be long."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The bytes that something allows, and what it is: a field or a file."""

    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What a process may take at most, by every limit that holds for it, and what is free now.

    ``available`` is None where that is not known.
    """

    limits: tuple[MemoryLimit, ...]
    available: int | None


def read_text(path: str) -> str | None:
    """Return a file's text, or None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(TEXT_BYTES_MAX)
    except OSError:
        return None


def machine_memory(read: Callable[[str], str | None] = read_text) -> MachineMemory:
    """Return the memory limits of this process: the machine's, and those of its control groups.

    A control group's limit holds for the groups below it, so every group up to the root counts, of
    both versions (memory.max, memory.limit_in_bytes).
    """
    info = read("/proc/meminfo") or ""
    total, available = _meminfo(info, "MemTotal"), _meminfo(info, "MemAvailable")
    limits = [] if total is None else [MemoryLimit(total, "MemTotal in /proc/meminfo")]
    for path in _limit_files(read("/proc/self/cgroup") or "", read("/proc/self/mountinfo") or ""):
        text = (read(path) or "").strip()
        if text.isascii() and text.isdigit():  # "max" is no limit
            limits.append(MemoryLimit(int(text), path))
    return MachineMemory(tuple(limits), available)


def check_host_bytes(host_bytes: int, beside_bytes: int, memory: MachineMemory) -> str | None:
    """Raise ``ValueError`` if there is less memory than is asked for.

    ``beside_bytes`` is what the store takes besides. Returns a warning if there is enough in all,
    but less is free now; None otherwise.
    """
    wanted = host_bytes + beside_bytes
    least = min(memory.limits, key=lambda limit: limit.nbytes, default=None)
    if least is not None and wanted > least.nbytes:
        room = least.nbytes - beside_bytes
        would_do = (
            f"host_bytes={room} is the most that would do"
            if room >= 0
            else "even host_bytes=0 is too much: lower staging_blocks_max or device_bytes"
        )
        raise ValueError(
            f"host_bytes: {host_bytes} bytes and {beside_bytes} beside them (staging, device_bytes "
            f"on the CPU) exceed the {least.nbytes} that {least.source} allows; {would_do}"
        )
    if memory.available is not None and wanted > memory.available:
        return (
            f"host_bytes: {host_bytes} bytes and {beside_bytes} beside them are more than the "
            f"{memory.available} that are free now (MemAvailable in /proc/meminfo); filling them "
            "may take memory from others, or end this process"
        )
    return None


def _meminfo(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _limit_files(groups: str, mounts: str) -> Iterator[str]:
    """Yield the files that hold the limits of the groups a process is in, and of their parents."""
    v1, v2 = _groups(groups)
    for mount in mounts.splitlines():
        # Fields 4 and 5 are the mount's root and where it is; the type comes after the dash.
        fields, _, rest = mount.partition(" - ")
        where, what = fields.split(" "), rest.split(" ")
        if len(where) < 5 or len(what) < 3:  # noqa: PLR2004 - the fields that are read
            continue
        root, point = _unescaped(where[3]), _unescaped(where[4])
        if what[0] == "cgroup2" and v2 is not None:
            yield from _upwards(point, root, v2, "memory.max")
        elif what[0] == "cgroup" and v1 is not None and "memory" in what[-1].split(","):
            yield from _upwards(point, root, v1, "memory.limit_in_bytes")


def _groups(text: str) -> tuple[str | None, str | None]:
    """Return the process's memory group of version 1, and its group of version 2."""
    v1 = v2 = None
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    return v1, v2


def _upwards(point: str, root: str, group: str, name: str) -> Iterator[str]:
    """Yield a group's file and those of all groups above it, as far as they are mounted.

    ``root`` is the group at the mount point. A group that is not below it, as in a container that
    sees only its own, is taken for the one at the mount point.
    """
    base = root.rstrip("/")
    inside = group.removeprefix(base) if f"{group}/".startswith(f"{base}/") else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        yield "/".join([point.rstrip("/"), *parts[:depth], name])


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
