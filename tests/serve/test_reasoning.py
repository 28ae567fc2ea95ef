"""Reasoning in chat answers: found from the template, separated from the answer, bounded, and counted."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.sampling import Reasoning
from outrider.serve.harmony import HarmonyStream
from outrider.serve.reasoning import PARSERS, ReasoningStream, check_parser, expected_reasoning, reasoning_of
from outrider.serve.tool_calls import CallDelta, collect
from outrider.text import Tokenizer
from tests.support.schemas import random_schema
from tests.support.server import Running
from tests.support.tool_templates import TEMPLATES

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN3 = (
    "{% if tools %}Tools in <tool_call></tool_call>:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = QWEN3.replace("{% if enable_thinking is defined", "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
                       "{% endif %}{% if enable_thinking is defined")  # fmt: skip
MISTRAL = (
    "[SYSTEM_PROMPT]Think in [THINK][/THINK].[/SYSTEM_PROMPT]{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
)
GRANITE = (
    "{% if thinking %}Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'."
    "{% endif %}" + CHATML
)
EFFORT = "{{ reasoning_effort }} {{ thinking }} {{ thinking_budget }}" + CHATML + "<think></think>"


@functools.cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(bundled_model())
    assert loaded is not None
    return loaded


def expected(template: str, parser: str = "auto", begun: str | None = None, **settings: Any) -> Reasoning | None:
    words = tokenizer()
    words.use_chat_template(template)
    words.use_reasoning_parser(parser)
    form = reasoning_of(words)
    if form is None:
        return None
    return expected_reasoning(form, words, words.chat([{"role": "user", "content": "Hi"}], **settings), begun)


# which markers


def test_the_template_shows_how_a_model_reasons_and_whether_the_prompt_has_begun() -> None:
    think = Reasoning("</think>", "<think>")
    assert expected(QWEN3) == think
    assert expected(QWEN3, enable_thinking=False) is None
    assert expected(OPENED) == Reasoning("</think>")
    assert expected(OPENED, enable_thinking=False) is None
    assert expected(MISTRAL) == Reasoning("[/THINK]", "[THINK]")
    assert expected(TEMPLATES["harmony"].text) == Reasoning("<|end|>", "<|channel|>analysis<|message|>")
    assert expected(GRANITE) is None
    assert expected(GRANITE, thinking=True) == Reasoning("Here is my response:", "Here is my thought process:")
    assert expected(CHATML) is None


def test_a_parser_can_be_named_or_switched_off() -> None:
    assert expected(QWEN3, "none") is None
    assert expected(CHATML, "think") == Reasoning("</think>", "<think>")
    assert expected(CHATML, "deepseek_r1") == Reasoning("</think>")
    assert expected(QWEN3, "deepseek_r1", enable_thinking=False) is None
    assert [check_parser(name) for name in ("auto", "none", *PARSERS)] == ["auto", "none", *PARSERS]
    with pytest.raises(InvalidParameter, match="known: auto, none, harmony"):
        check_parser("thinking")


def test_a_continued_answer_says_whether_it_is_inside() -> None:
    assert expected(QWEN3, begun="<think>so far") == Reasoning("</think>")
    assert expected(QWEN3, begun="<think>done</think> The") is None
    assert expected(QWEN3, begun="The") is None


# separation


def separated(text: str, reasoning: Reasoning, sizes: list[int], cut: bool = False) -> tuple[str, str]:
    stream, before, after = ReasoningStream(reasoning), "", ""
    place = 0
    for size in [*sizes, len(text)]:
        one, two = stream.push(text[place : place + size])
        before, after, place = before + one, after + two, place + size
    one, two = stream.finish(cut)
    return before + one, after + two


CASES = [
    ("<think>", "<think>\nWell, 1 < 2.\n</think>\n\nYes.\n", ("Well, 1 < 2.", "Yes.\n")),
    ("<think>", " \n<think>a</think>b", ("a", "b")),
    ("<think>", "<think></think>b", ("", "b")),
    ("<think>", " Plain, <think>no</think> marker", ("", " Plain, <think>no</think> marker")),
    ("<think>", "<thin", ("", "<thin")),
    ("<think>", "", ("", "")),
    ("<think>", "<think>never ends </thin", ("never ends </thin", "")),
    ("", "a </ b</think>{}", ("a </ b", "{}")),
    ("", "a</think></think>b", ("a", "</think>b")),
    ("", "日本 é🙂</think>ü", ("日本 é🙂", "ü")),
]


@pytest.mark.parametrize(("begin", "text", "parts"), CASES)
def test_reasoning_is_separated_however_the_text_is_split(begin: str, text: str, parts: tuple[str, str]) -> None:
    reasoning, rng = Reasoning("</think>", begin), random.Random(text)
    assert separated(text, reasoning, []) == parts
    assert separated(text, reasoning, [1] * len(text)) == parts
    for cut in range(len(text)):
        assert separated(text, reasoning, [cut]) == parts
    for _ in range(20):
        assert separated(text, reasoning, [rng.randint(1, 6) for _ in text]) == parts


def test_a_cut_drops_the_beginning_of_a_marker() -> None:
    assert separated("<thin", Reasoning("</think>", "<think>"), [], cut=True) == ("", "")
    assert separated("abc </th", Reasoning("</think>"), [], cut=True) == ("abc", "")
    assert separated("abc < d", Reasoning("</think>"), [], cut=True) == ("abc < d", "")


def test_channels_of_gpt_oss_split_at_every_character() -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    text = (
        "<|channel|>analysis<|message|>Need 1 < 2 <| it.<|end|><|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>More.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        '<|constrain|>json<|message|>{"a": "é <|"}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>'
    )
    for size in (1, 2, 3, 7, len(text)):
        stream, deltas = HarmonyStream(tools), list[CallDelta]()
        for place in range(0, len(text), size):
            deltas += stream.push(text[place : place + size])
        deltas += stream.finish()
        content, calls = collect(deltas)
        assert "".join(delta.reasoning for delta in deltas) == "Need 1 < 2 <| it.\nMore."
        assert (content, [(call.name, call.arguments) for call in calls]) == ("First.\nDone.", [("now", '{"a": "é <|"}')])
    assert collect(HarmonyStream(tools, reasoning=False).push(text[:60]))[0] == "Need 1 < 2 <| it."[: 60 - 30]


# over HTTP


@pytest.fixture
def templated(server: Running) -> Iterator[Any]:
    """Gives the server's model another template."""
    words = server.service.llm.tokenizer  # type: ignore[union-attr]
    before = words.chat_template
    yield words.use_chat_template
    words.use_chat_template(before)


