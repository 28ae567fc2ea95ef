"""Policies that force what a controller would seldom plan."""

from __future__ import annotations

import random

from outrider.control import FixedLength, Load
from outrider.core import Plan

__all__ = ["SometimesDrafts"]


class SometimesDrafts(FixedLength):
    """Drafts in random rounds."""

    def __init__(self) -> None:
        super().__init__(3)
        self._random = random.Random(5)

    def plan(self, load: Load) -> Plan:
        plan = super().plan(load)
        return plan if self._random.random() < 0.6 else plan._replace(lengths=(0,) * len(plan.lengths))
