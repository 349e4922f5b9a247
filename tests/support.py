"""Helpers of the core's tests: tiny specs, known bytes, a file system that fails on demand."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import kvtier
from kvtier.tiers.base import BlockId, Record
from kvtier.tiers.device import TensorSlots
from kvtier.tiers.entries import id_at, table
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.index import INDEX_COMMIT_BYTES_MAX
from kvtier.tiers.segment import PAGE_BYTES
from kvtier.tiers.slabs import OTHER_BYTES, SEGMENT_METADATA_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kvtier.tiers.entries import Entries
    from kvtier.tiers.index import Use

WAIT_S = 30.0
"""How long a test waits for what must happen: a safety net, never a measurement."""

SPEC = kvtier.KVSpec(
    model="test/tiny",
    weights="sha256:0",
    dtype="float32",
    layers=3,
    kv_heads=2,
    head_dim=8,
    block_tokens=16,
)
SLOT_BYTES = 12 << 10
"""What one block of SPEC takes on disk: a page of header and 6 KiB of payload, in whole pages."""
HOST_SLOT_BYTES = 8 << 10
"""What one block of SPEC takes in host memory."""


def variant(**changes: Any) -> kvtier.KVSpec:
    """Return SPEC with other values."""
    return replace(SPEC, **{"parts": (), "v_head_dim": 0, **changes})


# -- prompts and bytes


def prompt(blocks: int, seed: int = 0, extra: int = 0, spec: kvtier.KVSpec = SPEC) -> list[int]:
    """Return the token ids of a prompt with so many full blocks and ``extra`` tokens more."""
    numbers = random.Random(seed)  # noqa: S311 - token ids
    return [numbers.randrange(50_000) for _ in range(blocks * spec.block_tokens + extra)]


def prompt_keys(blocks: int, seed: int = 0, spec: kvtier.KVSpec = SPEC) -> kvtier.BlockKeys:
    """Return the keys of ``prompt(blocks, seed)``."""
    return kvtier.BlockKeys.of(spec, prompt(blocks, seed, spec=spec))


def payload_of(block: BlockId, nbytes: int) -> bytes:
    """Return the bytes that tests store for a block: its own, the same every time."""
    return hashlib.shake_128(block.namespace + block.hash).digest(nbytes)


def expected(keys: kvtier.BlockKeys, block: int, spec: kvtier.KVSpec = SPEC) -> bytes:
    """Return the bytes that block ``block`` of a prompt must have after a restore."""
    return payload_of(BlockId(keys.namespace, keys[block]), spec.block_layout.block_bytes)


def read_slots(slots: kvtier.KVSlots, block: int) -> bytes:
    """Return a block's bytes in an engine's slots, read without kvtier's own copy code."""
    return b"".join(
        tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in slots.parts(block)
    )


def fill_slots(
    slots: kvtier.KVSlots,
    keys: kvtier.BlockKeys,
    blocks: Iterable[int],
    spec: kvtier.KVSpec = SPEC,
) -> None:
    """Put the known bytes of some blocks into an engine's slots: what recomputing them gives."""
    for block in blocks:
        data = bytearray(expected(keys, block, spec))
        for tensor, part in zip(slots.parts(block), slots.layout.tensors, strict=True):
            raw = torch.frombuffer(data, dtype=torch.uint8, offset=part.offset, count=part.nbytes)
            tensor.copy_(raw.view(tensor.dtype).view(part.shape))


def poisoned_slots(blocks: int, spec: kvtier.KVSpec = SPEC) -> TensorSlots:
    """Return slots that hold NaN (or -1) everywhere, so that what nobody wrote shows."""
    slots = TensorSlots.empty(spec, max(blocks, 1))
    for tensor in slots.tensors:
        tensor.view(torch.uint8).fill_(0xFF)
    return slots


def filled_slots(keys: kvtier.BlockKeys, spec: kvtier.KVSpec = SPEC) -> TensorSlots:
    """Return slots that hold a prompt's known bytes."""
    slots = poisoned_slots(len(keys), spec)
    fill_slots(slots, keys, range(len(keys)), spec)
    return slots


POISON = b"\xff" * SPEC.block_layout.block_bytes


