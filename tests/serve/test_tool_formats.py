"""Every family of tool calls: what its template renders is read back, whole and split at every character."""

# ruff: noqa: RUF001  (DeepSeek's markers have full-width bars)

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest

from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.serve.message import open_tools, parse_tool_calls
from outrider.serve.tool_calls import CallDelta, collect
from outrider.serve.tool_formats import FORMATS, describes_tools, family_of
from outrider.serve.tool_grammar import tool_grammar
from outrider.serve.tools import with_tools
from outrider.text import Tokenizer
from tests.support.tool_templates import TEMPLATES, rendered, tool_calls

EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "options": {"type": "object"},
        "dry": {"type": "boolean"},
        "ratio": {"type": ["number", "null"]},
    },
    "required": ["path"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "edit_file", "description": "Edit a file.", "parameters": EDIT}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "ns.get-it_2", "parameters": {"type": "object"}}},
]
SIMPLE = ("edit_file", '{"path": "a.py"}')
NESTED = ("edit_file", '{"path": "a", "options": {"deep": [{"x": "]}"}, {"y": {"z": [1, [2]]}}], "": null}, "lines": [1, 2]}')
UNICODE = ("edit_file", '{"path": "naïve/日本語.py", "text": "🙂 \\u00e9 ﷽", "dry": true, "ratio": 0.5}')
SPECIAL = (
    "edit_file",
    '{"path": "C:\\\\dir\\\\\\"q\\"", "text": "a < b && c > d\\n\\tif x: {[()]}\\n5", "dry": false, "ratio": null}',
)
CASES = [
    [SIMPLE],
    [NESTED],
    [UNICODE],
    [SPECIAL],
    [("now", "{}")],
    [("ns.get-it_2", '{"n": 5, "flag": true, "word": "five"}')],
    [SIMPLE, ("now", "{}"), SPECIAL, NESTED],
]


@functools.cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(bundled_model())
    assert loaded is not None
    return loaded


