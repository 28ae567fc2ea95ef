"""The command on the bundled model: what it writes is served, by every drafter in its own precision, with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench.workloads import find_prompts
from outrider.cli import app
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.ops import find_core

PROMPTS = ["def read_config(path):\n    ", "class Stack:\n    def __init__(self"]


def quantise(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["quantize", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def pyrite_int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantised") / "pyrite-int4"
    result = quantise("--to", "int4", "--out", str(out), "--text", str(find_prompts("code")), "--json")
    report = json.loads(result.stdout)
    stored = sum(path.stat().st_size for path in bundled_model().glob("*.safetensors"))
    assert report["bytes"] < 0.7 * stored  # the embedding and output matrix is bf16, and was int8
    assert report["group_size"] == 128
    assert abs(report["change"]) < 0.04
    return out


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa", "ngram", "auto"])
def test_pyrite_in_int4_gives_the_same_tokens_with_speculation_on_and_off(pyrite_int4: Path, method: str) -> None:
    """The target is int4, the draft model and the heads beside it are int8 or bf16."""
    if find_core()[0] is None:
        pytest.skip("the native core is not built")
    settings = {"method": method} | ({} if method == "auto" else {"draft_tokens": 4, "adaptive": False})
    llm = LLM(pyrite_int4, speculation=settings, max_model_len=256)
    try:
        for params in (SamplingParams(max_tokens=40, temperature=0.0), SamplingParams(max_tokens=40, temperature=0.8, seed=5)):
            plain = llm.generate(PROMPTS, params, speculation=False)
            fast = llm.generate(PROMPTS, params)
            assert [r.outputs[0].token_ids for r in fast] == [r.outputs[0].token_ids for r in plain]
            if method in ("draft_model", "eagle", "medusa"):
                assert sum(r.outputs[0].speculation["accepted"] for r in fast) > 0
    finally:
        llm.close()


def test_the_draft_model_may_be_in_int4_too(pyrite_int4: Path, tmp_path: Path) -> None:
    """The bundled int8 target with an int4 draft model."""
    if find_core()[0] is None:
        pytest.skip("the native core is not built")
    draft = tmp_path / "draft"
    result = quantise(
        str(bundled_model() / "draft"), "--to", "int4", "--out", str(draft), "--text", str(pyrite_int4 / "config.json")
    )
    assert "loss" in result.stdout
    settings = {"method": "draft_model", "model": str(draft), "dtype": "auto", "draft_tokens": 4, "adaptive": False}
    llm = LLM(dtype="int8", speculation=settings, max_model_len=256)
    try:
        params = SamplingParams(max_tokens=40, temperature=0.0)
        fast, plain = llm.generate(PROMPTS, params), llm.generate(PROMPTS, params, speculation=False)
        assert [r.outputs[0].token_ids for r in fast] == [r.outputs[0].token_ids for r in plain]
        assert sum(r.outputs[0].speculation["accepted"] for r in fast) > 0
    finally:
        llm.close()


def test_what_the_command_refuses(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(InvalidParameter, match="gptq needs a text: --calibrate FILE"):
        quantise(*out, "--method", "gptq")
    with pytest.raises(InvalidParameter, match="rtn reads no text"):
        quantise(*out, "--method", "rtn", "--calibrate", str(tmp_path / "text"))
    with pytest.raises(InvalidParameter, match="known: rtn, gptq"):
        quantise(*out, "--method", "magic")
    with pytest.raises(InvalidParameter, match="cannot be read: No such file"):
        quantise(*out, "--text", str(tmp_path / "missing.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidParameter, match="text: holds no two tokens"):
        quantise(*out, "--text", str(tmp_path / "empty.txt"))
    assert not (tmp_path / "out").exists()
