"""A server that speaks OpenAI's API, with or without fields added to every request."""

from __future__ import annotations

import json
from dataclasses import replace
from time import perf_counter

from outrider.bench.audit.records import Answer, AuditRequest, Drafting
from outrider.bench.audit.spelling import NEUTRAL, body_of, choices_of, counters_of, drafting_of
from outrider.bench.client import Client, Endpoint, find_model

__all__ = ["HttpSide"]

_REFUSALS = (400, 404, 405, 413, 422, 501)


class HttpSide:
    """One server. `endpoint.body` is added to every request; it is how one server has two sides."""

    parallel = True

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self._endpoint = endpoint
        self._client: Client | None = None
        self._neutral = dict(NEUTRAL)

    async def answer(self, request: AuditRequest) -> Answer:
        body = body_of(request, self._endpoint.chat)
        answer = await self._send(self._neutral | body)
        if answer.refused is not None and self._neutral:
            plainer = await self._send(body)
            if plainer.good:
                self._neutral = {}  # a server that takes OpenAI's fields alone
                return plainer
        return answer

    async def counters(self) -> Drafting | None:
        client = await self._connected()
        try:
            status, data = await client.get("/metrics")
        except client.errors:
            return None
        return counters_of(data.decode("utf-8", "replace")) if status == 200 else None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connected(self) -> Client:
        if self._client is None:
            if not self._endpoint.model:
                self._endpoint = replace(self._endpoint, model=await find_model(self._endpoint))
            self._client = Client(self._endpoint)
        return self._client

    async def _send(self, body: dict[str, object]) -> Answer:
        client = await self._connected()
        sent = {"model": self._endpoint.model} | body | self._endpoint.body
        begun = perf_counter()
        try:
            status, raw = await client.complete(sent)
        except client.errors as error:
            return Answer(failed=f"{type(error).__name__}: {error}".rstrip(": "))
        seconds = perf_counter() - begun
        if status != 200:
            reason = f"HTTP {status}: {client.message(raw)}"
            return Answer(refused=reason) if status in _REFUSALS else Answer(failed=reason)
        return _read(raw, seconds)


def _read(raw: bytes, seconds: float) -> Answer:
    """An answer from its JSON. What is not in OpenAI's shape has failed."""
    try:
        data = json.loads(raw)
        choices = choices_of(data)
        usage = data.get("usage") or {}
        counted = usage.get("completion_tokens")
        tokens = sum(len(choice.ids or choice.tokens or ()) for choice in choices) if counted is None else int(counted)
        if not choices:
            return Answer(failed="the answer has no choices")
        return Answer(choices, tokens, seconds, drafting_of(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Answer(failed=f"the answer is not in OpenAI's shape: {type(error).__name__}: {error}")
