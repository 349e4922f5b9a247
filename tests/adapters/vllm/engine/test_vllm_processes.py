"""Engines in processes of their own: several ranks, and a hand-over from prefill to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_harness import BLOCK, engine, equal_link, prompt, stored, transfer
from vllm_process import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"


def test_three_ranks_restore_one_prompt(tiny: Path, expected: Expected, tmp_path: Path) -> None:
    """Each of three ranks stores and restores its share; the answers are one rank's."""
    prompts = [prompt(seed, 1300) for seed in (1, 2)]
    kv = transfer(tmp_path)
    with Remote(tiny, kv, scheduler=HYBRID, tensor_parallel_size=3) as ranks:
        first = ranks.run(*prompts, answer=8)
        ranks.forget()
        again = ranks.run(*prompts, answer=8)
    for answers in (first, again):
        assert [one.tokens for one in answers] == [expected[tuple(tokens)] for tokens in prompts]
    assert [one.cached for one in first] == [0, 0]
    assert [one.cached for one in again] == [5 * BLOCK] * 2
    assert stored(tmp_path, prompts[0], ranks=3) == [0, 1, 2, 3, 4]


def test_three_ranks_split_a_restore_alike(tiny: Path, expected: Expected, tmp_path: Path) -> None:
    """Over a slow link all ranks compute the same heads and load the same tails."""
    prompts = [prompt(seed, 1300) for seed in range(1, 5)]
    with engine(tiny, transfer(tmp_path / "one"), scheduler=HYBRID) as llm:
        llm.run(*prompts)  # to know how long a block takes
    link = equal_link(tmp_path / "one", share=1 / 3)  # a rank loads a third of a block's bytes
    kv = transfer(tmp_path / "three", links={"ssd": link, "host": link})
    with Remote(tiny, kv, scheduler=HYBRID, tensor_parallel_size=3) as ranks:
        ranks.run(*prompts)
        ranks.forget()
        answers = [ranks.run(tokens, answer=8)[0] for tokens in prompts]
    assert [one.tokens for one in answers] == [expected[tuple(tokens)] for tokens in prompts]
    assert any(0 < one.cached < 5 * BLOCK for one in answers)


def test_a_decode_engine_takes_over_from_a_prefill_engine(
    tiny: Path, expected: Expected, tmp_path: Path
) -> None:
    """Of what a running prefill engine has stored, a decode engine computes a block at most."""
    tokens = prompt(1, 1300)
    kv = transfer(tmp_path, role="kv_producer")
    with Remote(tiny, kv, scheduler=HYBRID) as prefill:
        prefill.run(tokens, answer=1)
        kv = transfer(tmp_path, role="kv_consumer")
        with engine(tiny, kv, scheduler=HYBRID) as decode:
            answer = decode.run(tokens, answer=8)[0]
            decode.assert_pool_free()
    assert answer.tokens == expected[tuple(tokens)]
    assert answer.prompt - answer.cached <= BLOCK
