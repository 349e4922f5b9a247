"""Is it negligible here? What a time to first token is spent on, by length, link and block size.

Links and lookups are measured on this machine through the store (cold, checksums on, every byte
compared); devices come from profiles, and restores on them are simulated by the library's own
planner and simulator. Every table says which is which. The evidence of others stands beside ours,
and three conditions are looked for that would refute what we say.

``--shape`` names a model or gives six numbers, ``--device`` an accelerator, ``--source`` the link
to the slow tier ("measured", a preset, or GB/s), ``--copy`` the link from host memory. ``--model``
adds a real model on this CPU. ``--quick`` moves fewer bytes and shows fewer lengths.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import _breakdown_model
import _breakdown_tables as tables
import torch
from _breakdown_evidence import SLOW_LINKS, table
from _breakdown_here import lookup_ms, read_by_block_tokens, restores, ssd_rate, subject_of
from _breakdown_pieces import DEPTHS, KIB, MIB, Pieces, chakra, duplex, layout, sizes
from _breakdown_shares import (
    LENGTHS,
    NEW_TOKENS,
    Setup,
    by_block_tokens,
    link_sweep,
    network,
    rows,
    shape,
)
from _breakdown_verdict import dearer, dominated, scale_out, sentence
from _disk import file_system, need_free, work_folder
from _harness import Bench, Options, parse

from kvtier.plan import Tier
from kvtier.profiles import DEVICES, LINKS, Link, ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


PARTS: Final = ("lookup", "restore", "granularity", "pieces", "simulated", "evidence", "model")
MIDDLE: Final = 32768
"""Tokens of the prompt by which links and block sizes are compared."""
BLOCK_TOKENS: Final = (16, 32, 64, 128, 256, 512, 1024)
QUICK_BLOCK_TOKENS: Final = (16, 64, 256)
QUICK_LENGTHS: Final = (1024, 8192, 32768, 131072)
SMOKE_SHAPE: Final = "4,256,4,2,32,4e6"
AT_ONCE: Final = 4
SMALL_MODEL: Final = ModelShape("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 3.58e8)
"""12 KiB of KV a token: 16 of them are a small read."""
NETWORKS: Final = tuple(link for link in SLOW_LINKS if link.name.startswith("NIC"))


class Run:
    """One run: what was asked for, and the numbers that its parts hand on by name."""

    def __init__(self, options: Options) -> None:
        values = options.values
        model = shape(values["shape"] or (SMOKE_SHAPE if options.smoke else "Llama-3-8B"))
        device = one_of("device", values["device"] or "H100", DEVICES)
        copy = one_of("copy", values["copy"] or "PCIe 5 x16", LINKS)
        given = values["source"] or "measured"
        self.source_kind = "measured here" if given == "measured" else "given"
        source = LINKS["SSD 7 GB/s"] if given == "measured" else link_of(given)
        self.setup = Setup(model, device, source, copy)
        self.measured_link: Link | None = None
        self.options = options
        self.lookup_s: dict[int, float] = {}
        self.here: dict[str, float] = {}
        self.restored: dict[tuple[str, int], float] = {}
        self.model_ratios: dict[str, tuple[float, float]] = {}
        self.spread = 0.0
        self.bench = Bench(
            "breakdown", options, model=model.name, device=device.name, copy=copy.name,
            source=given, new_tokens=NEW_TOKENS, reads="cold, checksums on, compared",
            pass_bytes=self.pass_bytes,
        )  # fmt: skip

    @property
    def pass_bytes(self) -> int:
        """What one pass moves at most."""
        return 8 * MIB if self.options.smoke else 256 * MIB if self.options.quick else 1024 * MIB

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompts that are simulated and looked up."""
        if self.options.smoke:
            return (1024, MIDDLE)
        return QUICK_LENGTHS if self.options.quick else LENGTHS

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """The block sizes that are compared."""
        if self.options.smoke:
            return (16, 256)
        return QUICK_BLOCK_TOKENS if self.options.quick else BLOCK_TOKENS


def one_of(name: str, value: str, known: Any) -> Any:
    """Return a profile by name; ends with the names if there is none."""
    if value not in known:
        raise SystemExit(f"--{name} {value}: one of {', '.join(known)} wanted")
    return known[value]


