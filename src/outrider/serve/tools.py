"""Tools: checking a request's tools, and telling a model of them. `tool_calls` parses calls, `tool_grammar` enforces them.

Pure functions of text and the request's `tools`; nothing here calls a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from outrider.errors import InvalidParameter
from outrider.serve.tool_formats import FORMATS, Format, Tool, family_of

__all__ = ["ToolChoice", "check_tools", "family_of", "with_tools"]

ToolChoice = str | Mapping[str, Any] | None  # "none", "auto", "required", or {"type": "function", "function": {"name"}}
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")  # a schema
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")


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
        raise InvalidParameter("tools", f"a function's name has 1 to 128 letters, digits or any of _ . -, got {name!r}")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidParameter("tools", f"the parameters of {name!r} must be a JSON schema")
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object":
        raise InvalidParameter("tools", f"the parameters of {name!r} must have the type object, got {parameters['type']!r}")
    if (fault := _fault_of(parameters, "parameters")) is not None:
        raise InvalidParameter("tools", f"the schema of {name!r} is wrong: {fault}")
    return name


def _fault_of(schema: Any, path: str) -> str | None:
    """What is wrong with a schema, as far as its shape tells; None where nothing is. Unknown keywords are ignored."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"{path} must be a schema, which is an object or a bool"
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if kind not in _TYPES:
            return f"{path}.type is {kind!r}; the types are {', '.join(_TYPES)}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        return f"{path}.required must be a list of names"
    if not isinstance(schema.get("enum", []), list):
        return f"{path}.enum must be a list"
    parts: list[tuple[Any, str]] = [(schema[key], key) for key in _SCHEMAS if key in schema]
    for key in _SCHEMA_LISTS:
        if not isinstance(schema.get(key, []), list):
            return f"{path}.{key} must be a list of schemas"
        parts += [(part, f"{key}[{number}]") for number, part in enumerate(schema.get(key, []))]
    for key in _SCHEMA_MAPS:
        if not isinstance(schema.get(key, {}), Mapping):
            return f"{path}.{key} must map names to schemas"
        parts += [(part, f"{key}.{name}") for name, part in schema.get(key, {}).items()]
    faults = (_fault_of(part, f"{path}.{place}") for part, place in parts)
    return next((fault for fault in faults if fault is not None), None)


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], family: str, described: bool = True
) -> list[dict[str, Any]]:
    """Messages as the template expects them. Most templates expect the arguments of earlier calls as objects, not as text.

    `described`: the template tells the model of the tools. Otherwise the system message does. For a template that knows no
    tools at all, earlier calls and results become text too. Pass the result to
    `Tokenizer.chat(messages, tools=None if family == "default" else tools)`.
    """
    form = FORMATS[family]
    out = [dict(message) if form.text_arguments else _with_objects(message) for message in messages]
    if family == "default":
        out = [_as_text(message) for message in out]
    if form.system_tools:
        out = _with_system(out, "")
        return [out[0] | {"tools": json.dumps([tool["function"] for tool in tools], ensure_ascii=False)}, *out[1:]]
    return out if described and family != "default" else _with_system(out, _prompt(form, tools))


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Messages whose system message ends with a text."""
    first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    content = "\n\n".join(part for part in (first, text) if part)
    return [{"role": "system", "content": content}, *(messages if first is None else messages[1:])]


def _prompt(form: Format, tools: Sequence[Tool]) -> str:
    """The tools and the format of a call, in words."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if form.syntax == "named":
        example = f"{form.opening}{form.head}NAME{form.separator}{{...}}{form.tail}{form.closing}"
        return f"You may call these functions, one JSON object per line:\n{lines}\n\nTo call one, write exactly this:\n{example}"
    return _DEFAULT_PROMPT.format(tools=lines)


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
