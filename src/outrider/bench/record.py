"""A benchmark as it is kept: results.jsonl, row by row with its conditions, and the report made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.display import WIDE, live_board, rows_table, show_failures
from outrider.bench.environment import environment
from outrider.bench.report import render_report
from outrider.bench.suite import Suite, run_suite
from outrider.bench.summary import MEANING
from outrider.bench.workloads import is_random, load_prompts
from outrider.errors import InvalidParameter
from outrider.ops import find_core

__all__ = ["read_rows", "record_suite", "write_report"]

_SHOWN = ("method", "workload", "temperature", "batch", "tok_s", "speedup", "tokens_per_round", "efficiency", "equal", "failed")
_INTERRUPTED = 130


def record_suite(suite: Suite, folder: Path | None, console: Console) -> int:
    """Run a suite, keep every row as soon as it is measured, and print one JSON line last; the exit code."""
    for name in suite.workloads:
        if not is_random(name):
            load_prompts(name)  # bad files fail before anything is loaded or written
    begun = datetime.now(UTC)
    folder = folder or Path("outrider-bench") / begun.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    marks = environment() | {"begun": begun.isoformat(timespec="seconds")} | _provenance(suite)
    interrupted = False
    path = folder / "results.jsonl"
    with path.open("w", encoding="utf-8") as file, live_board(console) as board:
        try:
            for row in run_suite(suite, board.say):
                file.write(json.dumps(row | {"conditions": marks}) + "\n")
                file.flush()
                board.add(row)
        except KeyboardInterrupt:
            interrupted = True
    rows = read_rows(path) if path.stat().st_size else []  # an interruption may come between keeping a row and showing it
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    console.print(rows_table(rows, console.width >= WIDE))
    show_failures(rows, console)
    if rows:
        console.print(f"{path}, {write_report(rows, folder)}", highlight=False, markup=False, soft_wrap=True)
    brief = {name: value for name, value in marks.items() if name != "meaning"}
    whole = [row for row in rows if row["category"] is None]
    print(json.dumps({"rows": [{name: row.get(name) for name in _SHOWN} for row in whole]} | brief), flush=True)
    if interrupted:
        console.print(f"interrupted: {len(rows)} finished rows are kept", highlight=False)
        return _INTERRUPTED
    return int(any(row["failed"] or row["equal"] < 1.0 for row in rows))


def _provenance(suite: Suite) -> dict[str, Any]:
    core, path = find_core()
    return {
        "model": suite.model or "Pyrite (bundled)",
        "core": f"native core {path}" if core is not None else f"products by torch ({path})",
        "suite": asdict(suite),
        "meaning": MEANING,
    }


def write_report(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """report.html from rows, written whole or not at all."""
    path, fresh = folder / "report.html", folder / "report.html.part"
    fresh.write_text(render_report(rows), encoding="utf-8")
    return fresh.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a results.jsonl."""
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidParameter("results", f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            assert {"method", "workload", "batch", "conditions"} <= row.keys()
        except (ValueError, AssertionError, AttributeError):
            raise InvalidParameter("results", f"{path}:{number} is not a row that `outrider bench` wrote") from None
        rows.append(row)
    if not rows:
        raise InvalidParameter("results", f"{path} holds no rows")
    return rows
