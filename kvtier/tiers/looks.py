"""Hearing that somebody opens a file, without asking again and again (Linux: inotify)."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import struct
from typing import Final, Protocol

__all__ = ["FileLooks", "Looks"]

_IN_OPEN: Final = 0x20
_EVENT: Final = struct.Struct("=iIII")  # of a watched file: no name follows
_EVENTS_BYTES: Final = 256 * _EVENT.size
_WAKE: Final = struct.pack("=Q", 1)


class Looks(Protocol):
    """Something that others look at; one thread waits, any thread wakes it."""

    def wait(self, seconds: float | None) -> bool:
        """Return True once somebody looked since the last call, False after so long or a wake."""

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""

    def close(self) -> None:
        """Stop listening; idempotent, and nobody waits any more."""


class FileLooks:
    """Everybody who opens the file in ``path``, from whatever process on this machine.

    Raises ``OSError`` where the system cannot tell.
    """

    def __init__(self, path: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
        self._events = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        if libc.inotify_add_watch(self._events, os.fsencode(path), _IN_OPEN) < 0:
            code = ctypes.get_errno()
            os.close(self._events)
            raise OSError(code, os.strerror(code), path)
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    def wait(self, seconds: float | None) -> bool:
        """Return True once somebody looked since the last call, False after so long or a wake."""
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else math.ceil(seconds * 1e3))}
        if self._wakes in ready:
            os.read(self._wakes, len(_WAKE))
        if self._events not in ready:
            return False
        # A file that is removed is an event too, but nobody's look.
        events = _EVENT.iter_unpack(os.read(self._events, _EVENTS_BYTES))
        return any(mask & _IN_OPEN for _, mask, _, _ in events)

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""
        os.write(self._wakes, _WAKE)

    def close(self) -> None:
        """Stop listening; idempotent, and nobody waits any more."""
        if not self._closed:
            self._closed = True
            os.close(self._events)
            os.close(self._wakes)
