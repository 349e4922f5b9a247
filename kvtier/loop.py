"""An asyncio loop on a thread of its own, from its start to an orderly end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

__all__ = ["LoopThread", "NewLoop"]

NewLoop = Callable[[], asyncio.AbstractEventLoop]
"""Makes an event loop: a seam for tests, with a clock or a selector of their own."""

STOP_S_MAX: Final = 30.0
"""How long a loop without tasks may take to stop."""


class LoopThread:
    """Runs callbacks and coroutines once it was started."""

    def __init__(self, name: str, new_loop: NewLoop = asyncio.new_event_loop) -> None:
        self._failed: Callable[[BaseException], None]
        self._loop = new_loop()
        self._loop.set_exception_handler(self._raised)
        self._ending = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = threading.RLock()  # re-entrant: a signal handler may close the store
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Start the thread; what a callback or a coroutine raises goes to ``failed``, there."""
        self._failed = failed
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopped:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - what is no Exception ends a loop
                self._failed(error)

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
        self._loop.call_soon_threadsafe(work, *args)

    def close(self, last: Callable[[], None], wait_s: float) -> bool | None:
        """Call ``last`` on the loop, let what has begun end, and stop.

        False if that took longer than ``wait_s`` seconds: then the loop goes on, as a daemon. None
        if somebody else closes or has closed it.
        """
        with self._gate:
            if self._closing:
                return None
            self._closing = True
        drained = asyncio.run_coroutine_threadsafe(self._drain(last), self._loop)
        try:
            drained.result(wait_s)
        except TimeoutError:
            drained.cancel()
            return False
        self._stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S_MAX)
        self._loop.close()
        return True

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

    async def _drain(self, last: Callable[[], None]) -> None:
        self._ending.set_result(None)
        last()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _raised(self, _: object, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._failed(error)
