"""Quantiles of measured values, as every report of this package gives them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["percentile_ms", "quantile"]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentile_ms(seconds: Sequence[float], share: float, digits: int = 3) -> float | None:
    """By nearest rank, so that it is a time that occurred, in rounded milliseconds; None where there are no values."""
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], digits) if ordered else None
