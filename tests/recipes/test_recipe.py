"""The recipe of the bundled model, in miniature: one command, everything collected at the end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from outrider.heads import load_eagle, load_medusa
from outrider.model import load_decoder
from outrider.train.corpus import load_tokenizer
from recipes.pyrite.packages import environment


def test_pyrite_target_in_miniature(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_recipe("target", "--smoke", "--no-compile", "--minutes=0.75", "--out", str(out), "--work", str(tmp_path / "work"))
    with tarfile.open(out / "pyrite.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    for shard in (out / "pyrite").iterdir():
        shutil.copy(shard, tmp_path / "pyrite")
    assert load_decoder(tmp_path / "pyrite").spec.vocab == load_tokenizer(tmp_path / "pyrite").get_vocab_size()
    assert json.loads((tmp_path / "corpus.json").read_text())["tokens"]["train"] > 100_000
    assert json.loads((tmp_path / "result.json").read_text())["heldout_packages"]["loss"] < 6.0
    assert (tmp_path / "samples.txt").read_text().startswith("def fibonacci")
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 8


def run_recipe(name: str, *options: str) -> None:
    """Run `python -m recipes.pyrite.NAME` on one thread."""
    command = [sys.executable, "-m", f"recipes.pyrite.{name}", *options]
    subprocess.run(command, env=environment() | {"OMP_NUM_THREADS": "1"}, check=True)


def test_pyrite_heads_in_miniature(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    small = ("--smoke", "--no-compile", "--out", str(out))
    run_recipe("heads", *small, "--minutes=0.3", "--work", str(work))
    for name in ("eagle", "draft", "medusa", "heads"):
        with tarfile.open(out / f"{name}.tar") as tar:
            tar.extractall(tmp_path, filter="data")
    target = load_decoder(work / "target")
    assert load_eagle(tmp_path / "eagle", target).config.taps == (1, 2, 4)
    assert load_medusa(tmp_path / "medusa", target).config.heads == 2
    assert load_decoder(tmp_path / "draft").spec.vocab == target.spec.vocab
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"eagle", "draft", "medusa"}
    assert figures["eagle"]["temperature 0.8"]["rounds"] > 0
    assert len(list(out.iterdir())) <= 8

    rows = ("--row-tokens=96", "--write-share=0.8", "--stages", "medusa", "dflash", "--begin-from", str(tmp_path))
    made = ("--model", str(work / "target"), "--corpus", str(work / "target.work" / "corpus"))
    run_recipe("heads", *small, "--minutes=0.2", "--work", str(tmp_path / "again"), *rows, *made)
    with tarfile.open(out / "heads.tar") as tar:
        assert set(tar.getnames()) >= {"figures.json", "run-medusa-metrics.jsonl", "run-dflash-metrics.jsonl"}
        tar.extractall(tmp_path, filter="data")
    assert set(json.loads((tmp_path / "figures.json").read_text())["medusa"]["temperature 0.0"]["trees"]) == {
        "8", "16", "24", "32", "48", "64",
    }  # fmt: skip


@pytest.mark.parametrize("temperatures", [(0.8,), pytest.param((0.0, 0.8), marks=pytest.mark.exhaustive)])
def test_pyrite_served_in_miniature(tmp_path: Path, temperatures: tuple[float, ...]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):\n", "import os\n", "class A:\n")))
    size = ("--max-tokens=6", "--processes=1", "--shards=2", "--methods=ngram:4,medusa:8:dynamic=0")
    heat = f"--temperatures={','.join(map(str, temperatures))}"
    run_recipe("served", str(prompts), "--out", str(tmp_path / "rows.json"), *size, heat)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["temperature"], row["method"]) for row in rows] == [
        (temperature, method) for temperature in temperatures for method in ("medusa:8:dynamic=0", "ngram:4")
    ]
    assert all(row["equal"] == 1.0 and row["outputs"] == 3 for row in rows)
