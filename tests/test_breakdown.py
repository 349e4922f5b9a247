from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulator import regimes

import kvtier
from kvtier.plan import Tier
from kvtier.planner import GAIN_MIN
from kvtier.profiles import DEVICES, LINKS, MODELS, Link, ModelShape

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SSD, HOST = Tier.SSD, Tier.HOST
NO_COPY = Link("no copy", 1e15)
KEYS = {"name", "commit", "machine", "settings", "ratios", "results"}
pytest.importorskip("rich")


@pytest.fixture(scope="module", autouse=True)
def _benchmarks() -> Any:
    """Import the benchmarks' helpers as they do: from their own folder."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def module(name: str) -> ModuleType:
    """Return a helper module of the benchmark."""
    return importlib.import_module(name)


@pytest.fixture
def shares() -> Any:
    """Return what is simulated."""
    return module("_breakdown_shares")


@pytest.fixture
def evidence() -> Any:
    """Return the rows of others."""
    return module("_breakdown_evidence")


@pytest.fixture
def verdict() -> Any:
    """Return the conditions and the sentence."""
    return module("_breakdown_verdict")


@pytest.fixture
def tables() -> Any:
    """Return what prints."""
    return module("_breakdown_tables")


@pytest.fixture
def here() -> Any:
    """Return what measures through a store."""
    return module("_breakdown_here")


@pytest.fixture
def pieces() -> Any:
    """Return what measures in pieces."""
    return module("_breakdown_pieces")


# -- moments


def test_a_moment_counts_in_equal_parts_for_all_that_is_under_way(shares: Any) -> None:
    """Alone: whole; two: half each; none: queue; several spans of one component count once."""
    busy = {"ssd": [(0.0, 4.0), (1.0, 3.0)], "recompute": [(2.0, 6.0)], "host": []}
    found = shares.moments(busy, 10.0)
    assert found == {"ssd": 3.0, "recompute": 3.0, "host": 0.0, "queue": 4.0}


def test_what_lies_outside_of_the_time_does_not_count(shares: Any) -> None:
    """A span that begins before or ends after it is cut; one that touches it counts nothing."""
    found = shares.moments({"ssd": [(-5.0, 1.0), (9.0, 12.0), (10.0, 11.0)]}, 10.0)
    assert found == {"ssd": 2.0, "queue": 8.0}


SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: tuple(sorted(pair))),
    max_size=6,
)


@given(st.dictionaries(st.sampled_from(["ssd", "host", "recompute"]), SPANS), st.integers(1, 40))
def test_moments_add_up_and_no_component_has_more_than_its_spans(
    busy: dict[str, list[tuple[int, int]]], seconds: int
) -> None:
    """The parts are the whole time; each is between a share and all of the time it was busy."""
    found = module("_breakdown_shares").moments(busy, float(seconds))
    assert sum(found.values()) == pytest.approx(seconds)
    for name, spans in busy.items():
        covered = len({t for a, b in spans for t in range(a, min(b, seconds))})
        assert covered / len(busy) - 1e-9 <= found[name] <= covered + 1e-9


def test_a_measured_restore_is_divided_by_its_trace(here: Any) -> None:
    """Reads, copies and steps by lane, waits left out; before the plan is lookup."""
    trace = kvtier.Trace()
    trace.add("read", "ssd", 11.0, 13.0)
    trace.add("copy", "host", 13.0, 14.0)
    trace.add("wait", "compute", 11.0, 16.0)
    trace.add("recompute", "compute", 15.0, 16.0)
    trace.add("write", "write", 11.0, 16.0)
    found = here.parts(trace.events, 10.5, 11.0, 16.0)
    assert found == {"lookup": 0.5, "ssd": 2.0, "host": 1.0, "recompute": 1.0, "queue": 1.0}


# -- agreement with the theory


COMPUTE_ONLY = {
    ("Llama-3-8B", "H100"): (0.16, 1.87, 16.97),
    ("Llama-3-8B", "A100"): (0.37, 4.83, 46.12),
    ("Qwen2.5-7B", "H100"): (0.15, 1.62, 13.68),
    ("Qwen2.5-7B", "A100"): (0.34, 4.14, 37.03),
    ("Llama-3-70B", "H100 x8"): (0.21, 2.06, 15.16),
    ("Llama-3-70B", "A100 x8"): (0.50, 5.31, 40.89),
}
"""The theory's seconds of recomputing 4 K, 32 K and 128 K tokens."""