def record_of(
    number: int, spec: kvtier.KVSpec = SPEC, namespace: bytes | None = None, **fields: Any
) -> Record:
    """Return the record of a made-up block."""
    layout = spec.block_layout
    digest = hashlib.sha256(b"block %d" % number).digest()
    own = {
        "id": BlockId(spec.namespace if namespace is None else namespace, digest),
        "parent": hashlib.sha256(b"block %d" % (number - 1)).digest(),
        "position": number,
        "tenant_digest": hashlib.sha256(b"").digest(),
        "part_bytes": layout.part_bytes,
        "shapes": layout.parts,
        "created_ns": 1_700_000_000_000_000_000 + number,
    }
    return Record(**{**own, **fields})


def payload(record: Record) -> memoryview:
    """Return the bytes that tests store for a record."""
    return memoryview(payload_of(record.id, record.payload_bytes))


# -- what a store does, end to end


def put(
    store: kvtier.Store, keys: kvtier.BlockKeys, blocks: range | None = None, **options: Any
) -> kvtier.PutResult:
    """Store blocks of a prompt with their known bytes and wait for the outcome."""
    source = filled_slots(keys, store.spec)
    return store.put(keys, source, blocks=blocks, **options).result(WAIT_S)


@dataclass
class Restored:
    """What ``bring_back`` saw."""

    slots: TensorSlots
    recomputed: list[int]
    report: kvtier.RestoreReport

    @property
    def loaded(self) -> int:
        """Blocks that came out of the store."""
        return self.report.loaded


def bring_back(
    store: kvtier.Store,
    keys: kvtier.BlockKeys,
    *,
    way: str = "load",
    plan: kvtier.RestorePlan | None = None,
    timeout: float = WAIT_S,
) -> Restored:
    """Restore a prompt into poisoned slots, recomputing what is asked for; checks every byte."""
    if plan is None:
        plan = store.plan(store.lookup(keys), way=way)
    slots = poisoned_slots(len(keys), store.spec)
    recomputed: list[int] = []
    with store.restore(plan, into=slots) as session:
        while step := session.next_step(timeout=timeout):
            fill_slots(slots, keys, step.blocks, store.spec)
            recomputed += step.blocks
            session.computed(step)
    wrong = [b for b in range(plan.resident, len(keys)) if not is_right(slots, keys, b, store.spec)]
    assert wrong == [], f"blocks {wrong} do not have the bytes that were stored"
    report = session.report
    assert report.loaded + report.recomputed == len(keys) - plan.resident
    assert report.recomputed == len(recomputed)
    return Restored(slots, recomputed, report)


def is_right(
    slots: kvtier.KVSlots, keys: kvtier.BlockKeys, block: int, spec: kvtier.KVSpec = SPEC
) -> bool:
    """Whether a block in an engine's slots has its known bytes, bit for bit."""
    return read_slots(slots, block) == expected(keys, block, spec)


def assert_sound(store: kvtier.Store) -> None:
    """Check a store at rest: books balance, nothing is pinned, the disk agrees with the budget."""
    store.flush(WAIT_S)
    settle(store)
    assert store.check() == []
    assert store.stats()["pins"] == 0
    # An empty store has its directories, a spec and an empty index, whatever its budget.
    assert disk_bytes(store.path) <= max(store.config.ssd_bytes, 160 << 10)


def settle(store: kvtier.Store) -> None:
    """Wait until reads that nobody waits for any more have let go of their blocks."""
    catalog = store._catalog
    with catalog.changed:
        assert catalog.changed.wait_for(lambda: catalog.pins() == 0, WAIT_S), "a pin was left"


def disk_bytes(path: str | Path) -> int:
    """Return what a directory occupies, as ``du`` counts it."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def segment_files(path: str | Path) -> list[str]:
    """Return the paths of a store's segment files, oldest first."""
    folder = os.path.join(path, "segments")
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def flip(path: str | Path, offset: int, mask: int = 0xFF) -> None:
    """Change one byte of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]) if byte else b"")


def run_python(
    code: str,
    *args: str,
    check: bool = True,
    flags: Sequence[str] = (),
    limit_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that can import ``support``."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([here, os.path.dirname(here), *filter(None, [_python_path()])])
    return subprocess.run(
        [sys.executable, *flags, "-c", code, *args],
        check=check,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "")


# -- seams


class Gate:
    """Holds whoever comes through until it is opened; ``reached`` says that somebody did."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let everybody through, now and later."""
        self._open.set()

    def pass_through(self) -> None:
        """Wait until the gate is open; a gate that nobody opens fails the test, not the machine."""
        self.reached.set()
        if not self._open.wait(WAIT_S):
            raise AssertionError("a gate was never opened")

    def wait_reached(self) -> None:
        """Wait until somebody stands at the gate."""
        assert self.reached.wait(WAIT_S), "nobody came to the gate"


