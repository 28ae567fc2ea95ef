"""A small corpus of made-up packages, its tokens, and a small target trained on it: fixtures of tests/train and tests/recipes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.train.corpus import TokenCorpus
from recipes.pyrite.cli import app
from recipes.pyrite.corpus import CorpusRules
from recipes.pyrite.prepare import PrepareOptions, prepare
from recipes.pyrite.sources import find_sources

__all__ = ["module_text", "packages", "prepared", "target"]

_VERBS = ("load", "store", "parse", "merge", "count", "find", "sort", "draw")
_NOUNS = ("table", "page", "token", "branch", "record", "packet", "mirror", "engine")


def module_text(seed: int, functions: int = 12) -> str:
    """Plausible source; different seeds share no distinctive lines."""
    rng = random.Random(seed)
    parts = []
    for i in range(functions):
        verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
        name = f"{verb}_{noun}_{seed}_{i}"
        parts.append(f"def {name}(value_{seed}, {noun}):\n    total_{seed} = value_{seed} + {rng.randrange(99)}\n")
        parts.append(f"    for item_{seed}_{i} in {noun}:\n        total_{seed} += item_{seed}_{i}.{verb}()\n")
        parts.append(f"    return total_{seed}\n\n\n")
    return "".join(parts)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Five packages of four modules."""
    root = tmp_path / "packages"
    for p in range(5):
        folder = root / f"package{p}"
        folder.mkdir(parents=True)
        for m in range(4):
            (folder / f"module{m}.py").write_text(module_text(10 * p + m))
    return root


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> TokenCorpus:
    """Tokens of ten packages, one held out."""
    root = tmp_path_factory.mktemp("prepared")
    for p in range(10):
        folder = root / "text" / f"package{p}"
        folder.mkdir(parents=True)
        for m in range(4):
            (folder / f"module{m}.py").write_text(module_text(10 * p + m))
    rules = CorpusRules(heldout=("package3",), file_share=0.1, workers=1)
    sources = find_sources([root / "text"], [".py"])
    return prepare(sources, PrepareOptions(vocab=320, context=32, corpus=rules), root / "tokens", lambda _: None)


@pytest.fixture(scope="session")
def target(prepared: TokenCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the prepared corpus."""
    out = tmp_path_factory.mktemp("target") / "model"
    size = "--layers=4 --hidden=32 --heads=4 --kv-heads=2 --ffn=48 --context=32 --rows=4 --steps=150 --no-compile --device=cpu"
    command = ["lm", "--data", str(prepared.directory), "--out", str(out), *size.split(), "--lr=0.02", "--adam-lr=0.01"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return out
