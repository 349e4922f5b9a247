"""What an open store shows to others: written while somebody looks, and not otherwise.

Whoever looks at a store opens its FORMAT file, and that is all it takes: for ``LOOKED_S`` from then
on ``live.msgpack`` is renewed every ``PUBLISH_S``. Nothing is registered that a killed reader could
leave behind, a reader needs no right to write, and a store that nobody looks at does nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgpack

from kvtier.errors import KVTierError
from kvtier.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.tiers.looks import Looks

__all__ = ["LOOKED_S", "PUBLISH_S", "LivePublisher", "live_of"]

log = logging.getLogger(__name__)

PUBLISH_S: Final = 1.0
"""How often what is shown is renewed while somebody looks."""
LOOKED_S: Final = 5.0
"""How long after a look somebody counts as looking."""
_VERSION: Final = 1


class LivePublisher:
    """Writes what ``snapshot`` returns, with ``write``, while somebody looks.

    ``snapshot`` returns plain values, among them "counters"; what these rose by in a second is
    added as "rates". None: there is nothing to show any more. A disk that refuses costs nothing but
    the file.
    """

    def __init__(
        self,
        looks: Looks,
        snapshot: Callable[[], dict[str, Any] | None],
        write: Callable[[bytes], None],
        *,
        clock: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._looks = looks
        self._snapshot = snapshot
        self._write = write
        self._clock = clock
        self._looked_at = self._published_at = float("-inf")
        self._counted: tuple[float, Mapping[str, int]] | None = None
        self._refused = False
        self._closing = False
        self._lane = Lane("live", self._next, failed)

    def start(self) -> None:
        """Begin to listen."""
        self._lane.start()

    def close(self) -> None:
        """Stop; idempotent."""
        if not self._closing:
            self._closing = True
            self._looks.wake()
            self._lane.join()
            self._looks.close()

    def _next(self) -> bool:
        looked = self._looks.wait(self._due_in())
        if self._closing:
            return False
        now = self._clock()
        if looked:
            self._looked_at = now
        if self._due_in() == 0:
            self._published_at = now
            self._publish(now)
        return True

    def _due_in(self) -> float | None:
        """Return when to publish next, in seconds; None while nobody looks."""
        now = self._clock()
        if now - self._looked_at >= LOOKED_S:
            return None
        return max(self._published_at + PUBLISH_S - now, 0.0)

    def _publish(self, now: float) -> None:
        try:
            shown = self._snapshot()
            if shown is None:
                return
            packed = msgpack.packb({**shown, "rates": self._rates(now, shown["counters"])})
            self._write(msgpack.packb([_VERSION, time.time_ns(), packed]))
        except KVTierError:
            return  # it is being closed
        except OSError as error:
            if not self._refused:
                log.warning("live.msgpack is not written: %s", error)
            self._refused = True

    def _rates(self, now: float, counters: Mapping[str, int]) -> dict[str, float]:
        before, self._counted = self._counted, (now, counters)
        if before is None or not 0 < now - before[0] <= LOOKED_S:
            return {}
        rose = {name: value - before[1].get(name, 0) for name, value in counters.items()}
        return {name: by / (now - before[0]) for name, by in rose.items() if by}


def live_of(data: bytes, now_ns: int) -> dict[str, Any] | None:
    """Return what a store shows, or None if that is too old, damaged or of a newer version."""
    try:
        version, published_ns, packed = msgpack.unpackb(data)
        fresh = version == _VERSION and abs(now_ns - published_ns) <= LOOKED_S * 1e9
        shown = msgpack.unpackb(packed) if fresh else None
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return {**shown, "published_ns": published_ns} if isinstance(shown, dict) else None
