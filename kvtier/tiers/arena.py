"""Host memory in one mapping, pinned for the GPU piece by piece as its slots come into use.

Pinning fills a piece with pages and locks them, so it is done when a piece's first slot is wanted
and not at open: what is never used costs nothing. One call for the whole arena fails above what a
driver takes at once, or with the limit on locked memory, and then nothing is pinned; of pieces
those that fit are.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

__all__ = ["PIN_PIECE_BYTES_MAX", "Arena", "CudaRuntime", "cuda_runtime"]

log = logging.getLogger(__name__)

PIN_PIECE_BYTES_MAX: Final = 1 << 30
"""What is registered with CUDA in one call, unless one slot alone is larger."""
PIN_S_MAX: Final = 30.0
"""How long a copy waits for the piece that it is in; after that it goes on with pageable memory."""

_WIPE_ON_FORK: Final = 18
"""MADV_WIPEONFORK: a forked child has no use for the arena, and must not make the parent's writes,
the disk's among them, go to copies of its pages."""
_ALREADY_REGISTERED: Final = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
_RAISED: Final = -1
"""In place of a CUDA error: the runtime raised, and the log says what."""


class CudaRuntime(Protocol):
    """What pinning needs of CUDA. Both calls return a CUDA error code, 0 for success."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory, so that the GPU copies from and to it directly."""

    def unregister(self, address: int) -> int:
        """Undo ``register``."""


