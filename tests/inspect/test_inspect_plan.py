"""`plan`: what would be done, without an engine, a device or a store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import SPEC, prompt, prompt_keys, put

from kvtier.cost import ComputeCost, CostModel, LinkCost
from kvtier.plan import Residency, Tier
from kvtier.planner import plan
from kvtier_inspect import cli
from kvtier_inspect.plan_command import Asked, planned
from kvtier_inspect.planning import blocks_at, made_up, rates, read_ranges, token_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIVEN: dict[str, Any] = {"token_bytes": 4096, "prefill_rate": 1000.0, "ssd_link": "10MB/s"}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run `plan --json` and return what it printed."""
    assert cli.run(["plan", *arguments, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


# -- the decision is the planner's


@given(
    tiers=st.lists(st.sampled_from([None, Tier.HOST, Tier.SSD]), min_size=1, max_size=40),
    token_s=st.floats(1e-6, 1e-2),
    rate=st.floats(1e5, 1e11),
    resident=st.integers(0, 3),
)
def test_the_decision_changes_at_the_rates(
    tiers: list[Tier | None], token_s: float, rate: float, resident: int
) -> None:
    """Either side of each rate the planner decides as that rate says."""
    costs = CostModel(ComputeCost(0.001, token_s, 0.0, 9), LinkCost(1e12), LinkCost(rate))
    residency = Residency(made_up(len(tiers) * 256), tuple(tiers), 1 << 20)
    resident = min(resident, len(tiers))
    found = rates(residency, costs, resident=resident)
    left = tiers[resident:]
    if not (set(left) - {None}):
        assert found is None
        return
    assert found is not None
    assert found.tier is (Tier.SSD if Tier.SSD in left else Tier.HOST)

    def at(rate: float, way: Any = "best") -> Any:
        link = replace(costs.link(found.tier), bytes_per_s=rate)
        name = "ssd" if found.tier is Tier.SSD else "host"
        return plan(residency, replace(costs, **{name: link}), resident=resident, way=way)

    def loaded(rate: float) -> int:
        return sum(tiers[block] is found.tier for block in at(rate).load)

    if found.recompute:
        assert loaded(found.recompute / 1.01) == 0 < loaded(found.recompute)
    if found.load:
        assert loaded(found.load / 1.01) < left.count(found.tier) == loaded(found.load)
    if found.even:
        least, everything = at(found.even, "load"), at(found.even, "recompute")
        assert least.predicted.planned == pytest.approx(everything.predicted.planned, rel=1e-3)


def test_the_break_even_of_one_tier_is_the_formula() -> None:
    """Bytes per second at which n blocks come as fast as they are recomputed."""
    made = planned(Asked(tokens=4096, **GIVEN))
    assert made.rates is not None
    assert made.rates.even == pytest.approx(4096 * 1000.0, rel=1e-4)
    assert made.plan.predicted.recompute == pytest.approx(4.096)
    assert made.plan.predicted.load == pytest.approx(4096 * 4096 / 10e6, rel=1e-2)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Explanation, the three times, and the break-even; tiers as given."""
    asked = ["plan", "--tokens", "16500", "--host", "0:16", "--ssd", "16:60", "--missing", "60:"]
    profile = ["--model", "llama-3-8b", "--device", "H100"]
    assert cli.run([*asked, *profile]) == 0
    text = capsys.readouterr().out
    for words in ("64 full blocks of 32.0 MiB", "116 tokens", "restore 64 blocks", "because",
                  "recompute only", "load only", "break-even", "GB/s"):  # fmt: skip
        assert words in text
    value = printed(capsys, *asked[1:], *profile)
    assert value["runs"] == [["host", 0, 16], ["ssd", 16, 60], [None, 60, 64]]
    assert value["predicted_s"]["load"] is None
    assert set(range(60, 64)) <= set(value["recompute"])
    assert value["break_even"]["recompute"] < value["break_even"]["load"]


def test_profiles_and_given_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """A given number replaces the profile's; what is given alone is enough."""
    profile = ["--tokens", "8192", "--model", "Llama-3-8B", "--device", "h100"]
    assert printed(capsys, *profile)["costs"]["ssd"]["bytes_per_s"] == 7e9
    given_link = printed(capsys, *profile, "--ssd-link", "NIC 100G")
    assert given_link["costs"]["ssd"]["bytes_per_s"] == 11.5e9
    assert given_link["costs"]["ssd"]["latency_s"] == 30e-6
    alone = printed(capsys, "--tokens", "8192", "--model", "opt-66b", "--prefill-rate", "5000")
    assert alone["block_bytes"] == 256 * 2359296
    assert alone["costs"]["compute"]["token_s"] == 1 / 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--tokens or --token-file"),
        (["--tokens", "512"], "costs"),
        (["--tokens", "512", "--prefill-rate", "5"], "--model"),
        (["--tokens", "512", "--token-bytes", "8", "--prefill-rate", "-1"], "prefill rate"),
        (["--tokens", "512", "--model", "llama-3-8b", "--device", "abacus"], "H100"),
        (["--tokens", "512", "--model", "opt-66b", "--device", "h100"], "Llama-3-8B"),
        (["--tokens", "512", "--model", "llama-3-8b", "--device", "h100", "--ssd", "0:3"], "--ssd"),
        (["--tokens", "512", "--model", "llama-3-8b", "--device", "h100", "--ssd", "x"], "--ssd"),
        (["--tokens", "99999999", "--token-bytes", "8", "--prefill-rate", "1"], "tokens"),
        (["--tokens", "512", "--namespace", "ab"], "--store"),
    ],
)  # fmt: skip
def test_wrong_usage(capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """A message that names the option or what is known, and exit code 2."""
    assert cli.run(["plan", *arguments]) == 2
    assert words in capfd.readouterr().err


# -- where blocks are


def test_ranges() -> None:
    """Half-open, open-ended or single; within the prompt."""
    assert read_ranges("--ssd", "0:2, 5,7:", 9) == [range(2), range(5, 6), range(7, 9)]
    assert read_ranges("--ssd", ":", 9) == [range(9)]
    for text in ("3:2", "0:10", "a", "1:2:3", "-1:2"):
        with pytest.raises(ValueError, match="--ssd"):
            read_ranges("--ssd", text, 9)


def test_what_no_range_names() -> None:
    """It is missing; with no range at all everything is on the SSD; nothing is named twice."""
    assert blocks_at(3, {Tier.HOST: [range(1, 2)]}) == ((None, Tier.HOST, None), 0)
    assert blocks_at(2, {Tier.HOST: []}) == ((Tier.SSD, Tier.SSD), 0)
    assert blocks_at(2, {Tier.DEVICE: [range(1)]}) == ((Tier.DEVICE, None), 1)
    stored = (Tier.SSD, None, Tier.SSD)
    assert blocks_at(3, {Tier.HOST: [range(1)]}, stored)[0] == (Tier.HOST, None, Tier.SSD)
    with pytest.raises(ValueError, match="twice"):
        blocks_at(3, {Tier.HOST: [range(2)], Tier.SSD: [range(1, 3)]})


# -- token files


def test_token_files() -> None:
    """JSON or numbers between spaces, commas, lines."""
    for data in (b"[1, 2, 3]", b"1 2 3", b"1,2\n3\n", b" [1,2,3]\n"):
        assert token_ids(data) == [1, 2, 3]


@given(st.binary(max_size=60) | st.text("0123456789,[]-. \ne", max_size=40).map(str.encode))
def test_any_token_file_is_read_or_refused(data: bytes) -> None:
    """It gives ids in range, or a ``ValueError``."""
    try:
        ids = token_ids(data)
    except ValueError:
        return
    assert all(0 <= each < 1 << 32 for each in ids)


def test_tokens_are_never_shown(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither a plan nor an error echoes what is in a token file."""
    path = tmp_path / "tokens"
    options = ["--token-bytes", "8", "--prefill-rate", "10"]
    for content, code in (("31337 " * 600, 0), ("31337 secret31337", 2), ("[31337, 31337.5]", 2)):
        path.write_text(content)
        assert cli.run(["plan", "--token-file", str(path), *options]) == code
        said = capfd.readouterr()
        assert "31337" not in said.out + said.err
        assert "secret" not in said.out + said.err
    assert "item 1 " in said.err


# -- a store's blocks and costs


def test_a_store_says_where_blocks_are_and_what_they_cost(
    open_store: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a token file the stored blocks are found; costs are those that the store learned."""
    store = open_store(device="gpu|0")
    keys = prompt_keys(6)
    put(store, keys, blocks=range(1, 5))
    for number in range(4):
        store._profiler.computed(number * 16, 16, 0.5)
    store._profiler.loaded(Tier.SSD, 1 << 20, 0.125)
    path = store.path
    store.close()
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps(prompt(6, extra=3)))
    value = printed(capsys, "--token-file", str(tokens), "--store", path, "--device", "gpu|0")
    assert value["runs"] == [[None, 0, 1], ["ssd", 1, 5], [None, 5, 6]]
    assert (value["tokens"], value["block_bytes"]) == (99, SPEC.block_layout.block_bytes)
    assert value["costs"]["compute"]["samples"] == 4
    assert value["costs"]["ssd"]["bytes_per_s"] == pytest.approx(8 << 20)
    other = printed(capsys, "--token-file", str(tokens), "--store", path, "--tenant", "other")
    assert other["runs"] == [[None, 0, 6]]
    one = printed(capsys, "--tokens", "99", "--store", path, "--ssd", "2:4")
    assert one["runs"] == [[None, 0, 2], ["ssd", 2, 4], [None, 4, 6]]


def test_the_only_device_is_found(
    open_store: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs of one device need no name; a live store can be asked; unknown costs are said."""
    store = open_store(device="one|two")
    for number in range(4):
        store._profiler.computed(number * 16, 16, 0.5)
    path = store.path
    put(store, prompt_keys(1))
    unknown = printed(capsys, "--tokens", "99", "--store", path)
    assert unknown["break_even"] is None
    store.close()
    value = printed(capsys, "--tokens", "99", "--store", path)
    assert value["costs"]["compute"]["samples"] == 4
    assert "one|two" in value["costs"]["source"]


def test_a_store_of_several_specs_is_asked_by_name(
    open_store: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a namespace the choices are listed; with one it is taken."""
    path = open_store().path
    other = replace(SPEC, parts=(), v_head_dim=0, model="test/other")
    open_store(path + "2", other).close()
    store = kvtier_directory(path + "2")
    store.keep_spec(SPEC)
    store.close()
    assert cli.run(["plan", "--tokens", "99", "--store", path + "2"]) == 2
    assert "test/other" in capfd.readouterr().err
    chosen = ["--namespace", SPEC.namespace.hex()[:8]]
    assert cli.run(["plan", "--tokens", "99", "--store", path + "2", *chosen]) == 0


def kvtier_directory(path: str) -> Any:
    """Open a store's directory as its writer."""
    from kvtier.tiers.directory import StoreDirectory
    from kvtier.tiers.fs import PosixFileSystem

    return StoreDirectory(path, PosixFileSystem())
