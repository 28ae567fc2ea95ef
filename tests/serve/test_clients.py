"""Clients as their documentation uses them, with nothing changed but the base URL: stream, tools, structured output, turns."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.agents import CITY
from tests.support.server import Running

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other people's packages
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}
SETTINGS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched or reported elsewhere."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What clients leave open, such as an event loop of this thread, is closed here and not in the middle of other tests."""
    yield
    with suppress(RuntimeError):  # there is no loop
        asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)
    gc.collect()


# langchain-openai


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat_openai(request: pytest.FixtureRequest, server: Running) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        model="pyrite", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=60, max_retries=0,
        use_responses_api=request.param,
    )  # fmt: skip


def test_langchain_streams_what_it_invokes(chat_openai: Any) -> None:
    whole = chat_openai.invoke([("system", "Be brief."), ("human", "hi"), ("ai", "hello"), ("human", "def f(")])
    parts = chat_openai.stream([("system", "Be brief."), ("human", "hi"), ("ai", "hello"), ("human", "def f(")])
    assert "".join(part.text for part in parts) == whole.text
    assert whole.usage_metadata["output_tokens"] == 60


def test_langchain_calls_tools_in_turns(chat_openai: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool(args_schema=CITY)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    bound = chat_openai.bind_tools([get_weather], tool_choice="get_weather")
    question = HumanMessage("What is the weather in Rome?")
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], set(call["args"])) == ("get_weather", {"city"})
    streamed = None
    for part in bound.stream([question]):
        streamed = part if streamed is None else streamed + part
    assert streamed is not None
    assert [call["args"] for call in streamed.tool_calls] == [call["args"]]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat_openai.invoke([question, answer, result]).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_structured_output(chat_openai: Any, method: str) -> None:
    assert isinstance(chat_openai.with_structured_output(Person, method=method).invoke("John is 25"), Person)


def test_langchain_continues_from_the_last_response(server: Running) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model="pyrite", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0,
        use_responses_api=True, use_previous_response_id=True,
    )  # fmt: skip
    first = model.invoke("def main(")
    messages: list[Any] = [("human", "def main("), first, ("human", "go on")]
    second = model.invoke(messages)
    alone = model.model_copy(update={"use_previous_response_id": False}).invoke(messages)
    assert second.text == alone.text
    assert second.usage_metadata["input_tokens"] == alone.usage_metadata["input_tokens"]


# litellm


@pytest.fixture(params=["openai", "anthropic"])
def completion(request: pytest.FixtureRequest, server: Running) -> Any:
    """`litellm.completion` through one of its providers."""
    litellm = pytest.importorskip("litellm")
    base = f"{server.url}/v1" if request.param == "openai" else server.url
    fixed = {"model": f"{request.param}/pyrite", "api_base": base, "api_key": "none", "num_retries": 0}
    return lambda **body: litellm.completion(**fixed, **{"messages": ASK, "temperature": 0, "max_tokens": 40} | body)


def test_litellm_streams_what_it_completes(completion: Any) -> None:
    whole = completion().choices[0]
    parts = [part.choices[0] for part in completion(stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert parts[-1].finish_reason == whole.finish_reason == "length"


def test_litellm_calls_tools_in_turns(completion: Any) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = completion(tools=[TOOL], tool_choice=choice).choices[0].message
    (call,) = answer.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    streamed = [part.choices[0].delta.tool_calls for part in completion(tools=[TOOL], tool_choice=choice, stream=True)]
    assert "".join(calls[0].function.arguments or "" for calls in streamed if calls) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    assert completion(messages=[*ASK, answer, result], tools=[TOOL], tool_choice="none").choices[0].message.content


def test_litellm_parses_structured_output(completion: Any) -> None:
    Person.model_validate_json(completion(response_format=Person).choices[0].message.content)


def test_litellm_knows_responses_and_refused_embeddings(server: Running) -> None:
    litellm = pytest.importorskip("litellm")
    fixed: dict[str, Any] = {"model": "openai/pyrite", "api_base": f"{server.url}/v1", "api_key": "none"}
    answer = litellm.responses(input="def main(", max_output_tokens=8, temperature=0, **fixed)
    more = litellm.responses(input="go on", previous_response_id=answer.id, max_output_tokens=8, **fixed)
    assert more.usage.input_tokens > answer.usage.input_tokens
    streamed = list(litellm.responses(input="def main(", max_output_tokens=8, temperature=0, stream=True, **fixed))
    assert streamed[-1].response.output[0].content[0].text == answer.output[0].content[0].text
    with pytest.raises(litellm.NotFoundError, match="no model that makes embeddings"):
        litellm.embedding(input=["x"], num_retries=0, **fixed)


# instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_with_the_openai_client(server: Running, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode[mode])
        limit = {"max_output_tokens": 100} if mode == "RESPONSES_TOOLS" else {"max_tokens": 100}
        body = {"model": "pyrite", "messages": ASK, "response_model": Person, "temperature": 0, "max_retries": 0} | limit
        assert isinstance(client.create(**body), Person)
        if mode != "RESPONSES_TOOLS":
            assert list(client.create_partial(**body))[-1].age is not None


def test_instructor_with_the_anthropic_client(server: Running) -> None:
    instructor = pytest.importorskip("instructor")
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic:
        client = instructor.from_anthropic(anthropic)
        person = client.messages.create(model="pyrite", max_tokens=100, messages=ASK, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
