"""`repair`: an index made anew from the records' headers, without what is damaged."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import ENTRY, id_at, location_at, table
from kvtier.tiers.record_io import RecordIo, probe
from kvtier.tiers.scan import find_segments, scan_headers, segment_name
from kvtier_inspect.locked import locked, must_exist
from kvtier_inspect.opened import read_index, segments_of, sorted_by_key
from kvtier_inspect.render import ExitCode, console, count, emit, facts, safe, size
from kvtier_inspect.slots import SLOT_BYTES_MAX, UNREAD, SlotReader, batches
from kvtier_inspect.waiting import confirm, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.tiers.directory import ReadDirectory
    from kvtier.tiers.entries import Entries
    from kvtier.tiers.fs import FileSystem
    from kvtier_inspect.locked import LockedStore

__all__ = ["Damaged", "Survey", "repair", "run", "survey"]

SHOWN_MAX: Final = 50
"""Damaged records that are named one by one."""
_KEYS: Final = np.dtype({"names": ["key"], "formats": ["S64"], "itemsize": ENTRY.itemsize})


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record whose header names a block that its bytes are not, or that cannot be read."""

    block: BlockId
    where: Location
    what: str

    @property
    def readable(self) -> bool:
        """Whether the disk gave its bytes: only then is it sure that they are wrong."""
        return not self.what.startswith(UNREAD)


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What a repair would make of a store, read from its segments alone.

    ``keep`` is the new index. ``lost`` counts entries that no sound record stands for, ``found``
    records that the index had not, among them blocks that were evicted and not yet written over.
    """

    index_fault: str
    segment_faults: Mapping[str, str]
    damaged: tuple[Damaged, ...]
    keep: Entries = field(repr=False)
    lost: int
    found: int

    @property
    def sound(self) -> bool:
        """Whether there is nothing to repair."""
        wrong = self.index_fault or self.segment_faults or self.damaged or self.lost
        return not (wrong or self.found)


def survey(
    directory: ReadDirectory,
    fs: FileSystem,
    advance: Callable[[int], None] = lambda _nbytes: None,
) -> Survey:
    """Read every slot, change nothing; ``advance`` is told bytes of slots, from several threads.

    Of two sound headers of one block the newer one counts.
    """
    fault = ""
    old = np.zeros(0, dtype=ENTRY)
    try:
        old = read_index(directory)
    except (FormatError, OSError) as error:
        fault = str(error)
    segments = segments_of(directory, fs)
    rows = scan_headers(
        directory.segments,
        fs,
        (
            Location(segment, slot, each.header.slot_bytes)
            for segment, each in segments.found.items()
            for slot in range(each.slots_written)
            if slot not in each.holes
        ),
    )
    entries = sorted_by_key(table(rows))
    small = entries[entries["slot_bytes"] <= SLOT_BYTES_MAX]  # larger ones are trusted unread
    faults = dict(SlotReader(directory.segments, fs, advance).read(batches(small)))
    places = {id_at(entries, row): row for row in range(len(entries))} if faults else {}
    damaged = tuple(
        Damaged(block, location_at(entries, places[block]), what) for block, what in faults.items()
    )
    sound = np.ones(len(entries), dtype=bool)
    sound[[places[block] for block in faults]] = False
    keep, known = _with_uses(entries[sound], old)
    return Survey(
        fault, segments.faults, damaged, keep, len(old) - known, 0 if fault else len(keep) - known
    )


def _with_uses(entries: Entries, old: Entries) -> tuple[Entries, int]:
    """Return entries with the hits and last uses that an index has, and how many it has."""
    keep = entries.copy()
    if not len(old) or not len(keep):
        return keep, 0
    keys, wanted = old.view(_KEYS)["key"], keep.view(_KEYS)["key"]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    mine = np.flatnonzero(keys[at] == wanted)
    keep["hits"][mine] = old["hits"][at[mine]]
    keep["last_use_ns"][mine] = np.maximum(keep["last_use_ns"][mine], old["last_use_ns"][at[mine]])
    return keep, len(mine)


def repair(store: LockedStore, found: Survey) -> tuple[int, int]:
    """Carry a survey out; returns the blocks that are there then, and the bytes of the store.

    Damaged records are destroyed, so that no later rebuild takes them for sound ones; what could
    not be read is only left out, since a disk may recover; segments
    whose first page is damaged are unlinked, as they are whenever a store is opened.
    """
    segments, fs = store.directory.segments, store.fs
    find_segments(segments, fs)
    io = RecordIo(segments, fs, probe(segments, fs))
    damaged = [each.where for each in found.damaged if each.readable]
    for where in damaged:
        with suppress(OSError):  # a disk that does not write there does not read there either
            io.destroy(where)
    for segment in {where.segment for where in damaged}:
        with suppress(OSError):
            io.sync(segment)
    index = store.open_index()
    try:
        index.rebuild([row.tobytes() for row in found.keep])
    finally:
        index.close()
    with store.open_tier() as tier:
        usage = tier.usage()
        return usage.blocks, usage.used_bytes


# -- the command


def run(path: str, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Look, show, ask, repair; a store that an engine has open is refused."""
    must_exist(path)
    with locked(path) as store:
        with store.reading() as directory:
            segments = segments_of(directory, store.fs).found.values()
            nbytes = sum(each.slots_written * each.header.slot_bytes for each in segments)
            with progress("reading", nbytes) as advance:
                found = survey(directory, store.fs, advance)
        if not as_json:
            _show(path, found)
        done: tuple[int, int] | None = None
        if not found.sound and not dry_run:
            confirm(f"make the index anew with {count(len(found.keep))} blocks?", yes=yes)
            done = repair(store, found)
    if as_json:
        emit({**_plain(found), "repaired": done is not None, "used_bytes": done and done[1]})
    elif done is not None:
        blocks, nbytes = done
        console().print(f"repaired: {count(blocks)} blocks, {size(nbytes)}")
    return ExitCode.PROBLEMS if dry_run and not found.sound else ExitCode.FINE


def _show(path: str, found: Survey) -> None:
    out = console()
    for name, fault in found.segment_faults.items():
        out.print(safe(f"segments/{name}: {fault}", 1000), style="red")
    for each in found.damaged[:SHOWN_MAX]:
        where = f"segments/{segment_name(each.where.segment)}, slot {each.where.slot}"
        out.print(safe(f"{where}, block {each.block}: {each.what}", 1000), style="red")
    if len(found.damaged) > SHOWN_MAX:
        out.print(f"and {count(len(found.damaged) - SHOWN_MAX)} more damaged records")
    out.print(
        facts(
            [
                ("store", safe(path)),
                ("index", safe(found.index_fault, 500) or "can be read"),
                ("damaged records", count(len(found.damaged))),
                ("entries lost", count(found.lost)),
                ("records found", count(found.found)),
                ("blocks kept", count(len(found.keep))),
            ]
        )
    )
    if found.sound:
        out.print("nothing to repair", style="green")


def _plain(found: Survey) -> dict[str, object]:
    return {
        "index_fault": found.index_fault,
        "segment_faults": dict(found.segment_faults),
        "damaged": [
            {
                "namespace": each.block.namespace.hex(),
                "hash": each.block.hash.hex(),
                "segment": segment_name(each.where.segment),
                "slot": each.where.slot,
                "what": each.what,
            }
            for each in found.damaged
        ],
        "lost": found.lost,
        "found": found.found,
        "kept": len(found.keep),
        "sound": found.sound,
    }
