"""What a run tells: a bar on a terminal, plain lines elsewhere, metrics as JSONL, a plot at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.errors import OutriderError

__all__ = ["Report", "plot_metrics"]


class Report:
    """Follows one run. `title` names it in every line."""

    def __init__(self, title: str, metrics: Path | None, resumed: bool = False) -> None:
        self._title = title
        self._path = metrics
        self._bar: Progress | None = None
        if metrics is not None:
            metrics.parent.mkdir(parents=True, exist_ok=True)
            if not resumed:
                metrics.write_text("")
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task(title, total=1.0, note="")
            self._bar.start()

    def train(self, record: dict[str, Any], progress: float, left_s: float) -> None:
        """One line about training so far."""
        note = f"loss {record['loss']:.4f} · {record['tokens_per_s'] / 1e3:,.0f}k tok/s · {left_s:,.0f} s left"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, note=note)
        else:
            print(f"{self._title}: step {record['step']} ({progress:4.0%}) {note}", flush=True)
        self._write({"kind": "train", **record})

    def evaluation(self, record: dict[str, Any]) -> None:
        """One line about held-out text."""
        self.say(", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()))
        self._write({"kind": "eval", **record})

    def say(self, text: str) -> None:
        """A line that does not break the bar."""
        if self._bar is not None:
            self._bar.console.print(f"{self._title}: {text}")
        else:
            print(f"{self._title}: {text}", flush=True)

    def close(self) -> None:
        """End the bar and draw the plot."""
        if self._bar is not None:
            self._bar.stop()
        if self._path is not None and not plot_metrics(self._path, self._path.with_suffix(".png")):
            self.say("no plot: matplotlib is not installed (pip install 'outrider[train]')")

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise OutriderError(f"cannot write {self._path}: {error}; free some space, then resume") from error


def plot_metrics(metrics: Path, image: Path) -> bool:
    """Draw losses over steps; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    train = [r for r in records if r["kind"] == "train"]
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], label="train", linewidth=1)
    evals = [r for r in records if r["kind"] == "eval"]
    for name in sorted({key for r in evals for key in r if key not in ("kind", "step")}):
        points = [(r["step"], r[name]) for r in evals if isinstance(r.get(name), float)]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name) if points else None
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
    return True
