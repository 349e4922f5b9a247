"""``KVTierConnector``: vLLM's connector interface in front of the coordinator and the worker side.

vLLM makes one in the scheduler's process and one in every worker. Both only pass on: what is
decided is decided in ``coordinator``, what is moved is moved in ``worker``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_vllm import facts
from kvtier_vllm.contract import Rung, rung
from kvtier_vllm.coordinator import Coordinator
from kvtier_vllm.lora import AdapterDigests
from kvtier_vllm.pages import PoolPages
from kvtier_vllm.settings import Settings
from kvtier_vllm.stats import KVTierPromMetrics, KVTierStats, register

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtier_vllm.events import KVEvents
    from kvtier_vllm.messages import Hello, Orders, RankReport
    from kvtier_vllm.worker import WorkerSide

__all__ = ["KVTierConnector", "StepOrders", "StepReports", "StoreHello"]

logger = init_logger("vllm.kvtier")
register()


@dataclass
class StepOrders(KVConnectorMetadata):
    """What goes out with a step."""

    orders: Orders
    idle: bool
    """The step computes nothing."""


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """What comes back from the ranks, by rank."""

    reports: dict[int, RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Put what several ranks say about one step together."""
        if not isinstance(other, StepReports):
            raise TypeError(f"{type(other).__name__} given, {type(self).__name__} wanted")
        return StepReports({**self.reports, **other.reports})


@dataclass
class StoreHello(KVConnectorHandshakeMetadata):
    """What a rank says about its store before the first step."""

    hello: Hello


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Restores prompts from a kvtier store and stores what was computed."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._rung = rung(vllm_config, self._settings)
        self.coordinator: Coordinator | None = None
        self._worker: WorkerSide | None = None
        self._adapters = AdapterDigests()
        self._events: KVEvents | None = None
        if role == KVConnectorRole.WORKER:
            from kvtier_vllm.identity import worker_side

            self._worker = worker_side(
                vllm_config,
                kv_cache_config,
                self._settings,
                contiguous=self._rung is Rung.PLAIN,
            )
        else:
            limits = facts.limits(vllm_config, self._settings, self._rung)
            self.coordinator = Coordinator(limits, say=logger.info)
            self._events = facts.events(vllm_config, self.coordinator)
            facts.warn(vllm_config, self._rung)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later, nothing else."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        """Rebuild what another process counted."""
        return KVTierStats(data=data) if data is not None else KVTierStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        """Expose the counts at vLLM's endpoint."""
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in a worker

    def _side(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a worker's call in the scheduler's process")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the store for what the engine allocated."""
        self._side().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> StoreHello:
        """Say what is stored, before the first step."""
        return StoreHello(self._side().hello())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the step's loads, before its forward: ``start_load_kv`` comes after it."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepOrders):
            self._side().take_orders(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's
        """Wait a little where the step had nothing to compute, so that the loads get the CPU."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepOrders) and metadata.idle:
            self._side().idle_wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing that a forward uses is still on its way."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks are saved after the forward."""

    def wait_for_save(self) -> None:
        """Hand over what this step computed."""
        self._side().after_forward()

    def build_connector_worker_meta(self) -> StepReports | None:
        """Report what happened since the last report."""
        side = self._side()
        report = side.report()
        return None if report is None else StepReports({side.rank: report})

    def shutdown(self) -> None:
        """Close the store, in a worker."""
        if self._worker is not None:
            self._worker.shutdown()

    # -- in the scheduler

    def _coordinator(self) -> Coordinator:
        if self.coordinator is None:
            raise RuntimeError("a scheduler's call in a worker")
        return self.coordinator

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Learn what every rank has stored."""
        for hello in metadata.values():
            self._coordinator().hello(hello.hello)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Learn where the engine's pages are kept."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._coordinator().bind(PoolPages(kv_cache_manager))

    def on_new_request(self, request: Request) -> None:
        """Follow a request from its arrival."""
        lora = request.lora_request
        adapter = "" if lora is None else self._adapters.of(lora.lora_path)
        refused = facts.refusal(request) if adapter is not None else "its LoRA cannot be read"
        self._coordinator().arrived(
            request,
            tenant=request.cache_salt or "",
            adapter=adapter or "",
            refused=refused,
            asked=facts.asked(request, self._vllm_config),
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Plan a request's restore; may be asked many times before there is room for it."""
        return self._coordinator().lookup(request.request_id, num_computed_tokens)

    def update_state_after_alloc(
        self,
        request: Request,
        blocks: KVCacheBlocks,  # noqa: ARG002 - vLLM's
        num_external_tokens: int,  # noqa: ARG002 - vLLM's
    ) -> None:
        """Begin the restore that was planned."""
        self._coordinator().admitted(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """Say what the workers are to do with this step."""
        orders = self._coordinator().orders(scheduler_output.num_scheduled_tokens)
        return StepOrders(orders, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the ranks' reports; a plain load that is over lets its request go on."""
        coordinator = self._coordinator()
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, StepReports):
            for rank, report in sorted(metadata.reports.items()):
                coordinator.report(rank, report)
        if over := coordinator.received():
            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *over}

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - vLLM's
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store what is left of a request, and leave its restore; its blocks may be freed."""
        self._coordinator().finished(request.request_id)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Whether workers have something to answer: the engine goes on stepping until then."""
        return self._coordinator().expects_answers

    def has_pending_block_frees(self) -> bool:
        """Whether pages will be free once workers have answered, without preempting anybody."""
        return self._coordinator().frees_pages

    def take_events(self) -> Iterable[Any]:
        """Return what changed in the stores, for vLLM's event stream.

        vLLM asks after every step that it has processed, and no other call tells of that.
        """
        self._coordinator().step_done()
        return () if self._events is None else self._events.take()

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """Return the scheduler's counts since the last call; workers count in their reports."""
        if self.coordinator is None:
            return None
        counted = self.coordinator.tally.take()
        return KVTierStats(data=counted) if counted else None

    def reset_cache(self) -> bool:
        """Forget everything that is stored for this model, in all ranks."""
        self._coordinator().reset()
        return True
