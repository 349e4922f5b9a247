from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from soak_users import User
from support import (
    HOST_SLOT_BYTES,
    SLOT_BYTES,
    SPEC,
    WAIT_S,
    FaultyFileSystem,
    Gate,
    HeldSlots,
    assert_sound,
    bring_back,
    eventually,
    faulty_index,
    fill_slots,
    filled_slots,
    in_thread,
    is_right,
    poisoned_slots,
    prompt_keys,
    put,
    run_python,
    tiny_budget,
)

import kvtier
from kvtier import LinkThrottle, StoreClosed, StoreFailed, StoreLocked, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Open = Any
THREADS = 4
TASKS = 4
TURNS = 15
BUG = "a bug"


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a file system that fails on demand."""
    return FaultyFileSystem()


@pytest.fixture
def keys() -> kvtier.BlockKeys:
    """Return the keys of a prompt of six blocks."""
    return prompt_keys(6)


@pytest.fixture
def ssd(open_store: Open, fs: FaultyFileSystem, keys: kvtier.BlockKeys) -> kvtier.Store:
    """Return a store that holds six blocks on its SSD, and has room for some in host memory."""
    segments = {"segment_bytes_max": 8 * SLOT_BYTES}
    with open_store(fs=fs, **segments) as store:
        put(store, keys)
    host_bytes = 8 * HOST_SLOT_BYTES
    return open_store(fs=fs, host_bytes=host_bytes, slot_wait_s_max=1.0, **segments)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """See that a test, however it treated its stores, ends without their threads."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"{thread.name} is left"


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let close give up soon on what does not end."""
    monkeypatch.setattr("kvtier.lane.JOIN_S_MAX", 0.2)
    monkeypatch.setattr("kvtier.prefetcher.JOIN_S_MAX", 0.2)


def load_plan(store: kvtier.Store, keys: kvtier.BlockKeys) -> kvtier.RestorePlan:
    """Plan to load what is stored."""
    return store.plan(store.lookup(keys), way="load")


def wait_ready(store: kvtier.Store, blocks: int) -> None:
    """Wait until so many blocks are in host memory."""
    eventually(lambda: store._catalog.ready(kvtier.Tier.HOST) == blocks)


def carry_out(
    session: kvtier.RestoreSession, slots: kvtier.KVSlots, keys: kvtier.BlockKeys
) -> list[int]:
    """Recompute what a restore asks for, to its end; returns the blocks."""
    done: list[int] = []
    while step := session.next_step(WAIT_S):
        fill_slots(slots, keys, step.blocks)
        session.computed(step)
        done += step.blocks
    return done


# -- many users of one store


class Course:
    """So many threads and tasks on one store, each with turns of its own that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._lock = threading.Lock()

    def count(self, what: str, number: int = 1) -> None:
        """Count what was done."""
        with self._lock:
            self.counts[what] += number

    def start(self, store: kvtier.Store) -> list[Callable[[], Any]]:
        """Set everybody to work; returns what waits for them, and raises what they raised."""

        def user(number: int) -> User:
            return User(store, random.Random(f"{self._seed}/{number}"), self.count)  # noqa: S311

        def turns(number: int) -> None:
            one = user(number)
            for _ in range(TURNS):
                one.turn()

        async def tasks() -> list[Any]:
            problems: list[Any] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: problems.append(context))
            users = [user(THREADS + number) for number in range(TASKS)]
            for _ in range(TURNS):
                await asyncio.gather(*(one.async_turn() for one in users))
            return problems

        threads = [in_thread(lambda number=number: turns(number)) for number in range(THREADS)]
        return [*threads, in_thread(lambda: asyncio.run(tasks()))]


def finish(works: list[Callable[[], Any]]) -> None:
    """Wait for everybody; nobody had anything to complain about."""
    problems = [work() for work in works]
    assert not any(problems), problems


DISKS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "sound": (),
    "reads fail": (("read", 5, 3),),
    "writes fail": (("write", 28, 2), ("sync", 5, 4)),
}