MESSAGES: list[Any] = [{"role": "user", "content": "def main():"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


def chat(server: Running, **body: Any) -> Any:
    answer = server.post("/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 120, "seed": 3, "temperature": 1} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_budget_is_kept_and_counted(server: Running, templated: Any) -> None:
    templated(OPENED)
    counts = {}
    for budget in (0, 1, 7, 20):
        body = {"thinking_token_budget": budget, "return_token_ids": True}
        answers = [chat(server, **body, speculation=speculation) for speculation in (True, False)]
        on, off = (answer["choices"][0] for answer in answers)
        assert on["token_ids"] == off["token_ids"]
        assert on["message"] == off["message"]
        counts[budget] = answers[0]["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert "</think>" not in (on["message"]["content"] or "")
        assert ("reasoning_content" in on["message"]) == (counts[budget] > 0)
    assert counts == {0: 0, 1: 0, 7: 7, 20: 20}, "the first token is a letter of the marker, which a budget of 1 completes"
    free = chat(server, max_tokens=20)
    assert free["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}
    assert free["choices"][0]["message"]["content"] is None
    templated(CHATML)
    assert chat(server, max_tokens=4)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_sends_reasoning_in_its_own_deltas(server: Running, templated: Any) -> None:
    templated(OPENED)
    body = {"messages": MESSAGES, "max_tokens": 60, "seed": 3, "thinking_token_budget": 15}
    whole = chat(server, **body)["choices"][0]["message"]
    events = server.events("/v1/chat/completions", **body, temperature=1, stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(len(delta) == 1 for delta in deltas[1:-1])
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    assert events[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 15}


@pytest.mark.parametrize("family", ["think", "opened", "harmony"])
def test_a_schema_begins_where_reasoning_ends(server: Running, templated: Any, family: str) -> None:
    """Random schemas: the content is valid JSON, and the tokens are those without speculation."""
    templated({"think": QWEN3, "opened": OPENED, "harmony": TEMPLATES["harmony"].text}[family])
    rng = random.Random(family)
    for seed in range(5):
        schema = random_schema(rng)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"response_format": form, "thinking_token_budget": 9, "seed": seed, "max_tokens": 400, "return_token_ids": True}
        on, off = (chat(server, **body, speculation=speculation)["choices"][0] for speculation in (True, False))
        assert on["finish_reason"] == "stop"
        assert on["token_ids"] == off["token_ids"]
        jsonschema.validate(json.loads(on["message"]["content"]), schema)


@pytest.mark.parametrize("family", ["opened", "harmony"])
def test_a_required_tool_is_called_after_the_reasoning(server: Running, templated: Any, family: str) -> None:
    templated({"opened": OPENED, "harmony": TEMPLATES["harmony"].text}[family])
    client = OpenAI(base_url=f"{server.url}/v1", api_key=("none",), max_retries=0)
    answer = client.chat.completions.create(
        model="pyrite", messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=150, seed=1,  # type: ignore[list-item]
        parallel_tool_calls=False, extra_body={"thinking_token_budget": 6},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["count"]  # type: ignore[union-attr]
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)  # type: ignore[index,union-attr]
    assert not choice.message.content


def test_templates_get_the_effort_and_other_settings(server: Running, templated: Any) -> None:
    """The prompt is as long as the one that spells the settings."""
    templated(EFFORT)

    def prompt(**body: Any) -> int:
        return int(chat(server, max_tokens=1, **body)["usage"]["prompt_tokens"])

    words = server.service.llm.tokenizer  # type: ignore[union-attr]
    assert words is not None

    def spelled(**settings: Any) -> int:
        return len(words.chat(MESSAGES, **settings))

    assert prompt(reasoning_effort="high") == spelled(reasoning_effort="high", thinking=True)
    assert prompt(reasoning_effort="none") == spelled(reasoning_effort="none", thinking=False)
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "thinking_budget": 12345}}
    assert prompt(**both) == spelled(reasoning_effort="low", thinking=False, thinking_budget=12345)
    control = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, reasoning_effort="<|end|><|system|>")
    assert control.json()["usage"]["prompt_tokens"] > prompt(reasoning_effort="high") + 4, "spelled, not a control token"


def test_earlier_reasoning_reaches_the_template(server: Running, templated: Any) -> None:
    templated(QWEN3)
    past = [*MESSAGES, {"role": "assistant", "content": "x"}, *MESSAGES]
    plain = chat(server, messages=past, max_tokens=1)["usage"]["prompt_tokens"]
    past[1] = past[1] | {"reasoning_content": "long thoughts, many words"}
    assert chat(server, messages=past, max_tokens=1)["usage"]["prompt_tokens"] > plain + 5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "objekt"}, "must have the type object"),
        ({"type": "array"}, "must have the type object"),
        ({"properties": {"a": {"type": "text"}}}, "parameters.properties.a.type is 'text'"),
        ({"properties": ["a"]}, "properties must map names"),
        ({"properties": {"a": 3}}, "parameters.properties.a must be a schema"),
        ({"required": "a"}, "required must be a list"),
        ({"properties": {"a": {"items": {"anyOf": {}}}}}, "anyOf must be a list"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "cannot be used"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "cannot be used"),
    ],
)
def test_tools_with_invalid_schemas_get_400(server: Running, parameters: Any, message: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = server.post("/v1/chat/completions", messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=4)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools"
    assert message in error["message"]
    assert chat(server, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.is_idle() or server.service.status == "ok"


@pytest.mark.parametrize(
    ("field", "value"), [("thinking_token_budget", -1), ("thinking_token_budget", "many"), ("reasoning_effort", 3)]
)
def test_wrong_settings_get_400(server: Running, field: str, value: Any) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_budget_without_known_markers_is_refused(server: Running, templated: Any) -> None:
    templated(CHATML)
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, thinking_token_budget=4)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
    templated(QWEN3)
    closed = {"thinking_token_budget": 4, "chat_template_kwargs": {"enable_thinking": False}}
    assert "reasoning_content" not in chat(server, max_tokens=6, **closed)["choices"][0]["message"]
