"""A link of given rate and latency, for tests, demos and benchmarks.

One definition serves planner, simulator and throttle: a link is one FIFO, and a transfer ends at
max(now, busy until) + latency + bytes / rate. The throttle only computes that instant; whoever owns
the event loop waits for it.
"""

from __future__ import annotations

import threading

__all__ = ["LinkThrottle"]


class LinkThrottle:
    """Slows a tier's loads down to ``bytes_per_s`` after ``latency_s`` each; thread-safe."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: {bytes_per_s} is not positive")
        if not latency_s >= 0:
            raise ValueError(f"latency_s: {latency_s} is negative")
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._busy_until = float("-inf")
        self._lock = threading.Lock()

    def reserve(self, now: float, nbytes: int) -> float:
        """Put a transfer into the queue and return when it ends, on the clock of ``now``."""
        with self._lock:
            start = max(now, self._busy_until)
            self._busy_until = start + self.latency_s + nbytes / self.bytes_per_s
            return self._busy_until

    def __repr__(self) -> str:
        return f"LinkThrottle(bytes_per_s={self.bytes_per_s!r}, latency_s={self.latency_s!r})"
