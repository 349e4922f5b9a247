"""What others report about moving KV, each with its condition, beside what we find.

Their numbers are quoted as their papers (or secondary sources of them) state them; ours are
measured in this run, simulated from profiles, or arithmetic, and every row says which. A row whose
measurement was not part of this run says that instead of a number.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from _breakdown_shares import Setup, at_once_s, recompute_s

import kvtier
from kvtier.plan import Tier
from kvtier.planner import GAIN_MIN
from kvtier.profiles import (
    DEVICES,
    LINKS,
    MODELS,
    Link,
    ModelShape,
    activation_split,
    at_distance,
    cost_model,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["measured here", "simulated", "arithmetic", "measured + simulated", "not measured"]
Agrees = Literal[
    "agrees", "differs", "other condition", "same direction", "not seen here", "-"
]  # fmt: skip

OPT_66B: Final = ModelShape("OPT-66B", 64, 9216, 72, 72, 128, 12 * 64 * 9216.0**2)
OPT_175B: Final = ModelShape("OPT-175B", 96, 12288, 96, 96, 128, 12 * 96 * 12288.0**2)
LLAMA_405B: Final = ModelShape("Llama-3.1-405B", 126, 16384, 128, 8, 128, 4.01e11)
NVLINK: Final = Link("NVLink 3", 0.8 * 300e9, 2e-6)
"""One way, of one A100; 0.8 of what its data sheet signals, as for PCIe; the latency is assumed."""
ETHERNET_25: Final = Link("NIC 25G", 0.92 * 25e9 / 8, 30e-6)
DECODED_TOKENS: Final = 200
"""Tokens of an answer, assumed, where a share is one of a whole request."""
PAIRS: Final = tuple(
    (model, device)
    for model, devices in (
        ("Llama-3-8B", ("H100", "A100")),
        ("Qwen2.5-7B", ("H100", "A100")),
        ("Llama-3-70B", ("H100 x8", "A100 x8")),
    )
    for device in devices
)
"""Models and devices of the theory's tables."""
SLOW_LINKS: Final = tuple(link for link in LINKS.values() if not link.name.startswith("PCIe"))
PCIE5: Final = LINKS["PCIe 5 x16"]
BLEND_SHARE: Final = 0.15
"""Tokens that CacheBlend recomputes."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One finding of others and ours: texts to read, and ours as numbers."""

    work: str
    theirs: str
    ours: str
    kind: Kind
    agrees: Agrees = "-"
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"case": "evidence", **asdict(self)}


def preset(model: str, device: str, source: Link, copy: Link = PCIE5) -> Setup:
    """Return a setup of profiles by name."""
    return Setup(MODELS[model], DEVICES[device], source, copy)


def missing(work: str, theirs: str) -> Evidence:
    """Return a row whose measurement was not part of this run."""
    return Evidence(work, theirs, "was not part of this run", "not measured")


# -- arithmetic and simulation


def kv_size() -> Evidence:
    """Multiply layers, heads, widths and tokens."""
    small = MODELS["Llama-2-7B"].kv_token_bytes * 4096 / 2**30
    large = LLAMA_405B.kv_token_bytes * 8192 * 100 / 1e9
    return Evidence(
        "KV sizes (slide deck)",
        "7B at 4K tokens: 2 GiB; 405B at 8K tokens, 100 users: 423 GB",
        f"Llama-2-7B (MHA) {small:.2f} GiB; Llama-3.1-405B (GQA) {large:.0f} GB",
        "arithmetic",
        "agrees" if round(small, 2) == 2.0 and round(large) == 423 else "differs",
        {"gib_7b_4k": small, "gb_405b_8k_100": large},
    )


def distserve() -> Evidence:
    """Share of a transfer from prefill to decode devices, in a node and between nodes."""
    tokens, device = 512, DEVICES["A100 x8"]
    costs = cost_model(OPT_175B, device, ssd=ETHERNET_25, host=NVLINK, block_tokens=tokens)
    nbytes = tokens * OPT_175B.kv_token_bytes
    near_s, far_s = (
        costs.link(tier).latency_s + costs.link(tier).seconds(nbytes)
        for tier in (Tier.HOST, Tier.SSD)
    )
    prefill_s = costs.compute.seconds(0, tokens)
    token_s = device.step_s + OPT_175B.step_bytes / (device.memory_bytes_per_s * device.parallel)
    request_s = prefill_s + DECODED_TOKENS * token_s
    share, of_ttft = near_s / (request_s + near_s), near_s / (prefill_s + near_s)
    far = far_s / (prefill_s + far_s)
    return Evidence(
        "DistServe (OSDI'24)",
        "OPT-175B, ShareGPT: KV transfer < 0.1 % of a request, because placement keeps it in a "
        "node's NVLink (25 Gbps between nodes)",
        f"OPT-175B, 512 tokens, A100 x8, {DECODED_TOKENS} tokens decoded: {share:.3%} of the "
        f"request over NVLink, but {of_ttft:.1%} of TTFT; {far:.0%} of TTFT over one 25G link",
        "simulated",
        "agrees" if share < 1e-3 else "differs",
        {
            "share_of_request": share, "share_of_ttft": of_ttft, "share_of_ttft_25g": far,
            "opt66b_512_gib": 512 * OPT_66B.kv_token_bytes / 2**30,
        },
    )  # fmt: skip


