from __future__ import annotations

import importlib
import io
import json
import os
import random
import re
import select
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
KEYS = {"name", "commit", "machine", "settings", "ratios", "results"}
BLOCKS = {"layers": 2, "kv_heads": 2, "head_dim": 8, "blocks": 3, "seed": 1}


def module(name: str) -> Any:
    """Return a fixture that imports one of the benchmarks' modules."""

    def load(monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("rich")
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return pytest.fixture(load)


harness = module("_harness")
process = module("_rivals_process")
run = module("_rivals_run")
table = module("_rivals_table")
worker = module("_rivals_worker")
script = module("rivals")


@pytest.fixture
def plain(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the rivals that need nothing extra."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the worker appends its folder
    return importlib.import_module("_rivals_plain_worker")


@pytest.fixture
def strategies(harness: Any) -> Any:
    """Import the restore strategies."""
    pytest.importorskip("transformers")
    return importlib.import_module("_strategies")


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in its quickest setting."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "rivals.py"), "--smoke", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )


# -- processes


def fake_python(tmp_path: Path, *answers: str) -> Path:
    """Return a program that answers one line to each request, whatever it is asked."""
    lines = "".join(f"read request; echo '{answer}'\n" for answer in answers)
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{lines}echo 'out of memory' >&2\n")
    path.chmod(0o700)
    return path


def opened(**facts: Any) -> str:
    """Return the answer of a worker with one backend."""
    said = {"durability": "unsynced", "ways": ["a"], "checks": "none", "durable": "", "cold": True}
    return json.dumps({"backends": {"disk": {**said, **facts}}, "skipped": {"raw": "no library"}})


def test_a_rival_is_asked_line_by_line(process: Any, tmp_path: Path) -> None:
    """Opened once, then timed; whatever goes wrong there is told as its reason."""
    answers = (
        opened(ways=["a", "b"]),
        '{"seconds": 1.5, "cpu_s": 0.5}',
        '{"seconds": 2.5, "cpu_s": 0.25}',
        '{"error": "AssertionError: wrong"}',
    )
    source = process.Source("rival", "", "_none.py")
    python = fake_python(tmp_path, *answers)
    with process.Rival(source, python, tmp_path, {"blocks": 1}) as rival:
        assert rival.backends["disk"].ways == ("a", "b")
        assert rival.skipped == {"raw": "no library"}
        trial = rival.write("disk")
        assert (trial.seconds, trial.detail) == (1.5, {"cpu_s": 0.5})
        assert rival.read("disk", "a", cold=True).seconds == 2.5
        with pytest.raises(process.RivalMissing, match="could not read: AssertionError: wrong"):
            rival.read("disk", "a", cold=True)
        with pytest.raises(process.RivalMissing, match="process ended: out of memory"):
            rival.write("disk")
        assert rival.damage("disk") == "died"


def test_a_rival_that_does_not_start_says_why(process: Any, tmp_path: Path) -> None:
    """Its last words are in the error."""
    source = process.Source("rival", "", "_none.py")
    with pytest.raises(process.RivalMissing, match="process ended: out of memory"):
        process.Rival(source, fake_python(tmp_path), tmp_path, {"blocks": 1})


def test_a_rival_ends_with_what_it_started(process: Any, tmp_path: Path) -> None:
    """Its masters and owners are gone too, and its time is over at once."""
    path = tmp_path / "python"
    path.write_text(
        f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/child\nread x; echo '{opened()}'\nread x\n"
    )
    path.chmod(0o700)
    with process.Rival(process.Source("rival", "", "_none.py"), path, tmp_path, {}):
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
    ended, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert ended


def test_an_environment_is_made_once_and_anew_for_other_packages(
    process: Any, tmp_path: Path
) -> None:
    """What was installed is written down; another list is installed."""
    commands: list[list[str]] = []

    def make(source: Any) -> Path:
        made: Path = process.environment(
            source, tmp_path / "env", lambda: ticks.append(1), lambda each, _: commands.append(each)
        )
        return made

    source = process.Source("rival", "rival==1", "_none.py", (("rival==1",),), "rival")
    ticks: list[int] = []
    assert make(source) == tmp_path / "env" / "bin" / "python"
    assert len(ticks) == len(commands) == source.ticks
    make(source)
    assert len(commands) == source.ticks
    make(replace(source, steps=(("rival==1", "more"),)))
    assert commands[-2][-2:] == ["rival==1", "more"]


# -- workers


@pytest.fixture
def server(worker: Any, plain: Any, tmp_path: Path) -> Any:
    """Return a server of the rivals that need nothing extra, with small blocks."""
    pytest.importorskip("safetensors")
    found = worker.Server(plain.make)
    found.answer({"op": "open", "folder": str(tmp_path), **BLOCKS})
    return found


PLAIN = ("torch.save", "torch.save+sync", "safetensors", "safetensors+sync", "lmdb", "lmdb+sync")


@pytest.mark.parametrize("name", PLAIN)
def test_what_needs_nothing_extra_writes_and_reads(server: Any, name: str) -> None:
    """Every way, cold and warm, and after it was written anew; every byte is compared."""
    facts = server._backends[name].facts
    assert facts.durability == ("synced" if name.endswith("+sync") else "unsynced")
    for _ in range(2):
        assert server.answer({"op": "write", "backend": name})["seconds"] > 0
        for way in facts.ways:
            for cold in (True, False):
                request = {"op": "read", "backend": name, "way": way, "cold": cold}
                assert server.answer(request)["seconds"] > 0


@pytest.mark.parametrize("name", ["torch.save", "safetensors", "lmdb"])
def test_a_read_that_returns_other_bytes_counts_as_no_read(server: Any, name: str) -> None:
    """The comparison sees a single byte, and a block that is not there."""
    server.answer({"op": "write", "backend": name})
    server._expected[1, 7] ^= 1
    if name == "lmdb":  # what is stored and what is expected are the same memory
        server._expected = server._expected.copy()
        server._expected[2, 9] ^= 1
    request = {"op": "read", "backend": name, "way": "threads", "cold": True}
    if name == "lmdb":
        request["way"] = "get"
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.answer(request)


def test_a_synced_kind_syncs_every_file_and_the_folder(
    server: Any, plain: Any, tmp_path: Path
) -> None:
    """One sync per file before it has its name, one of the folder; the unsynced kind none."""
    memory = plain.Memory({**BLOCKS, "expected": server._expected})
    folder = str(tmp_path / "files")
    os.mkdir(folder)
    for synced, expected in ((False, 0), (True, BLOCKS["blocks"] + 1)):
        seen: list[str] = []
        kind = {"synced": synced, "checks": "none", "sync": seen.append}
        plain.Files(memory, folder, plain.torch.save, plain.torch_load, **kind).write()
        assert len(seen) == expected
    assert seen[-1] == folder
    assert all(path.endswith(".new") for path in seen[:-1])


@pytest.mark.parametrize(
    ("start", "outcome"), [(1 << 20, "untouched"), (4096, "wrong bytes"), (0, r"\w+Error")]
)
def test_spoilt_files_are_told_from_whole_ones(
    worker: Any, plain: Any, tmp_path: Path, start: int, outcome: str
) -> None:
    """Not hit, since the files are smaller; served as they are; noticed, as they begin wrong."""
    server = worker.Server(plain.make, damage_start=start)
    server.answer({"op": "open", "folder": str(tmp_path), **BLOCKS})
    server.answer({"op": "write", "backend": "torch.save"})
    request = {"op": "damage", "backend": "torch.save"}
    assert re.fullmatch(outcome, server.answer(request)["outcome"])


class Counted:
    """A backend in memory that counts its reads."""

    folder = ""

    def __init__(self, facts: Any, expected: np.ndarray[Any, Any]) -> None:
        self.facts = facts
        self.reads = 0
        self._expected = expected

    def clear(self) -> None:
        """Nothing to forget."""

    def write(self) -> None:
        """Store nothing: it is there already."""

    def spoil(self, *, cold: bool) -> None:
        """Nothing is copied."""

    def release(self, blocks: Any) -> None:
        """Nothing was lent."""

    def read(self, way: str) -> Any:
        """Count, and return the blocks."""
        self.reads += 1
        return list(self._expected)

    def array(self, block: Any) -> Any:
        """Return a block's bytes."""
        return block


def test_a_warm_read_follows_another_read(worker: Any) -> None:
    """Whatever a backend keeps in memory is there, also right after a write; one read is timed."""
    facts = worker.Facts("memory", ("get",), "none", "-", cold=False)
    made: list[Counted] = []

    def make(settings: Any) -> Any:
        made.append(Counted(facts, settings["expected"]))
        return {"cpu": made[0]}, {}

    server = worker.Server(make)
    server.answer({"op": "open", **BLOCKS})
    read = {"op": "read", "backend": "cpu", "way": "get", "cold": False}
    counts = []
    for request in ({"op": "write", "backend": "cpu"}, read, read):
        server.answer(request)
        counts.append(made[0].reads)
    server.answer({"op": "write", "backend": "cpu"})
    server.answer(read)
    assert [*counts, made[0].reads] == [0, 2, 3, 5]
    assert server.answer({"op": "damage", "backend": "cpu"})["outcome"] == ""


# -- tables


def series(harness: Any, *seconds: float, cpu: float = 1.0) -> list[Any]:
    """Return made-up trials."""
    return [harness.Trial(each, detail={"cpu_s": cpu}) for each in seconds]


def row(harness: Any, table: Any, name: str, seconds: float, **kinds: Any) -> Any:
    """Return a row whose writes took so long, beside kvtier's of 2 seconds."""
    mine = {"write": series(harness, *[2.0] * 5), "cold": series(harness, *[2.0] * 5)}
    again = {"write": series(harness, *[2.2] * 5), "cold": series(harness, *[2.2] * 5)}
    theirs = {"write": series(harness, *[seconds] * 5, cpu=3.0), **kinds}
    return table.Row(name, kinds.pop("durability", "synced"), "none", "fsync", theirs, mine, again)


def test_a_class_fits_a_terminal(harness: Any, table: Any) -> None:
    """In 80 columns the longest name, checks and durabilities are there to the last letter."""
    from rich.console import Console

    each = row(harness, table, "lmcache fs_native_direct", 3.0)
    rows = [
        replace(each, checks="none: wrong bytes", durable="page cache"),
        replace(each, name="lmdb+sync", checks="sizes: wrong bytes", durable="no sync"),
    ]
    out = io.StringIO()
    console = Console(width=80, file=out)
    console.print(table.class_table(rows, "synced", 1 << 30, ("xxh3: a miss", "fdatasync")))
    assert "…" not in out.getvalue()
    words = set(out.getvalue().split())
    assert words >= {"fs_native_direct", "fdatasync", "spoilt", "durable", "wrong", "cache", "miss"}


def test_a_rivals_row_says_how_kvtier_stands_in_each_column(harness: Any, table: Any) -> None:
    """Rival / kvtier, in time and in CPU time; no number where there are no trials."""
    standings = row(harness, table, "lmdb", 3.0).standings()
    assert set(standings) == {"write", "write_cpu"}
    write = standings["write"]
    assert (write.name, write.value, write.verdict) == ("synced_write_vs_lmdb", 1.5, "met")
    assert write.spread == pytest.approx(1.5 * (1 - 1 / 1.1))
    assert standings["write_cpu"].value == 3.0


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1.0, "missed"), (1.9, "not decided"), (2.0, "met"), (2.5, "met")]
)
def test_a_rival_within_the_spread_is_not_decided(
    harness: Any, table: Any, seconds: float, verdict: str
) -> None:
    """Ahead means at least as quick."""
    assert row(harness, table, "x", seconds).standing("write").verdict == verdict


