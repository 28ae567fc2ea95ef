"""`outrider bench serve`: latencies, throughput and goodput of a running server, load by load."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

__all__ = ["ServerLoads", "bench_server", "crossover", "parse_goodput", "summarise_level"]

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


@dataclass(frozen=True, slots=True)
class ServerLoads:
    """What a server is loaded with, and what is counted."""

    levels: Sequence[Level]
    prompts: Sequence[str]
    goodput: dict[str, float]
    devices: int = 1  # that the server runs on


def bench_server(
    endpoint: Endpoint, loads: ServerLoads, console: Console, output: Path | None = None, plain: Endpoint | None = None
) -> int:
    """Load the server level by level, show a table, print one JSON line last; the exit code.

    With `plain`, where the same requests are decoded without speculation, the two take turns at each level.
    """
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        if not endpoint.model:
            endpoint = replace(endpoint, model=asyncio.run(find_model(endpoint)))
        sides = [endpoint] if plain is None else [endpoint, replace(plain, model=plain.model or endpoint.model)]
        for side in sides:  # connections, lazy loading
            asyncio.run(run_level(side, Level(concurrency=1), loads.prompts[:1], 0, lambda _: None))
        for number, level in enumerate(loads.levels):
            rows += _measure(sides, level, loads, number, console)
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
    if plain is not None:
        result["crossover"] = meeting = crossover(rows)
        console.print(_verdict(rows, meeting), highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    return _INTERRUPTED if interrupted else int(any(row["failed"] for row in rows))


def _measure(sides: Sequence[Endpoint], level: Level, loads: ServerLoads, number: int, console: Console) -> list[dict[str, Any]]:
    """A row for each side: all prompts once, or twice each in the order on, off, off, on."""
    answers: list[list[ServedAnswer]] = [[] for _ in sides]
    seconds = [0.0] * len(sides)
    turns = [0] if len(sides) == 1 else [0, 1, 1, 0]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(str(level), total=len(loads.prompts) * len(turns))
        for side in turns:
            got, spent = asyncio.run(run_level(sides[side], level, loads.prompts, number, lambda _: progress.advance(task)))
            answers[side] += got
            seconds[side] += spent
    rows = [summarise_level(level, *each, loads.goodput, loads.devices) for each in zip(answers, seconds, strict=True)]
    if len(sides) > 1:
        ratio = rows[0]["output_throughput"] / rows[1]["output_throughput"] if rows[1]["output_throughput"] else None
        rows = [{"speculation": True, "speedup": ratio} | rows[0], {"speculation": False, "speedup": 1.0} | rows[1]]
    for row in rows:
        _print_level(row, str(level), console)
    return rows


def crossover(rows: Sequence[dict[str, Any]]) -> float | None:
    """The load above which speculation is no longer quicker, on the line between two measured loads in their logarithm.

    None where it is quicker at all of them, 0 where at none, both up to the first load that is not.
    """
    last = None
    for load, ratio in _ratios(rows):
        if ratio <= 1.0:
            if last is None:
                return 0.0
            low, above = last
            return math.exp(math.log(low) + (above - 1.0) / (above - ratio) * (math.log(load) - math.log(low)))
        last = load, ratio
    return None


def _ratios(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Loads in rising order, and the throughput with speculation over that without."""
    loads = [(float(row["max_concurrency"] or row["request_rate"]), row["speedup"]) for row in rows if row.get("speculation")]
    return sorted((load, ratio) for load, ratio in loads if ratio is not None and math.isfinite(load))


def _verdict(rows: Sequence[dict[str, Any]], meeting: float | None) -> str:
    ratios = _ratios(rows)
    if not ratios:
        return "no load was measured with and without speculation"
    unit = "requests per second" if rows[0]["max_concurrency"] is None else "requests at once"
    if meeting is None:
        return f"speculation is quicker at every load measured, up to {ratios[-1][0]:g} {unit}"
    if meeting == 0.0:
        return f"speculation is no quicker at {ratios[0][0]:g} {unit}, the smallest load measured"
    return f"speculation and plain decoding meet at about {meeting:.3g} {unit}"


def summarise_level(
    level: Level, answers: Sequence[ServedAnswer], seconds: float, goodput: dict[str, float], devices: int = 1
) -> dict[str, Any]:
    """The numbers of one load, named as vLLM's benchmark names them."""
    good = [answer for answer in answers if answer.failed is None]
    users = [1.0 / each for answer in good if (each := answer.per_token_s)]
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
        "output_throughput_per_device": sum(answer.tokens for answer in good) / seconds / devices,
        "output_throughput_per_user": statistics.fmean(users) if users else None,
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
    compared = any("speculation" in row for row in rows)
    sides = ("speculation", "speed-up") if compared else ()
    times = (f"{name} ms\np50/p99" for name in ("TTFT", "TPOT", "ITL"))
    columns = ("load", *sides, "done", "req/s", "tok/s", "tok/s\nper user", "good/s", *times)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["load"],
            *(("on" if row["speculation"] else "off", _number(row["speedup"])) if compared else ()),
            f"{row['completed']}/{row['num_prompts']}",
            f"{row['request_throughput']:.2f}",
            f"{row['output_throughput']:.0f}",
            _number(row["output_throughput_per_user"]),
            f"{row['request_goodput']:.2f}" if "request_goodput" in row else "-",
            *(_pair(row, name) for name in ("ttft", "tpot", "itl")),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _pair(row: dict[str, Any], name: str) -> str:
    median, worst = row[f"median_{name}_ms"], row[f"p99_{name}_ms"]
    return "-" if median is None else f"{median:.3g}/{worst:.3g}"
