"""`import`: a bundle into a store, once every byte of it was verified."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from kvtier.config import BYTES_MAX, KEY_BYTES, parse_bytes
from kvtier.tiers.entries import id_at
from kvtier_inspect.bundle import BundleReader
from kvtier_inspect.locked import locked
from kvtier_inspect.render import ExitCode, console, count, emit, facts, safe
from kvtier_inspect.summary import summary_facts, summary_plain
from kvtier_inspect.waiting import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtier.tiers.ssd import SsdTier
    from kvtier_inspect.bundle import Contents
    from kvtier_inspect.locked import LockedStore
    from kvtier_inspect.summary import Summary

__all__ = ["Imported", "import_blocks", "read_key", "run"]

BATCH_BLOCKS_MAX: Final = 32
BATCH_BYTES_MAX: Final = 64 << 20
"""Blocks that are made durable at once, and the memory they may take unless one takes more."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Blocks written, blocks that were there already, and blocks that were not written.

    ``dropped`` found no room within the budget, or the disk refused them.
    """

    stored: int = 0
    present: int = 0
    dropped: int = 0


def import_blocks(
    store: LockedStore, reader: BundleReader, summary: Summary, *, limit_bytes: int, key: bytes
) -> Imported:
    """Write the blocks of a verified bundle that the store lacks; nothing is evicted for them.

    The directory may grow up to ``limit_bytes``; what is over that already stays.
    """
    with store.open_tier() as tier:  # as large as it is, so that nothing is given up
        used = tier.usage().used_bytes
    with store.open_tier(limit_bytes=max(limit_bytes, used), integrity_key=key) as tier:
        for spec in summary.specs.values():
            store.directory.keep_spec(spec)
        entries = tier.take_entries()
        present = {id_at(entries, row) for row in range(len(entries))}
        found = stored = wanted = 0
        for batch in _batches(reader.blocks()):
            new = [block for block in batch if block.record.id not in present]
            found += len(batch) - len(new)
            wanted += len(new)
            stored += _write(tier, new)
            present.update(block.record.id for block in new)
        return Imported(stored, found, wanted - stored)


def _write(tier: SsdTier, blocks: list[Contents]) -> int:
    records = [block.record for block in blocks]
    payloads = [memoryview(block.payload or b"") for block in blocks]
    return sum(where is not None for where in tier.write(records, payloads))


def _batches(blocks: Iterable[Contents]) -> Iterator[list[Contents]]:
    batch: list[Contents] = []
    nbytes = 0
    for block in blocks:
        batch.append(block)
        nbytes += block.record.payload_bytes
        if len(batch) >= BATCH_BLOCKS_MAX or nbytes >= BATCH_BYTES_MAX:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def read_key(path: str) -> bytes:
    """Return the integrity key in a file, its bytes as they are; empty without a path."""
    if not path:
        return b""
    with open(path, "rb") as file:
        key = file.read(KEY_BYTES.stop)
    if len(key) not in KEY_BYTES:
        raise ValueError(
            f"{path}: an integrity_key is {KEY_BYTES.start} to {KEY_BYTES.stop - 1} bytes"
        )
    return key


def run(
    store: str, bundle: str, *, key_file: str, ssd_bytes: str, dry_run: bool, as_json: bool
) -> int:
    """Verify a bundle, all of it, and then write what a store does not have yet."""
    limit = parse_bytes("--ssd-bytes", ssd_bytes) if ssd_bytes else BYTES_MAX
    key = read_key(key_file)
    done = Imported()
    with BundleReader(bundle, key) as reader:
        with progress("verifying", reader.content_bytes) as advance:
            summary = reader.verify(advance)
        if not dry_run:
            with locked(store) as held:
                done = import_blocks(held, reader, summary, limit_bytes=limit, key=key)
    if as_json:
        emit({**summary_plain(summary), "dry_run": dry_run, **asdict(done)})
    else:
        console().print(facts([("bundle", safe(bundle)), *summary_facts(summary)]))
        console().print(_outcome(done, dry_run=dry_run))
    return ExitCode.PROBLEMS if done.dropped else ExitCode.FINE


def _outcome(done: Imported, *, dry_run: bool) -> str:
    if dry_run:
        return "the bundle is sound; nothing was written"
    dropped = f"; {count(done.dropped)} found no room, or the disk refused" if done.dropped else ""
    return f"{count(done.stored)} blocks stored, {count(done.present)} were there{dropped}"
