"""The command line: generate, compare, doctor, bench, train."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from outrider._version import __version__
from outrider.errors import InvalidParameter, OutriderError
from outrider.train.cli import app as train_app

__all__ = ["app", "main"]

app = typer.Typer(
    name="outrider",
    help="Speculative decoding whose text is the same text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure this machine and this engine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
_errors = Console(stderr=True)
Number = TypeVar("Number", int, float)

Prompt = Annotated[str, typer.Argument(help="The text to continue; '-' reads standard input.")]
Model = Annotated[str | None, typer.Option(help="Model directory or hub id. Default: the bundled model.")]
Method = Annotated[
    str | None,
    typer.Option(
        help="How to guess: none, ngram, suffix, recycle, lookahead, draft_model, eagle, medusa, early_exit, cascade, "
        "mixture, auto (a controller chooses round by round), or "
        'package.module:Class; settings may follow, as in "eagle:24:beam=6" or "mixture:24:members=suffix+eagle". '
        "Default: eagle for the bundled model, else ngram."
    ),
]
DraftModel = Annotated[
    str | None, typer.Option(help="Directory or hub id of the drafter's weights. Default: what came with the model.")
]
DraftTokens = Annotated[int | None, typer.Option(min=0, max=256, help="Most tokens guessed per round. Default: 5.")]
Rule = Annotated[str, typer.Option(help="Verification rule: match (same tokens), rejection, block, lossy_typical.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens that hold this much of the mass.")]
TopK = Annotated[int, typer.Option(help="Keep this many most probable tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less probable than this share of the best.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages tokens already seen.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text. Default: drawn and reported.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float32, or int8 (weights and rows; native core).")]
LoadFormat = Annotated[str, typer.Option(help="safetensors, or dummy for random weights from config.json alone.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")]
Device = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")]
Numerics = Annotated[
    str, typer.Option(help="exact: the same tokens whatever is drafted; fast: other GPU kernels, without that promise.")
]
Memory = Annotated[float, typer.Option(help="Share of the GPU's memory that weights, KV and graphs may take.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    """Run the command line; errors are one line, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        app()
    except OutriderError as error:
        _errors.print(f"[bold red]error:[/] {error}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def generate(
    prompt: Prompt,
    model: Model = None,
    method: Method = None,
    draft_model: DraftModel = None,
    draft_tokens: DraftTokens = None,
    rule: Rule = "match",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 200,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    device: Device = "auto",
    numerics: Numerics = "exact",
    memory: Memory = 0.9,
    threads: Threads = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt."""
    from outrider.engine.terminal import print_summary

    if stream and as_json:
        raise InvalidParameter("--stream", "cannot be combined with --json")
    llm = _load(locals())
    params, text = _params(locals()), _prompt(prompt)
    if stream:
        for piece in llm.stream(text, params):
            print(piece.text, end="", flush=True)
            if piece.output is not None:
                print()
                print_summary(piece.output)
        return
    output = llm.generate(text, params)[0].outputs[0]
    if as_json:
        print(json.dumps(_as_json(output)))
    else:
        print(output.text)
        print_summary(output)


@app.command()
def compare(
    prompt: Prompt,
    model: Model = None,
    method: Method = None,
    draft_model: DraftModel = None,
    draft_tokens: DraftTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 200,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    device: Device = "auto",
    numerics: Numerics = "exact",
    memory: Memory = 0.9,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, interleaved; medians are shown.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Decode the same request plainly and speculatively, check that the tokens are equal, show both speeds."""
    from outrider.engine.comparison import compare_runs
    from outrider.engine.terminal import print_comparison

    llm = _load(locals() | {"rule": "match"})
    result = compare_runs(llm, _prompt(prompt), _params(locals()), repeats)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        print_comparison(result, llm)
    if not result.identical:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine offers, which kernels are in use, whether rows are invariant and what that costs."""
    from outrider.bench.doctor import diagnose
    from outrider.engine.terminal import print_findings

    with _errors.status("measuring"):
        findings = diagnose()
    if as_json:
        print(json.dumps([{"section": f.section, "name": f.name, "value": f.value, "good": f.good} for f in findings]))
    else:
        print_findings([(f.section, f.name, f.value, f.good) for f in findings])
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


@bench_app.command("round")
def bench_round(
    model: Model = None,
    load_format: LoadFormat = "safetensors",
    rounds: Annotated[int, typer.Option(min=10, help="Rounds to time.")] = 200,
    threads: Threads = None,
) -> None:
    """What a plain round costs beside the model's forward and the choice, and what the noise costs."""
    from outrider.bench.round import measure_noise, measure_round

    _set_threads(threads)
    rows = [measure_round(model, load_format, temperature, rounds).as_dict() for temperature in (0.0, 0.8)]
    print(json.dumps({"rounds": rows, "noise": measure_noise()}))


@bench_app.command("forward")
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
    """What a forward costs for 1 to 32 rows, beside the time its bytes need at the bandwidth of the same run."""
    from outrider.bench.forward import Setting
    from outrider.bench.forward import bench_forward as measure

    _set_threads(threads)
    setting = Setting([int(count) for count in rows.split(",")], context, repeats)
    print(json.dumps(measure(models.split(","), dtypes.split(","), setting)))


@bench_app.command("loss")
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


@bench_app.command("acceptance")
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

    _set_threads(threads)
    workload = Workload(read_prompts(find_prompts(data), limit), max_tokens, shaped, seed)
    cases = [(t, b) for b in _numbers("--batches", batches, int) for t in _numbers("--temperatures", temperatures, float)]
    print(json.dumps(conditions() | {"prompts": len(workload.prompts)}), flush=True)
    rows = []
    for row in bench_methods(workload, model, methods or EVERY_METHOD, cases, check):
        rows.append(row)
        print(json.dumps(row), flush=True)
    show_rows(rows, Console(stderr=True, width=max(_errors.width, 150)))
    if any(row.get("equal", 1.0) < 1.0 for row in rows):
        raise typer.Exit(1)


@bench_app.command("never-slower")
def bench_never_slower(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each request.")] = 128,
    pairs: Annotated[int, typer.Option(min=3, help="Paired runs of each case.")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Batch 1 and 8, two workloads, about a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all requests.")] = 0,
    threads: Threads = None,
) -> None:
    """Throughput of `auto` over plain decoding: code, random tokens, temperature 1.5. Fails where it is slower beyond doubt."""
    from outrider.bench.conditions import conditions
    from outrider.bench.never_slower import as_rows, cases, never_slower, show_ratios

    _set_threads(threads)
    wanted = cases([1, 8] if quick else _numbers("--batches", batches, int), quick)
    rows = []
    for row in never_slower(model, wanted, min(tokens, 96) if quick else tokens, min(pairs, 5) if quick else pairs, seed):
        rows.append(row)
        _errors.print(f"{row.workload} at {row.temperature:g}, batch {row.batch}: {row.ratio:.2f}", highlight=False)
    show_ratios(rows, _errors)
    print(json.dumps({"rows": as_rows(rows)} | conditions()))
    if any(row.lost for row in rows):
        raise typer.Exit(1)


@bench_app.command("synthetic")
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
    for row in measure_engine(bench, _numbers("--drafted", drafted, int), 256, 128):
        print(json.dumps(row), flush=True)
    if transformers:
        for row in measure_transformers(bench.perm, agreement, 256, bench.prompt(128)):
            print(json.dumps(row), flush=True)


@bench_app.command("proposal")
def bench_proposal(
    contexts: Annotated[str, typer.Option(help="Comma-separated context lengths.")] = "1024,2048,4096,8192,16384",
    rounds: Annotated[int, typer.Option(min=10, help="Rounds to time at each.")] = 200,
    threads: Threads = None,
) -> None:
    """What a round of each lookup drafter costs as the context grows; needs no model's forward."""
    from outrider.bench.conditions import conditions
    from outrider.bench.proposal import measure_proposals

    _set_threads(threads)
    rows = list(measure_proposals(_numbers("--contexts", contexts, int), rounds))
    print(json.dumps(conditions() | {"rows": rows}, indent=1))


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(option, f"must be numbers separated by commas, got {text!r}") from None


def _load(options: dict[str, Any]) -> Any:
    """An LLM from command-line options, with its settings checked before anything is loaded."""
    from outrider.config import SpeculationConfig, parse_method
    from outrider.engine.llm import LLM

    _set_threads(options["threads"])
    settings = parse_method(options["method"] or ("ngram" if options["model"] else "eagle"))
    draft, method = options["draft_model"], settings["method"]
    if draft is not None and method not in ("draft_model", "eagle", "medusa"):
        raise InvalidParameter("--draft-model", f"is for methods with weights of their own, and {method!r} has none")
    given = {"model": draft, "draft_tokens": options["draft_tokens"], "rule": options["rule"]}
    speculation = SpeculationConfig.parse(settings | {name: value for name, value in given.items() if value is not None})
    names = ("dtype", "load_format", "device", "numerics", "memory")
    return LLM(options["model"], speculation=speculation, **{name: options[name] for name in names})


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _params(options: dict[str, Any]) -> Any:
    from outrider.sampling import SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "stop", "ignore_eos")
    return SamplingParams(**{name: options[name] for name in names})


def _prompt(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _as_json(output: Any) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "speculation": output.speculation,
        "timings": {
            "first_token_s": output.timings.first_token_s,
            "total_s": output.timings.total_s,
            "decode_tokens_per_s": output.timings.decode_tokens_per_s,
        },
    }


if __name__ == "__main__":
    main()
