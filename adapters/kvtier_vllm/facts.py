"""What the engine's configuration and its requests say about what can be done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvtier_vllm.asked import Asked, asked_of
from kvtier_vllm.contract import Rung, missing
from kvtier_vllm.events import KVEvents
from kvtier_vllm.planning import Limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvtier_vllm.coordinator import Coordinator
    from kvtier_vllm.settings import Settings

__all__ = ["asked", "events", "limits", "refusal", "warn"]

logger = init_logger("vllm.kvtier")


def limits(vllm_config: VllmConfig, settings: Settings, rung: Rung) -> Limits:
    """Return what the configuration allows."""
    transfer, sizes = vllm_config.kv_transfer_config, settings.of_rank(1)
    return Limits(
        page_tokens=vllm_config.cache_config.block_size,
        step_tokens_max=vllm_config.scheduler_config.max_num_batched_tokens,
        ranks=vllm_config.parallel_config.world_size,
        hybrid=rung is Rung.HYBRID,
        pipelined=vllm_config.max_concurrent_batches > 1,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        save=settings.save and transfer.is_kv_producer,
        restore=settings.restore and transfer.is_kv_consumer,
        compute_price_per_request=settings.compute_price_per_request,
        where=f"{settings.path}, {sizes['host_bytes']} bytes of host memory and "
        f"{sizes['ssd_bytes']} bytes of SSD in all",
    )


def refusal(request: Request) -> str:
    """Return why a request is neither restored nor stored; nothing if it may be."""
    reasons = {
        "it has multimodal inputs": request.mm_features,
        "it has prompt embeddings": request.prompt_token_ids is None
        or request.prompt_embeds is not None,
        "it is pooled": request.pooling_params is not None,
        "it skips reading the prefix cache": request.skip_reading_prefix_cache,
        "its input is streamed": request.resumable,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def asked(request: Request, vllm_config: VllmConfig) -> Asked:
    """Return what a client asks of kvtier for its request."""
    longest = vllm_config.model_config.max_model_len
    return asked_of(request.kv_transfer_params, tokens_max=longest)


def events(vllm_config: VllmConfig, coordinator: Coordinator) -> KVEvents | None:
    """Return whoever announces what is stored, where the engine publishes KV events."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    from kvtier_vllm.identity import block_tokens_of

    page = vllm_config.cache_config.block_size
    found = KVEvents(coordinator.stored_in, page_tokens=page, block_tokens=block_tokens_of(page))
    coordinator.announce(found)
    return found


def warn(vllm_config: VllmConfig, rung: Rung) -> None:
    """Say once what keeps the engine from doing its best."""
    scheduler: Any = vllm_config.scheduler_config
    chosen = scheduler.scheduler_cls
    if rung is Rung.PLAIN:
        for lacking in missing():
            logger.warning("kvtier: this vLLM is not one it was made for: %s", lacking)
        wanted = "HybridAsyncScheduler" if scheduler.async_scheduling else "HybridScheduler"
        logger.warning(
            "kvtier: plain asynchronous loads only; with --scheduler-cls kvtier_vllm.scheduler.%s "
            "heads are recomputed while their tails load",
            wanted,
        )
    elif scheduler.async_scheduling != issubclass(scheduler.get_scheduler_cls(), AsyncScheduler):
        wanted = "HybridAsyncScheduler" if scheduler.async_scheduling else "HybridScheduler"
        logger.warning(
            "kvtier: scheduler class %s with async_scheduling=%s; use kvtier_vllm.scheduler.%s",
            chosen,
            scheduler.async_scheduling,
            wanted,
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        logger.warning(
            'kvtier: kv_load_failure_policy is "fail"; set it to "recompute" in '
            "--kv-transfer-config, or vLLM fails requests whose load fails"
        )
