"""`outrider serve`: flags, environment, file; and what a process does when it is told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.serve.cli import describe, parse_bytes, resolve_speculation
from outrider.serve.settings import Settings

MAIN = [sys.executable, "-c", "from outrider.cli import main; main()", "serve"]


class Resolved(Exception):
    """Stops the command where the server would start."""


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command up to the server: the settings and what the model would be loaded with."""
    import outrider.engine.llm
    import outrider.serve.server

    found: dict[str, Any] = {}

    def run(built: Any, settings: Settings, own: socket.socket, access_log: bool) -> None:
        own.close()
        found["settings"] = settings
        with pytest.raises(Resolved):
            built.state.service._load()

    def load(model: str | None, **given: Any) -> None:
        found.update(given, model=model)
        raise Resolved

    monkeypatch.setattr(outrider.serve.server, "serve", run)
    monkeypatch.setattr(outrider.engine.llm, "LLM", load)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def command(*arguments: str, **environment: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments], env=environment, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return found

    return command


def test_flags_go_before_the_environment_and_that_before_the_file(resolve: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-num-seqs: 3\nmax_model_len: 300\nmax-queue: 5\nspeculative-config: {method: suffix, num_speculative_tokens: 7}\n"
    )
    given = resolve("--config", str(file), "--max-num-seqs", "9", OUTRIDER_MAX_MODEL_LEN="400", OUTRIDER_MAX_NUM_SEQS="8")
    assert (given["max_num_seqs"], given["max_model_len"], given["settings"].max_queue) == (9, 400, 5)
    assert (given["speculation"].method, given["speculation"].draft_tokens) == ("suffix", 7)
    by_environment = resolve(OUTRIDER_CONFIG=str(file), OUTRIDER_API_KEY="k", OUTRIDER_HOST="127.0.0.1")
    assert by_environment["settings"].api_key == "k"
    assert by_environment["max_num_seqs"] == 3


def test_defaults(resolve: Any) -> None:
    given = resolve()
    assert given["model"] is None
    assert given["settings"].host == "127.0.0.1"
    assert given["settings"].api_key is None
    assert given["speculation"].method == "auto"
    assert resolve("--host", "0.0.0.0", "--insecure")["settings"].insecure


def test_every_flag_has_a_twin_in_the_environment() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for parameter in command.params:
        if parameter.name != "help":
            assert parameter.envvar == f"OUTRIDER_{parameter.name.upper()}", parameter.name
    names = {name for parameter in command.params for name in parameter.opts}
    assert names >= {
        "--speculative-config", "--speculative-model", "--num-speculative-tokens", "--method", "--draft-model", "--draft-tokens",
        "--host",
        "--port", "--api-key", "--served-model-name", "--max-model-len", "--max-num-seqs", "--memory", "--dtype",
        "--chat-template",
        "--config",
    }  # fmt: skip


