from __future__ import annotations

import logging
import mmap
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import WAIT_S, Gate, eventually, in_thread, record_of

from kvtier.tiers.arena import Arena
from kvtier.tiers.host import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = mmap.PAGESIZE
NO_MEMORY, INVALID, NOT_REGISTERED, ALREADY = 2, 1, 713, 712


@dataclass
class FakeCuda:
    """What CUDA does about host memory: ranges that do not overlap, given back as they came."""

    refuse: Callable[[int, int], int] = lambda _, __: 0
    gate: Gate | None = None
    registered: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def register(self, address: int, nbytes: int) -> int:
        """Pin a range."""
        if self.gate is not None:
            self.gate.pass_through()
        with self._lock:
            self.calls.append(("register", address))
            self.threads.add(threading.current_thread().name)
            if address % PAGE or nbytes <= 0:
                return INVALID
            for start, size in self.registered.items():
                if start < address + nbytes and address < start + size:
                    return ALREADY
            error = self.refuse(len(self.registered), nbytes)
            if not error:
                self.registered[address] = nbytes
            return error

    def unregister(self, address: int) -> int:
        """Let a range go."""
        with self._lock:
            self.calls.append(("unregister", address))
            return 0 if self.registered.pop(address, None) else NOT_REGISTERED

    def addresses(self, what: str) -> list[int]:
        """Return what a call was made for, in order."""
        return [address for name, address in self.calls if name == what]


@contextmanager
def arena(slots: int, cuda: FakeCuda | None, *, pages: int = 1, piece: int = 4) -> Iterator[Arena]:
    """Open an arena whose pieces have ``piece`` pages; nothing may be left pinned after it."""
    made = Arena(pages * PAGE, slots, cuda, piece_bytes_max=piece * PAGE)
    try:
        yield made
    finally:
        made.close()
    assert cuda is None or cuda.registered == {}


def test_a_piece_is_pinned_when_its_first_slot_is_wanted() -> None:
    """Nothing is pinned at open; each piece once, whole, by whoever first needs a slot of it."""
    cuda = FakeCuda()
    with arena(10, cuda) as host:
        assert (cuda.calls, host.pinned_bytes) == ([], 0)
        host.slot(5)
        assert host.pinned_bytes == 4 * PAGE
        for slot in (4, 5, 6, 7):
            host.slot(slot)
        assert len(cuda.calls) == 1
        host.slot(9)
        assert host.pinned_bytes == 6 * PAGE, "the last piece is as long as the arena"
        assert host.pin_failed_bytes == 0


@given(slots=st.integers(0, 40), pages=st.integers(1, 9), piece=st.integers(1, 20), data=st.data())
def test_pieces_are_whole_slots(slots: int, pages: int, piece: int, data: st.DataObject) -> None:
    """Whatever the sizes, pieces are within the bound, do not overlap, and no slot is in two."""
    cuda = FakeCuda()
    with arena(slots, cuda, pages=pages, piece=piece) as host:
        order = data.draw(st.permutations(range(slots)))
        for slot in order:
            assert host.slot(slot).nbytes == pages * PAGE
        assert sum(cuda.registered.values()) == host.pinned_bytes == slots * pages * PAGE
        assert cuda.calls == [("register", address) for address in cuda.addresses("register")]
        for nbytes in cuda.registered.values():
            assert nbytes % (pages * PAGE) == 0
            assert nbytes <= max(piece, pages) * PAGE


def test_pieces_are_unpinned_in_order() -> None:
    """Close unpins what is pinned and nothing else, by address, and only once."""
    cuda = FakeCuda()
    with arena(12, cuda) as host:
        for slot in (11, 0, 5):
            host.slot(slot)
        view = host.slot(0)
        host.close()
        assert cuda.addresses("unregister") == sorted(cuda.addresses("register"))
        assert len(cuda.addresses("unregister")) == 3
        assert host.pinned_bytes == 0
        assert view[0] == 0, "a view outlives the arena"
        host.close()
        assert len(cuda.calls) == 6
        with pytest.raises(ValueError, match="released"):
            host.slot(0)


def test_what_cannot_be_pinned_is_pageable(caplog: pytest.LogCaptureFixture) -> None:
    """Of pieces beyond a limit each works unpinned; one message says which knob and what to do."""
    cuda = FakeCuda(refuse=lambda pinned, _: NO_MEMORY if pinned >= 2 else 0)
    with caplog.at_level(logging.WARNING), arena(20, cuda) as host:
        for slot in range(20):
            host.slot(slot)[:] = bytes([slot]) * PAGE
        assert [host.slot(slot)[0] for slot in range(20)] == list(range(20))
        assert host.pinned_bytes == 8 * PAGE
        assert host.pin_failed_bytes == 12 * PAGE
        assert len(cuda.addresses("register")) == 5, "a piece is tried once"
        eventually(lambda: caplog.records)  # the thread that pins says it after it has let go
    (record,) = caplog.records
    for part in ("host_bytes", "CUDA error 2", "ulimit -l", "smaller host_bytes", "pageable"):
        assert part in record.getMessage()
    assert len(cuda.addresses("unregister")) == 2, "what was never pinned is not unpinned"


