"""The model that a terminal chat talks to: in this process, or on a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.errors import InvalidParameter, ModelError, OutriderError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import CompletionOutput

__all__ = ["AnswerChunk", "LocalModel", "NoTemplate", "Partner", "Prompt", "RemoteModel", "Summary"]

Prompt = str | Sequence[Mapping[str, str]]  # a text to continue, or a conversation
Speculation = bool | Mapping[str, Any]
_SILENCE_S = 600.0  # read timeout; servers send keep-alive comments far more often


class NoTemplate(OutriderError):
    """The model has no chat template, so it can only continue text."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of one answer."""

    method: str = "none"
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_s: float = 0.0
    by_position: list[float] = field(default_factory=list)
    off_reason: str | None = None


class AnswerChunk(NamedTuple):
    """New text, whether each of its tokens was drafted, in the last chunk the summary, and the reasoning before the text."""

    text: str
    guessed: Sequence[bool]
    summary: Summary | None = None
    reasoning: str = ""


class LocalModel:
    """A model in this process. `answer` streams chunks, and closing its iterator stops the answer."""

    stops_between_rounds = True  # an answer can only be stopped between two chunks

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm = llm
        self.name = name

    def answer(self, prompt: Prompt, params: Mapping[str, Any], speculation: Speculation) -> Iterator[AnswerChunk]:
        ids = prompt if isinstance(prompt, str) else self._templated(prompt)
        for chunk in self._llm.stream(ids, self._llm.default_params(**params), speculation=speculation):
            yield AnswerChunk(chunk.text, chunk.from_draft, _summary_of(chunk.output) if chunk.output else None)

    def _templated(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._llm.tokenizer is None:
            raise ModelError(f"{self.name} holds no tokenizer, so there is nothing to chat with")
        try:
            return self._llm.tokenizer.chat(messages)
        except InvalidParameter as error:
            raise _refusal(str(error)) from None


class RemoteModel:
    """A model that an Outrider server serves."""

    stops_between_rounds = False

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidParameter("--url", f"must begin with http:// or https://, got {url!r}")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        try:
            with self._ask("/v1/models") as response:
                self.name = str(json.load(response)["data"][0]["id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise OutriderError(f"{self._url}/v1/models names no model; start a server with `outrider serve`") from None

    def answer(self, prompt: Prompt, params: Mapping[str, Any], speculation: Speculation) -> Iterator[AnswerChunk]:
        path, name = ("/v1/completions", "prompt") if isinstance(prompt, str) else ("/v1/chat/completions", "messages")
        speculation_field = speculation if isinstance(speculation, Mapping) else {"enabled": speculation}
        body = {
            "model": self.name,
            name: prompt,
            "stream": True,
            "return_token_details": True,
            "speculation": speculation_field,
            **params,
        }
        tokens = 0
        with self._ask(path, body) as response:
            for event in _events(response):
                choice = (event.get("choices") or [{}])[0]
                delta = choice.get("delta", {})
                text, reasoning = choice.get("text") or delta.get("content") or "", delta.get("reasoning_content", "")
                guessed = [token["source"] != "target" for token in choice.get("token_details") or ()]
                tokens += len(guessed)
                summary = _summary_from(event["metrics"], tokens) if event.get("metrics") else None
                yield AnswerChunk(text, guessed, summary, reasoning)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            return urllib.request.urlopen(request, timeout=_SILENCE_S)
        except urllib.error.HTTPError as error:
            raise _http_error(error) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: an address that is none, a key with a line break
            reason = getattr(error, "reason", error)
            raise OutriderError(f"{self._url} does not answer ({reason}); start one with `outrider serve`") from None


Partner = LocalModel | RemoteModel


def _lines(response: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from response
    except (OSError, HTTPException) as error:
        raise OutriderError(f"the connection broke: {error}") from None


def _events(response: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, until [DONE]."""
    for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = _event(data)
        if "error" in event:
            raise OutriderError(event["error"]["message"])
        yield event
    raise OutriderError("the connection closed before the answer was complete")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise OutriderError("the server's stream is not in OpenAI's format; is --url that of `outrider serve`?")
    return event


def _http_error(error: urllib.error.HTTPError) -> OutriderError:
    with error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            message = f"the server answered {error.code} {error.reason}"
    if error.code == 401:
        message += "; pass --api-key, or set OUTRIDER_API_KEY"
    if wait := error.headers.get("Retry-After"):
        message += f"; try again in {wait} s"
    return _refusal(message)


def _refusal(message: str) -> OutriderError:
    return NoTemplate(message) if "no chat template" in message else OutriderError(message)


def _summary_of(output: CompletionOutput) -> Summary:
    stats = output.speculation
    rates = zip(stats["accepted_by_position"], stats["drafted_by_position"], strict=True)
    return Summary(
        method=stats["method"],
        tokens=len(output.token_ids),
        rounds=stats["rounds"],
        drafted=stats["drafted"],
        accepted=stats["accepted"],
        tokens_per_s=output.timings.decode_tokens_per_s,
        by_position=[accepted / drafted if drafted else 0.0 for accepted, drafted in rates],
        off_reason=stats["fallback_reason"],
    )


def _summary_from(metrics: Mapping[str, Any], tokens: int) -> Summary:
    stats, times = metrics.get("speculative_decoding") or {}, metrics.get("timings") or {}
    decoding_ms = times.get("total_ms", 0.0) - times.get("first_token_ms", 0.0)
    return Summary(
        method=stats.get("method") or "none",
        tokens=tokens,
        rounds=stats.get("rounds") or 0,
        drafted=stats.get("num_draft_tokens") or 0,
        accepted=stats.get("num_accepted_draft_tokens") or 0,
        tokens_per_s=(tokens - 1) / decoding_ms * 1000 if decoding_ms > 0 else 0.0,
        by_position=stats.get("acceptance_by_position") or [],
        off_reason=stats.get("off_reason"),
    )
