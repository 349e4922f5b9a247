"""Writing on demotion against a model: what may be lost when, over any course of operations."""

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
    eventually,
    put,
    tiny_budget,
)
from test_store_model import BLOCKS, PROMPTS, blocks

import kvtier
from kvtier import TransferFailed
from kvtier.config import POLICIES

if TYPE_CHECKING:
    from kvtier import BlockKeys

HOSTS = {
    "one": {"host_bytes": HOST_SLOT_BYTES},
    "few": {"host_bytes": 4 * HOST_SLOT_BYTES, "host_low_water": 0.5},
    "some": {"host_bytes": 9 * HOST_SLOT_BYTES, "host_high_water": 0.6, "host_low_water": 0.3},
    "all": {"host_bytes": 40 * HOST_SLOT_BYTES},
}
SSDS = {"roomy": tiny_budget(60, per_segment=4), "tight": tiny_budget(9, per_segment=3)}
FAULTS = [
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("sync", errno.EIO),
    ("create", errno.ENOSPC),
]
prompts = st.sampled_from(PROMPTS)
hosts = st.sampled_from(sorted(HOSTS))
policies = st.sampled_from(["demote", "demote", "through"])
STAGING = 6


class DemoteModel(RuleBasedStateMachine):
    """A block's right bytes follow from its key; the model is which blocks may not be missing.

    ``known`` were put while the disk was well and must be found as long as it is, flushed or not;
    ``durable`` must be found whatever happens, in a copy of the directory too. Where the SSD is
    tight nothing is promised but right bytes, bounds and books.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="kvtier-demote-")
        self.fs = FaultyFileSystem()
        self.healthy = True
        self.known: set[bytes] = set()
        self.durable: set[bytes] = set()
        self.store: kvtier.Store | None = None

    @initialize(host=hosts, ssd=st.sampled_from(sorted(SSDS)), order=st.sampled_from(POLICIES))
    def start(self, host: str, ssd: str, order: str) -> None:
        """Open a new store."""
        self.policy = order
        self.roomy = ssd == "roomy"
        self.ssd = SSDS[ssd]
        self.store = self._open(host, "demote")

    def _open(self, host: str, policy: str) -> kvtier.Store:
        return kvtier.open(
            os.path.join(self.folder, "store"),
            SPEC,
            fs=self.fs,
            write_policy=policy,
            slot_wait_s_max=WAIT_S,
            staging_blocks_max=STAGING,
            write_batch_blocks_max=4,
            policy=self.policy,
            **HOSTS[host],
            **self.ssd,
        )

    def teardown(self) -> None:
        """Close the store soundly."""
        self.fs.heal()
        if self.store is not None:
            assert_sound(self.store)
            self.store.close()
        shutil.rmtree(self.folder)

    @rule(keys=prompts, wanted=blocks)
    def put(self, keys: BlockKeys, wanted: range) -> None:
        """Every block of a put is stored or present: a disk that fails holds no put up."""
        result = put(self.store, keys, wanted)
        assert result.dropped == 0
        assert result.stored + result.present == len(wanted)
        if self.healthy:
            self.known |= {keys[block] for block in wanted if self._of_use(keys, wanted, block)}

    def _of_use(self, keys: BlockKeys, wanted: range, block: int) -> bool:
        """Whether a block is kept: callers of contiguous prefixes need all those before it."""
        before = (b in wanted or keys[b] in self.known for b in range(block))
        return self.policy != "prefix-closed" or all(before)

    @rule(keys=prompts, way=st.sampled_from(["best", "load", "recompute"]))
    def restore(self, keys: BlockKeys, way: str) -> None:
        """Restore: it always completes, every byte right."""
        bring_back(self.store, keys, way=way)

    @rule(keys=prompts)
    def prefetch(self, keys: BlockKeys) -> None:
        """Prefetch: it ends, and changes no byte."""
        assert 0 <= self.store.prefetch(keys).result(WAIT_S) <= BLOCKS

    @rule(keys=prompts, other=prompts)
    def pinned(self, keys: BlockKeys, other: BlockKeys) -> None:
        """Pin a prompt: it does not go while others come and are written."""
        with self.store.pin(keys) as residency:
            put(self.store, other)
            self.store.flush()
            after = self.store.lookup(keys).tiers
            assert all(b for a, b in zip(residency.tiers, after, strict=True) if a)

    @rule()
    def flush(self) -> None:
        """Flush: what is found after it is durable, if the disk is well."""
        self.store.flush(WAIT_S)
        self._note_durable()

    @precondition(lambda self: self.healthy)
    @rule(host=hosts, policy=policies)
    def reopen(self, host: str, policy: str) -> None:
        """Restart with another host tier or policy: a close is as good as a flush."""
        self.store.close()
        self.store = self._open(host, policy)
        self.durable |= self.known
        assert not self.store.stats()["tiers"]["host"]["unsaved"]

    @rule()
    def crash(self) -> None:
        """Lose the process, and host memory with it: what was durable is found, bytes right."""
        eventually(lambda: not self.store._demoter._writing)
        copy = os.path.join(self.folder, "copy")
        shutil.copytree(self.store.path, copy)
        with kvtier.open(copy, SPEC, host_bytes=0, **self.ssd) as after:
            self._expect(after, self.durable)
            for keys in PROMPTS:
                bring_back(after, keys)
        shutil.rmtree(copy)

    @rule()
    def purge(self) -> None:
        """Purge: nothing is found, nothing comes back; or the disk's refusal is reported."""
        self.known.clear()
        self.durable.clear()
        try:
            assert self.store.purge(tenant="").left == 0
        except TransferFailed:
            assert not self.healthy
        else:
            assert sum(self.store.lookup(keys).stored for keys in PROMPTS) == 0

    @precondition(lambda self: self.healthy)
    @rule(fault=st.sampled_from(FAULTS), nth=st.integers(1, 4), times=st.sampled_from([1, 1 << 30]))
    def break_the_disk(self, fault: tuple[str, int], nth: int, times: int) -> None:
        """From now on writes fail, once or until repair: only what is durable is promised."""
        operation, error = fault
        self.fs.fail(operation, error, nth=nth, times=times, name=".seg")
        self.healthy = False
        self.known = set(self.durable)

    @precondition(lambda self: not self.healthy)
    @rule()
    def repair_the_disk(self) -> None:
        """Repair the disk: what is still found is promised again, and the next flush writes it."""
        self.store.flush(WAIT_S)
        eventually(self._relieved)
        self.fs.heal()
        self.healthy = True
        self.store.flush(WAIT_S)
        self._note_durable()

    @invariant()
    def nothing_promised_is_missing(self) -> None:
        """Check that every known block is in some tier at any time."""
        if self.store is not None:
            self._expect(self.store, self.known)

    @invariant()
    def books_balance(self) -> None:
        """Check that the store's own books are sound at any time."""
        if self.store is not None:
            assert self.store.check() == []

    @invariant()
    def bounds_hold(self) -> None:
        """Check that disk and host memory take no more than they may."""
        if self.store is not None:
            assert disk_bytes(self.store.path) <= self.store.config.ssd_bytes
            most = self.store.config.host_bytes + STAGING * HOST_SLOT_BYTES
            assert self.store.stats()["tiers"]["host"]["used_bytes"] <= most

    def _relieved(self) -> bool:
        host = self.store.stats()["tiers"]["host"]
        most = self.store.config.host_bytes // HOST_SLOT_BYTES
        return host["ready"] <= most and not self.store._demoter._writing

    def _note_durable(self) -> None:
        if self.healthy:
            found = {
                digest
                for keys in PROMPTS
                for digest, tier in zip(keys, self.store.lookup(keys).tiers, strict=True)
                if tier is not None
            }
            self.known |= found
            self.durable |= found

    def _expect(self, store: kvtier.Store, promised: set[bytes]) -> None:
        if self.roomy:
            missing = [
                (number, block)
                for number, keys in enumerate(PROMPTS)
                for block, tier in enumerate(store.lookup(keys).tiers)
                if tier is None and keys[block] in promised
            ]
            assert missing == []


TestDemoteModel = DemoteModel.TestCase
TestDemoteModel.settings = settings(max_examples=25, stateful_step_count=25)
