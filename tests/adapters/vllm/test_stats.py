from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from kvtier_vllm.stats import KVTierPromMetrics, KVTierStats, register
from kvtier_vllm.tally import METRICS, SAMPLES_MAX, Tally

TYPES = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


@pytest.fixture
def prom() -> Any:
    """Return the metrics as an engine registers them, and take them off the registry after."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    config: Any = SimpleNamespace(kv_transfer_config=None)
    yield KVTierPromMetrics(config, TYPES, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    unregister_vllm_metrics()
    assert "vllm:kvtier" not in generate_latest(REGISTRY).decode()


def scraped() -> dict[str, float]:
    """Return the endpoint's samples of kvtier: name with labels -> value."""
    lines = generate_latest(REGISTRY).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:kvtier_"))
    return {name: float(value) for name, value in samples}


def everything() -> Tally:
    """Return a tally in which every name counted once."""
    tally = Tally()
    for name, metric in METRICS.items():
        (tally.add if metric.kind == "counter" else tally.observe)(name, 2)
    return tally


def test_every_name_reaches_the_endpoint(prom: Any) -> None:
    """Through the payload's way between processes, with vLLM's labels and our own."""
    payload = KVTierStats(data=everything().take()).to_dict()
    prom.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(payload)), 1)
    found = scraped()
    one = 'vllm:kvtier_prompt_blocks_total{engine="%d",model_name="m",source="ssd"}'
    assert (found[one % 0], found[one % 1]) == (0, 2)
    name = 'vllm:kvtier_store_loaded_bytes_total{engine="1",model_name="m",tier="ssd"}'
    assert found[name] == 2
    assert found['vllm:kvtier_restore_predicted_ratio_sum{engine="1",model_name="m"}'] == 2
    counted = {name.partition("{")[0] for name, value in found.items() if value}
    for metric in METRICS.values():
        ends = {"counter": "total", "histogram": "count"}[metric.kind]
        assert f"vllm:kvtier_{metric.family}_{ends}" in counted


def test_series_are_there_before_anything_happened(prom: Any) -> None:
    """A rate over a series that appears with its first event misses that event."""
    assert scraped()['vllm:kvtier_load_failures_total{engine="0",model_name="m"}'] == 0


def test_intervals_add_up_and_stay_apart() -> None:
    """Aggregating does not tie the sum to its parts, and forgets no part."""
    whole = KVTierStats()
    parts = [KVTierStats(data=everything().take()) for _ in range(3)]
    for part in parts:
        whole.aggregate(part)
    assert whole.data["load_failures"] == 6
    assert whole.data["restore_seconds"] == [2, 2, 2]
    assert parts[0].data == everything().take()
    whole.aggregate(KVTierStats(data={"restore_seconds": [1.0] * SAMPLES_MAX}))
    assert len(whole.data["restore_seconds"]) == SAMPLES_MAX
    whole.reset()
    assert whole.is_empty()


def test_the_log_line_has_one_number_for_each_name() -> None:
    """A histogram shows its median."""
    stats = KVTierStats(data={"restore_seconds": [3.0, 1.0, 2.0], "load_failures": 4})
    assert stats.reduce() == {"load_failures": 4, "restore_seconds": 2.0}


def test_multi_connector_can_rebuild_the_statistics_of_a_child() -> None:
    """It looks the class up by name, even if the configuration names its module."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    register()
    register()
    data = {"KVTierConnector": {"load_failures": 2}}
    rebuilt = MultiConnector.build_kv_connector_stats(data)
    assert rebuilt is not None
    child = rebuilt.data["KVTierConnector"]
    assert isinstance(child, KVTierStats)
    assert child.data == {"load_failures": 2}
