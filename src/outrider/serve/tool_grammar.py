"""Grammars that make a model call tools in its family's format, or answer in a prescribed form."""

# ruff: noqa: ARG001, RUF001  (every syntax takes the same arguments; DeepSeek's markers have full-width bars)

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from outrider.errors import InvalidParameter
from outrider.sampling import Structured
from outrider.sampling.matcher import WHITESPACE
from outrider.serve.tool_formats import FORMATS, Format, Tags, Tool
from outrider.serve.tools import ToolChoice, check_tools

__all__ = ["tool_grammar", "tool_or_answer", "with_whitespace", "wrapped"]

_MAX_CALLS = 8  # maximum number of calls in one answer under a grammar
_LONGEST_TEXT = 2000  # longer limits on a text are ignored: they cost the grammar as many states
_MARKERS = re.compile(r"<｜[^｜]*｜>|<\|[^|]*\|>|\[[A-Z_]+\]")
_HARMONY_LEAD = "<|start|>assistant"  # before a message that is not the first of the answer
_HARMONY_ANSWER = "<|channel|>final<|message|>"
TokenId = Callable[[str], int | None] | None  # finds control tokens by name; without it they are written as text


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice, family: str, parallel: bool = True, token_id: TokenId = None
) -> Structured | None:
    """A grammar that makes the model call a tool, in its family's format. None unless the choice requires a call.

    `token_id` is that of the model's `Tokenizer`.
    """
    wanted = check_tools(tools, choice)
    if wanted in ("none", "auto"):
        return None
    named = [tool["function"] for tool in tools if wanted in ("required", tool["function"]["name"])]
    form = FORMATS[family]
    rules = _frame(form, token_id, parallel and wanted == "required" and form.syntax != "harmony")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(named))))
    for i, function in enumerate(named):
        rules += _SYNTAXES[form.syntax](form, function, i, token_id)
    return Structured("lark", "\n".join(rules))


def tool_or_answer(calls: Structured, answer: Structured, family: str = "", token_id: TokenId = None) -> Structured:
    """A grammar that accepts tool calls or an answer in JSON."""
    if answer.kind not in ("json_schema", "json_object"):
        raise InvalidParameter(
            "response_format", f"a {answer.kind} cannot stand beside tools; use a JSON schema, or tool_choice: none"
        )
    rules = calls.value.replace("start:", "calls:", 1)
    lead = _harmony_lead(token_id, _HARMONY_ANSWER) if family == "harmony" else ""
    return Structured("lark", f"start: calls | {lead}answer\n{rules}\n{_answer_rule(answer)}")


def wrapped(answer: Structured, token_id: TokenId = None) -> Structured:
    """The grammar of an answer of gpt-oss, which stands in a channel."""
    return Structured("lark", f"start: {_harmony_lead(token_id, _HARMONY_ANSWER)}answer\n{_answer_rule(answer)}")


