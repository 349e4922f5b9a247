"""tools/bench: every benchmark is run to its end or its limit, and what became of it is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from report_results import FOLDER, ROOT, result

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def runs(modules: Any) -> Any:
    """Import what runs benchmarks."""
    return modules("_report_runs")


SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--json") + 1])
value = {value!r}
value["settings"] = {{"arguments": sys.argv[1:]}}
{do}
"""


def scripts(folder: Path, **does: str) -> Path:
    """Write scripts that do what is said; ``WRITE`` stands for writing their result."""
    write = "out.write_text(json.dumps(value))"
    for name, do in does.items():
        value = result(name)
        text = SCRIPT.format(value=value, do=do.replace("WRITE", write))
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_benchmark_that_fails_stops_no_other(runs: Any, tmp_path: Path) -> None:
    """What became of each: fine, a bar missed, an exception, no result, nothing to compare with."""
    folder = scripts(
        tmp_path, a="WRITE", b="WRITE; sys.exit(1)", c="1 / 0", d="pass", e="sys.exit(3)", f="WRITE"
    )
    out = tmp_path / "out"
    out.mkdir()
    (out / "c.json").write_text("{}")  # of a run before
    asked = runs.Asked(out, quick=True)
    known = [runs.Benchmark(name, 60, 60) for name in "abcdef"]
    said: list[str] = []
    ended, interrupted = runs.run_all(known, asked, folder, said.append)
    assert not interrupted
    assert [(each.name, each.status) for each in ended] == [
        ("a", 0), ("b", 1), ("c", 2), ("d", 2), ("e", 0), ("f", 0)
    ]  # fmt: skip
    assert [each.said.partition(":")[0] for each in ended] == [
        "fine", "missed a bar", "FAILED with exit status 1",
        "FAILED with exit status 0 and no result", "left out", "fine",
    ]  # fmt: skip
    assert [path.name for path in runs.results(out, known)] == ["a.json", "b.json", "f.json"]
    assert said[0].startswith("6 benchmarks, at most 6 min in all")
    assert said[1:3] == ["[1/6] a: running, at most 60 s", "[1/6] a: fine, 0 s"]
    assert 60 < int(said[3].removeprefix("[2/6] b: running, at most ").removesuffix(" s")) <= 120


def test_a_benchmark_beyond_its_limit_is_stopped_with_what_it_started(
    runs: Any, tmp_path: Path
) -> None:
    """It may tidy up first; a child of it that will not end is killed."""
    do = """
deaf = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\\n"
deaf += f"os.open({str(out.parent / 'alive')!r}, os.O_WRONLY); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
try:
    time.sleep(600)
finally:
    (out.parent / "tidy").touch()
"""
    folder = scripts(tmp_path, slow=do)
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        ended = runs.run(runs.Benchmark("slow", 5, 5), runs.Asked(tmp_path), folder)
        assert (ended.said, ended.status) == ("STOPPED after its limit of 5 s", 2)
        assert (tmp_path / "tidy").exists()
        os.set_blocking(alive, True)
        assert os.read(alive, 1) == b""  # waits for the end of who could still write
    finally:
        os.close(alive)


def test_what_is_passed_on(runs: Any, tmp_path: Path) -> None:
    """The disk to those who take one, extras to those who know them, another interpreter."""
    asked = runs.Asked(
        tmp_path, quick=True, extras=("lmcache",), disk="/x", pythons={"vllm": "/py"}
    )
    by_name = {each.name: each for each in runs.BENCHMARKS}
    rivals = asked.command(by_name["rivals"], FOLDER)
    assert rivals[1:] == [
        str(FOLDER / "rivals.py"), "--json", str(tmp_path / "rivals.json"),
        "--quick", "--dir", "/x", "--with", "lmcache",
    ]  # fmt: skip
    assert "--dir" not in asked.command(by_name["restore"], FOLDER)
    assert asked.command(by_name["vllm_ttft"], FOLDER)[0] == "/py"
    assert asked.limit_s(by_name["rivals"]) > runs.Asked(tmp_path, quick=True).limit_s(
        by_name["rivals"]
    )


def test_a_quick_run_of_all_takes_less_than_half_an_hour(runs: Any, tmp_path: Path) -> None:
    """Even if every benchmark that is not asked for by name runs into its limit."""
    asked = runs.Asked(tmp_path, quick=True)
    limits = [asked.limit_s(each) for each in runs.BENCHMARKS if not each.needs]
    assert sum(limits) < 1800


