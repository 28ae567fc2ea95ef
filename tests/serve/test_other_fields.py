"""Fields that other engines know: those that would change the result and are not served are refused, and unknown ones logged."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from outrider import LLM
from outrider.process import PythonProcess
from outrider.serve.schemas import ChatRequest, CompletionRequest
from outrider.serve.unserved import check_served, unknown_fields
from outrider.serve.validation import Refusal, check, restore
from tests.support.server import Running

USER = {"role": "user", "content": "x"}
REFUSED: list[tuple[str, Any, str]] = [
    ("mirostat", 2, ""), ("typical_p", 0.9, ""), ("xtc_probability", 0.1, ""), ("dry_multiplier", 0.8, ""), ("num_beams", 4, ""),
    ("top_n_sigma", 1.0, ""), ("repeat_penalty", 1.1, "repetition_penalty"), ("n_predict", 5, "max_tokens"),
    ("max_new_tokens", 5, "max_tokens"), ("regex", "a+", "structured_outputs.regex"), ("do_sample", False, "temperature"),
    ("use_beam_search", True, ""), ("logits_processors", ["x"], ""), ("stop_regex", "a", ""),
    ("json_schema", {"type": "object"}, "response_format"),
    ("best_of", 3, ""), ("spaces_between_special_tokens", False, ""), ("no_repeat_ngram_size", 2, ""), ("repeat_last_n", 64, ""),
]  # fmt: skip
WITHOUT_EFFECT: dict[str, Any] = {
    "mirostat": 0, "typical_p": 1, "xtc_probability": 0.0, "repeat_penalty": 1.0, "num_beams": 1, "do_sample": True, "best_of": 1,
    "use_beam_search": False, "logits_processors": [], "regex": None, "n_predict": -1, "repeat_last_n": 64, "dry_base": 1.75,
    "service_tier": "auto", "store": False, "metadata": {"a": "b"},
}  # fmt: skip


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(("name", "value", "ours"), REFUSED)
def test_what_would_change_the_result_is_refused_by_name(schema: Any, name: str, value: Any, ours: str) -> None:
    prompt = {"prompt": "x"} if schema is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    penalty = {"presence_penalty": 1.0} if name == "repeat_last_n" else {}
    path = "/v1/completions" if schema is CompletionRequest else "/v1/chat/completions"
    refusal = check(path, json.dumps(prompt | penalty | {name: value}).encode(), 16)
    assert isinstance(refusal, Refusal)
    assert refusal.message.startswith(f"{name} is not supported")
    assert refusal.param == name
    assert ours in refusal.message


def test_a_field_passes_beside_ours_with_the_same_value() -> None:
    check_served({"repeat_penalty": 1.2, "repetition_penalty": 1.2}, {"repetition_penalty"})
    with pytest.raises(ValueError, match="repeat_penalty is not supported; here: repetition_penalty"):
        check_served({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, {"repetition_penalty"})


def test_values_without_effect_pass() -> None:
    request = check("/v1/completions", json.dumps({"prompt": "x"} | WITHOUT_EFFECT).encode(), 16)
    assert isinstance(request, CompletionRequest)
    assert request.ignored == ()


@pytest.mark.parametrize(
    ("route", "prompt"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [USER]})]
)
def test_special_tokens_are_added_to_text_alone(route: str, prompt: dict[str, Any]) -> None:
    for added in (True, False):
        refused = isinstance(check(route, json.dumps(prompt | {"add_special_tokens": added}).encode(), 16), Refusal)
        assert refused == (added != ("prompt" in prompt))


def test_what_a_route_serves_is_not_refused_there() -> None:
    check_served({"reasoning": {"effort": "low"}}, {"reasoning"})
    with pytest.raises(ValueError, match="reasoning is not supported; here: reasoning_effort"):
        check_served({"reasoning": {"effort": "low"}}, {"reasoning_effort"})
    assert unknown_fields({"a": 1, "prompt": 2, "mirostat": 0}, {"prompt"}) == ("a",)


def test_refusals_and_logs_over_http(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    refused = server.post("/v1/completions", prompt="x", max_tokens=1, mirostat=2)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "mirostat is not supported")
    with caplog.at_level(logging.WARNING, "outrider.serve"):
        bodies: list[dict[str, Any]] = [{"colour\n": 1}, {"colour\n": 2, "smell": "x" * 100}]
        plain = server.post("/v1/completions", prompt="x", max_tokens=4, seed=1).json()["choices"]
        for unknown in bodies:
            assert server.post("/v1/completions", prompt="x", max_tokens=4, seed=1, **unknown).json()["choices"] == plain
    logged = [record.getMessage() for record in caplog.records if "was ignored" in record.getMessage()]
    assert [message.split("'")[1] for message in logged] == ["colour\\n", "smell"], "each once, and no value"


def test_unknown_fields_of_large_bodies_are_known_too() -> None:
    process = PythonProcess("outrider.serve.validation:check_in_worker")
    try:
        body = json.dumps({"prompt": [1, 2], "smell": 1, "tag": "a", "metadata": {"tag": "b"}}).encode()
        request = restore("/v1/completions", *process("/v1/completions", body, 16))
    finally:
        process.close()
    assert (request.ignored, request.tag, request.prompt) == (("smell",), "a", [1, 2])


@pytest.mark.parametrize("name", ["num_speculative_tokens", "prompt_lookup_num_tokens"])
def test_limits_of_drafts_are_settings_of_a_request(server: Running, llm: LLM, name: str) -> None:
    body: dict[str, Any] = {"prompt": "def read_config(path):\n    ", "max_tokens": 24, "temperature": 0}
    plain = server.post("/v1/completions", **body, speculation=False).json()
    if name == "prompt_lookup_num_tokens":  # this server has an EAGLE head alone
        refused = server.post("/v1/completions", **body, **{name: 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert "no lookup is loaded, but eagle, none" in refused.json()["error"]["message"]
        return
    longest = {}
    for limit in (0, 1, 3):
        answer = server.post("/v1/completions", **body, **{name: limit}).json()
        assert answer["choices"] == plain["choices"]
        longest[limit] = len(answer["metrics"]["speculative_decoding"]["acceptance_by_position"])
    assert longest == {0: 0, 1: 1, 3: 3}
    for wrong in (-1, 257, "1", True):
        assert server.post("/v1/completions", **body, **{name: wrong}).json()["error"]["param"] == name
    twice = server.post("/v1/completions", **body, num_speculative_tokens=2, speculation={"max_tokens": 3})
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, name)
