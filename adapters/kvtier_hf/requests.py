"""What a prompt and a ``generate`` call may look like; the rest is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from kvtier_hf.cache import BATCH_ADVICE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

__all__ = ["check_generate", "prompt_ids"]

ASSISTED: Final = (
    "transformers feeds the whole prompt again to verify a draft on a prefilled cache; leave it out"
)
# argument: why the one-call form does not take it
NOT_TAKEN: Final = {
    "cache": "the adapter makes the cache; use prefill and model.generate to handle it yourself",
    "past_key_values": "the adapter makes the cache; use prefill and model.generate to handle it",
    "inputs": "pass the prompt as input_ids",
    "inputs_embeds": "embeddings have no tokens to look up; pass input_ids",
    "position_ids": "positions follow from the prompt; leave them out",
    "assistant_model": ASSISTED,
    "token_type_ids": "token types are not in the block keys; leave them out",
}
# setting of a call or a generation config: (the values that are fine, what to do)
SETTINGS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "num_beams": ((None, 1), BATCH_ADVICE),
    "num_return_sequences": ((None, 1), BATCH_ADVICE),
    "use_cache": ((None, True), "a restored prompt is a cache; leave it out"),
    "prompt_lookup_num_tokens": ((None,), ASSISTED),
    "cache_implementation": ((None,), "the adapter's cache is used; leave it out"),
}


def prompt_ids(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    vocab_size: int,
    tokens_max: int | None,
) -> torch.Tensor:
    """Return a prompt's ids, [n] int64 on the CPU, or raise naming what is wrong."""
    _check_shape(input_ids)
    count = input_ids.shape[1]
    if count == 0:
        raise ValueError("input_ids: the prompt is empty")
    if tokens_max is not None and count > tokens_max:
        raise ValueError(
            f"input_ids: {count} tokens, but the model's max_position_embeddings is {tokens_max}"
        )
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: shape {list(attention_mask.shape)} given, "
                f"{list(input_ids.shape)} as input_ids wanted"
            )
        if not bool(attention_mask.bool().all()):
            raise ValueError("attention_mask: padding is not possible; pass the prompt without it")
    # A copy: the cache remembers these ids whatever becomes of the caller's tensor.
    ids = input_ids.detach()[0].to("cpu", torch.int64, copy=True)
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        raise ValueError(
            f"input_ids[0, {int(outside[0])}] is not in the model's vocabulary of {vocab_size}"
        )
    return ids


def check_generate(
    model: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments of ``generate`` that one sequence on a prefilled cache cannot honour."""
    for name, reason in NOT_TAKEN.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: {reason}")
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    for name, (fine, reason) in SETTINGS.items():
        value = _setting(name, kwargs, configs)
        if value not in fine:
            raise ValueError(f"{name}={value!r}: {reason}")
    _check_padding(input_ids, kwargs, configs)


def _check_shape(input_ids: torch.Tensor) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(
            f"input_ids: {type(input_ids).__name__} given, a tensor wanted "
            '(tokenizer(..., return_tensors="pt").input_ids)'
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids: {input_ids.dtype} given, torch.int64 or torch.int32 wanted")
    if input_ids.ndim != 2:  # noqa: PLR2004 - [1, n]
        raise ValueError(f"input_ids: shape {list(input_ids.shape)} given, [1, n] wanted")
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: batch of {input_ids.shape[0]}: {BATCH_ADVICE}")


def _check_padding(
    input_ids: torch.Tensor, kwargs: Mapping[str, Any], configs: tuple[Any, ...]
) -> None:
    # Without a mask, generate() takes every pad token for padding unless it also ends texts.
    pad = _setting("pad_token_id", kwargs, configs)
    eos = _setting("eos_token_id", kwargs, configs)
    if pad is None or kwargs.get("attention_mask") is not None:
        return
    if pad in (eos if isinstance(eos, (list, tuple)) else [eos]):
        return
    if isinstance(input_ids, torch.Tensor) and bool((input_ids == pad).any()):
        raise ValueError(
            "input_ids: the prompt holds the pad token; take the padding off, or say with "
            "attention_mask=torch.ones_like(input_ids) that it is text"
        )


def _setting(name: str, kwargs: Mapping[str, Any], configs: tuple[Any, ...]) -> Any:
    # generate's own order: the call, the config given to it, the model's config.
    values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)