@pytest.mark.parametrize(("pair", "wanted"), COMPUTE_ONLY.items(), ids=str)
def test_recomputing_takes_what_the_theory_says(
    shares: Any, pair: tuple[str, str], wanted: tuple[float, ...]
) -> None:
    """To the theory's two decimals, for every model, device and length."""
    setup = shares.Setup(MODELS[pair[0]], DEVICES[pair[1]], LINKS["SSD 7 GB/s"], NO_COPY)
    for tokens, seconds in zip((4096, 32768, 131072), wanted, strict=True):
        row = shares.row(setup, tokens, "recompute", SSD)
        assert round(row.ttft_s - row.parts_s["new"], 2) == seconds
        assert shares.recompute_s(setup, tokens) == pytest.approx(seconds, abs=0.005)
        assert (row.recomputed, row.loaded) == (tokens // 256, 0)


def test_every_simulated_cell_is_the_theorys(shares: Any) -> None:
    """The gain over the better single way, in the cells of models, links and lengths.

    The table has blocks of a step and pays a link's latency once. A row has blocks of 256 tokens,
    which saves at most the loads of a step, pays every block's latency, and takes a single way
    where a hybrid gains under 5 %; what it simulates is within one step and load of that.
    """
    for model, device, tier, link, tokens, step, gain in regimes():
        if tokens > 32768 and (model.name, device.name) != ("Llama-3-8B", "H100"):
            continue  # simulations of many blocks take their time
        source, copy = (NO_COPY, link) if tier is HOST else (link, NO_COPY)
        setup = shares.Setup(model, device, source, copy)
        single = min(shares.at_once_s(setup, tokens, tier), shares.recompute_s(setup, tokens))
        row = shares.row(setup, tokens, "best", tier)
        seconds = row.ttft_s - row.parts_s["new"]
        costs, n = setup.costs(tokens), tokens // 256
        load_s = costs.load_seconds(tier, setup.block_bytes)
        step_s = costs.compute.seconds(tokens - step, step)
        coarse = single / gain
        where = (model.name, device.name, link.name, tokens)
        assert seconds >= coarse * 0.995 - (step // 256 - 1) * load_s, where
        slowest = (coarse * 1.005 + n * link.latency_s) / (1 - GAIN_MIN)
        assert seconds <= slowest + step_s + load_s, where


def test_loading_takes_bytes_over_rate_and_each_blocks_latency(shares: Any) -> None:
    """8B at 32 K over 7 GB/s: the theory's 0.614 s, and 128 latencies in the FIFO."""
    setup = shares.Setup(MODELS["Llama-3-8B"], DEVICES["H100"], LINKS["SSD 7 GB/s"], NO_COPY)
    assert round(shares.at_once_s(setup, 32768, SSD), 3) == 0.614
    row = shares.row(setup, 32768, "load", SSD)
    assert row.ttft_s - row.parts_s["new"] == pytest.approx(0.6135 + 128e-4, abs=2e-4)
    planned = shares.row(setup, 32768, "best", SSD)
    assert planned.ttft_s - planned.parts_s["new"] == pytest.approx(0.422, rel=0.03)


def test_the_exact_split_is_what_no_plan_beats(shares: Any) -> None:
    """Over links of every rate; the plan is within its 5 % rule and one step of it."""
    setup = shares.Setup(
        MODELS["Llama-3-8B"], DEVICES["H100"], LINKS["SSD 7 GB/s"], LINKS["PCIe 5 x16"]
    )
    costs = setup.costs(32768)
    step_s = costs.compute.seconds(32768 - 1024, 1024)
    found = shares.link_sweep(setup, 32768)
    assert [each["bytes_per_s"] for each in found] == list(shares.RATES)
    for each in found:
        assert each["best_s"] >= each["optimum_s"] * (1 - 1e-9)
        assert each["best_s"] <= each["optimum_s"] / (1 - GAIN_MIN) + step_s
        assert each["best_s"] <= min(each["load_s"], each["recompute_s"]) * (1 + 1e-9)
    optima = [each["optimum_s"] for each in found]
    assert optima == sorted(optima, reverse=True)


# -- rows


def test_shares_of_a_row_are_a_whole(shares: Any) -> None:
    """Lookup and the step over the new tokens included; recomputing alone moves nothing."""
    setup = shares.Setup(
        MODELS["Qwen2.5-7B"], DEVICES["A100"], LINKS["SSD 3 GB/s"], LINKS["PCIe 4 x16"]
    )
    found = shares.rows(setup, (1024, 8192), {1024: 0.25, 8192: 0.5})
    assert [(row.tokens, row.way) for row in found] == [
        (tokens, way) for tokens in (1024, 8192) for way in ("recompute", "load", "best")
    ]
    for row in found:
        assert sum(row.shares.values()) == pytest.approx(1.0)
        assert row.parts_s["lookup"] == (
            0.0 if row.way == "recompute" else {1024: 0.25, 8192: 0.5}[row.tokens]
        )
        assert row.parts_s["new"] > 0
    assert found[0].transfer == 0.0
    moved = sum(found[1].parts_s[name] for name in ("queue", "ssd", "device"))
    assert found[1].transfer == pytest.approx(moved / found[1].ttft_s)


def test_distance_is_paid_once_or_by_every_block(shares: Any) -> None:
    """One request for all pays a round trip once, the planner's FIFO one for each of 128 blocks."""
    setup = shares.Setup(MODELS["Llama-3-8B"], DEVICES["H100"], LINKS["NIC 10G"], NO_COPY)
    near, far = shares.network(setup, [LINKS["NIC 10G"]], 32768, (0.0, 100.0))
    trip_s = 2 * 100 / 200_000
    assert far["latency_s"] - near["latency_s"] == pytest.approx(trip_s)
    assert far["at_once_s"] - near["at_once_s"] == pytest.approx(trip_s)
    assert far["by_block_s"] - near["by_block_s"] == pytest.approx(128 * trip_s)
    assert far["recompute_s"] == near["recompute_s"]


def test_a_shape_is_a_name_or_six_numbers(shares: Any) -> None:
    """Anything else ends with both forms in words."""
    assert shares.shape("Llama-3-8B") is MODELS["Llama-3-8B"]
    made = shares.shape("32,4096,32,8,128,6.98e9")
    assert replace(made, name="Llama-3-8B") == MODELS["Llama-3-8B"]
    for wrong in ("Llama-9", "1,2,3", "a,b,c,d,e,f", ""):
        with pytest.raises(SystemExit, match="six numbers"):
            shares.shape(wrong)


# -- block size


def test_what_blocks_of_several_sizes_cost(shares: Any) -> None:
    """Metadata falls with size, planning loss and lost tails rise."""
    setup = shares.Setup(
        MODELS["Llama-3-8B"], DEVICES["H100"], LINKS["SSD 7 GB/s"], LINKS["PCIe 5 x16"]
    )
    sizes = (64, 256, 1024)
    found = shares.by_block_tokens(setup, 32768, dict.fromkeys(sizes, (7e9, 0.0)), {})
    assert [each["block_tokens"] for each in found] == list(sizes)
    metadata = [each["metadata_bytes_per_token"] * each["block_tokens"] for each in found]
    assert metadata == pytest.approx([metadata[0]] * 3)  # a block's is the same for every size
    assert metadata[0] > 4096
    assert found[0]["planning_loss"] == 0.0
    assert found[2]["planning_loss"] > 0.0
    tails = [each["lost_tail_s"] for each in found]
    assert tails == sorted(tails)
    assert tails[1] / tails[0] == pytest.approx(255 / 63)
    assert min(each["vs_best"] for each in found) == 1.0


def test_a_slow_read_of_small_blocks_decides_for_larger_ones(shares: Any) -> None:
    """Where blocks of 16 tokens are read at a tenth of the rate, 256 are the best."""
    setup = shares.Setup(
        MODELS["Llama-3-8B"], DEVICES["H100"], LINKS["SSD 7 GB/s"], LINKS["PCIe 5 x16"]
    )
    rates = {64: (0.7e9, 0.1), 256: (7e9, 0.0)}
    small, middle = shares.by_block_tokens(setup, 8192, rates, {64: 0.004, 256: 0.001})
    assert (small["vs_best"] > 1.5, middle["vs_best"]) == (True, 1.0)
    assert small["lookup_ms"] == 4.0
    assert "256 tokens (Llama-3-8B) restore fastest;" in shares.why([small, middle])
    assert "0.25 of the lookup of 64" in shares.why([small, middle])
    assert middle["total_s"] == pytest.approx(middle["plan_s"] + middle["lost_tail_s"] + 0.001)


def test_blocks_that_differ_within_the_noise_are_not_told_apart(shares: Any) -> None:
    """The sentence says whether a smaller block's lead is beyond what the reads scatter by."""
    setup = shares.Setup(
        MODELS["Llama-3-8B"], DEVICES["H100"], LINKS["SSD 7 GB/s"], LINKS["PCIe 5 x16"]
    )
    for spread, said in ((0.5, "within the noise"), (0.001, "beyond the noise")):
        rates = {16: (8e9, spread), 256: (7e9, 0.0)}
        rows = shares.by_block_tokens(setup, 8192, rates, {16: 1e-5, 256: 1e-6})
        assert f"slower than 16, {said}" in shares.why(rows)


# -- the evidence of others


def test_sizes_and_shares_of_others(evidence: Any) -> None:
    """The arithmetic of the sources, and what our profiles make of their conditions."""
    sizes = evidence.kv_size()
    assert (round(sizes.numbers["gib_7b_4k"], 2), sizes.agrees) == (2.0, "agrees")
    assert round(sizes.numbers["gb_405b_8k_100"]) == 423
    near = evidence.distserve()
    assert near.numbers["share_of_request"] < 1e-3 < near.numbers["share_of_ttft"]
    assert near.numbers["share_of_ttft_25g"] > 0.5
    assert round(near.numbers["opt66b_512_gib"], 2) == 1.12  # published as 1.13 GB
    assert near.agrees == "agrees"


def test_restoring_from_host_memory_beside_failsafe(evidence: Any) -> None:
    """The theory's speed-ups at 4 K and 32 K, between which the published 41.5 lies.

    Its table has those of a hybrid over loading and over recomputing; their quotient is meant.
    """
    found = evidence.failsafe()
    wanted = {
        "PCIe 4 x16, 4K": 30.96 / 1.00, "PCIe 4 x16, 32K": 39.60 / 1.03,
        "PCIe 5 x16, 4K": 61.83 / 1.00, "PCIe 5 x16, 32K": 76.71 / 1.00,
    }  # fmt: skip
    assert found.numbers == pytest.approx(wanted, rel=0.005)  # two decimals
    assert (found.kind, found.agrees) == ("simulated", "agrees")


def test_networks_beside_the_iown_study(evidence: Any) -> None:
    """131 MB; 10G loses on an idle H100; distance and less bandwidth never help."""
    numbers = evidence.iown().numbers
    assert round(numbers["mb_1k"]) == 131
    assert numbers["cut, H100, NIC 10G, 0 km"] < 0 < numbers["cut, H100, NIC 100G, 0 km"]
    for device in ("H100", "A100"):
        for name in ("NIC 10G", "NIC 100G"):
            cuts = [numbers[f"cut, {device}, {name}, {km} km"] for km in (0, 100, 1000)]
            assert cuts == sorted(cuts, reverse=True)
    assert evidence.iown().agrees == "other condition"


def test_a_plan_is_never_slower_than_mooncakes_rule(evidence: Any) -> None:
    """Over the whole grid, and faster where the theory says so."""
    found = evidence.mooncake()
    assert found.numbers["least"] >= 1 - 1e-9
    assert found.numbers["cells"] == 6 * 6 * 3
    assert found.numbers["better"] > 54
    assert found.numbers["most"] == pytest.approx(2.3, abs=0.05)


def test_activations_beside_kvpr(evidence: Any) -> None:
    """1.42 x for MHA, nothing for models that share K and V."""
    numbers = evidence.kvpr().numbers
    assert round(numbers["Llama-2-7B"], 2) == 1.42
    assert {numbers[name] for name in ("Llama-3-8B", "Qwen2.5-7B", "Llama-3-70B")} == {1.0}


def test_cacheblend_depends_on_the_disk(evidence: Any) -> None:
    """15 % recomputed hide behind a slow disk, not behind a fast one; without one nobody says."""
    setup = evidence.preset("Llama-3-8B", "H100", LINKS["SSD 7 GB/s"])
    needed = evidence.cacheblend(setup, {}).numbers["needed_bytes_per_s"]
    assert needed == pytest.approx(32768 * 131072 / (0.15 * 1.866), rel=1e-3)
    said = {
        rate: evidence.cacheblend(setup, {} if rate is None else {"ssd_bytes_per_s": rate})
        for rate in (None, needed / 2, needed * 2)
    }
    assert [row.agrees for row in said.values()] == ["other condition", "agrees", "other condition"]
    assert said[None].kind == "simulated"
    assert "this disk" not in said[None].ours


def test_what_was_not_measured_has_no_number(evidence: Any) -> None:
    """A row says so; a measured one says in which direction it points, never that it agrees."""
    setup = evidence.preset("Llama-3-8B", "H100", LINKS["SSD 7 GB/s"])
    rows = {row.work: row for row in evidence.table(setup, {})}
    measured = {work: row for work, row in rows.items() if row.kind == "not measured"}
    assert len(measured) == 4
    for row in measured.values():
        assert (row.numbers, row.agrees) == ({}, "-")
        assert not any(sign.isdigit() for sign in row.ours)
    found = {"read_256_vs_16_tokens": 1.5, "copies_5958_vs_387": 1.01}
    rows = {row.work: row for row in evidence.table(setup, found)}
    assert rows["LMCache (2025)"].agrees == "same direction"
    assert "1.50 x" in rows["LMCache (2025)"].ours
    assert rows["Chakra (MLSys'26)"].agrees == "not seen here"
    assert rows["Chakra (MLSys'26)"].kind == "measured here"


# -- the conditions and the verdict


def test_a_network_that_carries_tens_of_gb(verdict: Any) -> None:
    """One cell of the theory's: 17 GB over 400G to a device that takes 46 s to recompute them."""
    found = verdict.scale_out()
    (only,) = found.met
    assert "A100, NIC 400G, 128K: 17 GB" in only.where
    move_s = 131072 * 131072 / 46e9
    assert only.value == pytest.approx(move_s / (move_s + 46.12), rel=0.01)
    assert found.verdict == "met (simulated)"
    values = [case.value for case in found.cases]
    assert values == sorted(values)


def test_a_condition_is_met_by_what_convinces_most(verdict: Any) -> None:
    """A measured case comes before a simulated one; none at all is said too."""
    case = verdict.Case
    cases = (case("a", 9.0, "simulated", met=True), case("b", 2.0, "measured here", met=True))
    found = verdict.Condition("x", (*cases, case("c", 0.5, "measured here", met=False)))
    assert found.verdict == "met (measured here)"
    assert found.to_json()["cases"][0]["where"] == "b"
    assert (found.to_json()["looked_at"], found.to_json()["met"]) == (3, 2)
    none = verdict.Condition("x", (case("c", 0.5, "measured here", met=False),))
    assert none.verdict == "not met"
    assert none.to_json()["cases"][0]["where"] == "c"


def test_within_its_spread_a_case_is_not_one(verdict: Any, evidence: Any) -> None:
    """A measured ratio, and a measured link, must miss 1 by more than the run's own noise."""
    setup = evidence.preset("Llama-3-8B", "H100", LINKS["SSD 14 GB/s"])
    measured = {"inside": (1.04, 0.05), "outside": (1.06, 0.05), "below": (0.2, 0.05)}
    found = verdict.dearer(setup, None, 0.0, measured)
    here = [case.where for case in found.met if case.kind == "measured here"]
    assert here == ["outside"]
    # 8B at 32 K: 4.29 GB against 1.866 s, so that 2.2 GB/s loads a little longer.
    link = Link("ours", 2.2e9)
    where = "Llama-3-8B, H100, ours, 32K"
    sure, unsure = (verdict.dearer(setup, link, spread, {}) for spread in (0.0, 0.2))
    assert where in [case.where for case in sure.met]
    assert where not in [case.where for case in unsure.met]


def test_a_path_within_a_machine_that_moves_most_of_the_time(verdict: Any, evidence: Any) -> None:
    """Restores of this run are followed by the device's step, so that they are half simulated."""
    setup = evidence.preset("Llama-3-8B", "H100", LINKS["SSD 7 GB/s"])
    new_s = setup.new_s(1024)
    found = verdict.dominated(setup, None, {("long", 1024): 3 * new_s, ("short", 1024): new_s / 3})
    by_where = {case.where: case for case in found.cases}
    assert (by_where["long"].value, by_where["long"].met) == (pytest.approx(0.75), True)
    assert (by_where["short"].value, by_where["short"].met) == (pytest.approx(0.25), False)
    assert {by_where[where].kind for where in ("long", "short")} == {"measured + simulated"}
    assert found.verdict == "met (measured + simulated)"


@pytest.mark.parametrize(
    ("rate", "word"), [(1e15, "Negligible"), (100e9, "Small"), (2e9, "Not negligible")]
)
def test_the_verdict_is_one_sentence(verdict: Any, evidence: Any, rate: float, word: str) -> None:
    """What it says follows from the largest share over all lengths, and it names its source."""
    shares = module("_breakdown_shares")
    setup = evidence.preset("Qwen2.5-7B", "A100", Link("ours", rate), Link("copy", 1e15))
    said = verdict.sentence(setup, shares.rows(setup, (1024,), {}), "made up")
    assert said.startswith(word + ":")
    assert (said.count("made up"), said.count("\n"), said[-1]) == (1, 0, ".")


# -- what is measured


@pytest.mark.parametrize("name", MODELS)
def test_blocks_that_are_measured_have_the_models_bytes(here: Any, name: str) -> None:
    """Also of models with latent attention, and for every block size."""
    for block_tokens in (16, 256):
        layout = here.spec_of(MODELS[name], block_tokens).block_layout
        assert layout.block_bytes == block_tokens * MODELS[name].kv_token_bytes
        assert len(layout.parts) == MODELS[name].layers


def test_pieces_of_a_block_lie_apart_if_layers_come_first(pieces: Any) -> None:
    """Every offset once; a block's pieces are a layer's run apart."""
    offsets = pieces.layer_first(blocks=3, pieces=4, piece_bytes=10)
    assert offsets[:4] == [0, 30, 60, 90]
    assert sorted(offsets) == list(range(0, 120, 10))


def test_pieces_are_read_whole_and_compared(pieces: Any, tmp_path: Path) -> None:
    """In any order and depth; a wrong byte stops the benchmark, and no file is left."""
    size = 16 << 10
    with pieces.Pieces(tmp_path, 8 * size) as made:
        for depth in (1, 4):
            trial = made.read(size, list(reversed(made.sequence(size))), depth)
            assert (trial.detail["pieces"], trial.seconds > 0) == (8, True)
        assert min(made.copy(size, [0, size]).seconds, made.write().seconds) > 0
        assert made.both(size).seconds > 0
        with (tmp_path / "read").open("r+b") as file:
            file.seek(3 * size)
            file.write(b"no")
            file.flush()
        with pytest.raises(AssertionError, match=f"wrong at {3 * size}"):
            made.read(size, made.sequence(size), 4)
    assert not list(tmp_path.iterdir())


def test_a_wrong_byte_stops_a_measured_restore(here: Any, tmp_path: Path) -> None:
    """What is restored is compared with what was stored, by every caller at once."""
    model = ModelShape("small", 2, 64, 2, 1, 32, 1e5)
    subject = here.subject_of(model, 512)
    trace = kvtier.Trace()
    with kvtier.open(
        tmp_path / "store", subject.spec, host_bytes=0, ssd_bytes=64 << 20, trace=trace
    ) as store:
        made = here.Restores(subject, store, trace, 2)
        trial = made.trial(2, SSD)
        total = sum(trial.detail["parts_s"].values())
        assert total == pytest.approx(trial.seconds)
        assert {"ssd", "host", "lookup", "queue"} <= set(trial.detail["parts_s"])
        subject.source.tensors[0].view(here.torch.int16)[0, 0, 0] ^= 1
        with pytest.raises(AssertionError, match="differs from what was stored"):
            made.trial(1, SSD)
        with pytest.raises(AssertionError, match="not in host alone"):
            made.trial(1, HOST)


# -- what is printed


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "-"), (0.0004, "<0.1"), (0.0006, "0.1"), (0.4567, "45.7"), (1, "100.0")],
)
def test_shares_in_percent(tables: Any, value: float, said: str) -> None:
    """What is nearly nothing is told from nothing."""
    assert tables.share(value) == said


