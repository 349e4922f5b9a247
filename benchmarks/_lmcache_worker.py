"""LMCache's side of the comparison: runs in LMCache's own environment, never imported by kvtier.

Reads one JSON request a line from standard input and answers each with one JSON line on standard
output. Requests: {"op": "open", ...} once, then {"op": "load", "path": NAME}. Every load is cold
(the page cache is dropped first), timed from the call to the last byte in LMCache's own memory
pool, and afterwards compared with what was stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

MODEL: Final = "llama-3-8b"
PAGE: Final = 4096
STORE_S_MAX: Final = 300.0
"""How long storing all blocks may take on one path."""
LOAD_S_MAX: Final = 120.0
"""How long loading all blocks may take on one path."""
POLL_S: Final = 0.001
"""How often a store is asked whether it is done; loads are waited for, not polled."""


def private_stdout() -> TextIO:
    """Keep the real standard output for answers: LMCache prints on it."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


ANSWERS: Final = private_stdout() if __name__ == "__main__" else sys.stdout

import numpy as np  # noqa: E402 - after standard output is safe
import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import (  # noqa: E402
    FSL2Adapter,
    FSL2AdapterConfig,
)
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import (  # noqa: E402
    NativeConnectorL2Adapter,
)
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402


class Pool:
    """LMCache's CPU memory: where loads go, and where stores come from."""

    def __init__(self, settings: dict[str, Any]) -> None:
        layers, heads, width = settings["layers"], settings["kv_heads"], settings["head_dim"]
        self.shape = torch.Size([2, layers, 256, heads * width])
        self.blocks: int = settings["blocks"]
        self.block_bytes = 2 * self.shape.numel()
        rng = np.random.default_rng(settings["seed"])
        words = self.blocks * self.block_bytes // 8
        values = rng.integers(0, 1 << 64, words, dtype=np.uint64).view(np.uint8)
        self.expected = values.reshape(self.blocks, -1)
        self.config = self.config_for(settings["folder"], direct=False)
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, 256, heads, width),
        )
        PinMonitor.GetOrCreate(self.config)  # pinning asserts without it
        self.backend = LocalCPUBackend(self.config, metadata, dst_device="cpu")

    def config_for(self, folder: str, *, direct: bool) -> Any:
        """Return LMCache's settings: its defaults but for places, sizes and O_DIRECT."""
        gib = self.blocks * self.block_bytes / (1 << 30)
        return LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=1.25 * gib + 0.25,
            local_disk=folder,
            max_local_disk_size=2 * gib + 1,
            extra_config={"use_odirect": direct},
        )

    def take(self) -> list[Any]:
        """Allocate memory for all blocks."""
        taken = []
        for _ in range(self.blocks):
            memory = self.backend.allocate(
                self.shape, torch.bfloat16, MemoryFormat.KV_2LTD, busy_loop=False
            )
            assert memory is not None, "LMCache's pool is too small for one pass"
            taken.append(memory)
        return taken

    def filled(self) -> list[Any]:
        """Allocate memory and fill it with the blocks."""
        taken = self.take()
        for memory, block in zip(taken, self.expected, strict=True):
            np.copyto(as_array(memory), block)
        return taken

    def check(self, loaded: Sequence[Any], path: str) -> None:
        """Compare every byte."""
        for index, (memory, block) in enumerate(zip(loaded, self.expected, strict=True)):
            assert memory is not None, f"{path}: block {index} was not loaded"
            assert np.array_equal(as_array(memory), block), f"{path}: block {index} is wrong"

    def spoil(self) -> None:
        """Change a byte of every page, so that a load that does nothing is not taken for one.

        Not more: memory that was just overwritten as a whole slows direct I/O into it down.
        """
        taken = self.take()
        for memory in taken:
            as_array(memory)[::PAGE] ^= 0xFF
        give_back(taken)


def as_array(memory: Any) -> np.ndarray[Any, Any]:
    """Return a memory object's bytes."""
    array: np.ndarray[Any, Any] = memory.tensor.view(torch.uint8).numpy().reshape(-1)
    return array


def give_back(memory: Sequence[Any]) -> None:
    """Return memory objects to the pool."""
    for each in memory:
        each.ref_count_down()


class LocalDisk:
    """The in-process engine's disk backend, with its three ways to read."""

    def __init__(self, pool: Pool, folder: str, *, direct: bool) -> None:
        self.folder = folder
        self._pool = pool
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = pool.config_for(folder, direct=direct)
        self._backend = LocalDiskBackend(config, self._loop, pool.backend, "cpu")
        self._keys = [
            CacheEngineKey(MODEL, 1, 0, number, torch.bfloat16) for number in range(pool.blocks)
        ]

    def store(self) -> None:
        """Store all blocks."""
        memory = self._pool.filled()
        self._backend.batched_submit_put_task(self._keys, memory)
        until(
            lambda: (
                all(self._backend.contains(key) for key in self._keys)
                and not any(self._backend.exists_in_put_tasks(key) for key in self._keys)
            )
        )
        give_back(memory)

    def one_by_one(self) -> list[Any]:
        """Read block after block."""
        return [self._backend.get_blocking(key) for key in self._keys]

    def batched(self) -> list[Any]:
        """Read with its thread pool."""
        return list(self._backend.batched_get_blocking(self._keys))

    def asynchronous(self) -> list[Any]:
        """Read on its event loop, as its prefetch does."""
        reading = self._backend.batched_get_non_blocking("bench", self._keys)
        loaded = asyncio.run_coroutine_threadsafe(reading, self._loop).result(LOAD_S_MAX)
        for memory in loaded:
            memory.unpin()
        return list(loaded)


