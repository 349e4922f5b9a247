from __future__ import annotations

import hashlib
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cost import ComputeCost, CostModel, LinkCost
from kvtier.history import History
from kvtier.plan import Tier
from kvtier.policies import POLICY
from kvtier.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
KEYS = {"name", "commit", "machine", "settings", "ratios", "results"}
SSD, HOST = Tier.SSD, Tier.HOST


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import benchmarks as they import each other: from their own folder."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def traces() -> Any:
    """Import what reads traces."""
    return importlib.import_module("_replay_traces")


@pytest.fixture
def ttft() -> Any:
    """Import the arithmetic."""
    return importlib.import_module("_replay_ttft")


@pytest.fixture
def caches() -> Any:
    """Import the caches."""
    return importlib.import_module("_replay_caches")


@pytest.fixture
def admission() -> Any:
    """Import the write rules."""
    return importlib.import_module("_replay_admission")


def made_up(traces: Any, *prompts: str) -> Any:
    """Return a trace of prompts, a letter a block."""
    hashes = [
        tuple(hashlib.sha256(prompt[: at + 1].encode()).digest() for at in range(len(prompt)))
        for prompt in prompts
    ]
    requests = [traces.Request(float(at), each, 10 * len(each)) for at, each in enumerate(hashes)]
    return traces.Trace("made up", 10, tuple(requests))


def outcome(ttft: Any, tiers: Sequence[Tier | None]) -> Any:
    """Return an outcome in which everything stored is loaded."""
    missing = frozenset(at for at, tier in enumerate(tiers) if tier is None)
    return ttft.Outcome(0.0, 0.0, 0.0, missing, tiers.count(SSD), tiers.count(HOST))


def run_through(ttft: Any, cache: Any, requests: int) -> list[tuple[Tier | None, ...]]:
    """Replay; return where each prompt's blocks were found."""
    found = []
    for number in range(requests):
        found.append(cache.tiers(number))
        cache.use(number, found[-1], outcome(ttft, found[-1]))
    return found


def stored(caches: Any, trace: Any, policy: str, ssd: int, **changes: Any) -> Any:
    """Return a cache over the real catalog."""
    blocks = {SSD: ssd, HOST: changes.pop("host", 0)}
    return caches.Stored(trace, POLICY[policy], blocks, prices=Prices(), **changes)


# -- traces


def test_the_traces_are_those_that_were_published(traces: Any) -> None:
    """Requests, blocks asked for and different blocks, as they are known."""
    known = {
        "conversation": (4000, 105_904, 71_424, 512),
        "synthetic": (3993, 121_877, 43_924, 512),
        "agentic": (21, 10_170, 1_057, 256),
    }
    for name, numbers in known.items():
        found = traces.trace(name)
        assert numbers == (len(found.requests), found.asked, found.unique, found.block_tokens)
        times = [request.at_s for request in found.requests]
        assert times == sorted(times)


def test_equal_prefixes_have_equal_hashes_and_others_do_not(traces: Any) -> None:
    """An id counts together with all before it."""
    lines = b"\n".join(
        json.dumps({"timestamp": 0, "input_length": 1, "hash_ids": ids}).encode()
        for ids in ([1, 2, 3], [1, 2, 4], [9, 2, 3])
    )
    first, second, third = (request.hashes for request in traces.mooncake("x", lines).requests)
    assert first[:2] == second[:2]
    assert not set(first) & set(third)
    assert first[2] != second[2]


