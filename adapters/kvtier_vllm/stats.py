"""The scheduler's counts on vLLM's own log line and ``/metrics`` endpoint.

The payload between processes is ``tally.Values``; what a name means is in ``tally.METRICS``, which
every process has.
"""

from __future__ import annotations

import statistics
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier_vllm.tally import METRICS, PREFIX, SAMPLES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

__all__ = ["KVTierPromMetrics", "KVTierStats", "register"]

CONNECTOR = "KVTierConnector"


def register() -> None:
    """Make the connector known by its name; doing so twice is no harm.

    ``MultiConnector`` looks up the class of a child's statistics by name, even one whose module
    the configuration names. Called when the connector is imported, and as a plugin by vLLM.
    """
    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(CONNECTOR, "kvtier_vllm.connector", CONNECTOR)


class KVTierStats(KVConnectorStats):
    """What was counted in an interval: ``data`` is ``tally.Values``."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another interval, or another engine, counted."""
        for name, value in other.data.items():
            mine = self.data.get(name)
            if mine is None:
                self.data[name] = list(value) if isinstance(value, list) else value
            elif METRICS[name].kind == "histogram":
                mine += value[: SAMPLES_MAX - len(mine)]
            else:
                self.data[name] = mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number for each name, medians of histograms, for the log line."""
        return {
            name: round(statistics.median(value), 6) if isinstance(value, list) else value
            for name, value in sorted(self.data.items())
            if value
        }


class KVTierPromMetrics(KVConnectorPromMetrics):
    """The families of ``tally.METRICS``, with vLLM's labels in front of their own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        families: dict[str, Any] = {}
        self._children: dict[tuple[int, str], Any] = {}
        for name, metric in METRICS.items():
            if metric.family not in families:
                families[metric.family] = self._family(metric, labelnames)
            # All of them now: a series that appears with its first event has no rate before it.
            for engine, values in per_engine_labelvalues.items():
                labels = [*values, *metric.labels.values()]
                self._children[engine, name] = families[metric.family].labels(*labels)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, value in transfer_stats_data.items():
            child = self._children[engine_idx, name]
            if isinstance(value, list):
                for each in value:
                    child.observe(each)
            else:
                child.inc(value)

    def _family(self, metric: Any, labelnames: list[str]) -> Any:
        named: dict[str, Any] = {
            "name": PREFIX + metric.family,
            "documentation": metric.text,
            "labelnames": [*labelnames, *metric.labels],
        }
        if metric.kind == "histogram":
            return self._histogram_cls(**named, buckets=metric.bounds)
        return self._counter_cls(**named)
