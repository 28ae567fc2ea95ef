"""A proxy on the loopback in front of a real server. It remembers answers, and may change requests and answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Body = dict[str, Any]
Memory = dict[str, tuple[int, bytes]]  # a request -> status and body of its answer


def unchanged(body: Body, _request: Body | None = None) -> Body:
    return body


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, upstream: str, memory: Memory, change_request: Callable[..., Body], change_answer: Callable[..., Body]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.http = httpx.Client(base_url=upstream, timeout=120, trust_env=False)
        self.memory = memory
        self.change_request, self.change_answer = change_request, change_answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        answer = self.server.http.get(self.path)
        self._send(answer.status_code, answer.content)

    def do_POST(self) -> None:
        proxy = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sent = proxy.change_request(dict(body))
        key = self.path + json.dumps(sent, sort_keys=True)
        if key not in proxy.memory:
            answer = proxy.http.post(self.path, json=sent)
            proxy.memory[key] = (answer.status_code, answer.content)
        status, data = proxy.memory[key]
        if status == 200:
            data = json.dumps(proxy.change_answer(json.loads(data), body)).encode()
        self._send(status, data)

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def proxy(
    upstream: str,
    memory: Memory,
    change_request: Callable[..., Body] = unchanged,
    change_answer: Callable[..., Body] = unchanged,
) -> Iterator[Proxy]:
    server = Proxy(upstream, memory, change_request, change_answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        server.http.close()