def link_of(text: str) -> Link:
    """Return a preset link, or one of so many GB/s."""
    if text in LINKS:
        return LINKS[text]
    try:
        rate = float(text) * 1e9
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        names = ", ".join(LINKS)
        raise SystemExit(f'--source {text}: "measured", GB/s or one of {names} wanted')
    return Link(f"a link of {text} GB/s", rate, 100e-6)


# -- measured here


def measure_restores(run: Run, folder: Path) -> None:
    """Measure whole restores from both tiers, and the SSD's rate, which becomes the source."""
    model = run.setup.model
    fitting = [t for t in LENGTHS if t * model.kv_token_bytes <= run.pass_bytes] or [LENGTHS[0]]
    lengths = fitting[:1] if run.options.smoke else fitting[-4:]
    if run.options.quick:
        lengths = sorted({lengths[0], lengths[-1]})
    for number, tokens in enumerate(lengths):
        subject = subject_of(model, tokens)
        restores(run.bench, folder, subject, Tier.SSD, 1 if number else AT_ONCE)
        restores(run.bench, folder, subject, Tier.HOST, 1)
    rate, run.spread = ssd_rate(run.bench, folder / "rate", subject_of(model, lengths[-1]))
    run.here["ssd_bytes_per_s"] = rate
    run.measured_link = Link(f"this SSD, {rate / 1e9:.2f} GB/s", rate)
    if run.source_kind == "measured here":
        run.setup = replace(run.setup, source=run.measured_link)
    for each in run.bench.results:
        if each["case"] == "breakdown" and each["at_once"] == 1:
            where = f"{model.name}, {each['tier']} of this machine, {each['tokens']} tokens"
            run.restored[where, each["tokens"]] = each["seconds"] - each["parts_s"]["lookup"]


def measure_granularity(run: Run, folder: Path) -> None:
    """Measure reads and lookups by block size, and say what that makes of a restore.

    Also for a small model, of which few tokens are few bytes, unless the run is to be quick.
    """
    small = run.options.smoke or run.options.quick
    nbytes = run.pass_bytes if small else run.pass_bytes // 2  # 8 blocks of 256 tokens and more
    looked_up = {
        each: lookup_ms(run.bench, folder, (MIDDLE,), each)[MIDDLE] / 1e3
        for each in run.block_tokens
    }
    for model, suffix in ((run.setup.model, ""), *(() if small else ((SMALL_MODEL, "_small"),))):
        with work_folder(str(folder / f"sizes{suffix}"), run.bench.console) as inside:
            rates = read_by_block_tokens(run.bench, inside, model, run.block_tokens, nbytes, suffix)
        found = by_block_tokens(replace(run.setup, model=model), MIDDLE, rates, looked_up)
        run.bench.results += [{"case": "granularity", **each} for each in found]
        if not suffix:
            run.here["read_256_vs_16_tokens"] = rates[256][0] / rates[16][0]
        else:
            run.here["read_256_vs_16_tokens_small"] = rates[256][0] / rates[16][0]


def measure_pieces(run: Run, folder: Path) -> None:
    """Measure the same bytes in few and in many pieces."""
    nbytes = run.pass_bytes if run.options.smoke else run.pass_bytes // 8
    with Pieces(folder, nbytes) as pieces:
        run.bench.settings["direct"] = pieces.direct
        sizes(run.bench, pieces)
        layout(run.bench, pieces, run.setup.block_bytes, 2 * run.setup.model.layers)
        chakra(run.bench, pieces)
        duplex(run.bench, pieces)
    cases = {row["case"]: row for row in run.bench.results}
    small, large = 64 * KIB, 8 * MIB
    for name, key in (
        *((f"read_by_size_{depth}", f"read_8mib_vs_64kib_{depth}") for depth in DEPTHS),
        ("copy_by_size", "copy_8mib_vs_64kib"),
    ):
        if {small, large} <= set(cases[name]["piece_bytes"]):
            large_rate, small_rate = (tables.rate(cases[name], each) for each in (large, small))
            run.here[key] = large_rate / small_rate


def measure_model(run: Run) -> None:
    """Measure a real model on this CPU, if one was asked for."""
    name = run.options.values["model"]
    lengths = (2,) if run.options.smoke else (4,) if run.options.quick else (4, 8)
    run.model_ratios = _breakdown_model.run(run.bench, name, lengths)