@dataclass(frozen=True, slots=True)
class TorchCuda:
    """CUDA through torch, in the context of one device; None for whichever is current.

    Not exercised without a GPU.
    """

    device: int | None

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory."""
        import torch

        with torch.cuda.device(self.device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> int:
        """Undo ``register``."""
        import torch

        with torch.cuda.device(self.device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(runtime.cudaHostUnregister(address))


def cuda_runtime() -> CudaRuntime | None:
    """Return CUDA as this process has it; None without a GPU or without torch."""
    # Pinning serves a GPU; whoever has one has imported torch by now.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return TorchCuda(torch.cuda.current_device() if torch.cuda.is_initialized() else None)


class _Piece(IntEnum):
    UNTOUCHED = 0
    PINNING = 1
    PINNED = 2
    PAGEABLE = 3


class Arena:
    """``slots`` slots of ``slot_bytes`` (whole pages) in one mapping; thread-safe.

    Without a ``runtime`` nothing is pinned. A piece is as many whole slots as fit into
    ``piece_bytes_max``, so that no copy lies in two of them; whoever needs one that is being pinned
    waits up to ``pin_s_max`` seconds and then goes on without.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        runtime: CudaRuntime | None = None,
        *,
        piece_bytes_max: int = PIN_PIECE_BYTES_MAX,
        pin_s_max: float = PIN_S_MAX,
    ) -> None:
        self._slot_bytes = slot_bytes
        self._nbytes = slots * slot_bytes
        self._runtime = runtime
        self._pin_s_max = pin_s_max
        self._piece_slots = max(1, piece_bytes_max // slot_bytes)
        self._map = _mapping(max(self._nbytes, slot_bytes))
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._changed = threading.Condition()
        self._pieces = [_Piece.UNTOUCHED] * -(-slots // self._piece_slots)
        self._pinning = 0  # pieces that a thread is at, whatever others take them for
        self._warned = False
        self._closed = False
        self._given_up = False  # close did not wait for the last of them: they unpin their piece

    def slot(self, number: int) -> memoryview:
        """Return a slot's bytes. The first call for a piece pins it, which takes a while.

        So it belongs on a lane. ``ValueError`` once the arena is closed.
        """
        piece = number // self._piece_slots
        if self._runtime is not None and self._pieces[piece] < _Piece.PINNED:
            self._settle(piece)
        start = number * self._slot_bytes
        return self._view[start : start + self._slot_bytes]

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the GPU copies from and to directly."""
        return self._bytes_in(_Piece.PINNED)

    @property
    def pin_failed_bytes(self) -> int:
        """Bytes that could not be pinned; copies use them all the same, and are slower."""
        return self._bytes_in(_Piece.PAGEABLE)

    def close(self) -> None:
        """Unpin, then unmap; idempotent. Views still held keep the memory, pageable."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._given_up = not self._changed.wait_for(lambda: not self._pinning, self._pin_s_max)
            pinned = [n for n, state in enumerate(self._pieces) if state is _Piece.PINNED]
            self._pieces = [_Piece.PAGEABLE] * len(self._pieces)
        for piece in pinned:
            self._unregister(piece)
        if self._given_up:
            log.warning("host memory is still being pinned; it is freed once that has ended")
            return
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("host arena is still viewed; it is freed with the last view")

    # -- inside

    def _extent(self, piece: int) -> tuple[int, int]:
        """Return a piece's first byte and its length."""
        size = self._piece_slots * self._slot_bytes
        return piece * size, min(size, self._nbytes - piece * size)

    def _bytes_in(self, state: _Piece) -> int:
        with self._changed:
            return sum(self._extent(n)[1] for n, is_ in enumerate(self._pieces) if is_ is state)

    def _settle(self, piece: int) -> None:
        """Have a piece pinned if nobody has tried, and wait for the outcome."""
        with self._changed:
            if self._pieces[piece] is _Piece.UNTOUCHED:
                self._pieces[piece] = _Piece.PINNING
                self._pinning += 1
                # CUDA keeps a thread's last error, and its next kernel launch would report that one
                # as its own: so a failure to pin goes with a thread that does nothing else.
                threading.Thread(
                    target=self._pin, args=(piece,), name="kvtier-pin", daemon=True
                ).start()
            if not self._changed.wait_for(
                lambda: self._pieces[piece] is not _Piece.PINNING, self._pin_s_max
            ):
                self._pieces[piece] = _Piece.PAGEABLE  # nobody else waits for it

    def _pin(self, piece: int) -> None:
        error = self._register(piece)
        with self._changed:
            first = bool(error) and not self._warned
            self._warned |= first
            if self._given_up and not error:
                self._unregister(piece)
            self._pieces[piece] = _Piece.PAGEABLE if error else _Piece.PINNED
            self._pinning -= 1
            self._changed.notify_all()
        if first:
            log.warning("%s", _advice(error, self._extent(piece)[1]))

    def _register(self, piece: int) -> int:
        """Pin a piece; returns the CUDA error."""
        start, nbytes = self._extent(piece)
        address = self._address + start
        runtime = self._runtime
        if runtime is None:
            return 0
        try:
            error = runtime.register(address, nbytes)
            if error == _ALREADY_REGISTERED:
                # The mapping is new, so that is somebody's who unmapped without unpinning. CUDA
                # would copy from and to the pages that were here then.
                runtime.unregister(address)
                error = runtime.register(address, nbytes)
        except Exception:
            log.debug("registering host memory raised", exc_info=True)
            return _RAISED
        return error

    def _unregister(self, piece: int) -> None:
        start, nbytes = self._extent(piece)
        try:
            error = self._runtime.unregister(self._address + start) if self._runtime else 0
        except Exception:
            log.debug("unregistering host memory raised", exc_info=True)
            error = _RAISED
        if error:
            log.warning("host memory: unpinning %d bytes failed (CUDA error %d)", nbytes, error)


def _advice(error: int, nbytes: int) -> str:
    """Say what could not be pinned and what to do about it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return (
        f"host_bytes: {nbytes} bytes of host memory could not be pinned (CUDA error {error}); "
        "copies from and to them use pageable memory and are slower. It is the machine that "
        f"refuses, not the GPU: raise the limit on locked memory (ulimit -l, now {locked}) or "
        "set a smaller host_bytes"
    )


def _mapping(nbytes: int) -> mmap.mmap:
    """Return memory in huge pages: direct I/O into small ones is up to twice as slow."""
    # A shared mapping, which is what mmap makes by default, gets none.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
        with suppress(OSError):
            mapping.madvise(advice)
    return mapping