@dataclass
class _Rule:
    operation: str
    name: str
    skip: int
    times: int
    act: Callable[[], None] | None
    short: int | None = None


@dataclass
class FaultyFileSystem:
    """The real file system, with faults to order. ``counts`` says what was asked of it.

    Rules apply to the operations of this class by name; ``name`` narrows one down to files whose
    name ends so (a descriptor answers to the name it was opened by).
    """

    inner: PosixFileSystem = field(default_factory=PosixFileSystem)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._names: dict[int, str] = {}

    # -- orders

    def fail(
        self,
        operation: str,
        error: int | BaseException = errno.EIO,
        *,
        nth: int = 1,
        times: int = 1 << 30,
        name: str = "",
    ) -> None:
        """Let the ``nth`` matching call from now on fail, and ``times`` calls in all."""

        def act() -> None:
            if isinstance(error, BaseException):
                raise error
            raise OSError(error, os.strerror(error))

        self._add(_Rule(operation, name, nth - 1, times, act))

    def hold(self, operation: str, *, nth: int = 1, name: str = "") -> Gate:
        """Let the ``nth`` matching call and those after it wait at the gate that is returned."""
        gate = Gate()
        self._add(_Rule(operation, name, nth - 1, 1 << 30, gate.pass_through))
        return gate

    def delay(self, operation: str, seconds: float, *, name: str = ".seg") -> None:
        """Let every matching call from now on take so much longer."""
        self._add(_Rule(operation, name, 0, 1 << 30, partial(time.sleep, seconds)))

    def shorten(self, nbytes: int, *, nth: int = 1, times: int = 1, name: str = ".seg") -> None:
        """Let reads end ``nbytes`` early: those bytes are not filled and not counted."""
        self._add(_Rule("read", name, nth - 1, times, None, short=nbytes))

    def heal(self) -> None:
        """Forget all orders."""
        with self._lock:
            self._rules.clear()

    def reads(self, name: str = ".seg") -> int:
        """Return how many reads of such files there were."""
        with self._lock:
            return sum(
                n for key, n in self.counts.items() if key.startswith("read ") and name in key
            )

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _count(self, operation: str, name: str) -> int:
        """Count a call, apply what was ordered for it, and return by how much to shorten it."""
        due: list[Callable[[], None]] = []
        short = 0
        with self._lock:
            self.counts[operation] += 1
            self.counts[f"{operation} {name}"] += 1
            for rule in self._rules:
                if rule.operation != operation or not name.endswith(rule.name):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                elif rule.times > 0:
                    rule.times -= 1
                    if rule.act is not None:
                        due.append(rule.act)
                    short = max(short, rule.short or 0)
        for act in due:
            act()
        return short

    def _name(self, fd: int) -> str:
        with self._lock:
            return self._names.get(fd, "")

    # -- the file system

    def open_directory(self, path: str) -> int:
        """Open a directory."""
        self._count("open_directory", path)
        return self.inner.open_directory(path)

    def open_file(
        self, directory: int, name: str, *, write: bool, create: bool, direct: bool = False
    ) -> int:
        """Open a file."""
        self._count("open_file", name)
        if create:
            self._count("create", name)
        fd = self.inner.open_file(directory, name, write=write, create=create, direct=direct)
        with self._lock:
            self._names[fd] = name
        return fd

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read at an offset."""
        short = self._count("read", self._name(fd))
        if not short:
            return self.inner.read(fd, into, offset)
        left = max(sum(buffer.nbytes for buffer in into) - short, 0)
        wanted = []
        for buffer in into:
            wanted.append(buffer[: min(left, buffer.nbytes)])
            left -= wanted[-1].nbytes
        return self.inner.read(fd, [buffer for buffer in wanted if buffer.nbytes], offset)

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """Write at an offset."""
        self._count("write", self._name(fd))
        self.inner.write(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Sync a file."""
        self._count("sync", self._name(fd))
        self.inner.sync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        with self._lock:
            self._names.pop(fd, None)
        self.inner.close(fd)

    def rename(self, directory: int, old: str, new: str) -> None:
        """Rename a file."""
        self._count("rename", new)
        self.inner.rename(directory, old, new)

    def unlink(self, directory: int, name: str) -> None:
        """Remove a file."""
        self._count("unlink", name)
        self.inner.unlink(directory, name)

    def names(self, directory: int) -> list[str]:
        """List a directory."""
        self._count("names", "")
        return self.inner.names(directory)

    def __getattr__(self, name: str) -> Any:
        # Whatever else the file system has or will have goes through, counted.
        method = getattr(self.inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._count(name, "")
            return method(*args, **kwargs)

        return call


class MemoryIndex:
    """An index in memory whose commits fail on demand; give ``stored`` to reopen one."""

    def __init__(self, stored: dict[BlockId, bytes] | None = None) -> None:
        self.stored = {} if stored is None else stored
        self.error: BaseException | None = None
        self.uses: list[Use] = []
        self.closed = False

    def entries(self) -> Entries:
        """Return all entries."""
        return table(list(self.stored.values()))

    def commit(
        self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use] = ()
    ) -> None:
        """Apply removals and additions."""
        if self.error is not None:
            raise self.error
        for block in remove:
            self.stored.pop(block, None)
        for entry in put:
            self.stored[id_at(table(entry), 0)] = entry
        self.uses += uses

    def rebuild(self, entries: Sequence[bytes]) -> None:
        """Replace everything."""
        self.stored.clear()
        self.commit(entries, ())

    def reset(self) -> None:
        """Start afresh."""
        self.stored.clear()

    def reopen(self) -> None:
        """Go on with what is there."""

    def healthy(self) -> bool:
        """Say that it is alive."""
        return True

    def disk_bytes(self) -> int:
        """Return what the index occupies on disk."""
        return 0

    def write_bytes(self) -> int:
        """Return what the index has written."""
        return 0

    def close(self) -> None:
        """Close the index."""
        self.closed = True


