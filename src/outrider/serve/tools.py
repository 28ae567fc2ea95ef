"""Tools: how a model is told of them, made to call them, and how its calls are read back.

Pure functions of text and the request's `tools`; nothing here calls a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.sampling import Structured

__all__ = [
    "FAMILIES",
    "CallDelta",
    "ToolCall",
    "ToolStream",
    "check_tools",
    "family_of",
    "parse_tool_calls",
    "tool_grammar",
    "with_tools",
]

FAMILIES = ("hermes", "llama3", "mistral", "default")
Tool = Mapping[str, Any]  # as the request has it: {"type": "function", "function": {"name", "parameters", ...}}
ToolChoice = str | Mapping[str, Any] | None  # "none", "auto", "required", or {"type": "function", "function": {"name"}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call a model made. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a stream adds: text of the answer, or a piece of call `index`; id and name come once, with its first piece."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def check_tools(tools: Sequence[Tool], choice: ToolChoice = None) -> str:
    """Refuse tools that are malformed (InvalidParameter names "tools" or "tool_choice").

    Returns the choice in short: "none", "auto", "required", or the name of the one tool to call.
    """
    raise NotImplementedError


def family_of(chat_template: str | None) -> str:
    """The format in which a model with this template writes its calls; "default" where it knows no tools."""
    raise NotImplementedError


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], family: str) -> list[dict[str, Any]]:
    """Messages as the template takes them: a template that knows no tools gets them in the system message.

    Pass the result to `Tokenizer.chat(messages, tools=None if family == "default" else tools)`.
    """
    raise NotImplementedError


def tool_grammar(tools: Sequence[Tool], choice: ToolChoice, family: str, parallel: bool = True) -> Structured | None:
    """What makes the model call: a grammar in its own format for "required" and for a named tool, None otherwise."""
    raise NotImplementedError


def parse_tool_calls(text: str, tools: Sequence[Tool], family: str) -> tuple[str | None, list[ToolCall]]:
    """The answer's text (None where there is only a call) and the calls in it. Text that is no sound call stays text."""
    raise NotImplementedError


class ToolStream:
    """The same, piece by piece: text that may be the beginning of a call is held back."""

    def __init__(self, tools: Sequence[Tool], family: str) -> None:
        raise NotImplementedError

    def push(self, text: str) -> list[CallDelta]:
        """What a new piece of text amounts to."""
        raise NotImplementedError

    def finish(self) -> list[CallDelta]:
        """What was held back, now that nothing follows."""
        raise NotImplementedError

    @property
    def called(self) -> bool:
        """Whether a call was seen: the finish reason is then "tool_calls"."""
        raise NotImplementedError
