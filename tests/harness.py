"""Run one of the long harnesses in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
STDERR_CHARS: Final = 4000
RUN_S_MAX: Final = 3600
"""A safety net: the caller's own timeout is shorter."""


def run_harness(script: str, folder: Path, **options: int) -> dict[str, Any]:
    """Run ``script`` with its stores in ``folder``; returns its report, and "stderr" (its end)."""
    report = folder / "report.json"
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, HERE / script, *given, "--json", report, "--dir", folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )
    stderr = done.stderr[-STDERR_CHARS:]
    assert report.exists(), f"{script} ended with {done.returncode}: {stderr}"
    return {**json.loads(report.read_text()), "stderr": stderr}
