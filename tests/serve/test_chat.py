"""`outrider chat` with a real server and with a model in the process, through pipes and in a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outrider.errors import InvalidParameter, OutriderError
from outrider.serve.chat import Chat
from outrider.serve.chat_partner import RemoteModel
from outrider.serve.chat_terminal import piped_message, printable
from tests.support.server import Running, until

PROMPT = r">\x08\x1b\[2C"  # as prompt_toolkit draws it
PARAMS = {"temperature": 0.6, "max_tokens": 16, "seed": 5}
Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def talk(server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Feeds lines to a chat with the server. Returns its standard output and standard error."""

    def run(*lines: str, as_text: bool = True) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        Chat(RemoteModel(server.url, None), dict(PARAMS), as_text).run()
        seen = capsys.readouterr()
        return seen.out, seen.err

    return run


@pytest.fixture
def foreign() -> Iterator[Callable[[bytes], str]]:
    """Starts servers that answer GET with a given body, and streams with the prompt as an event; returns their addresses."""
    servers: list[ThreadingHTTPServer] = []

    def start(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"data: " + sent["prompt"].encode() + b"\n\n")

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def complete(server: Running, prompt: str, **changes: Any) -> str:
    text: str = server.post("/v1/completions", prompt=prompt, **PARAMS | changes).json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("url", ["http://[", "http://a b", "http://127.0.0.1:99999", "http://127.0.0.1:1/\n"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(OutriderError, match="does not answer"):
        RemoteModel(url, None)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"data": []}', b"[" * 100_000, b'{"data": [1]}'])
def test_servers_of_another_kind(foreign: Callable[[bytes], str], body: bytes) -> None:
    with pytest.raises(OutriderError, match="names no model"):
        RemoteModel(foreign(body), None)


@pytest.mark.parametrize("event", [b"{", b"[]", b"1", b"[" * 100_000])
def test_streams_of_another_format(foreign: Callable[[bytes], str], event: bytes) -> None:
    partner = RemoteModel(foreign(b'{"data": [{"id": "m"}]}\n'), None)
    with pytest.raises(OutriderError, match="not in OpenAI's format"):
        list(partner.answer(event.decode(), {}, True))


def test_text_mode_continues_the_previous_text(server: Running, talk: Talk) -> None:
    first = complete(server, "def add(a, b):")
    second = complete(server, f"def add(a, b):{first}\nclass Sum:\n    x", max_tokens=8)
    out, remarks = talk(
        "def add(a, b):", "/set max_tokens 8", '"""', "class Sum:", '    x"""', "/reset", "def add(a, b):\\", "    x"
    )
    assert out.startswith(f"{first}\n{second}\n")
    assert out.removeprefix(f"{first}\n{second}\n") == complete(server, "def add(a, b):\n    x", max_tokens=8) + "\n"
    assert "continues your text as it stands" in remarks
    assert re.search(r"16 tokens · \d+\.\d tok/s · eagle: \d\.\d\d tokens per round · \d+% of \d+ guesses accepted", remarks)


def test_messages_go_through_the_chat_template(server: Running, talk: Talk) -> None:
    system = {"role": "system", "content": "Write Python."}
    messages = [system, {"role": "user", "content": "Add numbers."}]
    first = server.post("/v1/chat/completions", messages=messages, **PARAMS).json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
    second = server.post("/v1/chat/completions", messages=messages, **PARAMS).json()["choices"][0]["message"]["content"]
    out, _ = talk("/system Write Python.", "Add numbers.", "Again.", as_text=False)
    assert out == f"{first}\n{second}\n"


def test_without_a_template_the_chat_continues_text(server: Running, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.llm.tokenizer._hf, "chat_template", None)  # type: ignore[union-attr]
    out, remarks = talk("def add(a, b):", as_text=False)
    assert out == complete(server, "def add(a, b):") + "\n"
    assert "has no chat template: it continues your text" in remarks


def test_spec_switches_speculation(server: Running, talk: Talk) -> None:
    out, remarks = talk(
        "/spec off", "def add(a, b):", "/reset", "/spec on", "def add(a, b):", "/stats", "/reset", "/spec medusa", "x", "/stats"
    )
    assert out == 2 * (complete(server, "def add(a, b):") + "\n")
    lines = remarks.split("\n")
    plain, fast = (line for line in lines if line.startswith("16 tokens"))
    assert "eagle" not in plain
    assert "eagle: " in fast
    assert "1 answer, 16 tokens" in remarks
    assert "acceptance by position: " in remarks
    assert "method 'medusa' is not loaded; loaded: eagle, none" in remarks
    assert lines[-2] == "nothing has been answered yet"


def test_invalid_commands_are_reported_and_the_chat_continues(server: Running, talk: Talk) -> None:
    out, remarks = talk(
        "/nope",
        "/set heat 3",
        "/set seed x",
        "/set temperature 99",
        "def add(a, b):",
        "/set temperature 0.6",
        "/help",
        "/quit",
        "no",
    )
    assert out == ""
    assert "error: /nope: is no command; there are /help" in remarks
    assert "error: /set: unknown 'heat'; there are temperature" in remarks
    assert "error: /set: seed must be a number, got 'x'" in remarks
    assert "error: temperature" in remarks  # the server's message
    assert "/spec on|off" in remarks


def test_refusals_of_a_server_are_reported(server_with: Callable[..., Running]) -> None:
    with pytest.raises(InvalidParameter, match="must begin with http"):
        RemoteModel("localhost:8000", None)
    with pytest.raises(OutriderError, match="does not answer .* start one with `outrider serve`"):
        RemoteModel("http://127.0.0.1:9", None)
    server = server_with(api_key=("right",))
    with pytest.raises(OutriderError, match="API key is needed.*pass --api-key, or set OUTRIDER_API_KEY"):
        RemoteModel(server.url, "wrong")
    assert RemoteModel(server.url + "/v1/", "right").name == "pyrite"


def test_model_text_cannot_send_control_characters() -> None:
    assert printable("a\x1b[2Jb\x9b1m\rc\td\n\x07é") == "a\ufffd[2Jb\ufffd1m\ufffdc\td\n\ufffdé"


def test_input_ends_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""one\ntwo'))
    assert piped_message() == "one\ntwo"
    assert piped_message() is None


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("plain\nnext", "plain"),
        ("one\\\ntwo\nthree", "one\ntwo"),
        ('"""one\n\ntwo"""\nthree', "one\n\ntwo"),
        ('"""\none\n"""\nthree', "one"),
        ('"""one"""\ntwo', "one"),
        ('""""""\ntwo', ""),
    ],
)
def test_a_message_may_have_several_lines(typed: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert piped_message() == message


class Terminal:
    """A chat in a terminal of 80 by 24."""

    def __init__(self, *options: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "outrider.cli", "chat", "--seed", "3", "--max-tokens", "900", "--threads", "1", *options]
        # no terminal answers the cursor queries of prompt_toolkit
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=lambda: os.login_tty(slave)
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until a pattern appears. Returns the output since the last match."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            if select.select([self._master], [], [], 0.2)[0]:
                self.seen += os.read(self._master, 4096).decode(errors="replace")
        seen, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*options: str) -> Terminal:
        opened.append(Terminal(*options))
        return opened[-1]

    yield start
    for process in opened:
        process.close()