def read(text: str, family: str) -> tuple[str | None, list[tuple[str, Any]]]:
    content, calls = parse_tool_calls(text, TOOLS, family)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def expected(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_template_renders_is_read_back(family: str) -> None:
    for calls in CASES:
        text = rendered(tokenizer(), family, TOOLS, {"tool_calls": tool_calls(*calls)})
        assert read(text, family) == (None, expected(calls)), text


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_split_at_every_character_changes_nothing(family: str) -> None:
    for calls in CASES:
        text = rendered(tokenizer(), family, TOOLS, {"tool_calls": tool_calls(*calls)})
        for cut in range(len(text) + 1):
            stream = open_tools(TOOLS, family)
            deltas = [*stream.push(text[:cut]), *stream.push(text[cut:]), *stream.finish()]
            assert summary(deltas) == (None, expected(calls)), cut
            assert stream.called
        stream = open_tools(TOOLS, family)
        deltas = [delta for letter in text for delta in stream.push(letter)]
        assert summary([*deltas, *stream.finish()]) == (None, expected(calls))


def summary(deltas: list[CallDelta]) -> tuple[str | None, list[tuple[str, Any]]]:
    content, calls = collect(deltas)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("family", [family for family in TEMPLATES if not FORMATS[family].bare])
def test_text_before_calls_is_kept(family: str) -> None:
    """Where a call is not the whole answer."""
    text = rendered(tokenizer(), family, TOOLS, {"content": "Let me see.", "tool_calls": tool_calls(SIMPLE, SPECIAL)})
    assert read(text, family) == ("Let me see.", expected([SIMPLE, SPECIAL]))


MALFORMED = {
    "harmony": [
        '<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{"a": 1}',
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>soon",
        "<|channel|>commentary to=functions.now",
    ],
    "mistral_args": ["[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]now[ARGS]soon", "[TOOL_CALLS]" + "x" * 200],
    "mistral": ['[TOOL_CALLS][{"name": "rm", "arguments": {}}]', "[TOOL_CALLS] none", '[TOOL_CALLS][{"name": "now", "arg'],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>now",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rm\n```json\n{}\n```",
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>[]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "glm": ["<tool_call>rm\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "<tool_call>now\n{}</tool_call>"],
    "qwen3_coder": [
        "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\nnothing\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "phi4_functools": ['functools[{"name": "rm", "arguments": {}}]', "functools is a module"],
    "phi4": ['<|tool_call|>[{"name": "rm", "arguments": {}}]<|/tool_call|>', "<|tool_call|>none"],
    "granite": ['<|tool_call|>[{"name": "rm", "arguments": {}}]', "<|tool_call|>{}"],
    "hermes": ['<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', "<tool_call>now()</tool_call>"],
    "llama4": ["[rm()]", "[1, 2, 3]", "[now(1)]", "[now(**x)]", "[now(x=f())]", "[now(x={1: 2})]", "[now(x=", "[see](http://x)"],
    "llama4_json": ['{"name": "rm", "parameters": {}}', '{"answer": 1}'],
    "llama3": ['{"name": "rm", "parameters": {}}', '<|python_tag|>search.call(query="x")'],
    "marked": ['<|tool|>{"name": "rm", "arguments": {}}', "<|tool|> is a token"],
}  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_malformed_calls_stay_text(family: str) -> None:
    for text in MALFORMED[family]:
        assert parse_tool_calls(text, TOOLS, family) == (text, []), text
        for cut in range(len(text)):
            stream = open_tools(TOOLS, family)
            content, calls = collect([*stream.push(text[:cut]), *stream.push(text[cut:]), *stream.finish()])
            assert (content, calls) == (text, [])


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_are_recognised_and_show_the_tools(family: str) -> None:
    template = TEMPLATES[family].text
    assert family_of(template) == family
    tokenizer().use_chat_template(template)
    messages = with_tools([{"role": "user", "content": "Go."}], TOOLS, family, describes_tools(template))
    prompt = tokenizer().decode(tokenizer().chat(messages, tools=TOOLS), skip_special_tokens=False)
    assert all(tool["function"]["name"] in prompt for tool in TOOLS)
    if not describes_tools(template):
        assert FORMATS[family].opening in prompt


@pytest.mark.parametrize("family", TEMPLATES)
def test_damaged_calls_read_alike_however_they_are_split(family: str) -> None:
    """Letters are dropped, doubled and inserted at random; nothing raises, hangs or depends on the chunks."""
    rng = random.Random(family)
    texts = [rendered(tokenizer(), family, TOOLS, {"tool_calls": tool_calls(*calls)}) for calls in CASES]
    for _ in range(60):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(text) + 1)
            end = min(len(text), start + rng.randint(0, 12))
            middle = rng.choice(["", text[start:end] * 2, text[start:end] + rng.choice("\"{}[]<>|\\,()' \né"), "x" * 300])
            text = text[:start] + middle + text[end:]
        cut = rng.random() < 0.3
        whole = pushed(family, text, [len(text)], cut)
        assert pushed(family, text, [1] * len(text), cut) == whole
        assert pushed(family, text, [rng.randint(1, 7) for _ in text], cut) == whole


def pushed(family: str, text: str, sizes: list[int], cut: bool) -> tuple[str | None, list[tuple[str, str]]]:
    stream, deltas, place = open_tools(TOOLS, family), list[CallDelta](), 0
    for size in sizes:
        deltas += stream.push(text[place : place + size])
        place += size
    content, calls = collect([*deltas, *stream.finish(cut)])
    return content, [(call.name, call.arguments) for call in calls]


def test_variants_that_models_write() -> None:
    """Spellings that published parsers also take."""
    id_between = '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{"a": 1}'
    assert read(id_between, "mistral_args") == (None, [("now", {"a": 1})])
    assert read('<|tool_call|> {"name": "now", "arguments": {}}', "granite") == (None, [("now", {})])
    for text in ('[{"name": "now", "arguments": {}}]', '{"name": "now", "arguments": {}}', '[{"name": "now", "arguments": {}}'):
        assert read(f"<|tool_call|>{text}<|/tool_call|>", "phi4") == (None, [("now", {})])
        assert read(f"<|tool_call|>{text}", "phi4") == (None, [("now", {})])
    assert read("<tool_call>now</tool_call>", "glm") == (None, [("now", {})])
    assert read("<tool_call>edit_file<arg_key>path</arg_key><arg_value>5</arg_value></tool_call>", "glm") == (
        None,
        [("edit_file", {"path": "5"})],
    )
    assert read("<|python_start|>[now(), edit_file(path='a', dry=True)]<|python_end|>", "llama4") == (
        None,
        [("now", {}), ("edit_file", {"path": "a", "dry": True})],
    )
    assert read('{"name": "now", "parameters": {}}{"name": "now", "parameters": {}}', "llama4_json")[1] == [("now", {})] * 2
    recipient_first = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}'
    assert read(recipient_first, "harmony") == (None, [("now", {"a": 1})])
    assert read("<|channel|>final<|message|>4<|end|>", "harmony") == ("4", [])


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_function_with_combined_schemas_is_enforced_or_refused_by_name(family: str) -> None:
    either = {"type": "object", "anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}]}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": either}}]
    if FORMATS[family].syntax in ("tagged", "python"):
        with pytest.raises(InvalidParameter, match="'pick' cannot be enforced"):
            tool_grammar(tools, "required", family)
    else:
        assert tool_grammar(tools, "required", family) is not None


def test_names_that_a_syntax_cannot_write_are_refused() -> None:
    def grammar(key: str, family: str) -> None:
        schema = {"type": "object", "properties": {key: {"type": "string"}}}
        tool_grammar([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required", family)

    for key, family in (("a b", "llama4"), ("class", "llama4"), ("a>", "qwen3_coder"), ("<a", "glm")):
        grammar(key, "hermes")
        with pytest.raises(InvalidParameter, match="tools: the parameter"):
            grammar(key, family)