@pytest.mark.parametrize("link", [None, 16e6], ids=["full speed", "throttled"])
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("host_slots", [0, 10])
def test_everything_at_once(
    open_store: Open, fs: FaultyFileSystem, link: float | None, disk: str, host_slots: int
) -> None:
    """Threads and tasks do everything there is to one small store: right bytes, nothing is left."""
    store = open_store(
        fs=fs,
        host_bytes=host_slots * HOST_SLOT_BYTES,
        links={} if link is None else {"ssd": LinkThrottle(link), "host": LinkThrottle(10 * link)},
        slot_wait_s_max=0.5,
        **tiny_budget(30),
    )
    for operation, error, nth in DISKS[disk]:
        for round_ in range(8):
            fs.fail(operation, error, nth=nth + 20 * round_, times=3, name=".seg")
    course = Course(seed=len(disk) + host_slots)
    finish(course.start(store))
    fs.heal()
    assert_sound(store)
    host = store.stats()["tiers"]["host"]
    assert host["blocks"] == host["ready"] <= host_slots
    counters = store.stats()["counters"]
    assert counters["evicted_blocks_ssd"] > 0
    assert counters["ssd_read_blocks"] > 0
    assert min(course.counts[act] for act in ("put", "restore", "leave", "hold", "awaited")) > 0


def test_two_stores_at_once(tmp_path: Any, open_store: Open) -> None:
    """Two stores of one process, both busy, do not get into each other's way."""
    stores = [open_store(str(tmp_path / name), **tiny_budget(30)) for name in ("one", "two")]
    works = [work for number, store in enumerate(stores) for work in Course(number).start(store)]
    finish(works)
    for store in stores:
        assert_sound(store)


def test_a_second_writer_is_refused_while_the_first_works(open_store: Open) -> None:
    """Whoever opens a store that is in use gets StoreLocked, and disturbs nobody."""
    store = open_store(**tiny_budget(30))
    works = Course(seed=3).start(store)
    for _ in range(2):
        with pytest.raises(StoreLocked, match=store.path):
            kvtier.open(store.path, SPEC)
    finish(works)
    assert_sound(store)


# -- closing while others wait


class Waiters:
    """One of each who can wait for a store, all of them waiting; ``answers`` says what they got."""

    def __init__(self, store: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys) -> None:
        new = [prompt_keys(2, seed=50 + number) for number in range(3)]
        self.reads = fs.hold("read", name=".seg")
        self.writes = fs.hold("write", name=".seg")
        self._keys = keys
        self.slots = poisoned_slots(len(keys))
        self._store = store
        put_ = store.put(new[0], filled_slots(new[0]))
        awaited = store.put(new[1], filled_slots(new[1]))
        prefetch = store.prefetch(keys)
        self.writes.wait_reached()
        self.reads.wait_reached()

        async def wait() -> Any:
            return await awaited

        waits: dict[str, Callable[[], Any]] = {
            "put": lambda: put_.result(WAIT_S),
            "prefetch": lambda: prefetch.result(WAIT_S),
            "task": lambda: asyncio.run(wait()),
            "restore": self._restore,
            "flush": lambda: store.flush(WAIT_S),
            "purge": lambda: store.purge(tenant="", timeout=WAIT_S),
        }
        self._entered = threading.Event()
        self._waiting = {name: in_thread(call) for name, call in waits.items()}
        assert self._entered.wait(WAIT_S)

    def _restore(self) -> list[int]:
        with self._store.restore(load_plan(self._store, self._keys), into=self.slots) as session:
            self._entered.set()
            return carry_out(session, self.slots, self._keys)

    def answers(self) -> dict[str, Any]:
        """Return what everybody got, an error included; each within ``WAIT_S``."""
        got = {}
        for name, result in self._waiting.items():
            try:
                got[name] = result()
            except kvtier.KVTierError as error:
                got[name] = error
        return got


def test_closing_answers_all_who_wait(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys
) -> None:
    """Closing lets what has begun end: everybody gets a result, or StoreClosed."""
    waiters = Waiters(ssd, fs, keys)
    closing = [in_thread(ssd.close) for _ in range(3)]
    waiters.reads.open()
    waiters.writes.open()
    for close in closing:
        close()
    answers = waiters.answers()
    errors = {name: each for name, each in answers.items() if isinstance(each, Exception)}
    assert {type(error) for error in errors.values()} <= {StoreClosed}
    assert set(errors) <= {"flush", "purge"}
    assert answers["put"].stored == answers["task"].stored == 2
    assert all(is_right(waiters.slots, keys, block) for block in range(len(keys)))