def test_four_ids_are_a_block_and_sub_agents_have_their_turn(traces: Any) -> None:
    """What does not fill a block is left out; users share what every session begins with."""
    session = {
        "tool_tokens": 200,
        "system_tokens": 56,
        "requests": [
            {"t": 1.0, "hash_ids": list(range(9))},
            {"t": 2.0, "requests": [{"t": 3.0, "hash_ids": list(range(4))}]},
        ],
    }
    found = traces.agentic("x", {"a": session}, [("a", 0.0, 1.0), ("a", 10.0, 2.0)])
    assert [request.at_s for request in found.requests] == [1.0, 3.0, 12.0, 16.0]
    assert [len(request.hashes) for request in found.requests] == [2, 1, 2, 1]
    first, nested, second, _ = (request.hashes for request in found.requests)
    assert nested == first[:1] == second[:1]
    assert first[1] != second[1]


# -- caches


def test_every_cache_finds_what_it_was_given_while_there_is_room(
    caches: Any, traces: Any, ttft: Any
) -> None:
    """And counts what was written, loaded and hit."""
    trace = made_up(traces, "abc", "abd", "abc")
    for cache in (
        stored(caches, trace, "lru", 9),
        stored(caches, trace, "priced", 9),
        caches.Infinite(trace),
        caches.Clairvoyant(trace, 9),
    ):
        found = run_through(ttft, cache, 3)
        assert found == [(None,) * 3, (SSD, SSD, None), (SSD,) * 3]
        assert cache.moved.written[SSD] == 4
        assert cache.moved.loaded[SSD] == 5


def test_a_full_tier_never_holds_more_than_it_may(caches: Any, traces: Any, ttft: Any) -> None:
    """Whatever the policy, in host memory and on the SSD; the catalog's books are right."""
    prompts = ["abcdef"[: 2 + number % 5] + "xyz"[number % 3 :] for number in range(30)]
    trace = made_up(traces, *prompts)
    for policy in POLICY:
        cache = stored(caches, trace, policy, 5, host=3)
        for number in range(len(prompts)):
            tiers = cache.tiers(number)
            cache.use(number, tiers, outcome(ttft, tiers))
            assert cache.catalog.ready(SSD) <= 5
            assert cache.catalog.ready(HOST) <= 3
        assert cache.catalog.check() == []
        moved = cache.moved
        assert moved.written[SSD] - moved.evicted[SSD] == cache.catalog.ready(SSD)


def test_lru_forgets_the_oldest_prompt_from_its_tail(caches: Any, traces: Any, ttft: Any) -> None:
    """The head of a prompt outlives its tail, as a contiguous prefix needs it."""
    trace = made_up(traces, "abcd", "wx", "abcd")
    found = run_through(ttft, stored(caches, trace, "lru", 4), 3)
    assert found[2] == (SSD, SSD, None, None)


def test_what_was_loaded_is_in_host_memory_next_time(caches: Any, traces: Any, ttft: Any) -> None:
    """A restore promotes; so does a put."""
    trace = made_up(traces, "ab", "cd", "ab", "ab")
    found = run_through(ttft, stored(caches, trace, "lru", 9, host=2), 4)
    assert found == [(None,) * 2, (None,) * 2, (SSD,) * 2, (HOST,) * 2]


def test_the_clairvoyant_keeps_what_is_asked_for_first(caches: Any, traces: Any, ttft: Any) -> None:
    """And no cache of that size has more hits."""
    trace = made_up(traces, "a", "b", "c", "a", "b", "c", "a")
    found = run_through(ttft, caches.Clairvoyant(trace, 2), 7)
    assert sum(tiers == (SSD,) for tiers in found) == 3
    first, *_, last = caches.next_uses(trace)
    assert (first, last) == ([3], [math.inf])


# -- time to first token


