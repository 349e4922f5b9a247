"""``check``: every record against its checksums and against the index; nothing is repaired.

Beside a writer slots change under the reader's hands. What looks damaged there is looked up and
read anew, and counts only if it is damaged between two answers of the index that agree about it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.errors import FormatError
from kvtier.tiers.base import BlockId, Location
from kvtier.tiers.entries import location_at
from kvtier.tiers.recovery import plan_repairs
from kvtier.tiers.scan import record_offset, segment_name
from kvtier.tiers.segment import HEADER_PAGES_MAX, PAGE_BYTES, read_digests
from kvtier_inspect.opened import opened, read_index, segments_of
from kvtier_inspect.render import ExitCode, console, count, emit, safe, size, span
from kvtier_inspect.slots import SlotReader, batches
from kvtier_inspect.table import rows_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.tiers.entries import Entries
    from kvtier.tiers.recovery import FoundSegment
    from kvtier_inspect.opened import Opened
    from kvtier_inspect.slots import Faults

__all__ = ["Problem", "Report", "Unnamed", "check", "run"]

SECOND_LOOKS: Final = 3
"""How often a block is looked up and read anew before it counts as one that keeps changing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something damaged; ``where`` is a path within the store, the rest as far as it has them."""

    where: str
    what: str
    slot: int | None = None
    block: BlockId | None = None

    def __str__(self) -> str:
        slot = "" if self.slot is None else f", slot {self.slot}"
        block = "" if self.block is None else f", block {self.block}"
        return f"{self.where}{slot}{block}: {self.what}"


@dataclass(frozen=True, slots=True)
class Unnamed:
    """Slots that no entry names. They are free, whatever they hold."""

    records: int = 0
    """Sound records: of blocks that were evicted, or written and never committed."""
    twins: int = 0
    """Those of them whose block is stored in another slot."""
    unsound: int = 0
    """Slots that hold neither a sound record nor nothing: a write that was cut short."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check saw."""

    blocks: int
    """Blocks whose every byte is as it was written."""
    read_bytes: int
    seconds: float
    changed: int
    """Blocks that moved or went while the check ran."""
    unnamed: Unnamed
    problems: tuple[Problem, ...]
    source: str
    io: str


def check(
    store: Opened,
    began: Callable[[int], None] = lambda _nbytes: None,
    advance: Callable[[int], None] = lambda _nbytes: None,
) -> Report:
    """Read everything that the store holds and say what is wrong.

    ``began`` is told how many bytes of slots there are, ``advance`` how many more are done (from
    several threads).
    """
    start = time.perf_counter()
    segments = segments_of(store.directory, store.fs)
    problems = [Problem(each.where, each.what) for each in store.findings]
    faulty = sorted(segments.faults.items())
    problems += [Problem(f"segments/{name}", fault) for name, fault in faulty]
    reader = SlotReader(store.directory.segments, store.fs, advance)
    began(int(store.entries["slot_bytes"].sum(dtype=np.float64)))
    suspects, keep = _suspects(store.entries, segments.found)
    suspects += reader.read(batches(keep))
    damaged, where, changed = suspects, _places(store.entries, suspects), 0
    if suspects and store.source == "index":
        damaged, where, changed = _settle(store, suspects)
    for block, fault in damaged:
        at = where[block]
        problems.append(Problem(f"segments/{segment_name(at.segment)}", fault, at.slot, block))
    return Report(
        len(store.entries) - len(suspects), reader.read_bytes, time.perf_counter() - start, changed,
        _unnamed(store, segments.found), tuple(problems), store.source, reader.io,
    )  # fmt: skip


def _suspects(entries: Entries, segments: Mapping[int, FoundSegment]) -> tuple[Faults, Entries]:
    """Return what cannot be where its entry says, and the entries that may be right."""
    repairs = plan_repairs(entries, segments)
    return list(repairs.remove), repairs.keep


def _places(entries: Entries, suspects: Faults) -> dict[BlockId, Location]:
    rows = rows_at(entries, [block for block, _ in suspects])
    found = zip(suspects, rows, strict=True)
    return {block: location_at(entries, row) for (block, _), row in found if row >= 0}


def _settle(store: Opened, suspects: Faults) -> tuple[Faults, dict[BlockId, Location], int]:
    """Return the damage that is none of the writer's doing, where it is, and how much else went."""
    sure: Faults = []
    where: dict[BlockId, Location] = {}
    suspected = len(suspects)
    unread = 0
    for _ in range(SECOND_LOOKS):
        try:
            before = _now(store, suspects)
            doubtful, keep = _suspects(before, segments_of(store.directory, store.fs).found)
            reader = SlotReader(store.directory.segments, store.fs, lambda _nbytes: None)
            doubtful += reader.read(batches(keep))
            after = _now(store, doubtful)
        except (OSError, FormatError):
            unread += 1
            continue
        steady = _versions(before).items() & _versions(after).items()
        held = {block for block, _ in steady}
        sure += [each for each in doubtful if each[0] in held]
        where |= _places(after, [each for each in doubtful if each[0] in held])
        suspects = [each for each in doubtful if each[0] not in held]
        if not suspects:
            break
    if unread == SECOND_LOOKS:  # nobody says that they moved
        return suspects, _places(store.entries, suspects), 0
    return sure, where, suspected - len(sure)


