"""Files and folders in memory: what they hold now, what is durable, and what is neither yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

PAGE = 4096
SECTOR = 512


@dataclass(frozen=True, slots=True)
class Survival:
    """How a crash treats what was not synced.

    ``granule`` is the size (bytes) of what is kept or lost as one, ``data`` and ``names`` the
    probability that a granule or a change of a directory is kept.
    """

    granule: int
    data: float
    names: float


SURVIVALS = {
    "nothing": Survival(PAGE, 0.0, 0.0),
    "everything": Survival(PAGE, 1.0, 1.0),
    "bytes without names": Survival(PAGE, 1.0, 0.0),
    "names without bytes": Survival(PAGE, 0.0, 1.0),
    "torn sectors": Survival(SECTOR, 0.5, 0.5),
    "torn pages": Survival(PAGE, 0.5, 0.5),
    "few sectors": Survival(SECTOR, 0.1, 0.9),
    "whole writes in any order": Survival(1 << 40, 0.5, 0.5),
}


@dataclass(slots=True, eq=False)
class Image:
    """A file's bytes, and which of its pages occupy disk."""

    data: bytearray = field(default_factory=bytearray)
    pages: set[int] = field(default_factory=set)

    def apply(self, offset: int, piece: bytes | None, nbytes: int) -> None:
        """Write ``piece``, or punch ``nbytes`` if there is none."""
        first, last = offset // PAGE, -(-(offset + nbytes) // PAGE)
        if piece is None:
            stop = min(offset + nbytes, len(self.data))
            self.data[offset:stop] = bytes(max(stop - offset, 0))
            inside = range(-(-offset // PAGE), (offset + nbytes) // PAGE)
            self.pages.difference_update(inside)
            return
        if len(self.data) < offset + nbytes:
            self.data.extend(bytes(offset + nbytes - len(self.data)))
        self.data[offset : offset + nbytes] = piece
        self.pages.update(range(first, last))

    def copy(self) -> Image:
        """Return an independent one."""
        return Image(bytearray(self.data), set(self.pages))


@dataclass(slots=True, eq=False)
class File:
    """A file: its bytes now, those that are durable, and the writes in between, in their order."""

    now: Image = field(default_factory=Image)
    durable: Image = field(default_factory=Image)
    pending: list[tuple[int, bytes | None, int]] = field(default_factory=list)

    def change(self, offset: int, piece: bytes | None, nbytes: int) -> None:
        """Write ``piece``, or punch ``nbytes`` if there is none; not durable yet."""
        self.now.apply(offset, piece, nbytes)
        self.pending.append((offset, piece, nbytes))

    def survive(self, how: Survival, chance: random.Random) -> File:
        """Return the file as a crash may leave it."""
        image = self.durable.copy()
        for offset, piece, nbytes in self.pending:
            # A hole is punched by whole pages; a write is torn where the granules meet.
            granule = how.granule if piece is not None else max(how.granule, PAGE)
            for start, stop in _granules(offset, offset + nbytes, granule):
                if chance.random() < how.data:
                    part = None if piece is None else piece[start - offset : stop - offset]
                    image.apply(start, part, stop - start)
        if len(image.data) < len(self.now.data) and chance.random() < how.data:
            image.data.extend(bytes(len(self.now.data) - len(image.data)))
        return File(image, image.copy())


def _granules(start: int, stop: int, granule: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min((start // granule + 1) * granule, stop)
        yield start, end
        start = end


@dataclass(slots=True, eq=False)
class Folder:
    """A directory: its names now, those that are durable, and the changes in between."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, **names: File | Folder | None) -> None:
        """Set some names, or remove them, as one; not durable yet."""
        _rename(self.now, names)
        self.pending.append(names)

    def survive(self, how: Survival, chance: random.Random) -> Folder:
        """Return the folder as a crash may leave it."""
        names = dict(self.durable)
        for change in self.pending:
            if chance.random() < how.names:
                _rename(names, change)
        kept = {name: node.survive(how, chance) for name, node in sorted(names.items())}
        return Folder(kept, dict(kept))


def _rename(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
