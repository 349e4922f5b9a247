"""LMCache's side of the comparison: runs in LMCache's own environment, never imported by kvtier.

Every way that it has to store on and read from a disk without a GPU: the in-process engine's disk
backend (block by block, its thread pool, its event loop) and the server's ``fs``, ``fs_native`` and
``raw_block`` adapters (all blocks as one task, each as a task of its own); and its CPU memory.
A write counts from memory outside of LMCache's pool, as from an engine's; a read from a disk ends
in the pool, one from CPU memory in memory outside of it.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.append(str(Path(__file__).parent))
from _rivals_worker import PAGE, Backend, Facts, Rows, Server, private_stdout, serve

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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MODEL: Final = "llama-3-8b"
STORE_S_MAX: Final = 300.0
"""How long storing all blocks may take on one path."""
LOAD_S_MAX: Final = 120.0
"""How long loading all blocks may take on one path."""
WAIT_S: Final = 0.01
"""How long an event is waited for at a time: one may stand for several tasks."""
RAW_META_BYTES: Final = 16 << 20
"""What raw_block keeps for its index."""


class Pool:
    """LMCache's CPU memory: where loads go, and where stores come from."""

    def __init__(self, settings: Mapping[str, Any], *, hot: bool = False) -> None:
        layers, heads, width = settings["layers"], settings["kv_heads"], settings["head_dim"]
        self.shape = torch.Size([2, layers, 256, heads * width])
        self.blocks: int = settings["blocks"]
        self.block_bytes = 2 * self.shape.numel()
        self.expected: np.ndarray[Any, Any] = settings["expected"]
        self._hot = hot
        config = self.config_for(settings["folder"], direct=False)
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, 256, heads, width),
        )
        PinMonitor.GetOrCreate(config)  # pinning asserts without it
        self.backend = LocalCPUBackend(config, metadata, dst_device="cpu")

    def config_for(self, folder: str, *, direct: bool) -> Any:
        """Return LMCache's settings: its defaults but for places, sizes and O_DIRECT."""
        gib = self.blocks * self.block_bytes / (1 << 30)
        return LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=self._hot,
            max_local_cpu_size=1.25 * gib + 0.25,
            local_disk=None if self._hot else folder,
            max_local_disk_size=0 if self._hot else 2 * gib + 1,
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


def keys_of(blocks: int) -> list[CacheEngineKey]:
    """Return the in-process engine's keys."""
    return [CacheEngineKey(MODEL, 1, 0, number, torch.bfloat16) for number in range(blocks)]


class OnDisk:
    """What all backends that read into the pool have in common."""

    def __init__(self, pool: Pool, folder: str, ways: Sequence[str]) -> None:
        self.folder = folder
        self.facts = Facts("unsynced", tuple(ways), "none", "no sync")
        self._pool = pool

    def spoil(self, *, cold: bool) -> None:  # noqa: ARG002 - nothing stays mapped
        """Spoil the pool."""
        self._pool.spoil()

    def read(self, way: str) -> Sequence[Any]:
        """Read in one of its ways."""
        found: Sequence[Any] = getattr(self, way)()
        return found

    @staticmethod
    def array(block: Any) -> np.ndarray[Any, Any]:
        """Return a block's bytes."""
        return as_array(block)

    @staticmethod
    def release(blocks: Sequence[Any]) -> None:
        """Return blocks to the pool."""
        give_back(blocks)


class LocalDisk(OnDisk):
    """The in-process engine's disk backend, with its three ways to read."""

    def __init__(self, pool: Pool, folder: str, *, direct: bool) -> None:
        super().__init__(pool, folder, ("one_by_one", "batched", "asynchronous"))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = pool.config_for(folder, direct=direct)
        self._backend = LocalDiskBackend(config, self._loop, pool.backend, "cpu")
        self._keys = keys_of(pool.blocks)

    def clear(self) -> None:
        """Remove all blocks."""
        for key in self._keys:
            self._backend.remove(key)

    def write(self) -> None:
        """Store all blocks."""
        memory = self._pool.filled()
        written = threading.Semaphore(0)
        self._backend.batched_submit_put_task(
            self._keys, memory, on_complete_callback=lambda _: written.release()
        )
        for _ in self._keys:
            assert written.acquire(timeout=STORE_S_MAX), "LMCache does not finish storing"
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


