"""A client of OpenAI-compatible servers: streamed requests, alone or at a rate or a concurrency, and their measurements."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import ModuleType
from typing import Any

from outrider.errors import OutriderError

__all__ = ["Client", "Endpoint", "Level", "ServedAnswer", "find_model", "run_level"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and the fields of every request to it."""

    url: str  # up to and without /v1
    model: str = ""
    chat: bool = False
    api_key: str | None = None
    timeout_s: float = 300.0
    body: dict[str, Any] = field(default_factory=dict)  # max_tokens, temperature, ...

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def request_body(self, prompt: str) -> dict[str, Any]:
        """The body of a request."""
        prompt_fields = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return {"model": self.model} | prompt_fields | self.body


@dataclass(frozen=True, slots=True)
class Level:
    """One load: Poisson arrivals at a rate per second, or a constant number of requests in flight."""

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} per s"


@dataclass(slots=True)
class ServedAnswer:
    """One streamed request: its text, the times of its chunks in seconds since it was sent, and its number of tokens."""

    status: int = 0
    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks
    prompt_tokens: int = 0
    tokens: int = 0
    counted: bool = False  # by the server; otherwise every chunk counts as a token
    failed: str | None = None
    cancelled: bool = False  # left before its end, as planned

    @property
    def per_token_s(self) -> float | None:
        """Seconds per output token after the first."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class Client:
    """Connections to one server, from this address of the machine where that matters."""

    def __init__(self, endpoint: Endpoint, address: str | None = None) -> None:
        self.endpoint = endpoint
        self._httpx = httpx = _httpx()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx.AsyncHTTPTransport(local_address=address, limits=limits, trust_env=False)
        self._http = httpx.AsyncClient(transport=transport, timeout=endpoint.timeout_s, headers=endpoint.headers, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        answer = await self._http.get(self.endpoint.url + path)
        return answer.status_code, answer.content

    async def post(self, path: str, body: bytes) -> int:
        """Send a body and return the status of the answer."""
        answer = await self._http.post(self.endpoint.url + path, content=body, headers={"Content-Type": "application/json"})
        return int(answer.status_code)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What a request raises where there is no answer."""
        return (self._httpx.HTTPError, self._httpx.InvalidURL)

    async def complete(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of a completion that is not streamed."""
        answer = await self._http.post(self.endpoint.url + self.endpoint.path, json=dict(body))
        return answer.status_code, answer.content

    @staticmethod
    def message(raw: bytes) -> str:
        """The message of an error's body."""
        return _message(raw)

    async def stream(self, body: Mapping[str, Any], leave_after: int | None = None) -> ServedAnswer:
        """A streamed completion, read to its end, or left after `leave_after` chunks."""
        answer, url = ServedAnswer(), self.endpoint.url + self.endpoint.path
        sent = {"stream": True, "stream_options": {"include_usage": True}} | dict(body)
        begun = perf_counter()
        try:
            async with self._http.stream("POST", url, json=sent) as response:
                answer.status = response.status_code
                if response.status_code != 200:
                    answer.failed = f"HTTP {response.status_code}: {_message(await response.aread())}"
                    answer.total_s = perf_counter() - begun
                else:
                    await _read(response, answer, begun, leave_after)
        except self._httpx.HTTPError as error:
            answer.failed = f"{type(error).__name__}: {error}".rstrip(": ")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            answer.failed = f"an event is not in OpenAI's shape: {type(error).__name__}: {error}"
        return answer


def _httpx() -> ModuleType:
    """The module httpx, or an error with how to install it."""
    try:
        import httpx
    except ImportError:
        raise OutriderError("bench serve needs httpx: pip install 'outrider[bench]'") from None
    return httpx


async def find_model(endpoint: Endpoint) -> str:
    """The first model the server names."""
    httpx = _httpx()
    try:
        async with Client(endpoint) as client:
            status, data = await client.get("/v1/models")
        if status != 200:
            raise ValueError(f"HTTP {status}")
        return str(json.loads(data)["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise OutriderError(f"{endpoint.url}/v1/models names no model ({reason}); is a server running and ready there?") from None


async def run_level(
    endpoint: Endpoint, level: Level, prompts: Sequence[str], seed: int, done: Callable[[ServedAnswer], None]
) -> tuple[list[ServedAnswer], float]:
    """Every prompt once under this load; the answers in the order of the prompts, and the seconds it took."""
    slots = asyncio.Semaphore(level.concurrency or len(prompts))
    async with Client(endpoint) as client:

        async def one(prompt: str) -> ServedAnswer:
            async with slots:
                answer = await client.stream(endpoint.request_body(prompt))
            done(answer)
            return answer

        begun = perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            async for prompt in _arriving(prompts, level.rate, seed):
                tasks.append(group.create_task(one(prompt)))
        return [task.result() for task in tasks], perf_counter() - begun


async def _arriving(prompts: Sequence[str], rate: float | None, seed: int) -> AsyncIterator[str]:
    """Prompts at the times of a Poisson process, which do not depend on the requests; all at once without a rate."""
    rng, due = random.Random(seed), perf_counter()
    for prompt in prompts:
        if rate is not None:
            await asyncio.sleep(max(due - perf_counter(), 0.0))
            due += rng.expovariate(rate)
        yield prompt


async def _read(response: Any, answer: ServedAnswer, begun: float, leave_after: int | None) -> None:
    """Read the events of one answer to its end, or leave it, which closes its connection."""
    chunks, last, ended = 0, begun, False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            ended = True
            break
        event, now = json.loads(data), perf_counter()
        if "error" in event:
            answer.failed = _message(data)
            return
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.tokens, answer.counted = usage["prompt_tokens"], usage["completion_tokens"], True
        texts = [_text(choice) for choice in event.get("choices") or []]
        answer.text += "".join(texts)
        if any(texts):
            if chunks:
                answer.gaps.append(now - last)
            else:
                answer.first_s = now - begun
            chunks, last = chunks + 1, now
        if leave_after is not None and chunks >= leave_after:
            answer.cancelled = True
            return
    answer.total_s = last - begun
    if not answer.counted:
        answer.tokens = chunks
    if not ended:
        answer.failed = "the stream broke off"
    elif not chunks:
        answer.failed = "the answer is empty"


def _text(choice: dict[str, Any]) -> str:
    """The text that a chunk adds, from whichever field has it."""
    delta = choice.get("delta") or {}
    named = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return named or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else "")


def _message(raw: bytes | str) -> str:
    """The message of an error in the shape OpenAI gave it, or the beginning of whatever it is."""
    try:
        error = json.loads(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        return text[:200]
