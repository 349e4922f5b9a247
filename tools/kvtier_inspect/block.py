"""``show``: one block: what index and header say, whether its bytes are right, its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import FormatError
from kvtier.tiers.entries import location_at
from kvtier.tiers.scan import record_offset, segment_name
from kvtier.tiers.segment import HEADER_PAGES_MAX, PAGE_BYTES, decode_header, header_tag
from kvtier_inspect.listing import block_json
from kvtier_inspect.opened import opened, plain
from kvtier_inspect.render import ExitCode, ago, columns, console, count, emit, facts, safe, size
from kvtier_inspect.slots import SlotReader, batches
from kvtier_inspect.table import parents, rows_of

if TYPE_CHECKING:
    from kvtier.tiers.base import Location, Record
    from kvtier.tiers.fs import FileSystem
    from kvtier_inspect.opened import Opened

__all__ = ["Block", "block_of", "run"]

CANDIDATES_MAX: Final = 10
"""Blocks that are listed where several are meant."""
FOLLOWERS_MAX: Final = 10
"""Blocks that follow one, of those that are listed."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One stored block. ``record`` is None where its header cannot be read; ``fault`` says why."""

    entry: dict[str, Any]
    model: str
    """The model of its spec, empty if that is lost."""
    block_tokens: int
    record: Record | None
    digests: tuple[int, ...]
    tagged: bool
    """Whether the record carries a tag of an ``integrity_key``."""
    fault: str
    """What is wrong with its bytes; empty if nothing."""
    stored_before: int
    """How many of the blocks right before it are stored without a hole between."""
    followers: tuple[str, ...]
    """The hashes of the stored blocks that follow it, as many as ``FOLLOWERS_MAX``."""


def block_of(store: Opened, row: int) -> Block:
    """Read one block and what surrounds it."""
    entries = store.entries
    above, _wrong = parents(entries)
    follow = (above == row).nonzero()[0].tolist()
    stored_before, at = 0, int(above[row])
    while at >= 0:
        stored_before, at = stored_before + 1, int(above[at])
    reader = SlotReader(store.directory.segments, store.fs, lambda _nbytes: None)
    faults = reader.read(batches(entries[row : row + 1]))
    where = location_at(entries, row)
    record, digests, tagged = _header(store.directory.segments, store.fs, where)
    spec = store.specs.get(entries["namespace"][row].tobytes())
    return Block(
        block_json(entries, row, parent_stored=bool(above[row] >= 0), branches=len(follow)),
        spec.model if spec else "",
        spec.block_tokens if spec else 0,
        record,
        digests,
        tagged,
        faults[0][1] if faults else "",
        stored_before,
        tuple(entries["hash"][each].tobytes().hex() for each in follow[:FOLLOWERS_MAX]),
    )


def _header(
    segments: int, fs: FileSystem, where: Location
) -> tuple[Record | None, tuple[int, ...], bool]:
    """Return the record that a header describes, its parts' checksums, and if it has a tag."""
    try:
        fd = fs.open_file(segments, segment_name(where.segment), write=False, create=False)
    except OSError:
        return None, (), False
    try:
        page = bytearray(PAGE_BYTES)
        fs.read(fd, [memoryview(page)], record_offset(where))
        nbytes = int.from_bytes(page[12:16], "little")
        if not PAGE_BYTES <= nbytes <= HEADER_PAGES_MAX * PAGE_BYTES:
            return None, (), False
        page = bytearray(nbytes)
        nbytes = fs.read(fd, [memoryview(page)], record_offset(where))
        record, digests = decode_header(page[:nbytes])
    except (FormatError, OSError):
        return None, (), False
    finally:
        fs.close(fd)
    return record, tuple(digests), any(header_tag(page))


