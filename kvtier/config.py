"""The settings of one store, checked once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ByteSize", "StoreConfig", "parse_bytes", "parse_sizes"]

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
_OPTIONAL: Final = ("ssd_write_bytes_per_day", "prefetch_bytes_max", "prefetch_bytes_per_s")
WRITE_POLICIES: Final = ("through", "demote")
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


def parse_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with sizes that are strings in bytes; ``ValueError`` names the setting."""
    return {
        name: parse_bytes(name, value) if name in _SIZES and isinstance(value, str) else value
        for name, value in given.items()
    }


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
    With less than a quarter of it left, only the most valuable blocks are written, and others when
    they are put again (``write_rule``)."""
    integrity_key: bytes = field(default=b"", repr=False)
    """16 to 64 secret bytes: records carry a tag that only their holder can make. For a directory
    that others may write to; costs a SHA-256 of every byte."""
    policy: str = "priced"
    """Which blocks go first: "priced" (the least loss), "prefix-closed" (the same for callers that
    need contiguous prefixes), "sieve" or "lru"."""
    write_policy: str = "through"
    """When blocks go to the SSD. "through": with their put. "demote": when host memory lets go of
    them, and with ``flush`` and ``close``, so that short-lived ones cost no write; needs
    ``host_bytes``."""
    tails_only: bool = False
    """While the SSD is full or its write budget is short, blocks that a plan would recompute anyway
    are not written unless they are asked for again."""
    host_high_water: float = 0.95
    """The part of ``host_bytes`` above which host memory is relieved in the background."""
    host_low_water: float = 0.9
    """The part of ``host_bytes`` down to which it is relieved, so that puts find free slots."""
    staging_blocks_max: int = 8
    """Host slots beyond ``host_bytes`` that copies in flight may use."""
    loads_inflight_max: int = 4
    """Reads from one tier under way at once."""
    prefetch_bytes_max: int | None = None
    """What prefetches may hold: blocks that wait, that are being read, and that arrived and are
    kept for a restore; more is dropped and counted. None: all of ``host_bytes``, which is also the
    most there can be. Those to the device may hold ``device_bytes``."""
    prefetch_bytes_per_s: int | None = None
    """The rate at which prefetches begin reads, so that other readers of the disk find it idle;
    None: no limit, 0: nothing is prefetched."""
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
        if self.write_policy not in WRITE_POLICIES:
            raise ValueError(
                f"write_policy: {self.write_policy!r} is not one of {', '.join(WRITE_POLICIES)}"
            )
        for each in fields(self):
            _check(each.name, getattr(self, each.name))
        if self.tails_only and self.policy == "prefix-closed":
            raise ValueError("tails_only: a tail without its head is of no use to 'prefix-closed'")
        if self.host_low_water > self.host_high_water:
            raise ValueError(
                f"host_low_water: {self.host_low_water} exceeds "
                f"host_high_water={self.host_high_water}"
            )
        if self.staging_blocks_max <= self.loads_inflight_max:
            raise ValueError(
                f"staging_blocks_max: {self.staging_blocks_max} must exceed "
                f"loads_inflight_max={self.loads_inflight_max}, or loads starve writes"
            )

    def prefetch_blocks_max(self, block_bytes: int) -> int:
        """Return how many blocks prefetches may hold, as far as the tiers' sizes allow it."""
        limit = self.host_bytes if self.prefetch_bytes_max is None else self.prefetch_bytes_max
        return 0 if self.prefetch_bytes_per_s == 0 else limit // block_bytes


def _check(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is what a field of that name holds."""
    if name == "integrity_key":
        if not isinstance(value, bytes) or len(value) not in (0, *KEY_BYTES):
            raise ValueError("integrity_key: 16 to 64 bytes wanted, or none")
    elif name in _SIZES:
        missing = value is None and name in _OPTIONAL
        if not missing and (type(value) is not int or not 0 <= value <= BYTES_MAX):
            raise ValueError(f"{name}: {value!r} is not an int in [0, {BYTES_MAX}]")
    else:
        for suffix, holds, wanted in _KINDS:
            if name.endswith(suffix):
                if not holds(value):
                    raise ValueError(f"{name}: {value!r} is not {wanted}")
                return


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_KINDS: Final[tuple[tuple[str, Callable[[object], bool], str], ...]] = (
    ("_only", lambda value: isinstance(value, bool), "True or False"),
    ("_water", lambda value: _is_number(value) and 0 < value <= 1, "a part in (0, 1]"),
    (
        "_s_max",
        lambda value: _is_number(value) and value > 0 and math.isfinite(value),
        "a positive, finite number of seconds",
    ),
    ("_max", lambda value: type(value) is int and value > 0, "a positive int"),
)
"""By the end of a field's name: what it must hold, and that in words. The first one counts."""
