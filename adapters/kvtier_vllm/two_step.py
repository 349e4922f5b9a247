"""The overlap of compute and load in two requests, through public interfaces only.

For engines whose scheduler is not ours (another vLLM version, or no ``--scheduler-cls``): a request
for the head of the prompt is computed and not restored, while the tail comes from the SSD into
host memory; the real request then finds the head in the engine's own cache and the tail a copy
away. The engine needs the connector and prefix caching, nothing else; with another connector the
answer is the same and the head is only computed earlier. It costs one more request and one token.

::

    reader = kvtier.open_reader(f"{path}/rank-0-of-1", spec)
    head = two_step.head_tokens(reader.lookup(reader.keys(ids)), reader.costs)
    answer = two_step.complete(post, {"model": name, "prompt": ids, "max_tokens": 64}, head)

The prompt is a list of token ids (a server's ``/tokenize`` gives a conversation's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvtier.planner import split_one_tier
from kvtier_vllm.asked import NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from kvtier import CostModel, Residency

__all__ = [
    "acomplete",
    "agenerate",
    "complete",
    "fraction_tokens",
    "generate",
    "head_params",
    "head_tokens",
]

T = TypeVar("T")


def head_tokens(residency: Residency, costs: CostModel, *, step_blocks_max: int = 1) -> int:
    """Return how many leading tokens to compute while the rest loads; 0: one request is best.

    The split of the stored prefix up to its first hole. While the cost of computing is not known
    it is 0. ``step_blocks_max``: how many blocks the engine computes in one step.
    """
    tiers = residency.tiers
    stored = tiers.index(None) if None in tiers else len(tiers)
    if not stored or not costs.compute.known:
        return 0
    tokens = residency.keys.block_tokens
    compute_s = costs.block_seconds(tokens, 0, stored) + costs.compute.fixed_s / step_blocks_max
    load_s = np.array(
        [costs.load_seconds(tier, residency.block_bytes) for tier in tiers[:stored] if tier]
    )
    blocks, _ = split_one_tier(compute_s, load_s)
    return blocks * tokens


def fraction_tokens(token_ids: Sequence[int], fraction: float, block_tokens: int = 256) -> int:
    """Return ``fraction`` of the prompt's full blocks, in tokens: a split without a cost model."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: {fraction} is not in [0, 1]")
    return int(len(token_ids) // block_tokens * fraction) * block_tokens


def head_params(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return ``kv_transfer_params`` of the head's request: compute it, and fetch what follows."""
    return {NAME: {"restore": False, "prefetch": list(token_ids)}}


def complete(send: Callable[[dict[str, Any]], T], body: Mapping[str, Any], head: int) -> T:
    """Send a completion request as two; ``send`` posts one body and returns the answer.

    ``body`` is that of an OpenAI completion; its ``prompt`` is a list of token ids, of which the
    first ``head`` are computed ahead (0, or all: one request).
    """
    ahead = _head_body(body, head)
    if ahead is not None:
        send(ahead)
    return send(dict(body))


async def acomplete(
    send: Callable[[dict[str, Any]], Awaitable[T]], body: Mapping[str, Any], head: int
) -> T:
    """As ``complete``, for a ``send`` that is awaited."""
    ahead = _head_body(body, head)
    if ahead is not None:
        await send(ahead)
    return await send(dict(body))


def generate(
    llm: Any,
    token_ids: Sequence[int],
    sampling_params: Any,
    head: int,
    *,
    cache_salt: str = "",
    **both: Any,
) -> Any:
    """Return what ``llm.generate`` returns for one prompt, in two requests.

    ``llm`` is a ``vllm.LLM``, ``sampling_params`` the real request's; ``both`` (a ``lora_request``)
    goes to both.
    """
    if 0 < head < len(token_ids):
        ahead = _prompt(token_ids[:head], cache_salt)
        llm.generate([ahead], _one_token(token_ids), use_tqdm=False, **both)
    real = _prompt(token_ids, cache_salt)
    return llm.generate([real], sampling_params, use_tqdm=False, **both)[0]


async def agenerate(
    engine: Any,
    token_ids: Sequence[int],
    sampling_params: Any,
    request_id: str,
    head: int,
    *,
    cache_salt: str = "",
    **both: Any,
) -> AsyncIterator[Any]:
    """Yield what ``engine.generate`` yields for one prompt, in two requests.

    ``engine`` is a ``vllm.v1.engine.async_llm.AsyncLLM``; the head's request is called
    ``<request_id>-head``; ``both`` (a ``lora_request``) goes to both.
    """
    if 0 < head < len(token_ids):
        ahead, one = _prompt(token_ids[:head], cache_salt), _one_token(token_ids)
        async for _ in engine.generate(ahead, one, f"{request_id}-head", **both):
            pass
    real = _prompt(token_ids, cache_salt)
    async for output in engine.generate(real, sampling_params, request_id, **both):
        yield output


def _head_body(body: Mapping[str, Any], head: int) -> dict[str, Any] | None:
    prompt = body["prompt"]
    if isinstance(prompt, str) or not all(isinstance(each, int) for each in prompt):
        raise TypeError("prompt: a list of token ids is wanted (a server's /tokenize gives them)")
    if not 0 < head < len(prompt):
        return None
    kept = {name: body[name] for name in ("model", "cache_salt") if name in body}
    return {
        **kept,
        "prompt": list(prompt[:head]),
        "max_tokens": 1,
        "kv_transfer_params": head_params(prompt),
    }


def _prompt(token_ids: Sequence[int], cache_salt: str) -> dict[str, Any]:
    salt = {"cache_salt": cache_salt} if cache_salt else {}
    return {"prompt_token_ids": list(token_ids), **salt}


def _one_token(token_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": head_params(token_ids)}
    return SamplingParams(max_tokens=1, detokenize=False, extra_args=extra)
