"""A benchmark on the terminal and on disk: a live table, results.jsonl row by row, and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.bench.environment import environment
from outrider.bench.report import render_report
from outrider.bench.suite import Suite, run_suite
from outrider.bench.summary import MEANING
from outrider.bench.validity import require_validator
from outrider.bench.workloads import is_random, load_prompts
from outrider.errors import InvalidParameter
from outrider.ops import find_core

__all__ = ["read_rows", "record_suite", "write_report"]

_SHOWN = (
    "method", "workload", "temperature", "batch", "tok_s", "tok_s_per_user", "speedup", "tokens_per_round",
    "mean_acceptance_length", "acceptance_rate", "accepted_by_position", "conversion", "efficiency", "complete", "valid",
    "equal", "failed",
)  # fmt: skip
_INTERRUPTED = 130
_LIVE_ROWS = 12  # newest rows shown while it runs
_EVERY_S = 0.25
_WIDE = 145  # columns of a terminal that shows everything
_PHASES = "dr/ve/ch/ho %"  # draft, verify, choose, host: shares of a round
_COLUMNS = (  # and whether they are details
    ("workload", False), ("T", False), ("batch", False), ("method", False), ("tok/s", False), ("speed-up", False),
    ("95 %", False), ("tok/round", False), ("accept", False), (_PHASES, True), ("TTFT ms", True), ("ITL ms", True),
    ("conv", True), ("effic", True), ("loop", True), ("valid", True), ("equal", False),
)  # fmt: skip


def record_suite(suite: Suite, folder: Path | None, console: Console) -> int:
    """Run a suite, keep every row as soon as it is measured, and print one JSON line last; the exit code."""
    for name in suite.workloads:
        if not is_random(name):
            load_prompts(name)  # bad files fail before anything is loaded or written
    if suite.schema or "constrained" in suite.workloads:
        require_validator()
    begun = datetime.now(UTC)
    folder = folder or Path("outrider-bench") / begun.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    conditions = environment() | {"begun": begun.isoformat(timespec="seconds")} | _provenance(suite)
    interrupted = False
    path = folder / "results.jsonl"
    with path.open("w", encoding="utf-8") as file, _live_board(console) as board:
        try:
            for row in run_suite(suite, board.say):
                file.write(json.dumps(row | {"conditions": conditions}) + "\n")
                file.flush()
                board.add(row)
        except KeyboardInterrupt:
            interrupted = True
    rows = read_rows(path) if path.stat().st_size else []  # an interruption may come between keeping a row and showing it
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(_rows_table(rows, console.width >= _WIDE))
    _show_failures(rows, console)
    if rows:
        console.print(f"{path}, {write_report(rows, folder)}", highlight=False, markup=False, soft_wrap=True)
    brief = {name: value for name, value in conditions.items() if name != "meaning"}
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
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("results", f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            assert {"method", "workload", "batch", "conditions"} <= row.keys()
        except (ValueError, AssertionError, AttributeError, RecursionError):
            raise InvalidParameter("results", f"{path}:{number} is not a row that `outrider bench` wrote") from None
        rows.append(row)
    if not rows:
        raise InvalidParameter("results", f"{path} holds no rows")
    return rows


class _Board:
    """Rows so far and what is running now. Drawn between measurements only, so that drawing is not measured."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._rows: list[dict[str, Any]] = []
        self._console = console
        self._live = live
        self._drawn = 0.0

    def say(self, text: str) -> None:
        """Show the current step."""
        if self._live is not None and time.monotonic() - self._drawn > _EVERY_S:
            self._live.update(
                Group(_rows_table(self._rows[-_LIVE_ROWS:], self._console.width >= _WIDE), Text(text, style="dim")), refresh=True
            )
            self._drawn = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        """A finished row."""
        self._rows.append(row)
        if self._live is None:
            self._console.print(_line(row), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _live_board(console: Console) -> Iterator[_Board]:
    """A table that grows on a terminal, one line per row elsewhere."""
    if not console.is_terminal:
        yield _Board(console, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Board(console, live)


def _rows_table(rows: Sequence[dict[str, Any]], wide: bool) -> Table:
    """One line per row, failures in red; `wide` adds phases and latencies."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, detail in _COLUMNS:
        if wide or not detail:
            words = name in ("workload", "method")
            table.add_column(name, no_wrap=True, justify="left" if words else "right", min_width=8 if words else len(name))
    for row in rows:
        cells = zip(_cells(row), _COLUMNS, strict=False)
        table.add_row(*(cell for cell, (_, detail) in cells if wide or not detail))
    return table


def _show_failures(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the failed rows, and those whose tokens differ from plain decoding."""
    for row in rows:
        if row["failed"] or row["equal"] < 1.0:
            console.print(_line(row), style="red", highlight=False, markup=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str | Text]:
    category = f" · {row['category']}" if row["category"] else ""
    head: list[str | Text] = [row["workload"] + category, f"{row['temperature']:g}", str(row["batch"]), row["method"]]
    if row["failed"]:
        return [*head, Text("failed", style="bold red")]
    low, high = row["speedup_interval"]
    shares = "/".join(f"{row['share_of_round'].get(name, 0) * 100:.0f}" for name in ("draft", "verify", "choose", "host"))
    better = "" if low == high else "green" if low > 1 else "red" if high < 1 else ""
    return [
        *head,
        f"{row['tok_s']:.0f}",
        Text(f"{row['speedup']:.2f}", style=better),
        "-" if low == high else f"{low:.2f} to {high:.2f}",
        _number(row["tokens_per_round"]),
        _share(row.get("acceptance_rate")),
        shares,
        _number(row["ttft_ms"] and row["ttft_ms"]["median"], 1),
        _number(row["itl_ms"] and row["itl_ms"]["median"], 1),
        _number(row.get("conversion")),
        _number(row["efficiency"]),
        f"{row['looping']:.0%}",
        _share(row.get("valid")),
        Text(f"{row['equal']:.0%}", style="green" if row["equal"] == 1.0 else "bold red"),
    ]


def _line(row: dict[str, Any]) -> str:
    category = f" ({row['category']})" if row["category"] else ""
    head = f"{row['workload']}{category}, T {row['temperature']:g}, batch {row['batch']}, {row['method']}: "
    if row["failed"]:
        return f"{head}failed: {row['failed']}"
    rate = f"{row['tok_s']:.0f} tok/s, speed-up {row['speedup']:.2f}, {_number(row['tokens_per_round'])} tokens per round"
    left_out = f", without {' and '.join(row['left_out'])}, which do not fit the context" if row.get("left_out") else ""
    valid = f", {_share(row['valid'])} valid" if "valid" in row else ""
    return f"{head}{rate}, acceptance rate {_share(row.get('acceptance_rate'))}, {row['equal']:.0%} equal{valid}{left_out}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
