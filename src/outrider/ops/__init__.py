"""The arithmetic of the decoder, behind one small seam.

`Plain` is ordinary torch on any device: the specification, and what training differentiates.
`Blocked` gives a row the same bits whatever its neighbours, in torch; `Native` does so with the core in
ops/cpu, where it was built. `serving_ops` chooses between the two.
"""

from outrider.ops.attention import AttentionPlan, Segment, paged_attention, plan_attention
from outrider.ops.blocks import BLOCK_FORMS, StoredBlocks
from outrider.ops.floats import FourBitFloats, ScaledFloats
from outrider.ops.groups import GROUP_STEP, Grouped
from outrider.ops.native import (
    BESIDE,
    BLOCK_ROWS,
    JOINED,
    KEY_ROWS,
    TEXT_ROWS,
    TOKENS,
    BlockGuesses,
    BlockParams,
    ChainParams,
    Core,
    Epilogue,
    GrownTree,
    GrowthParams,
    LayerWeights,
    NormWeights,
    PackedLinear,
    RotaryRows,
    Shape,
    Stack,
    StackSpan,
    StackWeights,
    find_core,
)
from outrider.ops.plain import Blocked, Native, Ops, Plain, missing_core, serving_ops, threads_used
from outrider.ops.row_counts import BLOCK
from outrider.ops.torch_threads import keep_one_torch_thread, one_torch_thread, set_torch_threads_here

__all__ = [
    "BESIDE",
    "BLOCK",
    "BLOCK_FORMS",
    "BLOCK_ROWS",
    "GROUP_STEP",
    "JOINED",
    "KEY_ROWS",
    "TEXT_ROWS",
    "TOKENS",
    "AttentionPlan",
    "BlockGuesses",
    "BlockParams",
    "Blocked",
    "ChainParams",
    "Core",
    "Epilogue",
    "FourBitFloats",
    "Grouped",
    "GrownTree",
    "GrowthParams",
    "LayerWeights",
    "Native",
    "NormWeights",
    "Ops",
    "PackedLinear",
    "Plain",
    "RotaryRows",
    "ScaledFloats",
    "Segment",
    "Shape",
    "Stack",
    "StackSpan",
    "StackWeights",
    "StoredBlocks",
    "find_core",
    "keep_one_torch_thread",
    "missing_core",
    "one_torch_thread",
    "paged_attention",
    "plan_attention",
    "serving_ops",
    "set_torch_threads_here",
    "threads_used",
]
