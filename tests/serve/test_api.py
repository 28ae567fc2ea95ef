"""The API as the official client uses it, against the same requests in process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from outrider import LLM, SamplingParams
from tests.support.server import Running, promised

PROMPT = "def read_config(path):\n    "


@pytest.fixture
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=("none",), max_retries=0)


@pytest.fixture(scope="module")
def solo(llm: LLM) -> Any:
    """Generates with a separate LLM without a server."""
    reference = LLM(speculation="none", max_num_seqs=4)
    return lambda prompt, **params: reference.generate(prompt, SamplingParams(**params))[0]


def test_a_completion_equals_the_engine_s_output(client: OpenAI, solo: Any) -> None:
    answer = client.completions.create(model="pyrite", prompt=PROMPT, max_tokens=24, temperature=0.8, seed=5)
    alone = solo(PROMPT, max_tokens=24, temperature=0.8, seed=5)
    assert answer.choices[0].text == alone.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(alone.prompt_token_ids), 24)
    assert answer.usage.total_tokens == len(alone.prompt_token_ids) + 24


def test_a_stream_adds_up_to_the_complete_answer(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "pyrite",
        "prompt": PROMPT + "# naïve 🙂 日本\n",
        "max_tokens": 40,
        "seed": 3,
        "temperature": 1,
    }
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_chat_in_a_stream_begins_with_the_role_and_ends_with_done(server: Running, client: OpenAI) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(model="pyrite", **body)
    events = server.events("/v1/chat/completions", **body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0] | {"stop_reason": None} == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == whole.choices[0].message.content
    assert all(event["object"] == "chat.completion.chunk" for event in events[:-1])
    assert "usage" not in events[0]


def test_n_samples_differ_and_each_equals_its_solo_run(client: OpenAI, solo: Any) -> None:
    answer = client.completions.create(model="pyrite", prompt=PROMPT, n=3, max_tokens=10, temperature=1.0, seed=11)
    alone = solo(PROMPT, n=3, max_tokens=10, temperature=1.0, seed=11)
    assert [choice.text for choice in answer.choices] == [output.text for output in alone.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3


def test_the_same_seed_gives_the_same_text(client: OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model="pyrite", prompt=PROMPT, max_tokens=16, temperature=1.0, seed=seed).choices[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_stop_strings_end_the_text_and_never_leak(server: Running, client: OpenAI) -> None:
    free = client.completions.create(model="pyrite", prompt=PROMPT, max_tokens=32, temperature=0).choices[0].text
    stop = free[8:12]
    cut = client.completions.create(model="pyrite", prompt=PROMPT, max_tokens=32, temperature=0, stop=[stop]).choices[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop  # type: ignore[attr-defined]
    chunks = server.events("/v1/completions", prompt=PROMPT, max_tokens=32, temperature=0, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == cut.text


def test_logprobs_of_a_completion(client: OpenAI, solo: Any) -> None:
    answer = client.completions.create(model="pyrite", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    alone = solo(PROMPT, max_tokens=6, temperature=0, logprobs=2).outputs[0]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [entry[t].logprob for entry, t in zip(alone.logprobs, alone.token_ids, strict=True)]
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    assert all(len(top) == 2 for top in logprobs.top_logprobs or ())
    assert logprobs.text_offset == [len("".join((logprobs.tokens or [])[:i])) for i in range(6)]


def test_logprobs_of_a_chat_and_in_its_stream(server: Running, client: OpenAI) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(model="pyrite", **body, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == [entry.top_logprobs[0].token for entry in logprobs.content], (
        "greedy takes the first"
    )
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == answer.choices[0].message.content
    events = server.events("/v1/chat/completions", **body, logprobs=True, top_logprobs=3)
    streamed = [entry for event in events[:-1] for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in streamed] == [entry.token for entry in logprobs.content]


def test_lists_of_prompts_and_of_ids(server: Running, client: OpenAI) -> None:
    texts = ["import os\n", "class A:\n"]
    ids = [server.post("/tokenize", prompt=text).json()["tokens"] for text in texts]
    by_text = client.completions.create(model="pyrite", prompt=texts, max_tokens=5, temperature=0, n=2)
    by_ids = client.completions.create(model="pyrite", prompt=ids, max_tokens=5, temperature=0, n=2)
    one = client.completions.create(model="pyrite", prompt=ids[1], max_tokens=5, temperature=0)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    assert by_text.choices[2].text == by_text.choices[3].text == one.choices[0].text


def test_echo_puts_the_prompt_first_with_its_logprobs(client: OpenAI, server: Running) -> None:
    answer = client.completions.create(model="pyrite", prompt="import os\n", max_tokens=3, echo=True, logprobs=1, temperature=0)
    choice = answer.choices[0]
    assert choice.text.startswith("import os\n")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == answer.usage.total_tokens  # type: ignore[union-attr]
    only = server.post("/v1/completions", prompt="import os\n", max_tokens=0, echo=True, logprobs=1).json()
    assert only["choices"][0]["text"] == "import os\n"
    assert only["choices"][0]["logprobs"]["token_logprobs"] == choice.logprobs.token_logprobs[:-3]
    assert only["usage"]["completion_tokens"] == 0
    streamed = server.events("/v1/completions", prompt="import os\n", max_tokens=3, echo=True, temperature=0)
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == choice.text


def test_speculation_per_request_changes_no_token(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    on = server.post("/v1/completions", **body).json()
    off = server.post("/v1/completions", **body, speculation={"enabled": False}).json()
    short = server.post("/v1/completions", **body, speculation={"max_tokens": 1}).json()
    assert on["choices"][0]["token_ids"] == off["choices"][0]["token_ids"] == short["choices"][0]["token_ids"]
    stats = on["metrics"]["speculative_decoding"]
    assert stats["method"] == "eagle"
    assert stats["num_accepted_draft_tokens"] > 0
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]
    assert sum(i * n for i, n in enumerate(stats["acceptance_histogram"])) == stats["num_accepted_draft_tokens"]
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert short["metrics"]["speculative_decoding"]["acceptance_by_position"][1:] == []
    refused = server.post("/v1/completions", **body, speculation={"method": "medusa"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_details_name_the_source_of_every_token(server: Running, path: str) -> None:
    chat_body = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2}
    body = chat_body if "chat" in path else {"prompt": PROMPT, "logprobs": 2}
    body |= {"max_tokens": 24, "temperature": 0, "return_token_details": True, "return_token_ids": True}
    choice = server.post(path, **body).json()["choices"][0]
    whole = choice["token_details"]
    assert [detail["id"] for detail in whole] == choice["token_ids"]
    assert "".join(detail["text"] for detail in whole) == (choice["text"] if "text" in choice else choice["message"]["content"])
    events = server.events(path, **body)
    streamed = streamed_details(events)
    assert promised(streamed) == promised(whole)
    for details in (whole, streamed):
        assert {detail["source"] for detail in details} == {"eagle", "target"}
        for detail in details:
            assert detail["accepted"] == (detail["source"] == "eagle") == (detail["position"] is not None)
            assert detail["logprob"] == detail["top"][0]["logprob"]
            assert len(detail["top"]) == 2
    assert events[-2]["metrics"]["speculative_decoding"]["method"] == "eagle"


def streamed_details(events: list[Any]) -> list[dict[str, Any]]:
    return [detail for event in events[:-1] for detail in event["choices"][0].get("token_details", [])]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_rejected_draft_tokens_are_returned_on_request(server: Running, path: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = prompt | {"max_tokens": 24, "temperature": 0, "return_token_details": True}
    silent = server.post(path, **body).json()["choices"][0]["token_details"]
    assert not any("rejected" in detail for detail in silent)
    body |= {"speculation": {"return_rejected": True}}
    answer, events = server.post(path, **body).json(), server.events(path, **body)
    runs = [(answer["choices"][0]["token_details"], answer), (streamed_details(events), events[-2])]
    for details, ending in runs:
        spec = ending["metrics"]["speculative_decoding"]
        rejected = [node for detail in details for node in detail.get("rejected", ())]
        assert len(rejected) == spec["num_draft_tokens"] - spec["num_accepted_draft_tokens"] > 0
        assert promised(details) == promised(silent)
        for detail in details:
            for i, node in enumerate(detail.get("rejected", ())):
                assert node.keys() == {"id", "text", "position", "parent"}
                assert -1 <= node["parent"] < i
        for token in {node["id"]: node for node in rejected}.values():
            assert server.post("/detokenize", tokens=[token["id"]]).json()["prompt"] == token["text"]


def test_parameters_reach_the_engine(server_with: Callable[..., Running], solo: Any) -> None:
    server = server_with(allow_priority=True)
    body: dict[str, Any] = {
        "max_tokens": 20, "min_tokens": 12, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4,
        "ignore_eos": True,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {"5": -50.0},
        "bad_words": ["return"], "stop_token_ids": [7],
    }  # fmt: skip
    answer = server.post("/v1/completions", prompt=PROMPT, **body, priority=-3, return_token_ids=True, user="me", unknown_field=1)
    assert answer.json()["choices"][0]["token_ids"] == solo(PROMPT, **body).outputs[0].token_ids


def test_usage_may_come_with_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_models_version_and_tokens(client: OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["pyrite"]
    assert client.models.retrieve("pyrite").id == "pyrite"
    assert server.http.get("/version").json()["version"]
    ids = server.post("/tokenize", prompt="import os").json()
    assert server.post("/detokenize", tokens=ids["tokens"]).json() == {"prompt": "import os"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    assert chat["count"] == len(chat["tokens"]) > 2


def test_usage_reports_cached_prompt_tokens(server: Running) -> None:
    prompt = "# a long beginning that two requests share\n" * 20
    salted = {"prompt": prompt, "max_tokens": 1, "cache_salt": "usage-test"}
    first, second = (server.post("/v1/completions", **salted).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 2**40}, 400, "max_tokens"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"seed": 2**63}, 400, "seed"),
        ({"n": 0}, 400, "n"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x " * 6000}, 400, "prompt"),
        ({"prompt": "x" * 400_000}, 400, "prompt"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ({"model": "gpt-4"}, 404, "model"),
    ],
)
def test_errors_name_the_parameter(server: Running, changes: dict[str, Any], status: int, param: str) -> None:
    answer = server.post("/v1/completions", **({"prompt": "x", "max_tokens": 1} | changes))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}


def test_errors_raise_the_client_s_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="pyrite", prompt="x", max_tokens=5000)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="pyrite", prompt="x = 1\n" * 3000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "name", ["best_of", "suffix", "functions", "audio", "prediction", "chat_template", "prompt_embeds", "use_beam_search"]
)
def test_unsupported_fields_are_refused(server: Running, name: str) -> None:
    answer = server.post("/v1/completions", prompt="x", max_tokens=1, **{name: "something"})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="x", max_tokens=1, something_unknown=[1]).status_code == 200


def test_a_chat_without_a_template_is_refused(server: Running, llm: LLM) -> None:
    assert llm.tokenizer is not None
    template = llm.tokenizer.chat_template
    assert template is not None
    try:
        llm.tokenizer.use_chat_template("")
        answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1)
    finally:
        llm.tokenizer.use_chat_template(template)
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]
