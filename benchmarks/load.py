"""`python -m benchmarks.load`: many streams at once, some of them left; every finished text must be what it is alone."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import close_report, errors, run
from benchmarks.server import Observations, ServerProcess, client_of, is_idle, observing, stats_of, stats_when_idle
from outrider.bench.workloads import find_prompts
from outrider.engine.acceptance import read_prompts
from outrider.quantiles import percentile_ms

__all__ = ["LoadPlan", "main", "run_load"]

_HEALTH_EVERY_S, _MEMORY_EVERY_S = 0.1, 2.0
_PROBES = 50
_IDLE_S = 5.0  # sequences whose client left are cleared away within a round
_GROWTH = 1.05  # of resident memory, from after the first third to the end


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests: how many at once, for how long."""

    streams: int
    seconds: float
    cancel: float  # share of requests left before their end
    tokens: int
    seed: int
    kinds: int = 64  # different requests


@dataclass(slots=True)
class LoadResult(Observations):
    """What came of the requests, and what was seen of the server meanwhile."""

    finished: list[tuple[int, str, int]] = field(default_factory=list)  # which request, its text, its tokens
    cancelled: int = 0
    first_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)


def main(
    model: Annotated[str | None, typer.Option(help="Model directory or hub id. Default: the bundled model.")] = None,
    method: Annotated[str, typer.Option(help="How the server drafts.")] = "auto",
    streams: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 100,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of load.")] = 5.0,
    cancel: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests whose client leaves.")] = 0.2,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a request.")] = 96,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences the server runs at once.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for the report, as JSON.")] = None,
) -> None:
    """Load a server that it starts: no failures, every finished text equal to its solo run, memory flat, /health quick."""
    plan = LoadPlan(streams, 60 * minutes, cancel, tokens, seed)
    arguments = [*([model] if model else []), "--method", method, "--max-num-seqs", str(max_num_seqs)]
    with errors.status("the server loads"):
        server = ServerProcess([*arguments, "--max-queue", str(streams)])
    try:
        with errors.status(f"{streams} streams for {minutes:g} minutes"):
            seen, idle = asyncio.run(run_load(server, plan, max_num_seqs + streams))
    finally:
        code = server.stop()
    with errors.status("the same requests alone"):
        unequal, different = check_texts(model, plan, seen)
    report = summarise(plan, seen, idle, unequal) | {"checked_against": f"{different} solo runs", "exit_code": code}
    report["passed"] = passed(report)
    close_report(report, output)


async def run_load(server: ServerProcess, plan: LoadPlan, room: int) -> tuple[LoadResult, dict[str, Any]]:
    """Load the server. Returns the observations and the server's statistics at the end."""
    seen, until = LoadResult(), time.monotonic() + plan.seconds
    async with observing(server, seen, _HEALTH_EVERY_S, _MEMORY_EVERY_S):
        await asyncio.gather(*(_client(server.port, plan, number, until, seen) for number in range(plan.streams)))
    await _overfill(server.port, plan, room, seen)
    async with client_of(server.port) as client:
        return seen, await stats_when_idle(client, _IDLE_S)


