"""`export`: chosen blocks of a store, closed or live, to one file."""

from __future__ import annotations

import hashlib
import mmap
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers.entries import id_at, location_at
from kvtier.tiers.record_io import RecordIo, probe_reads
from kvtier.tiers.segment import decode_header, part_digests
from kvtier_inspect.bundle import (
    BLOCK_BYTES_MAX,
    Block,
    check_record,
    place,
    write_bundle,
)
from kvtier_inspect.opened import opened
from kvtier_inspect.render import ExitCode, console, count, emit, facts, safe
from kvtier_inspect.selecting import chain, matching, namespace_of, row_of
from kvtier_inspect.summary import summary_facts, summary_plain
from kvtier_inspect.table import distinct, rows_of, words
from kvtier_inspect.waiting import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.identity import KVSpec
    from kvtier.tiers.base import BlockId
    from kvtier.tiers.entries import Entries
    from kvtier_inspect.opened import Opened
    from kvtier_inspect.summary import Summary

__all__ = ["Selection", "StoredBlocks", "ordered", "run", "selected"]

SHOWN_MAX: Final = 20
"""Blocks that are named one by one when they could not be exported."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks to export: all that match every field that is given, as text."""

    namespace: str = ""
    tenant: str | None = None
    hashes: tuple[str, ...] = ()
    prefix_of: str = ""


# -- which


def selected(
    entries: Entries, specs: Mapping[bytes, KVSpec], selection: Selection
) -> np.ndarray[Any, Any]:
    """Return the chosen rows; ``ValueError`` if a name fits nothing or too much."""
    namespace = None
    if selection.namespace:
        known, _ = distinct(entries, "namespace")
        namespace = namespace_of(selection.namespace, known, specs)
    digest = None
    if selection.tenant is not None:
        digest = hashlib.sha256(selection.tenant.encode()).digest()
    chosen = matching(entries, namespace=namespace, tenant_digest=digest)
    if selection.hashes:
        named = np.zeros(len(entries), dtype=bool)
        for digits in selection.hashes:
            rows = rows_of(entries, digits)
            if not len(rows):
                raise ValueError(f"no block's hash begins with {digits}")
            named[rows] = True
        chosen &= named
    if selection.prefix_of:
        of = np.flatnonzero(chosen)
        return of[chain(entries[of], row_of(entries[of], selection.prefix_of))]
    return np.flatnonzero(chosen)


def ordered(entries: Entries, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return rows in a bundle's order: namespace, created, position, hash."""
    mine = entries[rows]
    keys: list[np.ndarray[Any, Any]] = [
        *words(mine, "hash").T[::-1], mine["position"], mine["created_ns"],
        *words(mine, "namespace").T[::-1],
    ]  # fmt: skip
    found: np.ndarray[Any, Any] = rows[np.lexsort(keys)]
    return found


# -- export


class StoredBlocks:
    """The chosen blocks of a store as a bundle wants them, verified; ``faults`` says what is not.

    Beside a writer a block may be evicted before it is read: then it is one of the faults.
    """

    def __init__(self, store: Opened, rows: np.ndarray[Any, Any]) -> None:
        self._store = store
        self._rows = rows
        self.faults: dict[BlockId, str] = {}

    def __iter__(self) -> Iterator[Block]:
        """Return each block in turn; its bytes hold until the next one is asked for."""
        entries, directory, fs = self._store.entries, self._store.directory, self._store.fs
        io: RecordIo | None = None
        buffer = memoryview(b"")
        for row in self._rows:
            block, where = id_at(entries, row), location_at(entries, row)
            nbytes = int(entries[row]["payload_bytes"])
            if not 0 < nbytes <= BLOCK_BYTES_MAX:
                self.faults[block] = f"the index says that it has {nbytes} bytes"
                continue
            if buffer.nbytes < nbytes:
                buffer = memoryview(mmap.mmap(-1, nbytes))
            if io is None:
                abilities = probe_reads(directory.segments, fs, where.segment)
                if abilities is None:
                    self.faults[block] = "its segment cannot be read"
                    continue
                io = RecordIo(directory.segments, fs, abilities)
            try:
                header, read = io.read(where, buffer[:nbytes])
                self._check(entries[row], header, buffer[:nbytes], read)
            except (OSError, FormatError) as error:
                self.faults[block] = str(error)
            else:
                yield Block(header, buffer[:nbytes])

    def _check(self, entry: np.void, header: memoryview, payload: memoryview, read: int) -> None:
        if read < header.nbytes + payload.nbytes or not header.nbytes:
            raise FormatError(f"it ends after {read} bytes")
        record, digests = decode_header(header)
        wanted = (
            entry["namespace"].tobytes(), int(entry["created_ns"]), int(entry["position"]),
            entry["hash"].tobytes(),
        )  # fmt: skip
        if place(record) != wanted:
            raise FormatError("its slot holds another record")
        check_record(record, self._store.specs[record.id.namespace])
        if part_digests(record.part_bytes, payload) != digests:
            raise FormatError("a part fails its checksum")


def run(store: str, out: str, selection: Selection, *, as_json: bool) -> int:
    """Write the chosen blocks of a store to a new file."""
    with opened(store) as found:
        rows = selected(found.entries, found.specs, selection)
        names, which = distinct(found.entries[rows], "namespace")
        has_spec = np.array([name in found.specs for name in names], dtype=bool)
        known = has_spec[which] if len(rows) else np.zeros(0, dtype=bool)
        specs = [found.specs[name] for name in names if name in found.specs]
        blocks = StoredBlocks(found, ordered(found.entries, rows[known]))
        total = int(found.entries["payload_bytes"][rows[known]].sum())
        with _new_file(out) as file, progress("exporting", total) as advance:
            summary = write_bundle(file, specs, blocks, advance)
        unknown = int(len(rows) - known.sum())
    if as_json:
        faults = {str(block): fault for block, fault in blocks.faults.items()}
        emit({**summary_plain(summary), "faults": faults, "without_spec": unknown})
    else:
        _print_export(out, summary, blocks.faults, unknown)
    if not summary.blocks or blocks.faults or unknown:
        return ExitCode.PROBLEMS
    return ExitCode.FINE


def _print_export(out: str, summary: Summary, faults: dict[BlockId, str], unknown: int) -> None:
    console().print(facts([("bundle", safe(out)), *summary_facts(summary)]))
    for block, fault in list(faults.items())[:SHOWN_MAX]:
        console(stderr=True).print(safe(f"block {block} was not exported: {fault}", 500))
    if faults:
        console(stderr=True).print(f"{count(len(faults))} blocks were not exported")
    if unknown:
        console(stderr=True).print(
            f"{count(unknown)} blocks were not exported: the spec of their namespace is not there"
        )


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """Yield a file that gets its name once it is complete; KV is private, so its mode is 0600."""
    if os.path.lexists(path):
        raise ValueError(f"{path}: it exists; name a new file")
    temporary = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.fdopen(os.open(temporary, flags, 0o600), "wb")
    except FileExistsError:
        words = "it is another export's, or was left by one that was killed: then remove it"
        raise ValueError(f"{temporary}: {words}") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # as a rename, but never over another file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
