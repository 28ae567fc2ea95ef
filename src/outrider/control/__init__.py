"""Control: which drafter, how far, for whom."""

from outrider.control.calibration import Calibration
from outrider.control.controller import Controller
from outrider.control.costs import Costs
from outrider.control.policy import FixedLength, Load, Policy, RoundStats

__all__ = ["Calibration", "Controller", "Costs", "FixedLength", "Load", "Policy", "RoundStats"]
