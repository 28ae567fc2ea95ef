"""Control: which drafter, how far, for whom."""

from outrider.control.adaptive import Adaptive
from outrider.control.costs import Costs
from outrider.control.policy import FixedLength, Load, Policy, RoundStats
from outrider.control.survey import Survey

__all__ = ["Adaptive", "Costs", "FixedLength", "Load", "Policy", "RoundStats", "Survey"]
