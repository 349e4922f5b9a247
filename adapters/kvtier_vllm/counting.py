"""What is counted of a request's admission and of its restore's end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_vllm.mirror import Mirror
    from kvtier_vllm.restore import Restore
    from kvtier_vllm.tally import Tally
    from kvtier_vllm.tracked import Tracked

__all__ = ["count_blocks", "count_restore", "count_sources", "note_cached"]


def count_sources(tally: Tally, tracked: Tracked, planned: Restore | None, mirror: Mirror) -> None:
    """Count where a request's full blocks come from, once."""
    keys = tracked.keys
    if keys is None or tracked.counted or not mirror.ready:
        return
    tracked.counted = True
    local = min(tracked.local // keys.block_tokens, len(keys))
    load = set() if planned is None else set(planned.plan.load)
    tally.add("prompt_blocks_local", local)
    for block, tier in enumerate(mirror.tiers(keys.hashes[local:]), local):
        source = "missing" if tier is None else str(tier) if block in load else "recomputed"
        tally.add(f"prompt_blocks_{source}")


def count_restore(tally: Tally, restore: Restore, seconds: float) -> None:
    """Count a restore of which everything is in place."""
    recomputed = len(restore.plan.hashes) - restore.plan.resident - restore.loaded
    way = "hybrid" if restore.loaded and recomputed else "load" if restore.loaded else "recompute"
    tally.add(f"restores_{way}")
    count_blocks(tally, restore)
    tally.observe("restore_seconds", seconds)
    if restore.plan.predicted.planned > 0:
        tally.observe("restore_predicted_ratio", seconds / restore.plan.predicted.planned)


def count_blocks(tally: Tally, restore: Restore) -> None:
    """Count what a restore has brought, and what it could not."""
    tally.add("restored_blocks_loaded", restore.loaded)
    if restore.finished:
        blocks = len(restore.plan.hashes) - restore.plan.resident
        tally.add("restored_blocks_recomputed", blocks - restore.loaded)
    tally.add("load_failures", restore.failed)


def note_cached(tracked: Tracked, restore: Restore) -> None:
    """Tell the engine how much of the prompt it did not compute."""
    stats = tracked.request.prefill_stats
    if stats is not None and stats.num_prompt_tokens:
        # The last token is computed, whatever was loaded: an answer begins with it.
        room = stats.num_prompt_tokens - 1 - tracked.local
        stats.set(
            num_prompt_tokens=stats.num_prompt_tokens,
            num_local_cached_tokens=tracked.local,
            num_external_cached_tokens=min(restore.loaded * restore.plan.block_tokens, room),
        )
