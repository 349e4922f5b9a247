"""A store that is used for long while its disk fails stays right, and stays as it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from harness import run_harness
from soak_harness import GROWTH_MAX, Sample, growth

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = int(os.environ.get("KVTIER_TEST_SOAK_SECONDS", "0"))


def soaked(folder: Path, **options: int) -> dict[str, object]:
    """Soak, and see that nothing was wrong and that everything did happen."""
    result = run_harness("soak_harness.py", folder, **options)
    assert result["problems"] == [], result["stderr"]
    assert min(result[act] for act in ("put", "restore", "leave", "poll", "hold", "awaited")) > 0
    assert min(result[f"blocks {what}"] for what in ("loaded", "recomputed")) > 0
    assert all(sample["pins"] == 0 for sample in result["samples"])
    return result


def test_some_seconds(tmp_path: Path) -> None:
    """A few rounds of everything: right bytes, sound books, nothing left behind."""
    result = soaked(tmp_path, seconds=6, round=1, seed=4)
    assert len(result["samples"]) >= 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SECONDS < 300, reason="KVTIER_TEST_SOAK_SECONDS says for how long, from 300 on")
def test_minutes(tmp_path: Path) -> None:
    """For minutes, through restarts and every fault: memory, descriptors and threads stay flat."""
    result = soaked(tmp_path, seconds=SECONDS, round=4, seed=5)
    assert len(result["samples"]) >= 20
    assert min(result[what] for what in ("lives", "purge", "flush", "readers killed")) > 1
    assert min(result[what] for what in ("bits flip", "index dies", "the disk is full")) > 1


def test_growth_is_the_trend_after_the_warm_up() -> None:
    """What rises in the beginning or jumps once does not count; what goes on rising does."""

    def rise(values: list[float]) -> float:
        zeros = dict.fromkeys(Sample.__dataclass_fields__, 0)
        samples = [
            Sample(**{**zeros, "seconds": float(at), "rss_mib": value})
            for at, value in enumerate(values)
        ]
        return growth(samples, "rss_mib")

    assert rise([]) == rise([5.0]) == 0.0
    assert rise([*range(0, 1000, 50), *[1000.0] * 40]) == 0.0
    assert rise([*[100.0] * 50, 400.0, *[100.0] * 9]) == 0.0
    assert rise([100.0 + at for at in range(60)]) > GROWTH_MAX["rss_mib"]
