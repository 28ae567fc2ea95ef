"""A GPU's memory at start: what is kept for buffers follows what runs, not the longest context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.engine.device import share_memory
from outrider.ops.cuda.segments import MAX_SLOTS, SEGMENT, scratch_slots

GIB = 2**30
LLAMA_8B: Any = SimpleNamespace(parameters=8_000_000_000, depth=32, heads=32, kv_heads=8, head_dim=128, vocab=128_256, ffn=14_336)


def test_many_sequences_with_a_long_limit_fit() -> None:
    share = share_memory([LLAMA_8B], 120 * GIB, 64, 65_536, rows=256)
    assert share.reserve < 2 * GIB
    assert share.pages * 64 > 700_000  # tokens of KV
    assert share.reserve == share_memory([LLAMA_8B], 120 * GIB, 64, 1 << 20, rows=256).reserve


def test_a_scratch_has_a_slot_for_each_segment_while_they_fit() -> None:
    assert scratch_slots(1, 65_536) == 65_536 // SEGMENT
    assert scratch_slots(4, SEGMENT + 1) == 8
    assert scratch_slots(256, 65_536) == scratch_slots(256, 1 << 20) == MAX_SLOTS
    assert scratch_slots(MAX_SLOTS, 1 << 20) >= MAX_SLOTS


def test_what_drafters_take_is_missing_for_sequences() -> None:
    draft: Any = SimpleNamespace(**vars(LLAMA_8B) | {"parameters": 1_000_000_000, "depth": 16})
    alone, beside = (share_memory(models, 120 * GIB, 64, 65_536) for models in ([LLAMA_8B], [LLAMA_8B, draft]))
    assert alone.sequences(65_536, 64) == alone.pages // 1024 > beside.sequences(65_536, 64) > 0
    assert share_memory([LLAMA_8B], 10 * GIB, 64, 65_536).sequences(65_536, 64) == 0
