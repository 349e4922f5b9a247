"""What one would write first: a file per block with torch.save or safetensors, values in LMDB.

Runs in the environment that the benchmark runs in, as a process of its own. Every block is one
tensor [layers, 2, 256, heads, width]: fewer tensors are quicker for all of them. Files are written
beside their name and moved there, four at a time, as LMCache does; the synced kinds sync each file,
and the folder at the end. LMDB stores all blocks in one transaction.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.append(str(Path(__file__).parent))
from _rivals_worker import PAGE, Backend, Facts, Rows, Server, private_stdout, serve

ANSWERS: Final = private_stdout() if __name__ == "__main__" else sys.stdout

import numpy as np  # noqa: E402 - after standard output is safe
import torch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

THREADS: Final = 4
MAP_PASSES: Final = 4
"""LMDB's map: what is overwritten is free only transactions later."""
SLACK_BYTES: Final = 64 << 20


def tensor_of(row: np.ndarray[Any, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return a block's bytes as the tensor that they are, without a copy."""
    return torch.from_numpy(row).view(torch.bfloat16).view(shape)


class Memory:
    """The blocks, and the memory that they are read into: touched, and spoilt before each read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.blocks = settings["expected"]
        self.into = np.ones_like(self.blocks)
        self.shape = (settings["layers"], 2, 256, settings["kv_heads"], settings["head_dim"])

    def spoil(self) -> None:
        """Make every page differ."""
        self.into[:, ::PAGE] ^= 0xFF


class Files:
    """One file per block."""

    def __init__(
        self,
        memory: Memory,
        folder: str,
        save: Callable[[torch.Tensor, str], None],
        load: Callable[[Files, int], Any],
        *,
        synced: bool,
        checks: str,
        sync: Callable[[str], None] | None = None,
    ) -> None:
        self.memory = memory
        self.folder = folder
        self._save = save
        self._load = load
        self._sync = (sync or sync_path) if synced else None
        self._threads = ThreadPoolExecutor(THREADS)
        self.facts = Facts(
            "synced" if synced else "unsynced", ("one_by_one", "threads"), checks,
            "fsync" if synced else "page cache",
        )  # fmt: skip

    def path(self, block: int) -> str:
        """Return where a block is."""
        return os.path.join(self.folder, f"{block}.kv")

    def clear(self) -> None:
        """Remove the files."""
        for path in Path(self.folder).iterdir():
            path.unlink()

    def write(self) -> None:
        """Write all files, four at a time."""
        list(self._threads.map(self._write_one, range(len(self.memory.blocks))))
        if self._sync:
            self._sync(self.folder)

    def _write_one(self, block: int) -> None:
        beside = f"{self.path(block)}.new"
        self._save(tensor_of(self.memory.blocks[block], self.memory.shape), beside)
        if self._sync:
            self._sync(beside)
        os.rename(beside, self.path(block))

    def spoil(self, *, cold: bool) -> None:  # noqa: ARG002 - nothing stays mapped
        """Spoil what is read into."""
        self.memory.spoil()

    def read(self, way: str) -> Sequence[Any]:
        """Read all files, one by one or four at a time."""
        numbers = range(len(self.memory.blocks))
        if way == "one_by_one":
            return [self._load(self, block) for block in numbers]
        return list(self._threads.map(lambda block: self._load(self, block), numbers))

    @staticmethod
    def array(block: Any) -> np.ndarray[Any, Any]:
        """Return a tensor's bytes."""
        bytes_of: np.ndarray[Any, Any] = block.reshape(-1).view(torch.uint8).numpy()
        return bytes_of

    @staticmethod
    def release(blocks: Sequence[Any]) -> None:
        """Nothing is kept."""


def sync_path(path: str) -> None:
    """Sync a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def torch_load(files: Files, block: int) -> torch.Tensor:
    """Read a block into new tensors, as torch does."""
    found: torch.Tensor = torch.load(files.path(block), weights_only=True)
    return found


def torch_files(memory: Memory, folder: str, *, synced: bool) -> Files:
    """Return files that torch.save writes."""
    return Files(memory, folder, torch.save, torch_load, synced=synced, checks="none")


def safetensors_files(memory: Memory, folder: str, *, synced: bool) -> Files:
    """Return files that safetensors writes, mapped and copied out."""
    from safetensors.torch import load_file, save_file

    def mapped(files: Files, block: int) -> torch.Tensor:
        into = tensor_of(memory.into[block], memory.shape)
        return into.copy_(load_file(files.path(block))["kv"])

    def save(tensor: torch.Tensor, path: str) -> None:
        save_file({"kv": tensor}, path)

    return Files(memory, folder, save, mapped, synced=synced, checks="sizes")


class Values(Rows):
    """Values in LMDB, copied out of its map."""

    def __init__(self, memory: Memory, folder: str, *, synced: bool) -> None:
        super().__init__(memory.into)
        self.memory = memory
        self.folder = folder
        self._synced = synced
        self._keys = [block.to_bytes(32, "big") for block in range(len(memory.blocks))]
        self._env = self._open()
        self.facts = Facts(
            "synced" if synced else "unsynced", ("get",), "none",
            "fsync" if synced else "page cache",
        )  # fmt: skip

    def _open(self) -> Any:
        import lmdb

        size = MAP_PASSES * self.memory.blocks.nbytes + SLACK_BYTES
        return lmdb.open(self.folder, map_size=size, sync=self._synced, metasync=self._synced)

    def clear(self) -> None:
        """Delete all values."""
        with self._env.begin(write=True) as txn:
            for key in self._keys:
                txn.delete(key)

    def write(self) -> None:
        """Store all blocks in one transaction."""
        with self._env.begin(write=True) as txn:
            for key, row in zip(self._keys, self.memory.blocks, strict=True):
                txn.put(key, row.data)

    def spoil(self, *, cold: bool) -> None:
        """Spoil what is read into; mapped pages cannot leave the page cache."""
        super().spoil(cold=cold)
        if cold:
            self._env.close()
            self._env = self._open()

    def read(self, way: str) -> Sequence[Any]:
        """Copy all values out."""
        assert way == "get"
        with self._env.begin(buffers=True) as txn:
            for key, into in zip(self._keys, self.into, strict=True):
                found = txn.get(key)
                assert found is not None, "a value is gone"
                np.copyto(into, np.frombuffer(found, np.uint8))
        return list(self.into)


def make(settings: Mapping[str, Any]) -> tuple[dict[str, Backend], dict[str, str]]:
    """Return the backends that can be used here, and why others cannot."""
    torch.set_num_threads(1)
    memory = Memory(settings)
    kinds: dict[str, Callable[..., Backend]] = {
        "torch.save": torch_files, "safetensors": safetensors_files, "lmdb": Values,
    }  # fmt: skip
    backends: dict[str, Backend] = {}
    skipped: dict[str, str] = {}
    for kind, build in kinds.items():
        for suffix, synced in (("", False), ("+sync", True)):
            folder = os.path.join(settings["folder"], kind + suffix)
            os.makedirs(folder)
            try:
                backends[kind + suffix] = build(memory, folder, synced=synced)
            except ImportError as error:
                skipped[kind + suffix] = str(error)
    return backends, skipped


if __name__ == "__main__":
    serve(Server(make), ANSWERS)
