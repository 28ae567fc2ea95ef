"""Control: which drafter, how far, for whom."""

from outrider.control.adaptive import Adaptive
from outrider.control.calibration import Calibration
from outrider.control.costs import Costs
from outrider.control.policy import FixedLength, Load, Policy, RoundStats

__all__ = ["Adaptive", "Calibration", "Costs", "FixedLength", "Load", "Policy", "RoundStats"]
