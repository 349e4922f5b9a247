"""A transformers ``Cache`` over preallocated tensors into which stored blocks are loaded in place.

::

    per layer and for K and V:   [1, heads, capacity, width]
                                  |-- length --|-- free --|
    attention sees                [:, :, :length]          views, never an unwritten slot
    block b of the store          [0, :, b*T : (b+1)*T]    T = block_tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvtier import TensorSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier import BlockLayout, PutResult, RestoreReport, Transfer
    from kvtier.layout import PartShape

__all__ = ["KVTierCache"]

GROWTH: Final = 1.5
UNFINISHED: Final = "an earlier forward over this cache did not finish: prefill again"
BATCH_ADVICE: Final = (
    "a KVTierCache holds one sequence: use num_beams=1 and num_return_sequences=1, or one cache "
    "per sequence"
)


class _Promise:
    """How many tokens every layer of one cache will hold once the forward under way is done."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0


class _PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A DynamicLayer that writes in place; ``keys`` and ``values`` are views of what is written."""

    is_compileable = False  # True would make generate() build 4-D masks

    def __init__(
        self, part: PartShape, capacity: int, like: torch.Tensor, promise: _Promise
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        (k_heads, k_width), (v_heads, v_width) = part
        # A tensor made under inference_mode could not be written outside of it any more.
        with torch.inference_mode(mode=False):
            self.buffers = (
                like.new_empty((1, k_heads, capacity, k_width)),
                like.new_empty((1, v_heads, capacity, v_width)),
            )
        self.dtype, self.device, self.batch_size = like.dtype, like.device, 1
        self.is_initialized = True
        self._promise = promise
        self.set_length(0)

    def set_length(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let ``tokens`` count as written; returns the views of them."""
        self.length = tokens
        views = self.buffers[0][:, :, :tokens], self.buffers[1][:, :, :tokens]
        self.keys, self.values = views
        return views

    def move(self, capacity: int) -> None:
        """Go on in new buffers of ``capacity`` tokens; who still reads the old ones keeps them."""
        with torch.inference_mode(mode=False), torch.no_grad():
            new = tuple(
                old.new_empty((*old.shape[:2], capacity, old.shape[3])) for old in self.buffers
            )
            for old, fresh in zip(self.buffers, new, strict=True):
                fresh[:, :, : self.length].copy_(old[:, :, : self.length])
        self.buffers = (new[0], new[1])
        self.set_length(self.length)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers exist from the start."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens behind the others and return views of all; no gradient flows."""
        start, end = self.length, self.length + key_states.shape[-2]
        if end != self._promise.tokens:
            raise ValueError(
                "a forward that the adapter did not see writes to a KVTierCache: run the cache "
                "with the attached model only, and keep the adapter open while the cache is in use"
            )
        if end > self.buffers[0].shape[2]:
            self.move(max(end, int(self.buffers[0].shape[2] * GROWTH)))
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            if states.dtype != buffer.dtype:
                raise ValueError(
                    f"{states.dtype} KV for a cache of {buffer.dtype}: the model's dtype changed "
                    "or autocast is on; attach again, outside of autocast"
                )
            buffer[:, :, start:end].copy_(states.detach())
        return self.set_length(end)

    def get_seq_length(self) -> int:
        """Return how many tokens are written."""
        return self.length


