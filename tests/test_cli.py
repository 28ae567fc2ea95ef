"""The command line as a user meets it: what it prints, and its exit codes in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import write_family, write_tokenizer
from tests.support.command import Command, run_process


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("cli")
    write_tokenizer(root)
    return ["--model", str(write_family(root, "llama2", vocab_size=300)), "--load-format", "dummy"]


def test_generate_json(outrider: Command, model: list[str]) -> None:
    arguments = ["generate", "def main", *model, "--max-tokens", "12", "--json", "--seed", "7", "--temperature", "0.8"]
    results = [json.loads(outrider(*arguments, "--method", method).out) for method in ("none", "ngram")]
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert results[0]["text"] == results[1]["text"]
    assert set(results[1]) >= {"text", "token_ids", "finish_reason", "seed", "speculation", "timings"}
    assert results[1]["seed"] == 7
    assert results[1]["speculation"]["method"] == "ngram"
    assert all("acceptance_rate" in result["speculation"] for result in results)


def test_generate_streams_and_reads_standard_input(outrider: Command, model: list[str]) -> None:
    """As a process, which prints what the command prints in this one."""
    whole = outrider("generate", "def main", *model, "--max-tokens", "12")
    streamed = run_process("generate", "-", *model, "--max-tokens", "12", "--stream", stdin="def main")
    assert whole.code == streamed.returncode == 0
    assert streamed.stdout == whole.out
    assert "tokens per round" in whole.err
    assert "acceptance rate" in whole.err


def test_compare(outrider: Command, model: list[str]) -> None:
    done = outrider("compare", "def main", *model, "--max-tokens", "16", "--repeats", "1")
    assert done.code == 0, done.err
    assert "identical: yes" in done.out
    assert "acceptance rate" in done.out
    result = json.loads(outrider("compare", "def main", *model, "--max-tokens", "16", "--repeats", "1", "--json").out)
    assert result["identical"] is True
    assert result["plain"]["token_ids"] == result["speculative"]["token_ids"]


def test_doctor() -> None:
    done = run_process("doctor", "--json")
    assert done.returncode == 0, done.stdout
    checks = json.loads(done.stdout)
    names = {finding["name"] for finding in checks}
    assert {"processor", "gpu"} <= {finding["section"] for finding in checks} | names
    assert {"torch", "processor", "threads", "attention", "AMX tiles"} <= names


def test_a_mistake_ends_a_process_with_one_line(model: list[str]) -> None:
    """Many more, in this process: test_cli_mistakes.py."""
    done = run_process("generate", "def main", *model, "--temperature", "nan")
    assert done.returncode == 2
    assert "temperature" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error:")


def test_bad_models_are_one_line(outrider: Command, tmp_path: Path) -> None:
    done = outrider("generate", "x", "--model", str(tmp_path))
    assert done.code == 2
    assert "config.json is missing" in done.err
    assert "Traceback" not in done.err


def test_help_names_every_option() -> None:
    text = run_process("generate", "--help").stdout
    for option in (
        "--model",
        "--method",
        "--draft-model",
        "--draft-tokens",
        "--temperature",
        "--seed",
        "--max-tokens",
        "--stream",
    ):
        assert option in text
