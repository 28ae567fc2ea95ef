"""Earlier texts and predictions over HTTP: whose text drafts for whom, what is dropped, and what usage says of a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.serve.cli import describe
from outrider.serve.memory import memory_of, prediction_details
from outrider.serve.settings import ServerSettings
from tests.support.server import Running

PROMPT = "def area(width, height):\n"
ANSWER: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
Starter = Callable[..., Running]


@pytest.fixture(scope="module")
def remembering() -> LLM:
    return LLM(speculation="suffix:8:shared_tokens=4096:shared_prompts=1:edits=1:adaptive=false", max_num_seqs=4)


@pytest.fixture(scope="module")
def keyed(remembering: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = Path(tmp_path_factory.mktemp("keys")) / "keys"
    file.write_text("alice:one\nbob:two\n")
    running = Running(ServerSettings(api_key_file=file), lambda: remembering).wait()
    yield running
    running.close()


def post(server: Running, key: str, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def test_a_text_drafts_for_its_own_key_and_salt_alone(keyed: Running, remembering: LLM) -> None:
    for key, salt in (("one", None), ("two", None), ("one", "s"), ("two", "s")):
        salted = {} if salt is None else {"cache_salt": salt}
        texts = [post(keyed, key, "/v1/completions", **ANSWER, **salted).json()["choices"][0]["text"] for _ in range(2)]
        assert texts[0] == texts[1]
    drafter: Any = remembering.engine.drafter.drafter
    owners = {"key alice\n", "key bob\n", "key alice\ns", "key bob\ns"}
    assert drafter.sources() == {(owner, owner) for owner in owners}
    assert all(remembering.kept(owner).texts == 1 for owner in owners)
    assert post(keyed, "one", "/forget").json() == {"texts": 1, "tokens": remembering.kept("key bob\n").tokens}
    assert post(keyed, "one", "/forget").json() == {"texts": 0, "tokens": 0}
    assert remembering.kept("key alice\n").texts == 0
    assert remembering.kept("key alice\ns").texts == remembering.kept("key bob\n").texts == 1
    assert post(keyed, "one", "/forget", cache_salt="s").json()["texts"] == 1
    assert post(keyed, "wrong", "/forget").status_code == 401


def test_a_request_may_not_want_to_be_remembered(keyed: Running, remembering: LLM) -> None:
    post(keyed, "two", "/forget")
    post(keyed, "two", "/v1/completions", **ANSWER, speculation={"remember": False}).raise_for_status()
    assert remembering.kept("key bob\n").texts == 0


def test_a_key_cannot_be_spelled_as_a_salt() -> None:
    assert memory_of("address 127.0.0.1", "key alice\n") != memory_of("key alice", None)
    assert len({memory_of("key a", "b"), memory_of("key a", None), memory_of("address 1.1.1.1", "b"), ""}) == 4
    assert memory_of("address 1.1.1.1", None) == ""


def test_without_keys_only_a_salt_says_whose_a_text_is(server: Running, llm: LLM) -> None:
    answer = server.post("/forget")
    assert answer.status_code == 400
    assert "cache_salt" in answer.json()["error"]["message"]
    assert server.post("/forget", cache_salt="x").json() == {"texts": 0, "tokens": 0}
    assert server.post("/forget", cache_salt="").status_code == 400


def test_a_predicted_output_is_accepted_and_counted(keyed: Running) -> None:
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="two", max_retries=0)
    messages: Any = [{"role": "user", "content": "Write the class Stack."}]
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": messages, "max_tokens": 40, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    for prediction in (text, [{"type": "text", "text": text}]):
        answer = client.chat.completions.create(**asked, prediction={"type": "content", "content": prediction})  # type: ignore
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        assert details.accepted_prediction_tokens >= 30
    wrong = client.chat.completions.create(**asked, prediction={"type": "content", "content": "ten grey mice on a roof"})
    assert wrong.choices[0].message.content == text
    assert wrong.usage is not None
    assert wrong.usage.completion_tokens_details is not None
    assert wrong.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens


@pytest.mark.parametrize("prediction", ["text", {"type": "other", "content": "x"}, {"type": "content"}])
def test_a_wrong_prediction_is_refused(server: Running, prediction: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    answer = server.post("/v1/chat/completions", messages=messages, prediction=prediction, max_tokens=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prediction")


def test_a_prediction_longer_than_the_context_is_refused(server: Running) -> None:
    prediction = {"type": "content", "content": "x" * 200_000}
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], prediction=prediction, max_tokens=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prediction", "outputs", "accepted"),
    [
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]], 5),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [[1, 2, 3, 4, 0, 6, 7, 8, 9]], 8),
        ([1, 2, 3, 4, 5], [[3, 4, 5], [1, 2, 3, 4]], 4),
        ([1, 2], [[9, 1, 2]], 2),
        ([1, 2, 3, 4], [[]], 0),
    ],
)
def test_what_of_a_prediction_counts_as_accepted(prediction: list[int], outputs: list[list[int]], accepted: int) -> None:
    made = [CompletionOutput(i, "", tokens, "stop", None, 0) for i, tokens in enumerate(outputs)]
    details = prediction_details(prediction, made)
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == len(prediction) * len(outputs) - accepted
    assert prediction_details((), made) == {}


def test_texts_that_a_client_sends_draft_for_that_client_alone(keyed: Running, remembering: LLM) -> None:
    drafter: Any = remembering.engine.drafter.drafter
    for key in ("one", "two"):
        post(keyed, key, "/forget")
    unkept = ANSWER | {"speculation": {"remember": False}}
    text = post(keyed, "one", "/v1/completions", **unkept).json()["choices"][0]["text"]
    kept = post(keyed, "one", "/remember", texts=[PROMPT + text, "x = 1\n"]).json()
    assert kept == {"texts": 2, "tokens": remembering.kept("key alice\n").tokens}
    assert post(keyed, "one", "/remember", texts=["z"], cache_salt="s").json()["texts"] == 1
    assert remembering.kept("key alice\n").texts == 2
    assert remembering.kept("key bob\n").texts == 0
    accepted = {}
    for key, salt in (("two", {}), ("one", {"cache_salt": "s"}), ("one", {})):
        answer = post(keyed, key, "/v1/completions", **ANSWER, **salt).json()
        assert answer["choices"][0]["text"] == text
        accepted[key, bool(salt)] = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted["one", False] >= 16
    assert accepted["two", False] < accepted["one", False]
    assert accepted["one", True] < accepted["one", False]
    assert ("key alice\n", "key alice\n") in drafter.sources()
    assert all(owner == reader for owner, reader in drafter.sources())
    for key in ("one", "two"):
        post(keyed, key, "/forget")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": "x"}, "texts"),
        ({"texts": [3]}, "texts[0]"),
        ({"texts": [""]}, "texts[0]"),
        ({"texts": ["x"] * 1025}, "texts"),
        ({"texts": ["x"], "cache_salt": ""}, "cache_salt"),
    ],
)
def test_texts_to_remember_are_checked(keyed: Running, body: dict[str, Any], param: str) -> None:
    answer = post(keyed, "one", "/remember", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_texts_to_remember_need_a_key_or_a_salt_and_have_a_size(keyed: Running, server: Running) -> None:
    assert post(keyed, "wrong", "/remember", texts=["x"]).status_code == 401
    assert post(keyed, "one", "/remember", texts=["x" * 5 * 2**20]).status_code == 413
    assert server.post("/remember", texts=["x"]).status_code == 400
    assert server.post("/remember", texts=["x"], cache_salt="s").json() == {"texts": 0, "tokens": 0}  # nothing there looks up


def test_a_corpus_is_searched_for_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    file = tmp_path / "area.py"
    plain = LLM(speculation="none").generate(PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True)[0].outputs[0]
    file.write_text(PROMPT + plain.text)
    searching = LLM(speculation="suffix:8:adaptive=false", corpus=file, max_num_seqs=4)
    assert "1 files" in describe(searching, ServerSettings(), ("127.0.0.1", 1))
    running = Running(ServerSettings(api_key=("one", "two")), lambda: searching).wait()
    try:
        for key in ("one", "two"):
            answer = post(running, key, "/v1/completions", **ANSWER).json()
            assert answer["choices"][0]["text"] == plain.text
            assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] >= 16
    finally:
        running.close()
