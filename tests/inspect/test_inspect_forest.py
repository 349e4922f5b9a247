"""The prefix forest in columns against the same thing with dicts; pages; classes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.base import BlockId
from kvtier.tiers.entries import ENTRY
from kvtier_inspect.forest import SORTS, Forest, grow, lines
from kvtier_inspect.listing import COLUMNS, order
from kvtier_inspect.opened import sorted_by_key
from kvtier_inspect.stats import stats_of
from kvtier_inspect.table import around, distinct, matching, namespaces, parents, rows_at, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.tiers.entries import Entries


@dataclass(frozen=True)
class Made:
    """One entry to be made: which block, in which namespace, after which one, at which position."""

    number: int
    namespace: int
    parent: int
    position: int


def digest(number: int) -> bytes:
    """Return a digest; numbers below 8 share its first 8 bytes, 8 to 15 differ in the last only."""
    if number < 8:
        return b"same" * 2 + hashlib.sha256(bytes([number])).digest()[8:]
    if number < 16:
        return b"\0" * 31 + bytes([number - 8])
    return hashlib.sha256(bytes([number])).digest()


def table_of(made: Sequence[Made]) -> Entries:
    """Return the entries, as an index has them: each block once, in order of its key."""
    each = {(one.namespace, one.number): one for one in made}
    rows = np.zeros(len(each), ENTRY)
    for row, one in zip(rows, each.values(), strict=True):
        row["namespace"] = np.void(bytes([one.namespace]) * 32)
        row["hash"] = np.void(digest(one.number))
        row["parent"] = np.void(digest(one.parent))
        row["position"] = one.position
        row["payload_bytes"] = 100 + one.number
        row["hits"] = one.number % 3
        row["created_ns"] = 10**18 + one.number
        row["last_use_ns"] = 10**18 + 7 * one.number % 31
        row["tenant"] = np.void(digest(one.number % 2))
    return sorted_by_key(rows)


ROOT = 99
numbers = st.integers(0, 40)
tables = st.lists(
    st.builds(Made, numbers, st.integers(1, 2), numbers, st.integers(0, 6)), max_size=60
).map(table_of)
"""Any links: holes, cycles, parents at the wrong position, of another namespace."""

chains = st.lists(st.integers(-1, 39), max_size=40).map(
    lambda parents: table_of(
        [
            Made(number, 1, ROOT if parent < 0 else parent, position)
            for number, parent, position in _placed(parents)
        ]
    )
)
"""Sound forests: every block follows an earlier one, or begins a prompt."""


def _placed(parents: Sequence[int]) -> list[tuple[int, int, int]]:
    position: dict[int, int] = {}
    for number, parent in enumerate(parents):
        position[number] = position.get(min(parent, number - 1), -1) + 1
    return [
        (number, min(parent, number - 1), position[number]) for number, parent in enumerate(parents)
    ]


def keys_of(entries: Entries) -> list[bytes]:
    """Return the packed keys of a table."""
    return [row["namespace"].tobytes() + row["hash"].tobytes() for row in entries]


def model_parents(entries: Entries) -> tuple[list[int], set[int]]:
    """Return each row's parent row or -1, and the rows whose link is wrong, by a dict."""
    at = {key: row for row, key in enumerate(keys_of(entries))}
    above, wrong = [], set()
    for row, entry in enumerate(entries):
        parent = at.get(entry["namespace"].tobytes() + entry["parent"].tobytes(), -1)
        if parent >= 0 and int(entries["position"][parent]) + 1 != int(entry["position"]):
            wrong.add(row)
            parent = -1
        above.append(parent)
    return above, wrong


@given(entries=tables | chains)
def test_links_are_those_that_a_dict_finds(entries: Entries) -> None:
    """A parent is found whatever digests share their beginning; a wrong link is none, and said."""
    above, wrong = parents(entries)
    wanted, mistaken = model_parents(entries)
    assert above.tolist() == wanted
    assert set(wrong.tolist()) == mistaken


