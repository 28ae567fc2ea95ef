"""`outrider train`: one command per thing trained, and `corpus` for the data they share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.errors import InvalidParameter, OutriderError
from outrider.train import companions_cli, tree_choice
from outrider.train.corpus import CorpusOptions
from outrider.train.prepare import Prepared, PrepareOptions, prepare
from outrider.train.sources import find_sources, installed_sources

__all__ = ["app", "main"]

app = typer.Typer(help="Train models and drafting heads.", no_args_is_help=True, pretty_exceptions_enable=False)

Paths = Annotated[list[Path] | None, typer.Argument(help="Folders, files or .jsonl files with a text field.")]
Installed = Annotated[bool, typer.Option(help="Use the Python source of all installed packages.")]
Suffixes = Annotated[str, typer.Option(help="File names to read in folders, comma-separated endings.")]
HeldoutNames = Annotated[str, typer.Option(help="Packages to hold out, comma-separated; empty: some by hash.")]
Workers = Annotated[int, typer.Option(help="Processes; 0: every core.")]
SkipUnreadable = Annotated[bool, typer.Option(help="Count unreadable files instead of stopping.")]
Seconds = Annotated[float, typer.Option(help="Stop reading files after this long; 0: never.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Directory with a tokenizer to use instead of training one.")]


@app.callback()
def _root() -> None:
    """Train models and drafting heads."""


@app.command()
def corpus(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Folder for tokens, tokenizer and corpus.json.")] = Path("runs/corpus"),
    installed: Installed = False,
    suffixes: Suffixes = ".py",
    heldout: HeldoutNames = "",
    vocab: Annotated[int, typer.Option(help="Tokens the tokenizer learns.")] = 8192,
    context: Annotated[int, typer.Option(help="Longest text the model reads, in tokens.")] = 2048,
    tokenizer: Tokenizer = None,
    workers: Workers = 0,
    skip_unreadable: SkipUnreadable = False,
    seconds: Seconds = 0.0,
) -> None:
    """Read, clean, deduplicate and encode text."""
    rules = CorpusOptions(
        heldout=tuple(name for name in heldout.split(",") if name),
        skip_unreadable=skip_unreadable,
        workers=workers,
        seconds=seconds or None,
    )
    sources = installed_sources(suffixes.split(",")) if installed else find_sources(paths or [], suffixes.split(","))
    if not sources:
        raise InvalidParameter("corpus", f"no {suffixes} files found; pass folders, a .jsonl, or --installed")
    prepare(sources, PrepareOptions(vocab, context, tokenizer, corpus=rules), out, _say)


@app.command()
def lm(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Model directory to write.")] = Path("runs/model"),
    work: Annotated[Path | None, typer.Option(help="Tokens, checkpoint and metrics; default: OUT.work.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder that `train corpus` made, instead of paths.")] = None,
    suffixes: Suffixes = ".py,.txt,.md",
    heldout: HeldoutNames = "",
    tokenizer: Tokenizer = None,
    skip_unreadable: SkipUnreadable = False,
    layers: int = 12,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    ffn: int = 1408,
    vocab: int = 8192,
    context: int = 2048,
    tied: Annotated[bool, typer.Option(help="Share embedding and output matrix.")] = True,
    minutes: Annotated[float | None, typer.Option(help="Train this long.")] = None,
    steps: Annotated[int | None, typer.Option(help="Or this many steps: deterministic, resumable.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of context tokens per step.")] = 64,
    micro_rows: Annotated[int, typer.Option(help="Rows per forward pass; 0: all.")] = 0,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    lr: Annotated[float, typer.Option(help="Peak rate of matrices under Muon.")] = 0.012,
    adam_lr: Annotated[float, typer.Option(help="Peak rate of what AdamW trains.")] = 2.5e-3,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = True,
    checkpoint_steps: Annotated[int, typer.Option(help="Also save every so many steps.")] = 0,
) -> None:
    """Train a Llama-architecture model and its tokenizer from scratch. The same command resumes."""
    from outrider.train.lm import Shape
    from outrider.train.loop import Budget, LoopOptions
    from outrider.train.optim import OptimOptions
    from outrider.train.pretrain import Pretraining, PretrainOptions

    work = work or out.with_name(out.name + ".work")
    budget = Budget(steps, None if minutes is None else minutes * 60)
    prepared = _prepared(data, work / "corpus")
    if prepared is None:
        corpus(paths, work / "corpus", False, suffixes, heldout, vocab, context, tokenizer, 0, skip_unreadable, 0.0)
        prepared = Prepared.open(work / "corpus")
    shape = Shape(layers, hidden, heads, kv_heads, ffn, prepared.vocab, context, tied)
    rates = OptimOptions(optimizer, lr, adam_lr)
    run = Pretraining(PretrainOptions(shape, rates, rows, micro_rows, seed, device, compile_, prepared.eos))
    _say(f"model: {run.decoder.config.parameters / 1e6:.1f}M parameters on {run.device}")
    run.warm_up()
    run.train(prepared, LoopOptions(budget, work, rows, micro_rows, checkpoint_steps=checkpoint_steps))
    run.export(prepared.directory, out)
    figures = run.judge(prepared, out)
    (work / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    for name, figure in figures.items():
        _say(f"{name}: {figure['loss']:.4f} nats per token as exported ({figure['trained']:.4f} before int8)")


app.command()(companions_cli.draft)
app.command()(companions_cli.eagle)
app.command()(companions_cli.medusa)
app.command()(tree_choice.medusa_tree)


def main() -> None:
    """Run the commands, with errors as one line."""
    try:
        app()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _prepared(data: Path | None, own: Path) -> Prepared | None:
    """A corpus given, or left by the run that is being resumed."""
    if data is not None:
        return Prepared.open(data)
    return Prepared.open(own) if (own / "corpus.json").exists() else None


def _say(text: str) -> None:
    print(text, flush=True)
