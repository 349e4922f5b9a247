"""Engines without the scheduler class: restores that only load, from contiguous prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_harness import BLOCK, engine, prompt, transfer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]


def test_without_the_scheduler_class_it_loads(
    tiny: Path, expected: Expected, tmp_path: Path
) -> None:
    """Under vLLM's own scheduler restores load and compute nothing; all is given back."""
    tokens = prompt(1, 1300)
    with engine(tiny, transfer(tmp_path)) as llm:
        assert type(llm.scheduler).__module__.startswith("vllm.")
        assert llm.run(tokens, answer=8)[0].cached == 0
        llm.forget()
        both = llm.run(tokens, tokens[:1000], answer=8)
        llm.assert_pool_free()
    assert [one.tokens for one in both] == [expected[tuple(tokens)], expected[tuple(tokens[:1000])]]
    assert both[0].cached == 5 * BLOCK
    assert both[1].cached >= 3 * BLOCK  # from the store, or from the engine's cache after the first
