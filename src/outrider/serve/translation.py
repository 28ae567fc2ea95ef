"""From other APIs' requests to chat requests: the fields that all routes share, and the names that errors use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from outrider.errors import InvalidParameter
from outrider.serve.errors import ApiError
from outrider.serve.schemas import ChatRequest, GenerationRequest
from outrider.serve.validation import refusal_of

__all__ = ["ChatMessages", "chat_request", "named_as"]

_SHARED = GenerationRequest.model_fields.keys() - {"max_tokens", "response_format", "stream_options"}


class ChatMessages:
    """Chat messages, collected from items. Reasoning, text and calls of one turn of the assistant become one message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._open = False  # whether the last message is the assistant's and may be added to

    def add(self, role: str, content: str, **fields: Any) -> None:
        """A message of anybody but the assistant."""
        self._open = False
        self.messages.append({"role": role, "content": content, **fields})

    def reason(self, text: str) -> None:
        """Reasoning begins a turn of the assistant."""
        self._assistant(anew=True)["reasoning_content"] = text

    def say(self, text: str) -> None:
        """Text of the assistant. After other text or calls it begins another message."""
        spoken = self._open and bool(self.messages[-1]["content"] or self.messages[-1].get("tool_calls"))
        self._assistant(anew=spoken)["content"] = text

    def call(self, name: str, function: str, arguments: str) -> None:
        """A tool call of the assistant."""
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": name, "type": "function", "function": {"name": function, "arguments": arguments}})

    def end(self) -> None:
        """End the assistant's turn."""
        self._open = False

    def _assistant(self, anew: bool = False) -> dict[str, Any]:
        if anew or not self._open:
            self.messages.append({"role": "assistant", "content": ""})
            self._open = True
        return self.messages[-1]


def chat_request(body: GenerationRequest, fields: Mapping[str, Any]) -> ChatRequest:
    """The chat request with these fields and those that all routes share. Raises ApiError if a field is invalid."""
    shared = body.model_dump(include=set(_SHARED), by_alias=True, exclude_none=True)
    merged = shared | {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(merged)
    except ValidationError as error:
        refusal = refusal_of(error, merged)
        raise ApiError(400, refusal.message, refusal.param) from None


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors the names that an API has for the fields of a chat request."""
    try:
        yield
    except InvalidParameter as error:
        name, text = _renamed(names, error.param, str(error))
        raise ApiError(400, text, name, error.code) from None
    except ApiError as error:
        name, text = _renamed(names, error.param, error.detail)
        raise ApiError(error.status_code, text, name, error.code, error.headers) from None


def _renamed(names: Mapping[str, str], param: str | None, text: str) -> tuple[str | None, str]:
    """The field's name and the message. Positions in a list of messages are dropped: they count another list."""
    name = names.get(re.split(r"[.\[]", param or "")[0])
    if param is None or name is None:
        return param, text
    return name, f"{name}: {text.removeprefix(f'{param}: ')}"
