from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.metrics import COUNTERS
from kvtier_vllm.tally import METRICS, SAMPLES_MAX, Tally

rises = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=30)


@given(rises, st.data())
def test_rises_of_rank_counters_add_up_however_often_they_are_taken(
    reports: list[tuple[int, int]], data: st.DataObject
) -> None:
    """What is taken sums to what all ranks' stores counted: nothing twice, nothing lost."""
    tally, stands, taken = Tally(), dict.fromkeys(range(3), 0), 0.0
    for rank, rise in reports:
        stands[rank] += rise
        tally.rank(rank, {"loaded_bytes_ssd": stands[rank]})
        if data.draw(st.booleans()):
            value = tally.take().get("store_loaded_bytes_ssd", 0)
            assert isinstance(value, int | float)
            taken += value
    rest = tally.take().get("store_loaded_bytes_ssd", 0)
    assert isinstance(rest, int | float)
    assert taken + rest == sum(stands.values())


def test_a_store_opened_anew_counts_from_nothing() -> None:
    """After a reset a rank's counters start again: they must neither fall nor be lost."""
    tally = Tally()
    tally.rank(0, {"loaded_bytes_ssd": 100})
    tally.rank(0, {"loaded_bytes_ssd": 30})
    assert tally.take() == {"store_loaded_bytes_ssd": 130}


def test_nothing_happened_is_nothing_to_tell() -> None:
    """An idle step sends no payload."""
    tally = Tally()
    tally.rank(0, {"loaded_bytes_ssd": 0})
    tally.add("save_blocks_released", 0)
    assert tally.take() == {}


def test_taken_counts_are_the_takers() -> None:
    """What was taken does not change with what is counted next."""
    tally = Tally()
    tally.observe("restore_seconds", 1.0)
    first = tally.take()
    tally.observe("restore_seconds", 2.0)
    assert first == {"restore_seconds": [1.0]}


def test_observations_nobody_takes_are_bounded() -> None:
    """With the engine's statistics off nobody may ever ask."""
    tally = Tally()
    for _ in range(SAMPLES_MAX + 10):
        tally.observe("lookup_seconds", 0.001)
    samples = tally.take()["lookup_seconds"]
    assert isinstance(samples, list)
    assert len(samples) == SAMPLES_MAX


def test_an_unknown_name_cannot_hide() -> None:
    """Neither a typo here nor a counter that only a newer worker has."""
    for wrong in (
        lambda: Tally().add("restores"),
        lambda: Tally().observe("restore_second", 1.0),
        lambda: Tally().rank(0, {"loaded_byte_ssd": 1}),
    ):
        with pytest.raises(KeyError):
            wrong()


def test_every_counter_of_a_store_is_exposed() -> None:
    """A counter that is added to the store later is on the endpoint without another change."""
    assert {f"store_{name}" for name in COUNTERS} < set(METRICS)
    series = [(m.family, tuple(m.labels.items())) for m in METRICS.values()]
    assert len(set(series)) == len(series)
    for metric in METRICS.values():
        same = [m for m in METRICS.values() if m.family == metric.family]
        assert {tuple(m.labels) for m in same} == {tuple(metric.labels)}
        assert {(m.kind, m.text, m.bounds) for m in same} == {
            (metric.kind, metric.text, metric.bounds)
        }
