"""From a request to /v1/messages to a chat request."""

from __future__ import annotations

import json
from typing import Any

from outrider.serve.errors import ApiError
from outrider.serve.messages_schema import (
    CountRequest,
    MessagesRequest,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    Turn,
    UseBlock,
)
from outrider.serve.schemas import ChatRequest
from outrider.serve.translation import ChatMessages, chat_request

__all__ = ["NAMES", "as_chat", "as_counted_chat"]

NAMES = {
    "messages": "messages",  # without positions, which count the messages that turns are made into
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
_SWITCHES = {"enabled": True, "disabled": False}  # the other types leave it to the model
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: MessagesRequest, reasons: bool) -> ChatRequest:
    """The chat request of a request to /v1/messages. A model that does not reason needs no budget for it."""
    choice = body.tool_choice
    calls_only = choice is not None and choice.type in ("any", "tool")  # no text is written, so its format does not matter
    form = None if calls_only or body.output_config is None else body.output_config.format
    alone = None if choice is None else choice.disable_parallel_tool_use
    fields = _prompt_fields(body) | {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "tool_choice": None if choice is None else _choice(choice.type, choice.name),
        "parallel_tool_calls": None if alone is None else not alone,
        "thinking_token_budget": body.thinking.budget_tokens if reasons and body.thinking is not None else None,
        "response_format": None if form is None else {"type": "json_schema", "json_schema": {"schema": form.schema_}},
    }
    return chat_request(body, fields)


def as_counted_chat(body: CountRequest) -> ChatRequest:
    """The chat request whose prompt is counted. A grammar does not change the prompt, so there is none."""
    hidden = body.tool_choice is not None and body.tool_choice.type == "none"
    return chat_request(body, _prompt_fields(body) | {"tool_choice": "none" if hidden else None})


def _prompt_fields(body: CountRequest) -> dict[str, Any]:
    """The fields that make the prompt."""
    if body.thread is not None:  # Anthropic's clients then send the whole conversation
        reason = "conversations are not stored here; send all messages, or create a tool runner with thread=False"
        raise ApiError(400, f"thread: {reason}", "thread", "thread_unsupported_request")
    messages = ChatMessages([] if body.system is None else [{"role": "system", "content": body.system}])
    for turn in body.messages:
        _add(turn, messages)
    config, thinking = body.output_config, body.thinking
    switch = None if thinking is None or thinking.type not in _SWITCHES else _SWITCHES[thinking.type]
    return {
        "messages": messages.messages,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "reasoning_effort": None if config is None else config.effort,
        "chat_template_kwargs": None if switch is None else {"enable_thinking": switch, "thinking": switch},
        "continue_final_message": body.messages[-1].role == "assistant" or None,
    }


def _add(turn: Turn, messages: ChatMessages) -> None:
    """Add a turn. Tool results become messages of their own, before the text of the same turn."""
    if isinstance(turn.content, str):
        turn = Turn(role=turn.role, content=[TextBlock(type="text", text=turn.content)])
    texts = "\n".join(block.text for block in turn.content if isinstance(block, TextBlock))
    if turn.role != "assistant":
        results = [block for block in turn.content if isinstance(block, ResultBlock)]
        for result in results:
            messages.add("tool", _result(result), tool_call_id=result.tool_use_id)
        if texts or not results:
            messages.add(turn.role, texts)
        return
    thoughts = "".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock))
    if thoughts:
        messages.reason(thoughts)
    messages.say(texts)
    for block in turn.content:
        if isinstance(block, UseBlock):
            messages.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    messages.end()


def _result(block: ResultBlock) -> str:
    """The text of a tool's result. Chat messages have no other place for the mark of an error."""
    return f"Error: {block.text}" if block.is_error else block.text


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(kind: str, name: str | None) -> Any:
    if kind != "tool":
        return _CHOICES[kind]
    if name is None:
        raise ApiError(400, "tool_choice.name: is required with the type 'tool'", "tool_choice.name")
    return {"type": "function", "function": {"name": name}}
