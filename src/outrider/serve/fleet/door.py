"""The front door: an ASGI app that passes requests on to replicas and their answers back, as they are written.

A request whose replica is lost before the first byte of its answer goes to another one. Keys, hosts and bodies are checked by
the replicas; the front door bounds what it holds in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Message, Receive, Scope, Send

from outrider.serve.connection import ABORT
from outrider.serve.errors import ApiError, body_of
from outrider.serve.exchange import SAFE_HEADERS, Exchange
from outrider.serve.fairness import Places, client_of
from outrider.serve.fleet.keys import routed
from outrider.serve.fleet.totals import Counts, merged_metrics, merged_stats
from outrider.serve.fleet.upstream import HOP_BY_HOP, Call, NoReplica, ReplicaLost, Reply, WholeReply
from outrider.serve.guard import OPEN_PATHS
from outrider.serve.logs import request_id
from outrider.serve.settings import ServerSettings
from outrider.serve.streaming import ClientGone, unless_gone

__all__ = ["CutOff", "Fleet", "FrontDoor"]

_log = logging.getLogger("outrider.serve")
_ATTEMPTS = 4  # replicas that are tried for one request
_RETRY_S = "1"  # Retry-After where the replica was lost: another one, or its successor, is ready by then
_OWN = frozenset((b"x-request-id", b"x-forwarded-for", b"x-forwarded-proto", b"forwarded", b"content-length", *HOP_BY_HOP))
_FROM_EXCHANGE = frozenset((b"x-request-id", b"date", *(name for name, _ in SAFE_HEADERS), *HOP_BY_HOP))
_ALL = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/forget", "/remember")  # what every replica must do


class Fleet(Protocol):
    """Replicas that a front door passes requests on to."""

    @property
    def settings(self) -> ServerSettings: ...
    def begin(self) -> None: ...
    async def end(self) -> None: ...

    def state(self) -> dict[str, Any]:
        """`status` as a single server has it, `same_tokens`, and `replicas` by name."""
        ...

    async def send(self, call: Call) -> Reply:
        """Pass a request on to the replica that is best for it. Raises ReplicaLost or NoReplica."""
        ...

    async def each(self, call: Call) -> dict[str, WholeReply]:
        """The answers of all replicas that can answer now."""
        ...


class CutOff(Exception):
    """Ends a connection in the middle of an answer, where the server has no other way."""


class _Routes:
    """The requests that reach the front door, inside `Exchange`."""

    def __init__(self, fleet: Fleet, counts: Counts) -> None:
        self._fleet = fleet
        self._counts = counts
        self._bodies = Places(fleet.settings.limits.bodies_bytes)
        self._own: dict[str, Callable[[Call], Awaitable[Reply]]] = {
            "/metrics": self._metrics,
            "/stats": self._stats,
            "/replicas": self._replicas,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._fleet.begin()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._fleet.end()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every answer, errors included."""
        started = False

        async def forward(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        error: ApiError | None = None
        try:
            await self._handle(scope, receive, forward)
        except ClientGone:
            pass
        except CutOff:
            raise
        except ApiError as refusal:
            error = refusal
        except asyncio.CancelledError:  # the server is shutting down
            error = ApiError(503, "the server has stopped", code="stopped")
        except Exception:
            _log.exception("the request failed")
            error = ApiError(500, "something failed inside the server; its log says what")
        if error is not None and not started:
            await error.response(scope["path"])(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in OPEN_PATHS:
            await _send_whole(send, self._health(path))
            return
        client = client_of(scope)
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if not self._bodies.take(client, size):
                raise ApiError(429, "too many bytes of bodies are under way; try again later", headers={"Retry-After": "1"})
            held += size

        try:
            body = await _read(scope, receive, self._fleet.settings, hold)
            call = _call(scope, body)
            handler = self._own.get(path)
            if handler is not None:
                await _send_whole(send, await unless_gone(receive, handler(call)))
            elif path in _ALL and call.method == "POST":
                await _send_whole(send, await unless_gone(receive, self._everywhere(call)))
            else:
                await unless_gone(receive, self._relay(scope, call, send))
        finally:
            self._bodies.release(client, held)

    async def _relay(self, scope: Scope, call: Call, send: Send) -> None:
        """Pass an answer on. Its head waits for the first bytes, so that another replica may still answer."""
        reply, chunk = await self._begun(call)
        try:
            await send({"type": "http.response.start", "status": reply.status, "headers": _shown(reply)})
            while chunk:
                await self._write(send, chunk)
                chunk = await anext(reply.chunks, b"")
            await send({"type": "http.response.body", "body": b""})
        except ReplicaLost:
            self._counts.lost.inc()
            if dict(reply.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                await send({"type": "http.response.body", "body": _last_event(call.path)})
            else:
                _cut_off(scope)  # such an answer must not look complete
        except (TimeoutError, OSError):
            _cut_off(scope)
        finally:
            reply.close()

    async def _write(self, send: Send, chunk: bytes) -> None:
        async with asyncio.timeout(self._fleet.settings.limits.write_s):  # this waits while the client's buffer is full
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _begun(self, call: Call) -> tuple[Reply, bytes]:
        """An answer with its first bytes, from the first replica that gives one."""
        refused: tuple[Reply, bytes] | None = None
        for attempt in range(_ATTEMPTS):
            try:
                reply = await self._fleet.send(call)
            except ReplicaLost:
                self._counts.retried.inc()
                continue
            except NoReplica:
                break
            try:
                first = await anext(reply.chunks, b"")
            except ReplicaLost:
                reply.close()
                self._counts.retried.inc()
                continue
            except BaseException:
                reply.close()
                raise
            if reply.status != 503 or attempt == _ATTEMPTS - 1:
                return reply, first
            refused = reply, first  # it is stopping, or its engine has died
            reply.close()
            self._counts.retried.inc()
        if refused is not None and dict(refused[0].headers).get(b"content-length") == str(len(refused[1])).encode():
            return refused[0], refused[1]
        raise self._unavailable()

    def _unavailable(self) -> ApiError:
        status = self._fleet.state()["status"]
        if status == "ok":
            return ApiError(
                503, "the replica was lost; send the request again", code="replica_lost", headers={"Retry-After": _RETRY_S}
            )
        headers = {} if status == "dead" else {"Retry-After": "5"}
        return ApiError(503, f"the server is {status}", code=status, headers=headers)

    def _health(self, path: str) -> Reply:
        state = self._fleet.state()
        status, replicas = state["status"], state["replicas"]
        ready = sum(replica["status"] == "ok" for replica in replicas.values())
        content = {"status": status, "replicas": ready, "same_tokens": state["same_tokens"]}
        fails = status == "dead" if path == "/livez" else status != "ok"
        return _json(content, 503 if fails else 200)

    async def _each(self, call: Call) -> dict[str, WholeReply]:
        answers = await self._fleet.each(call)
        if not answers:
            raise self._unavailable()
        return answers

    async def _everywhere(self, call: Call) -> Reply:
        """What every replica must do. The first refusal is the answer, else the first answer."""
        answers = list((await self._each(call)).values())
        return _whole(*next((answer for answer in answers if answer.status != 200), answers[0]))

    async def _merged(self, call: Call, merge: Callable[[dict[str, bytes]], Reply]) -> Reply:
        answers = await self._each(call)
        for answer in answers.values():
            if answer.status != 200:
                return _whole(*answer)
        return merge({name: answer.body for name, answer in answers.items()})

    async def _metrics(self, call: Call) -> Reply:
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        return await self._merged(call, lambda texts: _whole(200, headers, merged_metrics(texts) + self._counts.written()))

    async def _stats(self, call: Call) -> Reply:
        return await self._merged(
            call, lambda texts: _json(merged_stats({name: json.loads(text) for name, text in texts.items()}))
        )

    async def _replicas(self, call: Call) -> Reply:
        """The state of the fleet, with the fingerprint of every replica."""
        models = Call("GET", "/v1/models", call.headers)

        def merge(texts: dict[str, bytes]) -> Reply:
            state = self._fleet.state()
            for name, text in texts.items():
                if name in state["replicas"]:
                    state["replicas"][name]["fingerprint"] = json.loads(text)["data"][0]["fingerprint"]
            return _json(state)

        return await self._merged(models, merge)


class FrontDoor:
    """The whole app: the routes inside the HTTP rules that a single server has."""

    def __init__(self, fleet: Fleet) -> None:
        counts = Counts()
        routes = _Routes(fleet, counts)
        paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/metrics", "/stats", *OPEN_PATHS]
        self.state = SimpleNamespace(service=fleet, keys=None)  # as `Server` reads it
        self._app = Exchange(routes, settings=fleet.settings, metrics=counts, paths=paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _read(scope: Scope, receive: Receive, settings: ServerSettings, hold: Callable[[int], None]) -> bytes:
    """The body, within the limits of size and time."""
    limits, chunks, size = settings.limits, list[bytes](), 0
    length = dict(scope["headers"]).get(b"content-length", b"0")
    close = {"Connection": "close"}
    if length.isdigit() and int(length) > limits.body_bytes:
        raise ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large", headers=close)
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limits.body_bytes:
                    reason = f"the body is larger than {limits.body_bytes} bytes"
                    raise ApiError(413, reason, code="body_too_large", headers=close)
                hold(len(chunk))
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_s:g} seconds", headers=close) from None


def _call(scope: Scope, body: bytes) -> Call:
    query = scope.get("query_string", b"")
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    target = raw.partition(b"?")[0] + (b"?" + query if query else b"")
    added = [(b"x-request-id", request_id.get().encode()), (b"x-forwarded-for", (scope.get("client") or ("",))[0].encode())]
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _OWN]
    keys, sequences = routed(scope["path"], dict(headers), body)
    return Call(scope["method"], target.decode("latin-1"), [*headers, *added], body, keys, sequences)


def _shown(reply: Reply) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in reply.headers if name not in _FROM_EXCHANGE]


def _json(content: Any, status: int = 200) -> Reply:
    return _whole(status, [(b"content-type", b"application/json")], json.dumps(content).encode())


def _whole(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Reply:
    async def chunks() -> Any:
        yield body

    named = [(name, value) for name, value in headers if name != b"content-length"]
    return Reply(status, [*named, (b"content-length", str(len(body)).encode())], chunks(), lambda: None)


async def _send_whole(send: Send, reply: Reply) -> None:
    await send({"type": "http.response.start", "status": reply.status, "headers": _shown(reply)})
    await send({"type": "http.response.body", "body": (await reply.whole()).body})


def _cut_off(scope: Scope) -> None:
    if ABORT not in scope:
        raise CutOff
    scope[ABORT]()


def _last_event(path: str) -> bytes:
    """The last events of a stream whose replica was lost."""
    error = ApiError(503, "the replica was lost in the middle of the answer; send the request again", code="replica_lost")
    data = json.dumps(body_of(error, path))
    if path.startswith("/v1/messages"):
        return f"event: error\ndata: {data}\n\n".encode()
    return f"data: {data}\n\ndata: [DONE]\n\n".encode()