def failsafe() -> Evidence:
    """Restore from host memory against recompute, eight devices."""
    gains = {}
    for name in ("PCIe 4 x16", "PCIe 5 x16"):
        setup = preset("Llama-3-70B", "H100 x8", LINKS["SSD 7 GB/s"], LINKS[name])
        for tokens in (4096, 32768):
            gain = recompute_s(setup, tokens) / at_once_s(setup, tokens, Tier.HOST)
            gains[f"{name}, {tokens >> 10}K"] = gain
    low, high = min(gains.values()), max(gains.values())
    return Evidence(
        "FailSafe (2025)",
        "8 x H100: restoring from host memory 41.5 x faster than recomputing",
        f"70B on 8 x H100: {low:.0f} x (PCIe 4, 4K tokens) to {high:.0f} x (PCIe 5, 32K)",
        "simulated",
        "agrees" if low <= 41.5 <= high else "differs",
        gains,
    )


def iown() -> Evidence:
    """Load 1K tokens over networks with distance instead of recomputing them."""
    numbers: dict[str, float] = {}
    for device in ("H100", "A100"):
        for name in ("NIC 10G", "NIC 100G"):
            for km in (0, 100, 1000):
                setup = preset("Mistral-7B", device, at_distance(LINKS[name], km))
                cut = 1 - at_once_s(setup, 1024, Tier.SSD) / recompute_s(setup, 1024)
                numbers[f"cut, {device}, {name}, {km} km"] = cut
    load_s = at_once_s(preset("Mistral-7B", "H100", LINKS["NIC 10G"]), 1024, Tier.SSD)
    numbers |= {"mb_1k": 1000 * MODELS["Mistral-7B"].kv_token_bytes / 1e6, "load_10g_s": load_s}
    best = numbers["cut, A100, NIC 100G, 0 km"]
    slow = numbers["cut, H100, NIC 10G, 0 km"]
    return Evidence(
        "IOWN APN study (2025)",
        "Mistral-7B, 1K tokens, 120 MB over an all-photonics network: TTFT ~90 % lower at 10G; "
        "the GPU is not named",
        f"{numbers['mb_1k']:.0f} MB take {load_s:.2f} s at 10G, {1 - slow:.1f} x an idle H100's "
        f"prefill: 90 % less needs a prefill of {10 * load_s:.1f} s; 100G cuts an A100's by "
        f"{best:.0%}, over 1000 km by {numbers['cut, A100, NIC 100G, 1000 km']:.0%}",
        "simulated",
        "other condition",
        numbers,
    )


def mooncake() -> Evidence:
    """Compare the transfer-or-prefill rule with a plan that does both, over a grid."""
    gains = []
    for model, device in PAIRS:
        for link in SLOW_LINKS:
            for tokens in (4096, 32768, 131072):
                setup = preset(model, device, link)
                made = kvtier.plan(
                    setup.residency(tokens, Tier.SSD), setup.costs(tokens),
                    step_blocks_max=setup.step_blocks(tokens),
                ).predicted  # fmt: skip
                assert made.load is not None
                gains.append(min(made.load, made.recompute) / made.planned)
    better = sum(gain > 1 + GAIN_MIN for gain in gains)
    return Evidence(
        "Mooncake (FAST'25)",
        "take the smaller of T_queue + T_prefill and T_transfer + T_queue + T_prefill of the rest",
        f"over {len(gains)} cells (models, SSDs, networks, 4K-128K) the plan never takes longer; "
        f"it is faster in {better}, by {statistics.median(gains):.2f} x (median), "
        f"{max(gains):.2f} x at most",
        "simulated",
        "agrees" if min(gains) >= 1 - 1e-9 else "differs",
        {"cells": len(gains), "better": better, "median": statistics.median(gains),
         "least": min(gains), "most": max(gains)},
    )  # fmt: skip


