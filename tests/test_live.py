"""An open store shows what it does while somebody looks, and does nothing otherwise."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import WAIT_S, prompt_keys, put

from kvtier.live import LOOKED_S, PUBLISH_S, LivePublisher, live_of
from kvtier.tiers.directory import ReadDirectory
from kvtier.tiers.fs import PosixFileSystem
from kvtier.tiers.looks import FileLooks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import kvtier


class ScriptedLooks:
    """Looks at given times of a virtual clock; waiting is what moves it."""

    def __init__(self, at: list[float]) -> None:
        self.now = 0.0
        self.waits: list[float | None] = []
        self.closed = False
        self._at = sorted(at)
        self._done = threading.Event()
        self.publisher: LivePublisher | None = None

    def wait(self, seconds: float | None) -> bool:
        """Move to the next look, or as far as was asked for."""
        self.waits.append(seconds)
        upcoming = self._at[0] if self._at else None
        if upcoming is not None and (seconds is None or upcoming <= self.now + seconds):
            self.now = self._at.pop(0)
            return True
        if seconds is None:  # nobody will look again: rest until closed
            self._done.set()
            self._woken.wait(WAIT_S)
            return False
        self.now += seconds
        return False

    _woken = threading.Event()

    def rest(self) -> None:
        """Wait until all looks were seen and nothing is due any more."""
        assert self._done.wait(WAIT_S)

    def wake(self) -> None:
        """End the wait."""
        self._woken.set()

    def close(self) -> None:
        """Note it."""
        self.closed = True


def published(looks: ScriptedLooks, write: Callable[[bytes], None] | None = None) -> list[float]:
    """Run a publisher until it rests; returns when it wrote."""
    looks._woken = threading.Event()
    times: list[float] = []

    def note(data: bytes) -> None:
        times.append(looks.now)
        if write is not None:
            write(data)

    failures: list[BaseException] = []
    live = LivePublisher(
        looks,
        lambda: {"counters": {"puts": int(looks.now * 10)}},
        note,
        clock=lambda: looks.now,
        failed=failures.append,
    )
    live.start()
    looks.rest()
    live.close()
    live.close()
    assert failures == []
    assert looks.closed
    return times


@given(at=st.lists(st.floats(0, 100), max_size=20))
def test_it_is_written_while_somebody_looks_and_never_otherwise(at: list[float]) -> None:
    """At once on the first look, every second after it, until 5 s after the last; then it rests."""
    looks = ScriptedLooks(at)
    times = published(looks)
    assert all(after - before >= PUBLISH_S * 0.999 for before, after in pairwise(times))
    assert all(any(0 <= time - look < LOOKED_S for look in at) for time in times)
    for look in at:
        assert any(0 <= time - look <= PUBLISH_S for time in times)
    assert looks.waits[-1] is None
    if not at:
        assert (times, looks.waits) == ([], [None])


def test_rates_are_what_counters_rose_by() -> None:
    """In a second, between one time and the next; none on the first."""
    seen: list[dict[str, Any]] = []

    def keep(data: bytes) -> None:
        seen.append(msgpack.unpackb(msgpack.unpackb(data)[2]))

    published(ScriptedLooks([1.0]), keep)
    assert [each["rates"] for each in seen] == [{}, *[{"puts": 10.0}] * 4]


def test_a_disk_that_refuses_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and tried again."""

    def refuse(_data: bytes) -> None:
        raise OSError(28, "No space left on device")

    assert len(published(ScriptedLooks([1.0]), refuse)) == 5
    assert sum("live.msgpack" in message for message in caplog.messages) == 1


@given(data=st.binary(max_size=200))
def test_garbage_shows_nothing(data: bytes) -> None:
    """What is damaged, old or of a newer version is as if nothing was shown."""
    assert live_of(data, 10**18) is None
    shown = msgpack.packb({"counters": {}})
    assert live_of(msgpack.packb([1, 10**18, shown]), 10**18) == {
        "counters": {}, "published_ns": 10**18,
    }  # fmt: skip
    for version, then in ((2, 10**18), (1, 10**18 - 6 * 10**9)):
        assert live_of(msgpack.packb([version, then, shown]), 10**18) is None


def test_opening_a_file_is_heard_and_so_is_a_wake(tmp_path: Path) -> None:
    """By whomever it is opened; a wait without either ends when it is told to."""
    path = tmp_path / "FORMAT"
    path.write_text("x")
    looks = FileLooks(str(path))
    assert looks.wait(0.0) is False
    path.read_text()
    assert looks.wait(WAIT_S) is True
    assert looks.wait(0.0) is False
    looks.wake()
    assert looks.wait(WAIT_S) is False
    looks.close()
    looks.close()
    with pytest.raises(FileNotFoundError):
        FileLooks(str(tmp_path / "nothing"))


def test_a_file_that_is_removed_is_not_looked_at(tmp_path: Path) -> None:
    """A store whose directory is being removed writes nothing into it for that."""
    path = tmp_path / "FORMAT"
    path.write_bytes(b"x")
    looks = FileLooks(str(path))
    path.unlink()
    assert not looks.wait(0.0)
    looks.close()


def test_a_store_shows_its_tiers_to_whoever_looks(open_store: Callable[..., kvtier.Store]) -> None:
    """A look at FORMAT is answered with residency, limits and counters; close takes them away."""
    store = open_store()
    put(store, prompt_keys(3))
    live = f"{store.path}/live.msgpack"
    assert not os.path.exists(live)
    with contextlib.closing(ReadDirectory(store.path, PosixFileSystem())) as directory:
        wait_for(lambda: os.path.exists(live))
        shown = live_of(directory.read_live(), now_ns())
    assert shown is not None
    assert shown["tiers"]["host"]["ready"] == 3
    assert shown["counters"]["put_blocks_stored"] == 3
    assert shown["limits"] == {"host_bytes": 1 << 20, "ssd_bytes": 8 << 20}
    assert (shown["pid"], shown["namespace"]) == (os.getpid(), store.spec.namespace.hex())
    store.close()
    assert not os.path.exists(live)


def now_ns() -> int:
    """Return the time of day."""
    return time.time_ns()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")
