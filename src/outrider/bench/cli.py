"""`outrider bench`: what this machine and this engine do, measured."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from outrider.errors import InvalidParameter
from outrider.options import Dtype, LoadFormat, MaxTokens, Model, Threads, numbers, set_threads

__all__ = ["app"]


class _RunByDefault(TyperGroup):
    """Options without a subcommand are those of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = not args or (args[0].startswith("-") and args[0] not in ("-h", "--help"))
        return super().parse_args(ctx, ["run", *args] if bare else args)


app = typer.Typer(
    help="Measure speculation on this machine: `outrider bench [OPTIONS]` is `outrider bench run [OPTIONS]`.", cls=_RunByDefault
)
_errors = Console(stderr=True)


@app.command("run")
def bench_run(
    model: Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated methods, settings after a colon: "none,ngram:8,eagle:24:beam=3:branch=6:depth=9,auto". Plain '
            "decoding is always among them. Default: none,ngram,draft_model,eagle,auto; for a model of your own, which may have "
            "neither: none,ngram,suffix,recycle,auto."
        ),
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: code, editing, json, random or random:TOKENS, or JSONL files (HumanEval, Spec-Bench, MT-bench "
            "or your own: lines with turns, prompt or text, and category where there are several). Default: code,editing."
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Comma-separated draft lengths: each method without one of its own runs at all of them.")
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help="Comma-separated. Default: 0,0.8.")] = None,
    batches: Annotated[str | None, typer.Option(help="Comma-separated batch sizes. Default: 1,4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Most tokens of each request. Default: 128.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category. Default: 5.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times everything runs, interleaved.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="What is not given: code, temperature 0, batch 1, 4 prompts of 64 tokens.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts through the model's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the first request; the others count up.")] = 0,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    threads: Threads = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl and report.html. Default: outrider-bench/DATE-TIME.")
    ] = None,
) -> None:
    """Speed, acceptance and token equality of several methods on the same requests, beside plain decoding.

    All methods are loaded in one process and take turns, request by request, after a warm-up. Writes results.jsonl and
    report.html, and prints one JSON line last. Ends with 1 where a case failed or some tokens differ, 130 after Ctrl-C; what
    was measured by then is kept.
    """
    from outrider.bench.record import record_suite
    from outrider.bench.suite import Suite, expand_methods

    set_threads(threads)
    usual = "ngram,suffix,recycle,auto" if model else "ngram,draft_model,eagle,auto"
    suite = Suite(
        methods=expand_methods(methods or usual, numbers("--lengths", lengths, int) if lengths else []),
        workloads=(workloads or ("code" if quick else "code,editing")).split(","),
        model=model,
        temperatures=numbers("--temperatures", temperatures or ("0" if quick else "0,0.8"), float),
        batches=numbers("--batches", batches or ("1" if quick else "1,4"), int),
        max_tokens=max_tokens or (64 if quick else 128),
        limit=limit or (4 if quick else 5),
        repeats=repeats,
        seed=seed,
        chat=chat,
        ignore_eos=ignore_eos,
        load={"dtype": dtype, "load_format": load_format},
    )
    code = record_suite(suite, output, _errors)
    if code:
        raise typer.Exit(code)


@app.command("report")
def bench_report(
    results: Annotated[Path, typer.Argument(help="A results.jsonl, or the folder it is in; several runs may be joined in one.")],
) -> None:
    """Write report.html beside a results.jsonl."""
    from outrider.bench.record import read_rows, write_report

    path = results / "results.jsonl" if results.is_dir() else results
    print(write_report(read_rows(path), path.parent))


