"""What a trace costs: an event site while nothing is traced, one that notes an event, a restore.

* ``trace_off_ns``: what an event site adds while no trace is kept.
* ``trace_on_us``: what it takes to note an event, with all of its fields.
* ``trace_share``: the events of one restore of 1 MiB blocks from host memory (the restore in which
  least time lies between two events), times the cost of each, over what the restore takes.

Times are of this thread's processor, so that strangers do not count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import TYPE_CHECKING, Final

import torch
from _blocks import MIB, Subject
from _harness import Bar, Bench, Ratio, parse

import kvtier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SITES: Final = 200_000
"""Event sites passed per measurement."""
ROUNDS: Final = 11
BLOCKS: Final = 64


class Site:
    """An owner of an event site, as the store has them."""

    def __init__(self, trace: kvtier.Trace | None) -> None:
        self._trace = trace

    def bare(self) -> None:
        """Do what is done without tracing: nothing."""

    def pass_by(self) -> None:
        """Pass an event site."""
        if self._trace is not None:
            self._trace.add(
                "read", "ssd", 1.0, 2.0, session=1, start=3, stop=4, nbytes=MIB, after=(7,)
            )


def each_s(what: Callable[[], None]) -> float:
    """Return how long one call takes, in seconds of this thread's processor."""
    begun = time.thread_time()
    for _ in range(SITES):
        what()
    return (time.thread_time() - begun) / SITES


def sites(bench: Bench) -> float:
    """Measure sites that note nothing and sites that do; returns the latter's seconds."""
    off, on = Site(None), Site(kvtier.Trace())
    series: dict[str, list[float]] = {"off": [], "on": []}
    with bench.progress("event sites", ROUNDS) as tick:
        for _ in range(ROUNDS):
            bare = each_s(off.bare)
            series["off"].append((each_s(off.pass_by) - bare) * 1e9)
            series["on"].append((each_s(on.pass_by) - bare) * 1e6)
            tick()
    bench.add(
        Ratio.of_series("trace_off_ns", series["off"], Bar(high=100.0)),
        Ratio.of_series("trace_on_us", series["on"], Bar(high=3.0)),
    )
    return sorted(series["on"])[ROUNDS // 2] / 1e6


def share(bench: Bench, event_s: float) -> None:
    """Count the events of a restore from host memory, and set their cost against its time."""
    subject, trace = Subject(1, BLOCKS), kvtier.Trace()
    shares, counts = [], []
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        kvtier.open(
            folder, subject.spec, host_bytes=2 * BLOCKS * MIB, ssd_bytes="1GiB", trace=trace
        ) as store,
    ):
        keys = subject.put(store).detail["keys"]
        store.flush()
        plan = store.plan(store.lookup(keys), way="load")
        for _ in range(ROUNDS):
            trace.clear()
            begun = time.perf_counter()
            with store.restore(plan, into=subject.target) as session:
                while step := session.next_step():
                    session.computed(step)
            spent = time.perf_counter() - begun
            counts.append(len(trace.events))
            shares.append(counts[-1] * event_s / spent)
    assert min(counts) >= BLOCKS, "each block's copy is an event"
    bench.add(Ratio.of_series("trace_share", shares, Bar(high=0.01)))
    bench.results.append({"case": "restore", "events": counts, "blocks": BLOCKS})


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts."""
    options = parse(__doc__.partition("\n")[0], (), argv)
    torch.set_num_threads(1)
    bench = Bench("tracing", options, sites=SITES, blocks=BLOCKS)
    share(bench, sites(bench))
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
