"""Control: which drafter, how far, for whom."""

from outrider.control.policy import FixedLength, Load, Policy, RoundStats

__all__ = ["FixedLength", "Load", "Policy", "RoundStats"]