def _now(store: Opened, suspects: Faults) -> Entries:
    """Return the entries that some blocks have now."""
    if not suspects:
        return store.entries[:0]
    entries = read_index(store.directory, tries=SECOND_LOOKS)
    rows = rows_at(entries, [block for block, _ in suspects])
    return entries[sorted(row for row in rows if row >= 0)]


def _versions(entries: Entries) -> dict[BlockId, tuple[int, int, int]]:
    names = ("segment", "slot", "created_ns")
    columns = [entries[name].tolist() for name in names]
    keys = zip(entries["namespace"].tolist(), entries["hash"].tolist(), strict=True)
    return {BlockId(*key): each for key, each in zip(keys, zip(*columns, strict=True), strict=True)}


def _unnamed(store: Opened, segments: Mapping[int, FoundSegment]) -> Unnamed:
    """Look into the slots that no entry names."""
    entries, fs = store.entries, store.fs
    named: dict[int, set[int]] = {}
    for segment, slot in zip(entries["segment"].tolist(), entries["slot"].tolist(), strict=True):
        named.setdefault(segment, set()).add(slot)
    found: list[BlockId] = []
    unsound = 0
    for segment, each in segments.items():
        free = set(range(each.slots_written)) - each.holes - named.get(segment, set())
        if not free:
            continue
        try:
            fd = fs.open_file(
                store.directory.segments, segment_name(segment), write=False, create=False
            )
        except OSError:
            continue  # the writer gave it up meanwhile, or it is among the problems
        try:
            for slot in sorted(free):
                where = Location(segment, slot, each.header.slot_bytes)
                with suppress(OSError):
                    block = _record_at(fs.read, fd, where)
                    unsound += block is None
                    found += [block] if isinstance(block, BlockId) else []
        finally:
            fs.close(fd)
    twins = sum(row >= 0 for row in rows_at(entries, found))
    return Unnamed(len(found), twins, unsound)


def _record_at(
    read: Callable[[int, Sequence[memoryview], int], int], fd: int, where: Location
) -> BlockId | str | None:
    """Return whose record is in a slot, "" if it is empty, None if it holds something unsound."""
    page = bytearray(PAGE_BYTES)
    count = read(fd, [memoryview(page)], record_offset(where))
    if not any(page):
        return ""
    nbytes = int.from_bytes(page[12:16], "little")
    if PAGE_BYTES < nbytes <= min(where.slot_bytes, HEADER_PAGES_MAX * PAGE_BYTES):
        page = bytearray(nbytes)
        count = read(fd, [memoryview(page)], record_offset(where))
    try:
        return read_digests(page[:count])[0]
    except FormatError:
        return None


def run(path: str, *, as_json: bool) -> int:
    """Check a store and print what is wrong; 1 if anything is."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    out = console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(),
        TransferSpeedColumn(), console=out, transient=True, disable=not out.is_terminal,
    )  # fmt: skip
    with opened(path) as store, bar:
        task = bar.add_task("check", total=None)
        report = check(
            store,
            lambda nbytes: bar.update(task, total=nbytes),
            lambda nbytes: bar.advance(task, nbytes),
        )
    if as_json:
        emit(to_json(report))
    else:
        show(report)
    return ExitCode.PROBLEMS if report.problems else ExitCode.FINE


def to_json(report: Report) -> dict[str, Any]:
    """Return plain values."""
    return {
        "blocks": report.blocks,
        "read_bytes": report.read_bytes,
        "seconds": report.seconds,
        "changed": report.changed,
        "unnamed": {
            "records": report.unnamed.records,
            "twins": report.unnamed.twins,
            "unsound": report.unnamed.unsound,
        },
        "entries_from": report.source,
        "io": report.io,
        "problems": [_problem(each) for each in report.problems],
    }


def _problem(each: Problem) -> dict[str, Any]:
    block = each.block
    return {
        "where": each.where,
        "slot": each.slot,
        "namespace": block.namespace.hex() if block else None,
        "hash": block.hash.hex() if block else None,
        "what": each.what,
    }


def show(report: Report) -> None:
    """Print it for people: all problems, then counts."""
    out = console()
    for problem in report.problems:
        out.print(safe(problem, 1000), style="red")
    rate = size(report.read_bytes / report.seconds) if report.seconds else "0 B"
    out.print(
        f"{count(report.blocks)} blocks are as they were written: {size(report.read_bytes)} read "
        f"({report.io}) in {span(report.seconds)}, {rate}/s"
    )
    if report.changed:
        out.print(f"{count(report.changed)} blocks changed while they were read; not counted")
    unnamed = report.unnamed
    if unnamed.records or unnamed.unsound:
        out.print(
            f"of the slots that no entry names, {count(unnamed.records)} still hold a record "
            f"({count(unnamed.twins)} of blocks stored elsewhere) and {count(unnamed.unsound)} a "
            "part of one"
        )
    many = len(report.problems)
    out.print(f"{count(many)} problem{'' if many == 1 else 's'}", style="red" if many else "green")
