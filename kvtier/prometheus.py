"""A store's metrics for Prometheus; needs ``prometheus-client`` (extra ``prometheus``).

::

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(StoreCollector(store))
    start_http_server(9400)

Names are ``kvtier_<what>_<unit>``, with ``_total`` for counters; what differs by tier has a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtier.errors import StoreFailed
from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["HasStats", "StoreCollector", "name_and_label"]

_HELP: Final = {
    "put_blocks": "Blocks of puts, by what became of them",
    "loaded_blocks": "Blocks that restores loaded, by the tier they came from",
    "loaded_bytes": "Bytes that restores loaded, by the tier they came from",
    "recomputed_blocks": "Blocks that restores recomputed",
    "load_failures": "Loads that failed; their blocks were recomputed",
    "damaged_blocks": "Blocks dropped because their bytes did not match their checksums",
    "evicted_blocks": "Blocks evicted from a tier",
    "restores": "Restore sessions that ended",
    "lookup_seconds": "Time of a lookup",
    "restore_seconds": "Time from a restore's start to its last block in place",
    "step_seconds": "Time of a recompute step",
    "restore_predicted_ratio": "Measured over predicted time of a restore",
}
_OUTCOMES: Final = ("stored", "present", "dropped")
_GAUGES: Final = {
    "used_bytes": ("used_bytes", "Bytes that a tier occupies"),
    "limit_bytes": ("limit_bytes", "Bytes that a tier may occupy"),
    "ready": ("ready_blocks", "Blocks that a lookup would find in a tier"),
}


class HasStats(Protocol):
    """An open store, or a reader."""

    def stats(self) -> dict[str, Any]:
        """Return counters, histograms, tier usage and costs as plain values."""


class StoreCollector:
    """Collects one store's metrics when Prometheus asks; a closed store has none.

    ``labels`` tell several stores of one process apart, say ``{"rank": "0"}``.
    """

    def __init__(self, store: HasStats, labels: Mapping[str, str] | None = None) -> None:
        self._store = store
        self._labels = dict(labels or {})

    def describe(self) -> Iterable[Any]:
        """Name nothing ahead: registering must not depend on the store being open."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield every metric with its present value."""
        try:
            stats = self._store.stats()
        except StoreFailed:  # closed ones included
            return
        yield from self._counters(stats["counters"])
        yield from self._histograms(stats["histograms"])
        yield from self._tiers(stats["tiers"])
        yield from self._costs(stats["pins"], stats["costs"])

    def _counters(self, counters: Mapping[str, int]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        families: dict[str, Any] = {}
        for counter, value in counters.items():
            name, label = name_and_label(counter)
            labels = {**self._labels, **label}
            if name not in families:
                text = _HELP.get(name, name.replace("_", " ").capitalize())
                families[name] = CounterMetricFamily(f"kvtier_{name}", text, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()

    def _histograms(self, histograms: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        for name, histogram in histograms.items():
            buckets, upto = [], 0
            for bound, count in zip(
                [*map(str, histogram["bounds"]), "+Inf"], histogram["counts"], strict=True
            ):
                upto += count
                buckets.append((bound, upto))
            family = HistogramMetricFamily(f"kvtier_{name}", _HELP[name], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, histogram["sum"])
            yield family

    def _tiers(self, tiers: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
        for key, (name, text) in _GAUGES.items():
            values = {tier: usage[key] for tier, usage in tiers.items() if key in usage}
            yield self._gauge(name, text, values)

    def _costs(self, pins: int, costs: Mapping[str, Any]) -> Iterator[Any]:
        yield self._gauge("pins", "Pins held on blocks", {"": pins})
        rates = {str(tier): costs[tier]["bytes_per_s"] for tier in (Tier.HOST, Tier.SSD)}
        yield self._gauge("link_bytes_per_second", "Learned rate of a tier's link", rates)
        token_s = {"": costs["compute"]["token_s"]}
        yield self._gauge("compute_token_seconds", "Learned time to recompute a token", token_s)

    def _gauge(self, name: str, text: str, values: Mapping[str, float]) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        by_tier = "" not in values
        labels = [*self._labels, *(["tier"] if by_tier else [])]
        family = GaugeMetricFamily(f"kvtier_{name}", text, labels=labels)
        for tier, value in values.items():
            mine = [tier] if by_tier else []
            family.add_metric([*self._labels.values(), *mine], value)
        return family


def name_and_label(counter: str) -> tuple[str, dict[str, str]]:
    """Split ``loaded_bytes_ssd`` into ("loaded_bytes", {"tier": "ssd"})."""
    name, _, last = counter.rpartition("_")
    if last in set(Tier):
        return name, {"tier": last}
    if last in _OUTCOMES:
        return name, {"outcome": last}
    return counter, {}
