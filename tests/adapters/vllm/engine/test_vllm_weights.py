"""Weights that change while an engine runs: what was stored under the old ones is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_harness import BLOCK, engine, prompt, transfer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
PROMPT = prompt(1, 1300)


def train(model: Any) -> None:
    """Write over a weight in place, past everything that torch or vLLM would notice."""
    weight = model.model.embed_tokens.weight
    weight.data.copy_(weight.data.flip(0))


def test_weights_written_over_without_a_reset(
    tiny: Path, expected: Expected, tmp_path: Path
) -> None:
    """Nothing of before is restored, though nobody reset the connector; nothing wrong is stored.

    Once the reset that is asked for then is done, prompts are stored and restored again.
    """
    with engine(tiny) as stock:
        stock.llm.apply_model(train)
        wanted = stock.run(PROMPT, answer=8)[0].tokens
    assert wanted != expected[tuple(PROMPT)]
    with engine(tiny, transfer(tmp_path), scheduler=HYBRID) as llm:
        llm.run(PROMPT)
        llm.forget()
        llm.llm.apply_model(train)
        answer = llm.run(PROMPT, answer=8)[0]
        assert answer.cached < BLOCK
        assert answer.tokens == wanted
        llm.forget()
        assert llm.run(PROMPT, answer=8)[0].tokens == wanted
        llm.forget()
        answer = llm.run(PROMPT, answer=8)[0]
        assert answer.cached >= BLOCK
        assert answer.tokens == wanted
        llm.assert_pool_free()
    with engine(tiny, transfer(tmp_path), scheduler=HYBRID) as later:
        assert later.run(PROMPT, answer=8)[0].tokens == expected[tuple(PROMPT)]


def test_weights_loaded_again(tiny: Path, expected: Expected, tmp_path: Path) -> None:
    """After vLLM's own reload and reset a prompt is computed, stored and restored afresh."""
    with engine(tiny, transfer(tmp_path), scheduler=HYBRID) as llm:
        llm.run(PROMPT)
        before = llm.worker._side()._engine._spec.weights
        llm.llm.collective_rpc("reload_weights")
        llm.forget(store_too=True)
        llm.settle()
        llm.run(PROMPT)
        assert llm.worker._side()._engine._spec.weights != before  # packed: cannot be read
        llm.forget()
        answer = llm.run(PROMPT, answer=8)[0]
        assert answer.cached >= BLOCK
        assert answer.tokens == expected[tuple(PROMPT)]
        llm.assert_pool_free()
