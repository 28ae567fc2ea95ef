"""The message in a model's output: reasoning, text and tool calls, from a complete text or from a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.sampling import Reasoning
from outrider.serve.harmony import HarmonyStream
from outrider.serve.reasoning import ReasoningStream
from outrider.serve.tool_calls import CallDelta, ToolCall, ToolStream, collect
from outrider.serve.tool_formats import Tool

__all__ = ["MessageStream", "open_message", "open_tools", "parse_tool_calls"]


class MessageStream(Protocol):
    """Turns the text of an output into deltas of its message."""

    @property
    def called(self) -> bool:
        """Whether there was a tool call."""

    def push(self, text: str) -> list[CallDelta]:
        """The deltas of new text."""

    def finish(self, cut: bool = False) -> list[CallDelta]:
        """The deltas of text that was held back. `cut`: the output was cut off, which drops incomplete markers."""


class PlainText:
    """An answer that calls no tools."""

    called = False

    def push(self, text: str) -> list[CallDelta]:
        return [CallDelta(content=text)] if text else []

    def finish(self, cut: bool = False) -> list[CallDelta]:  # noqa: ARG002 (nothing is held back)
        return []


class AfterReasoning:
    """Reasoning, and then an answer."""

    def __init__(self, reasoning: Reasoning, answer: MessageStream) -> None:
        self._reasoning = ReasoningStream(reasoning)
        self._answer = answer

    @property
    def called(self) -> bool:
        return self._answer.called

    def push(self, text: str) -> list[CallDelta]:
        return self._deltas(self._reasoning.push(text))

    def finish(self, cut: bool = False) -> list[CallDelta]:
        return self._deltas(self._reasoning.finish(cut)) + self._answer.finish(cut)

    def _deltas(self, parts: tuple[str, str]) -> list[CallDelta]:
        reasoning, text = parts
        return ([CallDelta(reasoning=reasoning)] if reasoning else []) + self._answer.push(text)


def open_tools(tools: Sequence[Tool], family: str) -> MessageStream:
    """The stream of an answer that may call tools in a family's format."""
    return HarmonyStream(tools, reasoning=False) if family == "harmony" else ToolStream(tools, family)


def parse_tool_calls(text: str, tools: Sequence[Tool], family: str, cut: bool = False) -> tuple[str | None, list[ToolCall]]:
    """The text of an answer (None if there are only calls) and its tool calls. A malformed call stays text.

    `cut`: the output was cut off, so that an incomplete opening of a call at the end is dropped.
    """
    stream = open_tools(tools, family)
    return collect([*stream.push(text), *stream.finish(cut)])


def open_message(tools: Sequence[Tool], family: str, reasoning: Reasoning | None, channels: bool = False) -> MessageStream:
    """The stream of a message. `family` is empty where there are no tools; `channels` where it has those of gpt-oss."""
    if channels:
        return HarmonyStream(tools)
    answer = open_tools(tools, family) if family else PlainText()
    return answer if reasoning is None else AfterReasoning(reasoning, answer)
