"""An asyncio loop on a thread of its own, from its start to an orderly end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

__all__ = ["Cancelled", "LoopThread", "NewLoop"]

NewLoop = Callable[[], asyncio.AbstractEventLoop]
"""Makes an event loop: a seam for tests, with a clock or a selector of their own."""

GIVE_UP_S_MAX: Final = 5.0
"""How long those who wait for what did not end in time may take to hear of it."""
Cancelled: Final = asyncio.CancelledError
"""What a coroutine raises that the loop gave up on."""


class LoopThread:
    """Runs callbacks and coroutines once it was started."""

    def __init__(self, name: str, new_loop: NewLoop = asyncio.new_event_loop) -> None:
        self._failed: Callable[[BaseException], None]
        self._loop = new_loop()
        self._loop.set_exception_handler(self._raised)
        self._ending = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = threading.RLock()  # re-entrant: a signal handler may close the store
        self._closing = self._drained = False
        self._ends: tuple[Callable[[], None], Callable[[], None], float] | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Start the thread; what a callback or a coroutine raises goes to ``failed``, there."""
        self._failed = failed
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while self._ends is None:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - what is no Exception ends a loop
                self._failed(error)
        self._drained = self._loop.run_until_complete(self._drain(*self._ends))
        self._loop.close()

    # -- from any thread

    def time(self) -> float:
        """Return the instant that it is, on the loop's clock."""
        return self._loop.time()

    def submit(self, work: Callable[[], None]) -> bool:
        """Call ``work`` on the loop, soon; False, and it is not, once the loop is closing."""
        with self._gate:
            if not self._closing:
                # The loop need not wake itself up: that is a system call.
                here = threading.current_thread() is self._thread
                (self._loop.call_soon if here else self._loop.call_soon_threadsafe)(work)
            return not self._closing

    def report(self, work: Callable[..., None], *args: Any) -> None:
        """Call ``work`` on the loop for something that has begun: the loop ends only after it."""
        with suppress(RuntimeError):  # given up on, and closed
            self._loop.call_soon_threadsafe(work, *args)

    def close(
        self, last: Callable[[], None], abandon: Callable[[], None], wait_s: float
    ) -> bool | None:
        """Call ``last`` on the loop, let what has begun end, and stop.

        False if that took longer than ``wait_s`` seconds: then ``abandon`` was called there, and
        what had not ended was cancelled. None if somebody else closes or has closed it.
        """
        with self._gate:
            if self._closing:
                return None
            self._closing = True
        self._ends = (last, abandon, wait_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(wait_s + GIVE_UP_S_MAX)
        return self._drained

    # -- on the loop

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Any:
        """Call back at an instant; returns what ``cancel`` calls that off."""
        return self._loop.call_at(when, callback, *args)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine; the loop ends only after it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def promise(self) -> asyncio.Future[None]:
        """Return what ``keep`` settles."""
        return self._loop.create_future()

    def keep(self, promise: asyncio.Future[None]) -> None:
        """Settle a promise, soon; from any thread, and more than once."""
        self.submit(lambda: None if promise.done() else promise.set_result(None))

    async def until(self, instant: float, unless: asyncio.Future[None] | None = None) -> None:
        """Wait for an instant, for the end of the loop, or until ``unless`` is kept."""
        left = instant - self._loop.time()
        if left > 0:
            ends = [self._ending] if unless is None else [self._ending, unless]
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _drain(
        self, last: Callable[[], None], abandon: Callable[[], None], wait_s: float
    ) -> bool:
        """Let all tasks end, or give up on them; whether they ended."""
        deadline = self._loop.time() + wait_s
        self._ending.set_result(None)
        last()
        while self._tasks:
            left = deadline - self._loop.time()
            if left <= 0:
                abandon()
                given_up = [task for task in self._tasks if task.cancel()]
                await asyncio.wait(given_up, timeout=GIVE_UP_S_MAX)
                return False
            await asyncio.wait(self._tasks, timeout=left)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _raised(self, _: object, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._failed(error)
