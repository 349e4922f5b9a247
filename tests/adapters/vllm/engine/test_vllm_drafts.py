"""Answers made with drafts: what was guessed wrong is never stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_harness import BLOCK, Engine, engine, prompt, stored, transfer

if TYPE_CHECKING:
    from pathlib import Path

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
ANSWER = 600


def wrong_drafts(llm: Engine) -> list[int]:
    """Collect how many drafts of each step are rejected from now on."""
    wrong: list[int] = []
    usual = llm.scheduler.make_spec_decoding_stats

    def count(stats: Any, **step: Any) -> Any:
        wrong.append(step["num_draft_tokens"] - step["num_accepted_tokens"])
        return usual(stats, **step)

    llm.scheduler.make_spec_decoding_stats = count
    return wrong


def test_answers_with_drafts_come_back_as_they_were_given(tiny: Path, tmp_path: Path) -> None:
    """The next turn restores the answer's blocks, and goes on as stock vLLM would."""
    first = prompt(1, 300) * 2
    with engine(tiny) as plain:
        (answer,) = plain.run(first, answer=ANSWER)
        second = [*first, *answer.tokens, *prompt(9, 40)]
        (expected,) = plain.run(second, answer=8)
    blocks = (len(first) + ANSWER - 1) // BLOCK
    with engine(tiny, transfer(tmp_path), scheduler=HYBRID, speculative_config=DRAFTS) as llm:
        wrong = wrong_drafts(llm)
        assert llm.run(first, answer=ANSWER)[0].tokens == answer.tokens
        assert sum(wrong), "no draft was wrong: this proves nothing"
        llm.forget()
        (again,) = llm.run(second, answer=8)
        assert again.tokens == expected.tokens
        assert again.cached == blocks * BLOCK
        llm.forget()
    assert stored(tmp_path, second)[:blocks] == list(range(blocks))
