"""The recipe of the bundled model, in miniature: one command, everything collected at the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from outrider.heads import load_eagle, load_medusa
from outrider.model import load_decoder
from outrider.train.tokenizer import load_tokenizer

_ROOT = Path(__file__).parents[2]


def test_pyrite_target_in_miniature(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(_ROOT / "recipes" / "pyrite_target.py"), "--smoke", "--no-compile", "--minutes", "0.75"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT / "src")}
    subprocess.run([*command, "--out", str(out), "--work", str(tmp_path / "work")], env=environment, check=True)
    with tarfile.open(out / "pyrite.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    for shard in (out / "pyrite").iterdir():
        shutil.copy(shard, tmp_path / "pyrite")
    assert load_decoder(tmp_path / "pyrite").config.vocab == load_tokenizer(tmp_path / "pyrite").get_vocab_size()
    assert json.loads((tmp_path / "corpus.json").read_text())["tokens"]["train"] > 100_000
    assert json.loads((tmp_path / "result.json").read_text())["heldout_packages"]["loss"] < 6.0
    assert (tmp_path / "samples.txt").read_text().startswith("def fibonacci")
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 8


def test_pyrite_heads_in_miniature(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(_ROOT / "recipes" / "pyrite_heads.py"), "--smoke", "--no-compile", "--minutes", "0.6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT / "src")}
    subprocess.run([*command, "--out", str(out), "--work", str(tmp_path / "work")], env=environment, check=True)
    for name in ("eagle", "draft", "medusa", "heads"):
        with tarfile.open(out / f"{name}.tar") as tar:
            tar.extractall(tmp_path, filter="data")
    target = load_decoder(tmp_path / "work" / "target")
    assert load_eagle(tmp_path / "eagle", target).config.taps == (1, 2, 4)
    assert load_medusa(tmp_path / "medusa", target).config.heads == 2
    assert load_decoder(tmp_path / "draft").config.vocab == target.config.vocab
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"eagle", "draft", "medusa"}
    assert figures["eagle"]["temperature 0.8"]["rounds"] > 0
    assert len(list(out.iterdir())) <= 8
