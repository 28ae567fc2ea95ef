"""The front door, before replicas that fail in every way: what is retried, what is answered, what is merged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import pytest

from outrider.serve.fleet.door import CutOff, FrontDoor
from outrider.serve.fleet.totals import merged_metrics, merged_stats
from outrider.serve.fleet.upstream import Call, NoReplica, ReplicaLost, Reply, WholeReply
from outrider.serve.settings import Limits, ServerSettings

EVENTS = [(b"content-type", b"text/event-stream")]


def reply(*chunks: bytes | Exception, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> Reply:
    """An answer of these pieces. An exception among them is raised there."""
    closed: list[bool] = []

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    return Reply(status, list(headers), body(), lambda: closed.append(True))


class Scripted:
    """A fleet whose replicas do as they are told, one call after the other."""

    def __init__(
        self, *script: Reply | Exception, limits: Limits | None = None, everywhere: dict[str, WholeReply] | None = None
    ) -> None:
        self.settings = ServerSettings(limits=limits or Limits())
        self.calls: list[Call] = []
        self.status = "ok"
        self._script: Iterator[Reply | Exception] = iter(script)
        self._everywhere = everywhere or {}

    def begin(self) -> None: ...
    async def end(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"status": self.status, "same_tokens": True, "replicas": {"0": {"status": self.status}}}

    async def send(self, call: Call) -> Reply:
        self.calls.append(call)
        step = next(self._script)
        if isinstance(step, Exception):
            raise step
        return step

    async def each(self, call: Call) -> dict[str, WholeReply]:
        self.calls.append(call)
        return self._everywhere


def ask(fleet: Scripted, method: str = "POST", path: str = "/v1/completions", **request: Any) -> httpx.Response:
    """The answer of a front door before this fleet."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(FrontDoor(fleet), client=("10.0.0.9", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


def test_a_request_is_passed_on_with_who_sent_it_and_its_answer_with_its_headers() -> None:
    fleet = Scripted(reply(b"a", b"b", headers=[(b"x-own", b"1"), (b"x-request-id", b"theirs"), (b"date", b"now")]))
    headers = {"authorization": "Bearer k", "x-forwarded-for": "1.2.3.4", "x-request-id": "mine", "connection": "keep-alive"}
    answer = ask(fleet, json={"prompt": "p", "n": 3}, headers=headers)
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (200, b"ab", "1")
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert "date" not in answer.headers
    call = fleet.calls[0]
    sent = dict(call.headers)
    assert (call.method, call.target, json.loads(call.body)["prompt"], call.sequences) == ("POST", "/v1/completions", "p", 3)
    assert (sent[b"x-forwarded-for"], sent[b"x-request-id"], sent[b"authorization"]) == (b"10.0.0.9", b"mine", b"Bearer k")
    assert b"connection" not in sent
    assert call.keys.tenant is not None
    assert len(call.keys.prefix) == 1


@pytest.mark.parametrize(
    "lost", [ReplicaLost(), reply(ReplicaLost()), reply(b"{}", status=503)], ids=["unreachable", "ended", "503"]
)
def test_a_replica_that_is_lost_before_the_first_byte_is_replaced(lost: Reply | Exception) -> None:
    fleet = Scripted(lost, reply(b"good"))
    assert ask(fleet, json={}).content == b"good"
    assert len(fleet.calls) == 2


def test_where_no_replica_answers_the_client_hears_when_to_try_again() -> None:
    for script in ([NoReplica()], [ReplicaLost()] * 4):
        answer = ask(Scripted(*script), json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "replica_lost"
    loading = Scripted(NoReplica())
    loading.status = "loading"
    answer = ask(loading, json={})
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "5", "loading")


