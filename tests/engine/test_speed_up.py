"""speed_up on tiny models of many architectures: tokens are those of the same loop without drafts, and of the class itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider import SamplingParams
from outrider.engine.speed_up import SpedUpModel
from outrider.model import Runner
from outrider.model.hf import CachedRunner, PagedRunner, native_decoder
from tests.support.families import build_reference
from tests.support.transformers_models import EXACT, VOCAB, tiny_model

METHODS = ("ngram", "suffix", "recycle", "lookahead", "draft_model")
QUICK = {"native": False, "calibration_s": 0}


@pytest.fixture(scope="module")
def assistant() -> Any:
    return tiny_model("llama", seed=5, num_hidden_layers=1)


def prompts(count: int) -> list[list[int]]:
    """Repetitive prompts of different lengths, so that lookups have something to find."""
    return [[2 + (7 * i * (b + 1)) % 11 for i in range(9 + 5 * b)] for b in range(count)]


def params(count: int) -> list[SamplingParams]:
    """Two greedy rows, then a seeded one; rows end at different times."""
    return [
        SamplingParams(temperature=0.6 * (b % 3 == 2), seed=b, max_tokens=24 - 4 * (b % 5), ignore_eos=True) for b in range(count)
    ]


def written(llm: Any, count: int) -> list[list[int]]:
    outputs = llm.generate(prompts(count), params(count), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def near(name: str) -> Any:
    """A model that often agrees with the tiny one of that name."""
    model = tiny_model(name)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return model


def drafted(fast: SpedUpModel, method: str) -> Any:
    """The same model, drafted for by a method in every round."""
    from outrider.config import SpeculationConfig

    return fast.beside(SpeculationConfig.parse({"method": method, "draft_tokens": 6, "adaptive": False}))


def assert_greedy_is_the_class(model: Any, fast: SpedUpModel) -> None:
    ids = torch.tensor([prompt[:9] for prompt in prompts(3)])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    assert torch.equal(fast.generate(input_ids=ids, max_new_tokens=10, do_sample=False), wanted)


@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_the_same_with_every_drafter(name: str) -> None:
    model = tiny_model(name)
    with outrider.speed_up(model, speculation="none", assistant_model=near(name), **QUICK) as fast:
        assert isinstance(fast.engine.runner, PagedRunner)
        assert fast.guarantee.tokens_guaranteed, fast.guarantee.reason
        plain = written(fast, 8)
        assert_greedy_is_the_class(model, fast)
        for i, method in enumerate(METHODS):
            other, batch = drafted(fast, method), 1 + (list(EXACT).index(name) + 3 * i) % 8
            assert written(other, batch) == plain[:batch], (method, batch)
        assert 0 < other.engine.tally.accepted < other.engine.tally.drafted


def test_enough_architectures_have_no_native_backend() -> None:
    assert len(EXACT) >= 20
    assert sum(native_decoder(tiny_model(name), widen=False) is None for name in list(EXACT)[11:]) >= 8


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_tokens_are_the_same_in_every_batch(method: str) -> None:
    with outrider.speed_up(tiny_model("deepseek-v3"), speculation="none", assistant_model=near("deepseek-v3"), **QUICK) as fast:
        alone = written(fast, 8)
        other = drafted(fast, method)
        for batch in range(1, 9):
            assert written(other, batch) == alone[:batch]
        assert 0 < other.engine.tally.accepted < other.engine.tally.drafted


@pytest.mark.parametrize("name", ["qwen3-next", "jamba", "gptj", "llama4", "llama-dynamic", "minimax"])
def test_a_class_that_bypasses_the_interfaces_is_served_plainly(name: str, assistant: Any) -> None:
    model = tiny_model(name)
    with outrider.speed_up(model, speculation="none", assistant_model=assistant, **QUICK) as fast:
        assert isinstance(fast.engine.runner, CachedRunner)
        plain = written(fast, 3)
        for method in ("suffix", "draft_model"):
            other = drafted(fast, method)
            assert written(other, 3) == plain, method
        output = other.generate(prompts(1), SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0]
        assert output.speculation["tokens_guaranteed"] is False
        assert output.speculation["not_guaranteed_because"]
        assert_greedy_is_the_class(model, fast)


def test_drafts_are_accepted_by_a_class_with_recurrent_state() -> None:
    with outrider.speed_up(tiny_model("qwen3-next"), speculation="none", **QUICK) as fast:
        other = drafted(fast, "ngram")
        outputs = other.generate(prompts(4), SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
        assert sum(output.outputs[0].speculation["accepted"] for output in outputs) > 0


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2"])
def test_families_with_recurrent_layers_are_handed_over_and_exact(name: str) -> None:
    model = tiny_model(name)
    with outrider.speed_up(model, speculation="none", assistant_model=near(name), calibration_s=0) as fast:
        assert type(fast.engine.runner) is Runner
        plain = written(fast, 4)
        assert_greedy_is_the_class(model, fast)
        for method in ("suffix", "draft_model"):
            assert written(drafted(fast, method), 4) == plain, method


@pytest.mark.parametrize("name", ["llama-dynamic", "qwen3-next"])
def test_a_class_that_fails_in_a_forward_leaves_no_torn_cache(name: str) -> None:
    """The first layer has stored its part of the row when the second one raises; the round is run again."""
    model, calls = tiny_model(name), iter(range(10**6))

    def fail(*_: Any) -> None:
        if next(calls) == 30:
            raise RuntimeError("planted")

    with outrider.speed_up(model, speculation="none", **QUICK) as fast:
        plain = written(fast, 3)
    model.model.layers[1].register_forward_pre_hook(fail)
    with outrider.speed_up(model, speculation="none", **QUICK) as fast:
        assert written(drafted(fast, "ngram"), 3) == plain
        assert next(calls) > 31


class _Uneven(nn.Linear):
    """A product whose rows depend on how many there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 1e-6 * (x.shape[-2] % 5))