class KVTierCache(Cache):
    """The KV of one sequence, in the layout of a store's blocks; made by ``Adapter.prefill``.

    A full ``transformers`` cache for batch size 1: pass it to ``model(...)`` or ``generate`` of the
    attached model, with the **full** prompt ids. It remembers which tokens it holds, so that
    ``Adapter.put`` can store them. ``report`` is the RestoreReport of the prefill that made it, or
    None where no full block was wanted.
    """

    def __init__(
        self, layout: BlockLayout, device: torch.device, capacity: int, owner: object = None
    ) -> None:
        like = torch.empty(0, dtype=getattr(torch, layout.dtype), device=device)
        self._promise = _Promise()
        self._layers = [
            _PreallocatedLayer(part, capacity, like, self._promise) for part in layout.parts
        ]
        super().__init__(layers=list(self._layers))
        self.layout = layout
        self.device = device
        self.owner = owner  # keeps the adapter, and with it its guard, alive as long as the cache
        self.report: RestoreReport | None = None
        self._prompt: torch.Tensor | None = None
        self._placed = 0  # tokens in place although the last one was taken back to be fed again
        self._tokens: list[torch.Tensor] = []
        self._checks: list[torch.Tensor] = []
        self._lent: list[tuple[Transfer[PutResult], int]] = []

    @property
    def slots(self) -> TensorSlots:
        """The KVSlots of the buffers as they are now; they stay valid when the cache grows."""
        tensors = [buffer[0] for layer in self._layers for buffer in layer.buffers]
        return TensorSlots(self.layout, tensors)

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffers grow."""
        return min(layer.buffers[0].shape[2] for layer in self._layers)

    @property
    def due(self) -> torch.Tensor | None:
        """The prompt's tokens that must be fed next, [n]; None once the prompt is complete."""
        length = self.get_seq_length()
        if self._prompt is None or length >= self._prompt.numel():
            return None
        return self._prompt[length:]

    def token_ids(self) -> torch.Tensor:
        """Return the tokens whose KV is in the buffers, [n] int64 on the CPU; waits for a GPU once.

        That is one more than the length after a prefill of whole blocks, until the next forward.
        Raises ``ValueError`` if a forward broke the rule that token i is at position i, unmasked.
        """
        if self._checks and not bool(torch.stack(self._checks).all()):
            raise ValueError(
                "position_ids or attention_mask of an earlier forward did not continue the cache: "
                "its KV is not that of its tokens; prefill again"
            )
        self._checks.clear()
        lengths = {layer.length for layer in self._layers}
        if lengths != {self._promise.tokens}:
            raise ValueError(UNFINISHED)
        if self._prompt is not None and self._placed > self.get_seq_length():
            return self._prompt[: self._placed].cpu()
        if not self._tokens:
            return torch.empty(0, dtype=torch.int64)
        ids = torch.cat(self._tokens)
        self._tokens = [ids]
        return ids.cpu()

    def start(self, prompt: torch.Tensor, length: int, placed: int) -> None:
        """Begin a prompt with ``placed`` tokens in place, of which ``length`` need not be fed."""
        self._prompt = prompt
        self._placed = placed
        self._tokens = [prompt[:length]]
        self.seek(length)
        self._promise.tokens = length

    def seek(self, tokens: int) -> None:
        """Set every layer's length to ``tokens``: what lies before is, or will be, in place."""
        for layer in self._layers:
            layer.set_length(tokens)

    def promise(self, tokens: int) -> None:
        """Allow one forward that brings every layer to ``tokens``."""
        self._own(self.get_seq_length())
        self._promise.tokens = tokens

    def record(self, ids: torch.Tensor, checks: Sequence[torch.Tensor]) -> None:
        """Allow a forward over ``ids`` [q]; ``checks`` are looked at when the tokens are wanted."""
        lengths = {layer.length for layer in self._layers}
        if lengths != {self._promise.tokens}:
            raise ValueError(UNFINISHED)
        self._placed = 0
        self.promise(self._promise.tokens + ids.numel())
        # A copy, on the device: the caller may reuse its tensor.
        self._tokens.append(ids.detach().to(torch.int64, copy=True))
        self._checks.extend(checks)

    def lend(self, transfer: Transfer[PutResult], tokens: int) -> None:
        """Keep the first ``tokens`` unchanged in the current buffers until ``transfer`` is done."""
        self._lent = [(other, stop) for other, stop in self._lent if not other.done()]
        self._lent.append((transfer, tokens))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; ``tokens_to_remove`` is negative, as for every Cache."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): transformers 5 wants the negative of the number of "
                "tokens to remove"
            )
        length = max(0, self.get_seq_length() + tokens_to_remove)
        if tokens_to_remove:
            self._keep(length)
            # What comes next is the caller's choice now, no longer the rest of the prompt.
            self._prompt = None

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self._keep(0)
        self._prompt = None

    def reorder_cache(self, _beam_idx: torch.Tensor) -> NoReturn:
        """Refuse: beams are several sequences."""
        raise ValueError(BATCH_ADVICE)

    def batch_repeat_interleave(self, _repeats: int) -> NoReturn:
        """Refuse: a batch is several sequences."""
        raise ValueError(BATCH_ADVICE)

    def batch_select_indices(self, _indices: torch.Tensor) -> NoReturn:
        """Refuse: a batch is several sequences."""
        raise ValueError(BATCH_ADVICE)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVTierCache:
        # The recipe for sharing a prefix copies a cache per request: bytes are copied, what refers
        # to the adapter or to copies under way is not.
        copy = KVTierCache(self.layout, self.device, self.capacity, self.owner)
        memo[id(self)] = copy
        length = self.get_seq_length()
        for ours, theirs in zip(self._layers, copy._layers, strict=True):
            for source, target in zip(ours.buffers, theirs.buffers, strict=True):
                target[:, :, :length].copy_(source[:, :, :length])
        copy.seek(length)
        copy.report = self.report
        copy._promise.tokens = self._promise.tokens
        copy._prompt = self._prompt
        copy._placed = min(self._placed, length)  # only the length is copied
        copy._tokens = list(self._tokens)
        copy._checks = list(self._checks)
        return copy

    def _keep(self, length: int) -> None:
        self.seek(length)
        self._promise.tokens = length
        kept, total = [], 0
        for ids in self._tokens:
            kept.append(ids[: length - total])
            total += ids.numel()
            if total >= length:
                break
        self._tokens = kept
        if not length:
            self._checks.clear()

    def _own(self, start: int) -> None:
        # Invariant: a transfer under way never reads a slot that is written. Decoding writes behind
        # every full block, so this moves the cache only after a crop or a reset.
        if any(stop > start and not transfer.done() for transfer, stop in self._lent):
            for layer in self._layers:
                layer.move(layer.buffers[0].shape[2])
            self._lent.clear()
