"""Counters with their unit in the name; no backend, no dependency."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["COUNTERS", "Metrics"]

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
        "evicted_blocks_ssd",
        "purged_blocks_ssd",
        "restores",
    }
)


class Metrics:
    """Monotonic counters of one store, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(sorted(COUNTERS), 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter; an unknown name is a ``KeyError`` so that a typo cannot hide."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all counters at one instant."""
        with self._lock:
            return dict(self._counts)
