"""`outrider chat` against a real server and with a model of its own, through pipes and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
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
from outrider.serve.chat import Chat, read_message
from outrider.serve.chat_partner import RemoteModel
from outrider.serve.chat_screen import printable
from tests.serve.conftest import Running, until

PARAMS = {"temperature": 0.6, "max_tokens": 16, "seed": 5}
Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def talk(server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Feeds lines to a chat with the server; what came out, and the remarks."""

    def run(*lines: str, as_text: bool = True) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        Chat(RemoteModel(server.url, None), dict(PARAMS), as_text).run()
        seen = capsys.readouterr()
        return seen.out, seen.err

    return run


def complete(server: Running, prompt: str, **changes: Any) -> str:
    text: str = server.post("/v1/completions", prompt=prompt, **PARAMS | changes).json()["choices"][0]["text"]
    return text


def test_a_text_goes_on_where_it_ended(server: Running, talk: Talk) -> None:
    first = complete(server, "def add(a, b):")
    second = complete(server, f"def add(a, b):{first}\nclass Sum:\n    x", max_tokens=8)
    out, remarks = talk(
        "def add(a, b):", "/set max_tokens 8", '"""', "class Sum:", '    x"""', "/reset", "def add(a, b):\\", "    x"
    )
    assert out.startswith(f"{first}\n{second}\n")
    assert out.removeprefix(f"{first}\n{second}\n") == complete(server, "def add(a, b):\n    x", max_tokens=8) + "\n"
    assert "continues your text as it stands" in remarks
    assert re.search(r"16 tokens · \d+\.\d tok/s · eagle: \d\.\d\d tokens per round · \d+% of \d+ guesses accepted", remarks)


def test_turns_go_through_the_template(server: Running, talk: Talk) -> None:
    system = {"role": "system", "content": "Write Python."}
    said = [system, {"role": "user", "content": "Add numbers."}]
    first = server.post("/v1/chat/completions", messages=said, **PARAMS).json()["choices"][0]["message"]["content"]
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
    second = server.post("/v1/chat/completions", messages=said, **PARAMS).json()["choices"][0]["message"]["content"]
    out, _ = talk("/system Write Python.", "Add numbers.", "Again.", as_text=False)
    assert out == f"{first}\n{second}\n"


def test_without_a_template_it_says_so_and_goes_on(server: Running, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.llm.tokenizer._hf, "chat_template", None)  # type: ignore[union-attr]
    out, remarks = talk("def add(a, b):", as_text=False)
    assert out == complete(server, "def add(a, b):") + "\n"
    assert "has no chat template: it continues your text" in remarks


def test_speculation_is_a_switch(server: Running, talk: Talk) -> None:
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


def test_mistakes_are_told_and_survived(server: Running, talk: Talk) -> None:
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
    assert "error: temperature" in remarks  # the server's own words
    assert "/spec on|off" in remarks


def test_servers_that_refuse(server_with: Callable[..., Running]) -> None:
    with pytest.raises(InvalidParameter, match="must begin with http"):
        RemoteModel("localhost:8000", None)
    with pytest.raises(OutriderError, match="does not answer .* start one with `outrider serve`"):
        RemoteModel("http://127.0.0.1:9", None)
    server = server_with(api_key="right")
    with pytest.raises(OutriderError, match="API key is needed.*pass --api-key, or set OUTRIDER_API_KEY"):
        RemoteModel(server.url, "wrong")
    assert RemoteModel(server.url + "/v1/", "right").name == "pyrite"


def test_model_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9b1m\rc\td\n\x07é") == "a\ufffd[2Jb\ufffd1m\ufffdc\td\n\ufffdé"


def test_input_ends_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""one\ntwo'))
    assert read_message("") == "one\ntwo"
    assert read_message("") is None


class Terminal:
    """A chat in a terminal of 80 by 24."""

    def __init__(self, *options: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "outrider.cli", "chat", "--seed", "3", "--max-tokens", "900", "--threads", "1", *options]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=lambda: os.login_tty(slave)
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def insist(self, key: str, pattern: str) -> str:
        """Press until it shows.

        Python's readline misses a signal that comes between its last look and its wait for a key; and where the terminal
        drops its input with the signal just while readline asks for some, readline waits for a key and hears no signal at all.
        """
        for _ in range(10):
            self.type(key)
            with contextlib.suppress(AssertionError):
                return self.wait(pattern, seconds=6.0)
            self.type(" ")
        raise AssertionError(self.seen)

    def wait(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until something shows; what came since the last one."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            if select.select([self._master], [], [], 0.2)[0]:
                self.seen += os.read(self._master, 4096).decode(errors="replace")
        seen, self.seen = self.seen[: found.end()], self.seen[found.end() :]
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
    for own in opened:
        own.close()


@pytest.mark.parametrize("where", ["server", "process"])
def test_in_a_terminal(where: str, server: Running, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--url", server.url) if where == "server" else terminal()
    chat.wait("> ")
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
    chat.wait("> ")
    chat.type("/set max_tokens 6\n")
    chat.wait("max_tokens 6(.|\n)*> ")
    chat.type("lost")
    chat.wait("lost")
    time.sleep(0.2)  # it reads by now: the signal finds it at the prompt
    chat.insist("\x03", "Ctrl-D or /quit leaves(.|\n)*> ")
    chat.type("\x1b[A\x1b[A\n")  # the line before the last one, out of readline's history
    chat.wait(r"def load\(path\):(.|\n)*6 tokens · \d+\.\d tok/s · eagle")
    chat.wait("> ")
    chat.type("/quit\n")
    assert chat.process.wait(30) == 0


class Silent(BaseHTTPRequestHandler):
    """A server that has a model and then says nothing until it is let go."""

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
            chat.wait("> ")
            chat.type("hello\n")
            chat.wait("hello")
            time.sleep(0.5)  # long enough to be waiting
            chat.type("\x03")
            chat.wait("stopped · 0 tokens(.|\n)*> ", 20)
            chat.type("\x04")
            assert chat.process.wait(30) == 0
        finally:
            Silent.released.set()
            silent.shutdown()
