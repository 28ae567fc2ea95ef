"""The check at a size where heads pay, in miniature: from source to rows of figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from recipes.pyrite.packages import environment
from recipes.scale_check import METHODS

PROMPTS = ("import os\n\n\ndef f(x):\n", "class A:\n    def", "def load(path):\n")


def check(out: Path, *options: str) -> list[dict[str, object]]:
    """Run the command on one thread; the rows it has written."""
    command = [sys.executable, "-m", "recipes.scale_check", *options, "--out", str(out)]
    subprocess.run(command, env=environment() | {"OMP_NUM_THREADS": "1"}, check=True)
    rows: list[dict[str, object]] = json.loads(out.read_text())["rows"]
    return rows


def test_every_method_is_trained_and_served(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    common = (str(prompts), "--work", str(tmp_path / "work"), "--smoke", "--max-tokens=16")
    trained = check(tmp_path / "trained.json", *common, "--minutes=0.8", "--parts", "target", "drafters")
    assert [row["part"] for row in trained] == ["target", "drafters"]
    assert all("failed" not in row for row in trained)
    *rows, last = check(tmp_path / "served.json", *common, "--parts", "serve")
    assert [row["method"] for row in rows] == ["none", *(method.name for method in METHODS)]
    assert all(row.get("equal") == 1.0 and not row["fallbacks"] for row in rows), rows
    assert "failed" not in last
    (tmp_path / "work" / "drafters" / "scale_eagle" / "config.json").unlink()
    some = ("--parts", "serve", "--methods", "EAGLE-3 tree", "n-gram")
    _, failed, row, _ = check(tmp_path / "again.json", *common, *some)
    assert "config.json is missing" in str(failed["failed"])
    assert row["equal"] == 1.0
