"""Tools: checked requests, rendered prompts, calls forced by grammars, and calls parsed from complete and streamed text."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider import LLM, SamplingParams
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.serve.message import open_tools, parse_tool_calls
from outrider.serve.tool_formats import FAMILIES, FORMATS, family_of
from outrider.serve.tool_grammar import tool_grammar
from outrider.serve.tools import check_tools, with_tools
from outrider.text import Tokenizer
from tests.support import write_tokenizer
from tests.support.tool_templates import rendered, tool_calls

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
FLAGS = {
    "type": "object",
    "properties": {"on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "set_flags", "parameters": FLAGS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
LOOSE = FLAGS | {"properties": {"on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}
ENFORCED = SCHEMAS | {"set_flags": LOOSE}  # uniqueItems cannot be enforced
NAMED = {"type": "function", "function": {"name": "set_flags"}}
ARGUMENTS = '{"city": "a } \\" b", "path": "C:\\\\", "deep": [{"x": "]"}], "é": 1.5}'


def written(family: str, *calls: tuple[str, str]) -> str:
    """Calls as a model of the family writes them: here by hand, and for further families by a template."""
    if family == "mistral":
        return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls) + "]"
    if family == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)
    if family == "llama3":
        return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)
    if family == "marked":
        return "\n".join(f'<|tool|>{{"name": "{name}", "arguments": {text}}}' for name, text in calls)
    if family not in ("hermes", "default"):
        tokenizer = copied_tokenizer()
        return rendered(tokenizer, family, TOOLS, {"tool_calls": tool_calls(*calls)})
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)


@functools.cache
def copied_tokenizer() -> Tokenizer:
    """The bundled tokenizer, whose template tests replace."""
    tokenizer = Tokenizer.load(bundled_model())
    assert tokenizer is not None
    return tokenizer


def read(text: str, family: str) -> tuple[str | None, list[tuple[str, str]]]:
    content, calls = parse_tool_calls(text, TOOLS, family)
    assert len({call.id for call in calls}) == len(calls)
    return content, [(call.name, call.arguments) for call in calls]


# requests


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{}], None, "tools: must hold"),
        (["now"], None, "tools: must hold"),
        ([{"type": "retrieval"}], None, "tools: must hold"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools: a function's name"),
        ([{"type": "function", "function": {"name": "a\nstart: x"}}], None, "tools: a function's name"),
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], None, "tools: the parameters"),
        ([TOOLS[0], TOOLS[0]], None, "is there twice"),
        ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)], None, "at most 128"),
        (TOOLS, "always", "tool_choice: must be"),
        ([], "required", "tool_choice: is required"),
        (TOOLS, {"type": "function", "function": {"name": "rm"}}, "get_weather, set_flags, now"),
        (TOOLS, {"type": "function"}, "tool_choice: names None"),
    ],
)
def test_malformed_tools_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        check_tools(tools, choice)


def test_check_tools_normalises_the_choice() -> None:
    assert [check_tools(TOOLS, choice) for choice in (None, "auto", "none", "required", NAMED)] == [
        "auto",
        "auto",
        "none",
        "required",
        "set_flags",
    ]
    assert check_tools([], None) == check_tools([], "auto") == "none"
    assert tool_grammar(TOOLS, "auto", "hermes") is None
    assert tool_grammar(TOOLS, "none", "hermes") is None


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (None, "default"),
        ("{{ messages }}", "default"),
        ("{{ tools }}{{ messages }}", "default"),
        ("{% if tools %}in <tool_call></tool_call> tags{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]x[ARGS]", "mistral_args"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}ipython', "llama3"),
    ],
)
def test_family_of_recognises_templates(template: str | None, family: str) -> None:
    assert family_of(template) == family


# reading calls


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_parsed(family: str) -> None:
    one, two = ("get_weather", ARGUMENTS), ("now", "{}")
    assert read(written(family, one), family) == (None, [one])
    assert read(written(family, one, two, one), family) == (None, [one, two, one])
    assert read(f"\n {written(family, one)}\n", family) == (None, [one])
    for text in ("No call.", " spaced \n", "", "{}", '{"a": 1}', "<tool", "a < b, [TOOL", "<|tool|x"):
        assert read(text, family) == (text, [])
    if not FORMATS[family].bare and family != "harmony":
        assert read(f"Let me see.\n{written(family, two)}\nDone.", family) == ("Let me see.\nDone.", [two])
        assert read(f"{written(family, two)}\nDone.", family) == ("Done.", [two])


def test_other_spellings_of_calls_are_parsed() -> None:
    assert read('<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "llama3") == (None, [("now", "{}")])
    backwards = '<tool_call>{"arguments": {"on": []}, "name": "set_flags"}</tool_call>'
    assert read(backwards, "hermes") == (None, [("set_flags", '{"on": []}')])
    assert read('<tool_call>\n{"name": "now"}\n</tool_call>', "hermes") == (None, [("now", "{}")])
    assert read(written("hermes", ("now", "{ }")).replace("\n</tool_call>", ""), "hermes") == (None, [("now", "{ }")])
    assert read('{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}', "llama3") == (None, [("now", "{}")] * 2)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": "x"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
        ("hermes", "<tool_call>\n{}\n</tool_call>"),
        ("hermes", "<tool_call>now()</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "no'),
        ("hermes", '<tool_call>\n{"name": "now", "argu'),
        ("llama3", '{"name": "rm", "parameters": {}}'),
        ("llama3", '{"answer": [1, 2]}'),
        ("llama3", '<|python_tag|>search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral_args", "[TOOL_CALLS]rm[ARGS]{}"),
        ("mistral_args", "[TOOL_CALLS]" + "x" * 200),
        ("marked", "<|tool|> is a token"),
    ],
)
def test_malformed_calls_stay_text(family: str, text: str) -> None:
    assert read(text, family) == (text, [])
    if text.endswith(">"):
        assert read(f"{text} then {written('hermes', ('now', '{}'))}", "hermes")[1][-1:] == [("now", "{}")]


def test_incomplete_arguments_are_returned_as_written() -> None:
    text = written("hermes", ("get_weather", ARGUMENTS))
    assert read(text[: text.index("deep")], "hermes") == (None, [("get_weather", ARGUMENTS[: ARGUMENTS.index("deep")])])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_in_any_chunks_gives_the_same_calls(family: str) -> None:
    """Names come once and first, arguments are streamed, and the result equals that of the complete text."""
    rng = random.Random(family)
    calls = written(family, ("get_weather", ARGUMENTS), ("set_flags", '{"on":\n[true]}'))
    bad = written(family, ("rm", "{}"))
    for text in (calls, f"Hm.\n\n{calls} so", f"{bad}\n{calls}", f"a <tool_ {calls}", f" {bad} "):
        for size in (1, 2, 5, 40):
            stream, content, parsed = open_tools(TOOLS, family), "", []
            remaining, deltas = text, []
            while remaining:
                cut = rng.randint(1, size)
                deltas += stream.push(remaining[:cut])
                remaining = remaining[cut:]
            for delta in [*deltas, *stream.finish()]:
                if delta.index is None:
                    content += delta.content
                    continue
                assert (delta.id is not None) == (delta.name is not None) == (delta.index == len(parsed))
                if delta.id is not None:
                    parsed.append([delta.name, ""])
                parsed[delta.index][1] += delta.arguments
            assert (content, [tuple(call) for call in parsed]) == (read(text, family)[0] or "", read(text, family)[1])
            assert stream.called == bool(parsed)
    one_by_one = open_tools(TOOLS, family)
    by_letter = FORMATS[family].syntax not in ("tagged", "python")  # their arguments become JSON when a value is complete
    assert sum(bool(one_by_one.push(letter)) for letter in calls) > (20 if by_letter else 1)


# prompts


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]


def test_a_template_that_knows_tools_gets_them() -> None:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    assert family_of(tokenizer.chat_template) == "marked"
    ids = tokenizer.chat(with_tools(MESSAGES, TOOLS, "marked"), tools=TOOLS)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert '"get_weather"' in text
    assert '<|tool|>{"name": "now", "arguments": {"a": 1}}' in text
    assert "noon" in text
    assert '"get_weather"' not in tokenizer.decode(tokenizer.chat(MESSAGES[:2]), skip_special_tokens=False)


def test_a_template_that_knows_none_gets_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    assert tokenizer is not None
    assert family_of(tokenizer.chat_template) == "default"
    messages = with_tools(MESSAGES, TOOLS, "default")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\n")
    assert read(messages[2]["content"], "default") == (None, [("now", '{"a": 1}')])
    assert all(tool["function"]["name"] in tokenizer.decode(tokenizer.chat(messages)) for tool in TOOLS)
    assert with_tools(MESSAGES[1:2], TOOLS, "default")[0]["role"] == "system"
    assert MESSAGES[2]["content"] is None, "the request's messages are not modified"


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": hostile}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    with pytest.raises(Exception, match=r"unsafe|access"):
        tokenizer.chat([{"role": "user", "content": "x"}])


# calls that must come


@functools.cache
def loaded() -> LLM:
    return LLM(speculation={"method": "draft_model", "draft_tokens": 6})


@pytest.mark.parametrize("family", FAMILIES)
def test_required_and_named_tools_are_called(family: str) -> None:
    """The call has the family's format and arguments that fit the schema, and the tokens are the same without speculation."""
    llm = loaded()
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.chat(with_tools(MESSAGES[:2], TOOLS, family), tools=TOOLS)
    several = family in ("hermes", "mistral", "glm", "deepseek_v31", "llama4")
    for choice, parallel, names in (("required", several, set(SCHEMAS)), (NAMED, True, {"set_flags"})):
        grammar = tool_grammar(TOOLS, choice, family, parallel, llm.tokenizer.token_id)
        params = [
            SamplingParams(seed=seed, max_tokens=150, temperature=0.8, structured=grammar, skip_special_tokens=False)
            for seed in range(2)
        ]
        fast, plain = ([r.outputs[0] for r in llm.generate([prompt] * 2, params, speculation)] for speculation in (None, False))
        assert [o.token_ids for o in fast] == [o.token_ids for o in plain]
        for output in fast:
            content, calls = parse_tool_calls(output.text, TOOLS, family)
            whole = output.finish_reason == "stop"
            assert calls
            assert content is None or not whole
            assert {call.name for call in calls} <= names
            assert len(calls) <= (8 if parallel and choice == "required" else 1)
            for call in calls[: None if whole else -1]:
                jsonschema.validate(json.loads(call.arguments), ENFORCED[call.name])


