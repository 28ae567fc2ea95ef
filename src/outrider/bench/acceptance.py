"""`outrider bench acceptance`: every method on the same prompts, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from outrider.engine.acceptance import measure_acceptance, read_prompts
from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

__all__ = ["bench_methods", "parse_method"]


def bench_methods(
    data: Path,
    model: str | None,
    methods: str,
    temperatures: Sequence[float],
    max_tokens: int,
    limit: int | None = None,
    check: bool = False,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure, show a table on standard error, and give the rows."""
    prompts = read_prompts(data, limit)
    settings = [parse_method(text) for text in methods.split(",")]
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for temperature in temperatures:
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
            plain = _plain(model, prompts, params, progress) if check else None
            for own in settings:
                task = progress.add_task(f"{own['name']} at {temperature:g}", total=len(prompts))
                llm = LLM(model, speculation={k: v for k, v in own.items() if k != "name"})
                found = measure_acceptance(llm, prompts, params, plain, partial(_advance, progress, task))
                rows.append({"method": own["name"]} | found.as_dict())
                progress.remove_task(task)
                console.print(_line(rows[-1]), highlight=False)
    console.print(_table(rows))
    return rows


def _plain(
    model: str | None, prompts: Sequence[str], params: SamplingParams, progress: Progress
) -> dict[str | tuple[int, ...], list[int]]:
    llm = LLM(model)
    task = progress.add_task(f"plain at {params.temperature:g}", total=len(prompts))
    out: dict[str | tuple[int, ...], list[int]] = {}
    for prompt in prompts:
        out[prompt] = llm.generate(prompt, params)[0].outputs[0].token_ids
        progress.advance(task)
    progress.remove_task(task)
    return out


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def _line(row: dict[str, Any]) -> str:
    """A finished row, at once: a long run that is stopped keeps what it has shown."""
    rate = _rate(row["tokens_per_round"])
    return f"{row['method']} at {row['temperature']:g}: {rate} tokens per round, {row['looping']:.0%} looping"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("method", "T", "tokens/round", "all", "loop", "accepted by position", "tok/s", "equal")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['temperature']:g}",
            _rate(row["tokens_per_round"]),
            _rate(row["tokens_per_round_all"]),
            f"{row['looping']:.0%}",
            " ".join(f"{share:.2f}" for share in row["by_position"][:6]),
            f"{row['tok_s']:.1f}",
            "-" if row["equal"] is None else f"{row['equal']:.0%}",
        )
    return table
