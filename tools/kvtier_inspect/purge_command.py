"""`purge`: remove blocks for good from a store that no engine has open."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.errors import TransferFailed
from kvtier.purge import Purge
from kvtier.tiers.entries import id_at, location_at
from kvtier.tiers.index import REBUILD_COMMIT_ENTRIES
from kvtier_inspect.locked import locked, must_exist
from kvtier_inspect.opened import opened
from kvtier_inspect.render import ExitCode, console, count, emit, facts, safe, size
from kvtier_inspect.selecting import matching, namespace_of, read_age
from kvtier_inspect.table import distinct
from kvtier_inspect.waiting import confirm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.identity import KVSpec
    from kvtier.tiers.entries import Entries
    from kvtier_inspect.locked import LockedStore

__all__ = ["Purged", "Victims", "purge_blocks", "run", "victims"]


@dataclass(frozen=True, slots=True)
class Victims:
    """What a purge would remove: blocks, their bytes on disk, and of which models."""

    blocks: int
    nbytes: int
    models: tuple[str, ...]
    stored: int
    """Blocks that the store holds in all."""


@dataclass(frozen=True, slots=True)
class Purged:
    """Blocks removed, and bytes destroyed, what earlier evictions had left included."""

    blocks: int
    nbytes: int


def victims(entries: Entries, specs: Mapping[bytes, KVSpec], wanted: Purge) -> Victims:
    """Return what would go."""
    mine = entries[_chosen(entries, wanted)]
    names, _ = distinct(mine, "namespace")
    models = sorted(specs[each].model if each in specs else each.hex()[:12] for each in names)
    return Victims(len(mine), int(mine["slot_bytes"].sum()), tuple(models), len(entries))


def purge_blocks(store: LockedStore, wanted: Purge) -> Purged:
    """Remove what matches and destroy its bytes before returning.

    Bytes of blocks that were evicted earlier are destroyed too: a rebuild of the index could
    bring them back. Raises ``TransferFailed`` if the disk refuses; what was removed by then stays
    so, and another purge destroys it.
    """
    with store.open_tier() as tier:
        entries = tier.take_entries()
        rows = np.flatnonzero(_chosen(entries, wanted))
        try:
            for start in range(0, len(rows), REBUILD_COMMIT_ENTRIES):
                some = rows[start : start + REBUILD_COMMIT_ENTRIES]
                tier.drop(
                    [id_at(entries, row) for row in some],
                    [location_at(entries, row) for row in some],
                )
            return Purged(len(rows), tier.destroy())
        except OSError as error:
            path = store.directory.path
            raise TransferFailed(
                f"{path}: the purge is not complete: {error}; repeat it"
            ) from error


def _chosen(entries: Entries, wanted: Purge) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return matching(
        entries,
        namespace=wanted.namespace,
        tenant_digest=wanted.tenant_digest,
        used_before_ns=wanted.used_before_ns,
    )


def run(
    store: str, *, namespace: str, tenant: str | None, older_than: str, yes: bool, as_json: bool
) -> int:
    """Show what would go, ask, and remove it."""
    if not (namespace or older_than) and tenant is None:
        raise ValueError("name a --namespace, a --tenant or an age (--older-than)")
    age_s = read_age("--older-than", older_than) if older_than else None
    with opened(store) as found:
        chosen = None
        if namespace:
            used, _ = distinct(found.entries, "namespace")
            chosen = namespace_of(namespace, used, found.specs)
        wanted = Purge.of(chosen, tenant, age_s, time.time_ns())
        going = victims(found.entries, found.specs, wanted)
    if not as_json:
        console().print(facts(_facts(store, going)))
    # Also without a match: what evicted blocks left in free slots may be what was to be purged.
    confirm(f"destroy {count(going.blocks)} blocks, and what evicted ones left, for good?", yes=yes)
    must_exist(store)
    with locked(store) as held:
        done = purge_blocks(held, wanted)
    if as_json:
        emit({"blocks": done.blocks, "destroyed_bytes": done.nbytes})
    else:
        words = f"{count(done.blocks)} blocks removed, {size(done.nbytes)} destroyed on disk"
        console().print(words)
    return ExitCode.FINE if done.blocks else ExitCode.PROBLEMS


def _facts(store: str, going: Victims) -> list[tuple[str, str]]:
    return [
        ("store", safe(store)),
        (
            "would go",
            f"{count(going.blocks)} of {count(going.stored)} blocks, {size(going.nbytes)}",
        ),
        ("of", safe(", ".join(going.models), 500) or "no model"),
    ]