def test_memory_that_somebody_left_pinned_is_pinned_anew() -> None:
    """A registration left behind at the same address is not trusted: it means other pages."""
    cuda = FakeCuda()
    with arena(4, cuda) as host:
        cuda.registered[host._address] = 4 * PAGE
        host.slot(0)
        assert [name for name, _ in cuda.calls] == ["register", "unregister", "register"]
        assert host.pinned_bytes == 4 * PAGE


def test_an_overlap_that_cannot_be_resolved_is_pageable() -> None:
    """Memory that stays somebody else's is used unpinned and not unpinned by us."""
    cuda = FakeCuda()
    host = Arena(PAGE, 4, cuda, piece_bytes_max=4 * PAGE)
    cuda.registered[host._address + PAGE] = PAGE
    host.slot(0)
    assert (host.pinned_bytes, host.pin_failed_bytes) == (0, 4 * PAGE)
    host.close()
    assert len(cuda.registered) == 1


def test_a_runtime_that_raises_pins_nothing() -> None:
    """An exception of the CUDA runtime is a failure to pin, never one to copy."""

    def explode(_: int, __: int) -> int:
        raise RuntimeError("no driver")

    with arena(4, FakeCuda(refuse=explode)) as host:
        host.slot(0)[:] = b"\x01" * PAGE
        assert host.pin_failed_bytes == 4 * PAGE


def test_many_threads_pin_a_piece_once() -> None:
    """Slots of one piece that are wanted at once cost one registration, which all wait for."""
    cuda = FakeCuda(gate=Gate())
    with arena(8, cuda, piece=8) as host:
        calls = [in_thread(lambda slot=slot: host.slot(slot)) for slot in range(8)]
        cuda.gate.wait_reached()
        assert host.pinned_bytes == 0
        cuda.gate.open()
        for call in calls:
            assert call().nbytes == PAGE
        assert len(cuda.addresses("register")) == 1
        assert host.pinned_bytes == 8 * PAGE


def test_pinning_has_a_thread_of_its_own() -> None:
    """CUDA's last error is the thread's: a failure to pin must not reach whoever copies next."""
    cuda = FakeCuda(refuse=lambda _, __: NO_MEMORY)
    with arena(4, cuda) as host:
        host.slot(0)
    assert cuda.threads == {"kvtier-pin"}


def test_pinning_that_takes_too_long_is_not_waited_for() -> None:
    """A slow driver costs one bounded wait; what it pins after close it unpins itself."""
    cuda = FakeCuda(gate=Gate())
    host = Arena(PAGE, 4, cuda, piece_bytes_max=4 * PAGE, pin_s_max=0.01)
    host.slot(0)[:] = b"\x01" * PAGE
    assert host.pin_failed_bytes == 4 * PAGE
    host.close()
    cuda.gate.open()
    with host._changed:
        assert host._changed.wait_for(lambda: not host._pinning, WAIT_S)
    assert (len(cuda.addresses("register")), cuda.registered) == (1, {})


def test_without_a_gpu_nothing_is_pinned() -> None:
    """No runtime, no registration, and no failure either."""
    with arena(4, None) as host:
        host.slot(0)
        assert (host.pinned_bytes, host.pin_failed_bytes) == (0, 0)


# -- the host tier on it


def test_the_host_tier_says_what_is_pinned() -> None:
    """A tier's pieces follow the slots in use, and it says how many bytes are pinned."""
    cuda = FakeCuda(refuse=lambda pinned, _: NO_MEMORY if pinned else 0)
    tier = HostTier(PAGE - 1, 8, 8 * PAGE, cuda, piece_bytes_max=2 * PAGE)
    assert tier.pinning() == {"pinned_bytes": 0, "pin_failed_bytes": 0}
    for slot in [tier.reserve() for _ in range(4)]:
        assert tier.buffer(slot).nbytes == PAGE - 1
    assert tier.pinning() == {"pinned_bytes": 2 * PAGE, "pin_failed_bytes": 2 * PAGE}
    tier.close()
    assert cuda.registered == {}


def test_a_store_says_what_is_pinned(open_store: Any) -> None:
    """Its statistics tell the bytes that the GPU copies from, and those that it could not have."""
    host = open_store().stats()["tiers"]["host"]
    assert (host["pinned_bytes"], host["pin_failed_bytes"]) == (0, 0)


def test_low_slots_come_first() -> None:
    """Whatever is given back in whatever order, the lowest slot is next: the rest stays untouched.

    So what is resident follows the most that was ever in use, not how long the tier has run.
    """
    tier = HostTier(PAGE, 1000, 1000 * PAGE)
    for number in range(200):
        slots = [tier.reserve() for _ in range(5)]
        assert sorted(slots) == list(range(5))
        tier.label(slots[0], record_of(number).id)
        for slot in slots[:: 1 if number % 2 else -1]:
            tier.release(slot)
    tier.close()


def test_an_untouched_arena_takes_no_memory() -> None:
    """A large arena of which one slot is used keeps the rest of its pages unmapped."""
    resident = _resident_bytes()
    tier = HostTier(2 << 20, 512, 1 << 30)
    for _ in range(3):
        tier.buffer(tier.reserve())[:] = b"\x01" * (2 << 20)
    assert _resident_bytes() - resident < 64 << 20
    tier.close()


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE
