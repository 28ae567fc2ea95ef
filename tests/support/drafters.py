"""What drafters hold on to."""

from __future__ import annotations

from typing import Any

from outrider.core import Sequence
from outrider.draft.mixture import Member


def held(drafter: Any) -> list[Sequence]:
    """Sequences found anywhere in the drafter's own attributes, and in those of the drafters it is made of."""
    found: list[Sequence] = []
    for value in vars(drafter).values():
        if isinstance(value, dict):
            found += [key for key in value if isinstance(key, Sequence)]
        for part in value if isinstance(value, list | tuple) else [value]:
            inner = part.drafter if isinstance(part, Member) else part
            if type(inner).__module__.startswith("outrider.draft."):
                found += held(inner) if hasattr(inner, "__dict__") else []
    return found
