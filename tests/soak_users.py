"""What the users of a soaked store do, one turn after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from support import (
    POISON,
    SPEC,
    bring_back,
    expected,
    fill_slots,
    filled_slots,
    is_right,
    poisoned_slots,
    prompt,
    read_slots,
)

import kvtier

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

WAIT_S: Final = 60.0
"""How long anything may take that must happen: a safety net, never a measurement."""
POOL: Final = 40
"""Prompts that come again; with their tails they are several times what the SSD has room for."""
TENANTS: Final = ("a", "b", "c")
ACTS: Final = (
    "put", "restore", "leave", "poll", "hurry", "hold", "hint", "look", "flush", "purge", "awaited",
)  # fmt: skip


def pool_keys(number: int) -> kvtier.BlockKeys:
    """Return a prompt's keys: one of three heads that many share, and a tail of its own."""
    head = prompt(2, seed=number % 3)
    tail = prompt(1 + number % 6, seed=1000 + number)
    return kvtier.BlockKeys.of(SPEC, head + tail, TENANTS[number % len(TENANTS)])


@dataclass(slots=True)
class User:
    """A thread's or a task's hand on the store; ``count`` says what was done."""

    store: kvtier.Store
    chance: random.Random
    count: Callable[[str, int], None]

    def keys(self) -> kvtier.BlockKeys:
        """Return a prompt: mostly one that comes again, sometimes one that never did."""
        fresh = self.chance.random() < 0.2
        number = self.chance.randrange(POOL, 1 << 30) if fresh else self.chance.randrange(POOL)
        return pool_keys(number)

    def turn(self) -> None:
        """Do one thing."""
        acts = {
            self.put: 6, self.restore: 6, self.leave: 3, self.poll: 2, self.hurry: 1,
            self.hold: 2, self.hint: 2, self.look: 1, self.flush: 1, self.purge: 0.3,
        }  # fmt: skip
        act = self.chance.choices([*acts], [*acts.values()])[0]
        act()
        self.count(act.__name__, 1)

    def put(self) -> None:
        """Put a prompt, or a range of it, and mostly wait for the outcome."""
        keys = self.keys()
        blocks = range(self.chance.randrange(len(keys)), len(keys))
        transfer = self.store.put(keys, filled_slots(keys), blocks=blocks)
        if self.chance.random() < 0.8:
            result = transfer.result(WAIT_S)
            assert result.stored + result.present + result.dropped == len(blocks), result

    def restore(self) -> None:
        """Restore a prompt; every byte is right."""
        way = self.chance.choice(["best", "load", "load", "recompute"])
        done = bring_back(self.store, self.keys(), way=way, timeout=WAIT_S)
        self.count("blocks loaded", done.loaded)
        self.count("blocks recomputed", len(done.recomputed))

    def leave(self) -> None:
        """Cancel a restore after some steps; a slot holds nothing of a block, or all of it."""
        keys = self.keys()
        slots = poisoned_slots(len(keys))
        plan = self.store.plan(self.store.lookup(keys), way="load")
        with self.store.restore(plan, into=slots) as session:
            for _ in range(self.chance.randrange(4)):
                step = session.poll_step()
                if step is None:
                    break
                if step != kvtier.PENDING:
                    fill_slots(slots, keys, step.blocks)
                    session.computed(step)
        for block in range(len(keys)):
            assert read_slots(slots, block) in (POISON, expected(keys, block)), "a torn block"

    def poll(self) -> None:
        """Restore a prompt without ever blocking."""
        keys = self.keys()
        slots = poisoned_slots(len(keys))
        deadline = time.monotonic() + WAIT_S
        with self.store.restore(self.store.plan(self.store.lookup(keys)), into=slots) as session:
            while (step := session.poll_step()) is not None:
                assert time.monotonic() < deadline, "a polled restore does not end"
                if step == kvtier.PENDING:
                    time.sleep(0.0005)
                else:
                    fill_slots(slots, keys, step.blocks)
                    session.computed(step)
        assert all(is_right(slots, keys, block) for block in range(len(keys))), "a wrong block"

    def hurry(self) -> None:
        """Restore with a timeout that cannot be met: what is missing is recomputed."""
        bring_back(self.store, self.keys(), way="load", timeout=self.chance.choice([0, 0.001]))

    def hold(self) -> None:
        """Pin a prompt while something else happens."""
        with self.store.pin(self.keys()):
            self.chance.choice([self.put, self.restore, self.leave])()

    def hint(self) -> None:
        """Prefetch a prompt, and mostly wait for it."""
        transfer = self.store.prefetch(self.keys())
        if self.chance.random() < 0.7:
            assert transfer.result(WAIT_S) >= 0

    def look(self) -> None:
        """Look at everything that can be looked at."""
        assert (problems := self.store.check()) == [], problems
        self.store.stats()
        self.store.changes(self.store.changes().sequence)

    def flush(self) -> None:
        """Wait until all is durable."""
        self.store.flush(WAIT_S)

    def purge(self) -> None:
        """Purge a tenant; a disk that refuses says so."""
        with contextlib.suppress(kvtier.TransferFailed):
            self.store.purge(tenant=self.chance.choice(TENANTS), timeout=0.05)

    async def async_turn(self) -> None:
        """Await a put or a prefetch, or stop waiting for it, which stops nothing else."""
        keys = self.keys()
        if self.chance.random() < 0.5:
            transfer: kvtier.Transfer[Any] = self.store.put(keys, filled_slots(keys))
        else:
            transfer = self.store.prefetch(keys)
        patience = self.chance.choice([0.0005, 0.005, WAIT_S])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_awaited(transfer), patience)
        self.count("awaited", 1)


async def _awaited(transfer: kvtier.Transfer[Any]) -> Any:
    return await transfer
