"""A request as the scheduler's side sees it, and the keys of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvtier import BlockKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier import KVSpec
    from kvtier_vllm.asked import Asked
    from kvtier_vllm.restore import Restore

__all__ = ["EngineRequest", "Tracked", "confirmed"]


class EngineRequest(Protocol):
    """What is consumed of vLLM's request."""

    request_id: str
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    prefill_stats: Any
    status: Any

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was accepted of the answer."""


@dataclass(slots=True)
class Tracked:
    """A request that has not finished; the coordinator's."""

    request: EngineRequest
    tenant: str
    adapter: str
    refused: str
    """Why it is neither restored nor saved; empty if it may be."""
    asked: Asked
    admitted: bool = False
    counted: bool = False
    keys: BlockKeys | None = None
    saved: int = 0
    """Blocks before it are stored, or on their way."""
    stale: bool = False
    """Computed under weights that are not loaded any more: not to be stored."""
    deferred_at: float | None = None
    local: int = 0
    """Tokens that the engine held at admission."""
    planned: Restore | None = None
    restore: Restore | None = None

    def known_keys(self, spec: KVSpec) -> BlockKeys:
        """Return the keys of all known tokens."""
        request, keys = self.request, self.keys
        if keys is None:
            keys = self.keys_of(spec, list(request.all_token_ids))
        elif request.num_tokens - len(keys) * spec.block_tokens >= spec.block_tokens:
            keys = keys.extend(list(request.all_token_ids[keys.num_tokens :]))
        self.keys = keys
        return keys

    def forget_keys(self) -> None:
        """Hash anew, and plan anew: what was known is of other weights, or is not stored now."""
        self.keys = self.planned = None

    def keys_of(self, spec: KVSpec, tokens: Sequence[int]) -> BlockKeys:
        """Return the keys of other tokens, for the same client and adapter."""
        return BlockKeys.of(spec, list(tokens), tenant=self.tenant, adapter=self.adapter)


def confirmed(keys: BlockKeys, blocks: int) -> BlockKeys:
    """Return the keys of the first blocks alone, without the tokens of an unfinished one."""
    return BlockKeys(
        keys.namespace,
        keys.block_tokens,
        keys.root,
        keys.tenant_digest,
        keys.hashes[:blocks],
        b"",
    )
