"""KV events: what is stored on this machine beside the engine's own memory, for whoever routes.

vLLM publishes them where its ``kv_events_config`` says so. Consumers follow prompts by vLLM's block
hashes, kvtier stores under its own: a block can be announced once a request that holds it has been
seen here, in this process. What an earlier process stored is therefore announced when a request
first asks for it, and not with made-up hashes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.distributed.kv_events import KVCacheEvent

__all__ = ["KNOWN_BLOCKS_MAX", "MEDIA", "KVEvents"]

KNOWN_BLOCKS_MAX: Final = 1 << 15
"""Blocks of which vLLM's hashes and tokens are kept, about 3 KiB each; the ones that were longest
not asked for are forgotten first, and are announced as removed: at worst a router misses a hit."""
MEDIA: Final = {Tier.HOST: MEDIUM_CPU, Tier.SSD: MEDIUM_STORAGE}
_LOCALITY: Final = "LOCAL"
_KIND: Final = "full_attention"
"""Other models are refused."""


@dataclass(slots=True)
class _Known:
    """What is announced of one block, and in which tiers it was announced last."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: array[int]
    lora: tuple[int, str] | None
    announced: set[Tier] = field(default_factory=set)


class KVEvents:
    """Announces what ``where`` says of the blocks of the requests seen; for the scheduler's thread.

    ``where(hash)``: the tiers in which every rank holds a block. ``page_tokens``: tokens of each of
    vLLM's block hashes; ``block_tokens`` is a multiple of it.
    """

    def __init__(
        self,
        where: Callable[[bytes], Iterable[Tier]],
        *,
        page_tokens: int,
        block_tokens: int,
        group: int = 0,
        known_blocks_max: int = KNOWN_BLOCKS_MAX,
    ) -> None:
        if block_tokens % page_tokens:
            raise ValueError(f"a block of {block_tokens} tokens is not whole pages ({page_tokens})")
        self._where = where
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._group = group
        self._known_blocks_max = known_blocks_max
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._moved: dict[bytes, None] = {}
        self._forgotten: list[_Known] = []

    def note(self, request: Any, hashes: Sequence[bytes], blocks: Iterable[int]) -> None:
        """Take in that ``request`` holds ``blocks`` of the prompt that has these block hashes.

        Blocks beyond vLLM's own hashes (not full yet) are passed over.
        """
        pages = self._block_tokens // self._page_tokens
        own = request.block_hashes
        for block in blocks:
            stop = (block + 1) * pages
            if stop > len(own):
                return
            known = self._known.get(hashes[block])
            if known is None:
                known = self._known[hashes[block]] = _Known(
                    hashes=list(own[block * pages : stop]),
                    parent=own[block * pages - 1] if block else None,
                    tokens=self._tokens(request, block),
                    lora=_lora(request),
                )
                self._moved[hashes[block]] = None
            self._known.move_to_end(hashes[block])
        while len(self._known) > self._known_blocks_max:
            self._forgotten.append(self._known.popitem(last=False)[1])

    def moved(self, hashes: Iterable[bytes]) -> None:
        """Take in that ``where`` may say something else of these blocks by now."""
        self._moved.update((each, None) for each in hashes if each in self._known)

    def cleared(self) -> None:
        """Take in that nothing is stored any more under the hashes seen so far."""
        self._forgotten += self._known.values()
        self._known.clear()
        self._moved.clear()

    def take(self) -> list[KVCacheEvent]:
        """Return what is to be announced since the last call, removals first."""
        removed: list[KVCacheEvent] = []
        stored: list[KVCacheEvent] = []
        for known in self._forgotten:
            removed += [self._removed(known, tier) for tier in MEDIA if tier in known.announced]
        for each in self._moved:
            if each not in self._known:
                continue
            known = self._known[each]
            tiers = {tier for tier in self._where(each) if tier in MEDIA}
            removed += [self._removed(known, t) for t in MEDIA if t in known.announced - tiers]
            stored += [self._stored(known, t) for t in MEDIA if t in tiers - known.announced]
            known.announced = tiers
        self._forgotten.clear()
        self._moved.clear()
        return removed + stored

    def _tokens(self, request: Any, block: int) -> array[int]:
        start = block * self._block_tokens
        return array("I", request.all_token_ids[start : start + self._block_tokens])

    def _stored(self, known: _Known, tier: Tier) -> KVCacheEvent:
        number, name = known.lora or (None, None)
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in known.hashes],
            parent_block_hash=known.parent and maybe_convert_block_hash(known.parent),
            token_ids=known.tokens.tolist(),
            block_size=self._page_tokens,
            lora_id=number,
            medium=MEDIA[tier],
            lora_name=name,
            group_idx=self._group,
            kv_cache_spec_kind=_KIND,
            locality=_LOCALITY,
        )

    def _removed(self, known: _Known, tier: Tier) -> KVCacheEvent:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(each) for each in known.hashes],
            medium=MEDIA[tier],
            group_idx=self._group,
            locality=_LOCALITY,
        )


def _lora(request: Any) -> tuple[int, str] | None:
    lora = request.lora_request
    return None if lora is None else (lora.adapter_id, lora.name)