class SecondLevel:
    """An L2 adapter of the multi-process server, driven as its controllers do."""

    def __init__(self, pool: Pool, folder: str, adapter: Any) -> None:
        self.folder = folder
        self._pool = pool
        self._adapter = adapter
        self._loaded = adapter.get_load_event_fd()
        self._keys = [
            ObjectKey(number.to_bytes(32, "big"), MODEL, 0x01000100)
            for number in range(pool.blocks)
        ]

    def store(self) -> None:
        """Store all blocks."""
        memory = self._pool.filled()
        task = self._adapter.submit_store_task(self._keys, memory)
        done: dict[Any, Any] = {}

        def finished() -> bool:
            done.update(self._adapter.pop_completed_store_tasks())
            return task in done

        until(finished)
        assert done[task].is_successful(), f"{self.folder}: LMCache could not store"
        give_back(memory)

    def one_task(self) -> list[Any]:
        """Load everything as one task."""
        return self._load(len(self._keys))

    def single_tasks(self) -> list[Any]:
        """Load every block as a task of its own: as much in flight as the adapter allows."""
        return self._load(1)

    def _load(self, size: int) -> list[Any]:
        memory = self._pool.take()
        wanted = range(0, len(self._keys), size)
        tasks = [
            self._adapter.submit_load_task(self._keys[i : i + size], memory[i : i + size])
            for i in wanted
        ]
        deadline = time.monotonic() + LOAD_S_MAX
        while tasks:
            found = self._adapter.query_load_result(tasks[0])
            if found is not None:
                assert found.popcount() == size, f"{self.folder}: LMCache could not load"
                tasks.pop(0)
                continue
            assert time.monotonic() < deadline, f"{self.folder}: LMCache does not finish"
            wait_readable(self._loaded)
        return memory


def wait_readable(fd: int) -> None:
    """Wait for an event, a short while at most: one may stand for several tasks."""
    import select

    if select.select([fd], [], [], 0.01)[0]:
        os.read(fd, 8)


def until(done: Callable[[], bool]) -> None:
    """Poll until ``done``."""
    deadline = time.monotonic() + STORE_S_MAX
    while not done():
        assert time.monotonic() < deadline, "LMCache does not finish storing"
        time.sleep(POLL_S)


def native(folder: str, *, direct: bool) -> Any:
    """Return the adapter over its C++ file system client, with its default number of workers."""
    from lmcache.lmcache_fs import LMCacheFSClient

    return NativeConnectorL2Adapter(
        LMCacheFSClient(folder, 4, "", direct, 0), pad_buffers_to_alignment=direct
    )


def drop_cache(folder: str, *, sync: bool) -> None:
    """Take a folder's files out of the page cache."""
    for root, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(root, name), os.O_RDONLY)
            if sync:
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Worker:
    """All of LMCache's ways to read blocks from an SSD, over the same blocks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._pool = Pool(settings)
        self._paths: dict[str, tuple[str, Callable[[], list[Any]]]] = {}
        for suffix, direct in (("", False), ("_odirect", True)):
            disk = LocalDisk(self._pool, self._folder(settings, f"disk{suffix}"), direct=direct)
            self._add(disk, f"disk{suffix}", ("one_by_one", "batched", "asynchronous"))
            for name in ("fs", "fs_native"):
                folder = self._folder(settings, f"{name}{suffix}")
                adapter = (
                    FSL2Adapter(FSL2AdapterConfig(folder, use_odirect=direct))
                    if name == "fs"
                    else native(folder, direct=direct)
                )
                level = SecondLevel(self._pool, folder, adapter)
                self._add(level, f"l2_{name}{suffix}", ("one_task", "single_tasks"))

    @staticmethod
    def _folder(settings: dict[str, Any], name: str) -> str:
        folder = os.path.join(settings["folder"], name)
        os.makedirs(folder)
        return folder

    def _add(self, backend: Any, name: str, ways: Sequence[str]) -> None:
        backend.store()
        drop_cache(backend.folder, sync=True)
        for way in ways:
            self._paths[f"{name}.{way}"] = (backend.folder, getattr(backend, way))

    def names(self) -> list[str]:
        """Return the names of all paths."""
        return list(self._paths)

    def load(self, path: str) -> float:
        """Load all blocks once, cold; returns the seconds it took."""
        folder, run = self._paths[path]
        self._pool.spoil()
        drop_cache(folder, sync=False)
        begun = time.perf_counter()
        loaded = run()
        seconds = time.perf_counter() - begun
        self._pool.check(loaded, path)
        give_back(loaded)
        return seconds


def main() -> None:
    """Answer requests until standard input ends."""
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "open":
                worker = Worker(request)
                answer: dict[str, Any] = {"paths": worker.names()}
            elif request["op"] == "load" and worker is not None:
                answer = {"seconds": worker.load(request["path"])}
            else:
                break
        except Exception as error:  # noqa: BLE001 - whatever it was, the other side reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=ANSWERS, flush=True)
    os._exit(0)  # LMCache's threads and loops do not end by themselves


if __name__ == "__main__":
    main()
