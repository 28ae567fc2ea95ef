"""Load on a running OpenAI-compatible server: streamed requests at a rate or at a concurrency, and what came of each."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import ModuleType
from typing import Any

from outrider.errors import OutriderError

__all__ = ["Level", "ServedAnswer", "Target", "find_model", "http_client", "run_level"]


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to ask it."""

    url: str  # up to and without /v1
    model: str = ""
    chat: bool = False
    api_key: str | None = None
    timeout_s: float = 300.0
    body: dict[str, Any] = field(default_factory=dict)  # max_tokens, temperature, ...

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, slots=True)
class Level:
    """One load: Poisson arrivals at a rate per second, or a constant number of requests in flight."""

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} per s"


@dataclass(slots=True)
class ServedAnswer:
    """One request: when its pieces came, in seconds after it was sent, and how many tokens they held."""

    first_s: float = 0.0
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces
    prompt_tokens: int = 0
    tokens: int = 0
    counted: bool = False  # by the server; else pieces stand in for tokens
    failed: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per output token after the first."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


def http_client() -> ModuleType:
    """httpx, or how to get it."""
    try:
        import httpx
    except ImportError:
        raise OutriderError("bench serve needs httpx: pip install 'outrider[bench]'") from None
    return httpx


async def find_model(target: Target) -> str:
    """The first model the server names."""
    httpx = http_client()
    url = f"{target.url}/v1/models"
    try:
        async with httpx.AsyncClient(timeout=target.timeout_s, trust_env=False) as client:
            answer = await client.get(url, headers=target.headers)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise OutriderError(f"{url} names no model ({reason}); is a server running and ready there?") from None


async def run_level(
    target: Target, level: Level, prompts: Sequence[str], seed: int, done: Callable[[ServedAnswer], None]
) -> tuple[list[ServedAnswer], float]:
    """Every prompt once under this load; the answers in the order of the prompts, and the seconds it took."""
    httpx = http_client()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    slots = asyncio.Semaphore(level.concurrency or len(prompts))
    async with httpx.AsyncClient(timeout=target.timeout_s, limits=limits, trust_env=False) as client:

        async def one(prompt: str) -> ServedAnswer:
            async with slots:
                answer = await _ask(client, target, prompt)
            done(answer)
            return answer

        begun = perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            async for prompt in _arriving(prompts, level.rate, seed):
                tasks.append(group.create_task(one(prompt)))
        return [task.result() for task in tasks], perf_counter() - begun


async def _arriving(prompts: Sequence[str], rate: float | None, seed: int) -> AsyncIterator[str]:
    """Prompts at the times of a Poisson process, kept to however long the requests take; all at once without a rate."""
    rng, due = random.Random(seed), perf_counter()
    for prompt in prompts:
        if rate is not None:
            await asyncio.sleep(max(due - perf_counter(), 0.0))
            due += rng.expovariate(rate)
        yield prompt


async def _ask(client: Any, target: Target, prompt: str) -> ServedAnswer:
    httpx, answer = http_client(), ServedAnswer()
    path = "/v1/chat/completions" if target.chat else "/v1/completions"
    question = {"messages": [{"role": "user", "content": prompt}]} if target.chat else {"prompt": prompt}
    body = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}} | question | target.body
    begun = perf_counter()
    try:
        async with client.stream("POST", target.url + path, json=body, headers=target.headers) as response:
            if response.status_code != 200:
                answer.failed = f"HTTP {response.status_code}: {_message(await response.aread())}"
                return answer
            await _read(response, answer, begun)
    except httpx.HTTPError as error:
        answer.failed = f"{type(error).__name__}: {error}".rstrip(": ")
    except ValueError as error:
        answer.failed = f"an event is not JSON: {error}"
    return answer


async def _read(response: Any, answer: ServedAnswer, begun: float) -> None:
    """Follow the events of one answer to their end."""
    pieces, last, ended = 0, begun, False
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
        if any(_has_text(choice) for choice in event.get("choices") or []):
            if pieces:
                answer.gaps.append(now - last)
            else:
                answer.first_s = now - begun
            pieces, last = pieces + 1, now
    answer.total_s = last - begun
    if not answer.counted:
        answer.tokens = pieces
    if not ended:
        answer.failed = "the stream broke off"
    elif not pieces:
        answer.failed = "the answer is empty"


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def _message(raw: bytes | str) -> str:
    """The message of an error in the shape OpenAI gave it, or the beginning of whatever it is."""
    try:
        error = json.loads(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        return text[:200]
