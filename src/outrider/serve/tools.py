"""Tools: how they are described to a model, and grammars that make it call them. `tool_calls` parses the calls.

Pure functions of text and the request's `tools`; nothing here calls a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidParameter
from outrider.sampling import Structured
from outrider.sampling.matcher import WHITESPACE

__all__ = [
    "FAMILIES",
    "FORMATS",
    "Format",
    "Tool",
    "check_tools",
    "family_of",
    "tool_grammar",
    "tool_or_answer",
    "with_tools",
    "with_whitespace",
]

Tool = Mapping[str, Any]  # as in the request: {"type": "function", "function": {"name", "parameters", ...}}
ToolChoice = str | Mapping[str, Any] | None  # "none", "auto", "required", or {"type": "function", "function": {"name"}}
MAX_TOOLS = 128
_MAX_CALLS = 8  # maximum number of calls in one answer under a grammar
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Format:
    """The syntax of tool calls in a family of models."""

    opening: str  # before a call, or before the first call of a list
    key: str = "arguments"  # the property that holds the arguments
    before: str = ""  # between the opening and the call's object
    closing: str = ""  # after a call, or after the last call of a list
    between: str = "\n"  # between two calls
    listed: bool = False  # one opening and closing around all calls
    named: bool = False  # name[ARGS]{...} instead of an object
    bare: bool = False  # an answer that begins with a JSON object is also a call
    control: bool = False  # the opening is one control token


FORMATS = {
    "hermes": Format("<tool_call>", before="\n", closing="\n</tool_call>"),
    "llama3": Format("<|python_tag|>", key="parameters", between="; ", listed=True, bare=True),
    "mistral": Format("[TOOL_CALLS]", before="[", closing="]", between=", ", listed=True, control=True),
    "mistral_args": Format("[TOOL_CALLS]", between="", named=True, control=True),
    "marked": Format("<|tool|>", control=True),
    "default": Format("<tool_call>", before="\n", closing="\n</tool_call>"),
}
FAMILIES = tuple(FORMATS)


def check_tools(tools: Sequence[Tool], choice: ToolChoice = None) -> str:
    """Check tools and tool_choice. Raises InvalidParameter that names "tools" or "tool_choice".

    Returns the normalised choice: "none", "auto", "required", or the name of the one tool to call.
    """
    names = [_checked_name(tool) for tool in tools]
    if len(names) > MAX_TOOLS:
        raise InvalidParameter("tools", f"holds {len(names)} tools; at most {MAX_TOOLS} are taken")
    if len(set(names)) < len(names):
        raise InvalidParameter("tools", f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidParameter("tool_choice", f"must be none, auto, required or a function, got {choice!r}")
        if choice == "required" and not tools:
            raise InvalidParameter("tool_choice", "is required, but there are no tools")
        return choice if tools else "none"
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise InvalidParameter("tool_choice", f"names {name!r}; the tools are: {', '.join(names) or 'none'}")
    return str(name)


def _checked_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidParameter("tools", 'must hold {"type": "function", "function": {"name": ..., "parameters": ...}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter("tools", f"a function's name has 1 to 64 letters, digits or any of _ . -, got {name!r}")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidParameter("tools", f"the parameters of {name!r} must be a JSON schema")
    return name


def family_of(chat_template: str | None) -> str:
    """The format of tool calls of a model with this template, or "default" if the template knows no tools."""
    template = chat_template or ""
    if "tools" not in template:
        return "default"
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3"
    return "marked" if "<|tool|>" in template else "default"


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], family: str) -> list[dict[str, Any]]:
    """Messages as the template expects them, with the arguments of earlier calls as objects instead of text.

    For a template that knows no tools, tools and calls become text in the default format. Pass the result to
    `Tokenizer.chat(messages, tools=None if family == "default" else tools)`.
    """
    out = [_with_objects(message) for message in messages]
    if family != "default":
        return out
    texts = [_as_text(message) for message in out]
    first = texts[0]["content"] + "\n\n" if texts and texts[0]["role"] == "system" else ""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    system = {"role": "system", "content": first + _DEFAULT_PROMPT.format(tools=lines)}
    return [system, *(texts[1:] if first else texts)]


_DEFAULT_PROMPT = """You may call these functions, one JSON object per line:
{tools}

