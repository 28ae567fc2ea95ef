"""The Python API: outputs, aliases, and errors at the door."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.control import Controller
from outrider.errors import InvalidParameter, ModelError, OutriderError, UnknownMethod
from outrider.model.load import INT8
from outrider.ops.native import find_core
from tests.support import write_family, write_tokenizer

VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llm")
    write_tokenizer(root, VOCAB)
    return write_family(root, "llama2", dtype="bfloat16", vocab_size=VOCAB, max_position_embeddings=256)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, load_format="dummy", speculation="ngram")


def test_generate_shapes(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=6, n=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    results = llm.generate(["def main", "the quick"], params)
    assert [r.prompt for r in results] == ["def main", "the quick"]
    for result in results:
        assert [o.index for o in result.outputs] == [0, 1, 2]
        assert len({tuple(o.token_ids) for o in result.outputs}) > 1
        assert len({o.seed for o in result.outputs}) == 1
        for output in result.outputs:
            assert len(output.token_ids) == len(output.logprobs) == len(output.from_draft) == 6
            assert output.cumulative_logprob == pytest.approx(
                sum(p[t].logprob for p, t in zip(output.logprobs, output.token_ids, strict=True))
            )
            assert output.text == llm.tokenizer.decode(output.token_ids)
        assert result.prompt_logprobs[0] is None
        assert [t in p for p, t in zip(result.prompt_logprobs[1:], result.prompt_token_ids[1:], strict=True)]
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert llm.engine.pages.used == 0


def test_a_drawn_seed_replays(llm: LLM) -> None:
    first = llm.generate("a b c", SamplingParams(temperature=1.0, max_tokens=12))[0].outputs[0]
    again = llm.generate("a b c", SamplingParams(temperature=1.0, max_tokens=12, seed=first.seed))[0].outputs[0]
    assert again.token_ids == first.token_ids


def test_sampling_parameters_by_keyword(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=7, ignore_eos=True)
    keywords = {"temperature": 0.9, "seed": 3, "max_tokens": 7, "ignore_eos": True}
    wanted = llm.generate("a b c", params)[0].outputs[0].token_ids
    assert len(wanted) == 7
    assert llm.generate("a b c", **keywords)[0].outputs[0].token_ids == wanted
    changed = replace(params, seed=4)
    assert llm.generate("a b c", changed, seed=3)[0].outputs[0].token_ids == wanted
    both = llm.generate(["a b c", "a b c"], [changed, replace(params, max_tokens=2)], seed=3)
    assert [output.outputs[0].token_ids for output in both] == [wanted, wanted[:2]]
    assert [token for piece in llm.stream("a b c", **keywords) for token in piece.token_ids] == wanted
    assert llm.chat(messages, **keywords)[0].outputs[0].token_ids == llm.chat(messages, params)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_token": 3}, r"max_token: is not a sampling parameter \(did you mean 'max_tokens'\?\); known: n, temperature"),
        ({"telepathy": 1}, "telepathy: is not a sampling parameter; known"),
        ({"greedy": True}, "greedy: is not a sampling parameter"),
        ({"temperature": "hot"}, "temperature: must be a number"),
    ],
)
def test_unknown_keywords_are_typed_errors(llm: LLM, keywords: dict[str, Any], message: str) -> None:
    calls = (
        lambda: llm.generate("a", **keywords),
        lambda: llm.chat([{"role": "user", "content": "a"}], **keywords),
        lambda: list(llm.stream("a", **keywords)),
    )
    for call in calls:
        with pytest.raises(InvalidParameter, match=message):
            call()


@pytest.mark.parametrize("missing", [{"speculation": "draft_model"}, {"kv_bytes": 10}, {"speculation": "ngram:ngram_min=0"}])
def test_what_cannot_be_built_leaves_nothing_behind(model: Path, missing: dict[str, Any]) -> None:
    llm = LLM.__new__(LLM)
    with pytest.raises(InvalidParameter):
        llm.__init__(model, load_format="dummy", **missing)  # type: ignore[misc]
    assert vars(llm) == {}


def test_chat(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": "hello"}]
    single = llm.chat(messages, params)
    assert llm.tokenizer.decode(single[0].prompt_token_ids) == "[user]hello[assistant]"
    both = llm.chat([messages, messages], params)
    assert [r.outputs[0].token_ids for r in both] == [single[0].outputs[0].token_ids] * 2


def test_stream_equals_generate_and_can_be_left(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
    whole = llm.generate("def main", params)[0].outputs[0]
    pieces = list(llm.stream("def main", params))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert pieces[-1].output.token_ids == whole.token_ids
    for _ in llm.stream("def main", params):
        break
    assert llm.engine.pages.used == 0
    assert not llm.engine.has_work


def test_streams_may_be_interleaved(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    wanted = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in ("def main", "the quick")]
    streams = [llm.stream(prompt, params) for prompt in ("def main", "the quick")]
    got: list[list[int]] = [[], []]
    live = [0, 1]
    while live:
        for i in list(live):
            piece = next(streams[i], None)
            if piece is None:
                live.remove(i)
            else:
                got[i] += piece.token_ids
    assert got == wanted


@pytest.mark.parametrize("passed", [{}, {"speculation": None}, {"speculation": True}, {"speculation": "auto"}])
def test_it_speculates_unless_it_is_told_not_to(model: Path, passed: dict[str, Any]) -> None:
    llm = LLM(model, load_format="dummy", **passed)
    assert llm.speculation == LLM(model, load_format="dummy", speculation="auto").speculation
    assert set(llm.speculation.methods()) == {"auto", "suffix"}
    for off in (False, "none"):
        assert list(LLM(model, load_format="dummy", speculation=off).speculation.methods()) == ["none"]
    assert LLM(model, load_format="dummy", num_speculative_tokens=3).speculation.draft_tokens == 3


def test_more_requests_than_slots(model: Path) -> None:
    small = LLM(model, speculation="none", load_format="dummy", max_num_seqs=2)
    params = [SamplingParams(temperature=0, max_tokens=3 + i % 4, ignore_eos=True) for i in range(7)]
    together = small.generate([[i + 1, i + 2] for i in range(7)], params)
    alone = [small.generate([[i + 1, i + 2]], params[i])[0] for i in range(7)]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


def test_limits_of_one_request_by_the_names_of_other_engines(model: Path) -> None:
    llm = LLM(model, load_format="dummy", speculation="mixture:8:members=suffix+recycle:adaptive=false")
    prompt, few = [[1, 2, 3, 1, 2, 3, 1, 2]], {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    plain = llm.generate(prompt, speculation=False, **few)[0].outputs[0]
    for limit in (0, 1, 3):
        by_keyword = llm.generate(prompt, num_speculative_tokens=limit, **few)[0].outputs[0]
        by_params = llm.generate(prompt, SamplingParams(num_speculative_tokens=limit, **few))[0].outputs[0]  # type: ignore[arg-type]
        assert by_keyword.token_ids == by_params.token_ids == plain.token_ids
        assert by_keyword.speculation["drafted"] <= limit * by_keyword.speculation["rounds"]
        assert by_keyword.speculation == by_params.speculation
        assert (by_keyword.speculation["drafted"] > 0) == (limit > 0)
    requests, method = llm.intake.prepare([1], SamplingParams(prompt_lookup_num_tokens=4))
    assert (requests[0].method, requests[0].draft_tokens, method) == ("suffix", 4, "suffix")
    (piece, *_) = llm.stream(prompt[0], num_speculative_tokens=1, **few)
    assert piece.token_ids[0] == plain.token_ids[0]
    off = LLM(model, load_format="dummy", speculation="none")
    assert off.generate(prompt, prompt_lookup_num_tokens=4, **few)[0].outputs[0].token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"num_speculative_tokens": 2, "prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens: was given beside another"),
        ({"num_speculative_tokens": 2, "speculation": {"max_tokens": 2}}, "num_speculative_tokens: was given beside another"),
        (
            {"prompt_lookup_num_tokens": 2, "speculation": {"method": "eagle"}},
            "is for lookups .ngram, suffix., not for method 'eagle'",
        ),
    ],
)
def test_limits_that_contradict_are_refused(llm: LLM, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        llm.generate([[1]], max_tokens=1, **limits)


def test_a_context_above_the_model_s_is_an_error(model: Path) -> None:
    with pytest.raises(InvalidParameter, match="max_model_len: 257 is more than the model's context of 256 tokens"):
        LLM(model, load_format="dummy", speculation="none", max_model_len=257)
    assert LLM(model, load_format="dummy", speculation="none", max_model_len=256).max_model_len == 256


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculation": {"method": "draft_model", "model": "SELF", "draft_tokens": 3, "adaptive": False}},
        {"speculative_config": {"method": "draft_model", "model": "SELF", "num_speculative_tokens": 3, "adaptive": False}},
        {"speculative_model": "SELF", "num_speculative_tokens": 3},
        {"speculation": "ngram", "num_speculative_tokens": 3},
    ],
)
def test_spellings_of_speculation(model: Path, arguments: dict) -> None:  # type: ignore[type-arg]
    def filled_in(value):  # type: ignore[no-untyped-def]
        if isinstance(value, dict):
            return {k: filled_in(v) for k, v in value.items()}
        return str(model) if value == "SELF" else value

    llm = LLM(model, load_format="dummy", **filled_in(arguments))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    output = llm.generate([[1, 2, 3]], params)[0].outputs[0]
    assert llm.speculation.draft_tokens == 3
    assert output.token_ids == llm.generate([[1, 2, 3]], params, speculation=False)[0].outputs[0].token_ids
    assert llm.speculation.adaptive == isinstance(llm.engine.policy, Controller)
    if not llm.speculation.adaptive:
        assert output.speculation["accepted"] == output.speculation["drafted"] > 0


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1], {"max_tokens": 256}, "max_tokens"),
        ([1], {"max_tokens": 2**31 - 1}, "max_tokens"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_bad_requests(llm: LLM, prompt, params: dict, param: str) -> None:  # type: ignore[no-untyped-def, type-arg]
    with pytest.raises(InvalidParameter) as caught:
        llm.generate([prompt], SamplingParams(**params))
    assert caught.value.param == param
    assert llm.engine.pages.used == 0


def test_bad_settings(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownMethod, match="unknown 'telepathy'; known: auto, cascade, dflash, draft_model"):
        LLM(model, load_format="dummy", speculation="telepathy")
    with pytest.raises(InvalidParameter, match="needs the directory or hub id of its weights"):
        LLM(model, load_format="dummy", speculation="draft_model")
    with pytest.raises(InvalidParameter, match="pass one of them"):
        LLM(model, load_format="dummy", speculation="ngram", speculative_config={"method": "ngram"})
    with pytest.raises(InvalidParameter, match="max_num_sequences: is not a setting.*did you mean 'max_num_seqs'"):
        LLM(model, load_format="dummy", max_num_sequences=3)
    with pytest.raises(InvalidParameter, match="kv_bytes"):
        LLM(model, load_format="dummy", kv_bytes=10)
    with pytest.raises(InvalidParameter, match="sets of parameters"):
        LLM(model, speculation="none", load_format="dummy").generate([[1], [2]], [SamplingParams()])
    with pytest.raises(OutriderError, match="not a model directory"):
        LLM(tmp_path / "nothing")


def test_vocabularies_without_a_common_token_are_refused(model: Path, tmp_path: Path) -> None:
    bare = write_family(tmp_path / "bare", "llama2", vocab_size=VOCAB + 1)
    with pytest.raises(ModelError, match="vocabulary of 301, the target 300.*holds no tokenizer"):
        LLM(model, load_format="dummy", speculation={"method": "draft_model", "model": str(bare)})


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    llm = LLM(write_family(tmp_path, "llama2"), speculation="none", load_format="dummy")
    with pytest.raises(ModelError, match="holds no tokenizer; pass token ids"):
        llm.generate("text")
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0].outputs[0].text == ""


def test_kv_memory_bounds_requests(model: Path) -> None:
    token_bytes = LLM(model, speculation="none", load_format="dummy").engine.runner.pool.token_bytes
    llm = LLM(model, speculation="none", load_format="dummy", kv_bytes=128 * token_bytes, page_size=64)
    with pytest.raises(InvalidParameter, match="do not fit the KV memory, which holds 128"):
        llm.generate([[1]], SamplingParams(max_tokens=200))


def test_bad_words_never_appear(llm: LLM) -> None:
    free = llm.generate("def main", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    word = llm.tokenizer.decode(free.token_ids[:1])
    if not word.strip() or "\ufffd" in word:
        word = llm.tokenizer.decode([llm.tokenizer.encode_bare("a")[0]])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words=[word])
    banned = set(llm.tokenizer.encode_bare(word)[-1:])
    for speculate in (True, False):
        output = llm.generate("def main", params, speculation=speculate)[0].outputs[0]
        assert not banned & set(output.token_ids[:1])


@pytest.mark.skipif(find_core()[0] is None, reason="needs the native core")
@pytest.mark.parametrize(("method", "dtype"), [("draft_model:2", INT8), ("draft_model:2:dtype=bfloat16", "bfloat16")])
def test_a_draft_stored_in_int8_is_served_so(method: str, dtype: str) -> None:
    bundled = LLM(speculation=method)
    assert bundled.config.dtype == "bfloat16"
    assert [runner.decoder.spec.dtype for runner in bundled._built.draft_runners] == [dtype]


def test_no_end_of_a_prompt_appears_in_the_text(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    smile = list(tokenizer.encode_bare("🚀"))
    assert len(smile) > 2
    for prompt in ([5, *tokenizer.encode_bare("return \ufffd")], [5, *smile[:1]], [5, *smile[:-1]], [5, *smile]):
        output = llm.generate([prompt], params)[0].outputs[0]
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output.token_ids])
        assert whole.startswith(before) or before.endswith("\ufffd")
        assert output.text == (whole[len(before) :] if whole.startswith(before) else whole[len(before.rstrip("\ufffd")) :])
        assert "".join(piece.text for piece in llm.stream(prompt, params)) == output.text
