"""Mistakes on the command line, in this process: one line on standard error and an exit code, whatever was typed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path

import pytest

from outrider import __version__
from outrider.ops import find_core
from outrider.terminal import PlainConsole, print_error
from tests.support import write_family, write_tokenizer
from tests.support.command import Command


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = write_tokenizer(tmp_path_factory.mktemp("cli"))
    return ["--model", str(write_family(root, "llama2", vocab_size=300, num_hidden_layers=1)), "--load-format", "dummy"]


def test_version(outrider) -> None:  # type: ignore[no-untyped-def]
    done = outrider("version")
    assert (done.code, done.out.strip()) == (0, __version__)
    for word in ("--version", "-V"):
        done = outrider(word)
        first, *details = done.out.strip().splitlines()
        assert (done.code, first) == (0, __version__)
        assert [line.split()[0] for line in details] == ["core", "python", "libraries", "installed"]
        core, python, libraries, _ = details
        names, path = find_core()
        assert platform.python_version() in python
        assert f"torch {importlib.metadata.version('torch')}" in libraries
        assert "none: torch computes" in core if names is None else f" {names.name}" in core, path


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["a\udcffb"], b"", "prompt: is not valid Unicode"),
        (["-"], b"a\xffb", "prompt: standard input is not valid UTF-8"),
        (["-"], b"", "prompt: must hold at least one token"),
        (["x", "--stop", "\udcff"], b"", "stop: is not valid Unicode"),
        (["x", "--memory", "2.5.1"], b"", "memory: must be a share such as 0.9, or a size such as 8GiB"),
        (["x", "--device", "[/x]"], b"", "device: unknown '[/x]'; known: auto, cpu, cuda"),
        (["x", "--method", "[/x]"], b"", "[/x]"),
        (["x", "--method", "ngram:ngram_min=x"], b"", "ngram_min: must be an integer"),
        (["x", "--method", "suffix:factor=inf"], b"", "factor: must be in"),
        (["x", "--method", "cascade"], b"", "--method 'cascade:levels=ngram+(draft_model:model=DIR)'"),
        (["x", "--method", "no.such:Class"], b"", "cannot import 'no.such'"),
        (["x", "--top-k", "-7"], b"", "top_k: must be in"),
        (["x", "--temperature", "nan"], b"", "temperature"),
        (["x", "--top-p", "0"], b"", "top_p"),
        (["x", "--max-tokens", "100000"], b"", "max_tokens"),
        (["x", "--method", "telepathy"], b"", "known: auto, cascade, dflash, draft_model"),
        (["x", "--method", "draft_model"], b"", "needs the directory"),
        (["x", "--method", "ngram", "--draft-model", "x"], b"", "--draft-model"),
        (["x", "--rule", "typical"], b"", "lossy_typical"),
        (["x", "--json", "--stream"], b"", "--stream"),
        (["x", "--dtype", "int3"], b"", "dtype"),
        (["x", "--threads", "99999999999"], b"", "--threads: must be at most"),
        (["x", "--threads", "9999"], b"", "--threads: must be at most"),
    ],
)
def test_mistakes_are_one_line(  # type: ignore[no-untyped-def]
    outrider, model: list[str], arguments: list[str], stdin: bytes, message: str
) -> None:
    done = outrider("generate", *arguments, *model, stdin=stdin)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculative-config", "[" * 100_000], "--speculative-config: is nested too deeply"),
        (["--speculative-config", "[" + "1," * 5000 + "1]"], "--speculative-config: must be a JSON object"),
        (["--max-body", "9" * 400 + "G"], "--max-body: must be a size"),
        (["--memory", "9" * 400], "--memory: must be a share"),
        (["--threads", "9999"], "--threads: must be at most"),
        (["--chat-template", "FILE"], "--chat-template: "),
        (["--config", "FILE"], "--config: "),
    ],
)
def test_mistakes_of_a_server_are_one_short_line(  # type: ignore[no-untyped-def]
    outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "0")
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    done = outrider("serve", *(str(tmp_path / "file") if word == "FILE" else word for word in arguments))
    assert (done.code, message in done.err, done.err.count("\n")) == (2, True, 1), done.err[:500]
    assert len(done.err) < 500


@pytest.mark.parametrize("content", [b"[" * 9999, b"\xff\xfe"])
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "report", "FILE"),
        ("bench", "acceptance", "FILE"),
        ("bench", "run", "--quick", "--workloads", "FILE"),
        ("bench", "run", "--quick", "--schema", "FILE"),
        ("bench", "agent", "--recordings", "FILE"),
    ],
)
def test_files_that_are_no_json_are_one_line(outrider, tmp_path: Path, command: tuple[str, ...], content: bytes) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "file.jsonl"
    file.write_bytes(content)
    done = outrider(*(str(file) if word == "FILE" else word for word in command))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err[:500]
    assert "file.jsonl" in done.err


def test_a_null_character_is_text(outrider, model: list[str]) -> None:  # type: ignore[no-untyped-def]
    assert outrider("generate", "-", *model, "--max-tokens", "2", "--method", "none", stdin=b"a\0b").code == 0


@pytest.mark.parametrize("path", ["[/x]", "x" * 5000, "./[bold]", "~nobody-of-that-name", "a.gguf"])
def test_models_that_are_none(outrider, path: str) -> None:  # type: ignore[no-untyped-def]
    done = outrider("generate", "x", "--model", path)
    assert done.code == 2
    assert path[:20] in done.err
    assert "Traceback" not in done.err


def test_what_cannot_be_written_is_one_line(outrider, model: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    (tmp_path / "results.jsonl").write_text("")
    done = outrider("bench", "--quick", *model, "--methods", "none", "--output", str(tmp_path / "file" / "below"))
    assert done.code in (1, 2)
    assert "error: " in done.err
    assert "Traceback" not in done.err


def test_bench_alone_explains_itself(outrider) -> None:  # type: ignore[no-untyped-def]
    done = outrider("bench")
    assert done.code == 0
    assert "outrider bench --quick" in re.sub(r"\s+", " ", done.out)
    for command in ("run", "acceptance", "serve", "never-slower"):
        assert command in done.out


@pytest.mark.parametrize(
    ("command", "module"),
    [(("peers", "--quick"), "baselines"), (("bench", "http", "-h"), "serve_http"), (("plan", "--check"), "plan_check")]
    + [
        (("bench", name, "--threads", "1", "more"), name)
        for name in ("round", "forward", "loss", "synthetic", "batching", "soak")
    ]
    + [(("bench", name), name) for name in ("proposal", "load")],
)
def test_commands_that_moved_say_where_they_are(outrider, command: tuple[str, ...], module: str) -> None:  # type: ignore[no-untyped-def]
    done = outrider(*command)
    assert done.code == 2
    assert f"`python -m benchmarks.{module}`" in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert importlib.util.find_spec(f"benchmarks.{module}") is not None


def test_bench_with_options_runs(outrider, model: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = ["--methods", "ngram", "--quick", "--limit", "1", "--max-tokens", "4", "--repeats", "1"]
    done = outrider("bench", *settings, *model, "--workloads", "random:8", "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "results.jsonl").exists()


def test_bench_acceptance_goes_on_without_a_drafter(outrider, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from outrider.model import LoadOptions, load_decoder, save_decoder, write_config

    folder = write_tokenizer(tmp_path / "model")
    decoder = load_decoder(write_family(tmp_path / "config", "llama2", vocab_size=300), LoadOptions(load_format="dummy"))
    save_decoder(decoder, folder)
    write_config(decoder.spec, folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def main"}) + "\n")
    arguments = ["bench", "acceptance", str(prompts), "--model", str(folder), "--temperatures", "0", "--max-tokens", "4"]
    done = outrider(*arguments, "--methods", "eagle:4,ngram:4")
    rows = [json.loads(line) for line in done.out.splitlines()][1:]
    assert [row["method"] for row in rows] == ["eagle:4", "ngram:4"]
    assert "needs the directory" in rows[0]["missing"]
    assert rows[1]["tokens_per_round"]
    assert "eagle:4 was left out: " in done.err
    assert done.code == 1, "the method was named"
    assert outrider(*arguments, "--methods", "egle").code == 2


def test_serve_takes_the_model_by_name(outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OUTRIDER_PORT", "0")
    for arguments in (["--model", str(tmp_path)], [f"--model={tmp_path}"], [str(tmp_path)]):
        done = outrider("serve", *arguments)
        assert f"{tmp_path}/config.json is missing" in done.err, done.err
    assert outrider("serve", "x", "--model", "y").code == 2
    assert "--model: needs a model directory or hub id" in outrider("serve", "--model").err


def test_a_class_is_found_in_the_current_folder(  # type: ignore[no-untyped-def]
    outrider, model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_drafter_here.py").write_text("from outrider.draft.none import NoDrafter\n\nclass Mine(NoDrafter):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", os.getcwd())])  # as a script has it
    done = outrider("generate", "x", *model, "--max-tokens", "2", "--method", "a_drafter_here:Mine", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["speculation"]["method"] == "a_drafter_here:Mine"


def test_markup_is_text(capfd: pytest.CaptureFixture[str]) -> None:
    print_error("[/x] pip install 'outrider[otel]' :smile:")
    with PlainConsole(stderr=True).status("[/x]") as status:
        status.update("[/y] [bold]")
    assert capfd.readouterr().err.startswith("error: [/x] pip install 'outrider[otel]' :smile:\n")


def test_tables_show_brackets(capfd: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("[/x]", title="[bold]")
    table.add_row("outrider[otel]")
    PlainConsole().print(table)
    printed = capfd.readouterr().out
    assert all(word in printed for word in ("[/x]", "[bold]", "outrider[otel]"))
