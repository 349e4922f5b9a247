"""The prefix forest of a store: which blocks follow which, summed up by runs.

A **run** is a chain of blocks none of which but the last has two successors. Runs are columns, and
only the lines of one page become objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier_inspect.table import parents

if TYPE_CHECKING:
    from kvtier.tiers.entries import Entries
    from kvtier_inspect.table import Integers, Rows

__all__ = ["Forest", "Line", "grow", "lines"]

SORTS: Final = ("size", "used", "hits", "age")
"""What trees and branches are ordered by, the largest, latest or most first."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Blocks (one column per row of ``entries``) and runs (one per run); -1 stands for none.

    ``beneath`` columns count a run and all that follows it.
    """

    entries: Entries
    above: Rows
    """Each block's parent."""
    wrong: Rows
    """Blocks whose parent is stored but is not at the position before theirs."""
    branches: Integers
    """How many stored blocks follow each block."""
    run: Rows
    """Each block's run."""

    first: Rows
    """Each run's first block."""
    last: Rows
    blocks: Integers
    nbytes: Integers
    hits: Integers
    created_ns: Integers
    """When each run's oldest block was made."""
    last_use_ns: Integers
    parent: Rows
    """The run that each run follows."""
    runs_beneath: Integers
    blocks_beneath: Integers
    bytes_beneath: Integers
    tips_beneath: Integers
    """How many prompts that are stored go through each run, as far as one can tell them apart."""

    @property
    def after_hole(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Runs that begin within a prompt, but not where a stored block ends."""
        return (self.parent < 0) & (self.entries["position"][self.first] > 0)


@dataclass(frozen=True, slots=True)
class Line:
    """One run as a page shows it: ``guides`` says for each level above whether more follows."""

    run: int
    guides: tuple[bool, ...]
    more: bool
    """Whether it has a sibling after it."""


def grow(entries: Entries) -> Forest:
    """Find the runs of a table that rises by key."""
    above, wrong = parents(entries)
    rows = len(entries)
    branches = np.bincount(above[above >= 0], minlength=rows)
    begins = (above < 0) | (branches[above] != 1)
    run = (np.cumsum(begins) - 1)[_heads(above, begins)]
    first = np.flatnonzero(begins)
    blocks = np.bincount(run, minlength=len(first))
    last = np.empty(len(first), dtype=np.intp)
    last[run] = np.arange(rows)  # any of its blocks, until the next line
    ends = branches != 1
    last[run[ends]] = np.flatnonzero(ends)
    parent = np.full(len(first), -1, dtype=np.intp)
    inner = above[first] >= 0
    parent[inner] = run[above[first[inner]]]
    nbytes = _sum(run, entries["payload_bytes"], len(first))
    last_use, created = np.zeros((2, len(first)), dtype=np.int64)
    np.maximum.at(last_use, run, _times(entries["last_use_ns"]))
    created[:] = np.iinfo(np.int64).max
    np.minimum.at(created, run, _times(entries["created_ns"]))
    tips = np.bincount(parent[inner], minlength=len(first)) == 0
    order = _deepest_first(entries["position"][first], inner)
    beneath = [
        _beneath(parent, order, own)
        for own in (np.ones_like(blocks), blocks, nbytes, tips.astype(np.int64))
    ]
    hits = _sum(run, entries["hits"], len(first))
    return Forest(
        entries, above, wrong, branches, run,
        first, last, blocks, nbytes, hits, created, last_use, parent, *beneath,
    )  # fmt: skip


def _heads(above: Rows, begins: np.ndarray[Any, np.dtype[np.bool_]]) -> Rows:
    """Return the first block of each block's run."""
    head = np.where(begins, np.arange(len(above)), above)
    while True:  # twice as far each time; a position before each one's own: no cycles
        further = head[head]
        if (further == head).all():
            return head
        head = further


def _sum(run: Rows, values: np.ndarray[Any, Any], runs: int) -> Integers:
    sums: Integers = np.bincount(run, weights=values, minlength=runs).astype(np.int64)
    return sums


def _times(values: np.ndarray[Any, Any]) -> Integers:
    times: Integers = np.minimum(values, np.uint64(np.iinfo(np.int64).max)).astype(np.int64)
    return times


def _deepest_first(
    position: np.ndarray[Any, Any], inner: np.ndarray[Any, np.dtype[np.bool_]]
) -> list[Rows]:
    """Return the runs that follow another one, those at one position together."""
    runs = np.flatnonzero(inner)
    runs = runs[np.argsort(position[runs], kind="stable")[::-1]]
    cuts = np.flatnonzero(np.diff(position[runs])) + 1
    return np.split(runs, cuts) if len(runs) else []


def _beneath(parent: Rows, order: list[Rows], own: Integers) -> Integers:
    sums = own.copy()
    for runs in order:
        np.add.at(sums, parent[runs], sums[runs])
    return sums


def lines(forest: Forest, sort: str, offset: int, limit: int) -> list[Line]:
    """Return one page of the runs, each followed by its branches."""
    value = {
        "size": forest.bytes_beneath,
        "used": forest.last_use_ns,
        "hits": forest.hits,
        "age": -forest.created_ns,
    }[sort]
    ordered = np.lexsort((forest.first, -value, forest.parent))
    parent = forest.parent[ordered]
    page: list[Line] = []
    frames: list[tuple[Rows, int]] = [(_kids(ordered, parent, -1), 0)]
    while frames and len(page) < limit:
        kids, at = frames.pop()
        if offset:  # pass over whole trees without looking into them
            passed = np.cumsum(forest.runs_beneath[kids[at:]])
            trees = int(np.searchsorted(passed, offset, side="right"))
            offset -= int(passed[trees - 1]) if trees else 0
            at += trees
        if at == len(kids):
            continue
        run = int(kids[at])
        guides = tuple(place < len(level) for level, place in frames)
        frames.append((kids, at + 1))
        if offset:
            offset -= 1
        else:
            page.append(Line(run, guides, at + 1 < len(kids)))
        if forest.runs_beneath[run] > 1:
            frames.append((_kids(ordered, parent, run), 0))
    return page


def _kids(ordered: Rows, parent: Rows, run: int) -> Rows:
    start, stop = np.searchsorted(parent, (run, run + 1)).tolist()
    kids: Rows = ordered[start:stop]
    return kids
