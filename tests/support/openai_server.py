"""A stand-in for an OpenAI-compatible server: streams words, several tokens a piece, and can fail on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, **faults: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        # refuse: every n-th request; cut: stop in the middle; usage: False leaves it out; together: wait for so many at once;
        # stall: answer nothing after so many requests
        self.faults = faults
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = 0
        self.busiest = 0
        self.ended = False
        self.lock = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": "stand-in", "object": "model"}]})

    def do_POST(self) -> None:
        stub = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.bodies.append(body)
            stub.keys.append(self.headers.get("Authorization"))
            number = len(stub.bodies)
            stub.busy += 1
            stub.busiest = max(stub.busiest, stub.busy)
            stub.lock.notify_all()
            if number > 1:  # the first warms up, alone
                stub.lock.wait_for(lambda: stub.busiest >= stub.faults.get("together", 0), timeout=10)
            if number > stub.faults.get("stall", number):
                stub.lock.wait_for(lambda: stub.ended, timeout=60)
                return
            if number > 1 and "together" in stub.faults:
                stub.lock.wait_for(lambda: stub.busiest > stub.faults["together"], timeout=0.1)  # any beyond would show here
        try:
            every = stub.faults.get("refuse")
            if every and number % every == 0:
                self._whole(503, {"error": {"message": "too busy", "type": "overloaded", "param": None, "code": None}})
            else:
                self._stream(body)
        finally:
            with stub.lock:
                stub.busy -= 1

    def _whole(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = body["max_tokens"]
        for start in range(0, tokens, 4):  # four tokens a piece
            text = "word " * min(4, tokens - start)
            choice = {"index": 0, "delta": {"content": text}} if "messages" in body else {"index": 0, "text": text}
            self._event({"choices": [choice]})
            if self.server.faults.get("cut"):
                self._chunk(b"")
                return
        if self.server.faults.get("usage", True):
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": tokens + 7}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def stand_in(**faults: Any) -> Iterator[StandIn]:
    server = StandIn(**faults)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        with server.lock:
            server.ended = True
            server.lock.notify_all()
        server.shutdown()
        thread.join()
        server.server_close()
