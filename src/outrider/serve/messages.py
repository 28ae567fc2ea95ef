"""The answers of /v1/messages: content blocks and their events in Anthropic's order."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outrider.engine.outputs import CompletionOutput
from outrider.serve.errors import ApiError, body_of
from outrider.serve.parts import Part, PartsAnswer, Step
from outrider.serve.schemas import ChatRequest

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = ["PATH", "MessageAnswer"]

PATH = "/v1/messages"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageAnswer(PartsAnswer):
    """The answer to one request."""

    def __init__(self, llm: LLM, body: ChatRequest, *args: Any) -> None:
        super().__init__(llm, body, *args)
        self._chat = body
        self.id = f"msg_{secrets.token_hex(12)}"

    def ping(self) -> bytes:
        return self.framed([*self._begin(), {"type": "ping"}])

    def beginning(self) -> Iterator[dict[str, Any]]:
        prompt = self._usage_of(0)["prompt_tokens"]
        yield {"type": "message_start", "message": self._message([], _usage(prompt, 0, 0))}

    def step(self, step: Step, cut: bool = False) -> Iterator[dict[str, Any]]:  # noqa: ARG002 (the message says that it was cut)
        part = step.part
        if step.action == "open":
            yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}
        elif step.action == "add":
            yield {"type": "content_block_delta", "index": part.index, "delta": _delta(part, step.text)}
        else:
            if part.kind == "reasoning":
                yield {
                    "type": "content_block_delta",
                    "index": part.index,
                    "delta": {"type": "signature_delta", "signature": ""},
                }
            yield {"type": "content_block_stop", "index": part.index}

    def ending(self, output: CompletionOutput, reason: str) -> Iterator[dict[str, Any]]:
        end = self._end_of(output, reason)
        usage = self._usage([output])
        details = usage["prompt_tokens_details"]
        counts = _usage(usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"])
        counts["output_tokens_details"] = {"thinking_tokens": self.reasoning_tokens(usage)}
        metrics = self._metrics([output])
        self.document = self._message([_block(part) for part in self.parts.parts], counts) | end | {"metrics": metrics}
        yield {"type": "message_delta", "delta": end, "usage": counts, "metrics": metrics}
        yield {"type": "message_stop"}

    def _end_of(self, output: CompletionOutput, reason: str) -> dict[str, str | None]:
        """Why an output ended. One that is shorter than its limit has filled the context."""
        if reason == "stop" and isinstance(output.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        is_full = reason == "length" and len(output.token_ids) < (self._chat.max_completion_tokens or 0)
        return {"stop_reason": "model_context_window_exceeded" if is_full else _REASONS[reason], "stop_sequence": None}

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield body_of(error, PATH)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _usage(prompt: int, cached: int, written: int) -> dict[str, Any]:
    """Token counts. Prompt tokens found in the prefix cache are counted apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": written,
        "service_tier": "standard",
    }


def _block(part: Part) -> dict[str, Any]:
    """A content block with what the part has written so far."""
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    arguments: Any = {}
    with suppress(ValueError, RecursionError):  # arguments that were cut off are no JSON
        arguments = json.loads(part.text or "{}")
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _delta(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text_delta", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
