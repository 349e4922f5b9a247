"""Tests with an engine: collected where vLLM is installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import vllm_harness

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

collect_ignore_glob = [] if importlib.util.find_spec("vllm") is not None else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM and what it brings warn; kvtier's own warnings stay errors in the other tests."""
    for item in items:
        if "/adapters/vllm/engine/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name the folder of a model with random weights that starts and computes at once."""
    return vllm_harness.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expected(tiny: Path) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """Map prompts to the tiny model's greedy answers, as vLLM without kvtier gives them."""
    with vllm_harness.engine(tiny) as plain:
        prompts = [vllm_harness.prompt(seed, length) for seed, length in vllm_harness.PROMPTS]
        answers = [plain.run(tokens, answer=8)[0].tokens for tokens in prompts]
    assert len(set(answers)) == len(answers), "answers that are alike prove nothing"
    return {tuple(tokens): answer for tokens, answer in zip(prompts, answers, strict=True)}
