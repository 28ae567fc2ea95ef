"""How many examples a random test draws: one in four in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

THINNED = 4


def thinned(count: int) -> int:
    """The whole count where every grid is run whole, and a part of it otherwise."""
    return count if settings.get_current_profile_name() == "whole" else max(count // THINNED, 1)


def examples(count: int) -> settings:
    """Hypothesis' settings for so many examples, thinned to no fewer than ten."""
    return settings(max_examples=max(thinned(count), 10))
