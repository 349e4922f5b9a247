"""Restores under vLLM's real scheduler, with ranks that hold names instead of numbers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from scheduler_rig import BLOCK, PAGE, Rig

from kvtier import Tier

if TYPE_CHECKING:
    from pathlib import Path

WAYS = [
    pytest.param({"ahead": ahead, "ranks": ranks}, id=f"{'async' if ahead else 'sync'}-{ranks}")
    for ahead in (False, True)
    for ranks in (1, 3)
]


def prompt(seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50) for _ in range(tokens)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_stored_is_computed_and_loaded(tiny: Path, way: dict[str, object]) -> None:
    """A prompt that was stored comes back, some of it computed and some of it loaded."""
    rig = Rig(tiny, **way)
    first = rig.add(prompt(1, 200))
    rig.run()
    rig.check()
    assert len(rig.ranks[0].stored) == 203 // BLOCK
    rig.scheduler.reset_prefix_cache()
    before = rig.computed_tokens
    again = rig.add(prompt(1, 200))
    rig.run()
    rig.check()
    assert rig.answers[again] == rig.answers[first]
    assert rig.ranks[0].loaded_blocks > 0
    assert rig.computed_tokens - before < 200
