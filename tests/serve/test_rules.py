"""Rules of speculation: which one applies, what it sets, and what is wrong with a file of rules."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams
from outrider.serve.rules import Rule, Traits, read_rules
from outrider.serve.server import Server
from outrider.serve.settings import ServerSettings
from tests.support.server import Process, Running, until

Starter = Callable[..., Running]
TEXT = """
rules:
  - name: prose
    when: {tag: [chat, mail], temperature: {min: 0.9}}
    speculation: false
  - name: json
    when: {response_format: [json_schema, json_object], model: pyrite}
    speculation: {method: eagle, num_speculative_tokens: 2}
  - name: short
    when: {tag: code, temperature: 0}
    speculation: {max_tokens: 1}
  - when: {tag: [code, mail]}
    speculation: true
"""
CODE = "def read_config(path):\n    "


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        (Traits("chat", "pyrite", 0.9, "text"), "prose"), (Traits("chat", "pyrite", 0.8, "text"), None),
        (Traits("mail", "x", 0.2, "text"), "rule-4"), (Traits("code", "x", 0.0, "tools"), "short"),
        (Traits("code", "x", 0.1, "tools"), "rule-4"), (Traits("chat", "pyrite", 0.5, "json_object"), "json"),
        (Traits("chat", "other", 0.5, "json_object"), None), (Traits(None, "pyrite", 1.0, "text"), None),
    ],
)  # fmt: skip
def test_the_first_rule_whose_conditions_hold_applies(rules_file: Path, traits: Traits, name: str | None) -> None:
    rule = read_rules(rules_file).first(traits)
    assert (rule and rule.name) == name


def test_a_json_file_is_read_too(rules_file: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text(json.dumps({"rules": [{"when": {"tag": "a"}, "speculation": {"max_tokens": 3}}]}))
    (rule,) = read_rules(tmp_path / "rules.json").rules
    assert (rule.name, rule.tags, dict(rule.settings)) == ("rule-1", {"a"}, {"max_tokens": 3})
    assert read_rules(rules_file).tags == ["chat", "mail", "code"]


def test_what_a_request_sets_takes_precedence_field_by_field() -> None:
    rule, free = Rule("r", settings={"method": "suffix", "max_tokens": 4}), SamplingParams()
    assert rule.merged(None, free) == {"method": "suffix", "max_tokens": 4}
    assert rule.merged({"max_tokens": 9}, free) == {"method": "suffix", "max_tokens": 9}
    assert rule.merged(False, free) == {"method": "suffix", "max_tokens": 4, "enabled": False}
    assert rule.merged(None, SamplingParams(num_speculative_tokens=2)) == {"method": "suffix"}
    assert rule.merged(None, SamplingParams(prompt_lookup_num_tokens=2)) == {}
    assert Rule("off", settings={"enabled": False}).merged(True, free) == {"enabled": True}


WRONG = {
    "[]": "must hold one key, rules",
    "rules: 3": "must hold one key, rules",
    "rules: [": "cannot be read",
    "rules: [3]": "rule 'rule-1': must have the keys when and speculation",
    "rules: [{name: a b, speculation: true}]": "rule 'rule-1': name must be",
    "rules: [{name: x}]": "rule 'x': speculation is missing",
    "rules: [{name: x, wen: {}, speculation: true}]": r"rule 'x': unknown key 'wen' \(did you mean 'when'\?\)",
    "rules: [{name: x, when: [], speculation: 3}]": "rule 'x': speculation must be true, false or settings",
    "rules: [{name: x, when: {tags: a}, speculation: true}]": r"rule 'x': unknown key 'tags' \(did you mean 'tag'\?\)",
    "rules: [{name: x, when: {tag: 'a b'}, speculation: true}]": "rule 'x': tag 'a b' must be 1 to 64",
    "rules: [{name: x, when: {tag: []}, speculation: true}]": "rule 'x': tag must be a text or a list of texts",
    "rules: [{name: x, when: {temperature: hot}, speculation: true}]": "rule 'x': temperature: must be a number",
    "rules: [{name: x, when: {temperature: {min: 1, max: 0}}, speculation: true}]": "rule 'x': temperature has min 1 above max 0",
    "rules: [{name: x, when: {temperature: {low: 1}}, speculation: true}]": "rule 'x': temperature: unknown key 'low'",
    "rules: [{name: x, when: {response_format: yaml}, speculation: true}]": "rule 'x': response_format 'yaml' is unknown;",
    "rules: [{name: x, speculation: {method: eagel}}]": "rule 'x': method: unknown 'eagel'; known:",
    "rules: [{name: x, speculation: {max_tokens: 999}}]": r"rule 'x': .*max_tokens: must be in \[0, 256\]",
    "rules: [{name: x, speculation: {speed: 9}}]": "rule 'x': .*unknown setting 'speed'",
    "rules: [{name: x, speculation: {remember: false}}]": "rule 'x': remember is a request's to set",
    "rules: [{name: x, speculation: true}, {name: x, speculation: false}]": "rule 'x': another rule has this name",
    f"rules: [{{when: {{tag: [{', '.join(f't{i}' for i in range(33))}]}}, speculation: true}}]": "names 33 tags; at most 32",
    f"rules: [{', '.join('{speculation: true}' for _ in range(65))}]": "holds 65 rules; at most 64",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_with_the_rule_s_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(InvalidParameter, match=WRONG[text]) as refused:
        read_rules(path)
    assert refused.value.param == "--speculation-rules"


def test_the_server_checks_rules_before_it_loads(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("rules: [{name: x, when: {model: gpt}, speculation: true}]")
    names = [word for name in ("pyrite", "small") for word in ("--served-model-name", name)]
    with pytest.raises(InvalidParameter, match="rule 'x': model 'gpt' is not served; served: pyrite, small"):
        CliRunner().invoke(app, ["serve", "--port", "0", "--speculation-rules", str(path), *names], catch_exceptions=False)


def test_a_method_that_is_not_loaded_ends_the_server(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("rules: [{name: x, speculation: {method: medusa}}]")
    running = Running(ServerSettings(speculation_rules=path), lambda: llm)
    try:
        until(lambda: running.service.failure is not None)
        assert "rule 'x': method 'medusa' is not loaded; loaded: eagle, none" in str(running.service.failure)
    finally:
        running.close()


def ask(server: Running, header: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {} if header is None else {"X-Outrider-Tag": header}
    answer = server.http.post(
        "/v1/completions", json={"prompt": CODE, "max_tokens": 24, "seed": 1, "ignore_eos": True} | body, headers=headers
    )
    assert answer.status_code == 200, answer.text
    out: dict[str, Any] = answer.json()
    return out


def drafted(answer: dict[str, Any]) -> int:
    """The longest draft of the answer."""
    return len(answer["metrics"]["speculative_decoding"]["acceptance_by_position"])


def test_rules_shape_drafts_and_never_tokens(server_with: Starter, rules_file: Path) -> None:
    server = server_with(speculation_rules=rules_file)
    free = ask(server, temperature=0)
    assert drafted(free) == 4
    for way in ({"tag": "code"}, {"metadata": {"tag": "code"}}, {"header": "code"}, {"tag": "code", "header": "chat"}):
        answer = ask(server, temperature=0, **way)
        assert drafted(answer) == 1, way
        assert answer["choices"] == free["choices"]
    assert drafted(ask(server, temperature=0, tag="code", speculation={"max_tokens": 3})) == 3, "the request's own"
    assert drafted(ask(server, temperature=0, tag="code", num_speculative_tokens=2)) == 2
    hot = ask(server, temperature=1.0)
    off = ask(server, temperature=1.0, tag="chat")
    assert off["choices"] == hot["choices"]
    assert (drafted(hot) > 0, drafted(off)) == (True, 0)
    assert drafted(ask(server, temperature=0, response_format={"type": "json_object"})) <= 2
    text = server.http.get("/metrics").text
    assert 'speculation_rule_requests_total{model_name="pyrite",rule="prose"} 1.0' in text
    assert 'speculation_rule_requests_total{model_name="pyrite",rule="json"} 1.0' in text, "without a model it is the server's"
    assert 'reason="the rule prose turned it off"' in text


def test_rules_reach_the_other_routes(server_with: Starter, rules_file: Path) -> None:
    server = server_with(speculation_rules=rules_file)
    message = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 24, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/messages", message | {"metadata": {"user_id": "u", "tag": "code"}}),
        ("/v1/responses", {"input": CODE, "max_output_tokens": 24, "temperature": 0, "metadata": {"tag": "code"}}),
    ):
        answer = server.http.post(path, json={"model": "pyrite"} | body, headers={"X-Outrider-Tag": "code"}).json()
        assert drafted(answer) == 1, path


def test_rules_are_reloaded_and_a_wrong_file_changes_nothing(
    server_with: Starter, rules_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_with(speculation_rules=rules_file)
    reload = Server(server.app, server.service.settings).reload
    for wrong in ("rules: [{name: x, speculation: {method: medusa}}]", "rules: [{name: x, when: {model: y}, speculation: true}]"):
        rules_file.write_text(wrong)
        reload()
        assert "nothing was reloaded: --speculation-rules: rule 'x': m" in caplog.text
        assert server.service.rules.tags == ["chat", "mail", "code"]
        caplog.clear()
    rules_file.write_text("rules: [{name: late, when: {tag: late}, speculation: {max_tokens: 2}}]")
    reload()
    assert drafted(ask(server, temperature=0, tag="late")) == 2
    assert drafted(ask(server, temperature=0, tag="code")) == 4


def test_hanging_up_reloads_the_rules(started: list[Process], rules_file: Path) -> None:
    rules_file.write_text("rules: []")
    process = Process("--method", "none", "--speculation-rules", str(rules_file), "--max-model-len", "256")
    started.append(process)
    process.hear("ready on")
    rules_file.write_text("rules: [3]")
    os.kill(process.popen.pid, signal.SIGHUP)
    process.hear("nothing was reloaded: --speculation-rules: rule 'rule-1'")
    assert process.end(signal.SIGTERM) == 0
