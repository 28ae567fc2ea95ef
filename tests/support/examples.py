"""How many examples a random test draws."""

from __future__ import annotations

from hypothesis import settings

THINNED = 4  # `make test` draws one example of so many, `make test-all` all of them


def examples(count: int) -> settings:
    """Settings with `count` examples where every grid is run whole, and with a part of them otherwise."""
    whole = settings.get_current_profile_name() == "whole"
    return settings(max_examples=count if whole else max(count // THINNED, 10))
