"""A store of very many blocks, made without writing them; and what opening it costs.

The index is real and holds an entry for every block. Of the segments only the first pages are
written; their slots are allocated, not holes, and as many files exist as a store with blocks of
1 MiB would have. Run as a script, it opens the store in a fresh process and prints what that took.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _disk import PAGE
from _harness import Stopwatch

import kvtier
from kvtier.tiers.entries import ENTRY, ENTRY_VERSION
from kvtier.tiers.index import LmdbIndex
from kvtier.tiers.segment import SegmentHeader, encode_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.identity import BlockKeys

SPEC: Final = kvtier.KVSpec(
    model="bench/million", weights="sha256:0", dtype="bfloat16", layers=1, kv_heads=1, head_dim=4
)
PROMPT_TOKENS: Final = 128 << 10
"""Tokens of the prompt whose blocks are among those stored."""
SLOT_BYTES: Final = PAGE + SPEC.block_layout.block_bytes
SEGMENT_SLOTS: Final = 255
"""As many slots as segments of 256 MiB have for blocks of 1 MiB."""
COMMIT_ENTRIES: Final = 16 << 10
"""Entries that are committed to the index at once."""


def prompt_tokens() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens of the prompt that is stored."""
    return np.random.default_rng(7).integers(0, 128 << 10, PROMPT_TOKENS, dtype=np.int64)


def prompt_keys() -> BlockKeys:
    """Return the keys of the prompt that is stored."""
    return kvtier.BlockKeys.of(SPEC, prompt_tokens())


def open_store(path: Path, blocks: int) -> kvtier.Store:
    """Open a store with room for ``blocks`` blocks and next to no host memory."""
    return kvtier.open(
        path,
        SPEC,
        host_bytes=0,
        ssd_bytes=2 * blocks * SLOT_BYTES + (2 << 30),
        segment_bytes_max=PAGE + SEGMENT_SLOTS * SLOT_BYTES,
    )


def build(path: Path, blocks: int) -> Iterator[int]:
    """Make a store of ``blocks`` blocks in ``path``; yields how many are in the index so far."""
    with open_store(path, blocks) as store:
        index_bytes_max = store.config.index_bytes_max
    files = -(-blocks // SEGMENT_SLOTS)
    first = time.time_ns()
    for segment in range(first, first + files):
        header = SegmentHeader(segment, SEGMENT_SLOTS, SLOT_BYTES)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        fd = os.open(path / "segments" / f"{segment:016x}.seg", flags, 0o600)
        os.pwrite(fd, encode_segment(header), 0)
        os.posix_fallocate(fd, 0, PAGE + SEGMENT_SLOTS * SLOT_BYTES)
        os.close(fd)
    index = LmdbIndex(str(path / "index"), index_bytes_max)
    for start in range(0, blocks, COMMIT_ENTRIES):
        rows = np.arange(start, min(start + COMMIT_ENTRIES, blocks))
        index.commit([entry.tobytes() for entry in _entries(rows, first)], [])
        yield len(rows)
    index.close()


def _entries(rows: np.ndarray[Any, Any], first_segment: int) -> np.ndarray[Any, Any]:
    """Return the entries of some blocks; the first ones are the prompt's."""
    hashes = np.random.default_rng(rows[0]).bytes(32 * len(rows))
    stored = np.frombuffer(hashes, dtype="V32").copy()
    keys = prompt_keys()
    inside = rows[rows < len(keys.hashes)]
    if len(inside):
        mine = b"".join(keys.hashes[inside[0] : inside[-1] + 1])
        stored[: len(inside)] = np.frombuffer(mine, dtype="V32")
    entries = np.zeros(len(rows), dtype=ENTRY)
    entries["namespace"] = np.void(SPEC.namespace)
    entries["hash"] = stored
    entries["version"] = ENTRY_VERSION
    entries["position"] = rows % 512
    entries["parent"][1:] = stored[:-1]  # chained as prompts are; a head's parent is stored nowhere
    entries["parent"][rows % 512 == 0] = np.void(b"root" * 8)
    entries["segment"] = first_segment + rows // SEGMENT_SLOTS
    entries["slot"] = rows % SEGMENT_SLOTS
    entries["slot_bytes"] = SLOT_BYTES
    entries["payload_bytes"] = SPEC.block_layout.block_bytes
    entries["created_ns"] = first_segment
    entries["last_use_ns"] = first_segment + rows // 512
    return entries


def _rss_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 0


def probe(path: Path, blocks: int) -> dict[str, Any]:
    """Open the store once; imports and a first, empty store come before the clock starts."""
    with tempfile.TemporaryDirectory(dir=path.parent) as other:
        open_store(Path(other) / "empty", 1).close()
    gc.collect()
    before = _rss_bytes("VmRSS")
    watch = Stopwatch()
    with watch:
        store = open_store(path, blocks)
    gc.collect()
    after = _rss_bytes("VmRSS")
    ready = store.stats()["tiers"]["ssd"]["ready"]
    assert ready == blocks, f"{ready} of {blocks} blocks are there"
    store.close()
    return {
        "seconds": watch.wall_s,
        "held": watch.held,
        "bytes_per_block": (after - before) / blocks,
        "peak_bytes_per_block": (_rss_bytes("VmHWM") - before) / blocks,
    }


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]), int(sys.argv[2]))))
