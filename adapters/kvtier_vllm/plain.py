"""Restores under any of vLLM's schedulers: loaded while their request is parked, then over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_vllm.holds import Pages
    from kvtier_vllm.restore import Restore
    from kvtier_vllm.tracked import EngineRequest

__all__ = ["settled"]


def settled(request: EngineRequest, restore: Restore, pages: Pages, now: float) -> bool:
    """Let a request go on once its load is over, as far as that came; whether it is over.

    After a failure the rest is loaded no more, since the engine computes from there to the end.
    """
    restore.woke(now)
    if restore.failed and not restore.finished:
        restore.expire(now)
    if restore.loads_under_way or restore.waits:
        return False
    request.num_computed_tokens = restore.position
    if not restore.position:
        pages.give_up(request.request_id)  # the engine looks it up again, as a new one
    return True
