"""``du``: where the bytes of a directory are."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.tiers import keeper
from kvtier.tiers.fs import DISK_UNIT
from kvtier_inspect.opened import opened, plain, segments_of
from kvtier_inspect.render import ExitCode, columns, console, count, emit, safe, size
from kvtier_inspect.table import distinct, matching, namespaces, total

if TYPE_CHECKING:
    from kvtier.tiers.entries import Entries
    from kvtier_inspect.opened import Opened, Segments

__all__ = ["Owner", "Usage", "owners", "run", "usage_of"]


@dataclass(frozen=True, slots=True)
class Owner:
    """What one tenant has in one namespace."""

    namespace: bytes
    tenant_digest: bytes
    model: str
    blocks: int
    payload_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a directory occupies, as ``du`` counts it, and what for."""

    owners: tuple[Owner, ...]
    disk_bytes: int
    live_bytes: int
    """Slots of stored blocks."""
    free_bytes: int
    """Slots that hold nothing and keep their disk, to be reused in place."""
    hole_bytes: int
    """Slots whose disk was given back: no part of ``disk_bytes``."""
    index_bytes: int

    @property
    def other_bytes(self) -> int:
        """The rest: first pages of segments, specs, directories, small files, and rounding."""
        return max(self.disk_bytes - self.live_bytes - self.free_bytes - self.index_bytes, 0)


def owners(store: Opened, entries: Entries) -> tuple[Owner, ...]:
    """Sum up entries by namespace and tenant, the largest first."""
    found = []
    for namespace, rows in namespaces(entries).items():
        digests, which = distinct(entries[rows], "tenant")
        spec = store.specs.get(namespace)
        for number, digest in enumerate(digests):
            mine = entries[rows] if len(digests) == 1 else entries[rows][which == number]
            found.append(
                Owner(
                    namespace,
                    digest,
                    spec.model if spec else "",
                    len(mine),
                    total(mine["payload_bytes"]),
                    total(mine["slot_bytes"]),
                )
            )
    return tuple(sorted(found, key=lambda each: (-each.slot_bytes, each.namespace)))


def usage_of(store: Opened, entries: Entries) -> Usage:
    """Look at every file of a store; ``entries`` are those whose owners are listed."""
    live = total(store.entries["slot_bytes"])
    free, holes = _empty(store.entries, segments_of(store.directory, store.fs))
    return Usage(
        owners(store, entries),
        _disk_bytes(store.path),
        live,
        free,
        holes,
        keeper.disk_bytes(store.directory.index_path),
    )


def _empty(entries: Entries, segments: Segments) -> tuple[int, int]:
    """Return the bytes of free slots that occupy disk, and of those that are holes."""
    names, live = np.unique(entries["segment"], return_counts=True)
    used = dict(zip(names.tolist(), live.tolist(), strict=True))
    free = holes = 0
    for segment, found in segments.found.items():
        slots = found.slots_written - len(found.holes) - used.get(segment, 0)
        free += max(slots, 0) * found.header.slot_bytes
        holes += len(found.holes) * found.header.slot_bytes
    return free, holes


def _disk_bytes(path: str) -> int:
    disk_bytes = 0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with suppress(OSError):  # the writer removed it meanwhile
                disk_bytes += os.lstat(os.path.join(folder, name)).st_blocks * DISK_UNIT
    return disk_bytes


def run(path: str, *, namespace: str, tenant: str | None, as_json: bool) -> int:
    """Print where the bytes are."""
    with opened(path) as store:
        usage = usage_of(store, matching(store.entries, namespace, tenant))
    if as_json:
        emit({**to_json(usage), "findings": [plain(each) for each in store.findings]})
        return ExitCode.FINE
    out = console()
    rows = (
        (
            size(each.slot_bytes),
            count(each.blocks),
            each.namespace.hex()[:16],
            each.tenant_digest.hex()[:16],
            each.model or "(spec lost)",
        )
        for each in usage.owners
    )
    names = ("on disk", "blocks", "namespace", "tenant digest", "model")
    out.print(columns(names, rows, left=names[2:]))
    out.print(
        columns(
            ("on disk", "what"),
            (
                (size(usage.live_bytes), "blocks"),
                (size(usage.free_bytes), "free slots, reused in place"),
                (size(usage.index_bytes), "index"),
                (size(usage.other_bytes), "specs, directories, rounding"),
                (size(usage.disk_bytes), "in all"),
            ),
            left=("what",),
        )
    )
    if usage.hole_bytes:
        out.print(f"{size(usage.hole_bytes)} of the segments are holes, which occupy nothing")
    for finding in store.findings:
        out.print(f"{safe(finding.where)}: {safe(finding.what, 1000)}", style="yellow")
    return ExitCode.FINE


def to_json(usage: Usage) -> dict[str, Any]:
    """Return plain values."""
    return {
        "disk_bytes": usage.disk_bytes,
        "live_bytes": usage.live_bytes,
        "free_bytes": usage.free_bytes,
        "hole_bytes": usage.hole_bytes,
        "index_bytes": usage.index_bytes,
        "other_bytes": usage.other_bytes,
        "owners": [
            {
                "namespace": each.namespace.hex(),
                "tenant": each.tenant_digest.hex(),
                "model": each.model,
                "blocks": each.blocks,
                "payload_bytes": each.payload_bytes,
                "slot_bytes": each.slot_bytes,
            }
            for each in usage.owners
        ],
    }
