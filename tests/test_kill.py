"""A store outlives the process that uses it, wherever that is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness import run_harness

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    """Killed 200 times while opening, working or closing: nothing flushed is lost, nothing wrong.

    Purged prompts stay away, also where the index is lost too; books and disk use are sound.
    """
    result = run_harness("kill_harness.py", tmp_path, kills=200, seed=1)
    assert result["problems"] == [], result["stderr"]
    assert result["kills"] == 200
    assert min(result[f"kills in {moment}"] for moment in ("open", "work", "close")) > 0
    assert min(result[word] for word in ("flushed", "purged", "indexes lost", "finished")) > 0
