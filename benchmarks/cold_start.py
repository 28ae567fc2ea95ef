"""What a new user sees first: `outrider compare` on a machine that has never run Outrider.

Each start has a separate empty cache, so costs are calibrated and nothing is known of earlier texts. Ends with 1 where a goal
is missed.

    python -m benchmarks.cold_start --starts 10 --out results/cold_start.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outrider.bench.environment import environment

PROMPT = "def load_config(path):"  # the README's
GOALS = {"0": 1.9, "0.8": 1.4}  # median speed-up over plain decoding, by temperature
FLOOR = 1.2  # of any single start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--starts", type=int, default=10, help="cold starts at each temperature, interleaved")
    options.add_argument(
        "--out", type=Path, help="a JSON file for the result, kept after every start; goes on with one that is there"
    )
    chosen = options.parse_args()
    speedups = _kept(chosen.out)
    for seed in range(1, chosen.starts + 1):
        for temperature, values in speedups.items():
            if len(values) < seed:
                values.append(round(compare_cold(temperature, seed)["speedup"], 3))
                print(f"temperature {temperature}, seed {seed}: {values[-1]:.2f} x", flush=True)
                if chosen.out is not None:
                    chosen.out.write_text(json.dumps(result(speedups), indent=1) + "\n")
    outcome = result(speedups)
    for temperature, row in outcome["speedups"].items():
        print(f"temperature {temperature}: median {row['median']:.2f} (goal {row['goal']}), lowest {row['lowest']:.2f} ({FLOOR})")
    sys.exit(0 if outcome["passed"] else 1)


def _kept(out: Path | None) -> dict[str, list[float]]:
    """Starts that were measured before the run was stopped."""
    if out is None or not out.exists():
        return {temperature: [] for temperature in GOALS}
    return {temperature: row["each"] for temperature, row in json.loads(out.read_text())["speedups"].items()}


def result(speedups: dict[str, list[float]]) -> dict[str, Any]:
    rows = {temperature: summary(values, GOALS[temperature]) for temperature, values in speedups.items()}
    passed = all(row["median"] >= row["goal"] and row["lowest"] >= FLOOR for row in rows.values())
    what = "Speed-up of a first `outrider compare` over plain decoding, from an empty cache"
    return environment() | {"what": what, "prompt": PROMPT, "floor": FLOOR, "passed": passed, "speedups": rows}


def compare_cold(temperature: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "outrider.cli", "compare", PROMPT, "--json"]
        command += ["--temperature", temperature, "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OUTRIDER_CACHE": cache}, check=True)
    comparison: dict[str, Any] = json.loads(done.stdout)
    assert comparison["identical"], "the tokens differ"
    return comparison


def summary(values: list[float], goal: float) -> dict[str, Any]:
    median, lowest = (statistics.median(values), min(values)) if values else (0.0, 0.0)
    return {"median": median, "goal": goal, "lowest": lowest, "each": values}


if __name__ == "__main__":
    main()
