"""Whether what the engine holds was computed by the weights that are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier_vllm.holds import Pages
    from kvtier_vllm.mirror import Mirror

__all__ = ["Trust"]


class Trust:
    """Follows the ranks' weights and the engine's prefix cache; the scheduler's thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._emptied = True  # nothing is computed before the first hello
        self._changed = False
        self.suspect = False
        """Pages that others may hit were computed by other weights: nothing is stored."""

    def reset(self, pages: Pages) -> None:
        """Note a reset of what is stored, and whether the engine's own cache is empty with it."""
        self._emptied = pages.prefix_cache_empty

    def cleared(self) -> None:
        """Note that the engine's own cache was emptied."""
        self.suspect = False

    def changed(self, rank_changed: bool, mirror: Mirror) -> bool:  # noqa: FBT001 - one rank's word
        """Take a rank's word on whether its weights are new; True once all ranks have new ones."""
        self._changed |= rank_changed
        if not (self._changed and mirror.ready):
            return False
        if not self._emptied and not self.suspect:
            self.suspect = True
            self._say(
                "kvtier: the weights changed, but vLLM's own prefix cache was not emptied: nothing "
                "is stored or restored until reset_prefix_cache() succeeds"
            )
        self._changed = False
        self._emptied = False  # of what comes from now on, until it is reset again
        return True