def requests_of(plan: LoadPlan) -> list[dict[str, Any]]:
    """The different requests: prompts of code, greedy and sampled, short and long."""
    draw = random.Random(plan.seed)
    prompts = read_prompts(find_prompts("code"))
    return [
        {
            "prompt": prompts[i % len(prompts)],
            "max_tokens": draw.randint(max(1, plan.tokens // 4), plan.tokens),
            "temperature": draw.choice([0.0, 0.8, 1.0]),
            "top_p": draw.choice([1.0, 0.95]),
            "seed": draw.randrange(2**31),
        }
        for i in range(plan.kinds)
    ]


async def _client(port: int, plan: LoadPlan, number: int, until: float, seen: LoadResult) -> None:
    draw = random.Random(plan.seed * 1_000_003 + number)
    requests = requests_of(plan)
    async with client_of(port) as client:
        while time.monotonic() < until:
            which = draw.randrange(len(requests))
            leave = draw.randrange(0, 12) if draw.random() < plan.cancel else None
            answer = await client.stream(requests[which], leave)
            if answer.cancelled:
                seen.cancelled += 1
            elif answer.failed is not None:
                seen.failures[answer.failed[:200]] += 1
            else:
                seen.finished.append((which, answer.text, answer.tokens))
                seen.first_s.append(answer.first_s)


async def _overfill(port: int, plan: LoadPlan, room: int, seen: LoadResult) -> None:
    """Fill the queue, and measure how soon one more request is refused."""
    body = requests_of(plan)[0] | {"max_tokens": 1000, "ignore_eos": True}
    client = client_of(port)
    await stats_when_idle(client, _IDLE_S)
    held = [asyncio.create_task(client.stream(body)) for _ in range(room)]
    while (stats := await stats_of(client))["running"] + stats["waiting"] < room:
        if any(task.done() for task in held):
            seen.failures["the queue could not be filled"] += 1
            break
        await asyncio.sleep(0.05)
    for _ in range(_PROBES):
        answer = await client.stream(body)
        seen.refusals_s.append(answer.total_s)
        if answer.status != 429:
            seen.failures[f"a full queue said {answer.status}"] += 1
        await asyncio.sleep(0.02)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await client.close()


def check_texts(model: str | None, plan: LoadPlan, seen: LoadResult) -> tuple[int, int]:
    """The number of finished texts that differ from plain decoding alone, and the number of solo runs."""
    from outrider.engine.llm import LLM
    from outrider.sampling import SamplingParams

    llm, requests = LLM(model, speculation="none", max_num_seqs=1), requests_of(plan)
    alone: dict[int, tuple[str, int]] = {}
    for which in sorted({which for which, _, _ in seen.finished}):
        body = dict(requests[which])
        output = llm.generate(body.pop("prompt"), SamplingParams(**body))[0].outputs[0]
        alone[which] = (output.text, len(output.token_ids))
    return sum((text, tokens) != alone[which] for which, text, tokens in seen.finished), len(alone)


def summarise(plan: LoadPlan, seen: LoadResult, idle: dict[str, Any], unequal: int) -> dict[str, Any]:
    """The report."""
    memory = seen.memory_mib or [0.0]
    third = len(memory) // 3
    before, after = statistics.median(memory[third : 2 * third] or memory), statistics.median(memory[2 * third :])
    tokens = sum(count for _, _, count in seen.finished)
    return {
        "streams": plan.streams,
        "seconds": plan.seconds,
        "finished": len(seen.finished),
        "cancelled": seen.cancelled,
        "failed": dict(seen.failures),
        "unequal": unequal,
        "tokens_per_s_of_finished": round(tokens / plan.seconds, 1),
        "first_token_ms": _percentiles(seen.first_s),
        "health_ms": _percentiles(seen.health_s) | {"samples": len(seen.health_s)},
        "refusal_ms": _percentiles(seen.refusals_s),
        "memory_mib": {
            "middle_third": round(before, 1),
            "last_third": round(after, 1),
            "growth": round(after / before, 4) if before else 0.0,
        },
        "when_idle": {name: idle[name] for name in ("running", "waiting", "kv_usage", "finished")},
    }


def passed(report: dict[str, Any]) -> bool:
    """Whether everything held."""
    idle = report["when_idle"]
    return (
        report["finished"] > 0
        and not report["failed"]
        and report["unequal"] == 0
        and report["health_ms"]["p99"] < 100
        and report["refusal_ms"]["p99"] < 100
        and report["memory_mib"]["growth"] <= _GROWTH
        and is_idle(idle)
        and report["exit_code"] == 0
    )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {name: percentile_ms(seconds, share, 2) or 0.0 for name, share in (("p50", 0.5), ("p99", 0.99))}


if __name__ == "__main__":
    run(main)
