"""The README's program runs, and its claims about commands hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize("program", PROGRAMS, ids=[str(i) for i in range(len(PROGRAMS))])
def test_program_runs(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every program in the README runs as printed: first a miss, then a full hit."""
    scope: dict[str, object] = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), scope)  # noqa: S102 - our own text
    printed = capsys.readouterr().out
    assert "no block is stored" in printed
    assert "RestoreReport(loaded=3, recomputed=0, failed=0" in printed


def test_there_is_a_program() -> None:
    """The README shows at least one program that is executed here."""
    assert PROGRAMS


@pytest.mark.parametrize("name", ["bench", "demo", "test", "check"])
def test_named_scripts_exist(name: str) -> None:
    """The commands that the README names are there and executable."""
    script = ROOT / "tools" / name
    assert f"tools/{name}" in (ROOT / "README.md").read_text()
    assert script.stat().st_mode & 0o111
