from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prompt_keys

from kvtier import CostModel, Residency, Tier
from kvtier.cost import ComputeCost, LinkCost
from kvtier_vllm import two_step

KEYS = prompt_keys(12)
TOKENS = KEYS.block_tokens
BLOCK_BYTES = 1000
COSTS = CostModel(
    compute=ComputeCost(fixed_s=0.1, token_s=0.01, attention_s=0.001, samples=100),
    host=LinkCost(100_000.0, 0.0, 1),
    ssd=LinkCost(1_000.0, 0.0, 1),
)


def residency(*tiers: Tier | None) -> Residency:
    """Return a lookup's result: what is given, then nothing."""
    return Residency(KEYS, (*tiers, *[None] * (len(KEYS) - len(tiers))), BLOCK_BYTES)


@given(st.lists(st.sampled_from([Tier.HOST, Tier.SSD, None]), max_size=12))
def test_the_split_is_the_best_one_of_the_stored_prefix(tiers: list[Tier | None]) -> None:
    """No other cut of the blocks before the first hole makes both ends meet earlier."""
    stored = [*tiers, None].index(None)
    compute = [COSTS.compute.seconds(each * TOKENS, TOKENS) for each in range(stored)]
    load = [COSTS.load_seconds(tier, BLOCK_BYTES) for tier in tiers[:stored] if tier]

    def seconds(cut: int) -> float:
        return max(sum(compute[:cut]), sum(load[cut:]))

    head = two_step.head_tokens(residency(*tiers), COSTS)
    assert head % TOKENS == 0
    assert seconds(head // TOKENS) == pytest.approx(min(map(seconds, range(stored + 1))))


def test_an_unmeasured_engine_computes_no_head() -> None:
    """A split by a made-up rate could be slower than either way alone."""
    assert two_step.head_tokens(residency(*[Tier.SSD] * 12), CostModel()) == 0


def test_a_fraction_is_of_whole_blocks() -> None:
    """The tail starts where a block does, and an unfinished block is not part of it."""
    assert two_step.fraction_tokens(range(1100), 0.5) == 512
    assert two_step.fraction_tokens(range(1100), 0.2) == 0
    assert two_step.fraction_tokens(range(1100), 1.0) == 1024
    with pytest.raises(ValueError, match=r"fraction: 1\.5"):
        two_step.fraction_tokens(range(1100), 1.5)


BODY = {"model": "m", "prompt": list(range(10)), "max_tokens": 5, "stream": False}


def test_the_head_goes_first_and_the_real_request_is_untouched() -> None:
    """The head is computed for one token, with the model and salt whose cache it is to fill."""
    sent: list[dict[str, Any]] = []
    answer = two_step.complete(
        lambda body: sent.append(body) or len(sent), {**BODY, "cache_salt": "s"}, 4
    )
    assert answer == 2
    assert sent == [
        {
            "model": "m",
            "cache_salt": "s",
            "prompt": [0, 1, 2, 3],
            "max_tokens": 1,
            "kv_transfer_params": {
                "kvtier": {"restore": False, "prefetch": list(range(10))},
            },
        },
        {**BODY, "cache_salt": "s"},
    ]


@pytest.mark.parametrize("head", [0, 10, 11])
def test_nothing_or_everything_ahead_is_one_request(head: int) -> None:
    """A second request would only cost."""
    sent: list[dict[str, Any]] = []
    two_step.complete(sent.append, BODY, head)
    assert sent == [BODY]


async def test_an_awaited_client_is_asked_in_the_same_order() -> None:
    """The real request is not sent before the head's answer is there."""
    sent: list[int] = []

    async def send(body: dict[str, Any]) -> str:
        sent.append(len(body["prompt"]))
        return "answer"

    assert await two_step.acomplete(send, BODY, 4) == "answer"
    assert sent == [4, 10]


@pytest.mark.parametrize("prompt", ["text", ["text", "text"], [[1, 2], [3]]])
def test_a_prompt_that_is_not_one_list_of_token_ids_is_refused(prompt: Any) -> None:
    """It could not be cut where a block begins."""
    with pytest.raises(TypeError, match="list of token ids"):
        two_step.complete(lambda _: None, {"prompt": prompt}, 4)


def engine_of(calls: list[Any]) -> Any:
    """Return an ``LLM`` that notes what it is asked."""

    def generate(prompts: Any, params: Any, **rest: Any) -> list[Any]:
        calls.append((prompts[0], params, rest))
        return [f"output {len(calls)}"]

    return SimpleNamespace(generate=generate)


def test_an_engine_is_asked_for_the_whole_prompt_if_there_is_no_head() -> None:
    """One call, and its one output."""
    calls: list[Any] = []
    found = two_step.generate(engine_of(calls), [1, 2, 3], "params", 0, cache_salt="s", priority=1)
    assert found == "output 1"
    prompt = {"prompt_token_ids": [1, 2, 3], "cache_salt": "s"}
    assert calls == [(prompt, "params", {"use_tqdm": False, "priority": 1})]
