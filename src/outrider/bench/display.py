"""What a benchmark shows on a terminal while it runs and when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

__all__ = ["WIDE", "Board", "live_board", "rows_table", "show_failures"]

_LIVE_ROWS = 12  # newest rows shown while it runs
_EVERY_S = 0.25
WIDE = 130  # columns of a terminal that shows everything
_PHASES = "dr/ve/ch/ho %"  # draft, verify, choose, host: shares of a round
_COLUMNS = (  # and whether they are details
    ("workload", False), ("T", False), ("batch", False), ("method", False), ("tok/s", False), ("speed-up", False),
    ("95 %", False), ("tok/round", False), (_PHASES, True), ("TTFT ms", True), ("ITL ms", True),
    ("efficiency", True), ("loop", True), ("equal", False),
)  # fmt: skip


class Board:
    """Rows so far and what is running now. Drawn between measurements only, so that drawing is not measured."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._rows: list[dict[str, Any]] = []
        self._console = console
        self._live = live
        self._drawn = 0.0

    def say(self, text: str) -> None:
        """What is being done."""
        if self._live is not None and time.monotonic() - self._drawn > _EVERY_S:
            self._live.update(
                Group(rows_table(self._rows[-_LIVE_ROWS:], self._console.width >= WIDE), Text(text, style="dim")), refresh=True
            )
            self._drawn = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        """A finished row."""
        self._rows.append(row)
        if self._live is None:
            self._console.print(_line(row), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def live_board(console: Console) -> Iterator[Board]:
    """A table that grows on a terminal, one line per row elsewhere."""
    if not console.is_terminal:
        yield Board(console, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Board(console, live)


def rows_table(rows: Sequence[dict[str, Any]], wide: bool) -> Table:
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


def show_failures(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Why each failed row failed, and which rows have other tokens than plain decoding."""
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
        shares,
        _number(row["ttft_ms"] and row["ttft_ms"]["median"], 1),
        _number(row["itl_ms"] and row["itl_ms"]["median"], 1),
        _number(row["efficiency"]),
        f"{row['looping']:.0%}",
        Text(f"{row['equal']:.0%}", style="green" if row["equal"] == 1.0 else "bold red"),
    ]


def _line(row: dict[str, Any]) -> str:
    category = f" ({row['category']})" if row["category"] else ""
    head = f"{row['workload']}{category}, T {row['temperature']:g}, batch {row['batch']}, {row['method']}: "
    if row["failed"]:
        return f"{head}failed: {row['failed']}"
    rate = f"{row['tok_s']:.0f} tok/s, speed-up {row['speedup']:.2f}, {_number(row['tokens_per_round'])} tokens per round"
    left_out = f", without {' and '.join(row['left_out'])}, which do not fit the context" if row.get("left_out") else ""
    return f"{head}{rate}, {row['equal']:.0%} equal{left_out}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
