"""The answers of /v1/responses: output items, their events in OpenAI's order, and what is stored of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from outrider.engine.outputs import CompletionOutput
from outrider.serve.errors import ApiError
from outrider.serve.parts import Part, PartsAnswer, Step
from outrider.serve.response_store import StoredResponse
from outrider.serve.responses_chat import ResponseTurn
from outrider.serve.responses_schema import AnyTool, ResponsesRequest
from outrider.serve.responses_tools import custom_input
from outrider.serve.translation import ChatMessages

__all__ = ["ResponseAnswer"]

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
_DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}


class ResponseAnswer(PartsAnswer):
    """The answer to one request."""

    def __init__(self, turn: ResponseTurn, *args: Any) -> None:
        super().__init__(*args)
        self.id = turn.id  # random: whoever knows it may ask for the answer
        self._turn = turn
        self._sent = 0  # events so far

    def is_large(self, tokens: int) -> bool:
        return super().is_large(tokens) or self._turn.has_large_echo

    def ping(self) -> bytes:
        return self.framed(self._begin()) + super().ping()

    def beginning(self) -> Iterator[dict[str, Any]]:
        for state in ("created", "in_progress"):
            yield self._event(f"response.{state}", response=self._response("in_progress"))

    def step(self, step: Step, cut: bool = False) -> Iterator[dict[str, Any]]:
        part = step.part
        if step.action == "open":
            yield from self._opened(part)
        elif step.action == "close":
            yield from self._closed(part, "incomplete" if cut else "completed")
        elif self._kind(part) != "custom":  # its input is known when its arguments are complete
            yield self._delta(part, step.text)

    def _opened(self, part: Part) -> Iterator[dict[str, Any]]:
        yield self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind != "call":
            yield self._event("response.content_part.added", **self._inside(part), part=_content(part))

    def _closed(self, part: Part, status: str) -> Iterator[dict[str, Any]]:
        kind = self._kind(part)
        written: dict[str, Any] = {"text": part.text}
        if kind == "custom":
            written = {"input": custom_input(part.text)}
            yield self._delta(part, written["input"])
        elif kind == "call":
            written = {"name": self._turn.tools.names(part.name)["name"], "arguments": part.text}
        elif kind == "text":
            written["logprobs"] = []
        yield self._event(f"{_DELTAS[kind]}.done", **self._inside(part), **written)
        if part.kind != "call":
            yield self._event("response.content_part.done", **self._inside(part), part=_content(part))
        yield self._event("response.output_item.done", output_index=part.index, item=self._item(part, status))

    def _delta(self, part: Part, text: str) -> dict[str, Any]:
        extra: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        return self._event(f"{_DELTAS[self._kind(part)]}.delta", **self._inside(part), delta=text, **extra)

    def _kind(self, part: Part) -> str:
        return "custom" if part.kind == "call" and self._turn.tools.is_custom(part.name) else part.kind

    def _inside(self, part: Part) -> dict[str, Any]:
        """The place of an event inside an item."""
        place = {"output_index": part.index, "item_id": self._item_id(part)}
        return place if part.kind == "call" else place | {"content_index": 0}

    def ending(self, output: CompletionOutput, reason: str) -> Iterator[dict[str, Any]]:
        status = "incomplete" if reason == "length" else "completed"
        self.document = self._response(status) | {
            "output": self._items(status),
            "usage": self._usage_of_output(output),
            "metrics": self._metrics([output]),
        }
        if status == "incomplete":
            self.document["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.document["completed_at"] = int(time.time())
        self._store()
        yield self._event(f"response.{status}", response=self.document)

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        code = "server_error" if error.status_code >= 500 else "invalid_prompt"
        fault = {"output": self._items("incomplete"), "error": {"code": code, "message": error.detail}}
        yield self._event("response.failed", response=self._response("failed") | fault)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        """The response without its output."""
        body, params = self._turn.body, self._prepared.jobs[0][0][0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        } | _echo(body)

    def _items(self, status: str) -> list[dict[str, Any]]:
        """The output. Only the last part can be incomplete."""
        parts = self.parts.parts
        return [self._item(part, status if part is parts[-1] else "completed") for part in parts]

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        empty = status == "in_progress"
        content = [] if empty else [_content(part)]
        if part.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        if part.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        item |= {"call_id": part.call_id} | self._turn.tools.names(part.name)
        if self._kind(part) == "custom":
            return item | {"type": "custom_tool_call", "input": "" if empty else custom_input(part.text)}
        return item | {"type": "function_call", "arguments": "" if empty else part.text}

    def _item_id(self, part: Part) -> str:
        return f"{_PREFIXES[self._kind(part)]}_{self.id.removeprefix('resp_')}_{part.index}"

    def _usage_of_output(self, output: CompletionOutput) -> dict[str, Any]:
        usage = self._usage([output])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens(usage)},
            "total_tokens": usage["total_tokens"],
        }

    def _store(self) -> None:
        """Store the answer with the conversation that it ends, unless the request has `store: false`."""
        turn = self._turn
        if turn.body.store is False:
            return
        messages = ChatMessages([])
        for part in self.parts.parts:
            if part.kind == "reasoning":
                messages.reason(part.text)
            elif part.kind == "text":
                messages.say(part.text)
            else:
                messages.call(part.call_id, part.name, part.text)
        answer = json.dumps(messages.messages).encode()
        turn.store.put(turn.owner, self.id, StoredResponse(json.dumps(self.document).encode(), (*turn.turns, answer)))


def _content(part: Part) -> dict[str, Any]:
    """What a part has written so far, as the content of its item."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What an answer repeats of its request."""
    choice, effort = body.tool_choice, None if body.reasoning is None else body.reasoning.effort
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "text": {"format": _format_of(body), "verbosity": "medium"},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_echoed(tool) for tool in body.tools or ()],
        "top_logprobs": 0,
        "user": body.user,
    }


def _format_of(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _echoed(tool: AnyTool) -> dict[str, Any]:
    empty = {"parameters": None, "strict": None} if tool.type == "function" else {}
    return empty | tool.model_dump(exclude_none=True)
