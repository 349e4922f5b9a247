"""What of vLLM's internals is leaned on, by name, and which rung of support that leaves.

vLLM's scheduler is no public interface. Everything used of it is listed here; where something is
missing the connector falls back to plain asynchronous loads instead of failing later.
"""

from __future__ import annotations

import importlib
import inspect
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from kvtier_vllm.settings import Settings

__all__ = ["ATTRIBUTES", "HOOKS", "SUPPORTED", "Rung", "missing", "rung"]

SUPPORTED: Final = ((0, 32), (0, 33))
"""vLLM versions from the first on, below the second."""


class Rung(StrEnum):
    """How much of a restore the engine's scheduler lets us do."""

    HYBRID = "hybrid"
    """Our scheduler: a head is recomputed while its tail loads, holes allowed."""
    PLAIN = "plain"
    """Any scheduler: contiguous prefixes, loaded while their request waits."""


_SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
_ASYNC: Final = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
_MANAGER: Final = "vllm.v1.core.kv_cache_manager.KVCacheManager"
_COORDINATOR: Final = "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"
_POOL: Final = "vllm.v1.core.block_pool.BlockPool"
_STATUS: Final = "vllm.v1.request.RequestStatus"

HOOKS: Final[dict[str, tuple[str, ...] | None]] = {
    # Methods that are overridden or called, with the parameters that are relied on.
    f"{_SCHEDULER}.schedule": ("self", "throttle_prefills"),
    f"{_SCHEDULER}._reserve_prefill_lookahead": (
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
    ),
    f"{_SCHEDULER}._get_local_prefix_cache_hit": ("self", "request"),
    f"{_SCHEDULER}._preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    f"{_SCHEDULER}.finish_requests": ("self", "request_ids", "finished_status"),
    f"{_SCHEDULER}.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    f"{_SCHEDULER}._enqueue_waiting_request": ("self", "request"),
    f"{_SCHEDULER}._inflight_prefill_reserved_blocks": ("self",),
    f"{_ASYNC}.schedule": ("self", "throttle_prefills"),
    f"{_MANAGER}.get_blocks": ("self", "request_id"),
    f"{_MANAGER}.free": ("self", "request"),
    f"{_COORDINATOR}.allocate_new_blocks": (
        "self",
        "request_id",
        "num_tokens",
        "num_tokens_main_model",
        "num_encoder_tokens",
    ),
    f"{_COORDINATOR}.free": ("self", "request_id"),
    f"{_POOL}.touch": ("self", "blocks"),
    f"{_POOL}.free_blocks": ("self", "ordered_blocks"),
    f"{_POOL}.get_num_free_blocks": ("self",),
    # Values.
    f"{_STATUS}.RUNNING": None,
    f"{_STATUS}.WAITING_FOR_REMOTE_KVS": None,
}

ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    _SCHEDULER: (
        "connector",
        "deferred_waiting",
        "finished_recving_kv_req_ids",
        "kv_cache_manager",
        "kv_holding_waiting",
        "prev_step_scheduled_req_ids",
        "connector_prefix_cache_stats",
        "requests",
        "reset_preempted_req_ids",
        "running",
    ),
    _MANAGER: ("block_pool", "coordinator", "empty_kv_cache_blocks"),
    _COORDINATOR: ("single_type_managers",),
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": ("block_size",),
    _POOL: ("blocks", "cached_block_hash_to_block", "num_gpu_blocks"),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": ("block_id", "ref_cnt"),
}
"""What objects must have once they are made: their constructors set it."""


def missing(
    hooks: Mapping[str, tuple[str, ...] | None] = HOOKS,
    attributes: Mapping[str, tuple[str, ...]] = ATTRIBUTES,
) -> list[str]:
    """Return what this vLLM lacks of them, by name, and in which way."""
    lacking = []
    for name, wanted in hooks.items():
        found = _resolve(name)
        if found is None:
            lacking.append(f"{name} is gone")
        elif wanted is not None:
            have = tuple(inspect.signature(found).parameters)
            if have[: len(wanted)] != wanted:
                lacking.append(f"{name}{have} was {wanted}")
    for owner, names in attributes.items():
        cls = _resolve(owner)
        source = "" if cls is None else inspect.getsource(cls)
        lacking += [
            f"{owner}.{name} is gone" for name in names if not re.search(rf"\b{name}\b", source)
        ]
    return lacking


def rung(vllm_config: VllmConfig, settings: Settings) -> Rung:
    """Return what this engine's scheduler allows; the same in every process of the engine."""
    scheduler = vllm_config.scheduler_config
    chosen = scheduler.scheduler_cls
    if not settings.hybrid or chosen is None or not scheduler.enable_chunked_prefill or missing():
        return Rung.PLAIN
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from kvtier_vllm.scheduler import HybridSteps

    cls = resolve_obj_by_qualname(chosen) if isinstance(chosen, str) else chosen
    return Rung.HYBRID if issubclass(cls, HybridSteps) else Rung.PLAIN


def _resolve(name: str) -> Any:
    """Return what a dotted name means, None if it means nothing."""
    parts = name.split(".")
    found: Any = None
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return found
