"""Removing blocks for good: which ones, and from every tier."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from kvtier.errors import TransferFailed
from kvtier.identity import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.catalog import Catalog
    from kvtier.mover import Mover
    from kvtier.promoter import Promoter
    from kvtier.ssd_writer import SsdWriter
    from kvtier.tiers.base import BlockId

__all__ = ["Purge", "PurgeResult"]

LOOK_S: Final = 0.1
"""How long blocks that are in use may be waited for without looking at them again."""
DESTROY_S_MAX: Final = 600.0
"""How long the destruction of a store's bytes may take."""


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """Blocks removed, bytes destroyed on disk, and matching blocks that were in use to the end.

    ``nbytes`` counts what older, evicted blocks had left behind as well.
    """

    blocks: int
    nbytes: int
    left: int


@dataclass(frozen=True, slots=True)
class Purge:
    """What to purge: blocks that match every field that is not None."""

    namespace: bytes | None
    tenant_digest: bytes | None
    used_before_ns: int | None

    @classmethod
    def of(
        cls,
        namespace: bytes | None,
        tenant: str | None,
        older_than_s: float | None,
        now_ns: int,
    ) -> Self:
        """Return a purge; ``ValueError`` names the argument that is wrong."""
        if namespace is None and tenant is None and older_than_s is None:
            raise ValueError("purge: name a namespace, a tenant or an age (older_than_s)")
        if namespace is not None and len(namespace) != HASH_BYTES:
            raise ValueError(f"namespace: {len(namespace)} bytes, {HASH_BYTES} wanted")
        if older_than_s is not None and not (older_than_s >= 0 and math.isfinite(older_than_s)):
            raise ValueError(f"older_than_s: {older_than_s!r} is not a number of seconds")
        return cls(
            namespace,
            None if tenant is None else hashlib.sha256(tenant.encode()).digest(),
            None if older_than_s is None else now_ns - int(older_than_s * 1e9),
        )

    def run(
        self,
        catalog: Catalog,
        mover: Mover,
        promoter: Promoter,
        writer: SsdWriter,
        timeout: float,
        clock: Callable[[], float],
    ) -> PurgeResult:
        """Remove what matches from every tier, waiting for what is in use."""

        def select() -> list[int]:
            return catalog.select(self.namespace, self.tenant_digest, self.used_before_ns)

        deadline = clock() + timeout
        gone: set[BlockId] = set()
        nbytes = 0
        while True:
            gone |= set(promoter.purge(select))
            gone |= set(mover.purge_host(select))
            try:
                purged = writer.purge(select).result(DESTROY_S_MAX)
            except (OSError, FutureTimeout) as error:
                raise TransferFailed(f"the purge is not complete: {error}") from error
            gone |= set(purged.blocks)
            nbytes += purged.nbytes
            with catalog.changed:
                left = len(select())
                if left and clock() < deadline:
                    # What was let go of before this wait is not announced again: look anew soon.
                    catalog.changed.wait(min(deadline - clock(), LOOK_S))
                    continue
            return PurgeResult(len(gone), nbytes, left)
