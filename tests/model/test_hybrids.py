"""Models with recurrent layers: prompts in chunks, long texts, drafts that are accepted in part, and what is refused."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.cache import SequenceState
from outrider.config import EngineConfig
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Decoder, Feed, Runner, compile_spec, load_decoder
from outrider.model.backends import CUDA
from outrider.model.memory import kv_pool, plan_memory, sequence_bytes, token_bytes
from outrider.ops import Blocked
from tests.support import BASE, HYBRIDS, family_config, make_pool
from tests.support.families import VOCAB, build_reference, expected

MIXERS = ["short convolutions", "gated delta rule, gated attention", "Mamba-2, experts", "Mamba-2 beside attention, multipliers"]
CASES = ["lfm2", "qwen3-next", "qwen3.5", "granite-4-h", "nemotron-h", "falcon-h1"]
LONGEST, SLOTS = 130, [3, 9, 1, 7, 4, 2, 0, 5, 8]


@lru_cache(maxsize=8)
def decoder_of(name: str) -> Decoder:
    return random_decoder(FEATURE_SPECS[name])


@lru_cache(maxsize=8)
def whole_prompt(name: str) -> tuple[Tensor, SequenceState]:
    """Logits of a prompt in one piece, and the state after it."""
    return read(name, [list(range(LONGEST))])


def read(name: str, chunks: list[list[int]]) -> tuple[Tensor, SequenceState]:
    """Logits of a prompt that is read in chunks of positions, and the state after it."""
    decoder, state = decoder_of(name), SequenceState(borders={})
    runner = Runner(decoder, kv_pool(decoder.spec, 12, 16), Blocked())
    rows = []
    for chunk in chunks:
        tokens = [position * 37 % decoder.spec.vocab for position in chunk]
        last = runner.forward([Feed(SLOTS, chunk[0], tokens, state=state)]).last
        rows.append(runner.logits(last, range(len(chunk))))
    return torch.cat(rows), state


@pytest.mark.grid(once=["size"])
@pytest.mark.parametrize("size", range(1, LONGEST + 1))
@pytest.mark.parametrize("name", MIXERS)
def test_a_prompt_in_chunks_of_every_size_has_the_same_bits(name: str, size: int) -> None:
    whole, want = whole_prompt(name)
    made, got = read(name, [list(range(start, min(start + size, LONGEST))) for start in range(0, LONGEST, size)])
    assert torch.equal(made, whole)
    assert got.borders is not None
    assert want.borders is not None
    assert list(got.borders) == list(want.borders) == list(range(LONGEST // 16))
    for page, states in want.borders.items():
        for one, other in zip(states, got.borders[page], strict=True):
            assert torch.equal(one.window, other.window)
            assert (one.memory is None) == (other.memory is None)
            assert one.memory is None or (other.memory is not None and torch.equal(one.memory, other.memory))


@pytest.mark.parametrize("name", CASES)
def test_a_text_of_512_tokens_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    reference = build_reference(name, tmp_path)
    decoder = load_decoder(tmp_path)
    runner, text = Runner(decoder, make_pool(decoder, pages=40), Blocked()), [i * 37 % VOCAB for i in range(512)]
    made, want = runner.logits(runner.forward([Feed(list(range(32)), 0, text)]).last, range(512)), expected(reference, text)
    torch.testing.assert_close(made, want, atol=1e-4 * float(want.abs().max()), rtol=0)  # both are as far from float64


def test_rows_without_a_state_are_not_computed() -> None:
    runner = Runner(decoder_of(MIXERS[1]), kv_pool(decoder_of(MIXERS[1]).spec, 12, 16), Blocked())
    with pytest.raises(ValueError, match="no recurrent state"):
        runner.forward([Feed(SLOTS, 5, [1])])


def test_accepted_nodes_are_replayed_without_products() -> None:
    """The forward after a draft multiplies its own rows alone, and gives what it gives after the same text."""

    class Counting(Blocked):
        rows: list[int] = []  # noqa: RUF012 (one instance)

        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.rows.append(len(x))
            return super().linear(x, weight, bias)

    decoder, ops = decoder_of(MIXERS[1]), Counting()
    runner = Runner(decoder, kv_pool(decoder.spec, 12, 16), ops)
    drafted, plain = SequenceState(), SequenceState()
    runner.forward([Feed(SLOTS, 0, [1, 2, 3], [4, 9, 5, 6], [-1, -1, 0, 2], state=drafted)])
    drafted.accept([0, 2])
    runner.pool.move(runner.pool.slots(SLOTS, [5]), runner.pool.slots(SLOTS, [4]))
    ops.rows.clear()
    made = runner.forward([Feed(SLOTS, 5, [7], state=drafted)]).last
    assert set(ops.rows) == {1}
    want = runner.forward([Feed([10, 11], 0, [1, 2, 3, 4, 5, 7], state=plain)]).last
    assert torch.equal(made[0], want[-1])


def test_the_plan_of_memory_counts_states() -> None:
    spec = family_config("qwen3.5")
    state, sizes = spec.state_bytes, EngineConfig(max_num_seqs=4, max_model_len=512)
    assert state == 2 * 4 * (3 * (2 * 32 + 32) + 4 * 16 * 8)
    rich = plan_memory(spec, sizes, 2**30)
    assert (rich.pages, rich.states) == (32, 32), "as many as there can be full pages"
    running = 4 * sequence_bytes(spec)
    assert running == 4 * (4 * state + 16 * 2 * 4 * (2 * 32 + 2 * 32 + 2 * 4))
    tight = plan_memory(spec, sizes, running + 40 * state)
    assert tight.states == 10
    assert tight.pages == 30 * state // (64 * token_bytes(spec))
    assert plan_memory(spec, EngineConfig(max_num_seqs=4, max_model_len=512, prefix_cache=False), 2**30).states == 0
    with pytest.raises(InvalidParameter, match="recurrent states of 4 sequences.*lower max_num_seqs"):
        plan_memory(spec, sizes, running)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3.5", {"linear_num_key_heads": 3}, "linear_num_key_heads must divide"),
        ("qwen3.5", {"hidden_act": "gelu"}, "only silu is"),
        ("qwen3.5", {"layer_types": ["linear_attention", "ring", "full_attention"]}, "layer_types must name"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 3}, "without attention is not supported"),
        ("lfm2", {"layer_types": ["conv", "conv"]}, "without attention is not supported"),
        ("falcon-h1", {"mamba_d_head": 7}, "mamba_n_heads times mamba_d_head must be 48"),
        ("falcon-h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must have 5 numbers"),
        ("falcon-h1", {"attention_in_multiplier": 2.0, "attention_bias": True}, "beside attention_bias"),
        ("falcon-h1", {"mamba_n_groups": 4}, "groups of Mamba-2 must divide its heads"),
        ("falcon-h1", {"time_step_limit": [2.0, 1.0]}, "two rising numbers"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        compile_spec(BASE | HYBRIDS[name] | changes)


def test_narrow_experts_of_nemotron_are_refused() -> None:
    config = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*E", "moe_latent_size": 8}
    with pytest.raises(ModelError, match="moe_latent_size"):
        compile_spec({**BASE, "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, **config})


def test_a_gpu_says_what_it_lacks() -> None:
    assert CUDA.missing(family_config("qwen3.5")) == []
    assert CUDA.missing(family_config("falcon-h1")) == ["Mamba-2", "multipliers of a part", "recurrent beside attention"]
