"""`outrider bench`: what this machine and this engine do, measured."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from outrider.errors import InvalidParameter
from outrider.options import Corpus, Dtype, LoadFormat, MaxTokens, Model, Threads, add_moved, json_object, numbers, set_threads
from outrider.terminal import PlainConsole

if TYPE_CHECKING:
    from outrider.bench.client import Level

__all__ = ["app"]


class _RunByDefault(TyperGroup):
    """Options without a subcommand are those of `run`; nothing at all shows what there is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = bool(args) and args[0].startswith("-") and args[0] not in ("-h", "--help")
        return super().parse_args(ctx, ["run", *args] if bare else args or ["--help"])


app = typer.Typer(
    help="Measure speculation on this machine. `outrider bench --quick` compares methods with plain decoding in about a minute, "
    "`outrider bench run` on more requests in several; `outrider bench OPTIONS` is `outrider bench run OPTIONS`. "
    "`outrider bench COMMAND --help` shows what a command takes.",
    cls=_RunByDefault,
)
_errors = PlainConsole(stderr=True)


_MOVED = ("round", "forward", "loss", "synthetic", "batching", "soak", "proposal", "load")
for _name in _MOVED:
    add_moved(app, _name, f"benchmarks.{_name}")
add_moved(app, "http", "benchmarks.serve_http")


@app.command("run")
def bench_run(
    model: Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated methods, settings after a colon: "none,ngram:8,eagle:24:beam=3:branch=6:depth=9,auto". Plain '
            "decoding is always added. Default: none,ngram,draft_model,eagle,auto; for another model, which may lack "
            "drafters: none,ngram,suffix,recycle,auto."
        ),
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: code, editing, json, constrained, random or random:TOKENS, or files (Spec-Bench, MT-bench, "
            "HumanEval, GSM8K, SPEED-Bench, or yours: rows with turns, messages, prompt, question or text, and category where "
            "there are several). Default: code,editing."
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Comma-separated draft lengths: each method that names none runs at all of them.")
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help="Comma-separated. Default: 0,0.8.")] = None,
    batches: Annotated[str | None, typer.Option(help="Comma-separated batch sizes. Default: 1,4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Maximum number of tokens of each request. Default: 128.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category. Default: 5.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of every case, interleaved.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Defaults for what is not set: code, temperature 0, batch 1, 4 prompts of 64 tokens.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts through the model's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False,
    schema: Annotated[
        Path | None, typer.Option(help="A JSON schema that every output must meet. The workload `constrained` has one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first request; the others count up.")] = 0,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    corpus: Corpus = None,
    threads: Threads = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl and report.html. Default: outrider-bench/DATE-TIME.")
    ] = None,
) -> None:
    """Speed, acceptance and token equality of several methods on the same requests, beside plain decoding.

    All methods are loaded in one process and take turns, request by request, after a warm-up. Writes results.jsonl and
    report.html, and prints one JSON line last. Exits with 1 if a case failed or some tokens differ, 130 after Ctrl-C; the
    rows measured by then are kept.
    """
    from outrider.bench.record import record_suite
    from outrider.bench.suite import Suite, expand_methods
    from outrider.bench.validity import read_schema

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
        schema=None if schema is None else read_schema(schema),
        load={"dtype": dtype, "load_format": load_format} | ({"corpus": corpus} if corpus else {}),
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
        typer.Option(help="Count requests within these limits: ttft:MS, tpot:MS, e2el:MS; repeatable."),
    ] = None,
    model: Annotated[str, typer.Option(help="The name to ask for. Default: the first one the server lists.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions instead of /v1/completions.")] = False,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Sent with every request.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Sent with every request; some servers ignore it.")] = False,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON to add to every request, as in '{\"speculation\": false}'.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte from the server after which a request has failed.")
    ] = 300.0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Alternate speculation on and off at each load, and print the load where they meet.")
    ] = False,
    plain_url: Annotated[
        str | None,
        typer.Option(help="With --compare: a second server, without speculation. Default: this one, told per request."),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="GPUs or machines behind the server, for tokens per second of each.")] = 1,
    output: Annotated[Path | None, typer.Option(help="File for the result, as JSON.")] = None,
) -> None:
    """Load a running OpenAI-compatible server and report TTFT, TPOT, ITL, throughput, goodput and failures.

    Answers are streamed. ITL is the time between chunks, which may hold several tokens; TPOT divides by tokens. A key in
    OUTRIDER_API_KEY is sent as a bearer token. Prints one JSON line last; exits with 1 if a request failed, 130 after Ctrl-C.
    """
    from outrider.bench.client import Endpoint
    from outrider.bench.serve import ServerLoads, bench_server, parse_goodput
    from outrider.bench.workloads import first_turns

    if more_limits and not goodput:
        raise InvalidParameter("arguments", f"{more_limits[0]!r} follows no --goodput")
    if plain_url is not None and not compare:
        raise InvalidParameter("--plain-url", "is for --compare")
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "ignore_eos": ignore_eos or None}
    body = {name: value for name, value in body.items() if value is not None} | json_object("--extra-body", extra_body or "{}")
    endpoint = Endpoint(_base(url), model, chat, os.environ.get("OUTRIDER_API_KEY"), timeout, body)
    plain = replace(endpoint, url=_base(plain_url)) if plain_url else replace(endpoint, body=body | {"speculation": False})
    limits = parse_goodput([*(goodput or []), *(more_limits or [])])
    loads = ServerLoads(_levels(rate, concurrency), first_turns(workload, num_prompts), limits, devices)
    code = bench_server(endpoint, loads, _errors, output, plain if compare else None)
    if code:
        raise typer.Exit(code)


