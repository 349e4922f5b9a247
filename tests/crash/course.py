"""A course of operations on an SSD tier, and what must hold wherever the machine stops."""

from __future__ import annotations

import functools
import mmap
import random
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crash.disk import CrashFileSystem, Points
from crash.index import CrashIndex
from crash.nodes import SURVIVALS
from support import SPEC, payload, payload_of, record_of, variant

from kvtier.tiers.base import BlockId, Location, ReadResult, Record
from kvtier.tiers.entries import id_at
from kvtier.tiers.index import INDEX_COMMIT_BYTES_MAX
from kvtier.tiers.segment import PAGE_BYTES, slot_bytes
from kvtier.tiers.slabs import OTHER_BYTES, SEGMENT_METADATA_BYTES
from kvtier.tiers.ssd import SsdTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPECS = (SPEC, variant(layers=5))
"""Two sizes of slots: records of even numbers have the first, of odd numbers the second."""
SIZES = tuple(slot_bytes(record_of(0, spec)) for spec in SPECS)
SLOTS_PER_SEGMENT = 3
_NO_TAG = bytes(32)  # comes before a record's own hash, not before a child's mention of it
FRESH = 10_000
"""Numbers from here on are the blocks that are written after a crash."""


@dataclass(slots=True)
class Ledger:
    """What the tier has promised.

    ``durable`` blocks must be found with their bytes, ``maybe`` ones were being written or dropped
    and may be there or not, ``purged`` ones must not be found whatever happens.
    """

    durable: dict[BlockId, Location] = field(default_factory=dict)
    maybe: set[BlockId] = field(default_factory=set)
    purged: set[BlockId] = field(default_factory=set)
    clock: int = 1_700_000_000_000_000_000

    def copy(self) -> Ledger:
        """Return an independent one."""
        return Ledger(dict(self.durable), set(self.maybe), set(self.purged), self.clock)

    def tick(self) -> int:
        """Return a time later than every other one."""
        self.clock += 1000
        return self.clock


