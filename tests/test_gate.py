from __future__ import annotations

import threading

import pytest
from support import WAIT_S, in_thread

from kvtier.tiers.gate import WriteGate


class Crowd:
    """Counts how many are inside at once, and holds them there."""

    def __init__(self, gate: WriteGate) -> None:
        self.gate = gate
        self.inside = self.most = 0
        self.changed = threading.Condition()
        self.leave = threading.Semaphore(0)

    def pass_through(self) -> None:
        """Enter, wait to be let out, leave."""
        with self.gate:
            with self.changed:
                self.inside += 1
                self.most = max(self.most, self.inside)
                self.changed.notify_all()
            assert self.leave.acquire(timeout=WAIT_S)
            with self.changed:
                self.inside -= 1
                self.changed.notify_all()

    def wait_inside(self, count: int) -> None:
        """Wait until so many are inside."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.inside == count, WAIT_S)


@pytest.mark.parametrize("narrow", [False, True])
def test_so_many_are_inside_and_one_while_it_is_narrow(narrow: bool) -> None:  # noqa: FBT001
    """All get through in the end: a narrow gate slows down, it does not stop."""
    crowd = Crowd(WriteGate(3))
    if narrow:
        crowd.gate.narrow()
    threads = [in_thread(crowd.pass_through) for _ in range(9)]
    crowd.wait_inside(1 if narrow else 3)
    crowd.leave.release(len(threads))
    for thread in threads:
        thread()
    assert crowd.most == (1 if narrow else 3)


def test_those_inside_go_on_and_none_enters_until_they_left() -> None:
    """A gate that narrows keeps what it has let in."""
    crowd = Crowd(WriteGate(3))
    early = [in_thread(crowd.pass_through) for _ in range(3)]
    crowd.wait_inside(3)
    crowd.gate.narrow()
    late = [in_thread(crowd.pass_through) for _ in range(3)]
    for _ in range(2):
        crowd.leave.release()
    crowd.wait_inside(1)
    for _ in range(4):
        crowd.leave.release()
    for thread in (*early, *late):
        thread()
    assert crowd.most == 3


def test_widening_lets_in_those_who_wait() -> None:
    """Nobody has to leave for it."""
    crowd = Crowd(WriteGate(3))
    crowd.gate.narrow()
    threads = [in_thread(crowd.pass_through) for _ in range(3)]
    crowd.wait_inside(1)
    crowd.gate.widen()
    crowd.wait_inside(3)
    for _ in threads:
        crowd.leave.release()
    for thread in threads:
        thread()
