"""Work on background threads: steps until the last one, and hops of a loop's tasks."""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lane", "carried"]

log = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_S_MAX: Final = 30.0
"""How long ``join`` waits for a lane that is inside a copy or a disk operation."""


class Lane:
    """Runs ``step`` until it returns False; what it raises goes to ``failed``, and ends it."""

    def __init__(
        self, name: str, step: Callable[[], bool], failed: Callable[[BaseException], None]
    ) -> None:
        self._step = step
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end, but not for ever."""
        self._thread.join(JOIN_S_MAX)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            log.exception("a background lane failed")
            self._failed(error)


def carried(hop: Callable[..., T]) -> Callable[..., T]:
    """Let whatever ``hop`` raises reach who awaits it.

    asyncio cannot carry a StopIteration, and a loop whose task raises a SystemExit ends.
    """

    @functools.wraps(hop)
    def carry(*args: Any) -> T:
        try:
            return hop(*args)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise RuntimeError(f"{error!r} in a background lane") from error

    return carry