@app.command("serve")
def bench_serve(
    more_limits: Annotated[list[str] | None, typer.Argument(metavar="[LIMIT]...", help="Further limits after --goodput.")] = None,
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    rate: Annotated[
        str | None, typer.Option(help="Comma-separated requests per second, Poisson arrivals; inf: all at once.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Comma-separated numbers of requests always in flight. Default: 1.")
    ] = None,
    workload: Annotated[str, typer.Option(help="code, editing, json, or a JSONL file of prompts.")] = "code",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each load; a short workload comes again.")] = 32,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Count requests within these limits: ttft:MS, tpot:MS, e2el:MS; may be given several times."),
    ] = None,
    model: Annotated[str, typer.Option(help="The name to ask for. Default: the first one the server lists.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions instead of /v1/completions.")] = False,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Sent with every request where given.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Sent with every request; not every server knows it.")] = False,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON to add to every request, as in '{\"speculation\": false}'.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a sign of life after which a request has failed.")
    ] = 300.0,
    output: Annotated[Path | None, typer.Option(help="File for the result, as JSON.")] = None,
) -> None:
    """Load a running OpenAI-compatible server and report TTFT, TPOT, ITL, throughput, goodput and failures.

    Answers are streamed. ITL is the time between pieces, which may hold several tokens; TPOT divides by tokens. A key in
    OUTRIDER_API_KEY is sent as a bearer token. One JSON line comes last; ends with 1 where a request failed, 130 after Ctrl-C.
    """
    from outrider.bench.load import Level, Target
    from outrider.bench.serve import bench_server, parse_goodput
    from outrider.bench.workloads import load_prompts

    if rate is not None and concurrency is not None:
        raise InvalidParameter("--rate", "and --concurrency are two ways to load a server; give one")
    if more_limits and not goodput:
        raise InvalidParameter("arguments", f"{more_limits[0]!r} follows no --goodput")
    levels = [Level(rate=own) for own in numbers("--rate", rate, float)] if rate else []
    levels = levels or [Level(concurrency=own) for own in numbers("--concurrency", concurrency or "1", int)]
    if any((own.rate or own.concurrency or 0) <= 0 for own in levels):
        raise InvalidParameter("--rate" if rate else "--concurrency", "must be above 0")
    texts = [own for prompts in load_prompts(workload).categories.values() for own in prompts if isinstance(own, str)]
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    body |= ({"seed": seed} if seed is not None else {}) | ({"ignore_eos": True} if ignore_eos else {}) | _json_object(extra_body)
    target = Target(url.rstrip("/").removesuffix("/v1"), model, chat, os.environ.get("OUTRIDER_API_KEY"), timeout, body)
    limits = parse_goodput([*(goodput or []), *(more_limits or [])])
    code = bench_server(target, levels, [texts[i % len(texts)] for i in range(num_prompts)], limits, _errors, output)
    if code:
        raise typer.Exit(code)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidParameter("--extra-body", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidParameter("--extra-body", "must be a JSON object")
    return found


@app.command("round")
def bench_round(
    model: Model = None,
    load_format: LoadFormat = "safetensors",
    rounds: Annotated[int, typer.Option(min=10, help="Rounds to time.")] = 200,
    batches: Annotated[str, typer.Option(help="Comma-separated numbers of running sequences.")] = "1",
    queued: Annotated[str, typer.Option(help="Comma-separated numbers of requests waiting meanwhile.")] = "0",
    threads: Threads = None,
) -> None:
    """What a plain round costs beside the model's forward and the choice, and what the noise costs."""
    from outrider.bench.conditions import conditions
    from outrider.bench.round import measure_noise, measure_round

    set_threads(threads)
    sizes = [(t, b, q) for q in numbers("--queued", queued, int) for b in numbers("--batches", batches, int) for t in (0.0, 0.8)]
    rows = [measure_round(model, load_format, t, rounds, b, q).as_dict() for t, b, q in sizes]
    print(json.dumps(conditions() | {"rounds": rows, "noise": measure_noise()}))


@app.command("forward")
def bench_forward(
    models: Annotated[
        str, typer.Option(help="Comma-separated: pyrite, draft, random models 40m, 150m, 1.1b, or directories.")
    ] = "pyrite,draft,150m",
    dtypes: Annotated[str, typer.Option(help="Comma-separated: bfloat16, int8, float32.")] = "bfloat16,int8",
    rows: Annotated[str, typer.Option(help="Comma-separated row counts.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(min=1, help="Positions before the rows.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Times each row count runs, interleaved; medians are shown.")] = 40,
    threads: Threads = None,
) -> None:
    """What a forward costs for 1 to 32 rows, beside the time its bytes and its arithmetic need here in the same run."""
    from outrider.bench.forward import Setting
    from outrider.bench.forward import bench_forward as measure

    set_threads(threads)
    setting = Setting([int(count) for count in rows.split(",")], context, repeats)
    print(json.dumps(measure(models.split(","), dtypes.split(","), setting)))


@app.command("loss")
def bench_loss(
    data: Annotated[Path, typer.Argument(help="JSONL of texts: turns, prompt or text.")],
    model: Model = None,
    dtypes: Annotated[str, typer.Option(help="Comma-separated; the first is what the others are compared with.")] = (
        "float32,bfloat16,int8"
    ),
    limit: Annotated[int | None, typer.Option(help="Use only this many texts.")] = None,
    longest: Annotated[int, typer.Option(min=2, help="Tokens read of each text.")] = 512,
) -> None:
    """What a dtype costs in quality: mean loss per token on given texts."""
    from outrider.bench.conditions import conditions
    from outrider.bench.loss import bench_loss as measure

    print(json.dumps(conditions() | {"rows": measure(data, model, dtypes.split(","), limit, longest)}))


@app.command("acceptance")
def bench_acceptance(
    data: Annotated[str, typer.Argument(help="JSONL of prompts (turns, prompt or text), or `editing`: 20 prompts to edit code.")],
    model: Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated methods, each with settings after it: "ngram:8,mixture:24:members=suffix+(eagle:beam=6)". '
            "Default: every drafter."
        ),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated temperatures.")] = "0,0.8",
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1",
    max_tokens: MaxTokens = 256,
    limit: Annotated[int | None, typer.Option(help="Use only this many prompts.")] = None,
    shaped: Annotated[int, typer.Option(min=0, help="Further requests with penalties and stop strings, for equality.")] = 0,
    check: Annotated[bool, typer.Option(help="Compare every token with plain decoding, one request at a time.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all requests.")] = 0,
    threads: Threads = None,
) -> None:
    """Tokens per round, acceptance by position and the cost of a proposal, served; one JSON line per row, then a table."""
    from outrider.bench.acceptance import EVERY_METHOD, Workload, bench_methods, show_rows
    from outrider.bench.conditions import conditions
    from outrider.bench.workloads import find_prompts
    from outrider.engine.acceptance import read_prompts

    set_threads(threads)
    workload = Workload(read_prompts(find_prompts(data), limit), max_tokens, shaped, seed)
    cases = [(t, b) for b in numbers("--batches", batches, int) for t in numbers("--temperatures", temperatures, float)]
    print(json.dumps(conditions() | {"prompts": len(workload.prompts)}), flush=True)
    rows = []
    for row in bench_methods(workload, model, methods or EVERY_METHOD, cases, check):
        rows.append(row)
        print(json.dumps(row), flush=True)
    show_rows(rows, Console(stderr=True, width=max(_errors.width, 150)))
    if any(row.get("equal", 1.0) < 1.0 for row in rows):
        raise typer.Exit(1)


@app.command("never-slower")
def bench_never_slower(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each request.")] = 128,
    pairs: Annotated[int, typer.Option(min=3, help="Paired runs of each case.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Batch 1 and 8, two workloads, about a minute.")] = False,
    sweep: Annotated[
        bool, typer.Option(help="Also sweep fixed settings on code at batch 1 and compare `auto` with the best.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of all requests.")] = 0,
    threads: Threads = None,
) -> None:
    """Throughput of `auto` over plain decoding: code, random tokens, temperature 1.5. Fails where it is slower beyond doubt."""
    from outrider.bench.conditions import conditions
    from outrider.bench.never_slower import against_best, as_rows, cases, engine, never_slower, show_ratios

    set_threads(threads)
    wanted = cases([1, 8] if quick else numbers("--batches", batches, int), quick)
    rows = []
    auto = engine(model, max(case.batch for case in wanted))
    for row in never_slower(auto, wanted, min(tokens, 96) if quick else tokens, min(pairs, 9) if quick else pairs, seed):
        rows.append(row)
        _errors.print(f"{row.workload} at {row.temperature:g}, batch {row.batch}: {row.ratio:.2f}", highlight=False)
    show_ratios(rows, _errors)
    found: dict[str, Any] = {"rows": as_rows(rows)}
    if sweep and not quick:
        best = against_best(auto, tokens, pairs, seed=seed)
        _errors.print(f"auto ÷ the best fixed setting ({best.method}), code at batch 1: {best.ratio:.2f}", highlight=False)
        found["against_best"] = asdict(best)
    print(json.dumps(found | conditions()))
    if any(row.lost for row in rows):
        raise typer.Exit(1)


@app.command("synthetic")
def bench_synthetic(
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens the draft guesses right.")] = 0.8,
    drafted: Annotated[str, typer.Option(help="Comma-separated numbers of draft tokens.")] = "2,3,4,5",
    transformers: Annotated[bool, typer.Option(help="Measure Transformers beside it: eager, assisted, compiled.")] = True,
) -> None:
    """Speed of 8B- and 1B-shaped models with synthetic weights on a GPU; one JSON line per number."""
    from outrider.engine.device import Device

    Device.resolve("cuda")
    from outrider.bench.gpu import conditions_on_gpu
    from outrider.bench.synthetic import Synthetic, measure_engine, measure_transformers

    print(json.dumps(conditions_on_gpu()), flush=True)
    bench = Synthetic(agreement)
    for row in measure_engine(bench, numbers("--drafted", drafted, int), 256, 128):
        print(json.dumps(row), flush=True)
    if transformers:
        for row in measure_transformers(bench.perm, agreement, 256, bench.prompt(128)):
            print(json.dumps(row), flush=True)


@app.command("batching")
def bench_batching(
    model: Model = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Times both ways run, interleaved; medians are shown.")] = 5,
    threads: Threads = None,
) -> None:
    """The same requests at once and one after another: what continuous batching brings, plainly and with `auto`."""
    from outrider.bench.batching import batching
    from outrider.bench.conditions import conditions

    set_threads(threads)
    print(json.dumps(conditions() | {"rows": [batching(model, batch, tokens, repeats, method) for method in ("none", "auto")]}))


@app.command("soak")
def bench_soak(
    model: Model = None,
    method: Annotated[str, typer.Option(help="How to guess in the crowd.")] = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Random requests in all.")] = 1000,
    longest: Annotated[int, typer.Option(min=2, help="Most tokens of a request.")] = 48,
    pages: Annotated[int, typer.Option(min=8, help="KV pages of 16 tokens: few enough that they run out.")] = 96,
    seed: Annotated[int, typer.Option(help="Of the requests, their arrivals and cancellations.")] = 0,
    threads: Threads = None,
) -> None:
    """Random requests that come, go and are cancelled in too little memory; each is compared with its solo plain run."""
    from outrider.bench.conditions import conditions
    from outrider.bench.crowd import random_requests, soak
    from outrider.cache import KVPool
    from outrider.engine.llm import LLM

    set_threads(threads)
    alone = LLM(model, max_model_len=512)
    shape = alone.config
    room = pages * 16 * KVPool.bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim)
    crowd = LLM(model, speculation=method, max_model_len=512, max_num_seqs=16, page_size=16, kv_bytes=room)
    with _errors.status("") as status:
        told = lambda done: status.update(f"{done} of {requests} requests sent")  # noqa: E731
        report = soak(crowd, alone, random_requests(crowd, requests, seed, longest), told)
    print(json.dumps(report.as_dict() | conditions()))
    if not report.good:
        raise typer.Exit(1)


@app.command("proposal")
def bench_proposal(
    contexts: Annotated[str, typer.Option(help="Comma-separated context lengths.")] = "1024,2048,4096,8192,16384",
    rounds: Annotated[int, typer.Option(min=10, help="Rounds to time at each.")] = 200,
    threads: Threads = None,
) -> None:
    """What a round of each lookup drafter costs as the context grows; needs no model's forward."""
    from outrider.bench.conditions import conditions
    from outrider.bench.proposal import measure_proposals

    set_threads(threads)
    rows = list(measure_proposals(numbers("--contexts", contexts, int), rounds))
    print(json.dumps(conditions() | {"rows": rows}, indent=1))
