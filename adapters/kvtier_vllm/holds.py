"""References to the engine's pages of our own: no page is read or written without one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Holds", "Pages"]


class Pages(Protocol):
    """The engine's pages, by number: what is consumed of its cache manager."""

    @property
    def count(self) -> int:
        """How many pages there are."""

    @property
    def prefix_cache_empty(self) -> bool:
        """Whether no page can be hit by another request."""

    def of(self, request_id: str) -> Sequence[int]:
        """Return a request's pages in token order."""

    def extend(self, request_id: str, tokens: int) -> bool:
        """Give a request pages for its first ``tokens`` tokens; False if too few are free."""

    def give_up(self, request_id: str) -> None:
        """Take all of a request's pages from it."""

    def touch(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""

    def free(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page, the last one first."""

    def unshared(self, pages: Sequence[int]) -> bool:
        """Whether any of the pages has no other reference than one."""


class Holds:
    """Who holds which pages; every reference that is taken is given back once."""

    def __init__(self) -> None:
        self._pages: Pages | None = None
        self._held: dict[tuple[str, int], tuple[int, ...]] = {}
        self._lent = False

    def bind(self, pages: Pages) -> None:
        """Learn whose pages they are."""
        self._pages = pages

    @property
    def engine(self) -> Pages:
        """The engine's pages."""
        if self._pages is None:
            raise RuntimeError("the engine's cache manager is not bound yet")
        return self._pages

    def take(self, what: str, number: int, pages: Sequence[int]) -> None:
        """Hold ``pages`` for a restore or a save, until it is ``dropped``."""
        if (what, number) in self._held:
            raise ValueError(f"{what} {number} holds its pages already")
        self._held[what, number] = tuple(pages)
        if not self._lent:
            self.engine.touch(pages)

    def drop(self, what: str, number: int) -> None:
        """Give back what was held for it."""
        pages = self._held.pop((what, number))
        if not self._lent:
            self.engine.free(pages)

    def pages(self, what: str) -> int:
        """Return how many pages are held for restores, or for saves."""
        return sum(len(pages) for (kind, _), pages in self._held.items() if kind == what)

    @property
    def any_unshared(self) -> bool:
        """Whether a page is kept from being free by us alone."""
        return any(self.engine.unshared(pages) for pages in self._held.values())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Hold nothing while the engine empties its prefix cache; it must not give pages away.

        The engine refuses to do so while any page is referenced, though what our pages hold is of
        no interest to it.
        """
        self._lent = True
        for pages in self._held.values():
            self.engine.free(pages)
        try:
            yield
        finally:
            self._lent = False
            for pages in self._held.values():
                self.engine.touch(pages)
