"""tools/test: which arguments reach which environment, and what its exit status says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

TOOLS = Path(__file__).parents[1] / "tools"

# What spreads all tests over two cores; a few that are named run in one process.
SPREAD = ["-n", "2", "--dist", "worksteal"]
BY_FILE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

# Stands in for an environment's python: notes what it was asked, answers as it was told to.
PYTHON = """#!/usr/bin/env bash
if [[ $2 == pytest ]]; then
    printf '%s\\n' "${{@:3}}" >{root}/{name}.asked
    exit "$(cat {root}/{name}.answers 2>/dev/null || echo 0)"
fi
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Lay a repository with the real tools/test, and environments that only take notes."""
    for folder in ("tools", "tests/adapters/vllm/engine", "tests/adapters/hf"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("tests/test_a.py", "tests/adapters/vllm/engine/test_b.py"):
        (tmp_path / file).touch()
    shutil.copy(TOOLS / "test", tmp_path / "tools" / "test")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nproc").write_text("#!/bin/sh\necho 2\n")
    (tmp_path / "bin" / "nproc").chmod(0o755)
    for name in ("main", "engine"):
        (tmp_path / name).write_text(PYTHON.format(root=tmp_path, name=name))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tools/_venv").write_text(f"cd {tmp_path}; python={tmp_path}/main\n")
    (tmp_path / "tools/_venv-vllm").write_text(f"python_vllm={tmp_path}/engine; no_vllm=\n")
    return tmp_path


@pytest.fixture
def call(root: Path) -> Callable[..., tuple[int, str]]:
    """Call tools/test; return its status and its last line."""

    def call_with(*arguments: str, cwd: Path = root) -> tuple[int, str]:
        done = subprocess.run(
            [str(root / "tools/test"), *arguments],
            cwd=cwd,
            env={**os.environ, "PATH": f"{root / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return call_with


def asked(root: Path, name: str) -> list[str] | None:
    """Return what an environment was asked to run, paths from the root on; None if nothing."""
    note = root / f"{name}.asked"
    if not note.exists():
        return None
    given = [line.removeprefix(f"{root}/") for line in note.read_text().splitlines() if line]
    return given[2:] if name == "engine" else given  # after -o and its value


@pytest.mark.parametrize(
    ("arguments", "main", "engine"),
    [
        ([], SPREAD, [*BY_FILE, "tests/adapters/vllm"]),
        (["-x"], [*SPREAD, "-x"], [*BY_FILE, "-x", "tests/adapters/vllm"]),
        (["tests/test_a.py"], ["tests/test_a.py"], None),
        (["tests/test_a.py::test_x[a-b]"], ["tests/test_a.py::test_x[a-b]"], None),
        (
            ["-x", "tests/adapters/vllm/engine/test_b.py::test_y"],
            None,
            ["-x", "tests/adapters/vllm/engine/test_b.py::test_y"],
        ),
        (["tests/adapters"], ["tests/adapters"], ["tests/adapters/vllm"]),
        (["tests"], ["tests"], ["tests/adapters/vllm"]),
        # The value of an option is no path, even where a file has its name.
        (
            ["-k", "tests"],
            [*SPREAD, "-k", "tests"],
            [*BY_FILE, "-k", "tests", "tests/adapters/vllm"],
        ),
        (["--no-vllm"], SPREAD, None),
        (["--vllm", "tests/test_a.py"], ["tests/test_a.py"], None),
    ],
)
def test_arguments_go_where_they_belong(
    root: Path,
    call: Callable[..., tuple[int, str]],
    arguments: list[str],
    main: list[str] | None,
    engine: list[str] | None,
) -> None:
    """A path selects tests in its own environment; everything else goes to both."""
    status, _ = call(*arguments)
    assert status == 0
    assert (asked(root, "main"), asked(root, "engine")) == (main, engine)


def test_paths_are_the_callers(root: Path, call: Callable[..., tuple[int, str]]) -> None:
    """A relative path is meant from where the command is called."""
    call("test_a.py", cwd=root / "tests")
    assert asked(root, "main") == ["tests/test_a.py"]
    assert asked(root, "engine") is None


@pytest.mark.parametrize(
    ("main", "engine", "status"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 1, 2), (5, 0, 0), (5, 5, 5)]
)
def test_worse_of_both_results_is_the_status(
    root: Path, call: Callable[..., tuple[int, str]], main: int, engine: int, status: int
) -> None:
    """One failed run fails the whole; a run that selects no test does not, unless both do."""
    (root / "main.answers").write_text(str(main))
    (root / "engine.answers").write_text(str(engine))
    got, output = call()
    assert got == status
    assert ".venv:" in output
    assert ".venv-vllm:" in output


@pytest.mark.parametrize(("flag", "status"), [((), 0), (("--vllm",), 1)])
def test_machine_without_vllm_says_why(
    root: Path, call: Callable[..., tuple[int, str]], flag: tuple[str, ...], status: int
) -> None:
    """Where vLLM cannot be had the run is skipped with the reason; --vllm makes that a failure."""
    (root / "tools/_venv-vllm").write_text("no_vllm='of the weather'\n")
    got, output = call(*flag)
    assert got == status
    assert "skipped, no vLLM here: of the weather" in output
    assert asked(root, "engine") is None
