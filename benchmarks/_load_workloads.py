"""Workloads: those that are built in, the one that a command line describes, and a run of one."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from _blocks import SLACK_BYTES, counter, io_mode, segments
from _disk import PAGE, drop_cache, need_free, process_cpu_s
from _load_limits import Limits, Others, limits, shape_of
from _load_report import Outcome, outcome
from _load_run import WAIT_S_MAX, Engine, drive
from _load_work import (
    ARRIVALS,
    Prompt,
    Sharing,
    arrivals,
    lengths,
    of_trace,
    prefix,
    prompts,
    rescaled,
    size,
    working_set,
)
from _replay_traces import TRACES, trace

import kvtier
from kvtier.config import parse_bytes
from kvtier.tiers.host import host_slot_bytes
from kvtier.tiers.segment import header_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from _harness import Bench
    from _load_content import Content

    from kvtier.identity import KVSpec
    from kvtier.store import Store

RAW_BYTES: Final = 512 << 20
"""What a raw pass moves."""
DISK_SHARE: Final = 0.5
"""Bytes asked for a second / what the disk alone reads or writes, the less, if no rate is given."""
SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of which store, and how.

    ``host`` and ``ssd`` are sizes, or parts of the working set. ``filled``: every shared text was
    stored before the clock starts. ``rate`` 0: half of what the disk alone could do. ``memory`` is
    what all clients have together: prompts that would not fit are cut.
    """

    name: str
    clients: int = 16
    arrivals: str = "poisson"
    rate: float = 0.0
    think_s: float = 0.0
    requests: int = 200
    lengths: str = "lognormal:4096,0.5"
    sharing: Sharing = Sharing()  # noqa: RUF009 - frozen
    trace: str = ""
    host: str = "25%"
    ssd: str = "150%"
    policy: str = "priced"
    memory: str = "2GiB"
    corrupt: int = 0

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals: {self.arrivals!r} is not one of {', '.join(ARRIVALS)}")
        if self.trace and self.trace not in TRACES:
            raise ValueError(f"trace: {self.trace!r} is not one of {', '.join(TRACES)}")
        if min(self.clients, self.requests) < 1 or min(self.rate, self.think_s, self.corrupt) < 0:
            raise ValueError(f"{self.name}: a number of clients, requests or seconds is too small")
        lengths(self.lengths, 1, SEED)

    @property
    def filled(self) -> bool:
        """Whether shared texts are stored beforehand: conversations and traces begin empty."""
        return not self.trace and not self.sharing.turns

    def asked(self, blocks_max: int) -> list[Prompt]:
        """Return the prompts in order, none longer than ``blocks_max``."""
        if self.trace:
            return of_trace(trace(self.trace).first(self.requests), blocks_max)
        sizes = [min(each, blocks_max) for each in lengths(self.lengths, self.requests, SEED)]
        return prompts(self.sharing, sizes, self.requests, SEED)

    def shared(self, blocks_max: int) -> list[Prompt]:
        """Return the texts that are stored beforehand, the least liked ones first."""
        if not self.filled:
            return []
        sizes = [min(each, blocks_max) for each in lengths(self.lengths, self.requests, SEED)]
        ranks = reversed(range(self.sharing.prefixes))
        return [prefix(self.sharing, rank, sizes[rank % len(sizes)]) for rank in ranks]

    def dues(self, rate: float) -> list[float] | None:
        """Return when requests come, at ``rate`` a second; None in a closed loop."""
        if self.arrivals == "closed":
            return None
        if self.trace:
            times = [each.at_s for each in trace(self.trace).first(self.requests).requests]
            return rescaled(times, rate)
        return arrivals(self.arrivals, rate, self.requests, SEED)


def built_in(times: int) -> list[Workload]:
    """Return the workloads that are run by default; ``times`` 1 is quick, 0 as small as can be."""
    requests, texts = max(200 * times, 24), max(48 * times, 4)
    length = "lognormal:4096,0.5" if times else "uniform:512-1024"
    return [
        Workload(
            "texts", requests=requests, lengths=length, sharing=Sharing(prefixes=texts),
        ),
        Workload(
            "budget", arrivals="closed", requests=requests, lengths=length, host="10%", ssd="50%",
            sharing=Sharing(prefixes=texts),
        ),
        Workload(
            "turns", arrivals="bursty", requests=requests, lengths=length, ssd="60%",
            sharing=Sharing(system=4, turns=5),
        ),
        Workload(
            "trace", requests=100 * times or 24, trace="conversation", host="10%", ssd="60%",
            memory="2GiB" if times else "64MiB",
        ),
    ]  # fmt: skip


def yours(given: Mapping[str, str], *, quick: bool) -> Workload:
    """Return the workload that a command line describes; ``ValueError`` names what is wrong."""
    numbers: dict[str, Any] = {
        "clients": int, "requests": int, "corrupt": int, "rate": float, "think": float,
    }  # fmt: skip
    values: dict[str, Any] = {"requests": 200 if quick else 800}
    for name, value in given.items():
        if name == "shape":
            continue
        try:
            values[name] = numbers.get(name, str)(value)
        except ValueError:
            raise ValueError(f"{name}: {value!r} is not a number") from None
    if "share" in values:
        values["sharing"] = Sharing.parse(values.pop("share"))
    if "think" in values:
        values["think_s"] = values.pop("think")
    return Workload("yours", **values)


