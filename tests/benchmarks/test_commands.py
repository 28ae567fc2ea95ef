"""Maintainers' benchmarks as commands: real processes that end in one JSON report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.model.bundled import bundled_model
from outrider.ops import find_core
from tests.support import write_family, write_tokenizer

ROOT = Path(__file__).parents[2]


def benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("benchmarks")
    write_tokenizer(root)
    return ["--model", str(write_family(root, "llama2", vocab_size=300)), "--load-format", "dummy"]


def test_round(model: list[str]) -> None:
    result = json.loads(benchmark("round", *model, "--rounds", "20").stdout)
    assert [row["temperature"] for row in result["rounds"]] == [0.0, 0.8]
    assert all(0 < row["outside_us"] < row["total_us"] for row in result["rounds"])
    assert result["noise"]["rows"] == 16


def test_loss(tmp_path: Path) -> None:
    """Rows and weights in int8 cost far less than 1 % of the loss; four bits cost more, and not much."""
    if find_core()[0] is None:
        pytest.skip(find_core()[1])
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "import os\n\n\ndef names(path):\n    return sorted(os.listdir(path))\n" * 4}))
    rows = json.loads(benchmark("loss", str(data)).stdout)["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16", "int8", "int4"]
    assert rows[0]["tokens"] > 50
    assert all(abs(row["change"]) < 0.01 for row in rows[:3])
    assert abs(rows[3]["change"]) < 0.1
    assert len({row["loss"] for row in rows}) == 4


def test_formats() -> None:
    """Four bits take half the bytes of eight; GPTQ costs less than rounding."""
    if find_core()[0] is None:
        pytest.skip(find_core()[1])
    draft = str(bundled_model() / "draft")
    rows = json.loads(benchmark("formats", "--model", draft, "--calibration-tokens", "2048", "--repeats", "1").stdout)["rows"]
    of = {(row["format"], row["group_size"]): row for row in rows}
    assert of["int4", 64]["file_bytes"] < of["int4", 32]["file_bytes"] < of["int8", 0]["file_bytes"]
    assert abs(of["int8", 0]["change"]) < 0.005
    for size in (32, 64):
        assert of["int4, GPTQ", size]["loss"] < of["int4", size]["loss"]
    assert all(ms > 0 for row in rows for ms in row["ms"].values())


def test_loading_gguf() -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the file")
    result = json.loads(benchmark("loading_gguf", "--model", "40m", "--repeats", "1").stdout)
    assert result["file_bytes"] > 20e6
    assert len(result["loads"]) == 1


def test_products() -> None:
    if find_core()[0] is None:
        pytest.skip(find_core()[1])
    rows = json.loads(benchmark("products", "--width", "256", "--rows", "1,4", "--rounds", "2").stdout)["rows"]
    assert len(rows) == 14
    assert all(row["us"] > 0 for row in rows)
    sizes = {row["kind"]: row["bytes_per_weight"] for row in rows}
    assert sizes["groups of 128"] < sizes["Q4_0"] < sizes["Q4_K"] < sizes["int8"] < sizes["Q8_0"] < sizes["Q6_K"]


def test_forward() -> None:
    settings = ["--models", "draft", "--rows", "1,3", "--context", "8", "--repeats", "2", "--dtypes", "bfloat16"]
    result = json.loads(benchmark("forward", *settings).stdout)
    assert result["context"] == 8
    assert [list(row["ms"]) for row in result["results"]] == [["1", "3"]]
    assert all(ms > 0 for ms in result["results"][0]["ms"].values())


def test_transformers_models() -> None:
    settings = ["--turns", "1", "--prompts", "2", "--batch", "2", "--tokens", "6"]
    (row,) = json.loads(benchmark("transformers_models", *settings).stdout)["results"]
    assert row["guarantee"] == {"tokens_guaranteed": True}
    assert row["editing"]["equal_texts"] == 1.0
    assert row["editing"]["speedup"] > 0
    assert row["loop"]["outrider_ms_per_token"] > 0


def test_lora(tmp_path: Path) -> None:
    output = tmp_path / "lora.json"
    settings = ["--adapters", "2", "--layers", "1", "--rounds", "4", "--threads", "1", "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks.lora", *settings]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=180, check=False)  # so few rounds may miss the limit
    result = json.loads(output.read_text())
    assert result["rounds"] == 4
    assert len(result["ratio_deciles"]) == 9
    assert result["plain_ms"]["tenth"] > 0


@pytest.mark.exhaustive
def test_tensor_parallel(tmp_path: Path) -> None:
    """A rank of a small model holds a share of its weights; what else it holds is too much of so little to be judged."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--model", "150m", "--ranks", "2", "--dtypes", "int8"]
    run = [*command, "--repeats", "1", "--tokens", "3", "--out", str(report)]
    subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    (result,) = json.loads(report.read_text())["results"]
    assert result["ranks"] == len(result["share_of_packed"]) == 2
    assert max(result["share_of_packed"]) < 0.95
    assert result["batch_8"]["ranks_tok_s"] > 0