def test_ttft_is_the_planners(ttft: Any) -> None:
    """Loading alone, the best split, and a hole in the middle, by hand."""
    costs = CostModel(
        ComputeCost(0.0, 0.1, 0.0, 100), LinkCost(1e12, 0.0, 100), LinkCost(10.0, 0.0, 100)
    )

    def of(way: Any, *tiers: Tier | None) -> Any:
        setting = {"block_tokens": 10, "block_bytes": 10, "longest": len(tiers)}
        return ttft.Ttft(costs, way, **setting).of(tiers)  # a block: 1 s to compute, 1 s to load

    load = of(ttft.TODAY, SSD, SSD, SSD, SSD)
    assert (load.seconds, load.recompute_s, load.ssd) == (pytest.approx(4), pytest.approx(4), 4)
    hybrid = of(ttft.CONTIGUOUS, SSD, SSD, SSD, SSD)
    assert (hybrid.seconds, hybrid.ssd, hybrid.recomputed) == (pytest.approx(2), 2, {0, 1})
    hole = of(ttft.HOLES, None, None, SSD, SSD)
    assert (hole.seconds, hole.saved_s) == (pytest.approx(2), pytest.approx(2))
    ignored = of(ttft.CONTIGUOUS, None, None, SSD, SSD)
    assert (ignored.seconds, ignored.ssd) == (pytest.approx(4), 0)
    dear = of(ttft.Way(price=2.0), SSD, SSD, SSD, SSD)
    assert dear.ssd == 4


def test_the_first_evaluation_is_reproduced(caches: Any, traces: Any, ttft: Any) -> None:
    """LRU on the conversation trace, load only and hybrid, at the costs that it assumed."""
    trace = traces.trace("conversation")
    costs = CostModel(
        ComputeCost(0.0, 28.2e-6, 28.2e-6 / 18_000, 100),
        LinkCost(1e15, 0.0, 100),
        LinkCost(7e9, 0.0, 100),
    )
    setting = {"block_tokens": 512, "block_bytes": 64 << 20, "longest": trace.longest}
    for blocks, known in ((4352, (114, 132)), (17408, (455, 532))):
        cache = stored(caches, trace, "lru", blocks)
        plans = [ttft.Ttft(costs, way, **setting) for way in (ttft.TODAY, ttft.CONTIGUOUS)]
        saved = [0.0, 0.0]
        for number in range(len(trace.requests)):
            tiers = cache.tiers(number)
            saved = [s + plan.of(tiers).saved_s for s, plan in zip(saved, plans, strict=True)]
            cache.use(number, tiers, outcome(ttft, tiers))
        assert saved == pytest.approx(known, rel=0.01)


# -- an independent simulator


def contiguous_hit_tokens(trace: Any, cache: Any, ttft: Any) -> tuple[int, int]:
    """Return the tokens hit and asked for in the second half of a trace, as the simulator counts.

    Of each prompt the longest prefix without a miss counts, the last block with the tokens that it
    really has, all blocks are cached, and what a request brings counts from the next one on.
    """
    hit = asked = 0
    half = len(trace.requests) // 2
    for number, request in enumerate(trace.requests):
        tiers = cache.tiers(number)
        prefix = tiers.index(None) if None in tiers else len(tiers)
        if number >= half:
            asked += request.tokens
            hit += min(prefix * trace.block_tokens, request.tokens)
        cache.use(number, tiers, outcome(ttft, tiers))
    return hit, asked


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("blocks", [1000, 17408])
def test_lru_hits_are_those_of_an_independent_simulator(
    caches: Any, traces: Any, ttft: Any, name: str, blocks: int
) -> None:
    """To the token: kvcache-simulator's LRU over prefixes, on the same file."""
    theirs = pytest.importorskip(
        "kvcache_sim", reason="kvcache-simulator is not installed (pip install kvtier[dev])"
    )
    del theirs
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_lines

    files = {
        "conversation": "mooncake_conversation_first4000.jsonl",
        "synthetic": "mooncake_synthetic.jsonl",
    }
    lines = traces.read(files[name]).decode().splitlines()
    parsed = parse_trace_lines(lines, block_size=512)
    expected = simulate_policy(build_execution_plan(parsed, warmup_fraction=0.5), "lru", blocks)
    assert expected.measurementMode == "fixed_window"  # the cache was full before it counted
    trace = traces.trace(name)
    found = contiguous_hit_tokens(trace, stored(caches, trace, "lru", blocks), ttft)
    assert found == (expected.hitTokens, expected.totalTokens)