def test_the_check_finds_rows_that_depend_on_their_number() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp
    uneven = _Uneven(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)
    uneven.weight = layer.up_proj.weight
    layer.up_proj = uneven
    with outrider.speed_up(model, speculation="none", **QUICK) as fast:
        assert isinstance(fast.engine.runner, PagedRunner)
        assert not fast.guarantee.tokens_guaranteed
        assert "how many rows" in (fast.guarantee.reason or "")


def test_matrices_are_shared_where_asked() -> None:
    model = tiny_model("qwen3")
    with outrider.speed_up(model, speculation="ngram", pack=False, **QUICK) as fast:
        assert fast.guarantee.tokens_guaranteed
        assert_greedy_is_the_class(model, fast)


def test_native_families_are_handed_over() -> None:
    model = tiny_model("gemma3", tie_word_embeddings=True)
    with outrider.speed_up(model, speculation="ngram", calibration_s=0) as fast:
        assert not isinstance(fast.engine.runner, PagedRunner | CachedRunner)
        assert_greedy_is_the_class(model, fast)


@pytest.mark.parametrize("case", ["gpt2", "pythia", "gptj", "falcon-40b", "opt", "gemma3", "cohere2", "starcoder2"])
def test_weights_of_a_loaded_model_fill_the_native_decoder(case: str) -> None:
    """Also where its class and its checkpoints name them differently."""
    model = build_reference(case, None)
    with outrider.speed_up(model, speculation="none", calibration_s=0, max_num_seqs=1, max_model_len=64) as fast:
        assert not isinstance(fast.engine.runner, PagedRunner | CachedRunner)
        ids = torch.tensor([[3, 4, 5]])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(fast.generate(ids, max_new_tokens=8), wanted)


