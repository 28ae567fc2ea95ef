"""Parses and checks request bodies: a checked request, or the first error.

Nothing here depends on HTTP. Large bodies are checked in another process, which imports only this file and the schemas.
"""

from __future__ import annotations

import gc
import json
import math
import re
from array import array
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from outrider.serve.messages_schema import CountRequest, MessagesRequest
from outrider.serve.responses_schema import ResponsesRequest
from outrider.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ForgetRequest,
    GenerationRequest,
    LoadLoraRequest,
    RememberRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)
from outrider.serve.unserved import unknown_fields

__all__ = ["SCHEMAS", "Refusal", "check", "check_in_worker", "refusal_of", "restore"]

SCHEMAS: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(CompletionRequest),
    "/v1/chat/completions": TypeAdapter(ChatRequest),
    "/v1/responses": TypeAdapter(ResponsesRequest),
    "/v1/messages": TypeAdapter(MessagesRequest),
    "/v1/messages/count_tokens": TypeAdapter(CountRequest),
    "/tokenize": TypeAdapter(TokenizeRequest),
    "/detokenize": TypeAdapter(DetokenizeRequest),
    "/forget": TypeAdapter(ForgetRequest),
    "/remember": TypeAdapter(RememberRequest),
    "/v1/load_lora_adapter": TypeAdapter(LoadLoraRequest),
    "/v1/unload_lora_adapter": TypeAdapter(UnloadLoraRequest),
}
_ID = "i"  # array type of 32-bit integers
_UNPACKED_BYTES = 2**16
_REASONS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "missing": "is required",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a body is refused, and the field at fault as a path, such as `stop[1]`."""

    message: str
    param: str | None = None


class _InvalidJson(Exception):
    """The body is not valid JSON."""


def check(path: str, body: bytes, depth: int) -> Any:
    """The request to a route as an instance of its schema, or a Refusal."""
    try:
        value = _parse(body, depth)
    except _InvalidJson as error:
        return Refusal(str(error))
    if not isinstance(value, dict):
        return Refusal("the body must be a JSON object")
    try:
        request = SCHEMAS[path].validate_python(value)
    except ValidationError as error:
        return refusal_of(error, value)
    if isinstance(request, GenerationRequest):
        request.ignore(unknown_fields(value, {*type(request).model_fields, *request.UNSUPPORTED}))
    return request


def check_in_worker(path: str, body: bytes, depth: int) -> tuple[bool, Any, tuple[str, ...]]:
    """Run `check` in another process. Returns whether the body is valid, plain data for `restore`, and unknown fields."""
    gc.disable()  # garbage collections while millions of values are created only cost time
    try:
        result = check(path, body, depth)
        if isinstance(result, Refusal):
            return False, (result.message, result.param), ()
        value = result.model_dump(by_alias=True, exclude_unset=True)
        ignored = result.ignored if isinstance(result, GenerationRequest) else ()
        return True, value | {"prompt": _packed(value["prompt"])} if "prompt" in value else value, ignored
    finally:
        gc.collect()


def restore(path: str, valid: bool, value: Any, ignored: tuple[str, ...] = ()) -> Any:
    """The result of `check` from the other process. Long prompts of ids are not validated a second time."""
    if not valid:
        return Refusal(*value)
    prompt = value.get("prompt")
    is_text = not isinstance(prompt, list | bytes)
    request = SCHEMAS[path].validate_python(value if is_text else value | {"prompt": ""})
    if not is_text:
        request.prompt = _unpacked(prompt)
    if isinstance(request, GenerationRequest):
        request.ignore(ignored)
    return request


def _packed(prompt: Any) -> Any:
    """A prompt with its ids as bytes: unpickling a list of a million ids would hold the interpreter lock for long."""
    if not isinstance(prompt, list) or isinstance(prompt[0], str):
        return prompt
    return array(_ID, prompt).tobytes() if isinstance(prompt[0], int) else [_packed(ids) for ids in prompt]


def _unpacked(prompt: Any) -> Any:
    """The prompt with ids as lists, converted in blocks so that other threads can run in between."""
    if isinstance(prompt, bytes):
        ids: list[int] = []
        for start in range(0, len(prompt), _UNPACKED_BYTES):
            ids += array(_ID, prompt[start : start + _UNPACKED_BYTES])
        return ids
    return [item if isinstance(item, str) else _unpacked(item) for item in prompt]


def refusal_of(error: ValidationError, value: Any) -> Refusal:
    """The first error. Its location is reduced to fields that the client wrote, without the branches of unions."""
    first, param = error.errors(include_url=False, include_input=False, include_context=False)[0], ""
    *_, last = first["loc"] or ("",)
    for part in first["loc"]:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            param, value = f"{param}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            param, value = f"{param}.{part}" if param else str(part), value[part]
    if first["type"] == "missing":
        param = f"{param}.{last}" if param else str(last)
    reason = _REASONS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    reason = re.sub("^(Input|String|List|Dictionary) should", "must", reason).replace(" after validation", "")
    if not param and (unserved := re.match(r"(\w+) is not supported", reason)):
        return Refusal(reason, unserved[1])
    return Refusal(f"{param}: {reason}" if param else reason, param or None)


def _parse(body: bytes, depth: int) -> Any:
    """Parse JSON with finite numbers, valid Unicode, unique keys and at most `depth` levels."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise _InvalidJson(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _InvalidJson(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep(depth) from None
    except ValueError as error:  # for example integers with thousands of digits
        raise _InvalidJson(f"the body is not JSON that can be used: {error}") from None
    _check_values(value, depth, surrogates=b"\\u" in body)
    return value


def _check_values(value: Any, depth: int, surrogates: bool) -> None:
    level = [value]
    for _ in range(depth + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                if surrogates:
                    below += item
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise _InvalidJson("the body holds NaN or a number beyond the range of floats")
            elif surrogates and isinstance(item, str):
                _check_text(item)
        if not below:
            return
        level = below
    raise _too_deep(depth)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _InvalidJson("the body holds half of a surrogate pair, which is no text") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("an object names a key twice")
    return out


def _too_deep(depth: int) -> _InvalidJson:
    return _InvalidJson(f"the body is nested deeper than {depth} levels")