# -- which blocks are written


def test_second_use_writes_only_what_was_asked_for_before(
    caches: Any, traces: Any, ttft: Any, admission: Any
) -> None:
    """A block is in the cache from its third time on."""
    trace = made_up(traces, "ab", "ac", "ab", "ab")
    cache = stored(caches, trace, "lru", 9, admission=admission.SecondUse(trace))
    found = run_through(ttft, cache, 4)
    assert found == [(None, None), (None, None), (SSD, None), (SSD, SSD)]


def test_tails_only_leaves_out_the_head_that_is_seen_once(
    caches: Any, traces: Any, ttft: Any, admission: Any
) -> None:
    """The split is that of the prompt's own length; a second use is written after all."""
    trace = made_up(traces, "abc", "abc", "abc")
    rule = admission.TailsOnly(trace, [0, 1, 1, 2])
    found = run_through(ttft, stored(caches, trace, "lru", 9, admission=rule), 3)
    assert found == [(None,) * 3, (None, None, SSD), (SSD,) * 3]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_priced_writes_keep_to_their_budget_and_take_the_dearest(
    traces: Any, ttft: Any, admission: Any, share: float
) -> None:
    """Within a few blocks of the share, and no tail is left out while a head is written."""
    prompts = [chr(256 + number) + "bcdefghij" for number in range(300)]
    trace = made_up(traces, *prompts)
    rule = admission.PricedWrites(trace, Prices(tuple(float(at) for at in range(1, 11))), share)
    nothing = (None,) * 10
    chosen = [rule.admitted(at, range(10), outcome(ttft, nothing)) for at in range(300)]
    written = sum(map(len, chosen[100:]))
    assert written == pytest.approx(share * 2000, rel=0.1)
    late = [at for each in chosen[100:] for at in each]
    assert sum(late) / len(late) > 9 - 10 * share  # the mean of the last tenths, within one


def test_a_bounded_memory_of_what_is_gone_costs_little(caches: Any, traces: Any, ttft: Any) -> None:
    """As many places as there are different blocks lose under 2 % of what more would save."""
    trace = traces.trace("conversation")
    run = importlib.import_module("_replay_run")
    saved = {}
    for places in (1 << 16, 1 << 22):
        case = run.Case("conversation", "priced", ttft.HOLES, 4352)
        row = run.replay(case, run.make(case, trace, history=History(places)))
        saved[places] = row.saved_s
    assert saved[1 << 16] > 0.98 * saved[1 << 22]


def test_replay_runs_on_the_beginning_of_its_traces(tmp_path: Path) -> None:
    """Every part once, in a table that fits a terminal."""
    out = tmp_path / "replay.json"
    done = subprocess.run(
        [sys.executable, str(FOLDER / "replay.py"), "--smoke", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    assert {each.get("case") for each in value["results"]} >= {"policies, conversation", "writes"}
    assert "replay_events_per_s" in value["ratios"]
    assert all(number > 0 for number in value["ratios"].values())
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_replay_of_what_was_asked_for(tmp_path: Path) -> None:
    """Trace, policies, budgets and hardware by name."""
    out = tmp_path / "replay.json"
    options = {
        "trace": "agentic", "policies": "lru,priced", "ssd-blocks": "300,600", "host-blocks": "50",
        "model": "Llama-3-70B", "device": "H100 x8", "ssd": "SSD 14 GB/s", "json": str(out),
    }  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "replay.py"), "--smoke", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["results"]
    assert {row["model"] for row in rows} == {"Llama-3-70B"}
    assert {(row["policy"], row["blocks"]["ssd"]) for row in rows} == {
        ("lru", 300), ("lru", 600), ("priced", 300), ("priced", 600), ("infinite", 0),
    }  # fmt: skip