def test_each_class_is_judged_by_its_best_rival(harness: Any, table: Any) -> None:
    """A rival of another class is none; a column that nobody has is not judged."""
    rows = [
        row(harness, table, "slow", 9.0),
        row(harness, table, "quick", 1.0),
        replace(row(harness, table, "unsafe", 0.1), durability="unsynced"),
    ]
    found = {ratio.name: (rival.name, ratio.value) for rival, ratio in table.class_ratios(rows)}
    assert found["synced_write_vs_best"] == ("quick", 0.5)
    assert found["unsynced_write_vs_best"][0] == "unsafe"
    assert "synced_cold_vs_best" not in found
    assert not any(name.startswith("memory") for name in found)


def test_the_sentence_names_whom_kvtier_is_behind(harness: Any, table: Any) -> None:
    """And in what, and by how much."""
    rows = [row(harness, table, "quick one", 1.0)]
    said = table.sentence(table.class_ratios(rows))
    assert "ahead of every rival of its class in synced write cpu" in said
    assert "behind in synced write (quick one: x0.50 +- 0.05)" in said
    assert "not decided" not in said
    level = table.sentence(table.class_ratios([row(harness, table, "level one", 2.1)]))
    assert "not decided in synced write (level one: x1.05 +- 0.10)" in level