def test_control_tokens_are_used_where_they_exist() -> None:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    by_token = tool_grammar(TOOLS, NAMED, "marked", token_id=tokenizer.token_id)
    assert by_token is not None
    assert f"<[{tokenizer.table()['<|tool|>']}]>" in by_token.value
    assert '"<|tool|>"' in tool_grammar(TOOLS, NAMED, "marked").value  # type: ignore[union-attr]


# calls cut short


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_cut_anywhere_leaves_no_marker(family: str) -> None:
    """The text is cut at every letter. The text before the call stays, the call is reported as far as it is known."""
    one, two = ("get_weather", ARGUMENTS), ("now", "{}")
    for before in ("",) if FORMATS[family].bare else ("", "Let me see.\n"):
        text = before + written(family, one, two)
        for end in range(len(text) + 1):
            content, calls = parse_tool_calls(text[:end], TOOLS, family, cut=True)
            assert before.rstrip().startswith((content or "").rstrip()), (end, content)
            assert all(call.name in SCHEMAS for call in calls)
            assert [call.arguments for call in calls[:-1]] == [ARGUMENTS] * len(calls[:-1])
            stream, streamed = open_tools(TOOLS, family), ""
            for letter in text[:end]:
                streamed += "".join(delta.content for delta in stream.push(letter))
            assert streamed + "".join(delta.content for delta in stream.finish(cut=True)) == (content or "")
        assert read(text, family)[1] == [one, two]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_a_call_is_never_cut(family: str) -> None:
    for text in ("No call.", " spaced \n", "a < b", "x [TOOLS] y", "", "x {}" if FORMATS[family].bare else "{}"):
        assert parse_tool_calls(text, TOOLS, family, cut=True) == (text, [])
