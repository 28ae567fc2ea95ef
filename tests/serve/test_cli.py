"""`outrider serve`: flags, environment and config file, and signals that stop the process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.serve.cli import describe, resolve_speculation
from outrider.serve.settings import Limits, ServerSettings
from tests.support.server import MAIN, Process


class Resolved(Exception):
    """Raised where the server would start, to end the command."""


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command up to the server. Returns the settings and the arguments for loading the model."""
    import outrider.engine.llm
    import outrider.serve.server

    resolved: dict[str, Any] = {}

    def run(built: Any, settings: ServerSettings, listener: socket.socket, reread: Any) -> None:
        listener.close()
        resolved.update(settings=settings, reread=reread)
        with pytest.raises(Resolved):
            built.state.service._load()

    def load(model: str | None, **options: Any) -> None:
        resolved.update(options, model=model)
        raise Resolved

    monkeypatch.setattr(outrider.serve.server, "serve", run)
    monkeypatch.setattr(outrider.engine.llm, "LLM", load)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def command(*arguments: str, **environment: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments], env=environment, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return resolved

    return command


def test_flags_override_the_environment_which_overrides_the_file(resolve: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-num-seqs: 3\nmax_model_len: 300\nmax-queue: 5\nspeculative-config: {method: suffix, num_speculative_tokens: 7}\n"
    )
    options = resolve("--config", str(file), "--max-num-seqs", "9", OUTRIDER_MAX_MODEL_LEN="400", OUTRIDER_MAX_NUM_SEQS="8")
    assert (options["max_num_seqs"], options["max_model_len"], options["settings"].max_queue) == (9, 400, 5)
    assert (options["speculation"].method, options["speculation"].draft_tokens) == ("suffix", 7)
    by_environment = resolve(OUTRIDER_CONFIG=str(file), OUTRIDER_API_KEY="k", OUTRIDER_HOST="127.0.0.1")
    assert by_environment["settings"].api_key == ("k",)
    assert by_environment["max_num_seqs"] == 3


def test_defaults_serve_the_bundled_model_on_loopback(resolve: Any) -> None:
    options = resolve()
    assert options["model"] is None
    assert options["settings"].host == "127.0.0.1"
    assert options["settings"].api_key == ()
    assert options["speculation"].method == "auto"
    assert resolve("--host", "0.0.0.0", "--insecure")["settings"].insecure


def test_every_flag_has_an_environment_variable() -> None:
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


def test_a_config_file_with_an_unknown_flag_is_refused(resolve: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 80\n")
    with pytest.raises(InvalidParameter, match="'prot', which is no flag"):
        resolve("--config", str(file))
    file.write_text("- a\n")
    with pytest.raises(InvalidParameter, match="must hold flags"):
        resolve("--config", str(file))
    for broken in ("port: [1", "port: 2020-13-45", "port: !!timestamp x", f"port: {'9' * 5000}", f"port: {'[' * 5000}"):
        file.write_text(broken)
        with pytest.raises(InvalidParameter, match="cannot be read"):
            resolve("--config", str(file))


def test_a_context_above_the_model_s_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidParameter, match="max_model_len: 2049 is more than the model's context of 2048 tokens"):
        CliRunner().invoke(app, ["serve", "--port", "0", "--max-model-len", "2049"], catch_exceptions=False)


