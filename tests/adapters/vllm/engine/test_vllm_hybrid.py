"""Restores over links so slow that computing and loading take turns, and what may go wrong then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm_harness import BLOCK, Engine, engine, equal_link, prompt, stored, transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"


@pytest.fixture(scope="module")
def filled(tiny: Path, expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name a store that holds the prompts of 1300 tokens, and no engine has open."""
    path = tmp_path_factory.mktemp("kv")
    with engine(tiny, transfer(path), scheduler=HYBRID) as llm:
        llm.run(*(prompt(seed, 1300) for seed in range(1, 5)))
    assert stored(path, prompt(1, 1300)) == [0, 1, 2, 3, 4]
    return path


@pytest.fixture(scope="module")
def running(tiny: Path, filled: Path) -> Iterator[Engine]:
    """Start an engine over the filled store, which loads about as fast as it computes."""
    link = equal_link(filled)
    kv = transfer(filled, links={"ssd": link, "host": link})
    with engine(tiny, kv, scheduler=HYBRID) as started:
        yield started


@pytest.fixture
def llm(running: Engine) -> Iterator[Engine]:
    """Lend the engine; no block of its pool is held afterwards, and its own cache is empty."""
    yield running
    running.finish()
    running.forget()


def test_heads_are_computed_while_tails_load(llm: Engine, expected: Expected) -> None:
    """Restores both compute and load, and the answers are stock vLLM's."""
    prompts = [prompt(seed, 1300) for seed in range(1, 5)]
    answers = [llm.run(tokens, answer=8)[0] for tokens in prompts]
    assert [one.tokens for one in answers] == [expected[tuple(tokens)] for tokens in prompts]
    assert any(0 < one.cached < 5 * BLOCK for one in answers)


def test_others_compute_meanwhile(llm: Engine, expected: Expected) -> None:
    """Requests with and without stored prefixes, all at once, get the right answers."""
    prompts = [prompt(seed, length) for seed in (1, 2, 3) for length in (1300, 1000)]
    answers = llm.run(*prompts, answer=8)
    assert [one.tokens for one in answers] == [expected[tuple(tokens)] for tokens in prompts]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_at_any_time_gives_everything_back(
    llm: Engine, expected: Expected, steps: int
) -> None:
    """A client that hangs up during its restore leaves no block behind, and harms no other."""
    tokens = prompt(2, 1300)
    name = llm.add(tokens)
    for _ in range(steps):
        llm.step()
    llm.abort(name)
    llm.finish()
    llm.assert_pool_free()
    assert llm.run(tokens, answer=8)[0].tokens == expected[tuple(tokens)]


def test_two_requests_share_one_restore(llm: Engine, expected: Expected) -> None:
    """A second request for what a restore is bringing gets the right answer too."""
    tokens = prompt(3, 1300)
    both = llm.run(tokens, tokens, answer=8)
    assert [one.tokens for one in both] == [expected[tuple(tokens)]] * 2
