"""Clients that ask a store for prompts, and what they saw.

Open loop: requests come when they come, and whoever is free takes the next one; a request's
latency counts from when it came, so that waiting for a client is part of it (no coordinated
omission). Closed loop: every client asks again after thinking.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from _disk import arena
from _harness import Stopwatch
from _load_content import spoil, target
from _load_work import BLOCK, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _load_content import Content, Words
    from _load_work import Prompt

    from kvtier.identity import BlockKeys
    from kvtier.plan import RestorePlan
    from kvtier.store import Store
    from kvtier.transfer import PutResult, Transfer

WAIT_S_MAX: Final = 600.0
"""How long one wait may take before something is wrong."""
PREFILL_TOKENS_PER_S: Final = 20_000.0
"""What the store is told that recomputing takes: it prices its evictions by it. No time is spent,
since there is no model here."""
LOOKUPS_PER_S: Final = 200.0
"""How often a scheduler asks beside the load."""
STEP_BLOCKS_MAX: Final = 1 << 16


def drive(
    serve: Callable[[int, float, int], None],
    count: int,
    clients: int,
    *,
    dues: Sequence[float] | None = None,
    think_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Call ``serve(request, due, client)`` for each request; returns when the first one was due.

    ``dues`` are seconds after the start (open loop); without them a request is due when a client
    asks for it, ``think_s`` after its last one (closed loop). The first error ends it, and is
    raised.
    """
    numbers, turn, failed = iter(range(count)), threading.Lock(), threading.Event()
    begun = clock()

    def client(number: int) -> None:
        while not failed.is_set():
            with turn:
                request = next(numbers, None)
            if request is None:
                return
            due = clock() if dues is None else begun + dues[request]
            if (early := due - clock()) > 0:
                sleep(early)
            try:
                serve(request, due, number)
            except BaseException:
                failed.set()
                raise
            if dues is None and think_s:
                sleep(think_s)

    if clients == 1:
        client(0)
    else:
        with ThreadPoolExecutor(clients, thread_name_prefix="client") as lane:
            for done in [lane.submit(client, number) for number in range(clients)]:
                done.result()
    return begun + (dues[0] if dues else 0.0)


# -- what one request saw


@dataclass(frozen=True, slots=True)
class Served:
    """One request: seconds, and what became of its blocks.

    ``waited_s`` (for a client) and ``ready_s`` (all is in place) count from when the request came.
    ``right`` blocks were restored as they were stored, ``wrong`` ones differed, ``failed`` ones
    could not be read, or were gone by then.
    """

    waited_s: float
    lookup_s: float
    ready_s: float
    ended: float
    blocks: int
    right: int
    wrong: int
    failed: int


@dataclass(slots=True)
class Seen:
    """What all clients saw; ``checked_cpu_s`` is the CPU time of comparing, which is not ours."""

    served: list[Served] = field(default_factory=list)
    released_s: list[float] = field(default_factory=list)
    puts: list[Transfer[PutResult]] = field(default_factory=list)
    checked_cpu_s: float = 0.0

    @property
    def wrong(self) -> int:
        """Blocks that were not what was stored: there must be none."""
        return sum(each.wrong for each in self.served)


class Engine:
    """Clients' memory, and what they do with it: look up, restore, compare, put.

    One call at a time for each client. ``blocks_max`` blocks is the longest prompt.
    """

    def __init__(self, store: Store, content: Content, clients: int, blocks_max: int) -> None:
        self._store = store
        self._content = content
        layout = content.layout
        self._memory: list[Words] = [
            arena(blocks_max * layout.block_bytes).view(np.uint64) for _ in range(clients)
        ]
        self._lock = threading.Lock()
        self.seen = Seen()

    def serve(self, prompt: Prompt, due: float, client: int) -> None:
        """Ask for a prompt that came at ``due``; store what is missing."""
        store, content, memory = self._store, self._content, self._memory[client]
        ids = tokens(prompt)
        begun = time.perf_counter()
        keys = store.keys(ids)
        residency = store.lookup(keys)
        looked = time.perf_counter()
        plan = store.plan(residency, way="load", step_blocks_max=STEP_BLOCKS_MAX)
        loaded, failed = load(store, plan, target(content.layout, memory))
        ready = time.perf_counter()
        if len(loaded) < len(prompt):
            self._put(keys)
        cpu_s = time.thread_time()
        wrong = content.differing(keys, memory, loaded, 0)
        spoil(memory[: len(prompt) * content.layout.block_bytes // 8])
        cpu_s = time.thread_time() - cpu_s
        served = Served(
            waited_s=begun - due, lookup_s=looked - begun, ready_s=ready - due, ended=ready,
            blocks=len(prompt), right=len(loaded) - wrong, wrong=wrong, failed=failed,
        )  # fmt: skip
        with self._lock:
            self.seen.served.append(served)
            self.seen.checked_cpu_s += cpu_s

    def _put(self, keys: BlockKeys) -> None:
        begun = time.perf_counter()
        transfer = self._store.put(keys, self._content.source(keys))
        assert transfer.released.wait(WAIT_S_MAX), "a put did not let go of its source"
        released_s = time.perf_counter() - begun
        with self._lock:
            self.seen.released_s.append(released_s)
            self.seen.puts.append(transfer)

    def fill(self, prompt: Prompt) -> None:
        """Store a prompt, and do not count it."""
        keys = self._store.keys(tokens(prompt))
        self._store.put(keys, self._content.source(keys)).result(WAIT_S_MAX)


def load(store: Store, plan: RestorePlan, slots: Any) -> tuple[list[int], int]:
    """Load what a plan can load; returns those blocks, and how many of them failed.

    What is missing is said to be computed, and is left as it is.
    """
    wanted = set(plan.load)
    computed: set[int] = set()
    with store.restore(plan, into=slots) as session:
        while step := session.next_step(WAIT_S_MAX):
            computed.update(step.blocks)
            session.computed(step, len(step.blocks) * BLOCK / PREFILL_TOKENS_PER_S)
    return sorted(wanted - computed), len(wanted & computed)


# -- a scheduler


class Scheduler:
    """Lookups at a rate of their own while a scope lasts, as an engine's scheduler makes them.

    ``latencies_s`` has for each (keys + lookup, from when it was due to its end); ``watch`` tells
    how long the thread waited for a core, all in all.
    """

    def __init__(self, store: Store, prompts: Sequence[Prompt], per_s: float) -> None:
        self._store = store
        self._ids = [tokens(prompt) for prompt in prompts]
        self._per_s = per_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="scheduler")
        self.latencies_s: list[tuple[float, float]] = []
        self.watch = Stopwatch()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S_MAX)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with self.watch:
                self._look_up()
        except BaseException as error:  # noqa: BLE001 - raised again where the scope ends
            self._failure = error

    def _look_up(self) -> None:
        store, started, number = self._store, time.perf_counter(), 0
        while not self._stop.is_set():
            due = started + number / self._per_s
            if (early := due - time.perf_counter()) > 0:
                time.sleep(early)
            begun = time.perf_counter()
            store.lookup(store.keys(self._ids[number % len(self._ids)]))
            ended = time.perf_counter()
            self.latencies_s.append((ended - begun, ended - due))
            number += 1
