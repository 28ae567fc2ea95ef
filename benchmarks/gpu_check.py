"""All tests on the GPU and the benchmark, in at most ten minutes; every number goes to results/gpu.jsonl as it comes.

    PYTHONPATH=src:. python -m benchmarks.gpu_check [--skip-tests] [--skip-transformers]

Each line holds the device, versions, command and commit beside its numbers. A part that fails says so in its line
and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_environment, measure_everything

ROOT = Path(__file__).parents[1]
_FAMILIES = ("llama", "gemma or glm", "phi or falcon", "qwen or olmo or ministral", "gpt or star or cohere")
PIECES = {  # of long files, by pytest's -k
    "test_attention.py": ("alone", "ratios or widths", "tree or chunks", "not (alone or ratios or widths or tree or chunks)"),
    "test_kernels.py": ("same_bits", "not same_bits"),
    "test_chains.py": ("not fit", "fit"),
    "test_families.py": (*_FAMILIES, f"not ({' or '.join(_FAMILIES)})"),
    "test_features.py": (
        "float32",
        "bfloat16",
        "plain_decoder",
        "ratios",
        "not (float32 or bfloat16 or plain_decoder or ratios)",
    ),
    "test_overlapped_rounds.py": ("next_round", "not next_round"),
    "test_quantised.py": ("fp8", "int4", "not (fp8 or int4)"),
    "test_same_tokens.py": ("auto", "draft_model", "trees", "bit_for_bit", "none or suffix"),
}
ALONE = [("test_chains.py", "fit")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu.jsonl")
    options = parser.parse_args()
    where = gpu_environment(ROOT)
    os.environ["OUTRIDER_CACHE"] = tempfile.mkdtemp()  # costs measured here, in this run
    with options.out.open("w") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(where | row) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)

        if not options.skip_tests:
            keep(tests())
        for name, part in measure_everything(transformers=not options.skip_transformers):
            run_part(name, part, keep)


def run_part(name: str, part: Callable[[], Iterator[dict[str, Any]]], keep: Callable[[dict[str, Any]], None]) -> None:
    begun = time.perf_counter()
    try:
        for row in part():
            keep({"part": name} | row)
    except Exception:
        keep({"part": name, "error": traceback.format_exc()[-1500:]})
    keep({"part": name, "seconds": round(time.perf_counter() - begun, 1)})


def tests() -> dict[str, Any]:
    """Every test, in processes side by side: compiling takes most of the time. What looks at free memory comes after."""
    begun = time.perf_counter()
    files = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    runs = [(name, part) for name in files for part in PIECES.get(name, ("",))]
    running = [pytest(*part) for part in runs if part not in ALONE]
    summaries = [finished(process) for process in running] + [finished(pytest(*part)) for part in runs if part in ALONE]
    return {"part": "tests", "passed": all(passed for passed, _ in summaries), "summary": [text for _, text in summaries],
            "seconds": round(time.perf_counter() - begun, 1)}  # fmt: skip


def pytest(name: str, chosen: str) -> subprocess.Popen[str]:
    options = "--confcutdir=tests/gpu -p no:cacheprovider -o filterwarnings=default -o addopts=-q"
    command = [sys.executable, "-m", "pytest", *options.split()]
    command += [*(["-k", chosen] if chosen else []), f"tests/gpu/{name}"]
    # costs measured while others run are useless, and so are more threads than processors
    environment = os.environ | {"OUTRIDER_CACHE": tempfile.mkdtemp(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[bool, str]:
    text, _ = process.communicate()
    if process.returncode:
        print(text[-3000:], flush=True)
    return process.returncode == 0, text.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
