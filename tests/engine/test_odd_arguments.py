"""Whatever is passed to the API gives InvalidParameter, another typed error, or a result; never anything else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.config import RequestSpeculation, SpeculationConfig
from outrider.draft import register_drafter, registry
from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter, OutriderError
from outrider.sampling import SamplingParams
from tests.support import write_family, write_tokenizer
from tests.support.examples import examples

_FEW = SamplingParams(max_tokens=2, temperature=0.0)
_odd = st.sampled_from(
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            1,
            2,
            3,
            7,
            10**5000,
            -(10**30),
            2**31,
            2**63,
            0.0,
            0.5,
            -0.5,
            1e308,
            math.nan,
            math.inf,
            -math.inf,
        ),
        *("", "x", "none", "auto", "ngram", "\0", "\ud800", "x" * 5000, "7", "\u00b2", "9" * 5000, b"", b"x", bytearray(b"x")),
        *([], [0], [None], [[]], ["x"], [1.5], [True], [b"x"], [10**30], (), (1,), {}, {"a": 1}, {1: 2}, {"method": "ngram"}),
        *(set(), {1}, object(), object, len, range(3), iter(()), 1j, [[1], [2]], [{"role": "user"}], float("1e-320")),
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tokenizer(tmp_path_factory.mktemp("odd"))
    return write_family(root, "llama2", vocab_size=300, num_hidden_layers=1, max_position_embeddings=64)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, load_format="dummy", speculation="ngram", max_num_seqs=2, page_size=8)


def typed(call: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    except OutriderError as error:
        assert str(error)  # noqa: PT017 (either outcome is right)
        assert len(str(error)) < 900  # noqa: PT017
        return None


_SIZES = ["max_model_len", "max_num_seqs", "max_batch_rows", "page_size", "kv_bytes", "prefix_cache", "max_queue", "unheard_of"]
_SETTINGS = ["dtype", "load_format", "revision", "device", "numerics", "fp8_activations", "memory", "speculation"]
_VLLM = ["speculative_config", "speculative_model", "num_speculative_tokens"]


@examples(250)
@given(st.dictionaries(st.sampled_from([*_SIZES, *_SETTINGS, *_VLLM]), _odd, min_size=1, max_size=2))
@example({"page_size": 1.5})
@example({"memory": "x"})
@example({"speculative_config": 7})
@example({"num_speculative_tokens": "x"})
@example({"kv_bytes": -1})
def test_settings(model: Path, changes: dict[str, Any]) -> None:
    modest = {"load_format": "dummy", "speculation": "none", "kv_bytes": 2**20} | changes
    if any(name in modest for name in _VLLM):
        modest.pop("speculation", None)
    llm = typed(LLM, model, **modest)
    if llm is not None:
        typed(llm.generate, [[1, 2]], _FEW)


_METHODS = {
    "ngram": ["ngram_min", "ngram_max"],
    "suffix": ["min_match", "max_match", "factor", "offset", "min_prob", "branch", "shared_tokens"],
    "recycle": ["top", "table_tokens", "shared", "tenants"],
    "lookahead": ["window", "ngram", "pool_tokens", "from_prompt"],
    "draft_model": ["dtype", "load_format", "beam", "branch", "depth", "vocabulary", "model"],
    "eagle": ["beam", "branch", "depth", "model"],
    "medusa": ["dynamic", "model"],
    "early_exit": ["exit_layer", "tail"],
    "cascade": ["levels", "dtype", "load_format"],
    "mixture": ["members", "merge", "splice", "enough", "dtype", "load_format"],
    "auto": ["members", "dtype", "load_format"],
    "none": [],
}


@st.composite
def _speculation(draw: st.DrawFn) -> Any:
    method = draw(st.sampled_from(sorted(_METHODS)))
    names = st.sampled_from([*_METHODS[method], "draft_tokens", "rule", "method"])
    nested = st.lists(st.one_of(_odd, st.sampled_from([*_METHODS, *({"method": name} for name in _METHODS)])), max_size=3)
    return {"method": method} | draw(st.dictionaries(names, st.one_of(_odd, nested), max_size=2))


@examples(300)
@given(_speculation())
@example({"method": "suffix", "factor": math.inf})
@example({"method": ["ngram"]})
@example({"method": "ngram", 1: 2})
@example({"method": "ngram", "ngram_min": "x"})
@example({"method": "eagle", "beam": 1.5})
@example({"method": "mixture"})
@example({"method": "mixture", "members": ["none"]})
@example({"method": "cascade"})
@example({"method": "early_exit"})
def test_speculation(model: Path, speculation: Any) -> None:
    llm = typed(LLM, model, load_format="dummy", kv_bytes=2**20, speculation=speculation)
    if llm is not None:
        typed(llm.generate, [[1, 2, 1, 2]], _FEW)


def test_a_tenant_is_a_string(llm: LLM) -> None:
    for tenant in (7, [], b"x"):
        with pytest.raises(InvalidParameter, match="tenant: must be a string"):
            llm.generate([[1, 2]], _FEW, tenant=tenant)  # type: ignore[arg-type]


def test_drafters_without_end() -> None:
    endless: dict[str, Any] = {"method": "mixture"}
    endless["members"] = [endless]
    with pytest.raises(InvalidParameter, match="inside drafters"):
        SpeculationConfig.parse(endless)
    with pytest.raises(InvalidParameter):
        SpeculationConfig.parse("(mixture:members=" * 3000 + ")" * 3000)


@examples(300)
@given(
    st.one_of(
        st.text(alphabet="eagle:=+()0.\u00b2\0\ud800", max_size=24), st.sampled_from(["ngram:\u00b2", "ngram:" + "9" * 5000])
    )
)
def test_methods_in_one_word(word: str) -> None:
    typed(SpeculationConfig.parse, word)


def _hashable(value: object) -> bool:
    try:
        return isinstance(hash(value), int)
    except TypeError:
        return False


_FIELDS = [
    name
    for name in SamplingParams.__slots__
    if name not in ("greedy", "temperature_bucket", "uses_history", "adjusts", "takes_largest", "truncates")
]


@examples(500)
@given(
    st.dictionaries(
        st.sampled_from(_FIELDS),
        st.one_of(_odd, st.dictionaries(_odd.filter(_hashable), _odd, max_size=2)),
        min_size=1,
        max_size=3,
    )
)
@example({"temperature": 10**5000})
@example({"logit_bias": {"9" * 5000: 1}})
@example({"stop": ["\ud800"]})
@example({"bad_words": ["\ud800"]})
@example({"bad_word_ids": 7})
@example({"bad_word_ids": ((300,),)})
@example({"min_tokens": 2, "stop_token_ids": [299]})
def test_sampling_parameters(llm: LLM, changes: dict[str, Any]) -> None:
    params = typed(SamplingParams, **{"max_tokens": 2} | changes)
    if params is not None:
        typed(llm.generate, [[1, 2]], params)
    assert llm.generate([[1, 2]], _FEW)[0].outputs[0].token_ids, "the engine serves the next request"


@examples(300)
@given(
    st.sampled_from(["generate", "stream", "chat"]),
    _odd,
    st.one_of(st.just(_FEW), _odd),
    st.one_of(st.none(), _odd),
    st.one_of(st.none(), _odd),
)
@example("generate", "\ud800", _FEW, None, None)
@example("generate", "a\0b", _FEW, None, None)
@example("generate", None, _FEW, None, None)
@example("generate", b"x", _FEW, None, None)
@example("generate", [[1], "x", None], _FEW, None, None)
@example("generate", [1], 7, None, None)
@example("stream", [1], {"max_tokens": 1}, None, None)
@example("generate", [1], _FEW, {1: 2, "a": 3}, None)
@example("generate", [1], _FEW, None, 7)
@example("chat", "hello", _FEW, None, None)
@example("chat", [{"role": "user", "content": "\ud800"}], _FEW, None, None)
@example("chat", [{"role": object()}], _FEW, None, None)
def test_requests(llm: LLM, name: str, prompt: Any, params: Any, speculation: Any, tenant: Any) -> None:
    def call() -> None:
        if name == "chat":
            llm.chat(prompt, params, tenant=tenant)
        elif name == "stream":
            list(llm.stream(prompt, params, tenant=tenant, speculation=speculation))
        else:
            llm.generate(prompt, params, speculation, tenant)

    if params is None:
        params = _FEW
    typed(call)
    assert llm.generate([[1, 2]], _FEW)[0].outputs[0].token_ids, "the engine serves the next request"


@examples(100)
@given(
    st.one_of(_odd, st.dictionaries(st.sampled_from(["enabled", "method", "max_tokens", "draft_tokens", "x"]), _odd, max_size=2))
)
def test_speculation_of_a_request(speculation: Any) -> None:
    typed(RequestSpeculation.parse, speculation)


_OTHER_CALLS: dict[str, Any] = {
    "use_tqdm": lambda llm, odd: None if callable(odd) else llm.generate([[1], [2]], _FEW, use_tqdm=odd),
    "beside": lambda llm, odd: llm.beside(odd).generate([[1, 2]], _FEW),
    "priority": lambda llm, odd: llm.intake.prepare([1, 2], _FEW, priority=odd),
    "costs": lambda llm, odd: llm.measure_costs(odd),
    "register name": lambda _, odd: register_drafter(odd, lambda context: object()),  # type: ignore[arg-type, return-value]
    "register factory": lambda _, odd: register_drafter("odd", odd),
    "temperature": lambda llm, odd: llm.default_params(temperature=odd),
}


@examples(250)
@given(st.sampled_from(sorted(_OTHER_CALLS)), _odd)
@example("use_tqdm", 7)
@example("priority", "x")
@example("register name", [])
@example("register name", 7)
@example("costs", "x")
def test_other_calls(llm: LLM, name: str, odd: Any) -> None:
    before = dict(registry._REGISTERED)
    typed(_OTHER_CALLS[name], llm, odd)
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)
    assert llm.generate([[1, 2]], _FEW)[0].outputs[0].token_ids, "the engine serves the next request"
