"""Closes the ways in which a prefilled cache silently gives wrong text, before a forward runs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtier_hf.cache import BATCH_ADVICE, KVTierCache
from kvtier_hf.forward import CACHE_NAMES

if TYPE_CHECKING:
    from kvtier_hf.forward import Body

__all__ = ["ForwardGuard"]

FULL_PROMPT: Final = (
    "pass the FULL prompt ids together with the cache that prefill made of them, once per prefill"
)
# Arguments of a body that cannot change KV beyond what is checked here.
KNOWN: Final = frozenset({
    *CACHE_NAMES, "attention_mask", "cache_position", "input_ids", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "use_cache",
})  # fmt: skip


class ForwardGuard:
    """A forward pre-hook on a body; looks only at forwards over its adapter's caches.

    Refuses with ``ValueError`` what would give wrong KV without an error: a prompt fed twice or in
    part, a batch, masked or embedded tokens, positions that do not continue the cache. Nothing here
    waits for a GPU while single tokens are decoded: what cannot be seen without waiting is recorded
    with the tokens and looked at before anything is stored.
    """

    def __init__(self, body: Body) -> None:
        # Not the body itself: the module holds this hook, and a cycle would keep both alive.
        self._arguments = body.arguments
        self._module = weakref.ref(body.module)
        self.driving = False  # True while the adapter itself runs the body

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Check one forward and record its tokens; changes no argument."""
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        if not isinstance(cache, KVTierCache) or self.driving:
            return
        owner = getattr(cache.owner, "guard", None)
        if owner is not self:
            # The cache is scratch of a probe, or of another adapter whose own guard looks at it.
            if owner is not None and owner.module is not module:
                raise ValueError("cache: made for another model, prefill with this one")
            return
        ids = _input_ids(given, cache)
        checks = [*_mask_checks(given, cache, ids), *_position_checks(given, cache, ids)]
        due = cache.due
        if due is not None:
            _check_due(ids[0], due)
        if checks and (due is not None or ids.shape[1] > 1 or ids.device.type == "cpu"):
            # Not a decoded token of a GPU run, so waiting is fine and the caller learns at once.
            if not bool(torch.stack(checks).all()):
                raise ValueError(
                    f"position_ids or attention_mask do not continue the {cache.get_seq_length()} "
                    f"cached tokens without padding: {FULL_PROMPT}, and attention_mask=ones if the "
                    "prompt holds the pad token (generate() takes it for padding)"
                )
            checks = []
        cache.record(ids[0], checks)

    @property
    def module(self) -> torch.nn.Module | None:
        """The body this guard belongs to."""
        return self._module()


def _input_ids(given: dict[str, Any], cache: KVTierCache) -> torch.Tensor:
    for name, value in given.items():
        if value is not None and name not in KNOWN:
            raise ValueError(f"{name} changes KV in a way the block keys do not hold: leave it out")
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:  # noqa: PLR2004 - [1, q]
        raise ValueError("input_ids of shape [1, q] are wanted with a KVTierCache")
    if ids.shape[0] != 1:
        raise ValueError(f"batch of {ids.shape[0]}: {BATCH_ADVICE}")
    if ids.shape[1] == 0:
        raise ValueError(
            f"no token to feed after the {cache.get_seq_length()} cached ones: {FULL_PROMPT}"
        )
    if given.get("use_cache") is False:
        raise ValueError("use_cache=False with a KVTierCache: leave it out")
    return ids


def _mask_checks(
    given: dict[str, Any], cache: KVTierCache, ids: torch.Tensor
) -> list[torch.Tensor]:
    mask = given.get("attention_mask")
    if mask is None:
        return []
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:  # noqa: PLR2004 - [1, tokens]
        raise ValueError("attention_mask: only a 2-D mask of ones is possible with a KVTierCache")
    total = cache.get_seq_length() + ids.shape[1]
    if mask.shape != (1, total):
        raise ValueError(
            f"attention_mask: shape {list(mask.shape)}, but {cache.get_seq_length()} cached and "
            f"{ids.shape[1]} new tokens make [1, {total}]: {FULL_PROMPT}"
        )
    return [mask.bool().all().to(cache.device)]


def _position_checks(
    given: dict[str, Any], cache: KVTierCache, ids: torch.Tensor
) -> list[torch.Tensor]:
    positions = given.get("position_ids")
    if positions is None:
        return []
    start, count = cache.get_seq_length(), ids.shape[1]
    if positions.numel() != count:
        raise ValueError(
            f"position_ids: shape {list(positions.shape)} for {count} new tokens; leave them out"
        )
    if count == 1:
        return [(positions == start).all().to(cache.device)]
    expected = torch.arange(start, start + count, device=positions.device)
    return [(positions.reshape(-1) == expected).all().to(cache.device)]


def _check_due(ids: torch.Tensor, due: torch.Tensor) -> None:
    # More tokens than due may follow: assisted decoding verifies its draft in the same forward.
    count = min(ids.numel(), due.numel())
    if not torch.equal(ids[:count].to(due.device), due[:count]):
        raise ValueError(
            f"the tokens fed are not the {due.numel()} that follow the cached ones in the prompt: "
            f"{FULL_PROMPT}"
        )
