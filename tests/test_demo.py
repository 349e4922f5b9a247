"""The demo end to end on the real model, small."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_demo_stores_in_one_process_and_restores_in_the_next(tmp_path: Path) -> None:
    """Two processes, three links, three ways: blocks found, the same tokens, numbers written."""
    out = tmp_path / "demo.json"
    small = ["--tokens", "600", "--questions", "1", "--answer-tokens", "6"]
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_demo", *small, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "first lookup found 2 of 2 blocks" in " ".join(done.stdout.split())
    value = json.loads(out.read_text())
    assert {"name", "commit", "machine", "settings", "ratios", "results"} <= set(value)
    assert [setting["link"] for setting in value["settings"]] == ["equal", "fast", "slow"]
    assert [layout["tokens_identical"] for layout in value["layouts"]] == [True, True]
    for setting in value["settings"]:
        assert setting["tokens_identical"] is True
        assert set(setting["ttft_s"]) == {"recompute", "load", "planned"}
        assert setting["blocks"]["loaded"] + setting["blocks"]["recomputed"] == 2
        assert setting["link_bytes_per_s"] > 0
