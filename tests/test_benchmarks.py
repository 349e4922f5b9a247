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


@pytest.fixture
def disk(harness: Any) -> Any:
    """Import what measures the disk alone."""
    return importlib.import_module("_disk")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in its quickest setting."""
    return subprocess.run(
        [sys.executable, str(FOLDER / script), "--smoke", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


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
    bars = harness.Bar(low=1.9), harness.Bar(high=1.0), harness.Bar(0.9, 1.1), harness.NO_BAR
    assert [str(bar) for bar in bars] == [">= 1.9", "<= 1", "0.9..1.1", "none"]


def test_a_number_without_a_bar_is_neither_met_nor_missed(harness: Any) -> None:
    """It only informs, however few trials it comes from."""
    assert harness.Ratio("r", 1.0, harness.NO_BAR, 0.0, 1).verdict == "no bar"


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


def test_a_series_is_judged_by_its_changes_from_one_to_the_next(harness: Any) -> None:
    """Each next to the one before is a pair; one number alone decides nothing."""
    ratio = harness.Ratio.of_series("r", [2.0, 2.4, 2.2, 2.1, 2.0, 2.3], harness.Bar(high=2.0))
    assert ratio.value == pytest.approx(2.15)
    assert ratio.spread == pytest.approx(0.2)  # of 0.4, 0.2, 0.1, 0.1, 0.3
    assert (ratio.pairs, ratio.verdict) == (5, "not decided")
    alone = harness.Ratio.of_series("r", [2.0], harness.Bar(high=2.0))
    assert (alone.spread, alone.pairs, alone.verdict) == (0.0, 0, "not decided")


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
    paths = {"dir": "where to write", "env": "where LMCache is"}
    options = harness.parse("what", (), ["--dir", "/x"], paths)
    assert options.paths == {"dir": "/x", "env": ""}
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


def test_a_run_that_is_stopped_keeps_what_it_measured(harness: Any, tmp_path: Path) -> None:
    """What was saved half-way is a whole object of what there was by then."""
    out = tmp_path / "out.json"
    bench = harness.Bench("example", harness.Options(json=str(out)))
    bench.add(harness.Ratio("good", 2.0, harness.Bar(low=1.9), 0.01, 5))
    bench.save()
    bench.add(harness.Ratio("never saved", 2.0, harness.Bar(low=1.9), 0.01, 5))
    value = json.loads(out.read_text())
    assert (set(value), value["ratios"]) == (KEYS, {"good": 2.0})


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
    done = run("restore.py", *parts, "--json", str(out))
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


# -- the disk alone


def test_raw_records_lie_as_a_store_lays_them_out(disk: Any) -> None:
    """A header of whole pages, payload in whole pages, slots behind the segment's first page."""
    shape = disk.Shape(
        blocks=5, header_bytes=4096, payload_bytes=5000, segment_bytes=30_000, depth=2, direct=False
    )
    assert (shape.slot_bytes, shape.slots, shape.segments) == (4096 + 8192, 2, 3)
    assert [shape.place(block) for block in (0, 1, 4)] == [(0, 4096), (0, 16384), (2, 4096)]
    large = disk.Shape(1, 4096, 1 << 20, segment_bytes=1000, depth=1, direct=False)
    assert large.slots == 1


def test_raw_passes_move_every_record_and_leave_nothing_behind(disk: Any, tmp_path: Path) -> None:
    """Fresh writes make new files, overwrites and reads use them."""
    shape = disk.Shape(
        blocks=5, header_bytes=4096, payload_bytes=8192, segment_bytes=30_000, depth=2, direct=False
    )
    with disk.RawDisk(tmp_path, shape) as raw:
        assert min(raw.fresh(), raw.overwrite(), raw.read(), raw.fresh()) > 0
        sizes = sorted(path.stat().st_size for path in tmp_path.iterdir())
        assert sizes == [4096 + 12288, 4096 + 2 * 12288, 4096 + 2 * 12288]
    assert not list(tmp_path.iterdir())