def measure(run: Run, folder: Path) -> None:
    """Measure what was asked for."""
    options, bench = run.options, run.bench
    bench.settings["file_system"] = file_system(folder)
    need_free(folder, (AT_ONCE + 4) * run.pass_bytes)
    if options.wants("lookup"):
        found = lookup_ms(bench, folder, run.lengths)
        run.lookup_s = {tokens: each / 1e3 for tokens, each in found.items()}
    for part, work in (
        ("restore", measure_restores),
        ("granularity", measure_granularity),
        ("pieces", measure_pieces),
    ):
        if options.wants(part):
            with work_folder(str(folder / part), bench.console) as inside:
                work(run, inside)
    if options.values["model"] and options.wants("model"):
        measure_model(run)
    run.here |= {ratio.name: ratio.value for ratio in bench.ratios}


# -- simulated, and said


def show_simulated(run: Run) -> None:
    """Simulate restores of all lengths over all links, and print and keep them."""
    bench, setup, console = run.bench, run.setup, run.bench.console
    for tier, link in ((Tier.SSD, setup.source), (Tier.HOST, setup.copy)):
        found = rows(setup, run.lengths, run.lookup_s, tier)
        title = (
            f"{setup.model.name} on {setup.device.name} (simulated), KV in {tier} over "
            f"{link.name}; % of TTFT"
        )
        tables.simulated(console, title, found)
        bench.results += [
            {"case": "breakdown", "kind": "simulated", "link": link.name, **each.to_json()}
            for each in found
        ]
    sweep = link_sweep(setup, MIDDLE)
    far = network(setup, NETWORKS, MIDDLE)
    tables.links(console, sweep)
    tables.network(console, far)
    bench.results += [{"case": "link_sweep", "kind": "simulated", **each} for each in sweep]
    bench.results += [{"case": "network", "kind": "simulated", **each} for each in far]


def show_evidence(run: Run) -> None:
    """Print the rows of others and the conditions, and keep them."""
    console, setup = run.bench.console, run.setup
    evidence = table(setup, run.here)
    found = (
        scale_out(),
        dominated(setup, run.measured_link, run.restored),
        dearer(setup, run.measured_link, run.spread, run.model_ratios),
    )
    tables.evidence(console, evidence)
    tables.conditions(console, found)
    run.bench.results += [each.to_json() for each in evidence]
    run.bench.results += [each.to_json() for each in found]


def verdict(run: Run) -> str:
    """Return the verdict in one sentence."""
    kind = run.source_kind
    if kind == "measured here" and run.measured_link is None:
        kind = "a preset, not measured in this run"
    elif kind == "measured here":
        kind = f"measured here, A/A {run.spread:.0%}"
    return sentence(run.setup, rows(run.setup, run.lengths, run.lookup_s), kind)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, simulate, and say whether it is negligible here."""
    paths = {"dir": "where to write: a folder on the disk to measure (default: $TMPDIR or here)"}
    values = {
        "shape": "a model's name, or layers,hidden,heads,kv_heads,head_dim,parameters",
        "device": "an accelerator's name (default: H100)",
        "source": 'link to the slow tier: "measured" (default), a preset, or GB/s',
        "copy": "link from host memory (default: PCIe 5 x16)",
        "model": "also measure a real model on this CPU: smollm2 or tiny",
    }
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths, values)
    if options.values["model"] not in ("", *_breakdown_model.MODELS):
        raise SystemExit(f"--model: one of {', '.join(_breakdown_model.MODELS)} wanted")
    torch.set_num_threads(1)
    run = Run(options)
    bench = run.bench
    with work_folder(options.paths["dir"], bench.console) as folder:
        measure(run, folder)
    tables.measured(bench.console, bench.results)
    tables.by_size(bench.console, bench.results)
    blocks = [row for row in bench.results if row["case"] == "granularity"]
    for model in dict.fromkeys(row["model"] for row in blocks):
        tables.granularity(bench.console, [row for row in blocks if row["model"] == model])
    if options.wants("simulated"):
        show_simulated(run)
    if options.wants("evidence"):
        show_evidence(run)
    said = verdict(run)
    bench.results.append({"case": "verdict", "text": said})
    status = bench.finish()
    bench.console.print(said, style="bold", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