def test_tables_fit_a_terminal_of_100_columns(tables: Any, evidence: Any, verdict: Any) -> None:
    """With the longest names, nothing is cut and no line is longer."""
    from rich.console import Console

    shares = module("_breakdown_shares")
    setup = evidence.preset("Llama-3-70B", "H100 x8", LINKS["NIC 10G"])
    console = Console(file=io.StringIO())
    rows = shares.rows(setup, (1024, 131072), {1024: 1e-5, 131072: 0.01})
    tables.simulated(console, "x" * 90, rows)
    tables.links(console, shares.link_sweep(setup, 131072, shares.RATES[:2]))
    tables.network(console, shares.network(setup, [LINKS["NIC 100G"]], 131072, (1000.0,)))
    tables.granularity(
        console,
        shares.by_block_tokens(
            setup, 32768, {256: (1e9, 0.0), 1024: (1e9, 1.234)}, {256: 0.1, 1024: 0.1}
        ),
    )
    measured = {
        "case": "breakdown", "kind": "measured here", "model": "smollm2", "tokens": 131072,
        "way": "load, slow link", "tier": "host", "at_once": 4, "seconds": 123.4, "spread": 1.234,
        "parts_s": dict.fromkeys(shares.COMPONENTS, 15.0),
    }  # fmt: skip
    tables.measured(console, [measured])
    tables.evidence(console, evidence.table(setup, {"ssd_bytes_per_s": 1e9}))
    found = (verdict.scale_out(), verdict.dearer(setup, LINKS["SSD 3 GB/s"], 0.1, {}))
    tables.conditions(console, found)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown


