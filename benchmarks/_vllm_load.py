"""What kvtier costs others: throughput while everything is saved, and the stutter of decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from _harness import ATTEMPTS_MAX, Bar, Bench, Ratio, Trial, interleave
from _vllm_engines import BLOCK, BLOCK_BYTES, SUFFIX, Engines, prompt, request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier_vllm_run.process import EngineProcess, Served

LENGTHS: Final = (1100, 300, 600, 850, 400, 550)
"""Prompt tokens of the mixed load's requests, which all come at once."""
ANSWER: Final = 24
SAVING_PAIRS: Final = 7
OTHERS: Final = 4
"""Requests that decode while the measured one comes."""
ANSWER_MAX: Final = 400
"""Tokens that the others may decode meanwhile; they are stopped long before."""


def saving(bench: Bench, engines: Engines) -> None:
    """Serve a mixed load of new prompts with saving on and off."""
    lengths = LENGTHS[1:3] if bench.options.smoke else LENGTHS[bench.options.quick :]
    settings = {"host_bytes": "512MiB", "ssd_bytes": "4GiB", "restore": False}
    length = max(lengths) + ANSWER + BLOCK
    on = engines.kvtier("saving", length, settings)
    off = engines.kvtier("off", length, {**settings, "save": False})
    ways = {
        "on": _mixed(engines, on, lengths),
        "off": _mixed(engines, off, lengths),
        "off_again": _mixed(engines, off, lengths),
    }
    pairs = 1 if bench.options.smoke else max(SAVING_PAIRS, bench.options.pairs)
    if not bench.options.smoke:
        for way in ways.values():
            way()  # the first saves fill fresh pages and make the store's files
    with bench.progress("a mixed load, saved or not", len(ways) * pairs) as tick:
        trials = interleave(ways, pairs, tick, 1 if bench.options.smoke else ATTEMPTS_MAX)
    counts = on.counts()
    assert counts.get('save_blocks{outcome="released"}', 0) > 0, "nothing was saved"
    same = trials["off"], trials["off_again"]
    bench.add(Ratio.of_pairs("saving_throughput", same[0], trials["on"], same, Bar(low=0.97)))
    bench.record("saving", trials, tokens=sum(lengths) + len(lengths) * ANSWER, counts=counts)


def _mixed(engines: Engines, engine: EngineProcess, lengths: Sequence[int]) -> Callable[[], Trial]:
    """Return a way to serve the load; each run is of prompts that this way has not seen.

    The same run of another way has the same prompts, whose answers must be the same.
    """
    verdicts, runs = engines.verdicts, iter(range(1000, 1 << 30, len(lengths)))

    def run() -> Trial:
        engine.forget()
        first = next(runs)
        prompts = [prompt(first + number, length) for number, length in enumerate(lengths)]
        served = engine.serve([request(ids, ANSWER) for ids in prompts])
        for ids, each in zip(prompts, served, strict=True):
            verdicts.stock(ids, each)  # whichever way comes first says what is right
        return Trial(max(each.times_s[-1] for each in served), engine.held)

    return run


def stutter(bench: Bench, engines: Engines) -> None:
    """Let requests decode while a long prompt is restored, and while stock vLLM prefills it."""
    blocks = 2 if bench.options.smoke else 8 if bench.options.quick else 16
    ids = prompt(2, blocks * BLOCK + SUFFIX)
    length = len(ids) + BLOCK
    stock = engines.stock(length)
    stock.serve([request(ids)])
    stock.forget()
    (alone,) = stock.serve([request(ids)])
    engines.verdicts.stock(ids, alone)
    settings: dict[str, Any] = {
        "host_bytes": 0,
        "ssd_bytes": 8 * blocks * BLOCK_BYTES,
        "links": {"ssd": {"bytes_per_s": blocks * BLOCK_BYTES / alone.ttft_s}},
        "compute_price_per_request": 0.0,  # or, with others about, nothing would be recomputed
    }
    hybrid = engines.kvtier("stutter", length, settings)
    for _ in range(1 if bench.options.smoke else 3):
        hybrid.forget()
        engines.verdicts.same(ids, hybrid.serve([request(ids)])[0])
    found: dict[str, list[Served]] = {}

    def beside(engine: EngineProcess, name: str) -> Trial:
        engine.forget()
        others = [request(prompt(50 + number, 40), ANSWER_MAX) for number in range(OTHERS)]
        mine, decoded = engine.meanwhile(others, request(ids))
        engines.verdicts.same(ids, mine)
        found.setdefault(name, []).extend(decoded)
        detail = {"ttft_s": mine.ttft_s, "gaps": sum(len(each.times_s) for each in decoded)}
        return Trial(p99(decoded), engine.held, detail)

    ways = {
        "hybrid": lambda: beside(hybrid, "hybrid"),
        "stock": lambda: beside(stock, "stock"),
        "stock_again": lambda: beside(stock, "stock"),
    }
    with bench.progress("decodes beside a restore", len(ways) * bench.options.pairs) as tick:
        attempts = 1 if bench.options.smoke else ATTEMPTS_MAX
        trials = interleave(ways, bench.options.pairs, tick, attempts)
    same = trials["stock"], trials["stock_again"]
    bench.add(Ratio.of_pairs("itl_p99_ratio", trials["hybrid"], same[0], same, Bar(high=1.05)))
    pooled = {f"{name}_p99_s": p99(served) for name, served in found.items()}
    bench.record("stutter", trials, counts=hybrid.counts(), **pooled)


def p99(others: Sequence[Served]) -> float:
    """Return the 99th percentile of the times between the others' tokens."""
    gaps = sorted(gap for each in others for gap in (*each.times_s[:1], *each.gaps_s))
    return gaps[min(len(gaps) - 1, round(0.99 * len(gaps)))]
