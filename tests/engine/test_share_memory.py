"""A GPU's memory at start: what is kept for buffers follows what runs, not the longest context."""

from __future__ import annotations

from dataclasses import replace

from outrider.config import EngineConfig
from outrider.engine.device import share_memory
from outrider.model import LlamaShape, Rope
from outrider.model.memory import StateSizes, border_states, plan_states
from outrider.ops.cuda.segments import MAX_SLOTS, SEGMENT, scratch_slots
from tests.support import family_config

GIB = 2**30
LLAMA_8B = LlamaShape("LlamaForCausalLM", 128_256, 4096, 32, 32, 8, 128, 14_336, 65_536, Rope()).spec()


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


def test_a_hybrid_has_pages_for_its_attention_and_a_pool_of_states() -> None:
    spec = family_config("qwen3.5")
    attending = replace(spec, layers=tuple(layer for layer in spec.layers if layer.recurrent is None))
    assert share_memory([spec], GIB, 64, 512).page == share_memory([attending], GIB, 64, 512).page
    sizes = EngineConfig(max_num_seqs=32, max_model_len=512)
    pool = plan_states(spec, sizes, 1 << 40)
    assert pool == StateSizes(running=130, nodes=512)
    assert pool.sequences == 32
    kept = sum(2 * layer.keys + layer.inner + 2 * layer.heads for layer in spec.recurrent)
    assert pool.bytes(spec) == 130 * spec.state_bytes + 512 * 4 * kept
    assert border_states(spec, sizes, 40 * spec.state_bytes) == 10
    assert border_states(spec, sizes, 1 << 40) == 32 * 8, "as many as there can be full pages"
    assert border_states(spec, replace(sizes, prefix_cache=False), 1 << 40) == 0
    assert plan_states(LLAMA_8B, sizes, 1 << 40) == StateSizes()
    tight = plan_states(spec, sizes, pool.bytes(spec))
    assert 14 <= tight.sequences <= 16, "half of what is left is for KV"
    assert plan_states(spec, sizes, 0).sequences == 1


def test_what_drafters_take_is_missing_for_sequences() -> None:
    draft = replace(LLAMA_8B, layers=LLAMA_8B.layers[:16])
    alone, beside = (share_memory(models, 120 * GIB, 64, 65_536) for models in ([LLAMA_8B], [LLAMA_8B, draft]))
    assert alone.sequences(65_536, 64) == alone.pages // 1024 > beside.sequences(65_536, 64) > 0
    assert share_memory([LLAMA_8B], 10 * GIB, 64, 65_536).sequences(65_536, 64) == 0
