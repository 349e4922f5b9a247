from __future__ import annotations

import asyncio
import threading

import pytest
from support import WAIT_S, in_thread

from kvtier import PutResult, Transfer, TransferFailed


def test_a_new_transfer_is_under_way() -> None:
    """Nothing is known before the outcome."""
    transfer: Transfer[int] = Transfer()
    assert not transfer.done()
    assert not transfer.released.is_set()


def test_result_times_out() -> None:
    """Waiting ends at the timeout, and the transfer goes on."""
    transfer: Transfer[int] = Transfer()
    with pytest.raises(TimeoutError):
        transfer.result(0.001)
    transfer.finish(3)
    assert transfer.result(0) == 3


def test_result_wakes_a_waiter() -> None:
    """Whoever waits without a timeout gets the outcome."""
    transfer: Transfer[PutResult] = Transfer()
    waiting = in_thread(transfer.result)
    transfer.finish(PutResult(1, 2, 3))
    assert waiting() == PutResult(1, 2, 3)
    assert transfer.done()


def test_a_failed_copy_says_why() -> None:
    """A failure is TransferFailed, its cause chained; every waiter gets it."""
    transfer: Transfer[int] = Transfer()
    cause = OSError(5, "no such luck")
    transfer.fail(cause)
    for _ in range(2):
        with pytest.raises(TransferFailed, match="no such luck") as info:
            transfer.result(0)
        assert info.value.__cause__ is cause
    assert transfer.done()


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_released_comes_before_the_result(end: str) -> None:
    """Whoever sees the outcome may reuse the source."""
    transfer: Transfer[int] = Transfer()
    seen = []
    transfer._future.add_done_callback(lambda _: seen.append(transfer.released.is_set()))
    if end == "finish":
        transfer.finish(1)
    else:
        transfer.fail(ValueError("x"))
    assert seen == [True]


def test_the_first_outcome_stays() -> None:
    """A second outcome is ignored, whichever kind it is."""
    transfer: Transfer[int] = Transfer()
    transfer.finish(1)
    transfer.finish(2)
    transfer.fail(ValueError("late"))
    assert transfer.result(0) == 1
    failed: Transfer[int] = Transfer()
    failed.fail(ValueError("first"))
    failed.finish(1)
    with pytest.raises(TransferFailed, match="first"):
        failed.result(0)


def test_two_outcomes_at_once_are_one() -> None:
    """Two threads that end a transfer at the same time do not fail; one outcome stays."""
    for _ in range(200):
        transfer: Transfer[int] = Transfer()
        barrier = threading.Barrier(2)
        ends = [in_thread(lambda n=n: _meet_and_end(barrier, transfer, n)) for n in (1, 2)]  # noqa: B023
        for end in ends:
            end()
        assert transfer.result(0) in (1, 2)


def _meet_and_end(barrier: threading.Barrier, transfer: Transfer[int], value: int) -> None:
    barrier.wait(WAIT_S)
    transfer.finish(value)


async def test_await() -> None:
    """A transfer is awaited from any loop, more than once, before or after its end."""
    transfer: Transfer[int] = Transfer()
    first = asyncio.ensure_future(_wait(transfer))
    second = asyncio.ensure_future(_wait(transfer))
    await asyncio.to_thread(transfer.finish, 5)
    assert await asyncio.wait_for(asyncio.gather(first, second), WAIT_S) == [5, 5]
    assert await transfer == 5


async def test_await_a_failure() -> None:
    """Awaiting a failed transfer raises like result."""
    transfer: Transfer[int] = Transfer()
    transfer.fail(ValueError("broken"))
    with pytest.raises(TransferFailed, match="broken"):
        await transfer


async def test_cancelling_the_task_leaves_the_copy() -> None:
    """A cancelled waiter takes nothing down: the copy ends and others see it."""
    transfer: Transfer[int] = Transfer()
    task = asyncio.ensure_future(_wait(transfer))
    other = asyncio.ensure_future(_wait(transfer))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not transfer.done()
    transfer.finish(9)
    assert transfer.result(0) == 9
    assert await other == 9


async def test_wait_for_leaves_the_copy() -> None:
    """A waiter's own timeout does not cancel the copy."""
    transfer: Transfer[int] = Transfer()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_wait(transfer), 0.001)
    transfer.finish(2)
    assert await transfer == 2


def test_a_loop_that_is_gone_harms_nobody() -> None:
    """A transfer whose waiter's loop was closed still ends."""
    transfer: Transfer[int] = Transfer()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait(transfer), 0.001)

    asyncio.run(give_up())
    transfer.finish(1)
    assert transfer.result(0) == 1


async def _wait(transfer: Transfer[int]) -> int:
    return await transfer