@given(entries=tables | chains, some=st.lists(st.integers(0, 59), max_size=20))
def test_a_few_blocks_are_placed_as_all_are(entries: Entries, some: list[int]) -> None:
    """`ls` looks at one page: it says of each block what the whole forest says."""
    above = model_parents(entries)[0]
    rows = [row for row in some if row < len(entries)]
    stored, branches = around(entries, np.array(rows, dtype=np.intp))
    assert stored == [above[row] >= 0 for row in rows]
    assert branches == [above.count(row) for row in rows]


@given(entries=tables | chains)
def test_runs_are_the_chains_between_branches(entries: Entries) -> None:
    """Every block is in one run; runs end where blocks branch or end; sums count all beneath."""
    forest = grow(entries)
    above = model_parents(entries)[0]
    kids: dict[int, list[int]] = defaultdict(list)
    for row, parent in enumerate(above):
        kids[parent].append(row)

    def walk(first: int) -> list[int]:
        found = [first]
        while len(kids[found[-1]]) == 1:
            found += kids[found[-1]]
        return found

    def beneath(row: int) -> tuple[int, int, int]:
        below = [beneath(kid) for kid in kids[row]]
        blocks, nbytes, tips = (sum(column) for column in zip((0, 0, 0), *below, strict=True))
        return blocks + 1, nbytes + int(entries["payload_bytes"][row]), tips or 1

    starts = [row for row, parent in enumerate(above) if parent < 0 or len(kids[parent]) > 1]
    assert forest.first.tolist() == starts
    assert [len(kids[row]) for row in range(len(entries))] == forest.branches.tolist()
    for run, first in enumerate(starts):
        rows = walk(first)
        assert forest.run[rows].tolist() == [run] * len(rows)
        assert forest.last[run] == rows[-1]
        assert forest.blocks[run] == len(rows)
        assert forest.nbytes[run] == entries["payload_bytes"][rows].sum()
        assert forest.hits[run] == entries["hits"][rows].sum()
        assert forest.last_use_ns[run] == entries["last_use_ns"][rows].max()
        assert forest.created_ns[run] == entries["created_ns"][rows].min()
        sums = forest.blocks_beneath[run], forest.bytes_beneath[run], forest.tips_beneath[run]
        assert sums == beneath(first)
        assert bool(forest.after_hole[run]) == (
            above[first] < 0 and int(entries["position"][first]) > 0
        )
    assert forest.blocks.sum() == len(entries)


@given(
    entries=tables | chains,
    sort=st.sampled_from(SORTS),
    offset=st.integers(0, 45),
    limit=st.integers(1, 45),
)
def test_a_page_is_that_part_of_the_whole(
    entries: Entries, sort: str, offset: int, limit: int
) -> None:
    """Pages put together are all runs once, each after the one it follows, siblings in order."""
    forest = grow(entries)
    whole = lines(forest, sort, 0, len(entries) + 1)
    assert sorted(line.run for line in whole) == list(range(len(forest.first)))
    assert lines(forest, sort, offset, limit) == whole[offset : offset + limit]
    path: list[int] = []
    for line in whole:
        del path[len(line.guides) :]
        assert forest.parent[line.run] == (path[-1] if path else -1)
        path.append(line.run)
    assert_siblings_in_order(forest, sort, [line.run for line in whole])


def assert_siblings_in_order(forest: Forest, sort: str, runs: Sequence[int]) -> None:
    """Check that runs with one parent come largest, latest or most first."""
    values = {
        "size": forest.bytes_beneath,
        "used": forest.last_use_ns,
        "hits": forest.hits,
        "age": -forest.created_ns,
    }[sort]
    by_parent: dict[int, list[int]] = defaultdict(list)
    for run in runs:
        by_parent[int(forest.parent[run])].append(int(values[run]))
    for seen in by_parent.values():
        assert seen == sorted(seen, reverse=True)