def _levels(rate: str | None, concurrency: str | None) -> list[Level]:
    """The loads that --rate or --concurrency names."""
    from outrider.bench.client import Level

    if rate is not None and concurrency is not None:
        raise InvalidParameter("--rate", "and --concurrency are two ways to load a server; give one")
    levels = [Level(rate=value) for value in numbers("--rate", rate, float)] if rate else []
    levels = levels or [Level(concurrency=value) for value in numbers("--concurrency", concurrency or "1", int)]
    if any((value.rate or value.concurrency or 0) <= 0 for value in levels):
        raise InvalidParameter("--rate" if rate else "--concurrency", "must be above 0")
    return levels


def _base(url: str) -> str:
    """A server's address up to and without /v1."""
    return url.rstrip("/").removesuffix("/v1")


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
    """Tokens per round, acceptance by position and the cost of a proposal, served; one JSON line per row, then a table.

    A drafter that the model does not have is named and left out; the run ends with 1 where it was named in --methods.
    """
    from outrider.bench.acceptance import EVERY_METHOD, Workload, bench_methods, show_rows
    from outrider.bench.environment import environment
    from outrider.bench.workloads import find_prompts
    from outrider.engine.acceptance import read_prompts

    set_threads(threads)
    workload = Workload(read_prompts(find_prompts(data), limit), max_tokens, shaped, seed)
    cases = [(t, b) for b in numbers("--batches", batches, int) for t in numbers("--temperatures", temperatures, float)]
    print(json.dumps(environment() | {"prompts": len(workload.prompts)}), flush=True)
    rows = []
    for row in bench_methods(workload, model, methods or EVERY_METHOD, cases, check):
        rows.append(row)
        print(json.dumps(row), flush=True)
    show_rows(rows, PlainConsole(stderr=True, width=max(_errors.width, 150)))
    missing = [row for row in rows if "missing" in row]
    if any(row.get("equal", 1.0) < 1.0 for row in rows) or (methods and missing) or len(missing) == len(rows):
        raise typer.Exit(1)


@app.command("never-slower")
def bench_never_slower(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,4,8,16,32",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each request.")] = 128,
    pairs: Annotated[int, typer.Option(min=3, help="Paired runs of each case.")] = 11,
    quick: Annotated[
        bool, typer.Option("--quick", help="Batch 1 and 8, two workloads, one useless drafter, a few minutes.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option(help="Also sweep fixed settings on code at batch 1 and compare `auto` with the best.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of all requests.")] = 0,
    threads: Threads = None,
) -> None:
    """Throughput under the controller over plain decoding: texts, temperatures, drafters by name, short answers.

    Fails where it is slower beyond doubt.
    """
    from outrider.bench.environment import environment
    from outrider.bench.never_slower import against_best, as_rows, cases, engine, never_slower, show_ratios

    set_threads(threads)
    wanted = cases([1, 8] if quick else numbers("--batches", batches, int), quick)
    rows = []
    auto = engine(model, max(case.batch for case in wanted))
    for row in never_slower(auto, wanted, min(tokens, 96) if quick else tokens, min(pairs, 7) if quick else pairs, seed):
        rows.append(row)
        answer = f", {row.tokens} tokens after {row.prompt}" if row.tokens else ""
        where = f"{row.method}: {row.workload} at {row.temperature:g}, batch {row.batch}{answer}"
        _errors.print(f"{len(rows)} of {len(wanted)}, {where}: {row.ratio:.2f}", highlight=False)
    show_ratios(rows, _errors)
    result: dict[str, Any] = {"rows": as_rows(rows)}
    if sweep and not quick:
        best = against_best(auto, tokens, pairs, seed=seed)
        _errors.print(f"auto ÷ the best fixed setting ({best.method}), code at batch 1: {best.ratio:.2f}", highlight=False)
        result["against_best"] = asdict(best)
    print(json.dumps(result | environment()))
    if any(row.lost for row in rows):
        raise typer.Exit(1)


@app.command("agent")
def bench_agent(
    model: Model = None,
    method: Annotated[str, typer.Option(help="The drafting method, as for --methods of `bench run`.")] = "auto",
    recordings: Annotated[
        Path | None,
        typer.Option(help="JSONL of conversations (name, kind, turns of user and answer). Default: the bundled ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many conversations.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of every conversation.")] = 3,
    threads: Threads = None,
) -> None:
    """Replay recorded editing conversations of coding agents: speed by turn beside plain decoding, tokens per round, equality.

    The target's forwards are computed and its choices are replaced by the recorded answers, so the model edits as recorded; both
    sides pay for that alike. Prints one JSON line last; exits with 1 if tokens differ.
    """
    from outrider.bench.agent import RECORDINGS, replay, show_turns, summary
    from outrider.bench.environment import environment

    set_threads(threads)
    rows = list(replay(model, method, recordings or RECORDINGS, repeats, limit, _errors.print))
    show_turns(rows, PlainConsole(stderr=True, width=max(_errors.width, 120)))
    print(json.dumps(summary(rows) | {"method": method, "repeats": repeats, "answers": "planted"} | environment()))
    if not all(row.equal for row in rows):
        raise typer.Exit(1)