def test_early_exit_says_which_layers_can_run_alone() -> None:
    with pytest.raises(outrider.errors.InvalidParameter, match="leave tail at 0"):
        outrider.speed_up(tiny_model("mixtral"), speculation={"method": "early_exit", "exit_layer": 1, "tail": 1}, **QUICK)
    with pytest.raises(outrider.errors.InvalidParameter, match="which this model cannot"):
        outrider.speed_up(tiny_model("gptj"), speculation={"method": "early_exit", "exit_layer": 1}, **QUICK)


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that wrapping could change."""
    state: dict[str, Any] = {f"tensor {name}": (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    for name, module in model.named_modules():
        state[f"module {name}"] = (id(module), type(module), sorted(module.__dict__), module.training)
        state[f"hooks {name}"] = (len(module._forward_hooks), len(module._forward_pre_hooks), module.__dict__.get("forward"))
        if (config := getattr(module, "config", None)) is not None:
            state[f"config {name}"] = (id(config), config.to_dict(), config._attn_implementation, config._experts_implementation)
    state["generation"] = model.generation_config.to_dict()
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(same, a, b)) and len(a) == len(b) if isinstance(a, tuple) else a == b


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3-next"])
@pytest.mark.parametrize("native", [False, True])
def test_the_model_is_left_as_it_was(name: str, native: bool) -> None:
    model = tiny_model(name).train()
    ids = torch.tensor([prompts(1)[0]])
    before, wanted = snapshot(model), model.generate(ids, max_new_tokens=6, do_sample=False)
    with outrider.speed_up(model, speculation="ngram", native=native, calibration_s=0) as fast:
        fast.generate(input_ids=ids, max_new_tokens=6, do_sample=False, assistant_early_exit=1 if name == "llama" else None)
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), wanted)  # beside ours
    after = snapshot(model)
    assert after.keys() == before.keys()
    assert [key for key in before if not same(before[key], after[key])] == []
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), wanted)


def encoder_decoder() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def without_cache() -> Any:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=128))


def partly_on_disk() -> Any:
    model = tiny_model("llama")
    model.model.layers[1].to(device="meta")
    return model


def on_two_devices() -> Any:
    model = tiny_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "lm_head": "cpu"}
    return model


def without_head() -> Any:
    return tiny_model("llama").model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (encoder_decoder, "has an encoder; only decoders are served: load a decoder with AutoModelForCausalLM"),
        (without_cache, "keeps no KV cache"),
        (partly_on_disk, "not in memory .* load the model without offloading"),
        (on_two_devices, "spread over 0, cpu; one device is served"),
        (without_head, "load a decoder with AutoModelForCausalLM"),
        (lambda: "gpt2", "must be a model that Transformers has loaded, got str"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(make: Any, says: str) -> None:
    with pytest.raises(outrider.errors.OutriderError, match=says):
        outrider.speed_up(make(), calibration_s=0)


@pytest.fixture(scope="module")
def fast() -> Iterator[SpedUpModel]:
    with outrider.speed_up(tiny_model("mixtral"), speculation="ngram", calibration_s=0) as fast:
        yield fast


def test_text_needs_a_tokenizer(fast: SpedUpModel) -> None:
    with pytest.raises(outrider.errors.ModelError, match="pass tokenizer=AutoTokenizer"):
        fast.generate("text")
    with pytest.raises(outrider.errors.ModelError, match="pass tokenizer=AutoTokenizer"):
        next(fast.stream("text"))


def test_an_assistant_that_cannot_draft_is_refused(fast: SpedUpModel) -> None:
    with pytest.raises(outrider.errors.InvalidParameter, match="JambaForCausalLM cannot draft: it keeps recurrent state"):
        fast.generate(input_ids=torch.tensor([[2, 3]]), assistant_model=tiny_model("jamba"))


def test_it_is_an_llm(fast: SpedUpModel) -> None:
    pieces = list(fast.stream([2, 3, 4], temperature=0.0, max_tokens=5))
    output = fast.generate([[2, 3, 4]], temperature=0.0, max_tokens=5)[0].outputs[0]
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert output.speculation["tokens_guaranteed"] is True
