"""One handle for bytes on the move: poll it, block on it, or await it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvtier.errors import StoreClosed, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Prefetch", "PutResult", "Transfer"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a put's blocks.

    ``present`` ones were stored already (or are being stored), ``dropped`` ones found no room or a
    failing disk.
    """

    stored: int
    present: int
    dropped: int


class Transfer(Generic[T]):
    """A copy under way. ``released`` is set once the source may be reused, before ``result``.

    Cancelling a task that awaits a transfer does not cancel the copy. In a forked child, where
    nobody moves the bytes, asking raises ``StoreClosed``.
    """

    def __init__(self) -> None:
        self.released = threading.Event()
        self._owner = os.getpid()
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._own().done()

    def result(self, timeout: float | None = None) -> T:
        """Wait up to ``timeout`` seconds for the outcome.

        Raises ``TransferFailed`` if the copy failed, ``TimeoutError`` if it is not done by then.
        """
        return self._own().result(timeout)

    def __await__(self) -> Generator[object, None, T]:
        wrapped = asyncio.wrap_future(self._own())
        return asyncio.shield(wrapped).__await__()

    def finish(self, value: T) -> None:
        """Set the outcome; for the one who moves the bytes. A second outcome is ignored."""
        self.released.set()
        with suppress(concurrent.futures.InvalidStateError):
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set a failed outcome; for the one who moves the bytes. A second outcome is ignored."""
        self.released.set()
        wrapped = TransferFailed(f"the copy failed: {error}")
        wrapped.__cause__ = error
        with suppress(concurrent.futures.InvalidStateError):
            self._future.set_exception(wrapped)

    def _own(self) -> concurrent.futures.Future[T]:
        if os.getpid() != self._owner:
            raise StoreClosed("this is a forked child; the transfer is its parent's")
        return self._future


class Prefetch(Transfer[int]):
    """A prefetch under way. Its result counts the blocks that it brought to its tier.

    Blocks that are gone, that found no room, or whose deadline passed are not in it: a restore
    reads or recomputes them.
    """

    def __init__(self, withdraw: Callable[[], object]) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> None:
        """Take the hint back, soon: idempotent, never waits, and useful after the end too.

        Blocks whose read has not begun are left where they are, unless somebody else waits for
        them; those being read arrive all the same; nothing is kept for this hint any more. The
        result is then what had arrived.
        """
        self._withdraw()
