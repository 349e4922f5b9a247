"""The SSD tier on a disk that forgets: a crash at every step, with every kind of what is left."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from crash.course import FRESH, SIZES, Course, record
from crash.disk import CrashFileSystem
from crash.events import DISKS, events
from crash.index import CrashIndex
from crash.nodes import SURVIVALS
from hypothesis import given, settings
from hypothesis import strategies as st
from support import payload, record_of, variant

from kvtier.tiers.base import Location
from kvtier.tiers.entries import entry_of
from kvtier.tiers.index import REBUILD_COMMIT_ENTRIES
from kvtier.tiers.ssd import SsdTier

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep thousands of recoveries from writing a line each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(course: Course) -> Course:
    """Carry out all events; the problems that showed must be none."""
    for event in events():
        event(course)
    assert course.problems[:10] == []
    return course


@pytest.mark.parametrize("disk", DISKS)
def test_a_crash_at_any_step_loses_nothing_durable(disk: str) -> None:
    """Crash at each write, sync, name and commit: what was promised holds, with or without index.

    Durable blocks read back right, nothing reads back wrong, nothing purged comes back, the books
    balance, the disk stays within its limit, and the tier goes on.
    """
    course = Course(DISKS[disk])
    course.crash_at_points(list(SURVIVALS), seed=1, kinds=2)
    run(course)
    assert course.crashes > 400


@pytest.mark.parametrize("disk", DISKS)
def test_a_growing_index_takes_no_more_than_the_limit(disk: str) -> None:
    """What the index grows by, slots are given up for, before and after a crash."""
    course = Course(replace(DISKS[disk], index_entry_bytes=8 << 10))
    course.crash_at_points(list(SURVIVALS), seed=3, every=4)
    run(course)


@pytest.mark.parametrize("given_back", [[0, 2], [0, 2, 4, 6]], ids=["slots", "a segment"])
@pytest.mark.parametrize("disk", DISKS)
def test_what_was_given_back_before_a_purge_stays_away(disk: str, given_back: list[int]) -> None:
    """A purge also destroys what was evicted before and whose disk was reclaimed already."""
    course = Course(replace(DISKS[disk], blocks=6))
    course.open()
    course.write([0, 2, 4, 6])
    course.write([1, 3, 5])
    course.drop(given_back)
    course.tier.reclaim(SIZES[1], 6)
    course.purge([1])
    course.crash_at_points(list(SURVIVALS), kinds=len(SURVIVALS))
    course.fs.points.reach("after the purge")
    assert course.problems == []


@pytest.mark.parametrize("how", ["everything", "torn sectors"])
def test_a_crash_while_recovering_from_a_crash(how: str) -> None:
    """A second crash, at any step of the recovery from the first, is recovered from as well."""
    chance = random.Random(2)  # noqa: S311
    seconds: list[Course] = []

    def crash_again(course: Course) -> None:
        for lost in (False, True):
            second = course.after_crash(how, chance, lose_index=lost)
            second.crash_at_points(["nothing", "everything", "torn pages"], seed=len(seconds))
            second.open()
            second.check()
            seconds.append(second)

    course = Course()
    steps = 0

    def watch(_: str) -> None:
        nonlocal steps
        steps += 1
        if steps % 11 == 0:
            crash_again(course)

    course.fs.points.watch = watch
    run(course)
    assert len(seconds) > 20
    assert [problem for second in seconds for problem in second.problems][:10] == []


def test_a_crash_in_the_middle_of_a_rebuild() -> None:
    """A rebuild that takes several commits and is cut short loses no block: it is done again."""
    tiny = variant(layers=1, kv_heads=1)
    records = [record_of(number, tiny) for number in range(REBUILD_COMMIT_ENTRIES + 10)]
    fs = CrashFileSystem()
    index = CrashIndex(fs.points)

    def open_tier(fs: CrashFileSystem, index: CrashIndex) -> SsdTier:
        folder = fs.open_directory("segments")
        return SsdTier(folder, index, fs, limit_bytes=1 << 30, segment_bytes_max=64 << 20)

    tier = open_tier(fs, index)
    assert None not in tier.write(records, [payload(each) for each in records])
    tier.close()
    index = index.survive(lost=True)
    left: list[tuple[CrashFileSystem, CrashIndex]] = []

    def watch(what: str) -> None:
        if what == "commit done":
            survivor = fs.survive(SURVIVALS["everything"], random.Random(0))  # noqa: S311
            left.append((survivor, index.survive(lost=False)))

    index.points.watch = watch
    open_tier(fs, index).close()
    assert len(left) > 1
    for survivor, kept in left:
        tier = open_tier(survivor, kept)
        assert len(tier.entries) == len(records)
        tier.close()


numbers = st.lists(st.integers(0, 13), min_size=1, max_size=5, unique=True)
operations = st.one_of(
    st.tuples(st.just("write"), numbers),
    st.tuples(st.just("drop"), numbers),
    st.tuples(st.just("purge"), numbers),
    st.tuples(st.just("reopen"), st.just([])),
    st.tuples(st.just("lose index"), st.just([])),
    st.tuples(st.just("doubt"), st.booleans().map(lambda happened: [int(happened)])),
)


def carry_out(course: Course, name: str, args: list[int]) -> None:
    """Do one operation of a random course."""
    if name == "write":
        course.write_evicting([n for n in args if n not in course.stored()])
        return
    if name == "drop":
        course.drop(args)
    elif name == "purge":
        course.purge(args)
    elif name == "doubt":
        course.index.doubt = bool(args[0])
    else:
        course.reopen(lose_index=name == "lose index")
        course.check()
        course.settle_doubts()


@given(
    disk=st.sampled_from(sorted(DISKS)),
    hows=st.lists(st.sampled_from(sorted(SURVIVALS)), min_size=1, max_size=2, unique=True),
    seed=st.integers(0, 1 << 30),
    course_of=st.lists(operations, min_size=3, max_size=14),
)
@settings(max_examples=40)
def test_any_course_survives_any_crash(
    disk: str, hows: list[str], seed: int, course_of: list[tuple[str, list[int]]]
) -> None:
    """Random courses of writes, evictions, purges, restarts and commits in doubt: as above."""
    course = Course(DISKS[disk])
    course.crash_at_points(hows, seed=seed, every=3)
    course.open()
    for name, args in course_of:
        carry_out(course, name, args)
    course.check_live()
    course.fs.points.watch = None
    course.reopen()
    course.check()
    assert course.problems[:10] == []


@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize("after", range(6))
def test_a_commit_in_doubt_costs_no_other_block(after: int, *, happened: bool) -> None:
    """Nobody knows whether a commit happened: what was durable before and after it still is."""
    course = Course()
    course.open()
    for at, event in enumerate(
        (
            lambda: course.write([0, 2]),
            lambda: course.write([1]),
            lambda: course.drop([0]),
            lambda: course.write([4, 6]),
            lambda: course.drop([2]),
            lambda: course.purge([4]),
        )
    ):
        if at == after:
            course.index.doubt = happened
        event()
    course.write_evicting([8, 10, 12, 14])
    course.check_live()
    course.reopen()
    course.check()
    course.settle_doubts()
    course.write_evicting([FRESH, FRESH + 1])
    course.reopen(lose_index=True)
    course.check()
    assert course.problems == []


def test_an_index_that_reads_but_does_not_commit() -> None:
    """Damage that only commits meet is repaired too: when opening, and in an open tier."""
    course = Course()
    course.open()
    course.write([0, 2, 1])
    course.index.broken = True
    course.write([4])
    assert len(course.stored()) == 4
    course.close()
    (segment, *_) = {where.segment for where in course.ledger.durable.values()}
    stored = dict(course.index.stored)
    bad = record(6)
    stored[bad.id.namespace + bad.id.hash] = entry_of(bad, Location(segment, 99, SIZES[0]), 0)
    course.index = CrashIndex(course.fs.points, stored)
    course.index.broken = True
    course.open()  # an entry must go, and the index does not let it
    course.check()
    course.reopen()
    course.check()
    assert course.problems == []


# -- the model itself: a disk that lies is caught


class LyingFileSystem(CrashFileSystem):
    """A disk that acknowledges what it has not done; ``lies`` names the operations."""

    lies: frozenset[str] = frozenset()

    def sync(self, fd: int) -> None:
        """Sync, or say so."""
        if "sync" not in self.lies:
            super().sync(fd)

    def sync_directory(self, directory: int) -> None:
        """Sync names, or say so."""
        if "sync_directory" not in self.lies:
            super().sync_directory(directory)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Punch, or say so."""
        if "punch" not in self.lies:
            super().punch(fd, offset, nbytes)


@pytest.mark.parametrize("lie", ["sync", "sync_directory", "punch"])
def test_the_model_notices_a_disk_that_lies(lie: str) -> None:
    """Without a sync, a directory sync or a punch, what is lost or left shows as a problem."""
    fs = LyingFileSystem()
    fs.lies = frozenset({lie})
    course = Course(fs=fs)
    course.crash_at_points(["nothing"])
    for event in events():
        event(course)
        if course.problems:
            return
    pytest.fail(f"nobody noticed that {lie} did nothing")