@given(entries=tables, sort=st.sampled_from(sorted(COLUMNS)))
def test_blocks_are_listed_in_order(entries: Entries, sort: str) -> None:
    """`ls` lists every block once, the latest, newest, largest or most used first."""
    rows = order(entries, sort)
    assert sorted(rows.tolist()) == list(range(len(entries)))
    if sort == "hash":
        assert keys_of(entries[rows]) == sorted(keys_of(entries))
    else:
        values = entries[COLUMNS[sort]][rows].tolist()
        assert values == sorted(values, reverse=sort != "position")


@given(entries=tables)
def test_groups_and_rows_are_found(entries: Entries) -> None:
    """Namespaces, tenants and blocks are told apart by all of their bytes."""
    names = entries["namespace"].tolist()
    assert {name: rows.stop - rows.start for name, rows in namespaces(entries).items()} == {
        name: names.count(name) for name in names
    }
    for column in ("tenant", "hash", "namespace"):
        digests, which = distinct(entries, column)
        assert digests == sorted(set(entries[column].tolist()))
        assert [digests[number] for number in which] == entries[column].tolist()
    blocks = [BlockId(key[:32], key[32:]) for key in keys_of(entries)]
    assert rows_at(entries, blocks) == list(range(len(entries)))
    absent = BlockId(b"\3" * 32, bytes(32))
    assert rows_at(entries, [absent, *blocks])[:1] == [-1]


@given(entries=tables, number=numbers, digits=st.integers(1, 64))
def test_blocks_are_found_by_the_beginning_of_their_hash(
    entries: Entries, number: int, digits: int
) -> None:
    """However many digits are given, exactly the blocks that begin with them are meant."""
    start = digest(number).hex()[:digits]
    wanted = [row for row, key in enumerate(keys_of(entries)) if key[32:].hex().startswith(start)]
    assert rows_of(entries, start.upper()).tolist() == wanted
    ours = [row for row in wanted if entries["namespace"][row].tobytes() == b"\1" * 32]
    assert rows_of(entries, f"0101/{start}").tolist() == ours
    assert len(matching(entries, "02")) == sum(key[:1] == b"\2" for key in keys_of(entries))


@pytest.mark.parametrize("digits", ["", "0x1", "g", "0" * 65, "1/2/3", "/"])
def test_what_is_not_hex_is_refused(digits: str) -> None:
    """A message names what was given; a hash of no digits means no block in particular."""
    with pytest.raises(ValueError, match="hex digits"):
        rows_of(table_of([]), digits)


@given(entries=tables | chains)
def test_sharing_is_what_prompts_have_in_common(entries: Entries) -> None:
    """What sharing saves is the difference to each prompt stored by itself."""
    above = model_parents(entries)[0]
    stats = stats_of(entries, 2 * 10**18)
    tips = [row for row in range(len(entries)) if row not in set(above)]
    apart = 0
    for tip in tips:
        at = tip
        while at >= 0:
            apart += int(entries["payload_bytes"][at])
            at = above[at]
    assert stats.prompts == len(tips)
    assert stats.bytes_saved == apart - entries["payload_bytes"].sum()
    for classes in (stats.by_hits, stats.by_age_s, stats.by_last_use_s, stats.by_position):
        assert sum(count for _, count in classes) == len(entries)
    assert dict(stats.by_position)[0] == (entries["position"] == 0).sum()


def test_a_deep_comb_is_drawn(inspect: Callable[..., Any]) -> None:
    """Hundreds of levels are numbers, not an indentation off the screen."""
    from kvtier_inspect.listing import _guides

    made = [Made(200, 1, 199, 0)]
    for level in range(60):
        made += [
            Made(number, 1, made[-1].number if level else 200, level + 1)
            for number in (60 + level, 130 + level)
        ][::-1]
    forest = grow(table_of(made))
    drawn = [_guides(line) for line in lines(forest, "size", 0, 1000)]
    assert max(map(len, drawn)) < 40
    assert any("… " in each for each in drawn)
