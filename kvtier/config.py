"""The settings of one store, checked once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Final

__all__ = ["ByteSize", "StoreConfig", "parse_bytes"]

ByteSize = int | str
"""Bytes as an int, or a string such as "8GiB" or "500MB"."""

_UNITS: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
BYTES_MAX: Final = 1 << 62
POLICIES: Final = ("priced", "prefix-closed", "sieve", "lru")
KEY_BYTES: Final = range(16, 65)
_OPTIONAL: Final = ("ssd_write_bytes_per_day",)
_SIZES: Final = ("host_bytes", "ssd_bytes", "device_bytes", *_OPTIONAL)


def parse_bytes(name: str, value: ByteSize) -> int:
    """Return a size in bytes; ``ValueError`` names the setting."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"{name}: {type(value).__name__} given, bytes or a string like '8GiB' wanted"
        )
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name}: {value!r} is not a size like '8GiB' or '500MB'")
        size = int(Decimal(match[1]) * unit)
    if not 0 <= size <= BYTES_MAX:
        raise ValueError(f"{name}: {size} is not in [0, {BYTES_MAX}]")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Every bound of a store, with its unit in its name; ``ValueError`` names the field."""

    host_bytes: int
    """Blocks kept in host memory; 0 keeps none there beyond the copy that uses it. No more than the
    machine, or a control group that the process is in, has."""
    ssd_bytes: int
    """What the directory may occupy on disk, data and index together."""
    device_bytes: int = 0
    """Blocks that ``prefetch(tier="device")`` keeps in device memory of the store's own; 0: none.
    Engines own their device memory, so that this is for what they leave."""
    ssd_write_bytes_per_day: int | None = None
    """What may be written to the directory in any 24 hours, so that the SSD lives; None: no limit.
    With less than a quarter of it left, only blocks put a second time are written."""
    integrity_key: bytes = field(default=b"", repr=False)
    """16 to 64 secret bytes: records carry a tag that only their holder can make. For a directory
    that others may write to; costs a SHA-256 of every byte."""
    policy: str = "priced"
    """Which blocks go first: "priced" (the least loss), "prefix-closed" (the same for callers that
    need contiguous prefixes), "sieve" or "lru"."""
    staging_blocks_max: int = 8
    """Host slots beyond ``host_bytes`` that copies in flight may use."""
    loads_inflight_max: int = 4
    """Reads from one tier under way at once."""
    writes_inflight_max: int = 4
    """Writes to the SSD under way at once."""
    write_batch_blocks_max: int = 32
    """Blocks for which room is made, and which are written, at once."""
    write_queue_blocks_max: int = 4096
    """Blocks of accepted puts that are not durable yet; more are dropped and counted."""
    segment_bytes_max: int = 256 << 20
    """Size of a segment file, unless one slot alone is larger."""
    segments_max: int = 1 << 16
    """Number of segment files."""
    index_bytes_max: int = 1 << 30
    """Address space (not disk) set aside for the index."""
    slot_wait_s_max: float = 10.0
    """How long a copy waits for a host slot before its block is dropped or recomputed."""
    close_s_max: float = 60.0
    """How long ``close`` flushes before it gives up on what is still queued."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        for each in fields(self):
            _check(each.name, getattr(self, each.name))
        if self.staging_blocks_max <= self.loads_inflight_max:
            raise ValueError(
                f"staging_blocks_max: {self.staging_blocks_max} must exceed "
                f"loads_inflight_max={self.loads_inflight_max}, or loads starve writes"
            )


def _check(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is what a field of that name holds."""
    if name == "integrity_key":
        if not isinstance(value, bytes) or len(value) not in (0, *KEY_BYTES):
            raise ValueError("integrity_key: 16 to 64 bytes wanted, or none")
    elif name in _SIZES:
        missing = value is None and name in _OPTIONAL
        if not missing and (type(value) is not int or not 0 <= value <= BYTES_MAX):
            raise ValueError(f"{name}: {value!r} is not an int in [0, {BYTES_MAX}]")
    elif name.endswith("_s_max"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}: {value!r} is not a number of seconds")
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: {value!r} is not positive and finite")
    elif name.endswith("_max") and (type(value) is not int or value <= 0):
        raise ValueError(f"{name}: {value!r} is not a positive int")
