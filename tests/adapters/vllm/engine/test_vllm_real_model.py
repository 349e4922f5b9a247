"""A model that answers: in a module of its own, since a process has one connector at a time."""

from __future__ import annotations

from pathlib import Path

from vllm_harness import BLOCK, engine, equal_link, smollm2, stored, transfer

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"


def test_a_real_model_answers_the_same(tmp_path: Path) -> None:
    """SmolLM2's answer about a text is the same whether computed, loaded, or both at once."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[4] / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(smollm2())(text)["input_ids"][:1300]
    with engine(smollm2(), transfer(tmp_path), scheduler=HYBRID) as llm:
        computed = llm.run(tokens, answer=16)[0]
        llm.forget()
        loaded = llm.run(tokens, answer=16)[0]
    assert (computed.cached, loaded.cached) == (0, 5 * BLOCK)
    assert stored(tmp_path, tokens) == [0, 1, 2, 3, 4]
    link = equal_link(tmp_path)
    with engine(smollm2(), transfer(tmp_path, links={"ssd": link}), scheduler=HYBRID) as llm:
        both = llm.run(tokens, answer=16)[0]
        llm.assert_pool_free()
    assert computed.tokens == loaded.tokens == both.tokens
    assert 0 < both.cached < 5 * BLOCK
