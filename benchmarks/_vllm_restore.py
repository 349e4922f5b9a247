"""TTFT of one stored prompt: recomputed by stock vLLM, loaded, and both at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from _harness import ATTEMPTS_MAX, Bar, Bench, Ratio, Trial, interleave
from _vllm_engines import BLOCK, BLOCK_BYTES, SUFFIX, Engines, prompt, request, ttft

if TYPE_CHECKING:
    from kvtier_vllm_run.process import EngineProcess

GRID: Final = {"equal": 1.0, "fast": 4.0, "slow": 0.25}
"""The link's rate over the one at which a load takes as long as recomputing."""
WARM: Final = 4
"""Runs before anything is measured: the first stores the prompt, the others teach the costs."""


def restore(bench: Bench, engines: Engines) -> None:
    """Measure at a link as fast as recomputing, at one four times as fast and at a fourth."""
    blocks = 2 if bench.options.smoke else 16
    ids = prompt(1, blocks * BLOCK + SUFFIX)
    length = len(ids) + BLOCK
    stock = engines.stock(length)
    ttft(stock, ids, engines.verdicts.stock)
    recompute = ttft(stock, ids, engines.verdicts.stock)
    suffix_s = _again_s(stock, ids)
    rate = blocks * BLOCK_BYTES / (recompute.seconds - suffix_s)
    bench.settings |= {
        "blocks": blocks,
        "recompute_s": recompute.seconds,
        "equal_bytes_per_s": rate,
    }
    worst: list[Ratio] = []
    for name, share in GRID.items():
        if name != "equal" and (bench.options.smoke or bench.options.quick):
            continue
        trials = _measure(bench, engines, stock, ids, name, share * rate)
        worst += _ratios(bench, name, trials)
    if worst:
        bench.add(min(worst, key=lambda ratio: ratio.value))


def _again_s(engine: EngineProcess, ids: list[int]) -> float:
    """Return the TTFT of a prompt that the engine holds: what is not restored."""
    return engine.serve([request(ids)])[0].ttft_s


def _measure(
    bench: Bench, engines: Engines, stock: EngineProcess, ids: list[int], name: str, rate: float
) -> dict[str, list[Trial]]:
    settings: dict[str, Any] = {
        "host_bytes": 0,  # every load comes over the link
        "ssd_bytes": 8 * (len(ids) // BLOCK) * BLOCK_BYTES,
        "links": {"ssd": {"bytes_per_s": rate}},
    }
    verdicts = engines.verdicts
    length = len(ids) + BLOCK
    hybrid = engines.kvtier("hybrid", length, settings)
    ways = {"hybrid": lambda: ttft(hybrid, ids, verdicts.same)}
    if name != "fast":
        ways["stock"] = ways["stock_again"] = lambda: ttft(stock, ids, verdicts.stock)
    loading = None
    if name != "slow":
        loading = engines.kvtier("load", length, {**settings, "hybrid": False})
        ways["load"] = lambda: ttft(loading, ids, verdicts.same)
    if name == "fast":
        ways["load_again"] = ways["load"]
    for way in ("hybrid", "load"):
        if way in ways:
            for _ in range(1 if bench.options.smoke else WARM):
                ways[way]()
    with bench.progress(f"restore, {name} link", len(ways) * bench.options.pairs) as tick:
        attempts = 1 if bench.options.smoke else ATTEMPTS_MAX
        trials = interleave(ways, bench.options.pairs, tick, attempts)
    bench.record(f"restore_{name}", trials, bytes_per_s=rate, counts=hybrid.counts())
    for engine in (hybrid, loading):
        if engine is not None:
            engines.stop(engine)
    return trials


def _ratios(bench: Bench, name: str, trials: dict[str, list[Trial]]) -> list[Ratio]:
    """Add the gain at equal times; return what counts as the worst elsewhere."""
    single = "load" if "load_again" in trials else "stock"
    same = trials[single], trials[f"{single}_again"]
    if name != "equal":
        return [Ratio.of_pairs("hybrid_worst", same[0], trials["hybrid"], same, Bar(low=0.97))]
    over = {way: trials[way] for way in ("stock", "load")}
    gains = [
        Ratio.of_pairs("hybrid_gain_equal", series, trials["hybrid"], same, Bar(low=1.75))
        for series in over.values()
    ]
    bench.add(min(gains, key=lambda ratio: ratio.value))
    return []
