"""Counters and histograms with their unit in the name; no backend, no dependency."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Any, Final

__all__ = ["COUNTERS", "HISTOGRAMS", "Metrics"]

COUNTERS: Final = frozenset(
    {
        "put_blocks_stored",
        "put_blocks_present",
        "put_blocks_dropped",
        "loaded_blocks_device",
        "loaded_blocks_host",
        "loaded_blocks_ssd",
        "loaded_bytes_device",
        "loaded_bytes_host",
        "loaded_bytes_ssd",
        "recomputed_blocks",
        "load_failures",
        "prefetched_blocks",
        "prefetch_declined_blocks",
        "prefetch_late_blocks",
        "prefetch_cancelled_blocks",
        "prefetch_failed_blocks",
        "prefetch_unused_blocks",
        "damaged_blocks",
        "ssd_written_blocks",
        "ssd_written_bytes",
        "ssd_write_errors",
        "ssd_declined_blocks",
        "ssd_read_blocks",
        "ssd_read_bytes",
        "device_written_blocks",
        "device_write_errors",
        "evicted_blocks_device",
        "evicted_blocks_host",
        "lost_blocks_host",
        "evicted_blocks_ssd",
        "purged_blocks_ssd",
        "restores",
    }
)

_SECONDS: Final = tuple(1e-5 * 2**power for power in range(23))  # 10 us to 42 s
_RATIOS: Final = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)

HISTOGRAMS: Final[dict[str, tuple[float, ...]]] = {
    "lookup_seconds": _SECONDS,
    "restore_seconds": _SECONDS,
    "step_seconds": _SECONDS,
    "restore_predicted_ratio": _RATIOS,
}
"""The upper bounds of each histogram's buckets; a last one holds what is larger."""


class Metrics:
    """Monotonic counters and histograms of one store, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        self._counts: dict[str, int] = dict.fromkeys(sorted(COUNTERS), 0)
        self._buckets = {name: [0] * (len(bounds) + 1) for name, bounds in HISTOGRAMS.items()}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter; an unknown name is a ``KeyError`` so that a typo cannot hide."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all counters at one instant."""
        with self._lock:
            return dict(self._counts)

    def observe(self, name: str, value: float) -> None:
        """Count a value in its histogram; an unknown name is a ``KeyError``."""
        bucket = bisect_left(HISTOGRAMS[name], value)
        with self._lock:
            self._buckets[name][bucket] += 1
            self._sums[name] += value

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return each histogram at one instant: ``bounds``, ``counts`` (one more), ``sum``."""
        with self._lock:
            return {
                name: {
                    "bounds": list(bounds),
                    "counts": list(self._buckets[name]),
                    "sum": self._sums[name],
                }
                for name, bounds in HISTOGRAMS.items()
            }
