"""A thread that repeats one step until the step says that it is done."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lane"]

log = logging.getLogger(__name__)

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
