"""`outrider bench serve`: latencies, throughput and goodput of a running server, load by load."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.bench.client import Endpoint, Level, ServedAnswer, find_model, run_level
from outrider.bench.environment import environment
from outrider.errors import InvalidParameter
from outrider.quantiles import quantile

__all__ = ["bench_server", "parse_goodput", "summarise_level"]

_LIMITS = ("ttft", "tpot", "e2el")
_INTERRUPTED = 130


def parse_goodput(terms: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from `ttft:200`, `tpot:50`, `e2el:4000`, several in one word joined by commas."""
    limits: dict[str, float] = {}
    for term in (part for word in terms for part in word.replace(",", " ").split()):
        name, _, value = term.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in _LIMITS or limits[name] <= 0:
            raise InvalidParameter("--goodput", f"{term!r} is not one of {', '.join(f'{name}:MS' for name in _LIMITS)}")
    return limits


def bench_server(
    endpoint: Endpoint,
    levels: Sequence[Level],
    prompts: Sequence[str],
    goodput: dict[str, float],
    console: Console,
    output: Path | None = None,
) -> int:
    """Load the server level by level, show a table, print one JSON line last; the exit code."""
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        if not endpoint.model:
            endpoint = replace(endpoint, model=asyncio.run(find_model(endpoint)))
        asyncio.run(run_level(endpoint, Level(concurrency=1), prompts[:1], 0, lambda _: None))  # connections, lazy loading
        for number, level in enumerate(levels):
            with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task(str(level), total=len(prompts))
                answers, seconds = asyncio.run(
                    run_level(endpoint, level, prompts, number, lambda _: progress.advance(task))  # noqa: B023
                )
            rows.append(summarise_level(level, answers, seconds, goodput))
            _print_level(rows[-1], str(level), console)
    except KeyboardInterrupt:
        interrupted = True
    console.print(_table(rows))
    result = {
        "rows": rows,
        "url": endpoint.url,
        "model": endpoint.model,
        "chat": endpoint.chat,
        "request": endpoint.body,
    } | environment()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    return _INTERRUPTED if interrupted else int(any(row["failed"] for row in rows))


def summarise_level(level: Level, answers: Sequence[ServedAnswer], seconds: float, goodput: dict[str, float]) -> dict[str, Any]:
    """The numbers of one load, named as vLLM's benchmark names them."""
    good = [answer for answer in answers if answer.failed is None]
    row: dict[str, Any] = {
        "load": str(level),
        "request_rate": level.rate if level.rate is None or math.isfinite(level.rate) else str(level.rate),
        "max_concurrency": level.concurrency,
        "num_prompts": len(answers),
        "completed": len(good),
        "failed": len(answers) - len(good),
        "failures": dict(Counter(answer.failed for answer in answers if answer.failed is not None).most_common(5)),
        "duration": seconds,
        "total_input_tokens": sum(answer.prompt_tokens for answer in good),
        "total_output_tokens": sum(answer.tokens for answer in good),
        "tokens_counted_by": "server" if all(answer.counted for answer in good) else "pieces",
        "request_throughput": len(good) / seconds,
        "output_throughput": sum(answer.tokens for answer in good) / seconds,
        "total_token_throughput": sum(answer.tokens + answer.prompt_tokens for answer in good) / seconds,
    }
    if goodput:
        met = sum(
            all(value is None or value <= goodput[name] for name, value in _latencies(answer).items() if name in goodput)
            for answer in good
        )
        row |= {"goodput_limits_ms": goodput, "request_goodput": met / seconds, "goodput_share": met / len(answers)}
    columns = {name: [value for answer in good if (value := _latencies(answer)[name]) is not None] for name in _LIMITS}
    columns["itl"] = [gap * 1e3 for answer in good for gap in answer.gaps]
    for name, values in columns.items():
        for kind, pick in _STATISTICS.items():
            row[f"{kind}_{name}_ms"] = pick(values) if values else None
    return row


_STATISTICS: dict[str, Any] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "p90": lambda values: quantile(values, 0.9),
    "p99": lambda values: quantile(values, 0.99),
}


def _latencies(answer: ServedAnswer) -> dict[str, float | None]:
    per_token = answer.per_token_s
    return {"ttft": answer.first_s * 1e3, "tpot": None if per_token is None else per_token * 1e3, "e2el": answer.total_s * 1e3}


def _print_level(row: dict[str, Any], name: str, console: Console) -> None:
    if not console.is_terminal:
        console.print(f"{name}: {row['completed']} of {row['num_prompts']} done in {row['duration']:.1f} s", highlight=False)
    for reason, count in row["failures"].items():
        console.print(f"{name}: {count} failed: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("load", "done", "req/s", "tok/s", "good/s", *(f"{name} ms\np50/p99" for name in ("TTFT", "TPOT", "ITL")))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["load"],
            f"{row['completed']}/{row['num_prompts']}",
            f"{row['request_throughput']:.2f}",
            f"{row['output_throughput']:.0f}",
            f"{row['request_goodput']:.2f}" if "request_goodput" in row else "-",
            *(_pair(row, name) for name in ("ttft", "tpot", "itl")),
        )
    return table


def _pair(row: dict[str, Any], name: str) -> str:
    median, worst = row[f"median_{name}_ms"], row[f"p99_{name}_ms"]
    return "-" if median is None else f"{median:.3g}/{worst:.3g}"
