"""What a store delivers under load, without a model: KV of any shape, every byte compared.

Clients look prompts up, restore what is stored, and put what was missing, in open loop (requests
come when they come; latency counts from then) or closed loop. There is no model: what is missing
is not computed, it is only put. KV is random and follows from its block's hash, so that everything
restored is compared; what differs, or cannot be read, is in no throughput.

* ``load_vs_raw``: 16 open-loop clients over a cold SSD against the disk alone, in pairs, compared
  once the clock has stopped. ``lookup_p99_ms``: keys + lookup of 8K tokens meanwhile.
* One row a workload: popular texts larger than host memory, popular texts larger than the SSD
  budget, conversations, a public trace; clients compare between requests, and that CPU time is
  left out. "raw" is how long the disk alone would have taken for the same bytes / how long it took.

An option that describes a workload (``--lengths``, ``--share``, ``--trace``, ...) runs that one
instead.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import torch
from _disk import file_system, need_free, work_folder
from _harness import Bench, Options, parse
from _load_cold import ColdLoad, cold
from _load_content import PRESETS, Content, spec_of
from _load_report import Blocks, Outcome, table, verdict
from _load_workloads import Workload, built_in, run, yours

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PARTS: Final = ("vs_raw", "texts", "budget", "turns", "trace")
MIB: Final = 1 << 20
COLD_SHAPE: Final = "qwen2.5-7b"
SHAPE: Final = "qwen2.5-0.5b"
SMOKE_SHAPE: Final = "2,2,64,bfloat16"
POOL_SMOKE_BYTES: Final = 8 * MIB
WRONG: Final = 2
"""The exit status if a restored byte is not what was stored."""
VALUES: Final = {
    "shape": f"KV of a model ({', '.join(PRESETS)}) or layers,heads,dim,dtype",
    "lengths": "tokens: 8192, uniform:1024-16384, lognormal:4096,0.5 or list:1024,2048",
    "share": "system:TOKENS, zipf:S, prefixes:N, fresh:PART; or turns:N; comma-separated",
    "trace": "conversation, synthetic, agentic or agentic-users, instead of lengths and share",
    "arrivals": "poisson, fixed, bursty or closed",
    "rate": "requests a second (default: half of what the disk alone could do)",
    "think": "seconds that a client of a closed loop waits before it asks again",
    "clients": "how many requests are served at once",
    "requests": "how many requests there are",
    "host": "host_bytes: a size, or a part of the working set such as 25%%",
    "ssd": "ssd_bytes, likewise",
    "policy": "the store's policy",
    "memory": "of all clients together (default: 2GiB); longer prompts are cut",
    "corrupt": "flip a byte in so many stored blocks first: damaged reads must be found out",
}


def wanted(options: Options) -> list[Workload]:
    """Return the workloads to run: the one that was described, or those that are built in."""
    given = {name: value for name, value in options.values.items() if value}
    if set(given) - {"shape"}:
        return [yours(given, quick=options.quick or options.smoke)]
    size = 0 if options.smoke else 1 if options.quick else 4
    return [each for each in built_in(size) if options.wants(each.name)]


def measure(bench: Bench, folder: Path, workloads: Sequence[Workload]) -> list[Outcome]:
    """Run workloads, one after the other, each in a store of its own."""
    options = bench.options
    shape = options.values["shape"] or (SMOKE_SHAPE if options.smoke else SHAPE)
    spec = spec_of(shape)
    content = Content(spec, POOL_SMOKE_BYTES) if options.smoke else Content(spec)
    outcomes = []
    for workload in workloads:
        with work_folder(str(folder), bench.console) as inside:
            outcomes.append(run(bench, inside, workload, spec, content))
        bench.results.append(outcomes[-1].to_json())
    return outcomes


def against_raw(bench: Bench, folder: Path) -> ColdLoad:
    """Measure the two numbers that have bars."""
    options = bench.options
    spec = spec_of(options.values["shape"] or (SMOKE_SHAPE if options.smoke else COLD_SHAPE))
    content = Content(spec, POOL_SMOKE_BYTES) if options.smoke else Content(spec)
    pass_bytes = (8 if options.smoke else 1024 if options.quick else 2048) * MIB
    need_free(folder, 3 * pass_bytes)
    with work_folder(str(folder), bench.console) as inside:
        return cold(bench, inside, content, spec, pass_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    paths = {"dir": "where to write: a folder on the disk to measure (default: $TMPDIR or here)"}
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths, VALUES)
    torch.set_num_threads(1)
    bench = Bench("load", options, compared="every byte", cold=True)
    try:
        workloads = wanted(options)
    except ValueError as error:
        bench.console.print(str(error), style="red")
        return WRONG
    described = any(value for name, value in options.values.items() if name != "shape")
    made = None
    with work_folder(options.paths["dir"], bench.console) as folder:
        bench.settings["file_system"] = file_system(folder)
        if options.wants("vs_raw") and not described:
            made = against_raw(bench, folder)
        outcomes = measure(bench, folder, workloads)
    if outcomes:
        bench.console.print(table(outcomes))
    blocks = Blocks(
        right=sum(each.right_blocks for each in outcomes) + (made.right if made else 0),
        wrong=sum(each.wrong_blocks for each in outcomes) + (made.wrong if made else 0),
        damaged=sum(each.damaged_blocks for each in outcomes) + (made.damaged if made else 0),
    )
    said = verdict(bench.ratios, outcomes, blocks)
    bench.results.append({"case": "verdict", "text": said})
    status = bench.finish()
    bench.console.print(said, highlight=False)
    return WRONG if blocks.wrong else status


if __name__ == "__main__":
    sys.exit(main())
