from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support import bring_back, prompt_keys, put

from kvtier.metrics import COUNTERS, HISTOGRAMS, Metrics
from kvtier.prometheus import StoreCollector

Open = Any
DASHBOARD = Path(__file__).parents[1] / "tools" / "grafana" / "kvtier.json"


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """Return what Prometheus would scrape: sample with labels -> value."""
    lines = generate_latest(registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


@pytest.fixture
def scrape(open_store: Open) -> dict[str, float]:
    """Return the samples of a store that kept, restored and looked up a prompt."""
    store, keys = open_store(), prompt_keys(6)
    put(store, keys)
    store.flush()
    bring_back(store, keys)
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, {"rank": "3"}))
    return exposed(registry)


def test_every_counter_and_histogram_is_exposed(scrape: dict[str, float]) -> None:
    """Nothing that the store counts is missing, whatever is added later."""
    text = "\n".join(scrape)
    for counter in COUNTERS:
        base = re.sub(r"_(host|ssd|device|stored|present|dropped)$", "", counter)
        assert f"kvtier_{base}_total{{" in text, counter
    for histogram in HISTOGRAMS:
        assert f"kvtier_{histogram}_bucket{{" in text
        assert f"kvtier_{histogram}_sum{{" in text


def test_values_are_the_stores_own(scrape: dict[str, float]) -> None:
    """Counts, labels and cumulative buckets say what happened."""
    assert scrape['kvtier_put_blocks_total{outcome="stored",rank="3"}'] == 6
    assert scrape['kvtier_ready_blocks{rank="3",tier="ssd"}'] == 6
    assert scrape['kvtier_restores_total{rank="3"}'] == 1
    assert scrape['kvtier_restore_seconds_count{rank="3"}'] == 1
    assert scrape['kvtier_restore_seconds_bucket{le="+Inf",rank="3"}'] == 1
    assert scrape['kvtier_limit_bytes{rank="3",tier="ssd"}'] > 0


def test_a_closed_store_does_not_break_the_endpoint(open_store: Open) -> None:
    """Other metrics of the process are still served after a store was closed."""
    store = open_store()
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    store.close()
    assert exposed(registry) == {}


def test_two_stores_of_one_process_are_told_apart(open_store: Open, tmp_path: Path) -> None:
    """Their labels differ, so a registry takes both."""
    registry = CollectorRegistry()
    for rank in "01":
        store = open_store(str(tmp_path / f"store{rank}"))
        registry.register(StoreCollector(store, {"rank": rank}))
    samples = exposed(registry)
    assert {f'kvtier_pins{{rank="{rank}"}}' for rank in "01"} <= set(samples)


def test_the_dashboard_asks_only_for_what_is_exposed(scrape: dict[str, float]) -> None:
    """Every metric of every panel exists; every panel has a unit and a place of its own."""
    names = {sample.partition("{")[0] for sample in scrape}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            asked = set(re.findall(r"kvtier_\w+", target["expr"]))
            assert asked
            assert asked <= names, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_histogram_buckets() -> None:
    """A value on a bound belongs below it; what is larger than all has a bucket of its own."""
    metrics = Metrics()
    bounds = HISTOGRAMS["restore_seconds"]
    for value in (0.0, bounds[0], bounds[1], bounds[-1] + 1):
        metrics.observe("restore_seconds", value)
    found = metrics.histograms()["restore_seconds"]
    assert found["counts"][:2] == [2, 1]
    assert found["counts"][-1] == 1
    assert found["sum"] == pytest.approx(bounds[0] + bounds[1] + bounds[-1] + 1)
    with pytest.raises(KeyError):
        metrics.observe("restore_second", 1.0)
