"""Engines without the scheduler class: restores that only load, from contiguous prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, engine, prompt, scatter, transfer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]


HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
PROMPT = prompt(1, 1300)


@pytest.mark.parametrize(
    ("scheduler", "extra"), [(None, {}), (HYBRID, {"hybrid": False})], ids=["vllm's", "ours"]
)
def test_plain_loads(
    tiny: Path, expected: Expected, tmp_path: Path, scheduler: str | None, extra: dict[str, Any]
) -> None:
    """Without the scheduler class, or where it is told not to, restores load and compute nothing.

    All is given back, and of a prompt with a hole the blocks before it are loaded.
    """
    path = tmp_path / "whole"
    with engine(tiny, transfer(path, **extra), scheduler=scheduler) as llm:
        assert llm.run(PROMPT, answer=8)[0].cached == 0
        llm.forget()
        both = llm.run(PROMPT, PROMPT[:1000], answer=8)
        llm.assert_pool_free()
    assert [one.tokens for one in both] == [expected[tuple(PROMPT)], expected[tuple(PROMPT[:1000])]]
    assert both[0].cached == 5 * BLOCK
    assert both[1].cached >= 3 * BLOCK  # from the store, or from the engine's cache after the first

    scatter(path, tmp_path / "hole", PROMPT, [0, 1, 3, 4])
    with engine(tiny, transfer(tmp_path / "hole", **extra), scheduler=scheduler) as llm:
        answer = llm.run(PROMPT, answer=8)[0]
        llm.assert_pool_free()
    assert answer.tokens == expected[tuple(PROMPT)]
    assert answer.cached == 2 * BLOCK