def test_the_last_refusal_is_passed_on_as_it_is() -> None:
    body = b'{"error":1}'
    refusal = {"status": 503, "headers": [(b"retry-after", b"7"), (b"content-length", str(len(body)).encode())]}
    answer = ask(Scripted(*(reply(body, **refusal) for _ in range(4))), json={})  # type: ignore[arg-type]
    assert (answer.status_code, answer.headers["retry-after"], answer.content) == (503, "7", body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_stream_that_is_cut_off_says_so(path: str) -> None:
    fleet = Scripted(reply(b"data: 1\n\n", ReplicaLost(), headers=EVENTS))
    events = ask(fleet, path=path, json={}).text
    assert events.startswith("data: 1\n\n")
    assert "the replica was lost" in events
    assert "event: error\n" in events if path == "/v1/messages" else events.endswith("data: [DONE]\n\n")
    assert len(fleet.calls) == 1, "what was begun is not begun again"


def test_an_answer_that_is_cut_off_does_not_look_complete() -> None:
    with pytest.raises(CutOff):
        ask(Scripted(reply(b'{"a":', ReplicaLost())), json={})


def test_a_client_that_leaves_ends_its_answer() -> None:
    closed, begun = [], asyncio.Event()

    async def run() -> None:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x"
                begun.set()
                await asyncio.sleep(0.001)

        fleet = Scripted(Reply(200, [], endless(), lambda: closed.append(True)))
        messages = iter([{"type": "http.request", "body": b"{}"}])

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            if message is None:
                await begun.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None: ...

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": ("10.0.0.9", 5)}
        async with asyncio.timeout(20):
            await FrontDoor(fleet)(scope, receive, send)

    asyncio.run(run())
    assert closed == [True]


def test_bodies_above_the_limit_are_refused_before_any_replica_sees_them() -> None:
    fleet = Scripted(limits=Limits(body_bytes=10))
    assert ask(fleet, content=b"x" * 11).status_code == 413
    assert ask(Scripted(limits=Limits(bodies_bytes=10)), content=b"x" * 11).status_code == 429
    assert not fleet.calls


def test_the_room_of_a_body_is_given_back_when_its_request_ends() -> None:
    fleet = Scripted(reply(b"a"), reply(b"b"), limits=Limits(bodies_bytes=10))

    async def run() -> list[int]:
        transport = httpx.ASGITransport(FrontDoor(fleet), client=("10.0.0.9", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return [(await client.post("/v1/completions", content=b"x" * size)).status_code for size in (8, 30, 8)]

    assert asyncio.run(run()) == [200, 429, 200]


def test_health_needs_no_replica() -> None:
    fleet = Scripted()
    assert ask(fleet, "GET", "/health").json() == {"status": "ok", "replicas": 1, "same_tokens": True}
    fleet.status = "loading"
    assert ask(fleet, "GET", "/health").status_code == 503
    assert ask(fleet, "GET", "/livez").status_code == 200
    fleet.status = "dead"
    assert ask(fleet, "GET", "/livez").status_code == 503


def test_what_every_replica_must_do_fails_where_one_does() -> None:
    good, bad = WholeReply(200, [], b"done"), WholeReply(404, [], b"no such adapter")
    assert ask(Scripted(everywhere={"0": good, "1": good}), path="/forget", json={}).content == b"done"
    answer = ask(Scripted(everywhere={"0": good, "1": bad}), path="/v1/load_lora_adapter", json={})
    assert (answer.status_code, answer.content) == (404, b"no such adapter")
    assert ask(Scripted(), path="/forget", json={}).status_code == 503


def test_the_fleet_shows_every_fingerprint() -> None:
    models = WholeReply(200, [], json.dumps({"data": [{"fingerprint": {"digest": "abc"}}]}).encode())
    fleet = Scripted(everywhere={"0": models})
    assert ask(fleet, "GET", "/replicas").json()["replicas"]["0"] == {"status": "ok", "fingerprint": {"digest": "abc"}}
    assert fleet.calls[0].target == "/v1/models"
    refused = WholeReply(401, [(b"www-authenticate", b"Bearer")], b"{}")
    assert ask(Scripted(everywhere={"0": refused}), "GET", "/replicas").status_code == 401


def test_metrics_have_one_description_and_a_label_for_each_replica() -> None:
    text = b'# HELP a_total A.\n# TYPE a_total counter\na_total{model="m"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2\n'
    lines = merged_metrics({"0": text, "1": text}).decode().splitlines()
    assert lines == [
        "# HELP a_total A.", "# TYPE a_total counter", 'a_total{replica="0",model="m"} 1.0', 'a_total{replica="1",model="m"} 1.0',
        "# HELP b B.", "# TYPE b gauge", 'b{replica="0"} 2', 'b{replica="1"} 2',
    ]  # fmt: skip
    answer = ask(Scripted(everywhere={"0": WholeReply(200, [], text)}), "GET", "/metrics")
    assert 'a_total{replica="0",model="m"} 1.0' in answer.text
    assert "outrider:door_retried_total 0.0" in answer.text


def test_statistics_are_sums_and_means() -> None:
    one = {
        "running": 1, "waiting": 2, "preemptions": 0, "generated_tokens": 5, "tokens_per_s": 1.5, "kv_usage": 0.5,
        "prefix_hit_rate": 1.0, "tokens_per_round": 2.0, "off_reasons": {"x": 1}, "finished": {"stop": 2},
        "by_method": {"ngram": {"drafted": 2, "accepted": 1}}, "model": "m",
    }  # fmt: skip
    merged = merged_stats({"0": one, "1": one | {"running": 3, "kv_usage": 0.0}})
    assert (merged["running"], merged["waiting"], merged["kv_usage"], merged["finished"]) == (4, 4, 0.25, {"stop": 4})
    assert merged["by_method"] == {"ngram": {"drafted": 4, "accepted": 2}}
    assert merged["replicas"]["1"]["running"] == 3
