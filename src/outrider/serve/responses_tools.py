"""Tools of /v1/responses as functions of a chat request, and calls of these functions as output items.

A function of a namespace is offered to the model under both names. A custom tool, whose input is free text, is offered as a
function with one argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidParameter
from outrider.serve.responses_schema import AnyTool, CustomTool, FunctionTool, NamedTool, NamespaceTool

__all__ = ["ToolBook", "custom_arguments", "custom_input", "function_name"]

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class _Listed:
    """A tool as its client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


class ToolBook:
    """The tools of a request, by the names under which they are offered to the model."""

    def __init__(self, tools: Sequence[AnyTool] | None) -> None:
        self.functions: list[dict[str, Any]] = []  # as a chat request has them
        self._listed: dict[str, _Listed] = {}
        for tool in tools or ():
            for part, namespace, head in _parts(tool):
                name = function_name(part.name, namespace)
                self.functions.append({"type": "function", "function": _function(part, name, head)})
                self._listed[name] = _Listed(part.name, namespace, isinstance(part, CustomTool))

    def choice(self, choice: str | NamedTool | None) -> Any:
        """A request's `tool_choice` as a chat request has it."""
        if choice is None or isinstance(choice, str):
            return choice
        custom = choice.type == "custom"
        fitting = [name for name, tool in self._listed.items() if choice.name in (tool.name, name) and tool.is_custom == custom]
        if len(fitting) != 1:
            names = ", ".join(fitting or self._listed) or "none"
            reason = "is in several namespaces; choose one of" if fitting else f"is no {choice.type} tool; the tools are"
            raise InvalidParameter("tool_choice", f"{choice.name!r} {reason}: {names}")
        return {"type": "function", "function": {"name": fitting[0]}}

    def is_custom(self, function: str) -> bool:
        """Whether a function that the model called is a custom tool."""
        return self._listed[function].is_custom

    def names(self, function: str) -> dict[str, str]:
        """The names of a tool that the model called, as an output item has them."""
        tool = self._listed[function]
        return {"name": tool.name} | ({} if tool.namespace is None else {"namespace": tool.namespace})


def _parts(tool: AnyTool) -> Iterator[tuple[FunctionTool | CustomTool, str | None, str | None]]:
    """The tools in a tool, each with its namespace. The first one is told what the namespace is for."""
    if not isinstance(tool, NamespaceTool):
        yield tool, None, None
        return
    for number, part in enumerate(tool.tools):
        yield part, tool.name, tool.description if number == 0 else None


def function_name(name: str, namespace: str | None) -> str:
    """The name under which a tool of a namespace is offered to the model."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _function(tool: FunctionTool | CustomTool, name: str, head: str | None) -> dict[str, Any]:
    grammar = None
    if isinstance(tool, CustomTool) and tool.format is not None and tool.format.definition is not None:
        grammar = f"The input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    text = "\n\n".join(part for part in (head, tool.description, grammar) if part)
    fields: dict[str, Any] = {"name": name, "description": text or None}
    fields |= {"parameters": _INPUT} if isinstance(tool, CustomTool) else {"parameters": tool.parameters, "strict": tool.strict}
    return {key: value for key, value in fields.items() if value is not None}


def custom_arguments(text: str) -> str:
    """The arguments of a call whose tool takes free text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The free text in a call's arguments; empty if they were cut off."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments)
    text = value.get("input") if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else ""