# -- the whole of it


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in its quickest setting."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "breakdown.py"), "--smoke", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_breakdown_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """Every part once, every byte checked; every row says its kind; one verdict ends it."""
    out, folder = tmp_path / "breakdown.json", tmp_path / "disk"
    done = run("--dir", str(folder), "--json", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    assert all(number > 0 for number in value["ratios"].values())
    assert "ssd_read_gb_per_s" in value["ratios"]
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in value["results"]:
        if "case" in row:
            cases.setdefault(row["case"], []).append(row)
    kinds = {row["kind"] for row in cases["breakdown"]}
    assert kinds == {"measured here", "simulated"}
    for row in cases["breakdown"]:
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert {row["at_once"] for row in cases["breakdown"] if "at_once" in row} == {1, 4}
    assert len(cases["link_sweep"]) == 17
    assert [row["block_tokens"] for row in cases["granularity"]] == [16, 256]
    assert len(cases["evidence"]) == 11
    assert len(cases["condition"]) == 3
    (said,) = cases["verdict"]
    assert " ".join(done.stdout.split()).endswith(said["text"])
    assert "measured here" in said["text"]
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not list(folder.iterdir())


def test_a_given_link_is_called_given(tmp_path: Path) -> None:
    """Nothing is measured then, and the verdict does not say so."""
    out = tmp_path / "breakdown.json"
    arguments = ("--only", "simulated", "--source", "2.5", "--shape", "Qwen2.5-7B")
    done = run(*arguments, "--device", "A100", "--dir", str(tmp_path), "--json", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    (said,) = [row for row in json.loads(out.read_text())["results"] if row["case"] == "verdict"]
    assert "Qwen2.5-7B over a link of 2.5 GB/s (given)" in said["text"]
    assert "measured" not in said["text"]


def test_what_is_not_known_is_refused_by_name() -> None:
    """Links, devices and models that nobody has; the error says what there is."""
    breakdown = module("breakdown")
    assert breakdown.link_of("NIC 10G") is LINKS["NIC 10G"]
    assert breakdown.link_of("2.5").bytes_per_s == 2.5e9
    for wrong in ("fast", "-1", "0", "inf", "nan"):
        with pytest.raises(SystemExit, match="GB/s or one of SSD 3 GB/s"):
            breakdown.link_of(wrong)
    with pytest.raises(SystemExit, match="--device B900: one of A100"):
        breakdown.one_of("device", "B900", DEVICES)
    with pytest.raises(SystemExit, match="--model: one of smollm2, tiny"):
        breakdown.main(["--model", "huge"])


def test_a_real_model_is_broken_down() -> None:
    """Recomputed, loaded, and both over a link on which they take equally long."""
    pytest.importorskip("transformers")
    harness = module("_harness")
    bench = harness.Bench("breakdown", harness.Options(smoke=True, json="-"))
    ratios = module("_breakdown_model").run(bench, "tiny", (2,))
    assert [where.split(",")[-1] for where in ratios] == [" 512 tokens"]
    rows = [row for row in bench.results if row["case"] == "breakdown"]
    by_way = {row["way"]: row for row in rows}
    assert set(by_way) == {"recompute", "load", "load, slow link", "best, slow link"}
    for row in rows:
        assert row["seconds"] == pytest.approx(sum(row["parts_s"].values()))
        assert row["loaded"] + row["recomputed"] == 2
    assert by_way["recompute"]["parts_s"]["recompute"] > 0
    assert by_way["load"]["parts_s"]["ssd"] > 0
