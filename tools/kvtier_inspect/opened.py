"""A store's directory as it is, closed or while an engine writes; nothing in it is changed.

No lock is taken, no reader registered, no file made: what ``opened`` yields is a snapshot. Where
the index cannot be read, the entries come from the records' headers; ``findings`` says why.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers.base import Location
from kvtier.tiers.directory import ReadDirectory
from kvtier.tiers.entries import ENTRY, table
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.index import LmdbIndexReader
from kvtier.tiers.scan import find_segment, scan_headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.identity import KVSpec
    from kvtier.tiers.entries import Entries
    from kvtier.tiers.fs import FileSystem
    from kvtier.tiers.recovery import FoundSegment

__all__ = [
    "KEYS",
    "Finding",
    "Opened",
    "Segments",
    "opened",
    "segments_of",
    "sorted_by_key",
    "writer_of",
]

INDEX_TRIES: Final = 3
"""How often the index of a store that has a writer is read before it counts as unreadable."""
REPLY_S_MAX: Final = 30.0
"""How long the process that reads the index may take."""
KEYS: Final = np.dtype({"names": ["key"], "formats": ["S64"], "itemsize": ENTRY.itemsize})
"""Entries as their keys, which compare as bytes do: all have one length."""
_FLOCK: Final = ["FLOCK", "ADVISORY", "WRITE"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be; ``where`` is a path within the store."""

    where: str
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A store as it was at one moment.

    ``entries`` rise by key; ``source`` says whether they are the index's or were read from the
    records' "headers". ``writer`` is the process that holds LOCK, 0 for none, None if the system
    does not say.
    """

    path: str
    directory: ReadDirectory = field(repr=False)
    fs: FileSystem = field(repr=False)
    writer: int | None
    specs: Mapping[bytes, KVSpec]
    entries: Entries = field(repr=False)
    source: str
    findings: tuple[Finding, ...]
    read_ns: int
    """When that was, ns since 1970."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segment files: those that are sound by id, what is wrong with the others by name."""

    found: Mapping[int, FoundSegment]
    faults: Mapping[str, str]


@contextmanager
def opened(path: str | os.PathLike[str], fs: FileSystem | None = None) -> Iterator[Opened]:
    """Open the store in ``path`` for looking at it.

    Raises ``FormatError`` if it is no store or of a newer format, ``StoreFailed`` if the file
    system refuses; each names the path.
    """
    path = os.path.abspath(os.fspath(path))
    fs = fs or PosixFileSystem()
    directory = ReadDirectory(path, fs)
    try:
        writer = writer_of(path)
        specs, spec_faults = directory.read_specs()
        findings = [Finding(f"specs/{name}", fault) for name, fault in spec_faults.items()]
        entries, source, fault = _entries(directory, fs, writer)
        if fault:
            findings.append(Finding("index", fault))
        read_ns = time.time_ns()
        yield Opened(
            path, directory, fs, writer, specs, entries, source, tuple(findings), read_ns
        )  # fmt: skip
    finally:
        directory.close()


def read_index(directory: ReadDirectory, *, tries: int = 1) -> Entries:
    """Return the index's entries; ``FormatError`` or ``OSError`` if it cannot be read.

    Pages may change under whoever reads them unregistered: beside a writer it is tried again.
    """
    if os.path.lexists(f"{directory.index_path}/rebuilding"):
        raise FormatError("a rebuild of the index was cut short; opening the store does it again")
    index = LmdbIndexReader(directory.index_path, onlooker=True, reply_s_max=REPLY_S_MAX)
    try:
        for attempt in range(tries):
            try:
                return index.snapshot()[1]
            except (FormatError, OSError):
                if attempt == tries - 1:
                    raise
        raise ValueError(f"tries: {tries} is not positive")
    finally:
        index.close()


def _entries(
    directory: ReadDirectory, fs: FileSystem, writer: int | None
) -> tuple[Entries, str, str]:
    """Return the entries, where they are from, and what is wrong with the index."""
    tries = 1 if writer == 0 else INDEX_TRIES
    try:
        return read_index(directory, tries=tries), "index", ""
    except (FormatError, OSError) as error:
        fault = f"{error}; what follows is from the records' headers"
    found = segments_of(directory, fs).found
    rows = scan_headers(
        directory.segments,
        fs,
        (
            Location(segment, slot, each.header.slot_bytes)
            for segment, each in found.items()
            for slot in range(each.slots_written)
            if slot not in each.holes
        ),
    )
    return sorted_by_key(table(rows)), "headers", fault


def sorted_by_key(entries: Entries) -> Entries:
    """Return entries in the order of their keys, as the index has them."""
    keys = np.ascontiguousarray(entries).view(KEYS)["key"]
    return entries[np.argsort(keys, kind="stable")]


def segments_of(directory: ReadDirectory, fs: FileSystem) -> Segments:
    """Look at every segment file."""
    found: dict[int, FoundSegment] = {}
    faults: dict[str, str] = {}
    for name in fs.names(directory.segments):
        stem, dot, ending = name.partition(".")
        if dot + ending == ".new":
            continue  # the probe of a writer
        if dot + ending != ".seg" or len(stem) != 16 or not set(stem) <= set("0123456789abcdef"):
            faults[name] = "is not a segment"
            continue
        try:
            found[int(stem, 16)] = find_segment(directory.segments, fs, int(stem, 16))
        except FormatError as error:
            faults[name] = str(error)
        except FileNotFoundError:
            continue  # the writer gave it up meanwhile
        except OSError as error:
            faults[name] = f"cannot be read: {error.strerror or error}"
    return Segments(found, faults)


def writer_of(path: str) -> int | None:
    """Return the process that holds a store's LOCK, 0 for none, None if the system does not say.

    The lock is not tried: a writer that opens the store just then would find it taken.
    """
    try:
        lock = os.stat(f"{path}/LOCK", follow_symlinks=False)
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = [line.split() for line in file]
    except FileNotFoundError as error:
        return 0 if error.filename != "/proc/locks" else None
    except OSError:
        return None
    # Where a mount has a device number of its own (overlay, btrfs), only the inode is comparable.
    device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:"
    wanted = str(lock.st_ino) if os.major(lock.st_dev) == 0 else f"{device}{lock.st_ino}"
    for line in lines:
        if line[1:4] == _FLOCK and len(line) > 5 and line[5].endswith(wanted):
            return int(line[4])
    return 0


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding for JSON."""
    return {"where": finding.where, "what": finding.what}