# -- a run


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a workload comes to, in bytes, for one spec."""

    host: int
    ssd: int
    working_set: int
    blocks_max: int


def _sized(workload: Workload, spec: KVSpec) -> tuple[_Sizes, list[Prompt]]:
    layout = spec.block_layout
    memory = parse_bytes("memory", workload.memory)
    room = memory // (workload.clients * layout.block_bytes)
    if not room:
        raise SystemExit(
            f"memory: {workload.clients} clients' blocks of {layout.block_bytes} bytes do not fit "
            f"into {workload.memory}: more memory, fewer clients, or a smaller shape"
        )
    asked = workload.asked(room)
    longest = max(map(len, asked))
    whole = working_set([*asked, *workload.shared(room)])
    record = header_bytes(len(layout.parts)) + host_slot_bytes(layout.block_bytes)

    def parsed(name: str) -> int:
        each = layout.block_bytes if name == "host" else record
        return size(
            getattr(workload, name), whole * each, lambda text: parse_bytes(f"{name}_bytes", text)
        )

    ssd = parsed("ssd") + SLACK_BYTES
    sizes = _Sizes(parsed("host"), ssd, whole * layout.block_bytes, max(longest, 1))
    return sizes, asked


def run(bench: Bench, folder: Path, workload: Workload, spec: KVSpec, content: Content) -> Outcome:
    """Fill a store, let the clients loose, and return what they saw."""
    sizes, asked = _sized(workload, spec)
    layout = spec.block_layout
    raw_blocks = max(min(RAW_BYTES, sizes.working_set) // layout.block_bytes, 1)
    need_free(folder, sizes.ssd + 2 * raw_blocks * layout.block_bytes)
    shared = workload.shared(sizes.blocks_max)
    total = len(shared) + len(asked)
    with (
        bench.progress(workload.name, total, per_s=1) as tick,
        kvtier.open(
            folder / "store", spec, host_bytes=sizes.host, ssd_bytes=sizes.ssd,
            policy=workload.policy,
        ) as store,
        limits(folder / "raw", store, raw_blocks) as raw,
    ):  # fmt: skip
        bench.settings["io"] = io_mode(store)
        engine = Engine(store, content, workload.clients, sizes.blocks_max)
        for text in shared:
            engine.fill(text)
            tick()
        store.flush(WAIT_S_MAX)
        if workload.corrupt:
            corrupt(store, workload.corrupt)
        measured = [raw()]
        mean_bytes = sum(map(len, asked)) / len(asked) * layout.block_bytes
        rate = workload.rate or DISK_SHARE * min(measured[0].read, measured[0].write) / mean_bytes
        drop_cache(segments(store))
        seen = _clients(workload, store, engine, asked, rate, tick)
        measured.append(raw())
    return outcome(
        workload.name,
        _what(workload, sizes, rate, len(asked)),
        engine.seen,
        block_bytes=layout.block_bytes,
        limits=Limits.middle(measured),
        **seen,
    )


def _clients(
    workload: Workload,
    store: Store,
    engine: Engine,
    asked: list[Prompt],
    rate: float,
    tick: Any,
) -> dict[str, Any]:
    """Serve all requests; returns what was measured beside what the clients saw."""
    names = ("loaded_bytes_host", "loaded_bytes_ssd", "ssd_read_bytes", "ssd_written_bytes",
             "damaged_blocks")  # fmt: skip
    before = {name: counter(store, name) for name in names}

    def serve(number: int, due: float, client: int) -> None:
        engine.serve(asked[number], due, client)
        tick()

    others, cpu_s = Others(), process_cpu_s()
    begun = drive(
        serve, len(asked), workload.clients, dues=workload.dues(rate), think_s=workload.think_s
    )
    ended = max(each.ended for each in engine.seen.served)
    store.flush(WAIT_S_MAX)
    written = time.perf_counter()
    cpu_s, share = process_cpu_s() - cpu_s, others.share()
    moved = {name: counter(store, name) - before[name] for name in names}
    return {
        "wall_s": ended - begun,
        "written_s": written - begun,
        "cpu_s": cpu_s,
        "others": share,
        "host_bytes": moved["loaded_bytes_host"],
        "ssd_bytes": moved["loaded_bytes_ssd"],
        "read_bytes": moved["ssd_read_bytes"],
        "written_bytes": moved["ssd_written_bytes"],
        "damaged_blocks": moved["damaged_blocks"],
    }


def _what(workload: Workload, sizes: _Sizes, rate: float, requests: int) -> str:
    asked = workload.trace or f"{workload.lengths} tokens, {workload.sharing}"
    kind = "as recorded" if workload.trace else workload.arrivals
    when = "closed loop" if workload.arrivals == "closed" else f"{kind}, {rate:.2f} requests/s"
    return (
        f"{requests} requests, {workload.clients} clients, {when}; {asked}; prompts up to "
        f"{sizes.blocks_max} blocks; working set {sizes.working_set >> 20} MiB, host "
        f"{sizes.host >> 20} MiB, ssd {sizes.ssd >> 20} MiB, policy {workload.policy}"
    )


def corrupt(store: Store, blocks: int, seed: int = SEED) -> int:
    """Flip one byte of the payload in so many slots of a store's files; returns in how many."""
    shape = shape_of(store, 1, writes=True)
    draw = random.Random(seed)  # noqa: S311 - a benchmark repeats itself
    slots = [
        (path, PAGE + slot * shape.slot_bytes + shape.header_bytes)
        for path in sorted(segments(store).iterdir())
        for slot in range((path.stat().st_size - PAGE) // shape.slot_bytes)
    ]
    chosen = draw.sample(slots, min(blocks, len(slots)))
    for path, payload in chosen:
        fd = os.open(path, os.O_RDWR)
        place = payload + draw.randrange(shape.payload_bytes)
        (byte,) = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([byte ^ 1 << draw.randrange(8)]), place)
        os.fsync(fd)
        os.close(fd)
    return len(chosen)
