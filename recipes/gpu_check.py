"""All tests on the GPU and the benchmark, in at most ten minutes; every number goes to results/gpu.jsonl as it comes.

    python recipes/gpu_check.py [--skip-tests] [--skip-transformers]

Each line holds the device, versions, command and commit beside its numbers. A part that fails says so in its line
and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider.bench.gpu import conditions_on_gpu, measure_everything

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu.jsonl")
    given = parser.parse_args()
    where = conditions_on_gpu(ROOT)
    with given.out.open("w") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(where | row) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)

        if not given.skip_tests:
            keep(tests())
        for name, part in measure_everything(transformers=not given.skip_transformers):
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
    begun = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "--noconftest", "-o", "filterwarnings=default", "-q", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:], flush=True)
    return {"part": "tests", "passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1],
            "seconds": round(time.perf_counter() - begun, 1)}  # fmt: skip


if __name__ == "__main__":
    main()
