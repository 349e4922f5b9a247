"""Bytes that change under an open store are a miss at worst."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness import run_harness

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_three_hundred_flips_and_thirty_reopens(tmp_path: Path) -> None:
    """Flipped bytes of segments and index: right bytes or a miss, no dead process, no lost block.

    A flip in a record is noticed, one in a slot's padding costs nothing, and an index that is
    damaged under the store is made anew.
    """
    result = run_harness("flip_harness.py", tmp_path, flips=300, reopens=30, seed=3)
    assert result["problems"] == [], result["stderr"]
    assert result["flips"] == 300
    assert result["reopens"] == 30
    assert result["blocks dropped"] <= 3  # while the index is made anew, a write may fail
    assert min(result[f"in {what}"] for what in ("a record", "padding", "the index")) > 0
