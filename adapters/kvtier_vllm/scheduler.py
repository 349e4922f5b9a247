"""``HybridScheduler`` and ``HybridAsyncScheduler``: vLLM's, driven by restores.

A restored request is RUNNING with a cap on its prefill, or PARKED (``WAITING_FOR_REMOTE_KVS``, as
vLLM's own asynchronous load leaves it) while there is nothing to compute::

    RUNNING --nothing to compute, or what comes next is in place--> PARKED
    PARKED  --a step to compute, or all in place--> WAITING --scheduled--> RUNNING

It passes blocks that were loaded only by being parked and taken up again "as new", never by an
increase of ``num_computed_tokens`` in place: Model Runner V2 keeps its own copy of that number on
the device, which only an added request sets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler as _Steps
    from vllm.v1.request import Request

    from kvtier_vllm.coordinator import Coordinator
    from kvtier_vllm.restore import Restore
else:
    _Steps = object  # the overrides are mixed into either of vLLM's schedulers

__all__ = ["SOURCE", "HybridAsyncScheduler", "HybridScheduler", "HybridSteps"]

SOURCE = CacheHitSource.DISK
"""As what the engine's own counters know hits; which tier they were in is in kvtier's."""


class HybridSteps(_Steps):
    """The overrides; in front of one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from kvtier_vllm.connector import KVTierConnector

        if not isinstance(self.connector, KVTierConnector) or self.connector.coordinator is None:
            raise TypeError(
                f"{type(self).__name__} works with KVTierConnector as the engine's connector, "
                f"not {type(self.connector).__name__}; leave --scheduler-cls out"
            )
        self._tiers: Coordinator = self.connector.coordinator
        if self._tiers.limits.hybrid:
            self._tiers.drive(self._spare_pages)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002 - vLLM's
        """Bring every restored request to where its restore stands, then schedule as usual."""
        now = self._tiers.now()
        for request, restore in self._tiers.restores():
            if request.status == RequestStatus.RUNNING:
                at = request.num_computed_tokens
                restore.reached(at, now, pipelined=self._tiers.limits.pipelined)
                if restore.waits or restore.position > at:
                    self._park(request)
            elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                restore.woke(now)
            parked = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if parked and not restore.waits:
                request.num_computed_tokens = restore.position
                self.finished_recving_kv_req_ids.add(request.request_id)
            if restore.finished:
                self._count_hits(restore)
                self._tiers.over(request.request_id)
        return super().schedule(throttle_prefills)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a prefill chunk where the restore's step ends: the last of all clips."""
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        cap = self._tiers.cap(request.request_id)
        return tokens if cap is None else min(tokens, max(cap - num_computed_tokens, 0))

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """Look for no hit where a restore resumes at the first token: it has its pages already."""
        if self._tiers.restoring(request.request_id) is not None:
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
        found: tuple[KVCacheBlocks, int, int, bool] = super()._get_local_prefix_cache_hit(request)
        return found

    def _preempt_request(
        self,
        request: Request,
        timestamp: float,
        drop_stale_output: bool = False,  # noqa: FBT001, FBT002 - vLLM's
    ) -> None:
        """Leave the restore; pages that a load may still write to stay held by us."""
        self._tiers.preempted(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Free an aborted request's pages at once, though its loads may go on: we hold them too."""
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        ids = list(self.requests if request_ids is None else request_ids)
        self.finished_recving_kv_req_ids.update(
            request_id for request_id in ids if self._is_parked(request_id)
        )
        finished: list[Request] = super().finish_requests(ids, finished_status)
        return finished

    def reset_prefix_cache(
        self,
        reset_running_requests: bool = False,  # noqa: FBT001, FBT002 - vLLM's
        reset_connector: bool = False,  # noqa: FBT001, FBT002 - vLLM's
    ) -> bool:
        """Empty the prefix cache even while pages are held by us."""
        if reset_running_requests:
            for request in [each for each in self.kv_holding_waiting if self._may_leave(each)]:
                self._preempt_waiting(request)
        with self._tiers.lent():
            done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if done:
            self._tiers.cleared()
        return bool(done)

    def _count_hits(self, restore: Restore) -> None:
        """Count as hits what was loaded beyond what the engine was told at admission."""
        stats = self.connector_prefix_cache_stats
        more = restore.loaded * restore.plan.block_tokens - restore.claimed
        if stats is not None and more > 0:
            stats.hits += more
            stats.hits_by_source[SOURCE] = stats.hits_by_source.get(SOURCE, 0) + more

    def _spare_pages(self) -> int:
        """Return how many pages no prefill that is under way counts on."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return int(free - self._inflight_prefill_reserved_blocks())

    def _is_parked(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        if request is None or self._tiers.restoring(request_id) is None:
            return False
        return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)

    def _park(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        # Both runners must drop what they know of it, and be told all of it again.
        self.reset_preempted_req_ids.add(request.request_id)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._enqueue_waiting_request(request)

    @staticmethod
    def _may_leave(request: Request) -> bool:
        return bool(request.status != RequestStatus.WAITING_FOR_STREAMING_REQ)

    def _preempt_waiting(self, request: Request) -> None:
        """Take its pages from a request that is parked, or was until now."""
        self.kv_holding_waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self.finished_recving_kv_req_ids.discard(request.request_id)
        request.status = RequestStatus.RUNNING
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)


class HybridScheduler(HybridSteps, Scheduler):
    """vLLM's scheduler; for engines without asynchronous scheduling."""


class HybridAsyncScheduler(HybridSteps, AsyncScheduler):
    """vLLM's asynchronous scheduler, which CUDA engines use unless told otherwise."""
