"""Operating `outrider serve`: signals, logs, variables, faults, and messages of a failed start."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from rich.console import Console

import outrider.cli
from outrider.model.bundled import bundled_model
from tests.support.server import MAIN, Process, until

SMALL = str(bundled_model() / "draft")
BROKEN = """
import time
from outrider.engine.engine import Engine
round = Engine.round
def broken(self):
    if any(seq.request.prompt_ids[0] == 77 for seq in self._processors):
        {fault}
    return round(self)
Engine.round = broken
from outrider.cli import main
main()
"""


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """A port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


Main = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    """Run the command in this process until it fails. Returns its exit code and standard error."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(outrider.cli, "_errors", Console(stderr=True, width=200))

    def command(*arguments: str, **more: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", "serve", *(one.format(folder=tmp_path, **more) for one in arguments)])
        with pytest.raises(SystemExit) as ended:
            outrider.cli.main()
        return int(str(ended.value.code)), capfd.readouterr().err

    return command


def client_of(process: Process, key: str = "") -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=process.url, headers=headers, timeout=60, trust_env=False)


def test_signals_reload_and_inspect_a_running_server(started: list[Process], tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "serve.yaml"
    keys.write_text("alice:one\n")
    config.write_text("max-body: 64k\n")
    flags = (
        SMALL,
        "--method",
        "none",
        "--api-key-file",
        str(keys),
        "--config",
        str(config),
        "--access-log",
        "--log-format",
        "json",
    )
    started.append(process := Process(*flags, OUTRIDER_API_KEY="two words\n"))
    process.hear("ready on")
    with client_of(process, "one") as alice, client_of(process, "two") as bob, client_of(process, "two words") as operator:
        assert operator.get("/version").status_code == 200, "the newline is no part of the key"
        large = {"prompt": "x" * 3000, "max_tokens": 1}
        assert alice.post("/v1/completions", json=large, headers={"X-Request-Id": "first"}).status_code == 200
        assert bob.get("/version").status_code == 401
        keys.write_text("bob:two\n")
        config.write_text("max-body: 1k\n")
        process.popen.send_signal(signal.SIGHUP)
        process.hear("reloaded; keys of: ")
        assert process.stderr.rstrip().endswith(', bob"}')
        assert alice.get("/version").status_code == 401
        assert bob.post("/v1/completions", json=large).status_code == 413, "limits are read again"
        keys.write_text("")
        process.popen.send_signal(signal.SIGHUP)
        process.hear("nothing was reloaded")
        assert bob.get("/version").status_code == 200, "a broken file changes nothing"
        process.popen.send_signal(signal.SIGUSR1)
        process.hear("most recent call first")
        assert bob.get("/livez").status_code == 200
    assert process.end(signal.SIGTERM) == 0
    records = [json.loads(line) for line in process.stderr.splitlines() if line.startswith("{")]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(record) for record in records))
    first = next(record for record in records if record.get("request_id") == "first")
    assert (first["client"], first["status"], first["path"]) == ("alice", 200, "/v1/completions")
    assert first["completion_tokens"] == 1
    assert "one" not in {record.get("client") for record in records}


def test_two_signals_at_once_count_as_one_and_a_later_one_aborts(started: list[Process]) -> None:
    """timeout(1) sends two signals at once. Aborted requests get an error that says that the server has stopped."""
    slow = BROKEN.format(fault="time.sleep(0.05)")
    flags = ("--method", "none", "--max-num-seqs", "1", "--drain-timeout", "300")
    started.append(process := Process(SMALL, *flags, main=slow))
    process.hear("ready on")
    body = {"prompt": [77], "max_tokens": 1000, "ignore_eos": True}
    with client_of(process) as client, ThreadPoolExecutor(3) as askers:
        pending = [askers.submit(client.post, "/v1/completions", json=body) for _ in range(3)]
        until(lambda: client.get("/stats").json()["waiting"] == 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            process.popen.send_signal(number)
        until(lambda: client.get("/health").json() == {"status": "draining"})
        time.sleep(0.7)
        assert process.popen.poll() is None
        assert not any(future.done() for future in pending)
        process.popen.send_signal(signal.SIGTERM)
        answers = sorted((future.result() for future in pending), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 503, 503]
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    assert process.wait() == 0
    assert "Traceback" not in process.stderr


def test_closing_the_terminal_drains(tmp_path: Path) -> None:
    """The user closes the terminal window, so that nobody can stop the server with Ctrl-C any more."""
    log = tmp_path / "log"
    log.touch()
    pid, master = pty.fork()
    if pid == 0:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it, and so would the server
        os.execv(sys.executable, [*MAIN, SMALL, "--port", "0", "--method", "none"])
    try:
        with httpx.Client(trust_env=False) as client:
            until(lambda: "ready on" in log.read_text() or os.waitpid(pid, os.WNOHANG) != (0, 0), 120)
            assert client.get(log.read_text().split("ready on ")[1].strip() + "/health").status_code == 200
    finally:
        os.close(master)
    ends: list[tuple[int, int]] = []
    until(lambda: ends.append(os.waitpid(pid, os.WNOHANG)) or ends[-1] != (0, 0))  # type: ignore[func-returns-value]
    assert os.waitstatus_to_exitcode(ends[-1][1]) == 0
    assert "stopping: what runs may finish" in log.read_text()


@pytest.mark.parametrize(
    ("fault", "flags", "message"),
    [
        ("raise MemoryError('no more')", (), "the engine has died: no more"),
        ("time.sleep(1000)", ("--watchdog-timeout", "0.5"), "the engine has ended no round for 0.5 s"),
    ],
    ids=["dead", "stuck"],
)
def test_an_engine_that_cannot_continue_ends_the_process(
    started: list[Process], fault: str, flags: tuple[str, ...], message: str
) -> None:
    started.append(process := Process(SMALL, "--method", "none", *flags, main=BROKEN.format(fault=fault)))
    process.hear("ready on")
    with client_of(process) as client:
        assert client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": [77], "max_tokens": 2}).status_code == 503
    assert process.wait() == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("error:")
    assert message in last
    assert "in broken" in process.stderr, "the log says where"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nowhere/model",), "is not a model directory"),
        (("{folder}",), "config.json"),
        (("--port", "{taken}"), "in use"),
        (("--port", "70000"), "--port"),
        ((SMALL, "--method", "eagle"), "brings none in eagle/"),
        ((SMALL, "--method", "mixture:members=suffix+medusa"), "brings none in medusa/"),
        (("--draft-model", "/nowhere/draft"), "'/nowhere/draft' is not a model directory"),
        (("--method", "eagle", "--draft-model", "{folder}"), "config.json is missing"),
        (("--method", "draft_model", "--draft-model", "{config}"), "holds no *.safetensors"),
        (("{config}",), "holds no *.safetensors"),
        (("--dtype", "nonsense"), "dtype: unknown 'nonsense'"),
        (("--dtype", "nonsense", "owner/name"), "dtype: unknown 'nonsense'"),
        (("--load-format", "pt"), "load_format: unknown 'pt'"),
        (("--method", "nonsense"), "nonsense"),
        (("--device", "quantum"), "quantum"),
        (("--max-body", "much"), "--max-body"),
        (("--api-key-file", "{folder}/none"), "--api-key-file"),
        (("--chat-template", "{folder}/none"), "--chat-template"),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, tuple) else "",
)
def test_a_failed_start_prints_its_reason_once(
    run: Main, arguments: tuple[str, ...], message: str, taken: str, tmp_path: Path
) -> None:
    config = tmp_path / "config"  # a model's folder without its weights
    config.mkdir()
    (config / "config.json").write_bytes((bundled_model() / "config.json").read_bytes())
    code, stderr = run("--port", "0", *arguments, taken=taken, config=str(config))
    assert code == 2
    assert message in stderr
    assert "listening" not in stderr
    assert stderr.lower().count("error") == 1
    assert "Traceback" not in stderr


def test_kubernetes_variables_are_ignored_and_unknown_ones_are_reported(
    run: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "serve.yaml").write_text("port: 0\n")
    monkeypatch.setenv("OUTRIDER_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("OUTRIDER_MAX_QUEU", "3")
    code, stderr = run("/nowhere/model", "--config", "{folder}/serve.yaml")
    assert "OUTRIDER_PORT=tcp://10.0.0.1:8000 is ignored" in caplog.text
    assert "OUTRIDER_MAX_QUEU is set, but nothing reads it; did you mean OUTRIDER_MAX_QUEUE?" in caplog.text
    assert (code, "is not a model directory" in stderr) == (2, True), "the flags were read"
