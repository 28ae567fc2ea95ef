"""`python -m benchmarks.serve_http`: what HTTP costs. The same requests go through a server and through `LLM`, in turn."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import close_report, errors, run
from benchmarks.server import ServerProcess, client_of
from outrider.bench.client import Client
from outrider.bench.workloads import find_prompts
from outrider.engine.acceptance import read_prompts
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams

__all__ = ["main"]

_FIRSTS = 8  # requests, one after the other, whose first token is timed in each run


def main(
    model: Annotated[str | None, typer.Option(help="Model directory or hub id. Default: the bundled model.")] = None,
    method: Annotated[str, typer.Option(help="How both draft.")] = "eagle",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once, for the throughput.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each request.")] = 128,
    pairs: Annotated[int, typer.Option(min=1, help="Paired runs; medians are reported.")] = 7,
    output: Annotated[Path | None, typer.Option(help="File for the report, as JSON.")] = None,
) -> None:
    """Time to first token and throughput through HTTP, beside the same requests in process. Fails beyond 10 ms or below 0.85."""
    arguments = [*([model] if model else []), "--method", method, "--max-num-seqs", str(batch)]
    with errors.status("loading, twice"):
        server = ServerProcess(arguments)
        llm = LLM(model, speculation=method, max_num_seqs=batch, share=False)
    try:
        with errors.status("measuring"):
            report = asyncio.run(_measure(server.port, llm, batch, tokens, pairs))
    finally:
        server.stop()
    report |= {"batch": batch, "tokens": tokens, "pairs": pairs, "method": method}
    report["passed"] = report["first_token_more_ms"] <= 10 and report["throughput_ratio"] >= 0.85 and report["equal"]
    close_report(report, output)


async def _measure(port: int, llm: LLM, batch: int, tokens: int, pairs: int) -> dict[str, Any]:
    prompts = read_prompts(find_prompts("code"))
    client = client_of(port)
    first: dict[str, list[float]] = {"http": [], "process": []}
    speeds: dict[str, list[float]] = {"http": [], "process": []}
    equal = True
    for pair in range(pairs + 1):
        bodies = [
            {"prompt": prompts[i % len(prompts)], "max_tokens": tokens, "temperature": 0.8, "seed": i, "ignore_eos": True}
            for i in range(pair * batch, (pair + 1) * batch)
        ]
        runs = [("http", pair % 2 == 0), ("process", pair % 2 == 1)]
        texts: dict[str, list[str]] = {}
        for name, _ in sorted(runs, key=lambda run: run[1]):
            if name == "http":
                alone = [(await client.stream(body | {"max_tokens": 2})).first_s for body in bodies[:_FIRSTS]]
                speed, texts[name] = await _through_http(client, bodies)
            else:
                alone = [_first_in_process(llm, body) for body in bodies[:_FIRSTS]]
                speed, texts[name] = _in_process(llm, bodies)
            if pair:  # the first pair warms up
                first[name].append(statistics.median(alone))
                speeds[name].append(speed)
        equal &= texts["http"] == texts["process"]
    await client.close()
    more = [1000 * (a - b) for a, b in zip(first["http"], first["process"], strict=True)]
    ratios = [a / b for a, b in zip(speeds["http"], speeds["process"], strict=True)]
    return {
        "equal": equal,
        "first_token_more_ms": round(statistics.median(more), 3),
        "first_token_ms": {name: round(1000 * statistics.median(values), 3) for name, values in first.items()},
        "throughput_ratio": round(statistics.median(ratios), 4),
        "throughput_ratios": [round(values, 4) for values in ratios],
        "tok_s": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
    }


async def _through_http(client: Client, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
    begun = time.perf_counter()
    replies = await asyncio.gather(*(client.stream(body) for body in bodies))
    seconds = time.perf_counter() - begun
    return sum(reply.tokens for reply in replies) / seconds, [reply.text for reply in replies]


def _in_process(llm: LLM, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
    begun = time.perf_counter()
    outputs = llm.generate([body["prompt"] for body in bodies], [_params(body) for body in bodies])
    seconds = time.perf_counter() - begun
    return sum(len(result.outputs[0].token_ids) for result in outputs) / seconds, [result.outputs[0].text for result in outputs]


def _first_in_process(llm: LLM, body: dict[str, Any]) -> float:
    begun = time.perf_counter()
    stream = llm.stream(body["prompt"], _params(body | {"max_tokens": 2}))
    next(stream)
    seconds = time.perf_counter() - begun
    stream.close()  # type: ignore[attr-defined]
    return seconds


def _params(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})


if __name__ == "__main__":
    run(main)
