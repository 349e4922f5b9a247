"""What was learned about costs, kept in the store for the next process.

Two kinds of number are kept apart, since they age apart: what a device needs to recompute under a
spec, and what a tier's link delivers on this host.
"""

from __future__ import annotations

import logging
import platform
import time
from typing import TYPE_CHECKING, Any, Final

import msgpack

from kvtier.cost import Profiler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plan import Tier
    from kvtier.tiers.directory import ReadDirectory, StoreDirectory
    from kvtier.tiers.throttle import LinkThrottle

__all__ = ["CostBook", "cost_records"]

log = logging.getLogger(__name__)

KINDS: Final = ("compute", "links")
RECORDS_MAX: Final = 64
"""Records of each kind that are kept; the oldest go."""


class CostBook:
    """The cost file of one store directory. Losing it loses only a calibration."""

    def __init__(
        self,
        directory: StoreDirectory | ReadDirectory,
        namespace: bytes,
        device: str,
        links: Mapping[Tier, LinkThrottle],
    ) -> None:
        self._directory = directory
        self.age_s: dict[str, float | None] = {"compute": None, "links": None}
        """How old what was on file is, in seconds; None where nothing was."""
        host = platform.node()
        throttled = ",".join(f"{tier}={link!r}" for tier, link in sorted(links.items()))
        self._keys = {
            "compute": f"{namespace.hex()}|{device}|{host}",
            "links": f"{host}|{throttled}",
        }

    def read(self) -> Profiler:
        """Return a profiler that knows what is on file; a fresh one if that cannot be used."""
        kept = self._read()
        record = {kind: kept[kind].get(key) for kind, key in self._keys.items()}
        for kind, value in record.items():
            saved = value.get("saved_s") if isinstance(value, dict) else None
            self.age_s[kind] = max(time.time() - saved, 0.0) if isinstance(saved, float) else None
        try:
            return Profiler.from_record(record)
        except ValueError as error:
            log.warning("%s: costs.msgpack: %s; starting afresh", self._directory.path, error)
            return Profiler()

    def write(self, profiler: Profiler, directory: StoreDirectory) -> None:
        """Keep what ``profiler`` learned; a disk that refuses is only logged."""
        kept = self._read()
        for kind, value in profiler.to_record().items():
            records = kept[kind]
            records.pop(self._keys[kind], None)
            records[self._keys[kind]] = {**value, "saved_s": time.time()}
            kept[kind] = dict(list(records.items())[-RECORDS_MAX:])
        try:
            directory.write_costs(msgpack.packb(kept))
        except OSError as error:
            log.warning("%s: costs.msgpack not written: %s", self._directory.path, error)

    def _read(self) -> dict[str, dict[str, Any]]:
        return cost_records(self._directory.read_costs())


def cost_records(data: bytes) -> dict[str, dict[str, Any]]:
    """Return the records of a cost file by kind, "compute" and "links"; what is damaged is empty.

    The key of a compute record is "namespace|device|host", that of a links record "host|throttles".
    """
    try:
        kept = msgpack.unpackb(data) if data else {}
    except (ValueError, msgpack.UnpackException):
        kept = {}
    found = kept if isinstance(kept, dict) else {}
    return {kind: dict(found[kind]) if isinstance(found.get(kind), dict) else {} for kind in KINDS}
