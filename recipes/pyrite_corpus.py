"""The corpus of Pyrite: the Python source of every installed package, some packages held out.

Shared by the recipes for the target, the draft model and the heads; with a tokenizer given, only the
reading and encoding are done again, and the same files land in the same sets.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Well-known, middle-sized, of different kinds: parsing, networks, terminals, statistics, files.
HELDOUT = (
    "jinja2", "requests", "urllib3", "httpx", "click", "rich", "fsspec", "tqdm", "attr", "jsonschema",
    "gpytorch", "numpyro", "torchdiffeq", "asyncio", "email", "markdown", "botocore",
)  # fmt: skip
VOCAB = 8192
CONTEXT = 2048


def start_corpus(out: Path, tokenizer: Path | None = None, workers: int = 0, read_s: float = 60.0) -> subprocess.Popen[bytes]:
    """Prepare the corpus in a process of its own, so that the caller can compile meanwhile."""
    command = [sys.executable, "-m", "outrider.train", "corpus", "--installed", "--skip-unreadable", "--out", str(out)]
    command += ["--heldout", ",".join(HELDOUT), "--vocab", str(VOCAB), "--context", str(CONTEXT)]
    command += ["--workers", str(workers), "--seconds", str(read_s)]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else []
    return subprocess.Popen(command)


def start_small_corpus(out: Path, folders: list[Path], vocab: int, context: int) -> subprocess.Popen[bytes]:
    """The same on a few folders, for a trial on a CPU."""
    command = [sys.executable, "-m", "outrider.train", "corpus", *map(str, folders), "--out", str(out)]
    return subprocess.Popen([*command, "--vocab", str(vocab), "--context", str(context)])
