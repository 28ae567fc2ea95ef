"""Quantiles are interpolated; percentiles are values that were measured."""

from __future__ import annotations

import statistics

import pytest

from outrider.quantiles import percentile_ms, quantile


def test_quantiles_lie_between_neighbours() -> None:
    values = [float(i) for i in range(101)]
    assert quantile(values, 0.5) == statistics.median(values) == 50.0
    assert quantile(values, 0.99) == pytest.approx(99.0)
    assert (quantile(values, 0.0), quantile(values, 1.0)) == (0.0, 100.0)
    assert quantile([3.0, 1.0], 0.25) == 1.5
    assert quantile([7.0], 0.99) == 7.0


def test_percentiles_are_times_that_occurred() -> None:
    values = [0.001 * i for i in range(1, 101)]
    assert percentile_ms(values, 0.5) == 51.0
    assert percentile_ms(values, 0.99) == percentile_ms(values, 1.0) == 100.0
    assert percentile_ms([0.00123456], 0.99, 2) == 1.23
    assert percentile_ms([], 0.5) is None
