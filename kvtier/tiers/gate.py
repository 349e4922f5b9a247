"""How many writes are under way at once: a few, and one while restores read."""

from __future__ import annotations

import threading

__all__ = ["WriteGate"]


class WriteGate:
    """At most ``slots`` threads inside, and at most one more enters while it is narrow.

    Those that are inside when it gets narrow go on. One may always enter an empty gate, so writes
    always progress. Thread-safe.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._inside = 0
        self._narrow = False
        self._changed = threading.Condition(threading.Lock())

    def narrow(self) -> None:
        """Let one in at a time."""
        with self._changed:
            self._narrow = True

    def widen(self) -> None:
        """Let ``slots`` in again."""
        with self._changed:
            self._narrow = False
            self._changed.notify_all()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._inside < (1 if self._narrow else self._slots))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify()
