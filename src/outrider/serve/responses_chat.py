"""From a request to /v1/responses and the conversation before it to a chat request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.serve.response_store import Owner, ResponseStore
from outrider.serve.responses_schema import (
    CallItem,
    CustomCallItem,
    InputItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from outrider.serve.responses_tools import ToolBook, custom_arguments, function_name
from outrider.serve.schemas import ChatRequest
from outrider.serve.translation import ChatMessages, chat_request

__all__ = ["NAMES", "ResponseTurn", "open_turn"]

_LARGE_ECHO = 2**15  # characters
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """One request to /v1/responses: its chat request, and what is needed to store the answer."""

    id: str
    body: ResponsesRequest
    chat: ChatRequest
    tools: ToolBook
    store: ResponseStore
    owner: Owner
    turns: tuple[bytes, ...]  # the messages of the conversation up to here, as JSON, one list for each turn
    has_large_echo: bool  # what answers repeat of the request takes long to write


def open_turn(body: ResponsesRequest, store: ResponseStore, owner: Owner, earlier: tuple[bytes, ...]) -> ResponseTurn:
    """The turn that continues the conversation `earlier`."""
    history = [message for turn in earlier for message in json.loads(turn)]
    messages = _messages(body.input)
    head = [] if body.instructions is None else [body.instructions]
    tools = ToolBook(body.tools)
    chat = chat_request(body, _fields(body, tools) | {"messages": _one_system(head, [*history, *messages])})
    turns = earlier if body.store is False else (*earlier, json.dumps(messages).encode())
    has_large_echo = len(body.model_dump_json(include={"instructions", "tools", "text"})) > _LARGE_ECHO
    return ResponseTurn(f"resp_{secrets.token_hex(24)}", body, chat, tools, store, owner, turns, has_large_echo)


def _fields(body: ResponsesRequest, tools: ToolBook) -> dict[str, Any]:
    """The fields that a chat request names in another way."""
    choice = body.tool_choice
    calls_only = choice is not None and choice not in ("none", "auto")  # no text is written, so its format does not matter
    return {
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools.functions or None,
        "tool_choice": tools.choice(choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if calls_only or body.text is None or body.text.format is None else _format(body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }


def _format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    named: dict[str, Any] = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": {key: value for key, value in named.items() if value is not None}}


def _messages(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    out = ChatMessages([])
    for item in items:
        if isinstance(item, MessageItem) and item.role == "assistant":
            out.say(item.text)
        elif isinstance(item, MessageItem):
            out.add(item.role, item.text)
        elif isinstance(item, CallItem):
            out.call(item.call_id, function_name(item.name, item.namespace), item.arguments)
        elif isinstance(item, CustomCallItem):
            out.call(item.call_id, function_name(item.name, item.namespace), custom_arguments(item.input))
        elif isinstance(item, OutputItem):
            out.add("tool", item.text, tool_call_id=item.call_id)
        elif isinstance(item, ReasoningItem) and item.content:
            out.reason("".join(part.text for part in item.content))
    return out.messages


def _one_system(head: list[str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and what system and developer say at the start as one message: many templates take no second one."""
    texts, rest = [*head], messages
    while rest and rest[0]["role"] in ("system", "developer"):
        texts, rest = [*texts, rest[0]["content"]], rest[1:]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest
