"""Requests and answers as vLLM, SGLang, llama.cpp, Ollama and Outrider spell them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.bench.audit.cases import SCHEMA
from outrider.bench.audit.records import AuditRequest, Choice, Drafting, TokenLogprob
from outrider.bench.audit.spelling import body_of, choices_of, counters_of, drafting_of


def test_bodies_hold_only_what_differs_from_defaults() -> None:
    assert body_of(AuditRequest("x", 5), chat=False) == {"prompt": "x", "max_tokens": 5, "temperature": 0.0}
    request = AuditRequest("x", 5, 0.8, 7, 0.4, 0.5, 1.2, ("a",), 3, SCHEMA, 2)
    body = body_of(request, chat=False)
    assert {name: body[name] for name in ("seed", "frequency_penalty", "presence_penalty", "n", "logprobs", "stop")} == {
        "seed": 7, "frequency_penalty": 0.4, "presence_penalty": 0.5, "n": 2, "logprobs": 3, "stop": ["a"],
    }  # fmt: skip
    assert body["repetition_penalty"] == body["repeat_penalty"] == 1.2
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    chat = body_of(request, chat=True)
    assert (chat["logprobs"], chat["top_logprobs"], chat["messages"][0]["content"]) == (True, 3, "x")


VLLM = {"index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [1, 2], "logprobs": {
    "tokens": ["a", "b"], "token_logprobs": [None, -0.5], "top_logprobs": [None, {"b": -0.5, "c": -1.0}]}}  # fmt: skip
LLAMA_CPP = {"index": 0, "text": "b", "finish_reason": "length", "logprobs": {
    "content": [{"token": "b", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -0.5}]}]}}  # fmt: skip
OLLAMA = {"index": 0, "text": "b", "finish_reason": "stop"}
CHAT = {"index": 0, "message": {"role": "assistant", "content": "b"}, "logprobs": None, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (VLLM, Choice("ab", "stop", (1, 2), (TokenLogprob("b", -0.5, {"b": -0.5, "c": -1.0}),))),
        (LLAMA_CPP, Choice("b", "length", None, (TokenLogprob("b", -0.5, {"b": -0.5}),))),
        (OLLAMA, Choice("b", "stop")),
        (CHAT, Choice("b", "stop")),
    ],
    ids=["vllm", "llama.cpp", "ollama", "chat"],
)
def test_choices(choice: dict[str, Any], expected: Choice) -> None:
    second = {"index": 1, "text": "second"}
    assert choices_of({"choices": [second, choice]}) == (expected, Choice("second"))


VLLM_METRICS = {"num_draft_tokens": 9, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}
SGLANG_DETAILS = {"spec_verify_ct": 10, "spec_accept_length": 3.0, "spec_accept_rate": 0.5}


@pytest.mark.parametrize(
    ("answer", "drafting"),
    [
        ({"metrics": {"speculative_decoding": VLLM_METRICS}}, (9, 6, 3)),
        ({"timings": {"draft_n": 8, "draft_n_accepted": 2}}, (8, 2, 0)),
        ({"sglext": {"spec_tokens_details": SGLANG_DETAILS}}, (40, 20, 10)),
        ({"usage": {"completion_tokens": 3}}, None),
    ],
)
def test_acceptance_in_answers(answer: dict[str, Any], drafting: tuple[int, ...] | None) -> None:
    assert drafting_of(answer) == (None if drafting is None else Drafting(*drafting))


def test_acceptance_in_metrics() -> None:
    text = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1e1
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
"""
    assert counters_of(text) == Drafting(40, 12, 10)
    assert counters_of("vllm:num_requests_running 1") is None