def run(path: str, block: str, *, as_json: bool) -> int:
    """Print one block; 1 if there is not exactly one, or if it is damaged."""
    with opened(path) as store:
        rows = rows_of(store.entries, block).tolist()
        if len(rows) != 1:
            return _not_one(store, block, rows, as_json=as_json)
        found = block_of(store, rows[0])
    if as_json:
        emit({**to_json(found), "findings": [plain(each) for each in store.findings]})
    else:
        show(found, store.read_ns)
    return ExitCode.PROBLEMS if found.fault else ExitCode.FINE


def _not_one(store: Opened, block: str, rows: list[int], *, as_json: bool) -> int:
    names = ("namespace", "hash")
    found = [
        "/".join(store.entries[name][row].tobytes().hex() for name in names)
        for row in rows[:CANDIDATES_MAX]
    ]
    if as_json:
        emit({"matches": len(rows), "blocks": found})
        return ExitCode.PROBLEMS
    out = console()
    if not rows:
        out.print(f"no stored block begins with {safe(block)}")
    else:
        out.print(f"{count(len(rows))} blocks begin with {safe(block)}; give more digits:")
        for each in found:
            out.print(f"  {each}")
    return ExitCode.PROBLEMS


def to_json(block: Block) -> dict[str, Any]:
    """Return plain values."""
    record = block.record
    return {
        **block.entry,
        "model": block.model,
        "block_tokens": block.block_tokens,
        "fault": block.fault or None,
        "tagged": block.tagged,
        "stored_before": block.stored_before,
        "followers": list(block.followers),
        "parts": [
            {"bytes": nbytes, "xxh3_64": f"{digest:016x}", "shape": [list(each) for each in shape]}
            for nbytes, digest, shape in _parts(block)
        ],
        "header_created_ns": record.created_ns if record else None,
    }


def _parts(block: Block) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    record = block.record
    if record is None:
        return []
    return list(zip(record.part_bytes, block.digests, record.shapes, strict=True))


def show(block: Block, now_ns: int) -> None:
    """Print it for people."""
    out, entry = console(), block.entry
    first = entry["position"] * block.block_tokens
    tokens = f" (tokens {first} to {first + block.block_tokens - 1})" if block.block_tokens else ""
    expiry = entry["expiry_ns"]
    before = f"{block.stored_before} blocks before it are stored without a hole"
    begins = "" if entry["position"] == block.stored_before else ", then one is missing"
    out.print(
        facts(
            [
                ("block", entry["hash"]),
                ("namespace", entry["namespace"]),
                ("model", block.model or "unknown: the namespace's spec is lost"),
                ("tenant digest", entry["tenant"]),
                ("position", f"{entry['position']}{tokens}"),
                ("parent", entry["parent"]),
                ("head", f"{before}{begins}"),
                ("followed by", f"{count(entry['branches'])} stored blocks"),
                *(("", each) for each in block.followers),
                ("size", f"{size(entry['payload_bytes'])} in a slot of {entry['slot_bytes']} B"),
                ("at", f"segments/{entry['segment']:016x}.seg, slot {entry['slot']}"),
                ("made", ago(entry["created_ns"], now_ns)),
                ("last use", ago(entry["last_use_ns"], now_ns)),
                ("hits", count(entry["hits"])),
                ("priority", entry["priority"]),
                ("expires", "never" if not expiry else _until(expiry, now_ns)),
                ("keyed tag", "yes" if block.tagged else "no"),
                ("bytes", block.fault or "are as they were written"),
            ]
        )
    )
    parts = _parts(block)
    if parts:
        rows = (
            (layer, size(nbytes), " ".join(f"{h}x{w}" for h, w in shape), f"{digest:016x}")
            for layer, (nbytes, digest, shape) in enumerate(parts)
        )
        out.print(columns(("layer", "size", "heads x width", "xxh3-64"), rows))


def _until(expiry_ns: int, now_ns: int) -> str:
    if expiry_ns <= now_ns:
        return f"{ago(expiry_ns, now_ns)} ago"
    return f"in {ago(2 * now_ns - expiry_ns, now_ns)}"