def test_what_cannot_run_is_left_out_with_its_reason(runs: Any, tmp_path: Path) -> None:
    """No script, no environment; a name that nobody knows is refused with those that are."""
    folder = scripts(tmp_path, a="WRITE", c="WRITE")
    known = [
        runs.Benchmark("a", 1, 1),
        runs.Benchmark("b", 1, 1),
        runs.Benchmark("c", 1, 1, needs="e"),
    ]
    chosen, left_out = runs.choose([], runs.Asked(tmp_path), folder, known)
    assert [each.name for each in chosen] == ["a"]
    assert left_out == ["b: left out: there is no b.py", "c: left out: needs --with e"]
    chosen, left_out = runs.choose(
        ["c", "c"], runs.Asked(tmp_path, pythons={"e": "/py"}), folder, known
    )
    assert ([each.name for each in chosen], left_out) == (["c"], [])
    with pytest.raises(SystemExit, match="unknown: nope; there are a, b, c"):
        runs.choose(["nope"], runs.Asked(tmp_path), folder, known)


def test_every_benchmark_of_the_folder_is_run(runs: Any) -> None:
    """A script that nobody runs is measured by nobody."""
    there = {path.stem for path in FOLDER.glob("[a-z]*.py")} - {"report"}
    assert there <= {each.name for each in runs.BENCHMARKS}


def test_every_script_is_named_where_one_reads_what_to_run() -> None:
    """In benchmarks/README.md, once at least."""
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("[a-z]*.py"):
        assert re.search(rf"`{path.name}[ `]", text), path.name


def test_tools_bench_is_there_and_runs_in_the_repository(tmp_path: Path) -> None:
    """Executable, with the environment's python; arguments mean what they mean to the caller."""
    script = ROOT / "tools" / "bench"
    assert script.stat().st_mode & 0o111
    root, elsewhere = tmp_path / "a root", tmp_path / "elsewhere"
    (root / "tools").mkdir(parents=True)
    elsewhere.mkdir()
    (root / "tools" / "bench").write_text(script.read_text())
    (root / "python").write_text(
        f'#!/bin/sh\npwd >"{root}/asked"\nfor each; do echo "$each" >>"{root}/asked"; done\n'
    )
    (root / "python").chmod(0o700)
    (root / "tools" / "_venv").write_text(f"cd '{root}'; python='{root}/python'\n")
    (root / "tools" / "_venv-vllm").write_text("python_vllm=/v/python\n")

    def asked(*arguments: str) -> list[str]:
        command = ["bash", str(root / "tools" / "bench"), *arguments]
        subprocess.run(command, check=True, timeout=60, cwd=elsewhere)
        return (root / "asked").read_text().splitlines()

    runs = [str(elsewhere), str(root / "benchmarks" / "_report_runs.py")]
    assert asked("--out", "a b") == [*runs, "--out", "a b"]
    assert asked("--with", "lmcache,vllm") == [
        *runs, "--vllm-python", "/v/python", "--with", "lmcache,vllm"
    ]  # fmt: skip
    (root / "tools" / "_venv-vllm").write_text("no_vllm='no build'; python_vllm=/v\n")
    assert asked("--with", "vllm") == [*runs, "--with", "vllm"]


def test_ctrl_c_stops_what_runs_and_starts_nothing_more(runs: Any, tmp_path: Path) -> None:
    """What ended before it is kept."""
    folder = scripts(
        tmp_path, a="WRITE", b="os.kill(os.getppid(), signal.SIGINT); time.sleep(600)", c="WRITE"
    )
    known = [runs.Benchmark(name, 60, 60) for name in "abc"]
    ended, interrupted = runs.run_all(known, runs.Asked(tmp_path), folder, lambda _: None)
    assert interrupted
    assert [each.name for each in ended] == ["a"]
    assert not (tmp_path / "c.json").exists()


def test_a_run_ends_with_a_report(tmp_path: Path) -> None:
    """Every benchmark is named with what became of it, and the page is there."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    command = [sys.executable, str(FOLDER / "_report_runs.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "tracing"], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode in (0, 1), done.stderr  # 1: too slow here, which is no bug
    assert re.search(r"^tracing: (fine|missed a bar), \d+ s$", done.stdout, re.MULTILINE)
    assert f"report: {tmp_path / 'report.html'}" in done.stdout
    assert "trace_off_ns" in (tmp_path / "report.html").read_text()
    done = subprocess.run(
        [*command, "--with", "nobody"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "--with knows lmcache, mooncake, vllm" in done.stderr