def test_closing_beside_a_disk_that_hangs_answers_all_who_wait(
    open_store: Open,
    ssd: kvtier.Store,
    fs: FaultyFileSystem,
    keys: kvtier.BlockKeys,
    short_patience: None,
) -> None:
    """Reads and writes that never end hang neither close nor anybody who waits for them."""
    ssd.close()
    store = open_store(fs=fs, host_bytes=8 * HOST_SLOT_BYTES, close_s_max=0.2)
    waiters = Waiters(store, fs, keys)
    try:
        in_thread(store.close)()
        answers = waiters.answers()
    finally:
        waiters.reads.open()
        waiters.writes.open()
    assert isinstance(answers["prefetch"], TransferFailed)
    assert isinstance(answers["flush"], StoreClosed)
    assert isinstance(answers["purge"], (StoreClosed, TransferFailed))
    assert all(is_right(waiters.slots, keys, block) for block in range(len(keys)))


def test_closing_does_not_wait_for_a_link_that_takes_for_ever(
    open_store: Open,
    ssd: kvtier.Store,
    keys: kvtier.BlockKeys,
    short_patience: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever waits for a slow link is told, and no task is left behind."""
    ssd.close()
    store = open_store(links={"ssd": LinkThrottle(1.0)})
    prefetch = store.prefetch(keys)
    slots = poisoned_slots(len(keys))
    with store.restore(load_plan(store, keys), into=slots) as session:
        restore = in_thread(partial(carry_out, session, slots, keys))
        # The reads are done, the link is not, and the restore waits for it.
        wait_ready(store, 6)
        in_thread(store.close)()
        assert prefetch.result(WAIT_S) == 6  # they are there; nobody waits for the link any more
        restore()
    assert all(is_right(slots, keys, block) for block in range(len(keys)))
    del store, session, restore
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_closing_amid_a_long_restore(open_store: Open, fs: FaultyFileSystem) -> None:
    """A restore of any length goes on by recomputing once its store has closed."""
    store, keys = open_store(fs=fs, host_bytes=0, ssd_bytes="32MiB"), prompt_keys(500)
    put(store, keys)
    store.flush()
    gate = fs.hold("read", name=".seg")
    slots = poisoned_slots(500)
    with store.restore(load_plan(store, keys), into=slots) as session:
        gate.wait_reached()
        closing = in_thread(store.close)
        gate.open()
        closing()
        carry_out(session, slots, keys)
    assert all(is_right(slots, keys, block) for block in range(500))


def test_a_purge_that_comes_too_late_is_told(ssd: kvtier.Store) -> None:
    """A purge that passed the door before it closed does not wait for a lane that has ended."""
    ssd.close()
    with pytest.raises(StoreClosed, match="nothing was purged"):
        ssd._writer.purge(list)


INTERRUPTED = """
import random, sys, faulthandler
import kvtier, kvtier.lane, kvtier.prefetcher
from support import SPEC, HOST_SLOT_BYTES, bring_back, filled_slots, prompt_keys, put

class Interrupt:
    '''Closes a store before the ``at``-th line of kvtier that this thread runs: as a signal may.'''
    def __init__(self, store, at):
        self.store, self.at, self.lines = store, at, 0
    def __call__(self, frame, event, arg):
        return self.line if "/kvtier/" in frame.f_code.co_filename else None
    def line(self, frame, event, arg):
        self.lines += event == "line"
        if self.lines == self.at and event == "line":
            self.store.close()
        return self.line

def verbs(store):
    new, old = prompt_keys(2), prompt_keys(2, seed=9)
    store.put(new, filled_slots(new))
    store.stats(), store.check(), store.changes(), store.prefetch(old)
    with store.pin(old):
        bring_back(store, old, timeout=5)
    store.purge(tenant="", timeout=0.1)
    store.flush()

# A lane, or the loop, may wait for a lock that the interrupted line holds: until close gives up.
kvtier.lane.JOIN_S_MAX = kvtier.prefetcher.JOIN_S_MAX = 0.5
chance, lines, turns = random.Random(5), 0, 10
for turn in range(turns):
    bounds = {"host_bytes": 0, "close_s_max": 0.3, "slot_wait_s_max": 0.3}
    store = kvtier.open(f"{sys.argv[1]}/{turn}", SPEC, ssd_bytes="8MiB", **bounds)
    put(store, prompt_keys(2, seed=9))
    store.flush()
    at = lines * turn // turns + chance.randrange(lines // turns) if lines else 0
    interrupt = Interrupt(store, at)
    faulthandler.dump_traceback_later(20, exit=True)
    sys.settrace(interrupt)
    try:
        verbs(store)
    except (kvtier.StoreClosed, kvtier.TransferFailed):
        pass  # TransferFailed: on a slow machine a flush takes longer than it may here
    finally:
        sys.settrace(None)
    lines = lines or interrupt.lines
    assert lines > 500
    store.close()
print("good")
"""


def test_close_from_a_signal_handler(tmp_path: Any) -> None:
    """Closing on top of any line of any verb comes back; the verb ends or raises StoreClosed."""
    done = run_python(INTERRUPTED, str(tmp_path), check=False)
    assert done.stdout == "good\n", done.stderr


def test_close_when_a_signal_comes(ssd: kvtier.Store, keys: kvtier.BlockKeys) -> None:
    """A handler that closes the store ends a restore that its thread is in the middle of."""
    old = signal.signal(signal.SIGUSR1, lambda *_: ssd.close())
    slots = poisoned_slots(6)
    try:
        with ssd.restore(load_plan(ssd, keys), into=slots) as session:
            signal.raise_signal(signal.SIGUSR1)
            carry_out(session, slots, keys)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert all(is_right(slots, keys, block) for block in range(6))


@pytest.mark.parametrize("what", ["store", "reader"])
def test_a_store_that_nobody_holds_is_closed(open_store: Open, store_path: str, what: str) -> None:
    """Dropping a store without closing it warns, ends its threads, and keeps what was put."""
    keys = prompt_keys(3)
    threads = set(threading.enumerate())
    if what == "store":
        dropped: Any = kvtier.open(store_path, SPEC, ssd_bytes="8MiB")
        dropped.put(keys, filled_slots(keys))
    else:
        with open_store() as store:
            put(store, keys)
        dropped = kvtier.open_reader(store_path, SPEC)
        bring_back(dropped, keys)
    held = [dropped]
    del dropped
    with pytest.warns(ResourceWarning, match="was not closed"):
        held.clear()
    for thread in set(threading.enumerate()) - threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"{thread.name} is left"
    assert bring_back(open_store(host_bytes=0), keys).loaded == 3


# -- forks

FORKED = """
import faulthandler, gc, logging, multiprocessing, os, random, signal, sys, threading, warnings
import kvtier
from support import *
warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, from Python 3.12 on
folder = sys.argv[1]
logging.getLogger("kvtier.store").setLevel(logging.ERROR)  # a budget as small as this is said
store = kvtier.open(f"{folder}/s", SPEC, host_bytes=6 * HOST_SLOT_BYTES, **tiny_budget(40))
reader = kvtier.open_reader(f"{folder}/s", SPEC)
keys, other = prompt_keys(5), prompt_keys(3, seed=1)
put(store, keys)
store.flush()

def child(residency, plan, session, transfer, pin):
    # Whatever waits for ever says where and ends; a disk may take its time over a sync.
    faulthandler.dump_traceback_later(40)
    signal.alarm(45)

    def closed(name, call):
        try:
            call()
        except kvtier.StoreClosed:
            return []
        return [name]

    wrong = []
    for view in (store, reader):
        wrong += closed("lookup", lambda: view.lookup(keys))
        wrong += closed("plan", lambda: view.plan(residency))
        wrong += closed("costs", lambda: view.costs)
        wrong += closed("restore", lambda: view.restore(plan, poisoned_slots(5)))
        wrong += closed("prefetch", lambda: view.prefetch(keys))
        wrong += closed("pin", lambda: view.pin(keys).__enter__())
        wrong += closed("stats", view.stats)
        wrong += closed("check", view.check)
        wrong += closed("changes", view.changes)
        view.close()
    wrong += closed("put", lambda: store.put(keys, filled_slots(keys)))
    wrong += closed("flush", store.flush)
    wrong += closed("purge", lambda: store.purge(tenant=""))
    wrong += closed("calibrate", lambda: store.calibrate(lambda step: None))
    wrong += closed("next_step", session.next_step)
    wrong += closed("poll_step", session.poll_step)
    wrong += closed("report", lambda: session.report)
    wrong += closed("result", transfer.result)
    wrong += closed("done", transfer.done)
    session.__exit__(None, None, None)
    pin.__exit__(None, None, None)
    with kvtier.open(f"{folder}/{os.getpid()}", SPEC, ssd_bytes="4MiB") as own:
        put(own, other)
        assert bring_back(own, other).loaded == 3
        assert own.check() == []
    gc.collect()
    if wrong:
        print(wrong, flush=True)
    return bool(wrong)

def forked(how):
    residency = store.lookup(keys)
    plan = store.plan(residency)
    with store.pin(keys) as _, store.restore(plan, poisoned_slots(5)) as session:
        pin = store.pin(keys)
        pin.__enter__()
        transfer = store.put(other, filled_slots(other))
        args = residency, plan, session, transfer, pin
        if how == "fork":
            pid = os.fork()
            if pid == 0:
                # Not os._exit: a child may end like any other process.
                sys.exit(child(*args))
            status = os.waitpid(pid, 0)[1]
        else:
            run = lambda: sys.exit(child(*args))
            process = multiprocessing.get_context("fork").Process(target=run)
            process.start()
            process.join()
            status = process.exitcode
        assert status == 0, f"{how}: the child ended with {status}"
        pin.__exit__(None, None, None)

stop = threading.Event()
"""

BUSY = """
def work(number):
    chance = random.Random(number)
    while not stop.is_set():
        mine = prompt_keys(5, seed=100 * number + chance.randrange(9))
        store.put(mine, filled_slots(mine))
        bring_back(store, mine)
        store.prefetch(mine)
        store.stats()
        bring_back(reader, mine)

works = [in_thread(lambda number=number: work(number)) for number in range(2)]
for turn in range(4):
    forked("fork" if turn % 2 else "multiprocessing")
stop.set()
"""

HELD = """
def hold():
    with contextlib.ExitStack() as locks:
        for view in (store, reader):
            locks.enter_context(view._catalog.changed)
            locks.enter_context(view._prefetcher._loop._gate)
            for part in (view._profiler, view._metrics, view._host._slots):
                locks.enter_context(part._lock)
        locks.enter_context(store._writeback._work)
        locks.enter_context(store._writer._work)
        held.set()
        assert stop.wait(WAIT_S)

held = threading.Event()
residency = store.lookup(keys)
plan = store.plan(residency)
session = store.restore(plan, poisoned_slots(5))
session.__enter__()
pin = store.pin(keys)
pin.__enter__()
transfer = store.put(other, filled_slots(other))
store.flush()
works = [in_thread(hold)]
assert held.wait(WAIT_S)
pid = os.fork()
if pid == 0:
    sys.exit(child(residency, plan, session, transfer, pin))
stop.set()
status = os.waitpid(pid, 0)[1]
assert status == 0, f"the child ended with {status}"
session.__exit__(None, None, None)
pin.__exit__(None, None, None)
"""

AFTERWARDS = """
for work in works:
    work()
assert put(store, prompt_keys(4, seed=77)).stored == 4
assert bring_back(store, prompt_keys(4, seed=77)).loaded == 4
assert_sound(store)
reader.close()
store.close()
print("good")
"""


@pytest.mark.parametrize("when", ["busy", "held"])
def test_a_forked_child_is_told_and_harms_nobody(tmp_path: Any, when: str) -> None:
    """A child forked amid everything, or while others hold every lock, gets StoreClosed.

    It never waits, opens a store of its own, and ends like any process; the parent goes on.
    """
    code = FORKED + {"busy": BUSY, "held": HELD}[when] + AFTERWARDS
    done = run_python(code, str(tmp_path), check=False, flags=["-W", "error"], limit_s=120)
    assert (done.stdout, done.stderr) == ("good\n", "")


# -- whatever fails in the background is heard of


class BadLink(LinkThrottle):
    """A link that raises."""

    def reserve(self, now: float, nbytes: int) -> float:
        """Raise."""
        raise RuntimeError(BUG)


class BadSlots:
    """Slots whose tensors raise."""

    def __init__(self, error: BaseException, blocks: int = 6) -> None:
        self._error = error
        self._slots = poisoned_slots(blocks)
        self.layout, self.device = self._slots.layout, self._slots.device

    def parts(self, block: int) -> Any:
        """Raise."""
        raise self._error


class BadEvent:
    """An engine's event that raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def synchronize(self) -> None:
        """Raise."""
        raise self._error


class Provocation:
    """A store with a fault ordered in one of its lanes, and the calls that meet it."""

    def __init__(self, store: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys) -> None:
        self.store, self.fs, self.keys = store, fs, keys
        self.bug = RuntimeError(BUG)

    def write_lane(self) -> Any:
        """Fail where segments are made, in the write lane."""
        self.fs.fail("create", self.bug, name=".seg")
        return self._put(blocks=20)

    def write_lane_purging(self) -> Any:
        """Fail where a purge destroys, in the write lane."""
        self.fs.fail("punch", self.bug)
        return self.store.purge(tenant="")

    def write_lane_purging_twice(self) -> Any:
        """Fail where a purge destroys, with another one queued behind it."""
        gate = self.fs.hold("punch")
        first = in_thread(lambda: self.store.purge(tenant=""))
        gate.wait_reached()
        second = in_thread(lambda: self.store.purge(tenant=""))
        purges = self.store._writer._purges
        with self.store._writer._work:
            assert self.store._writer._work.wait_for(lambda: len(purges) == 2, WAIT_S)
        self.fs.fail("punch", self.bug)
        gate.open()
        with pytest.raises(StoreFailed, match=BUG):
            first()
        return second()

    def ssd_lane(self) -> Any:
        """Fail where records are written, in a thread of the SSD tier."""
        self.fs.fail("write", self.bug, name=".seg")
        return self._put()

    def commit_lane(self) -> Any:
        """Fail where data is made durable, in the commit lane."""
        self.fs.fail("sync", self.bug, name=".seg")
        return self._put()

    def commit_lane_index(self) -> Any:
        """Fail where the index commits, in the commit lane."""
        faulty_index(self.store).error = self.bug
        return self._put()

    def copy_lane(self) -> Any:
        """Fail in the copy lane, with what is no Exception."""
        self.store.put(prompt_keys(6, seed=3), BadSlots(SystemExit(BUG)))
        return self.store.flush(WAIT_S)

    def copy_lane_event(self) -> Any:
        """Fail in the engine's event, with what is no Exception."""
        source = filled_slots(self.keys)
        new = prompt_keys(6, seed=3)
        return self.store.put(new, source, after=BadEvent(SystemExit(BUG))).result(WAIT_S)

    def read_lane(self) -> Any:
        """Fail where a restore reads."""
        self.fs.fail("read", self.bug, name=".seg")
        return bring_back(self.store, self.keys)

    def read_lane_ending(self) -> Any:
        """Fail where a restore reads, with what would end a loop."""
        self.fs.fail("read", SystemExit(BUG), name=".seg")
        return bring_back(self.store, self.keys)

    def read_lane_stopping(self) -> Any:
        """Fail where a prefetch reads, with what a future cannot carry."""
        self.fs.fail("read", StopIteration(BUG), name=".seg")
        return self.store.prefetch(self.keys).result(WAIT_S)

    def loop_link(self) -> Any:
        """Fail on the loop: in the SSD's link, for a restore."""
        self.store._prefetcher._links = {kvtier.Tier.SSD: BadLink(1.0)}
        return bring_back(self.store, self.keys)

    def loop_link_prefetch(self) -> Any:
        """Fail on the loop: in the SSD's link, for a prefetch."""
        self.store._prefetcher._links = {kvtier.Tier.SSD: BadLink(1.0)}
        return self.store.prefetch(self.keys).result(WAIT_S)

    def loop_host_link(self) -> Any:
        """Fail on the loop: in the link to the engine."""
        self.store._prefetcher._deliveries._link = BadLink(1.0)
        return bring_back(self.store, self.keys)

    def loop_callback(self) -> Any:
        """Fail on the loop, in a callback, which belongs to no task."""

        def fail() -> None:
            reached.set()
            raise self.bug

        reached = threading.Event()
        loop = self.store._prefetcher._loop
        loop.submit(fail)
        assert reached.wait(WAIT_S)
        after = threading.Event()
        loop.submit(after.set)
        assert after.wait(WAIT_S)
        return self.store.lookup(self.keys)

    def _put(self, blocks: int = 6) -> Any:
        new = prompt_keys(blocks, seed=3)
        return self.store.put(new, filled_slots(new)).result(WAIT_S)


LANES = [name for name in vars(Provocation) if not name.startswith("_")]


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_that_fails_is_heard_of(
    ssd: kvtier.Store, fs: FaultyFileSystem, keys: kvtier.BlockKeys, lane: str
) -> None:
    """What fails in any lane ends the call that waits for it and is the next call's StoreFailed."""
    provocation = Provocation(ssd, fs, keys)
    with pytest.raises((RuntimeError, kvtier.KVTierError), match=BUG):
        in_thread(getattr(provocation, lane))()
    with pytest.raises(StoreFailed, match=BUG):
        ssd.lookup(keys)
    fs.heal()
    in_thread(ssd.close)()


@pytest.mark.parametrize(
    "error",
    [RuntimeError(BUG), StopIteration(BUG), SystemExit(BUG), asyncio.CancelledError(BUG)],
    ids=lambda error: type(error).__name__,
)
def test_slots_that_raise_end_their_own_restore(
    ssd: kvtier.Store, keys: kvtier.BlockKeys, error: BaseException
) -> None:
    """Whatever an engine's slots raise comes out of their session; others and the store go on."""

    def restore() -> None:
        with ssd.restore(load_plan(ssd, keys), into=BadSlots(error)) as session:
            session.next_step(WAIT_S)

    with pytest.raises(RuntimeError, match=rf"{BUG}|StopIteration"):
        in_thread(restore)()
    assert bring_back(ssd, keys).loaded == 6
    assert_sound(ssd)


@pytest.mark.parametrize("where", ["slots", "event"])
def test_an_engine_that_raises_ends_its_own_put(ssd: kvtier.Store, where: str) -> None:
    """Whatever goes wrong in an engine's tensors or event fails that put, and no other."""
    new = prompt_keys(4, seed=3)
    error = RuntimeError(BUG)
    bad = (BadSlots(error), None) if where == "slots" else (filled_slots(new), BadEvent(error))
    with pytest.raises(TransferFailed, match=BUG):
        ssd.put(new, bad[0], after=bad[1]).result(WAIT_S)
    assert put(ssd, new).stored == 4
    assert bring_back(ssd, new).loaded == 4


def test_host_memory_that_was_given_back_says_so(ssd: kvtier.Store) -> None:
    """Whoever comes back from a hang to a closed store's memory is told that it is closed."""
    slot = ssd._mover.take_slot()
    ssd.close()
    with pytest.raises(StoreClosed, match="host memory"):
        ssd._mover.slot_buffer(slot)


def test_a_copy_that_hangs_is_never_called_done(
    ssd: kvtier.Store, keys: kvtier.BlockKeys, short_patience: None
) -> None:
    """Closing beside a copy that hangs comes back; its slot is never said to be free."""
    gate = Gate()
    session = ssd.restore(load_plan(ssd, keys), into=HeldSlots(poisoned_slots(6), gate))
    session.__enter__()
    gate.wait_reached()
    in_thread(ssd.close)()
    assert session._tickets, "a copy that may still write was answered"
    gate.open()
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-load"):
            thread.join(WAIT_S)
    session._tickets.clear()
    session.__exit__(None, None, None)
