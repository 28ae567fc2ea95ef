"""What the router reads of a request: its conversation, its tenant, the beginning of its prompt, and its number of sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.routing import RequestKeys, text_prefix, token_prefix

__all__ = ["Routed", "routed"]

_PARSED = 64 * 2**10  # bytes of a body that is parsed: a larger one would hold up other requests
_SESSIONS = (b"x-session-id", b"x-conversation-id")
_PROMPTS = ("tools", "system", "instructions", "messages", "input")  # in the order in which templates write them
_MOST = 128  # sequences of one request


class Routed(NamedTuple):
    """What the front door knows of a request before a replica reads it."""

    keys: RequestKeys
    sequences: int = 1


def routed(path: str, headers: Mapping[bytes, bytes], body: bytes) -> Routed:
    """The keys of a request. A body that is no valid request has some, too: its replica says what is wrong with it."""
    fields = _fields(body)
    salt = _text(fields.get("cache_salt")) or ""
    key = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
    tenant = hashlib.sha256(key + b"\n" + salt.encode("utf-8", "surrogatepass")).hexdigest()[:16] if key or salt else None
    prefix = _prefix(fields, body, f"{salt}\n{_text(fields.get('model')) or ''}")
    return Routed(RequestKeys(_conversation(path, headers, fields), tenant, prefix), _sequences(fields))


def _fields(body: bytes) -> Mapping[str, Any]:
    if not body or len(body) > _PARSED:
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _conversation(path: str, headers: Mapping[bytes, bytes], fields: Mapping[str, Any]) -> str | None:
    """The answer that is continued, read or deleted, which one replica has stored; else the client's name for it."""
    stored = path.removeprefix("/v1/responses/") if path.startswith("/v1/responses/") else fields.get("previous_response_id")
    if isinstance(stored, str) and stored:
        return stored[:256]
    for name in _SESSIONS:
        if headers.get(name):
            return headers[name][:256].decode("latin-1")
    return _text(fields.get("prompt_cache_key"))


def _prefix(fields: Mapping[str, Any], body: bytes, salt: str) -> tuple[int, ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return text_prefix(prompt, salt)
    if isinstance(prompt, list):
        ids = [i for i in prompt[: 64 * 128] if isinstance(i, int) and 0 <= i < 2**32]
        return token_prefix(ids, salt)
    parts = [fields[name] for name in _PROMPTS if fields.get(name)]
    if parts:
        return text_prefix("".join(part if isinstance(part, str) else json.dumps(part) for part in parts), salt)
    return text_prefix(_raw_prompt(body), salt) if body else ()


def _raw_prompt(body: bytes) -> str:
    """A large body from where its prompt begins. Salts and model are unknown then; they stand before it or nowhere."""
    starts = [at for name in (b'"messages"', b'"prompt"', b'"input"') if (at := body.find(name)) >= 0]
    return body[min(starts, default=0) :][: 2**16].decode("utf-8", "replace")


def _sequences(fields: Mapping[str, Any]) -> int:
    n, prompt = fields.get("n"), fields.get("prompt")
    samples = n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 1
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return min(samples * prompts, _MOST)


def _text(value: object) -> str | None:
    return value[:256] if isinstance(value, str) and value else None