To call one, write its name and arguments as JSON between two tags, and nothing after them:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
Results come back between <tool_response> tags."""


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return out


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # arguments that are not JSON are passed on as they are
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as plain text, for templates that know no tools."""
    role, content = message.get("role"), message.get("content") or ""
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        "<tool_call>\n" + json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}) + "\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": role, "content": "\n".join([content, *calls] if content else calls) if calls else content}


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    family: str,
    parallel: bool = True,
    token_id: Callable[[str], int | None] | None = None,
) -> Structured | None:
    """A grammar that makes the model call a tool, in its family's format. None unless the choice requires a call.

    `token_id` finds control tokens by name (`Tokenizer.table().get`). Without it they are written as text.
    """
    wanted = check_tools(tools, choice)
    if wanted in ("none", "auto"):
        return None
    named = [tool["function"] for tool in tools if wanted in ("required", tool["function"]["name"])]
    form = FORMATS[family]
    opening = "" if form.bare else _marker(form, token_id)
    several = f" ({_quoted(form.between) if form.between else ''} {'call' if form.listed else 'whole'}){{0,{_MAX_CALLS - 1}}}"
    repeated = several if parallel and wanted == "required" else ""
    before, closing = (_quoted(text) if text else "" for text in (form.before, form.closing))
    rules = [
        f"start: {opening} {before} call{repeated} {closing}" if form.listed else f"start: whole{repeated}",
        *([] if form.listed else [f"whole: {opening} {before} call {closing}"]),
        "call: " + " | ".join(f"call{i}" for i in range(len(named))),
    ]
    for i, function in enumerate(named):
        rules.append(f"call{i}: {_call(form, function['name'], f'args{i}')}")
        rules.append(f"args{i}: %json {json.dumps(_schema(function), ensure_ascii=False)}")
    return Structured("lark", "\n".join(rules))


def tool_or_answer(calls: Structured, answer: Structured) -> Structured:
    """A grammar that accepts tool calls or an answer in JSON."""
    if answer.kind not in ("json_schema", "json_object"):
        raise InvalidParameter(
            "response_format", f"a {answer.kind} cannot stand beside tools; use a JSON schema, or tool_choice: none"
        )
    schema = json.loads(answer.value or '{"type": "object"}')
    schema = {} if schema is True else {"enum": []} if schema is False else schema
    rules = calls.value.replace("start:", "calls:", 1)
    spaced = with_whitespace(schema, answer.whitespace or WHITESPACE)
    return Structured("lark", f"start: calls | answer\n{rules}\nanswer: %json {json.dumps(spaced, ensure_ascii=False)}")


def with_whitespace(schema: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """A schema with this pattern of white space in JSON, unless the schema sets one."""
    options = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": pattern} | (options if isinstance(options, dict) else {})}


def _marker(form: Format, token_id: Callable[[str], int | None] | None) -> str:
    token = token_id(form.opening) if form.control and token_id is not None else None
    return _quoted(form.opening) if token is None else f"<[{token}]>"


def _call(form: Format, name: str, arguments: str) -> str:
    if form.named:
        return f"{_quoted(name + '[ARGS]')} {arguments}"
    head = f'{{"name": {json.dumps(name)}, "{form.key}": '
    return f'{_quoted(head)} {arguments} "}}"'


def _schema(function: Tool) -> dict[str, Any]:
    """The schema of a function's arguments. Unsupported keywords are ignored, as OpenAI does."""
    schema = with_whitespace({"type": "object", **(function.get("parameters") or {})}, WHITESPACE)
    return schema | {"x-guidance": {"lenient": True} | schema["x-guidance"]}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
