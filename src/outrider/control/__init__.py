"""Control: which drafter, how far, for whom."""

from outrider.control.adaptive import Adaptive, Arm
from outrider.control.costs import Costs
from outrider.control.policy import FixedLength, Load, Policy, RoundStats

__all__ = ["Adaptive", "Arm", "Costs", "FixedLength", "Load", "Policy", "RoundStats"]
