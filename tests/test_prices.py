from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from kvtier.cost import ComputeCost, CostModel, LinkCost
from kvtier.prices import (
    POSITIONS_PRICED,
    PRICE_MIN,
    USES_PRICED,
    HostValues,
    Prices,
    SsdValues,
)

COSTS = CostModel(ComputeCost(0.0, 1e-4, 1e-7, 9), LinkCost(8e9, 0.0, 9), LinkCost(1e9, 0.0, 9))
BLOCK = 8_000_000


def test_the_last_copy_costs_what_recomputing_takes_longer_than_loading() -> None:
    """Prices are (recompute - load), relative to recomputing the first block."""
    prices = Prices.of(COSTS, 256, BLOCK)
    first, third = COSTS.block_seconds(256, 0, 3)[[0, 2]]
    assert prices.last[0] == pytest.approx((first - 0.008) / first)
    assert prices.last[2] == pytest.approx((third - 0.008) / first)
    assert prices.faster == pytest.approx(0.007 / first)
    assert len(prices.last) == POSITIONS_PRICED
    assert list(prices.last) == sorted(prices.last)


def test_a_recalibration_changes_no_prices_but_by_shape() -> None:
    """A device and links that are all twice as fast leave every price as it was."""
    faster = COSTS.shared(compute=0.5, links=0.5)
    assert Prices.of(faster, 256, BLOCK).last == pytest.approx(Prices.of(COSTS, 256, BLOCK).last)


def test_what_is_cheaper_to_recompute_is_worth_little_but_not_nothing() -> None:
    """A load slower than the recompute leaves the smallest price."""
    slow = replace(COSTS, ssd=LinkCost(1e6, 0.0, 9))
    assert Prices.of(slow, 256, BLOCK).last[0] == PRICE_MIN


def test_without_a_measured_recompute_position_counts_nothing() -> None:
    """Until compute is known all copies cost the same."""
    assert Prices.of(CostModel(), 256, BLOCK, 99) == Prices(slot_bytes=99)


def columns(*, uses: list[int], positions: list[int]) -> tuple[array[int], array[int]]:
    """Return the two columns."""
    return array("B", uses), array("I", positions)


def test_values_are_uses_times_price_per_byte() -> None:
    """A block of twice the size is worth half as much a byte; without a place it is of our size."""
    uses, positions = columns(uses=[1, 3, 2, 2], positions=[0, 1, 9, 0])
    values = SsdValues(uses, positions, array("Q", [8, 8, 16, 0]), Prices((1.0, 5.0), 1.0, 8))
    assert values.of([0, 1, 2, 3]) == [1.0, 15.0, 5.0, 2.0]
    np.testing.assert_array_equal(values.of_all(np.arange(4)), [1.0, 15.0, 5.0, 2.0])
    values.reprice(Prices((2.0,)))
    assert values.of([0, 1, 2, 3]) == [2.0, 6.0, 4.0, 4.0]
    np.testing.assert_array_equal(values.of_all(np.arange(4)), [2.0, 6.0, 4.0, 4.0])


def test_a_host_copy_of_what_is_on_the_ssd_saves_only_the_faster_load() -> None:
    """In host memory a last copy is worth its recompute, another the difference of the loads."""
    uses, positions = columns(uses=[2, 2], positions=[1, 1])
    values = HostValues(uses, positions, array("B", [1, 3]), 2, Prices((1.0, 5.0), 0.5))
    assert values.of([0, 1]) == [10.0, 1.0]
    np.testing.assert_array_equal(values.of_all(np.arange(2)), [10.0, 1.0])


def test_many_uses_are_worth_no_more_than_four() -> None:
    """A value rises with uses up to ``USES_PRICED``, in both tiers and both ways of asking."""
    uses, positions = columns(uses=[1, 3, 4, 5, 255], positions=[0] * 5)
    rows, worth = list(range(5)), [2.0, 6.0, 8.0, 8.0, 8.0]
    for values in (
        SsdValues(uses, positions, array("Q", [0] * 5), Prices((2.0,))),
        HostValues(uses, positions, array("B", [1] * 5), 2, Prices((2.0,))),
    ):
        assert values.of(rows) == worth
        np.testing.assert_array_equal(values.of_all(np.arange(5)), worth)
    assert USES_PRICED == 4
