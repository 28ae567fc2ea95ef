"""`outrider models`, and the tables that README.md and docs/models.md have from it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench.models import families_page, features_table
from outrider.cli import app
from outrider.engine.llm import LLM
from outrider.model.backends import CPU
from outrider.model.families import FAMILIES
from outrider.model.listing import amount
from tests.support import write_family

ROOT = Path(__file__).parents[2]
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "sliding_window": 16, "dtype": "bfloat16"}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


def test_the_tables_of_the_documents_are_the_command_s() -> None:
    assert features_table() in (ROOT / "README.md").read_text()
    assert families_page() in (ROOT / "docs" / "models.md").read_text()
    assert run("--markdown").strip() == families_page()


def test_families_and_features_are_listed() -> None:
    shown, listed = run(), json.loads(run("--json"))
    assert [family["name"] for family in listed["families"]] == [family.name for family in FAMILIES]
    assert {name for name, has in listed["features"].items() if not has["cpu"]} == CPU.lacks
    assert all(has["plain"] for has in listed["features"].values())
    assert all(family.name in shown for family in FAMILIES)


def test_a_directory_is_told_what_it_needs(tmp_path: Path) -> None:
    plain = run(str(write_family(tmp_path / "llama", "llama2")))
    assert "runs on cpu and cuda" in plain
    gemma = write_family(tmp_path / "gemma", "llama2", **GEMMA)
    needs = json.loads(run(str(gemma), "--json"))
    assert needs["features"] == sorted(needs["features"])
    assert {"attention soft cap", "norm after a part", "sliding window"} <= set(needs["features"])
    assert needs["windows"] == "16 in 1, full in 1 layers"
    for backend, missing in needs["missing"].items():
        assert all(f"{backend} lacks" in needs["verdict"] and name in needs["verdict"] for name in missing)
    assert needs["bytes"] == 2 * needs["parameters"]


def test_a_hybrid_is_told_its_state(tmp_path: Path) -> None:
    hybrid = str(write_family(tmp_path, "qwen3.5"))
    shown, needs = run(hybrid), json.loads(run(hybrid, "--json"))
    assert f"{amount(needs['state_bytes'])}B of each sequence, in 2 recurrent layers" in shown
    assert "runs on cuda; cpu lacks gated delta rule, output gate" in shown


def test_what_was_loaded_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gemma = write_family(tmp_path, "llama2", **GEMMA)
    with caplog.at_level(logging.INFO, logger="outrider"):
        llm = LLM(gemma, load_format="dummy", speculation="none", max_model_len=32)
    (line,) = [message for message in caplog.messages if "parameters" in message]
    assert line.startswith(f"{gemma}: gemma2 (Gemma2ForCausalLM), {amount(llm.config.parameters)} parameters, ")
    assert "as bfloat16; features by " in line
    assert "attention soft cap" in line


def test_amounts_have_three_digits() -> None:
    assert [amount(n) for n in (7, 1234, 39_600_000, 999_700_000, 8.03e9)] == ["7", "1.23k", "39.6M", "1G", "8.03G"]
    assert amount(8.03e9, "B") == "8.03B"
