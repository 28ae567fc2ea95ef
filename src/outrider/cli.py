"""The command line: generate, chat, compare, doctor, bench, audit, quantize, train."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider._version import __version__
from outrider.bench.audit.cli import audit
from outrider.bench.cli import app as bench_app
from outrider.bench.plan.cli import plan
from outrider.environment import known_variables, tidy
from outrider.errors import EngineDead, InvalidParameter, OutriderError
from outrider.options import AsJson, Corpus, Dtype, LoadFormat, MaxTokens, Model, Threads, add_moved, set_threads, spread
from outrider.other_engines import refuse_foreign_flags
from outrider.quantize.cli import quantize
from outrider.serve.chat import chat
from outrider.serve.cli import register as register_serve
from outrider.terminal import PlainConsole, print_checks, print_error
from outrider.train.cli import app as train_app

if TYPE_CHECKING:
    from outrider.engine import LLM, CompletionOutput
    from outrider.sampling import SamplingParams

__all__ = ["app", "main"]

app = typer.Typer(
    name="outrider",
    help="Speculative decoding whose text is the same text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
heads_app = typer.Typer(help="Heads: EAGLE, Medusa.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(heads_app, name="heads")
app.command()(chat)
register_serve(app)
app.command()(plan)
app.command()(audit)
app.command()(quantize)
add_moved(app, "peers", "benchmarks.baselines")
_errors = PlainConsole(stderr=True)


@dataclass(frozen=True, slots=True)
class DecodingFlags:
    """How a prompt is continued: options of `generate` and `compare`."""

    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads standard input.")]
    model: Model = None
    method: Annotated[
        str | None,
        typer.Option(
            help="Drafting method: none, ngram, suffix, recycle, lookahead, draft_model, eagle, mtp, medusa, dflash, "
            "early_exit, cascade, mixture, auto (a controller chooses round by round), or "
            'package.module:Class; settings may follow, as in "eagle:24:beam=6" or "mixture:24:members=suffix+eagle". '
            "Default: auto."
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Directory or hub id of the drafter's weights, or auto: a published sibling or head of the model, if it is in "
            "the local cache. Default: those in the model's folder."
        ),
    ] = None
    draft_tokens: Annotated[int | None, typer.Option(min=0, max=256, help="Maximum tokens drafted per round. Default: 5.")] = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens whose probabilities add up to this.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep this many most probable tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, typer.Option(help="Drop tokens less probable than this fraction of the most probable one.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens already seen.")] = 1.0
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: drawn and reported.")] = None
    max_tokens: MaxTokens = 200
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.")] = False
    dtype: Dtype = "auto"
    load_format: LoadFormat = "safetensors"
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")] = "auto"
    numerics: Annotated[
        str, typer.Option(help="exact: the same tokens whatever is drafted; fast: other GPU kernels, whose tokens may differ.")
    ] = "exact"
    fp8_activations: Annotated[
        str, typer.Option(help="on: a GPU multiplies weights in FP8 with activations in FP8; off: it decodes the weights.")
    ] = "on"
    memory: Annotated[
        str | None,
        typer.Option(
            help="What weights, KV and buffers may take of the GPU, or of the machine without one: a share such as 0.9, or a "
            "size such as 8GiB. Weights that do not fit a GPU are streamed from host memory. Default: 0.9 of a GPU."
        ),
    ] = None
    kv_memory: Annotated[str | None, typer.Option(help="Memory for KV alone, such as 4GiB.")] = None
    corpus: Corpus = None
    threads: Threads = None


@dataclass(frozen=True, slots=True)
class GenerateFlags(DecodingFlags):
    """Options of `outrider generate`."""

    rule: Annotated[str, typer.Option(help="Verification rule: match (same tokens), rejection, block, lossy_typical.")] = "match"
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False
    as_json: AsJson = False


@dataclass(frozen=True, slots=True)
class CompareFlags(DecodingFlags):
    """Options of `outrider compare`."""

    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, interleaved; medians are shown.")] = 3
    svg: Annotated[Path | None, typer.Option(help="Also write what is shown to this SVG file.")] = None
    as_json: AsJson = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: that of the process, or other arguments. An error is printed as one line, without a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("outrider.progress").setLevel(logging.INFO)
    try:
        if any(name.startswith("OUTRIDER_") for name in os.environ):
            tidy(os.environ, known_variables(typer.main.get_command(app)))
        refuse_foreign_flags(sys.argv[1:] if arguments is None else arguments)
        app(arguments)
    except OutriderError as error:
        print_error(error)
        sys.exit(1 if isinstance(error, EngineDead) else 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more as it ends
        sys.exit(1)
    except OSError as error:  # a full disk, a file that may not be written
        print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        from outrider.about import build_details

        print(build_details())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print versions and builds.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Speculative decoding whose text is the same text."""


@app.command()
def version() -> None:
    """Print the version alone."""
    print(__version__)


@app.command()
@spread
def generate(flags: GenerateFlags) -> None:
    """Continue a prompt."""
    from outrider.engine.comparison import print_summary

    if flags.stream and flags.as_json:
        raise InvalidParameter("--stream", "cannot be combined with --json")
    llm = _load(flags, flags.rule)
    params, text = _params(flags), _prompt(flags.prompt)
    if flags.stream:
        for chunk in llm.stream(text, params):
            print(chunk.text, end="", flush=True)
            if chunk.output is not None:
                print()
                print_summary(chunk.output)
        return
    output = llm.generate(text, params)[0].outputs[0]
    if flags.as_json:
        print(json.dumps(_as_json(output)))
    else:
        print(output.text)
        print_summary(output)