def with_whitespace(schema: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """A schema with this pattern of white space in JSON, unless the schema sets one."""
    options = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": pattern} | (options if isinstance(options, dict) else {})}


def _answer_rule(answer: Structured) -> str:
    if answer.kind in ("json_schema", "json_object"):
        schema = json.loads(answer.value or '{"type": "object"}')
        schema = {} if schema is True else {"enum": []} if schema is False else schema
        return f"answer: {_json(with_whitespace(schema, answer.whitespace or WHITESPACE))}"
    if answer.kind == "choice":
        return "answer: " + " | ".join(_quoted(word) for word in json.loads(answer.value))
    if answer.kind == "regex":
        slashed = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", answer.value, flags=re.DOTALL)
        return "answer: ANSWER\nANSWER: /" + slashed.replace("\n", r"\n") + "/"
    raise InvalidParameter(
        "response_format", f"a {answer.kind} cannot follow the channels of gpt-oss; use a JSON schema, a regex or a choice"
    )


def _frame(form: Format, token_id: TokenId, several: bool) -> list[str]:
    """The rules around the calls."""
    if form.syntax == "harmony":
        return [f"start: {_harmony_lead(token_id, '')}call"]
    opening = "" if form.bare else _literal(form, form.opening, token_id)
    before, closing, between = (_literal(form, text, token_id) for text in (form.before, form.closing, form.between))
    repeated = f" ({between} {'call' if form.listed else 'whole'}){{0,{_MAX_CALLS - 1}}}" if several else ""
    if form.bare:
        closing = _literal(form, form.closing.partition("<")[0], token_id)
    if form.listed:
        return [f"start: {opening} {before} call{repeated} {closing}"]
    return [f"start: whole{repeated}", f"whole: {opening} {before} call {closing}"]


def _harmony_lead(token_id: TokenId, text: str) -> str:
    form = FORMATS["harmony"]
    return f"({_literal(form, _HARMONY_LEAD, token_id)})? {_literal(form, text, token_id)} "


def _object(form: Format, function: Tool, i: int, token_id: TokenId) -> list[str]:
    head = f'{{"name": {json.dumps(function["name"])}, "{form.key}": '
    return [f'call{i}: {_quoted(head)} args{i} "}}"', f"args{i}: {_json(_schema(function))}"]


def _named(form: Format, function: Tool, i: int, token_id: TokenId) -> list[str]:
    head, tail = (_literal(form, text, token_id) for text in (form.head + function["name"] + form.separator, form.tail))
    return [f"call{i}: {head} args{i} {tail}", f"args{i}: {_json(_schema(function))}"]


def _tagged(form: Format, function: Tool, i: int, token_id: TokenId) -> list[str]:
    """Tagged parameters in the schema's order."""
    tags = form.tags
    assert tags is not None
    parts, rules = [], []
    for number, (key, value, is_required) in enumerate(_parameters(function)):
        if set(key) & set("<>\n"):
            raise InvalidParameter("tools", f"the parameter {key!r} cannot stand in a tag, which is how this model writes calls")
        name = f"p{i}_{number}"
        rules += _tagged_parameter(tags, name, key, value)
        parts.append(name if is_required else f"{name}?")
    head = form.head + function["name"] + tags.name_end + tags.gap
    return [f"call{i}: {_quoted(head)} {' '.join(parts)} {_quoted(form.tail)}", *rules]


def _tagged_parameter(tags: Tags, name: str, key: str, schema: Mapping[str, Any]) -> list[str]:
    """The rules of one parameter. A text stands as it is; everything else is JSON."""
    line = "\n" if tags.lines else ""
    head, end = _quoted(tags.key + key + "\n".join(tags.value) + line), _quoted(line + tags.value_end + tags.gap)
    options = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if options and all(isinstance(option, str) for option in options):
        return [f"{name}: {head} ({' | '.join(map(_quoted, options))}) {end}"]
    if schema.get("type") != "string":
        return [f"{name}: {head} {name}_json {end}", f"{name}_json: {_json(_lenient(schema))}"]
    low, high = schema.get("minLength", 0), schema.get("maxLength", _LONGEST_TEXT + 1)
    size = f"{{{low},{high}}}" if high <= _LONGEST_TEXT else "*"
    stop = re.escape(tags.value_end).replace("/", r"\/")
    terminal = name.upper()
    return [f"{name}: {head} {terminal} {end}", f"{terminal}: /(?s:.{size})/ & ~/(?s:.*){stop}(?s:.*)/"]


def _python(form: Format, function: Tool, i: int, token_id: TokenId) -> list[str]:
    """Keyword arguments, the required ones first. Values are JSON, which the parser reads as well as Python's literals."""
    rules: list[str] = []
    required: list[str] = []
    optional: list[str] = []
    for number, (key, value, is_required) in enumerate(_parameters(function)):
        if not key.isidentifier() or iskeyword(key):
            raise InvalidParameter(
                "tools", f"the parameter {key!r} is no name in Python's syntax, in which this model writes calls"
            )
        rules.append(f"p{i}_{number}: {_quoted(key + '=')} {_json(_lenient(value))}")
        (required if is_required else optional).append(f"p{i}_{number}")
    if required:
        body = ' ", " '.join(required) + _further(optional)
    else:
        starts = [name + _further(optional[number + 1 :]) for number, name in enumerate(optional)]
        body = f"({' | '.join(starts)})?" if starts else ""
    return [f'call{i}: {_quoted(function["name"] + "(")} {body} ")"', *rules]


def _further(names: Sequence[str]) -> str:
    return "".join(f' (", " {name})?' for name in names)


def _parameters(function: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required, of each parameter that a schema lists."""
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    combined = [key for key in ("anyOf", "oneOf", "allOf", "$ref", "if") if key in schema]
    missing = [key for key in required if key not in properties]
    if combined or missing:
        raise InvalidParameter(
            "tools",
            f"a call of {function['name']!r} cannot be enforced: this model writes parameters one by one, "
            f"and the schema {f'uses {combined[0]}' if combined else f'requires {missing[0]!r} without listing it'}",
        )
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (key, shared | dict(value) if isinstance(value, Mapping) else {} if value else {"enum": []}, key in required)
        for key, value in properties.items()
    ]


_SYNTAXES: dict[str, Callable[[Format, Tool, int, TokenId], list[str]]] = {
    "object": _object,
    "named": _named,
    "harmony": _named,
    "tagged": _tagged,
    "python": _python,
}


def _literal(form: Format, text: str, token_id: TokenId) -> str:
    """A fixed text, in which markers are control tokens where the tokenizer has them."""
    if not text:
        return ""
    if not form.control or token_id is None:
        return _quoted(text)
    parts: list[str] = []
    place = 0
    for found in _MARKERS.finditer(text):
        token = token_id(found[0])
        if token is not None:
            parts += [_quoted(text[place : found.start()]) if place < found.start() else "", f"<[{token}]>"]
            place = found.end()
    return " ".join(filter(None, [*parts, _quoted(text[place:]) if place < len(text) else ""]))


def _schema(function: Tool) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return _lenient({"type": "object", **(function.get("parameters") or {})})


def _lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of which unsupported keywords are ignored, as OpenAI does."""
    spaced = with_whitespace(schema, WHITESPACE)
    return spaced | {"x-guidance": {"lenient": True} | spaced["x-guidance"]}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
