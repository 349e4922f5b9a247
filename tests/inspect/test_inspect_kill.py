from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from harness import run_harness

if TYPE_CHECKING:
    from pathlib import Path

INSPECTORS = int(os.environ.get("KVTIER_TEST_INSPECTORS", "12"))


@pytest.mark.slow
def test_killed_inspectors_leave_nothing(tmp_path: Path) -> None:
    """Inspectors killed at any moment leave no process, no reader and no growth of the index.

    A dozen here; KVTIER_TEST_INSPECTORS=200 for all.
    """
    result = run_harness("inspect/kill_inspectors.py", tmp_path, inspectors=INSPECTORS, seed=1)
    assert result["killed"] >= INSPECTORS // 3, result["stderr"]
    assert result["problems"] == []
    assert (result["keepers_left"], result["readers_left"]) == (0, 0)
    assert result["index_bytes_after"] <= 1.5 * result["index_bytes_before"]
    assert result["names"] == [
        "FORMAT", "LOCK", "index", "segments", "specs", "data.mdb", "lock.mdb",
    ]  # fmt: skip
