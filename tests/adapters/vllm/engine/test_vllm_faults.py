"""Stores with damage and holes, engines short of room, and engines that schedule ahead."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from vllm_harness import BLOCK, damage, engine, equal_link, prompt, scatter, stored, transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Expected = Mapping[tuple[int, ...], tuple[int, ...]]

HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
PROMPT = prompt(1, 1300)


@pytest.fixture(scope="module")
def filled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name a store that holds the prompt, and that no engine has open."""
    path = tmp_path_factory.mktemp("kv")
    with engine(tiny, transfer(path), scheduler=HYBRID) as llm:
        llm.run(PROMPT)
    assert stored(path, PROMPT) == [0, 1, 2, 3, 4]
    return path


@pytest.mark.parametrize("slow", [(), ("ssd",)], ids=["load", "hybrid"])
def test_damage_and_holes_are_computed(
    tiny: Path, expected: Expected, filled: Path, tmp_path: Path, slow: tuple[str, ...]
) -> None:
    """What is missing in the middle or damaged is computed; the answer is right."""
    scatter(filled, tmp_path, PROMPT, [0, 1, 3, 4])
    damage(tmp_path, PROMPT, 4)
    assert stored(tmp_path, PROMPT) == [0, 1, 3, 4]
    kv = transfer(tmp_path, links=dict.fromkeys(slow, equal_link(filled)))
    with engine(tiny, kv, scheduler=HYBRID) as llm:
        answer = llm.run(PROMPT, answer=8)[0]
        llm.assert_pool_free()
        assert answer.tokens == expected[tuple(PROMPT)]
        assert answer.cached <= 3 * BLOCK
        llm.forget()
        assert llm.run(PROMPT, answer=8)[0].tokens == answer.tokens
    assert stored(tmp_path, PROMPT) == [0, 1, 2, 3, 4]  # and stored again


def test_a_head_in_memory_and_a_tail_on_the_ssd(
    tiny: Path, expected: Expected, filled: Path
) -> None:
    """Blocks in host memory, from an earlier restore, and blocks on the SSD make one prompt."""
    kv = transfer(filled, links={"ssd": equal_link(filled)})
    with engine(tiny, kv, scheduler=HYBRID) as llm:
        llm.run(PROMPT[:600])
        llm.forget()
        answer = llm.run(PROMPT, answer=8)[0]
        llm.assert_pool_free()
    assert answer.tokens == expected[tuple(PROMPT)]


def test_preempted_requests_come_back(tiny: Path, tmp_path: Path) -> None:
    """Requests that an engine short of blocks throws out are restored, with the right answers."""
    prompts = [prompt(seed, 600) for seed in (31, 32, 33)]
    with engine(tiny) as plain:
        right = [plain.run(tokens, answer=150)[0].tokens for tokens in prompts]
    kv = transfer(tmp_path)
    small = {"num_gpu_blocks_override": 60, "max_model_len": 1024}
    with engine(tiny, kv, scheduler=HYBRID, **small) as llm:
        answers = llm.run(*prompts, answer=150)
        llm.assert_pool_free()
        counted = {each.name: each for each in llm.llm.get_metrics()}
    assert [one.tokens for one in answers] == right
    assert counted["vllm:num_preemptions"].value > 0


@contextlib.contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Let the CPU platform schedule asynchronously, which it otherwise turns off."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.__dict__["check_and_update_config"]

    def keep_ahead(config: Any) -> None:
        usual.__func__(CpuPlatform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep_ahead)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = usual


@pytest.mark.parametrize("slow", [(), ("ssd", "host")], ids=["load", "hybrid"])
def test_an_engine_that_schedules_ahead(
    tiny: Path, expected: Expected, filled: Path, slow: tuple[str, ...]
) -> None:
    """With two batches in flight, as on a GPU, answers stay right and all blocks come back."""
    kv = transfer(filled, links=dict.fromkeys(slow, equal_link(filled)))
    ahead = "kvtier_vllm.scheduler.HybridAsyncScheduler"
    with scheduling_ahead(), engine(tiny, kv, scheduler=ahead) as llm:
        assert llm.core.batch_queue_size == 2
        prompts = [PROMPT, prompt(2, 1000), PROMPT[:1000]]
        for _ in range(2):
            answers = llm.run(*prompts, answer=8)
            assert [one.tokens for one in answers] == [expected[tuple(one)] for one in prompts]
            llm.forget()


def test_aborts_while_scheduling_ahead(tiny: Path, expected: Expected, filled: Path) -> None:
    """An abort between two batches in flight gives everything back."""
    kv = transfer(filled, links=dict.fromkeys(("ssd", "host"), equal_link(filled)))
    ahead = "kvtier_vllm.scheduler.HybridAsyncScheduler"
    with scheduling_ahead(), engine(tiny, kv, scheduler=ahead) as llm:
        for steps in range(5):
            name = llm.add(PROMPT)
            for _ in range(steps):
                llm.step()
            llm.abort(name)
            llm.finish()
            llm.forget()
        assert llm.run(PROMPT, answer=8)[0].tokens == expected[tuple(PROMPT)]