@dataclass(frozen=True, slots=True)
class Disk:
    """What the tiers of a course have in common: budget and abilities of the file system."""

    blocks: int = 12
    direct: bool = True
    punching: bool = True
    index_entry_bytes: int = 0
    """How much the index grows with each entry: what it takes, blocks are given up for."""

    @property
    def data_bytes(self) -> int:
        """What the slots may occupy."""
        segments = -(-self.blocks // SLOTS_PER_SEGMENT)
        return self.blocks * max(SIZES) + segments * SEGMENT_METADATA_BYTES

    @property
    def limit_bytes(self) -> int:
        """The tier's budget: slots, and what it keeps back for index and small files."""
        return self.data_bytes + INDEX_COMMIT_BYTES_MAX + OTHER_BYTES


class Course:
    """An open tier with its ledger. Problems are collected in ``problems``, in words.

    ``crash_at_points`` looks, at every step of the disk and of the index from then on, at what a
    crash would leave: opened again, everything in the ledger must hold, and the tier must go on.
    """

    def __init__(
        self,
        disk: Disk | None = None,
        fs: CrashFileSystem | None = None,
        index: CrashIndex | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.disk = Disk() if disk is None else disk
        points = Points() if fs is None else fs.points
        self.fs = (
            CrashFileSystem(points, direct=self.disk.direct, punching=self.disk.punching)
            if fs is None
            else fs
        )
        self.index = (
            CrashIndex(self.fs.points, entry_bytes=self.disk.index_entry_bytes)
            if index is None
            else index
        )
        self.ledger = Ledger() if ledger is None else ledger
        self.problems: list[str] = []
        self.crashes = 0
        self.rebuilt = False
        self._doing = "open"
        self.tier: SsdTier

    def open(self) -> None:
        """Open the tier on what the disk holds."""
        with self._step("open"):
            root = self.fs.open_directory("")
            segments = self.fs.open_subdirectory(root, "segments")
            self.fs.sync_directory(root)
            # An index that is empty beside segments counts as lost: it is rebuilt.
            self.rebuilt = self.rebuilt or self.index.lost or not self.index.stored
            self.tier = SsdTier(
                segments,
                self.index,
                self.fs,
                limit_bytes=self.disk.limit_bytes,
                segment_bytes_max=SLOTS_PER_SEGMENT * max(SIZES) + PAGE_BYTES,
                now_ns=self.ledger.tick,
            )

    def close(self) -> None:
        """Close the tier."""
        with self._step("close"):
            self.tier.close()

    def reopen(self, *, lose_index: bool = False) -> None:
        """Close and open again, perhaps with an index that cannot be read any more."""
        self.close()
        self.index = self.index.survive(lost=lose_index)
        self.index.points = self.fs.points
        self.open()

    # -- operations; each says in the ledger what it promises

    def write(self, numbers: Sequence[int]) -> list[Location | None]:
        """Store blocks that are not stored."""
        ledger = self.ledger
        created = ledger.tick()
        records = [record(number, created_ns=created) for number in numbers]
        ids = [each.id for each in records]
        assert not set(ids) & set(ledger.durable), "a block is written once"
        ledger.maybe |= set(ids)
        ledger.purged -= set(ids)
        failures = self.index.failures
        with self._step(f"write {list(numbers)}"):
            placed = self.tier.write(records, [payload(each) for each in records])
        for block, where in zip(ids, placed, strict=True):
            if where is not None:
                ledger.durable[block] = where
            if self.index.failures == failures:
                ledger.maybe.discard(block)
        return list(placed)

    def drop(self, numbers: Sequence[int]) -> None:
        """Evict blocks that are stored; an index that fails keeps them, or nobody knows."""
        gone = {record(number).id for number in numbers} & set(self.ledger.durable)
        where = [self.ledger.durable.pop(block) for block in gone]
        self.ledger.maybe |= gone
        with self._step(f"drop {list(numbers)}"):
            try:
                self.tier.drop(list(gone), where)
            except OSError:
                assert self.index.failures
                return
            self.ledger.maybe -= gone

    def purge(self, numbers: Sequence[int]) -> None:
        """Drop blocks and destroy what is left of all that is not stored."""
        self.drop(numbers)
        with self._step(f"destroy after {list(numbers)}"):
            self.tier.destroy()
            # Not these alone: whatever is not stored now, also what was evicted long ago.
            gone = set(_NUMBERS) - set(self.ledger.durable) - self.ledger.maybe
            self.ledger.purged |= gone
            for block in gone:
                for where in self.fs.traces(_NO_TAG + block.hash):
                    self._problem(f"{block}: its header is left in {where}")
                for where in self.fs.traces(payload_of(block, 64)):
                    self._problem(f"{block}: its bytes are left in {where}")

    def write_evicting(self, numbers: Sequence[int]) -> None:
        """Store blocks, giving up the oldest ones for as many as there is room for without them.

        Makes room as the store does: disk that nothing uses, then slots of the same size, then
        blocks of the other size, whose disk is reclaimed.
        """
        for kind in (0, 1):
            wanted = [number for number in numbers if number % 2 == kind]
            if wanted:
                self._make_room(kind, len(wanted), spare=numbers)
                self.write(wanted)

    def _make_room(self, kind: int, count: int, *, spare: Sequence[int]) -> None:
        tier, size = self.tier, SIZES[kind]
        victims = [number for number in self.stored() if number not in spare]
        with self._step(f"reclaim for {count} of {size} bytes"):
            while tier.over_limit():
                tier.trim()
                if tier.over_limit() and not victims:
                    break
                if tier.over_limit():
                    self.drop([victims.pop(0)])
            tier.reclaim(size, count)
        missing = count - tier.room(size)
        if missing > 0:
            own = [number for number in victims if number % 2 == kind][:missing]
            if own:
                self.drop(own)
            victims = [number for number in victims if number not in own]
        while tier.room(size) == 0 and victims:
            self.drop([victims.pop(0)])
            with self._step(f"reclaim for {count} of {size} bytes"):
                tier.reclaim(size, count)

    def stored(self) -> list[int]:
        """Return the numbers of the blocks that must be there, oldest first."""
        return [_NUMBERS[block] for block in self.ledger.durable]

    def check(self) -> None:
        """Read everything that the tier says is there and compare it with the ledger.

        If the index was rebuilt, evicted blocks may be there again, and a header may have outlived
        its payload; purged blocks may not, and no byte may be wrong.
        """
        ledger = self.ledger
        found = self._found()
        for block, where in found.items():
            result = self._read(block, where)
            if block in ledger.purged:
                self._problem(f"{block} came back after its purge ({result.name})")
            elif block in ledger.durable and result is not ReadResult.OK:
                self._problem(f"{block} was durable and is {result.name}")
            elif not self.rebuilt and block not in ledger.durable and block not in ledger.maybe:
                self._problem(f"{block} is in the index and was not stored ({result.name})")
        if not self.disk.index_entry_bytes:
            for block in set(ledger.durable) - set(found):
                self._problem(f"{block} was durable and is not found")
        ledger.durable = {block: where for block, where in found.items() if block in ledger.durable}
        self._check_books()

    def check_live(self) -> None:
        """Read what must be there where the tier said that it put it."""
        for block, where in self.ledger.durable.items():
            result = self._read(block, where)
            if result is not ReadResult.OK:
                self._problem(f"{block} was written and is {result.name}")
        self._check_books()

    # -- crashes

    def crash_at_points(
        self, hows: Sequence[str], seed: int = 0, *, kinds: int = 1, every: int = 1
    ) -> None:
        """From now on, look at every ``every``-th step at what a crash would leave.

        Each look takes ``kinds`` of the ``hows``, by chance, with and without the index.
        """
        chance = random.Random(seed)  # noqa: S311 - what survives is a matter of chance
        steps = 0

        def watch(what: str) -> None:
            nonlocal steps
            steps += 1
            self._check_disk()
            if steps % every == 0:
                for how in chance.sample(list(hows), kinds):
                    self._look(f"{what} #{steps}, {how}", how, chance)

        self.fs.points.watch = watch

    def _look(self, label: str, how: str, chance: random.Random) -> None:
        for lost in (False, True):
            self.crashes += 1
            survivor = self.after_crash(how, chance, lose_index=lost)
            try:
                survivor.recover()
            except Exception:  # noqa: BLE001 - told apart from what the course itself ran into
                survivor.problems.append(traceback.format_exc())
            without = ", index lost" if lost else ""
            self.problems += [
                f"crash in {self._doing} at {label}{without}: {problem}"
                for problem in survivor.problems
            ]

    def after_crash(self, how: str, chance: random.Random, *, lose_index: bool = False) -> Course:
        """Return the course that begins with what a crash at this moment would leave."""
        fs = self.fs.survive(SURVIVALS[how], chance)
        index = self.index.survive(lost=lose_index)
        index.points = fs.points
        survivor = Course(self.disk, fs, index, self.ledger.copy())
        survivor.rebuilt = self.rebuilt
        return survivor

    def recover(self) -> None:
        """Open after a crash, check, go on with the tier, and open once more."""
        self.open()
        self.check()
        self.settle_doubts()
        self.write_evicting([FRESH, FRESH + 1])
        self.reopen()
        self.check()
        self.close()
        if self.fs.open_handles():
            self._problem(f"{self.fs.open_handles()} files are still open")

    def settle_doubts(self) -> None:
        """Take what is there from now on for what must be there."""
        for block, where in self._found().items():
            if self._read(block, where) is ReadResult.OK:
                self.ledger.durable[block] = where
            else:
                self.tier.drop([block], [where])
                self.ledger.durable.pop(block, None)
        self.ledger.maybe.clear()
        self.rebuilt = False

    # -- inside

    def _found(self) -> dict[BlockId, Location]:
        entries = self.tier.entries
        places = entries[["segment", "slot", "slot_bytes"]].tolist()
        return {id_at(entries, row): Location(*where) for row, where in enumerate(places)}

    def _read(self, block: BlockId, where: Location) -> ReadResult:
        nbytes = SPECS[_NUMBERS[block] % 2].block_layout.block_bytes
        with mmap.mmap(-1, nbytes) as room, memoryview(room) as buffer:
            (result,) = self.tier.read([block], [where], [buffer])
            if result is ReadResult.OK and buffer != _payload(block, nbytes):
                self._problem(f"{block} READ BACK WRONG from {where}")
        return result

    def _check_books(self) -> None:
        self.problems += [f"after {self._doing}: {problem}" for problem in self.tier.check()]
        used, index = self.fs.used_bytes(), self.index.disk_bytes()
        booked = self.tier.usage().used_bytes
        if used + index > booked:
            self._problem(f"{used} bytes of segments, {index} of index, {booked} in the books")
        self._check_disk()

    def _check_disk(self) -> None:
        used = self.fs.used_bytes()
        growing = self.disk.index_entry_bytes
        index = self.index.disk_bytes() if growing else INDEX_COMMIT_BYTES_MAX
        if used + index > self.disk.limit_bytes:
            self._problem(f"{used} bytes of segments are too many beside {index} of index")

    def _problem(self, what: str) -> None:
        self.problems.append(f"after {self._doing}: {what}")

    @contextmanager
    def _step(self, doing: str) -> Iterator[None]:
        self._doing = doing
        yield


_NUMBERS: dict[BlockId, int] = {}


_payload = functools.lru_cache(maxsize=256)(payload_of)


def record(number: int, **fields: int) -> Record:
    """Return the record of a block; its slot size follows from its number."""
    made = record_of(number, SPECS[number % 2], **fields)
    _NUMBERS[made.id] = number
    return made
