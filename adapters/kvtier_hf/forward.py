"""Running a model's body: what its arguments are called, and which device it is fed on."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtier.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["CACHE_NAMES", "Body"]

CACHE_NAMES = ("cache", "past_key_values")
"""The argument that takes a cache: its name since transformers 5.24, and the one before."""


@dataclass(frozen=True, slots=True)
class Body:
    """A causal model without its head: tokens in, KV into the cache, no logits."""

    module: torch.nn.Module
    arguments: tuple[str, ...]
    cache_name: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Body:
        """Find the body by running one token; ``UnsupportedModel`` if nothing takes a cache."""
        # OPT's head calls the decoder within its base model, so what is called has to be seen.
        decoder = model.get_decoder()  # type: ignore[no-untyped-call]
        for module in (decoder, model.base_model, model):
            arguments = tuple(inspect.signature(module.forward).parameters)
            for name in CACHE_NAMES:
                if name in arguments and _is_called(module, model):
                    return cls(module, arguments, name)
        raise UnsupportedModel(
            f"{type(model).__name__}.forward takes none of {', '.join(CACHE_NAMES)}: its state is "
            "not in a transformers Cache"
        )

    def run(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Append the tokens ``ids`` [q] to ``cache``; returns the last output [1, q, ...]."""
        with torch.no_grad():
            output = self.module(
                input_ids=ids.unsqueeze(0), use_cache=True, **{self.cache_name: cache}
            )
        states: torch.Tensor = output[0]
        return states


def _is_called(module: torch.nn.Module, model: PreTrainedModel) -> bool:
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        with torch.no_grad():
            model(torch.zeros((1, 1), dtype=torch.int64, device=model.device))
    finally:
        hook.remove()
    return bool(calls)
