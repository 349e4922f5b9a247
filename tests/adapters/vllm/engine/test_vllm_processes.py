"""Engines in processes of their own: several ranks, and a hand-over from prefill to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, engine, equal_link, prompt, stored, transfer
from vllm_process import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
pytestmark = pytest.mark.timeout(900)  # three ranks start slowly on two cores


def test_three_ranks_restore_alike(tiny: Path, expected: Expected, tmp_path: Path) -> None:
    """Each of three ranks stores and restores its share, and all split a restore alike."""
    prompts = [prompt(seed, 1300) for seed in range(1, 5)]
    right = [expected[tuple(tokens)] for tokens in prompts]
    with Remote(tiny, transfer(tmp_path), scheduler=HYBRID, tensor_parallel_size=3) as ranks:
        first = ranks.run(*prompts, answer=8)
        ranks.forget()
        again = ranks.run(*prompts, answer=8)
    assert [one.tokens for one in first] == [one.tokens for one in again] == right
    assert [one.cached for one in first] == [0] * 4
    assert [one.cached for one in again] == [5 * BLOCK] * 4
    assert stored(tmp_path, prompts[0], ranks=3) == [0, 1, 2, 3, 4]

    link = equal_link(tmp_path, ranks=3)
    kv = transfer(tmp_path, links={"ssd": link, "host": link})
    with Remote(tiny, kv, scheduler=HYBRID, tensor_parallel_size=3) as ranks:
        answers = [ranks.run(tokens, answer=8)[0] for tokens in prompts]
    assert [one.tokens for one in answers] == right
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