@pytest.mark.parametrize("where", ["server", "process"])
def test_status_row_history_and_interrupts_in_a_terminal(where: str, server: Running, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--url", server.url) if where == "server" else terminal()
    chat.wait(PROMPT)
    chat.type("def load(path):\n")
    seen = chat.wait(
        r"\x1b\[24;1H\x1b\[2K\x1b\[2m\d+ tokens · \d+\.\d tok/s · \d\.\d\d per round · \d+% guessed"
    )  # in the last row
    assert "\x1b[1;23r" in seen  # text scrolls above it
    chat.type("\x03")
    after = chat.wait(r"stopped · \d+ tokens")
    assert "\x1b[r" in after  # the whole terminal scrolls again
    if where == "server":
        until(server.is_idle)
    chat.wait(PROMPT)
    chat.type("/set max_tokens 6\n")
    chat.wait("max_tokens 6(.|\n)*" + PROMPT)
    chat.type("lost\x03")
    chat.wait("Ctrl-D or /quit leaves(.|\n)*" + PROMPT)
    chat.type("\x1b[A\x1b[A\n")  # the second last line of the history
    method = "eagle" if where == "server" else "auto"  # the server's method, and the default of a local chat
    chat.wait(rf"def load\(path\):(.|\n)*6 tokens · \d+\.\d tok/s · {method}")
    chat.wait(PROMPT)
    chat.type("/quit\n")
    assert chat.process.wait(30) == 0


class Silent(BaseHTTPRequestHandler):
    """A server that lists a model and then sends nothing until it is released."""

    released = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "mute"}]}')

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.released.wait(60)

    def log_message(self, *_: object) -> None: ...


def test_ctrl_c_ends_the_wait_for_a_silent_server(terminal: Callable[..., Terminal]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as silent:
        threading.Thread(target=silent.serve_forever).start()
        try:
            chat = terminal("--url", f"http://127.0.0.1:{silent.server_port}")
            chat.wait(PROMPT)
            chat.type("hello\n")
            chat.wait("hello")
            time.sleep(0.5)  # long enough that the chat waits for the answer
            chat.type("\x03")
            chat.wait("stopped · 0 tokens(.|\n)*" + PROMPT, 20)
            chat.type("\x04")
            assert chat.process.wait(30) == 0
        finally:
            Silent.released.set()
            silent.shutdown()