class SecondLevel(OnDisk):
    """An L2 adapter of the multi-process server, driven as its controllers do."""

    def __init__(self, pool: Pool, folder: str, adapter: Any) -> None:
        super().__init__(pool, folder, ("one_task", "single_tasks"))
        self._adapter = adapter
        self._keys = [
            ObjectKey(number.to_bytes(32, "big"), MODEL, 0x01000100)
            for number in range(pool.blocks)
        ]

    def clear(self) -> None:
        """Delete all blocks."""
        self._adapter.delete(self._keys)

    def write(self) -> None:
        """Store all blocks, each as a task of its own."""
        memory = self._pool.filled()
        tasks = {
            self._adapter.submit_store_task([key], [each])
            for key, each in zip(self._keys, memory, strict=True)
        }
        done = self._adapter.pop_completed_store_tasks
        self._until(tasks, done, self._adapter.get_store_event_fd(), STORE_S_MAX)
        give_back(memory)

    def one_task(self) -> list[Any]:
        """Load everything as one task."""
        return self._load(len(self._keys))

    def single_tasks(self) -> list[Any]:
        """Load every block as a task of its own: as much in flight as the adapter allows."""
        return self._load(1)

    def _until(
        self,
        tasks: set[Any],
        done: Callable[[], dict[Any, Any]],
        event_fd: int,
        seconds_max: float,
    ) -> None:
        """Wait for tasks, which must all be successful."""
        deadline = time.monotonic() + seconds_max
        while True:
            for task, result in done().items():
                assert result.is_successful(), f"{self.folder}: LMCache could not store"
                tasks.discard(task)
            if not tasks:
                return
            assert time.monotonic() < deadline, f"{self.folder}: LMCache does not finish"
            wait_readable(event_fd)

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
            wait_readable(self._adapter.get_load_event_fd())
        return memory


class CpuMemory(Rows):
    """The in-process engine's CPU memory: its first tier."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(np.ones_like(pool.expected))
        self.folder = ""
        self.facts = Facts("memory", ("get",), "none", "-", cold=False)
        self._pool = pool
        self._keys = keys_of(pool.blocks)

    def clear(self) -> None:
        """Remove all blocks."""
        for key in self._keys:
            self._pool.backend.remove(key)

    def write(self) -> None:
        """Allocate, copy and put, block by block."""
        memory = self._pool.filled()
        self._pool.backend.batched_submit_put_task(self._keys, memory)
        give_back(memory)

    def read(self, way: str) -> Sequence[Any]:
        """Get and copy out, block by block."""
        assert way == "get"
        for key, into in zip(self._keys, self.into, strict=True):
            memory = self._pool.backend.get_blocking(key)
            assert memory is not None, "a block is gone"
            np.copyto(into, as_array(memory))
            memory.ref_count_down()
        return list(self.into)


def wait_readable(fd: int) -> None:
    """Wait for an event, a short while at most."""
    if select.select([fd], [], [], WAIT_S)[0]:
        os.read(fd, 8)


def server_fs(folder: str, *, direct: bool) -> Any:
    """Return the adapter written in Python."""
    return FSL2Adapter(FSL2AdapterConfig(folder, use_odirect=direct))


def server_fs_native(folder: str, *, direct: bool) -> Any:
    """Return the adapter over its C++ file system client, with its default number of workers."""
    from lmcache.lmcache_fs import LMCacheFSClient

    return NativeConnectorL2Adapter(
        LMCacheFSClient(folder, 4, "", direct, 0), pad_buffers_to_alignment=direct
    )


def server_raw_block(folder: str, pool: Pool) -> Any:
    """Return the adapter over its Rust library, on a file in place of a device."""
    from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import (
        RawBlockL2Adapter,
        RawBlockL2AdapterConfig,
    )

    path = os.path.join(folder, "device")
    slot_bytes = pool.block_bytes + PAGE
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.posix_fallocate(fd, 0, RAW_META_BYTES + (pool.blocks + 2) * slot_bytes)
    os.close(fd)
    return RawBlockL2Adapter(
        RawBlockL2AdapterConfig(
            device_path=path, slot_bytes=slot_bytes, meta_total_bytes=RAW_META_BYTES
        )
    )


def make(settings: Mapping[str, Any]) -> tuple[dict[str, Backend], dict[str, str]]:
    """Return all backends, and why any of them cannot be used here."""
    torch.set_num_threads(1)
    pool = Pool(settings)

    def level(adapter: Callable[[str], Any], folder: str) -> SecondLevel:
        return SecondLevel(pool, folder, adapter(folder))

    builds: dict[str, Callable[[str], Backend]] = {
        "cpu": lambda _: CpuMemory(Pool(settings, hot=True))
    }
    for suffix, direct in (("", False), ("_direct", True)):
        builds[f"disk{suffix}"] = partial(LocalDisk, pool, direct=direct)
        builds[f"fs{suffix}"] = partial(level, partial(server_fs, direct=direct))
        builds[f"fs_native{suffix}"] = partial(level, partial(server_fs_native, direct=direct))
    builds["raw_block"] = partial(level, partial(server_raw_block, pool=pool))
    backends: dict[str, Backend] = {}
    skipped: dict[str, str] = {}
    for name, build in builds.items():
        folder = os.path.join(settings["folder"], name)
        os.makedirs(folder)
        try:
            backends[name] = build(folder)
        except ImportError as error:
            skipped[name] = str(error)
    return backends, skipped


if __name__ == "__main__":
    serve(Server(make), ANSWERS)
