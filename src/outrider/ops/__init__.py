"""The arithmetic of the decoder, behind one small seam.

`Plain` is ordinary torch on any device: the specification, and what training differentiates.
`Blocked` gives a row the same bits whatever its neighbours, and is what serving uses on a CPU.
"""

from outrider.ops.attention import AttentionPlan, Segment, paged_attention, plan_attention
from outrider.ops.plain import BLOCK, Blocked, Ops, Plain

__all__ = ["BLOCK", "AttentionPlan", "Blocked", "Ops", "Plain", "Segment", "paged_attention", "plan_attention"]
