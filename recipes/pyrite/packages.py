"""Pyrite's corpus: the Python source of every installed package, with some packages held out.

The recipes for the target and for its drafters start it as a process. With the target's tokenizer the same files land in the
same sets, so that nothing the target was tested on is trained on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["CONTEXT", "HELDOUT", "ROOT", "VOCAB", "environment", "start_corpus", "start_small_corpus"]

# Well-known, middle-sized, of different kinds: parsing, networks, terminals, statistics, files.
HELDOUT = (
    "jinja2", "requests", "urllib3", "httpx", "click", "rich", "fsspec", "tqdm", "attr", "jsonschema",
    "gpytorch", "numpyro", "torchdiffeq", "asyncio", "email", "markdown", "botocore",
)  # fmt: skip
VOCAB = 8192
CONTEXT = 2048
ROOT = Path(__file__).resolve().parents[2]


def start_corpus(out: Path, tokenizer: Path | None = None, workers: int = 0, read_s: float = 60.0) -> subprocess.Popen[bytes]:
    """Prepare the corpus in another process, so that the caller can compile at the same time."""
    command = ["--installed", "--skip-unreadable", "--out", str(out), "--heldout", ",".join(HELDOUT)]
    command += ["--vocab", str(VOCAB), "--context", str(CONTEXT), "--workers", str(workers), "--seconds", str(read_s)]
    return _start([*command, "--tokenizer", str(tokenizer)] if tokenizer else command)


def start_small_corpus(out: Path, folders: list[Path], vocab: int, context: int) -> subprocess.Popen[bytes]:
    """Prepare a corpus of a few folders, for a smoke run on a CPU."""
    return _start([*map(str, folders), "--out", str(out), "--vocab", str(vocab), "--context", str(context)])


def environment() -> dict[str, str]:
    """The environment of a process that runs `python -m recipes.pyrite`."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _start(options: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "recipes.pyrite", "corpus", *options], env=environment())