def test_rates_and_cpu_time_are_medians(harness: Any, table: Any) -> None:
    """GB/s are 1e9 bytes, CPU seconds are per GiB."""
    trials = series(harness, 1.0, 2.0, 30.0, cpu=0.5)
    assert table.shown(trials, 4 * 10**9, cpu=False) == "2.00"
    assert table.shown(trials, 1 << 29, cpu=True) == "1.00"
    assert table.shown([], 1, cpu=False) == "-"


def test_of_several_ways_the_quickest_by_its_median_counts(
    harness: Any, table: Any, run: Any, process: Any
) -> None:
    """One lucky trial does not make a way quick; other backends' ways are not mixed in."""
    facts = {"cold": True, "checks": "none", "durable": "-", "durability": "unsynced"}
    met = run.Met({"fs": process.Facts(ways=("a", "b"), **facts)}, damage={"fs": "wrong bytes"})
    met.trials["cold"] |= {
        "kvtier": series(harness, 1.0),
        "again": series(harness, 1.0),
        "fs:a": series(harness, 0.1, 5.0, 5.0),
        "fs:b": series(harness, 2.0, 2.0, 2.0),
        "fs_direct:a": series(harness, 0.5),
    }
    (found,) = met.rows("lmcache")
    assert found.name == "lmcache fs"
    assert [trial.seconds for trial in found.trials["cold"]] == [2.0, 2.0, 2.0]
    assert found.checks == "none: wrong bytes"
    assert table.quickest(met.ways("cold"))[0] == "fs_direct:a"