class FaultyIndex:
    """A real index whose commits fail while ``error`` is set, or wait at a gate."""

    def __init__(self, inner: Any, gate: Gate | None = None) -> None:
        self._inner = inner
        self._gate = gate
        self.error: BaseException | None = None
        self.commits = 0

    def commit(
        self, put: Sequence[bytes], remove: Sequence[BlockId], uses: Sequence[Use] = ()
    ) -> None:
        """Commit, or fail."""
        self.commits += 1
        if self._gate is not None:
            self._gate.pass_through()
        if self.error is not None:
            raise self.error
        self._inner.commit(put, remove, uses)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def faulty_index(store: kvtier.Store, gate: Gate | None = None) -> FaultyIndex:
    """Put a faulty index in front of an open store's."""
    ledger = store._ssd._ledger
    index = FaultyIndex(ledger._index, gate)
    ledger._index = index
    return index


class HeldSlots:
    """Slots whose ``parts`` waits at a gate: a copy that a test holds in the middle."""

    def __init__(self, slots: TensorSlots, gate: Gate) -> None:
        self._slots = slots
        self._gate = gate

    @property
    def layout(self) -> kvtier.BlockLayout:
        """The layout of each block."""
        return self._slots.layout

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._slots.device

    def parts(self, block: int) -> Sequence[torch.Tensor]:
        """Return the block's tensors once the gate is open."""
        self._gate.pass_through()
        return self._slots.parts(block)


def eventually(what: Callable[[], object]) -> None:
    """Wait until something that nobody can be asked to announce has come about."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.001)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``work`` on a thread; the function returned waits for its result."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((True, work()))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            box.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a call did not come back"
        ok, value = box[0]
        if ok:
            return value
        raise value

    return result


def random_bytes(seed: int, count: int) -> bytes:
    """Return bytes that look like nothing."""
    return np.random.default_rng(seed).bytes(count)


def tiny_budget(blocks: int, per_segment: int = 6) -> dict[str, int]:
    """Return the settings of a store whose SSD tier has room for about so many blocks."""
    segments = -(-blocks // per_segment)
    data = blocks * SLOT_BYTES + segments * SEGMENT_METADATA_BYTES
    return {
        "ssd_bytes": INDEX_COMMIT_BYTES_MAX + OTHER_BYTES + (96 << 10) + data,
        "segment_bytes_max": per_segment * SLOT_BYTES + PAGE_BYTES,
    }
