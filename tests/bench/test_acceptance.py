"""The acceptance benchmark: method strings, rows, and equality counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.acceptance import bench_methods, parse_method
from outrider.errors import InvalidParameter


def test_method_strings() -> None:
    assert parse_method("ngram") == {"name": "ngram", "method": "ngram"}
    assert parse_method("eagle:24:beam=6:model=some/dir") == {
        "name": "eagle:24:beam=6:model=some/dir",
        "method": "eagle",
        "draft_tokens": 24,
        "beam": 6,
        "model": "some/dir",
    }
    with pytest.raises(InvalidParameter, match="neither a number"):
        parse_method("eagle:many")


def test_rows(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": text}) for text in ("import os\n", "def f(x):\n    return")))
    rows = bench_methods(data, None, "none,ngram:4,eagle:3", [0.0], max_tokens=16, check=True)
    assert [row["method"] for row in rows] == ["none", "ngram:4", "eagle:3"]
    for row in rows:
        assert row["equal"] == 1.0
        assert row["outputs"] == 2
        assert len(row["by_position"]) <= 4
    assert rows[0]["tokens_per_round_all"] == 1.0
    assert rows[2]["tokens_per_round_all"] > 1.5