def test_memory_for_direct_io_is_page_aligned(disk: Any) -> None:
    """And writable from its first byte to its last."""
    memory = disk.arena(3 * 4096)
    assert memory.ctypes.data % 4096 == 0
    memory[:] = 7
    assert int(memory.sum()) == 7 * 3 * 4096


def test_a_disk_that_is_memory_is_named(disk: Any, tmp_path: Path) -> None:
    """The type is that of the innermost mount above a path."""
    assert disk.file_system(Path("/proc/self")) == "proc"
    assert disk.file_system(tmp_path) not in ("proc", "sysfs")


def test_a_disk_without_room_is_refused_by_name(disk: Any, tmp_path: Path) -> None:
    """What is missing, and what to do."""
    disk.need_free(tmp_path, 1)
    with pytest.raises(SystemExit, match=r"MiB are needed: give another disk with --dir"):
        disk.need_free(tmp_path, 1 << 60)


def test_the_cpu_time_of_children_counts(disk: Any) -> None:
    """The store's index lives in a child process."""
    before = disk.process_cpu_s()
    code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert disk.process_cpu_s() - before >= 0.25  # ticks of 10 ms
        child.communicate(b"\n")


# -- the prefetch benchmark


def test_prefetch_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """Every part once, every byte checked, the shared prefix read once, and no file left."""
    pytest.importorskip("rich")
    out, folder = tmp_path / "prefetch.json", tmp_path / "disk"
    done = run("prefetch.py", "--dir", str(folder), "--json", str(out))
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too slow here, which is no bug
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    assert list(value["ratios"]) == [
        "prefetched_vs_host",
        "unhinted_vs_host",
        "prefetched_vs_host_slow",
        "unhinted_vs_host_slow",
        "shared_prefix_p99",
    ]
    assert all(number > 0 for number in value["ratios"].values())
    assert not list(folder.iterdir())


# -- the tier benchmark


def test_tiers_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """Every part once, every byte checked, and no file left."""
    pytest.importorskip("rich")
    out, folder = tmp_path / "tiers.json", tmp_path / "disk"
    done = run("tiers.py", "--dir", str(folder), "--json", str(out))
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too slow here, which is no bug
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    assert list(value["ratios"]) == [
        "ssd_write_vs_raw_1MiB",
        "ssd_write_full_vs_raw_1MiB",
        "write_amplification",
        "ssd_read_vs_raw_1MiB",
        "gather_vs_whole_1MiB",
        "scatter_vs_whole_1MiB",
        "ssd_read_while_writing",
        "host_put_vs_memcpy",
        "host_get_vs_memcpy",
        "ssd_read_core_s_per_gib",
        "lookup_128k_list_ms",
        "lookup_128k_array_ms",
        "open_1m_s",
        "open_1m_bytes_per_block",
    ]
    assert all(number > 0 for number in value["ratios"].values())
    assert value["settings"]["io"] in ("direct", "buffered")
    assert value["settings"]["million_blocks"] == 4096
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not list(folder.iterdir())


# -- the inspector benchmark


def test_the_inspector_benchmark_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """Every part once, every command fine, and no file left."""
    pytest.importorskip("rich")
    out, folder = tmp_path / "inspector.json", tmp_path / "disk"
    done = run("inspector.py", "--dir", str(folder), "--json", str(out))
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too slow here, which is no bug
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    assert list(value["ratios"]) == [
        "check_vs_raw_1MiB",
        "help_s",
        "info_1m_s",
        "ls_1m_s",
        "tree_1m_s",
        "write_beside_inspector",
    ]
    assert all(number > 0 for number in value["ratios"].values())
    assert value["settings"]["million_blocks"] == 4096
    assert not list(folder.iterdir())


# -- the tracing benchmark


def test_tracing_counts_the_events_of_a_restore(tmp_path: Path) -> None:
    """Three numbers, and a restore that notes at least the copy of every block."""
    out = tmp_path / "tracing.json"
    run("tracing.py", "--json", str(out))
    value = json.loads(out.read_text())
    assert set(value["ratios"]) == {"trace_off_ns", "trace_on_us", "trace_share"}
    (restore,) = [each for each in value["results"] if each.get("case") == "restore"]
    assert min(restore["events"]) >= restore["blocks"]
