"""HTTP: methods, versions, headers, CORS, and answers that are sent before the body was read."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM
from outrider.errors import InvalidParameter
from outrider.serve.settings import Limits, ServerSettings
from tests.support.examples import examples
from tests.support.server import Running, request_bytes

Starter = Callable[..., Running]
PAGE = "https://app.example"
GET = b"GET %b HTTP/%b\r\nHost: localhost\r\n%b\r\n"


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    out = b""
    try:
        while data := connection.recv(65536):
            out += data
    except ConnectionResetError:
        pass
    return out


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}, body


def test_head_is_get_without_the_body(server: Running) -> None:
    for path in ("/health", "/version", "/v1/models", "/metrics", "/stats", "/openapi.json", "/", "/page/app.js"):
        get, head = server.http.get(path), server.http.head(path)
        assert head.status_code == get.status_code == 200, path
        assert head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
    assert int(server.http.head("/version").headers["content-length"]) == len(server.http.get("/version").content)
    assert server.http.head("/nowhere").status_code == 404
    assert server.http.head("/v1/completions").status_code == 405


def test_http_1_0_streams_end_with_the_connection(server: Running) -> None:
    body = {"prompt": "x = ", "max_tokens": 4, "temperature": 0, "stream": True}
    raw = server.raw(request_bytes("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    status, headers, data = split(read_all(raw))
    assert status == 200
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    assert data.startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")
    whole = request_bytes("/v1/completions", body | {"stream": False}).replace(b"HTTP/1.1", b"HTTP/1.0")
    status, headers, data = split(read_all(server.raw(whole)))
    assert int(headers["content-length"]) == len(data)
    assert json.loads(data)["choices"]


def test_no_page_may_frame_the_server(server: Running) -> None:
    for path in ("/", "/v1/models", "/nowhere"):
        headers = server.http.get(path).headers
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_unknown_routes_get_404_with_the_list_of_routes(server: Running) -> None:
    answer = server.http.post("/v1/completion", json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert "did you mean /v1/completions?" in message
    for path in ("POST /v1/chat/completions", "GET /health", "GET /metrics", "POST /tokenize", "GET /v1/models/{name}"):
        assert path in message
    assert "HEAD" not in message
    assert server.http.get("/" + "x" * 5000).status_code == 404
    wrong = server.http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "/v1/chat/completions takes POST, not GET"
    assert server.http.delete("/health").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("endless", [False, True], ids=["a length", "chunks"])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", "", 401),
        ("/v1/completions", "Authorization: Bearer key\r\nOrigin: http://evil.example\r\n", 403),
        ("/v1/completions", "Authorization: Bearer key\r\nContent-Type: text/plain\r\n", 415),
        ("/v1/completions", "Authorization: Bearer key\r\nContent-Type: application/json\r\n", 413),
        ("/nowhere", "Authorization: Bearer key\r\n", 404),
        ("/health", "", 405),
    ],
    ids=str,
)
def test_a_refused_body_is_not_read(server_with: Starter, path: str, headers: str, status: int, endless: bool) -> None:
    server = server_with(api_key=("key",), limits=Limits(body_bytes=100_000))
    length = "Transfer-Encoding: chunked" if endless else "Content-Length: 400000000"
    raw = server.raw(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{length}\r\n\r\n".encode())
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n" if endless else b" " * 65536
    try:
        for _ in range(400):  # more than the buffers hold, so that it cannot all be sent if the server does not read
            raw.sendall(chunk)
        everything_was_read = True
    except OSError:
        everything_was_read = False
    assert not everything_was_read
    answered, fields, _ = split(read_all(raw))
    assert answered == status
    assert fields["connection"] == "close"


def test_a_small_refused_body_keeps_the_connection(server_with: Starter) -> None:
    server = server_with(api_key=("key",))
    raw = server.raw(request_bytes("/v1/completions", {"prompt": "x" * 100_000}))
    raw.sendall(GET % (b"/health", b"1.1", b"Connection: close\r\n"))
    answers = read_all(raw)
    assert answers.startswith(b"HTTP/1.1 401 ")
    assert b"HTTP/1.1 200 " in answers


def test_allowed_origins_may_send_requests(server_with: Starter) -> None:
    server = server_with(api_key=("key",), allow_origin=(PAGE, "http://localhost:3000"))
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    before = server.http.options("/v1/chat/completions", headers=asks | {"Authorization": ""})
    assert before.status_code == 200, "browsers ask first, without the key"
    assert before.headers["access-control-allow-origin"] == PAGE
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    assert before.headers["x-request-id"].isalnum(), "as every answer has it"
    assert before.headers["x-frame-options"] == "DENY"
    answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    refused = server.http.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE, "pages may read why"
    foreign = server.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    asks["Origin"] = "https://evil.example"
    assert "access-control-allow-origin" not in server.http.options("/v1/models", headers=asks).headers


def test_all_origins_may_be_allowed_and_none_is_by_default(server_with: Starter) -> None:
    everyone = server_with(allow_origin=("*",)).http.get("/version", headers={"Origin": "https://any.example"})
    assert everyone.status_code == 200
    assert everyone.headers["access-control-allow-origin"] == "*"
    refused = server_with().http.get("/version", headers={"Origin": "https://any.example"})
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", "", "null", "https://u@h"])
def test_an_invalid_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(InvalidParameter, match="--allow-origin"):
        ServerSettings(allow_origin=(origin,))


NAMES = [
    "Host", "Origin", "Authorization", "Content-Type", "Content-Length", "Content-Encoding", "Transfer-Encoding", "Expect",
    "Connection", "Upgrade", "X-Request-Id", "Accept", "Cookie", "Range", "Access-Control-Request-Method", "traceparent",
]  # fmt: skip
VALUES = st.sampled_from(
    [
        "http://[", "http://[::1", "http://]", "//", "[", "[::1", "]:80", "::1", "http://a:b:c", "http://\u00e9", "null", "*",
        "Basic", "Basic ====", "Basic \u00ff", "Bearer", "Bearer  ", "basic Og==", "application/json;;=", "-1", "+5", "0x10",
        'application/json; charset="', "application/json; x*=utf-8''%zz", "5, 5", "99999999999999999999", "\u00b2", "chunked",
        "chunked, gzip", "100-continue", "websocket", "Upgrade", "h2c", "gzip", "bytes=0-", "POST", "\t", "a" * 3000,
    ]
) | st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=20)  # fmt: skip


@examples(300)
@given(
    method=st.sampled_from(["GET", "POST", "OPTIONS", "HEAD", "PUT"]),
    path=st.sampled_from(["/version", "/v1/completions", "/health", "/nowhere", "/v1/models/%ff", "//", "/%", "*"]),
    headers=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4),
    key=st.booleans(),
)
def test_no_header_makes_a_500(fuzzed: Running, method: str, path: str, headers: list[tuple[str, str]], key: bool) -> None:
    lines = [f"{method} {path} HTTP/1.1", *(["Authorization: Bearer key"] if key else []), *(f"{n}: {v}" for n, v in headers)]
    lines += ["" if any(name == "Host" for name, _ in headers) else "Host: localhost", "Connection: close"]
    data = "\r\n".join(line for line in lines if line).encode("latin-1") + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fuzzed.port), timeout=30) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        answer = read_all(raw)
    if answer:  # there is no answer if the body never arrives
        status, fields, _ = split(answer)
        assert status < 500, (data, answer)
        assert fields.get("x-request-id"), (data, answer)


@pytest.fixture
def fuzzed(server_with: Starter) -> Running:
    return server_with(api_key=("key",))


def test_an_invalid_origin_header_is_refused(server: Running) -> None:
    assert server.http.get("/version", headers={"Origin": "http://["}).status_code == 403


def test_text_that_cannot_be_encoded_is_refused(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    every = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0x110000))))
    for path, more in (("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})):
        answer = server.post(path, messages=[{"role": "user", "content": every}], **more)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["param"] == "messages"
    assert llm.tokenizer is not None

    def broken(*_: Any, **__: Any) -> Any:
        raise Exception("no token spells it")

    monkeypatch.setattr(llm.tokenizer, "_hf", broken)
    for path in ("/v1/completions", "/tokenize"):
        answer = server.post(path, prompt="x")
        assert answer.status_code == 400, path
        assert "no token spells it" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x = 1\n" * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 400_000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x = 1\n" * 3000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x = 1\n" * 3000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x = 1\n" * 100_000}]}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_long_prompts_get_openai_s_error_code(server: Running, path: str, body: Any, param: str) -> None:
    answer = server.post(path, **body, max_tokens=1)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "context_length_exceeded", param)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_too_large_max_tokens_gets_the_same_error_code(server: Running, field: str) -> None:
    chat = field == "max_completion_tokens"
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    answer = server.post("/v1/chat/completions" if chat else "/v1/completions", **prompt, **{field: 5000})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)


def test_every_answer_carries_a_request_id(server: Running) -> None:
    for raw in (
        b"NONSENSE\r\n\r\n",
        GET % (b"/nowhere", b"1.1", b"Connection: close\r\n"),
        b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000,
    ):
        status, headers, body = split(read_all(server.raw(raw)))
        assert status in (400, 404, 431)
        assert headers["x-request-id"].isalnum()
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
