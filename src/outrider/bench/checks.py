"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Check"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was measured or compared, and whether it is as it should be."""

    section: str
    name: str
    value: str
    good: bool = True
