"""A store outlives the process that uses it, wherever that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("kill_harness.py")


def kill(kills: int, seed: int, folder: Path) -> dict[str, object]:
    """Run the harness in a process of its own; returns its counts and problems."""
    report = folder / "report.json"
    path = [str(HARNESS.parent), str(HARNESS.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, str(HARNESS), "--kills", str(kills), "--seed", str(seed)),
            *("--json", str(report), "--dir", str(folder)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=3600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )
    assert report.exists(), done.stderr[-4000:]
    return json.loads(report.read_text()) | {"stderr": done.stderr[-4000:]}


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    """Killed 200 times while opening, working or closing: nothing flushed is lost, nothing wrong.

    Purged prompts stay away, also where the index is lost too; books and disk use are sound.
    """
    result = kill(200, 1, tmp_path)
    assert result["problems"] == [], result["stderr"]
    assert result["kills"] == 200
    assert min(result[f"kills in {moment}"] for moment in ("open", "work", "close")) > 0
    assert min(result[word] for word in ("flushed", "purged", "indexes lost", "finished")) > 0