@app.command()
@spread
def compare(flags: CompareFlags) -> None:
    """Decode the same request plainly and speculatively, check that the tokens are equal, show both speeds."""
    from outrider.engine.comparison import compare_runs, print_comparison

    llm = _load(flags)
    result = compare_runs(llm, _prompt(flags.prompt), _params(flags), flags.repeats)
    if flags.as_json:
        print(json.dumps(result.as_dict()))
    else:
        print_comparison(result, llm, flags.svg)
    if not result.identical:
        raise typer.Exit(1)


@app.command()
def doctor(
    costs: Annotated[
        bool, typer.Option("--costs", help="Measure the cost of rounds and proposals for the controller instead.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --costs: model directory or hub id. Default: the bundled model.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --costs: an HTML file for the curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report what this machine supports, which kernels are in use, whether rows are invariant and what that costs."""
    if costs:
        return _doctor_costs(model, plot, as_json)
    from outrider.bench.doctor import diagnose

    with _errors.status("measuring"):
        checks = diagnose()
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print_checks([astuple(check) for check in checks])
    if not all(check.good for check in checks):
        raise typer.Exit(1)
    return None


@app.command()
def models(
    model: Annotated[str | None, typer.Argument(help="Say what this directory or hub id needs, instead of listing all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/models.md.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the families of models and which features each backend has, or say what a model needs."""
    from outrider.bench import models as listing

    console = PlainConsole(quiet=as_json)
    if model is not None:
        found = listing.show_directory(model, console)
    else:
        found = listing.as_dict()
        if markdown:
            print(listing.families_page())
        else:
            listing.show_families(console)
    if as_json:
        print(json.dumps(found))


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="A new folder.")],
    model: Annotated[str | None, typer.Argument(help="Model directory or hub id. Default: the bundled model.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, of the matrices; vectors keep theirs.")] = "bfloat16",
    layout: Annotated[
        str, typer.Option(help="Of EAGLE and Medusa heads: published (as their authors' code writes them) or vllm.")
    ] = "published",
    as_json: AsJson = False,
) -> None:
    """Write a model and its drafters as Transformers and other engines read them: plain safetensors, config.json, tokenizer."""
    from outrider.heads.export import ExportOptions, export_folder
    from outrider.model import locate
    from outrider.model.bundled import bundled_model

    options = ExportOptions(dtype, layout)
    source = bundled_model() if model is None else locate(model)
    with _errors.status("exporting"):
        folders = [str(folder) for folder in export_folder(source, out, options)]
    print(json.dumps({"folders": folders, "dtype": dtype}) if as_json else "\n".join(folders))


Source = Annotated[str, typer.Argument(metavar="IN", help="Folder or hub id; from the hub, only what is needed is fetched.")]
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")]


@app.command()
def convert(source: Source, out: Folder) -> None:
    """Write a model whose weights are pickles (pytorch_model*.bin) as safetensors. Nothing in the pickles is run."""
    from outrider.model.conversion import MODEL, convert_folder

    print("\n".join(map(str, convert_folder(source, out, MODEL, _say))))


@heads_app.command("convert")
def convert_head(source: Source, out: Folder) -> None:
    """Write a head whose weights are pickled (EAGLE's pytorch_model.bin, Medusa's medusa_lm_head.pt) as safetensors."""
    from outrider.model.conversion import HEAD, convert_folder

    print("\n".join(map(str, convert_folder(source, out, HEAD, _say))))


def _say(line: str) -> None:
    _errors.print(line, highlight=False, markup=False)


def _doctor_costs(model: str | None, plot: Path | None, as_json: bool) -> None:
    from outrider.bench.costs import measured_costs, show_costs, write_plot

    with _errors.status("measuring rounds and proposals"):
        costs = measured_costs(model)
    if as_json:
        print(json.dumps(costs.as_dict()))
    else:
        show_costs(costs, PlainConsole())
    if plot is not None:
        write_plot(costs, plot)
        _errors.print(f"curves in {plot}", highlight=False, markup=False)


def _default_method(flags: DecodingFlags, rule: str) -> str:
    """`auto`, unless an option needs another method."""
    if flags.draft_model is not None and (flags.draft_model != "auto" or rule != "match"):
        return "draft_model"
    if rule != "match":
        return "ngram" if flags.model else "eagle"
    return "auto"


def _load(flags: DecodingFlags, rule: str = "match") -> LLM:
    """An LLM from command-line options, with its settings checked before anything is loaded."""
    from outrider.config import speculation_of_flags
    from outrider.engine.llm import LLM

    set_threads(flags.threads)
    method = flags.method or _default_method(flags, rule)
    speculation = speculation_of_flags(method, flags.draft_model, flags.draft_tokens, rule)
    names = ("dtype", "load_format", "device", "numerics", "fp8_activations", "memory", "kv_memory", "corpus")
    return LLM(flags.model, speculation=speculation, **{name: getattr(flags, name) for name in names})


def _params(flags: DecodingFlags) -> SamplingParams:
    from outrider.sampling import SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "stop", "ignore_eos")
    return SamplingParams(**{name: getattr(flags, name) for name in names})


def _prompt(prompt: str) -> str:
    """The prompt, or standard input where it is "-"."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt", f"standard input is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _as_json(output: CompletionOutput) -> dict[str, Any]:
    names = ("text", "token_ids", "finish_reason", "stop_reason", "seed", "speculation")
    times = ("first_token_s", "total_s", "decode_tokens_per_s")
    timings = {name: getattr(output.timings, name) for name in times}
    return {name: getattr(output, name) for name in names} | {"timings": timings}


if __name__ == "__main__":
    main()