def cacheblend(setup: Setup, here: Mapping[str, float]) -> Evidence:
    """Find the rate at which a load hides behind recomputing 15 %."""
    tokens = 32768
    spent_s = BLEND_SHARE * recompute_s(setup, tokens)
    needed = tokens * setup.model.kv_token_bytes / spent_s
    rate = here.get("ssd_bytes_per_s")
    theirs = "recomputing ~15 % of the tokens hides behind the load; 2.2-3.3 x faster (lossy)"
    share = f"15 % of {setup.model.name} at 32K on {setup.device.name} takes {spent_s:.2f} s: "
    kind: Kind = "simulated"
    ours = share + f"it hides behind loads slower than {needed / 1e9:.1f} GB/s"
    if rate is not None:
        kind = "measured + simulated"
        ours += f"; this disk reads {rate / 1e9:.1f}: {'hidden' if rate < needed else 'it is not'}"
    return Evidence(
        "CacheBlend (EuroSys'25)", theirs, ours, kind,
        "agrees" if rate is not None and rate < needed else "other condition",
        {"needed_bytes_per_s": needed, "recompute_15_s": spent_s},
    )  # fmt: skip


def kvpr() -> Evidence:
    """Rebuild KV from activations where that pays."""
    gains = {
        name: activation_split(
            MODELS[name],
            1024,
            batch=32,
            flops_per_s=150e12,
            bytes_per_s=LINKS["PCIe 4 x16"].bytes_per_s,
        ).gain
        for name in ("Llama-2-7B", "Llama-2-13B", "Llama-3-8B", "Qwen2.5-7B", "Llama-3-70B")
    }
    grouped = max(gains[name] for name in ("Llama-3-8B", "Qwen2.5-7B", "Llama-3-70B"))
    return Evidence(
        "KVPR (ACL Findings'25)",
        "OPT (MHA), A100, PCIe 4: decode latency up to 35.8 % lower by activations instead of KV",
        f"one layer, 1K tokens: {gains['Llama-2-7B']:.2f} x for Llama-2-7B (MHA), "
        f"{grouped:.2f} x for every GQA model: inputs are larger than their KV there",
        "simulated",
        "agrees" if grouped == 1.0 < gains["Llama-2-7B"] else "differs",
        gains,
    )


# -- measured


def ratio_row(
    work: str,
    theirs: str,
    ours: str,
    names: tuple[str, ...],
    here: Mapping[str, float],
    *,
    least: float,
) -> Evidence:
    """Return a row of ratios of this run, shown by ``ours``.

    The path is another one than theirs, so that only the direction can be the same: it is if the
    first ratio is at least ``least``.
    """
    if any(name not in here for name in names):
        return missing(work, theirs)
    numbers = {name: here[name] for name in names}
    agrees: Agrees = "same direction" if numbers[names[0]] >= least else "not seen here"
    return Evidence(work, theirs, ours.format(*numbers.values()), "measured here", agrees, numbers)


def measured(here: Mapping[str, float]) -> list[Evidence]:
    """Return the rows that this machine can measure; under 5 % nothing is seen."""
    small = "read_256_vs_16_tokens_small"
    return [
        ratio_row(
            "P/D-Serve (2024)",
            "one contiguous buffer instead of fixed blocks: transfers 46 % shorter (1.85 x), RoCE",
            "layers apart take {0:.2f} x the time of one piece when read from this disk, "
            "{1:.2f} x when copied in memory",
            ("read_block_first_vs_layer_first", "copy_block_first_vs_layer_first"),
            here, least=1.05,
        ),
        ratio_row(
            "LMCache (2025)",
            "pages of 16 tokens are too small for links, 256 are not",
            "reading the SSD in blocks of 16 tokens takes {0:.2f} x the time of 256, checksums on"
            + (", {1:.2f} x of a 0.5B model" if small in here else ""),
            ("read_256_vs_16_tokens", *((small,) if small in here else ())), here, least=1.05,
        ),
        ratio_row(
            "SuperInfer (MLSys'26)",
            "pieces of 64 KiB use 10 GB/s, of >= 8 MiB 200 GB/s of a GH200's link (20 x)",
            "8 MiB over 64 KiB: {0:.1f} x reading this disk one by one, {1:.1f} x four at once, "
            "{2:.2f} x copying in memory (no GPU link here)",
            ("read_8mib_vs_64kib_1", "read_8mib_vs_64kib_4", "copy_8mib_vs_64kib"),
            here, least=1.05,
        ),
        ratio_row(
            "Chakra (MLSys'26)",
            "387 -> 5,958 copies: 0.895 -> 216 ms, 15 x the copies at 16 x the time each",
            "the same bytes in 5,958 copies instead of 387 take {0:.2f} x the time in host memory, "
            "of 241 x there (no GPU link here)",
            ("copies_5958_vs_387",), here, least=1.05,
        ),
    ]  # fmt: skip


def table(setup: Setup, here: Mapping[str, float]) -> list[Evidence]:
    """Return all rows; ``here`` are numbers of this run by name."""
    return [
        kv_size(), distserve(), failsafe(), iown(), mooncake(), cacheblend(setup, here), kvpr(),
        *measured(here),
    ]  # fmt: skip