def test_rivals_are_asked_for_by_name(script: Any) -> None:
    """The one that needs nothing always takes part; an unknown one stops the run."""
    assert script.asked_for("") == ["plain"]
    assert script.asked_for("mooncake, lmcache,mooncake") == ["plain", "mooncake", "lmcache"]
    with pytest.raises(SystemExit, match="redis is none of lmcache, mooncake"):
        script.asked_for("lmcache,redis")


# -- strategies


def a_plan(blocks: int) -> Any:
    """Return a plan that loads everything from the SSD."""
    import kvtier

    spec = kvtier.KVSpec(
        model="any", weights="sha256:0", dtype="bfloat16", layers=1, kv_heads=1, head_dim=8
    )
    keys = kvtier.BlockKeys.of(spec, [0] * (blocks * 256))
    tiers = (kvtier.Tier.SSD,) * blocks
    residency = kvtier.Residency(keys, tiers, spec.block_layout.block_bytes)
    return kvtier.plan(residency, kvtier.CostModel(), way="load"), residency


@pytest.mark.parametrize("seed", range(20))
def test_a_race_brings_every_block_once_from_both_ends(strategies: Any, seed: int) -> None:
    """Computed are the first ones ascending, loaded the last ones descending, however fast."""
    numbers = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    blocks = numbers.randint(1, 12)
    loaded: list[int] = []
    steps: list[int] = []
    turn = threading.Semaphore(0)

    def load(block: int) -> None:
        turn.acquire(timeout=0.05)  # its turn, or it is all that is left
        loaded.append(block)

    plan, _ = a_plan(blocks)
    with strategies.Race(plan, load) as race:
        while True:
            for _ in range(numbers.randint(0, 2)):
                turn.release()
            step = race.next_step(10)
            if step is None:
                break
            steps.append(step.start)
            race.computed(step)
    assert steps == list(range(len(steps)))
    assert loaded == list(range(blocks))[len(steps) :][::-1]
    assert (race.report.recomputed, race.report.loaded) == (len(steps), len(loaded))


def test_a_load_that_fails_ends_the_race(strategies: Any) -> None:
    """As its own error, not as a restore."""

    def load(block: int) -> None:
        raise OSError(f"block {block}")

    plan, _ = a_plan(1)
    with strategies.Race(plan, load) as race:
        race._thread.join()
        with pytest.raises(OSError, match="block 0"):
            race.next_step(10)


class Believing:
    """A store that plans with given costs."""

    def __init__(self, costs: Any) -> None:
        self.costs = costs

    def plan(self, residency: Any, way: str = "best") -> Any:
        """Plan as a store does."""
        import kvtier

        return kvtier.plan(residency, self.costs, way=way)


def costs(block_load_s: float) -> Any:
    """Return costs of 1 s per recomputed block, flat, and of so much per loaded one."""
    import kvtier
    from kvtier.cost import ComputeCost, LinkCost

    _, residency = a_plan(1)
    link = LinkCost(residency.block_bytes / block_load_s, 0.0, 100)
    copies = LinkCost(1e15, 0.0, 100)  # what was read is copied to the device in no time
    return kvtier.CostModel(ComputeCost(0.0, 1 / 256, 0.0, 100), copies, link)


def test_a_head_is_loaded_before_its_tail_is_computed(strategies: Any) -> None:
    """As many blocks as kvtier loads, the other ones, and no overlap: times add up."""
    _, residency = a_plan(8)
    store = Believing(costs(1.0))
    planned = store.plan(residency)
    found = strategies.head_first(store, residency)
    loaded = len(planned.load)
    assert 0 < loaded < 8
    assert found.load == tuple(range(loaded))
    assert found.recompute == tuple(range(loaded, 8))
    assert not found.adaptive
    assert found.predicted.planned == pytest.approx(8.0)
    assert planned.predicted.planned == pytest.approx(4.0)


