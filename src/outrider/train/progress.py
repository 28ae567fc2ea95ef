"""The report of a run: a bar on a terminal, plain lines elsewhere, metrics as JSONL, a plot at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.charts import Series, legend, lines, page
from outrider.errors import OutriderError

__all__ = ["Report", "plot_metrics", "plot_panels"]


class Report:
    """Follows one run. `title` names it in every line."""

    def __init__(self, title: str, metrics: Path, resumed: bool = False) -> None:
        self._title = title
        self._path = metrics
        self._bar: Progress | None = None
        metrics.parent.mkdir(parents=True, exist_ok=True)
        if not resumed:
            metrics.write_text("")
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns)
            self._task = self._bar.add_task(title, total=1.0, note="")
            self._bar.start()

    def train(self, record: dict[str, Any], progress: float, left_s: float) -> None:
        """One line about training so far."""
        note = f"loss {record['loss']:.4f} · {_speed(record['tokens_per_s'])} · {left_s:,.0f} s left"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, note=note)
        else:
            print(f"{self._title}: step {record['step']} ({progress:4.0%}) {note}", flush=True)
        self._write({"kind": "train", **record})

    def evaluation(self, record: dict[str, Any]) -> None:
        """One line about held-out text."""
        self.log(", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()))
        self._write({"kind": "eval", **record})

    def log(self, text: str) -> None:
        """A line that does not break the bar."""
        if self._bar is not None:
            self._bar.console.print(f"{self._title}: {text}", markup=False)
        else:
            print(f"{self._title}: {text}", flush=True)

    def close(self) -> None:
        """End the bar and draw the plot."""
        if self._bar is not None:
            self._bar.stop()
        try:
            plot_metrics(self._path, self._path.with_suffix(".html"))
        except OSError as error:  # a full disk; the error that ended the run is reported by the loop
            self.log(f"no plot: {error}")

    def _write(self, record: dict[str, Any]) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise OutriderError(f"cannot write {self._path}: {error}; free some space, then resume") from error


def _speed(tokens_per_s: float) -> str:
    """A CPU trains some hundred tokens a second, a GPU some hundred thousand."""
    return f"{tokens_per_s:,.0f} tok/s" if tokens_per_s < 10_000 else f"{tokens_per_s / 1e3:,.0f}k tok/s"


def plot_panels(records: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Curves by unit, each unit a panel of the plot: (step, value) by name."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for record in records:
        figures = {"train": record["loss"]} if record["kind"] == "train" else record
        for name, value in figures.items():
            if name not in ("kind", "step") and isinstance(value, float):
                panels.setdefault(_unit(name), {}).setdefault(name, []).append((record["step"], value))
    return panels


def _unit(name: str) -> str:
    if name.endswith("_tokens_per_round"):
        return "tokens per round"
    return "share of first tokens right" if name.endswith("_first") else "nats per token"


def plot_metrics(metrics: Path, output: Path) -> None:
    """Draw the metrics over steps as an HTML page, with one chart for each unit."""
    panels = plot_panels([json.loads(line) for line in metrics.read_text().splitlines()])
    content = "<h1>Training</h1>"
    for unit, curves in panels.items():
        series = [Series(name, i, points) for i, (name, points) in enumerate(curves.items())]
        content += f"<section><h2>{unit.capitalize()}</h2>{legend(list(curves))}{lines(unit, series, ('step', unit))}</section>"
    output.write_text(page("Outrider training", content), encoding="utf-8")
