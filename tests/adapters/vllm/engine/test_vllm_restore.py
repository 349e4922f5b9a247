"""One engine over a store without a throttle: what is stored, what comes back, what must not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, Engine, engine, prompt, transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"


@pytest.fixture(scope="module")
def running(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start the module's engine."""
    kv = transfer(tmp_path_factory.mktemp("kv"))
    with engine(tiny, kv, scheduler=HYBRID) as started:
        yield started


@pytest.fixture
def llm(running: Engine) -> Iterator[Engine]:
    """Lend the engine; no block of its pool is held afterwards, and its own cache is empty."""
    yield running
    running.finish()
    running.forget()


def test_a_prompt_comes_back_as_it_was(llm: Engine, expected: Expected) -> None:
    """The first answer is computed, the second is restored, and both are stock vLLM's."""
    tokens = prompt(1, 1300)
    first, again = llm.run(tokens, answer=8)[0], None
    assert first.tokens == expected[tuple(tokens)]
    assert first.cached == 0
    llm.forget()
    again = llm.run(tokens, answer=8)[0]
    assert again.tokens == first.tokens
    assert again.cached == 5 * BLOCK


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute(
    llm: Engine, expected: Expected
) -> None:
    """What is stored in full is restored but for what the engine must compute to go on."""
    tokens = prompt(2, 768)
    llm.run(tokens)
    llm.forget()
    again = llm.run(tokens, answer=8)[0]
    assert again.tokens == expected[tuple(tokens)]
    assert again.cached == 3 * BLOCK - 1


def test_an_answer_is_stored_as_the_prompt_is(llm: Engine) -> None:
    """The next turn of a conversation finds the blocks of the answer before it."""
    tokens = prompt(11, 300)
    answer = llm.run(tokens, answer=300)[0].tokens
    llm.forget()
    turn = [*tokens, *answer, *prompt(12, 20)]
    assert llm.run(turn)[0].cached == 2 * BLOCK


def test_what_the_engine_holds_is_not_restored_again(llm: Engine, expected: Expected) -> None:
    """Behind a local hit that ends inside a block, the blocks after that one are loaded."""
    tokens = prompt(1, 1300)
    llm.run(tokens)
    llm.forget()
    llm.run(tokens[:700])  # its 32-token blocks up to 672 are now the engine's own
    answer = llm.run(tokens, answer=8)[0]
    assert answer.tokens == expected[tuple(tokens)]
    assert answer.cached == 672 + 2 * BLOCK  # of block 2 the rest was recomputed


def test_two_requests_want_one_prefix(llm: Engine, expected: Expected) -> None:
    """Both get the right answer, and what one brings back the other does not load once more."""
    tokens = prompt(3, 1300)
    llm.run(tokens)
    llm.forget()
    both = llm.run(tokens, tokens, answer=8)
    assert [one.tokens for one in both] == [expected[tuple(tokens)]] * 2
    assert all(one.cached >= 5 * BLOCK for one in both)


def test_long_prompts_of_many_steps_are_stored_whole(llm: Engine) -> None:
    """Prompts that are computed in chunks, beside each other, leave every full block behind."""
    prompts = [prompt(seed, 1300) for seed in (21, 22, 23)]
    llm.run(*prompts)
    llm.forget()
    assert [one.cached for one in llm.run(*prompts)] == [5 * BLOCK] * 3


def test_another_salt_is_another_tenant(llm: Engine, expected: Expected) -> None:
    """What was stored under one cache_salt is found under it, and under no other."""
    tokens = prompt(4, 1000)
    llm.run(tokens, salt="anna")
    llm.forget()
    assert [llm.run(tokens, salt=salt)[0].cached for salt in ("bert", None)] == [0, 0]
    llm.forget()
    back = llm.run(tokens, answer=8, salt="anna")[0]
    assert back.cached == 3 * BLOCK
    assert back.tokens == expected[tuple(tokens)]


def test_a_reset_of_the_cache_reaches_the_store(llm: Engine, expected: Expected) -> None:
    """After a reset nothing of before is found; what is stored since is."""
    tokens = prompt(1, 1000)
    llm.run(tokens)
    llm.forget(store_too=True)
    fresh = llm.run(tokens, answer=8)[0]
    assert fresh.cached == 0
    assert fresh.tokens == expected[tuple(tokens)]
    llm.forget()
    assert llm.run(tokens)[0].cached == 3 * BLOCK