def test_reloaded_limits_stay_below_flags_and_the_environment(resolve: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-queue: 5\nmax-body: 1k\n")
    options = resolve("--config", str(file), "--max-queue", "9", OUTRIDER_DRAIN_TIMEOUT="3")
    file.write_text("max-queue: 7\nmax-body: 2k\ndrain-timeout: 8\nping-interval: 2\nserved-model-name: other\n")
    reloaded = options["reread"]()
    assert (reloaded.max_queue, reloaded.drain_timeout, reloaded.limits.body_bytes, reloaded.ping_interval) == (9, 3.0, 2048, 2.0)
    assert reloaded.model_name == options["settings"].model_name, "what is loaded stays"
    file.write_text("max-num-seqs: 3\n")
    assert options["reread"]().limits.body_bytes == Limits().body_bytes, "what the file no longer sets has its default"
    for wrong in ("max-body: much\n", "stream-interval: 0\n", "nonsense: 1\n", "- a\n"):
        file.write_text(wrong)
        with pytest.raises(InvalidParameter):
            options["reread"]()


def test_api_keys_repeat_and_a_variable_holds_one_per_line(resolve: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice:one\n")
    settings = resolve("--api-key", "a", "--api-key", "b", "--api-key-file", str(tmp_path / "keys"))["settings"]
    assert (settings.api_key, settings.api_key_file) == (("a", "b"), tmp_path / "keys")
    settings = resolve(OUTRIDER_API_KEY="two words\nb\n")["settings"]
    assert settings.api_key == ("two words", "b")
    with pytest.raises(InvalidParameter, match="empty"):
        resolve(OUTRIDER_API_KEY=" \n")
    assert resolve("--watchdog-s", "7")["settings"].watchdog_timeout == 7


def test_names_sizes_and_aliases(resolve: Any) -> None:
    options = resolve("--served-model-name", "a", "--served-model-name", "b", "--kv-memory", "1.5GiB", "--max-body", "64k")
    assert (options["settings"].model_name, options["settings"].names) == ("a", ("a", "b"))
    assert options["kv_bytes"] == 3 * 2**29
    assert options["settings"].limits.body_bytes == 2**16
    for bad in ("", "x", "0", "-1G", "4 apples"):
        for flag in ("--memory", "--kv-memory"):
            with pytest.raises(InvalidParameter, match=flag):
                resolve(flag, bad)
    assert resolve("--memory", "0.8")["memory"] == resolve("--gpu-memory-utilization", "0.8")["memory"] == 0.8, "a share"
    assert resolve("--memory", "8GiB")["memory"] == 8 * 2**30, "of everything"


def test_allowed_origins(resolve: Any) -> None:
    assert resolve()["settings"].allow_origin == ()
    options = resolve("--allow-origin", "https://a.example", "--allow-origin", "http://localhost:3000")
    assert options["settings"].allow_origin == ("https://a.example", "http://localhost:3000")


def test_speculation_flags_equal_vllm_s_json() -> None:
    both = [
        resolve_speculation("eagle", None, 6, None),
        resolve_speculation(None, None, None, '{"method": "eagle", "num_speculative_tokens": 6}'),
        resolve_speculation("eagle:6", None, None, None),
    ]
    assert all(config == both[0] for config in both)
    assert resolve_speculation(None, "some/draft", 3, None).method == "draft_model"
    assert resolve_speculation(None, None, None, '{"model": "[ngram]", "num_speculative_tokens": 4}').method == "ngram"
    for method, model, tokens, config in (
        ("eagle", None, None, "{}"),
        (None, None, None, "[1]"),
        (None, None, None, "{"),
        ("ngram", "x", None, None),
    ):
        with pytest.raises(InvalidParameter):
            resolve_speculation(method, model, tokens, config)


def test_a_public_address_without_a_key_is_refused_at_once() -> None:
    done = subprocess.run([*MAIN, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--api-key" in done.stderr


def test_a_port_in_use_is_reported_in_one_line() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        done = subprocess.run([*MAIN, "--port", str(listener.getsockname()[1])], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    done = subprocess.run([*MAIN, str(tmp_path), "--port", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_while_loading_exits_with_zero(started: list[Process]) -> None:
    started.append(process := Process())
    process.hear("listening on")
    assert process.end(signal.SIGTERM) == 0
    assert "Traceback" not in process.stderr


def test_a_signal_under_load_lets_requests_finish_and_refuses_others(started: list[Process]) -> None:
    started.append(process := Process("--method", "eagle", "--api-key", "k", "--max-num-seqs", "4"))
    process.hear("ready on")
    assert "speculation   on: eagle" in process.stderr
    assert "curl http://127.0.0.1" in process.stderr
    assert "OpenAI(base_url=" in process.stderr
    assert "api_key='k'" not in process.stderr
    client = httpx.Client(base_url=process.url, headers={"Authorization": "Bearer k"}, timeout=60, trust_env=False)
    for _ in range(600):
        if client.get("/health").status_code == 200:
            break
    body = {"prompt": "def main(", "max_tokens": 160, "temperature": 0, "ignore_eos": True}
    responses: list[httpx.Response] = []
    askers = [threading.Thread(target=lambda: responses.append(client.post("/v1/completions", json=body))) for _ in range(3)]
    for asker in askers:
        asker.start()
    while client.get("/stats").json()["running"] < 3:
        pass
    process.popen.send_signal(signal.SIGTERM)
    while (answer := client.get("/health")).status_code == 200:
        pass
    assert answer.json() == {"status": "draining"}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    for asker in askers:
        asker.join(60)
    assert [response.json()["choices"][0]["finish_reason"] for response in responses] == ["length"] * 3
    assert process.popen.wait(60) == 0
    client.close()


def test_a_signal_while_idle_exits_with_zero(started: list[Process]) -> None:
    started.append(process := Process("--method", "none"))
    process.hear("ready on")
    assert process.end(signal.SIGTERM) == 0


def test_requests_are_aborted_at_the_drain_timeout(started: list[Process]) -> None:
    started.append(process := Process("--method", "none", "--drain-timeout", "0.2"))
    process.hear("ready on")
    assert "speculation   off: no method was asked for" in process.stderr
    with httpx.Client(base_url=process.url, timeout=60, trust_env=False) as client:
        for _ in range(600):
            if client.get("/health").status_code == 200:
                break
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert process.popen.wait(60) == 0


def test_the_banner_states_whether_speculation_is_on_and_why(llm: LLM) -> None:
    text = describe(llm, ServerSettings(), ("127.0.0.1", 8000))
    assert "speculation   on: eagle, up to 4 tokens a round, rule match" in text
    assert "key           none" in text
    assert "Authorization" not in text
    assert "Authorization: Bearer" in describe(llm, ServerSettings(api_key=("secret",)), ("::1", 80))
    assert "secret" not in describe(llm, ServerSettings(api_key=("secret",)), ("::1", 80))
