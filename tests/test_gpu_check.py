from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_gpu_check import model_cases, store_cases, vllm_cases
from kvtier_gpu_check.__main__ import NO_CUDA, main, write
from kvtier_gpu_check.case import CannotRun, Case, Outcome, Place, check, missing, table
from kvtier_vllm_run.process import Served

ON_CPU = {case.name: case for case in (*store_cases.CASES, *model_cases.CASES)}


def proven(place: Place) -> dict[str, Any]:
    """Return what a case measures."""
    return {"rate": 0.5}


def refused(place: Place) -> dict[str, Any]:
    """Say that nothing can be proven here."""
    raise CannotRun("too small a GPU")


def broken(place: Place) -> dict[str, Any]:
    """Find a fault."""
    raise AssertionError("wrong bits")


def run(*cases: Case, small: bool = False, **settings: Any) -> list[Outcome]:
    """Run cases where nothing is missing, with a clock that each look moves on by a second."""
    seconds = count()
    place = Place(Path("/nowhere"), small=small)
    seams = {"clock": lambda: float(next(seconds)), "absent": lambda names: [], **settings}
    return check(cases, place, say=lambda line: None, **seams)


def test_each_case_ends_in_a_verdict_and_none_ends_the_run() -> None:
    """A fault, a case that cannot run and one below its bar say so, each in its own way."""
    outcomes = run(
        Case("broken", broken, 1),
        Case("refused", refused, 1),
        Case("short", proven, 1, low={"rate": 0.8}),
        Case("good", proven, 1, low={"rate": 0.5}),
    )
    assert [(o.name, o.verdict, o.reason) for o in outcomes] == [
        ("broken", "failed", "AssertionError: wrong bits"),
        ("refused", "skipped", "too small a GPU"),
        ("short", "failed", "rate is 0.50, at least 0.8 is wanted"),
        ("good", "passed", ""),
    ]
    assert outcomes[2].values == {"rate": 0.5}
    assert table(outcomes).endswith("1 passed, 2 failed, 1 skipped")


def test_a_value_that_is_no_number_misses_its_bar() -> None:
    """Not a number is less than nothing: it must not pass for want of comparing."""
    (outcome,) = run(Case("odd", lambda place: {"rate": float("nan")}, 1, low={"rate": 0.1}))
    assert outcome.verdict == "failed"


def test_a_small_run_is_held_to_no_bar() -> None:
    """Its cases are too short to say anything about rates."""
    (outcome,) = run(Case("short", proven, 1000, low={"rate": 0.8}), small=True)
    assert outcome.verdict == "passed"


def test_a_case_for_which_no_time_is_left_says_so() -> None:
    """A case begun too late would be cut off, and prove nothing."""
    outcomes = run(Case("first", proven, 5), Case("second", proven, 9), budget_s=10)
    assert [outcome.verdict for outcome in outcomes] == ["passed", "skipped"]
    assert "--only" in outcomes[1].reason


def test_what_is_not_installed_is_named() -> None:
    """A skipped case says what to install."""
    outcomes = run(Case("a", broken, 1, needs=("json", "no_such_module")), absent=missing)
    assert [(o.verdict, o.reason) for o in outcomes] == [
        ("skipped", "not installed: no_such_module")
    ]


@pytest.mark.parametrize("name", ["bits", "layers", "restore_8b"])
def test_what_needs_no_gpu_of_a_case_holds_without_one(name: str, tmp_path: Path) -> None:
    """The cases are run here on the CPU, small, so that they are not written blindly."""
    if name == "restore_8b":
        pytest.importorskip("transformers")
    place = Place(tmp_path, "cpu", small=True)
    (outcome,) = check([ON_CPU[name]], place, clock=time.monotonic, say=lambda line: None)
    assert outcome.verdict == "passed", outcome.reason


def test_what_only_a_gpu_has_is_skipped_on_a_cpu(tmp_path: Path) -> None:
    """Neither a crash nor a number of nothing."""
    place = Place(tmp_path, "cpu", small=True)
    cases = [ON_CPU[name] for name in ("pinned", "rates", "overlap", "gap")]
    outcomes = check(cases, place, clock=time.monotonic, say=lambda line: None)
    assert {outcome.verdict for outcome in outcomes} == {"skipped"}
    assert all("cpu has no streams" in outcome.reason for outcome in outcomes)


def test_a_python_without_vllm_skips_the_second_part(tmp_path: Path) -> None:
    """The reason names the interpreter and the option."""
    place = Place(tmp_path, small=True, python=str(tmp_path / "no-python"))
    outcomes = check(vllm_cases.CASES, place, clock=time.monotonic, say=lambda line: None)
    assert {outcome.verdict for outcome in outcomes} == {"skipped"}
    assert all("--python" in outcome.reason for outcome in outcomes)


def test_the_gaps_of_those_who_decode_are_pooled() -> None:
    """The wait for the first token after the others' arrival is one of them."""
    others = [Served((1, 2), (0.5, 0.6), 0), Served((1, 2, 3), (0.1, 0.2, 0.3), 0)]
    assert vllm_cases.p99(others) == pytest.approx(0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither success nor failure: nothing was checked."""
    assert main([]) == NO_CUDA == 3
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_script_is_the_check() -> None:
    """It runs from anywhere, in the Python that it is told to."""
    script = Path(__file__).parents[1] / "tools" / "gpu-check"
    done = subprocess.run(
        [str(script)], env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}, cwd="/",
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")


def test_results_are_written_as_json(tmp_path: Path) -> None:
    """With the machine and every value, whatever its type."""
    outcome = Outcome("case", "passed", 1.0, values={"path": Path("/x"), "rate": 0.5})
    where = tmp_path / "out.json"
    write(str(where), {"torch": [outcome]}, machine={"gpu": "none"}, small=True)
    value = json.loads(where.read_text())
    assert value["machine"] == {"gpu": "none"}
    assert value["parts"]["torch"][0]["values"] == {"path": "/x", "rate": 0.5}