@pytest.mark.parametrize(("load_s", "loaded"), [(0.5, 8), (2.0, 0)])
def test_break_even_is_all_or_nothing(strategies: Any, load_s: float, loaded: int) -> None:
    """Whichever single way is predicted to be quicker."""
    _, residency = a_plan(8)
    assert len(strategies.break_even(Believing(costs(load_s)), residency).load) == loaded


def test_one_block_of_a_race_is_a_plan_of_its_own(strategies: Any) -> None:
    """Everything before it counts as in place, nothing behind it is touched."""
    plan, _ = a_plan(5)
    one = strategies.one_block(plan, 3)
    assert (len(one.hashes), one.resident, one.load, one.recompute) == (4, 3, (3,), ())
    assert one.hashes == plan.hashes[:4]


def test_strategies_are_compared_with_kvtiers_plan(harness: Any, strategies: Any) -> None:
    """Their time / kvtier's, pair by pair; the sentence names the best of them."""
    mine, again = series(harness, *[2.0] * 5), series(harness, *[2.0] * 5)
    trials = {name: series(harness, *[6.0] * 5) for name in strategies.OTHERS}
    trials |= {"kvtier": mine, "again": again, "two_pointer": series(harness, *[1.0] * 5)}
    found = {ratio.name: ratio for ratio in strategies.ratios(trials, 0.5)}
    assert found["restore_vs_load_x0.5"].value == 3.0
    assert found["restore_vs_load_x0.5"].verdict == "met"
    assert found["restore_vs_two_pointer_x0.5"].verdict == "missed"
    assert "x0.50 +- 0.00 (two_pointer) at x0.5" in strategies.verdict({0.5: trials})


# -- the script


def test_storage_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """Every class that needs nothing extra, every byte checked, kvtier's miss, no file left."""
    pytest.importorskip("safetensors")
    out, folder = tmp_path / "rivals.json", tmp_path / "disk"
    done = benchmark("--only", "storage", "--dir", str(folder), "--json", str(out))
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too slow here, which is no bug
    value = json.loads(out.read_text())
    assert set(value) == KEYS
    columns = ("write", "cold", "warm", "write_cpu", "cold_cpu")
    assert list(value["ratios"]) == [
        f"{durability}_{column}_vs_best"
        for durability in ("synced", "unsynced")
        for column in columns
    ]
    assert all(number > 0 for number in value["ratios"].values())
    rows = {each["rival"]: each for each in value["results"] if each.get("case") == "rival"}
    assert set(rows) == set(PLAIN)
    assert all(each["checks"].endswith(": wrong bytes") for each in rows.values())
    assert "xxh3: a miss" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not list(folder.iterdir())


def test_strategies_run_on_the_smallest_case(tmp_path: Path) -> None:
    """All of them restore the same bytes."""
    pytest.importorskip("transformers")
    out = tmp_path / "rivals.json"
    done = benchmark("--only", "strategies", "--json", str(out))
    assert done.returncode in (0, 1), done.stderr[-2000:]
    value = json.loads(out.read_text())
    names = ("recompute", "load", "head_then_compute", "break_even", "two_pointer")
    assert list(value["ratios"]) == [f"restore_vs_{name}_x1" for name in names]
    (case,) = [each for each in value["results"] if each.get("case") == "strategies"]
    for name in (*names[1:], "kvtier"):
        (trial,) = case["trials"][name]
        assert trial["loaded"] + trial["recomputed"] == case["blocks"]


def test_a_rival_that_cannot_be_installed_is_skipped(
    harness: Any, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason; the others would be measured all the same."""
    (tmp_path / "file").touch()
    paths = {"dir": str(tmp_path / "disk"), "env": str(tmp_path / "file" / "x")}
    bench = harness.Bench("rivals", harness.Options(smoke=True, paths=paths))
    assert script.storage(bench, ["lmcache"]) == ["lmcache"]
    said = " ".join(capsys.readouterr().out.split())
    assert "lmcache is skipped: no environment can be made" in said
    assert "no environment can be made" in bench.settings["skipped"]["lmcache"]
    assert not bench.ratios


def test_a_clock_of_cpu_time_counts_what_is_spent(harness: Any) -> None:
    """Of this process; looking for children is not in it."""
    disk = importlib.import_module("_disk")
    clock = disk.CpuClock()
    first = clock.spent()
    np.sort(np.random.default_rng(1).random(2_000_000))
    assert clock.spent() - first > 0.02
