from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
KEYS = {"name", "commit", "machine", "settings", "ratios", "results"}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import what the benchmarks share, as they do: from their own folder."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_harness")


@pytest.fixture
def restore(harness: Any) -> Any:
    """Import the restore benchmark."""
    pytest.importorskip("transformers")
    return importlib.import_module("restore")


def trials(harness: Any, *seconds: float, held: float = 1.0) -> list[Any]:
    """Return made-up trials."""
    return [harness.Trial(each, held) for each in seconds]


# -- verdicts


@pytest.mark.parametrize(
    ("value", "bar", "spread", "pairs", "starved", "verdict"),
    [
        (1.95, (1.9, None), 0.1, 5, 0.0, "met"),
        (1.9, (1.9, None), 0.0, 5, 0.0, "met"),
        (1.85, (1.9, None), 0.06, 5, 0.0, "not decided"),
        (1.85, (1.9, None), 0.04, 5, 0.0, "missed"),
        (0.04, (None, 0.05), 0.1, 5, 0.0, "met"),
        (0.08, (None, 0.05), 0.04, 5, 0.0, "not decided"),
        (0.08, (None, 0.05), 0.02, 5, 0.0, "missed"),
        (1.2, (0.9, 1.1), 0.05, 5, 0.0, "missed"),
        (0.8, (0.9, 1.1), 0.05, 5, 0.0, "missed"),
        (1.0, (0.9, 1.1), 0.0, 5, 0.0, "met"),
        (1.95, (1.9, None), 0.0, 4, 0.0, "not decided"),
        (1.0, (1.9, None), 0.0, 4, 0.0, "not decided"),
        (1.95, (1.9, None), 0.0, 5, 0.5, "not decided"),
    ],
)
def test_a_miss_within_the_spread_is_not_decided_and_never_a_met_bar(
    harness: Any, value: float, bar: tuple[Any, Any], spread: float, pairs: int,
    starved: float, verdict: str,
) -> None:  # fmt: skip
    """Too few pairs or too many starved trials decide nothing either."""
    ends = {name: end for name, end in zip(("low", "high"), bar, strict=True) if end is not None}
    ratio = harness.Ratio("r", value, harness.Bar(**ends), spread, pairs, starved)
    assert ratio.verdict == verdict


def test_bars_are_printed_as_they_are_meant(harness: Any) -> None:
    """One end or two."""
    bars = harness.Bar(low=1.9), harness.Bar(high=1.0), harness.Bar(0.9, 1.1)
    assert [str(bar) for bar in bars] == [">= 1.9", "<= 1", "0.9..1.1"]


# -- measuring


def test_ways_are_interleaved_and_every_other_round_is_reversed(harness: Any) -> None:
    """So drift hits all ways alike, and pairs stay next to each other."""
    order: list[str] = []

    def way(name: str) -> Any:
        def run() -> Any:
            order.append(name)
            return harness.Trial(float(len(order)))

        return run

    ticks: list[int] = []
    ways = {name: way(name) for name in "abc"}
    found = harness.interleave(ways, 3, tick=lambda: ticks.append(1))
    assert "".join(order) == "abccbaabc"
    assert [trial.seconds for trial in found["a"]] == [1.0, 6.0, 7.0]
    assert len(ticks) == 9


def test_a_ratio_is_the_median_of_pairs_and_its_spread_the_median_distance_from_one(
    harness: Any,
) -> None:
    """The spread is in the ratio's own unit."""
    slow = trials(harness, 2.0, 4.0, 6.0, 8.0, 100.0)
    fast = trials(harness, 1.0, 2.0, 2.0, 4.0, 5.0)
    again = trials(harness, 1.0, 1.6, 2.5, 5.0, 5.0)
    ratio = harness.Ratio.of_pairs("r", slow, fast, (fast, again), harness.Bar(low=1.0))
    assert ratio.value == 2.0  # of 2, 2, 3, 2, 20
    assert ratio.spread == pytest.approx(0.4)  # 2 times the median of 0, 0.25, 0.2, 0.2, 0
    assert (ratio.pairs, ratio.starved) == (5, 0.0)


def test_a_starved_trial_is_run_again_a_bounded_number_of_times(harness: Any) -> None:
    """The first that was not starved counts, else the least starved one."""
    shares = iter([0.5, 0.9, 0.95, 1.0])
    trial = harness.measure(lambda: harness.Trial(1.0, next(shares)))
    assert (trial.held, trial.attempts, trial.starved) == (0.95, 3, False)
    shares = iter([0.3, 0.6, 0.5, 0.4])
    trial = harness.measure(lambda: harness.Trial(1.0, next(shares)))
    assert (trial.held, trial.attempts, trial.starved) == (0.6, 4, True)
    mixed = trials(harness, 1.0, 1.0, 1.0), trials(harness, 1.0, held=0.1)
    assert harness.starved_share(*mixed) == 0.25


