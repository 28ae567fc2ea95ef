"""How many examples a random test draws: all in `make test-all`, a fourth in `make test`, a sixteenth in `make test-fast`."""

from __future__ import annotations

from hypothesis import settings

DRAWN = {"whole": 1, "outrider": 4, "quick": 16}  # one in so many, by the profile that is loaded
FEWEST = {"whole": 10, "outrider": 10, "quick": 3}


def thinned(count: int) -> int:
    """The whole count where every grid is run whole, and a part of it otherwise."""
    return max(count // DRAWN[settings.get_current_profile_name()], 1)


def examples(count: int) -> settings:
    """Hypothesis' settings for so many examples, thinned to no fewer than ten, or three where grids are quick."""
    return settings(max_examples=max(thinned(count), FEWEST[settings.get_current_profile_name()]))
