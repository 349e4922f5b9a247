"""The pages of vLLM's block pool, by number, as the coordinator wants to see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager

__all__ = ["PoolPages"]


class PoolPages:
    """The pages of the one KV cache group there is, by number."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool

    @property
    def count(self) -> int:
        """How many pages there are."""
        return int(self._pool.num_gpu_blocks)

    @property
    def prefix_cache_empty(self) -> bool:
        """Whether no page can be hit by another request."""
        return len(self._pool.cached_block_hash_to_block) == 0

    def of(self, request_id: str) -> list[int]:
        """Return a request's pages in token order."""
        return [block.block_id for block in self._manager.get_blocks(request_id).blocks[0]]

    def extend(self, request_id: str, tokens: int) -> bool:
        """Give a request pages for its first ``tokens`` tokens; False if too few are free."""
        block_tokens = self._manager.coordinator.single_type_managers[0].block_size
        missing_pages = -(-tokens // block_tokens) - len(self.of(request_id))
        if missing_pages > self._pool.get_num_free_blocks():
            return False
        self._manager.coordinator.allocate_new_blocks(request_id, tokens, tokens)
        return True

    def give_up(self, request_id: str) -> None:
        """Take all of a request's pages from it."""
        self._manager.coordinator.free(request_id)

    def touch(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        self._pool.touch([self._pool.blocks[page] for page in pages])

    def free(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page, the last one first."""
        self._pool.free_blocks([self._pool.blocks[page] for page in reversed(pages)])

    def unshared(self, pages: Sequence[int]) -> bool:
        """Whether any of the pages has no other reference than one."""
        return any(self._pool.blocks[page].ref_cnt == 1 for page in pages)