def test_a_file_with_a_name_that_is_no_flag_is_refused(resolve: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 80\n")
    with pytest.raises(InvalidParameter, match="'prot', which is no flag"):
        resolve("--config", str(file))
    file.write_text("- a\n")
    with pytest.raises(InvalidParameter, match="must hold flags"):
        resolve("--config", str(file))


def test_names_sizes_and_aliases(resolve: Any) -> None:
    given = resolve("--served-model-name", "a", "--served-model-name", "b", "--memory", "1.5GiB", "--max-body", "64k")
    assert (given["settings"].model_name, given["settings"].aliases) == ("a", ("b",))
    assert given["kv_bytes"] == 3 * 2**29
    assert given["settings"].limits.body_bytes == 2**16
    for bad in ("", "x", "0", "-1G", "4 apples"):
        with pytest.raises(InvalidParameter, match="--memory"):
            parse_bytes("--memory", bad)
    assert resolve("--memory", "0.8")["memory"] == 0.8, "of a GPU"


def test_speculation_in_vllm_s_words_and_in_ours() -> None:
    both = [
        resolve_speculation("eagle", None, 6, None),
        resolve_speculation(None, None, None, '{"method": "eagle", "num_speculative_tokens": 6}'),
        resolve_speculation("eagle:6", None, None, None),
    ]
    assert all(own == both[0] for own in both)
    assert resolve_speculation(None, "some/draft", 3, None).method == "draft_model"
    assert resolve_speculation(None, None, None, '{"model": "[ngram]", "num_speculative_tokens": 4}').method == "ngram"
    for method, model, tokens, config in (
        ("eagle", None, None, "{}"),
        (None, None, None, "[1]"),
        (None, None, None, "{"),
        ("ngram", "x", None, None),
        (None, None, None, '{"method": "eagle", "wrong": 1}'),
    ):
        with pytest.raises(InvalidParameter):
            resolve_speculation(method, model, tokens, config)


def test_a_public_address_without_a_key_is_refused_at_once() -> None:
    done = subprocess.run([*MAIN, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--api-key" in done.stderr


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        done = subprocess.run([*MAIN, "--port", str(own.getsockname()[1])], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    done = subprocess.run([*MAIN, str(tmp_path), "--port", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


class Process:
    """`outrider serve` as users start it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.own = subprocess.Popen([*MAIN, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True, env=env)
        self.said = ""
        self.url = ""

    def hear(self, mark: str) -> None:
        assert self.own.stderr is not None
        for line in self.own.stderr:
            self.said += line
            self.url = self.url or (re.findall(r"http://[\d.:]+", line) or [""])[0]
            if mark in line:
                return
        raise AssertionError(self.said)

    def end(self, number: int) -> int:
        self.own.send_signal(number)
        assert self.own.stderr is not None
        self.said += self.own.stderr.read()
        return self.own.wait(60)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.own.kill()
        process.own.wait()
        assert process.own.stderr is not None
        process.own.stderr.close()


def test_a_signal_while_loading_ends_it_well(started: list[Process]) -> None:
    started.append(process := Process())
    process.hear("listening on")
    assert process.end(signal.SIGTERM) == 0
    assert "Traceback" not in process.said


def test_a_signal_under_load_lets_requests_finish_and_refuses_others(started: list[Process]) -> None:
    started.append(process := Process("--method", "eagle", "--api-key", "k", "--max-num-seqs", "4"))
    process.hear("ready on")
    assert "speculation   on: eagle" in process.said
    assert "curl http://127.0.0.1" in process.said
    assert "OpenAI(base_url=" in process.said
    assert "api_key='k'" not in process.said
    client = httpx.Client(base_url=process.url, headers={"Authorization": "Bearer k"}, timeout=60, trust_env=False)
    for _ in range(600):
        if client.get("/health").status_code == 200:
            break
    given = {"prompt": "def main(", "max_tokens": 160, "temperature": 0, "ignore_eos": True}
    found: list[httpx.Response] = []
    askers = [threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=given))) for _ in range(3)]
    for asker in askers:
        asker.start()
    while client.get("/stats").json()["running"] < 3:
        pass
    process.own.send_signal(signal.SIGTERM)
    while (answer := client.get("/health")).status_code == 200:
        pass
    assert answer.json() == {"status": "draining"}
    refused = client.post("/v1/completions", json=given)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    for asker in askers:
        asker.join(60)
    assert [own.json()["choices"][0]["finish_reason"] for own in found] == ["length"] * 3
    assert process.own.wait(60) == 0
    client.close()


def test_a_signal_while_idle_ends_it_well(started: list[Process]) -> None:
    started.append(process := Process("--method", "none"))
    process.hear("ready on")
    assert process.end(signal.SIGTERM) == 0


def test_a_deadline_for_those_who_drain(started: list[Process]) -> None:
    started.append(process := Process("--method", "none", "--drain-timeout", "0.2"))
    process.hear("ready on")
    assert "speculation   off: no method was asked for" in process.said
    with httpx.Client(base_url=process.url, timeout=60, trust_env=False) as client:
        for _ in range(600):
            if client.get("/health").status_code == 200:
                break
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.own.send_signal(signal.SIGTERM)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "abort"
    assert process.own.wait(60) == 0


def test_the_start_says_whether_speculation_is_on_and_why(llm: LLM) -> None:
    text = describe(llm, Settings(), ("127.0.0.1", 8000))
    assert "speculation   on: eagle, up to 4 tokens a round, rule match" in text
    assert "key           none" in text
    assert "Authorization" not in text
    assert "Authorization: Bearer" in describe(llm, Settings(api_key="secret"), ("::1", 80))
    assert "secret" not in describe(llm, Settings(api_key="secret"), ("::1", 80))
