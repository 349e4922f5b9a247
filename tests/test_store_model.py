"""The whole store against a model: any course of operations, restarts, damage and failing disks."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support import (
    HOST_SLOT_BYTES,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    assert_sound,
    bring_back,
    disk_bytes,
    flip,
    prompt,
    put,
    segment_files,
    settle,
    tiny_budget,
)

import kvtier
from kvtier import TransferFailed

if TYPE_CHECKING:
    from kvtier import BlockKeys

BLOCKS = 5
BLOCK_BYTES = SPEC.block_layout.block_bytes
# Prompts that share heads: two families of a common head of two blocks, three tails each.
PROMPTS = [
    kvtier.BlockKeys.of(SPEC, prompt(2, seed=family) + prompt(3, seed=10 * family + tail))
    for family in (1, 2)
    for tail in (1, 2, 3)
]
BUDGETS = {
    "memory": {"host_bytes": 8 * HOST_SLOT_BYTES, **tiny_budget(0)},
    "tiny": {"host_bytes": 0, "device_bytes": BLOCK_BYTES, **tiny_budget(7, per_segment=3)},
    "small": {"host_bytes": 2 * HOST_SLOT_BYTES, **tiny_budget(10, per_segment=4)},
    "roomy": {
        "host_bytes": 8 * HOST_SLOT_BYTES,
        "device_bytes": 4 * BLOCK_BYTES,
        **tiny_budget(60, per_segment=4),
    },
}
prompts = st.sampled_from(PROMPTS)
blocks = st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)).map(
    lambda pair: range(min(pair), max(pair))
)
budgets = st.sampled_from(sorted(BUDGETS))
FAULTS = [
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("sync", errno.EIO),
    ("read", errno.EIO),
    ("punch", errno.EIO),
    ("open_file", errno.EMFILE),
]


class StoreModel(RuleBasedStateMachine):
    """A block's right bytes follow from its key, so the model of what is stored is a function.

    What may be missing depends on eviction and damage; what may never be is a wrong byte, a budget
    exceeded, or books that do not balance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="kvtier-model-")
        self.fs = FaultyFileSystem()
        self.healthy = True
        self.store: kvtier.Store | None = None

    @initialize(budget=budgets)
    def start(self, budget: str) -> None:
        """Open a new store."""
        self.budget = BUDGETS[budget]
        self.store = self._open()

    def _open(self) -> kvtier.Store:
        path = os.path.join(self.folder, "store")
        return kvtier.open(path, SPEC, fs=self.fs, slot_wait_s_max=WAIT_S, **self.budget)

    def teardown(self) -> None:
        """Close the store soundly."""
        self.fs.heal()
        if self.store is not None:
            assert_sound(self.store)
            self.store.close()
        shutil.rmtree(self.folder)

    @rule(keys=prompts, wanted=blocks)
    def put(self, keys: BlockKeys, wanted: range) -> None:
        """Every block of a put is stored, present or dropped; dropped only for a reason."""
        result = put(self.store, keys, wanted)
        assert result.stored + result.present + result.dropped == len(wanted)

    @precondition(lambda self: self.healthy)
    @rule(keys=prompts)
    def put_and_find(self, keys: BlockKeys) -> None:
        """With a healthy disk, what a put stored is found after a flush."""
        new = [b for b, tier in enumerate(self.store.lookup(keys).tiers) if tier is None]
        result = put(self.store, keys)
        self.store.flush()
        if result.dropped == 0:
            found = self.store.lookup(keys).tiers
            assert [b for b in new if found[b] is None] == []
        else:
            assert self.tampered or self.budget is BUDGETS["memory"]

    @rule(keys=prompts, way=st.sampled_from(["best", "load", "recompute"]))
    def restore(self, keys: BlockKeys, way: str) -> None:
        """Restore: it always completes, every byte right."""
        bring_back(self.store, keys, way=way)

    @rule(keys=prompts)
    def restore_twice(self, keys: BlockKeys) -> None:
        """Restore twice: damage is noticed once; after that it is a miss."""
        bring_back(self.store, keys)
        if self.healthy:
            again = bring_back(self.store, keys)
            assert again.report.failed == 0

    @rule(keys=prompts, tier=st.sampled_from(["host", "device"]))
    def prefetch(self, keys: BlockKeys, tier: str) -> None:
        """Prefetch: it ends, and changes no byte."""
        assert 0 <= self.store.prefetch(keys, tier).result(WAIT_S) <= BLOCKS

    @rule(keys=prompts, other=prompts)
    def pinned(self, keys: BlockKeys, other: BlockKeys) -> None:
        """Pin a prompt: it does not go while others come."""
        with self.store.pin(keys) as residency:
            put(self.store, other)
            self.store.flush()
            after = self.store.lookup(keys).tiers
            assert all(b for a, b in zip(residency.tiers, after, strict=True) if a)

    @rule()
    def flush(self) -> None:
        """Flush: it ends."""
        self.store.flush(WAIT_S)

    @rule(budget=budgets)
    def reopen(self, budget: str) -> None:
        """Restart with the same budget or another."""
        self._close()
        self.budget = BUDGETS[budget]
        self.store = self._open()

    @precondition(lambda self: self.healthy)
    @rule()
    def restart(self) -> None:
        """Restart with the same budget: every durable block is still there."""
        self.store.flush()
        settle(self.store)
        before = self._on_disk()
        used = self.store.stats()["tiers"]["ssd"]["used_bytes"]
        self._close()
        self.store = self._open()
        if not self.tampered:
            assert self._on_disk() == before
            # Closing wrote hits and last uses, for which the index may have grown.
            assert self.store.stats()["tiers"]["ssd"]["used_bytes"] <= used + (32 << 10)

    tampered = False
    """Whether anything happened to the files that a restart may notice."""

    def _on_disk(self) -> set[bytes]:
        return set(self.store._catalog.blocks(SPEC.namespace, kvtier.Tier.SSD, 1000))

    def _close(self) -> None:
        healthy = self.healthy
        if not healthy:
            self.fs.heal()
        self.store.close()
        self.healthy = True

    # What is drawn must not depend on the files, whose sizes depend on the order of threads.

    @rule(which=st.integers(0, 9), at=st.integers(0, 1 << 17), bit=st.integers(0, 7))
    def flip_a_byte(self, which: int, at: int, bit: int) -> None:
        """Bit rot, anywhere in a segment, while the store is open."""
        files = segment_files(self.store.path)
        if files:
            path = files[which % len(files)]
            self.tampered = True
            flip(path, at % max(os.path.getsize(path), 1), 1 << bit)

    @rule(
        which=st.integers(0, 9),
        at=st.integers(0, 1 << 17),
        how=st.sampled_from(["delete", "truncate", "index"]),
    )
    def lose_something_while_closed(self, which: int, at: int, how: str) -> None:
        """Lose a segment or the index, or cut one short, before the next open."""
        path = self.store.path
        self._close()
        self.tampered = True
        files = segment_files(path)
        victim = files[which % len(files)] if files else None
        if how == "index":
            os.unlink(os.path.join(path, "index", "data.mdb"))
        elif victim and how == "delete":
            os.unlink(victim)
        elif victim:
            os.truncate(victim, at % (os.path.getsize(victim) + 1))
        self.store = self._open()

    @rule(keys=prompts)
    def purge(self, keys: BlockKeys) -> None:
        """Purge: nothing of what was stored is found, or the disk's refusal is reported."""
        try:
            result = self.store.purge(tenant="")
        except TransferFailed:
            assert not self.healthy
            return
        assert result.left == 0
        assert self.store.lookup(keys).stored == 0

    @rule()
    def kill_the_index(self) -> None:
        """End the index's process, as a damaged page would: it is started again when wanted."""
        keeper = self.store._ssd._ledger._index._link._process
        keeper.kill()
        keeper.wait(WAIT_S)

    @rule(at=st.integers(0, 1 << 16), bit=st.integers(0, 7))
    def flip_a_byte_of_the_index(self, at: int, bit: int) -> None:
        """Damage the index under the open store: blocks may go, bytes stay right."""
        data = os.path.join(self.store.path, "index", "data.mdb")
        if os.path.exists(data):
            flip(data, at % os.path.getsize(data), 1 << bit)
        self.tampered = True

    @precondition(lambda self: self.healthy)
    @rule(fault=st.sampled_from(FAULTS), nth=st.integers(1, 4), times=st.sampled_from([1, 1 << 30]))
    def break_the_disk(self, fault: tuple[str, int], nth: int, times: int) -> None:
        """From now on the disk fails, once or until it is repaired."""
        operation, error = fault
        self.fs.fail(operation, error, nth=nth, times=times, name=".seg")
        self.healthy = False

    @precondition(lambda self: not self.healthy)
    @rule()
    def repair_the_disk(self) -> None:
        """Repair the disk."""
        self.store.flush(WAIT_S)
        self.fs.heal()
        self.healthy = True

    @invariant()
    def books_balance(self) -> None:
        """Check that the store's own books are sound at any time."""
        if self.store is not None:
            assert self.store.check() == []

    @invariant()
    def the_budget_holds(self) -> None:
        """Check that neither the directory nor the device tier takes more than it may."""
        if self.store is not None:
            device = self.store.stats()["tiers"]["device"]
            assert device["used_bytes"] <= device["limit_bytes"]
            assert disk_bytes(self.store.path) <= self.store.config.ssd_bytes


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=25, stateful_step_count=25)
