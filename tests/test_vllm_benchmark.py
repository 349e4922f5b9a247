from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the conversations, as the benchmark does: from its own folder."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_vllm_turns")


@pytest.fixture
def engines(turns: Any) -> Any:
    """Import what the parts share."""
    return importlib.import_module("_vllm_engines")


def test_without_vllm_it_says_what_to_do(tmp_path: Path) -> None:
    """It neither fails in a child's depths nor measures nothing."""
    pytest.importorskip("rich")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "vllm_ttft.py"), "--python", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "tools/test" in done.stderr
    assert "--python" in done.stderr
    assert "Traceback" not in done.stderr


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(1, 300)), max_size=8))
def test_an_ideal_cache_has_exactly_the_blocks_of_prefixes_seen(
    talks: list[tuple[tuple[int, ...], int]],
) -> None:
    """A block counts only behind the same tokens, and an answer's last token has no KV."""
    sys.path.insert(0, str(FOLDER))
    try:
        cache = importlib.import_module("_vllm_turns").IdealCache()
    finally:
        sys.path.remove(str(FOLDER))
    seen: list[list[int]] = []
    for blocks, answered in talks:
        ids = [each for block in blocks for each in [block] * 256]
        wanted = 0
        for stop in range(256, len(ids) + 1, 256):
            wanted += any(other[:stop] == ids[:stop] for other in seen)
        assert cache.hits(ids) == wanted
        answer = [9] * answered
        cache.keep(ids, answer)
        seen.append([*ids, *answer[:-1]])


def test_turns_come_round_by_round_and_none_is_alike(turns: Any) -> None:
    """Every conversation's first turn comes before any second one."""
    found = turns.turns_of(3, 2)
    assert [(each.conversation, each.number) for each in found] == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1),
    ]  # fmt: skip
    assert len({each.says for each in found}) == 6


def test_conversations_grow_by_what_was_answered(turns: Any, engines: Any) -> None:
    """The next turn's prompt is all that was said; the engine is another one from half-way on."""
    asked: list[tuple[int, list[int]]] = []
    stopped: list[Any] = []

    class Engine:
        def __init__(self, number: int) -> None:
            self.number = number

        def serve(self, requests: list[dict[str, Any]]) -> list[Any]:
            asked.append((self.number, requests[0]["ids"]))
            return [engines.Served((1, 2), (0.25, 0.5), 0)]

        def counts(self) -> dict[str, float]:
            return {'prompt_blocks{source="local"}': 1.0, 'prompt_blocks{source="missing"}': 5.0}

    made = iter(range(9))
    rounds = turns.turns_of(2, 2)
    session = turns.converse(
        rounds, lambda: Engine(next(made)), stopped.append, engines.Verdicts(), lambda: None
    )
    assert [number for number, _ in asked] == [0, 0, 1, 1]
    assert [engine.number for engine in stopped] == [0, 1]
    first, later = asked[0][1], asked[2][1]
    assert later == [*first, 1, 2, *rounds[2].says]
    assert session.hits == 2  # one in each engine's life
    assert session.ideal_hits == 2 * 3  # the system prompt's two blocks, for all but the first
    assert session.ttft_s == [0.25] * 4


def test_a_wrong_token_and_a_leak_miss_their_bars(engines: Any) -> None:
    """Stock vLLM says what is right, and is held to it as well."""
    verdicts = engines.Verdicts()
    served = engines.Served
    verdicts.stock([1, 2], served((5, 6, 7, 8, 9), (), 0))
    verdicts.same([1, 2], served((5, 6, 7, 8, 9), (), 0))
    assert [ratio.verdict for ratio in verdicts.ratios()] == ["met", "met"]
    verdicts.same([1, 2], served((5, 6, 0, 8), (), 0))
    verdicts.leaked_blocks += 1
    assert [ratio.verdict for ratio in verdicts.ratios()] == ["missed", "missed"]


def test_nothing_compared_decides_nothing(engines: Any) -> None:
    """A run whose answers nobody looked at has not met the bar."""
    wrong, _ = engines.Verdicts().ratios()
    assert wrong.verdict == "not decided"
