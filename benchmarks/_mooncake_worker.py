"""Mooncake Store's side of the comparison: runs in Mooncake's own environment, without CUDA.

Two stores, each with a master of its own: one whose memory is in another process, so that blocks go
over TCP on the loopback interface, and one whose memory is in this process, which copies. Both are
memory only; its offload to an SSD is not driven. Blocks are put from and got into registered memory
in one batch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.append(str(Path(__file__).parent))
from _rivals_worker import Backend, Facts, Rows, Server, private_stdout, serve

ANSWERS: Final = private_stdout() if __name__ == "__main__" else sys.stdout

import numpy as np  # noqa: E402 - after standard output is safe
from mooncake.store import MooncakeDistributedStore  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST: Final = "127.0.0.1"
LEASE_MS: Final = 5000
"""How long what was got may not be evicted: longer than any transfer."""
SEGMENT_PASSES: Final = 2
"""Memory of a store, in passes: it evicts from nine tenths on, and is never to."""
BUFFER_BYTES: Final = 64 << 20
START_S_MAX: Final = 30.0
TRY_S: Final = 0.1


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def master() -> str:
    """Start a master, which ends with this process group; returns its address."""
    port = free_port()
    process = subprocess.Popen(  # noqa: S603 - the program of the package that is measured
        [
            str(Path(sys.executable).parent / "mooncake_master"), "--rpc_address", HOST,
            "--rpc_port", str(port), "--metrics_host", HOST, "--metrics_port", str(free_port()),
            f"--default_kv_lease_ttl={LEASE_MS}", "--logtostderr",
        ],
        stdin=subprocess.DEVNULL, stdout=sys.stderr,
    )  # fmt: skip
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            socket.create_connection((HOST, port), timeout=TRY_S).close()
        except OSError:
            assert process.poll() is None, "mooncake_master ended at once"
            assert time.monotonic() < deadline, "mooncake_master does not listen"
            time.sleep(TRY_S)
        else:
            return f"{HOST}:{port}"


def member(address: str, segment_bytes: int) -> Any:
    """Join a master with so much memory for everybody."""
    store = MooncakeDistributedStore()
    status = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", address)
    assert status == 0, f"mooncake's setup said {status}"
    return store


def owner(address: str, segment_bytes: int) -> None:
    """Start a process that owns the memory, until the group ends; returns when it does."""
    process = subprocess.Popen(  # noqa: S603 - this script
        [sys.executable, "-I", __file__, "owner", address, str(segment_bytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"ready", "mooncake's owner did not start"


class Batches(Rows):
    """All blocks in one batch."""

    def __init__(self, store: Any, expected: np.ndarray[Any, Any], durable: str) -> None:
        super().__init__(np.ones_like(expected))
        self.folder = ""
        self.facts = Facts("memory", ("batch",), "none", durable, cold=False)
        self._store = store
        self._blocks = expected
        self._sizes = [expected.shape[1]] * len(expected)
        self._keys = [f"block-{number}" for number in range(len(expected))]
        for memory in (self._blocks, self.into):
            status = store.register_buffer(memory.ctypes.data, memory.nbytes)
            assert status == 0, f"mooncake's register_buffer said {status}"

    def clear(self) -> None:
        """Remove all blocks, whoever has a lease."""
        self._store.batch_remove(self._keys, force=True)

    def write(self) -> None:
        """Put all blocks."""
        done = self._store.batch_put_from(self._keys, pointers(self._blocks), self._sizes)
        assert not any(done), f"mooncake's put said {done}"

    def read(self, way: str) -> Sequence[Any]:
        """Get all blocks."""
        assert way == "batch"
        found = self._store.batch_get_into(self._keys, pointers(self.into), self._sizes)
        assert list(found) == self._sizes, f"mooncake's get said {found}"
        return list(self.into)


def pointers(blocks: np.ndarray[Any, Any]) -> list[int]:
    """Return where each block begins."""
    return [row.ctypes.data for row in blocks]


def make(settings: Mapping[str, Any]) -> tuple[dict[str, Backend], dict[str, str]]:
    """Return both stores."""
    expected = settings["expected"]
    segment_bytes = SEGMENT_PASSES * expected.nbytes
    remote = master()
    owner(remote, segment_bytes)
    return {
        "loopback": Batches(member(remote, 0), expected, "its owner"),
        "in_process": Batches(member(master(), segment_bytes), expected, "-"),
    }, {}


def main() -> None:
    """Answer requests, or own memory until standard input ends."""
    if sys.argv[1:2] == ["owner"]:
        store = member(sys.argv[2], int(sys.argv[3]))
        print("ready", file=ANSWERS, flush=True)
        sys.stdin.read()
        store.close()
        os._exit(0)
    serve(Server(make), ANSWERS)


if __name__ == "__main__":
    main()