def test_the_stopwatch_adds_up(harness: Any) -> None:
    """Over several uses; a watch that never ran starved nobody."""
    watch = harness.Stopwatch()
    assert watch.held == 1.0
    for _ in range(2):
        before = watch.wall_s
        with watch:
            sum(range(10_000))
        assert watch.wall_s > before
    assert 0 < watch.held <= 1


# -- options and output


def test_options(harness: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two that everybody sees, two that tests and developers use."""
    options = harness.parse("what", ("a", "b"), ["--quick", "--json", "-", "--only", "a"])
    assert (options.quick, options.json, options.pairs) == (True, "-", harness.PAIRS_MIN)
    assert (options.wants("a"), options.wants("b")) == (True, False)
    assert harness.parse("what", ("a",), []).wants("a")
    with pytest.raises(SystemExit):
        harness.parse("what", ("a", "b"), ["--only", "c"])
    with pytest.raises(SystemExit):
        harness.parse("what", (), ["--help"])
    shown = capsys.readouterr().out
    assert "--quick" in shown
    assert "--only" not in shown


@pytest.mark.parametrize("to_file", [False, True])
def test_one_json_object_and_a_table(
    harness: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, to_file: bool
) -> None:
    """Standard output holds nothing but the object, if that is where it goes."""
    out = tmp_path / "out.json"
    options = harness.Options(json=str(out) if to_file else "-")
    bench = harness.Bench("example", options, size=3)
    with bench.progress("counting", 2) as tick:
        tick()
    bench.add(harness.Ratio("good", 2.0, harness.Bar(low=1.9), 0.01, 5))
    bench.record("case", {"way": trials(harness, 1.5)}, blocks=4)
    assert bench.finish() == 0
    shown = capsys.readouterr()
    value = json.loads(out.read_text() if to_file else shown.out)
    assert set(value) == KEYS
    assert value["name"] == "example"
    assert value["ratios"] == {"good": 2.0}
    assert value["settings"] == {"quick": False, "pairs": 5, "size": 3}
    row, case = value["results"]
    assert (row["name"], row["bar"], row["verdict"]) == ("good", ">= 1.9", "met")
    assert (case["case"], case["blocks"], case["trials"]["way"][0]["seconds"]) == ("case", 4, 1.5)
    assert "good" in (shown.out if to_file else shown.err)
    bench.add(harness.Ratio("bad", 1.0, harness.Bar(low=1.9), 0.01, 5))
    assert bench.finish() == 1


# -- the restore benchmark


def test_best_split(restore: Any) -> None:
    """Both ends, and in between."""
    assert restore.best_split([1, 2, 3], [0, 2, 4, 6]) == 3  # two computed, one loaded
    assert restore.best_split([9, 9], [0, 1, 2]) == 2  # all loaded
    assert restore.best_split([1, 1], [0, 9, 18]) == 2  # all computed


def test_a_varying_link_delivers_what_its_rates_say_and_queues(restore: Any) -> None:
    """Piecewise rates around the mean, one FIFO from the first load on."""
    link = restore.VaryingLink(100.0, "x", block_bytes=50, seed=1)  # segments of 1 s
    rates = link._rates
    assert sum(rates) / len(rates) == pytest.approx(100.0)
    assert link.ends(0.0, rates[0] + rates[1] / 2) == pytest.approx(1.5)
    first = link.reserve(1000.0, 60)
    second = link.reserve(1000.0, 60)
    assert first == pytest.approx(1000.0 + link.ends(0.0, 60))
    assert second == pytest.approx(1000.0 + link.ends(0.0, 120))
    assert repr(link) == repr(restore.LabelledLink(1.0, "x"))


def test_a_wrong_byte_stops_the_benchmark(restore: Any) -> None:
    """A restore is compared with what plain transformers computed, in every value."""
    with restore.tiny(1) as subject:
        subject.restore(1, None, "load")
        subject.reference[-1][-1, -1, -1] += 1
        with pytest.raises(AssertionError, match="restored KV differs"):
            subject.restore(1, None, "load")


def test_restore_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """The planner alone, two cells of the grid and counted reads, every byte checked."""
    pytest.importorskip("rich")
    pytest.importorskip("transformers")
    out = tmp_path / "restore.json"
    parts = [argument for part in ("plan", "grid", "reads") for argument in ("--only", part)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "restore.py"), "--smoke", *parts, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too slow here, which is no bug
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    names = ["plan_512_ms", "hybrid_vs_optimal", "hybrid_worst", "predicted_median", "reads_exact"]
    assert list(value["ratios"]) == names
    assert all(number > 0 for number in value["ratios"].values())
    assert value["ratios"]["reads_exact"] == 1
    cells = [row for row in value["results"] if row.get("case") == "grid"]
    assert [cell["blocks"] for cell in cells] == [2, 4]
    for name in names:
        assert name in done.stdout
