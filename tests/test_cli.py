"""The command line as a user meets it: real processes, exit codes, no tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import write_family, write_tokenizer


def outrider(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("cli")
    write_tokenizer(root)
    return ["--model", str(write_family(root, "llama2", vocab_size=300)), "--load-format", "dummy"]


def test_generate_json(model: list[str]) -> None:
    arguments = ["generate", "def main", *model, "--max-tokens", "12", "--json", "--seed", "7", "--temperature", "0.8"]
    results = [json.loads(outrider(*arguments, "--method", method).stdout) for method in ("none", "ngram")]
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert results[0]["text"] == results[1]["text"]
    assert set(results[1]) >= {"text", "token_ids", "finish_reason", "seed", "speculation", "timings"}
    assert results[1]["seed"] == 7
    assert results[1]["speculation"]["method"] == "ngram"


def test_generate_streams_and_reads_standard_input(model: list[str]) -> None:
    whole = outrider("generate", "def main", *model, "--max-tokens", "12")
    streamed = outrider("generate", "-", *model, "--max-tokens", "12", "--stream", stdin="def main")
    assert whole.returncode == streamed.returncode == 0
    assert streamed.stdout == whole.stdout
    assert "tokens per round" in whole.stderr


def test_compare(model: list[str]) -> None:
    done = outrider("compare", "def main", *model, "--max-tokens", "16", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "identical: yes" in done.stdout
    result = json.loads(outrider("compare", "def main", *model, "--max-tokens", "16", "--repeats", "1", "--json").stdout)
    assert result["identical"] is True
    assert result["plain"]["token_ids"] == result["speculative"]["token_ids"]


def test_doctor() -> None:
    done = outrider("doctor", "--json")
    assert done.returncode == 0, done.stdout
    checks = json.loads(done.stdout)
    names = {finding["name"] for finding in checks}
    assert {"processor", "gpu"} <= {finding["section"] for finding in checks} | names
    assert {"torch", "processor", "threads", "attention", "AMX tiles"} <= names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "100000"], "max_tokens"),
        (["--method", "telepathy"], "known: auto, cascade, draft_model"),
        (["--method", "draft_model"], "needs the directory"),
        (["--method", "ngram", "--draft-model", "x"], "--draft-model"),
        (["--rule", "typical"], "lossy_typical"),
        (["--json", "--stream"], "--stream"),
        (["--dtype", "int3"], "dtype"),
    ],
)
def test_mistakes_are_one_line(model: list[str], arguments: list[str], message: str) -> None:
    done = outrider("generate", "def main", *model, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error:")


def test_bad_models_are_one_line(tmp_path: Path) -> None:
    done = outrider("generate", "x", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "config.json is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_option() -> None:
    text = outrider("generate", "--help").stdout
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
