"""The commands `corpus` (text to tokens), `lm` (pretraining) and `medusa-tree` of `python -m recipes.pyrite`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.errors import InvalidParameter, OutriderError
from outrider.train.corpus import SUMMARY, TokenCorpus
from recipes.pyrite.corpus import CorpusRules
from recipes.pyrite.medusa_tree import medusa_tree
from recipes.pyrite.prepare import PrepareOptions, prepare
from recipes.pyrite.sources import find_sources, installed_sources

if TYPE_CHECKING:
    from outrider.train.loop import LoopOptions
    from recipes.pyrite.pretrain import Pretraining

__all__ = ["app", "main"]

app = typer.Typer(help="Pyrite's corpus and pretraining.", no_args_is_help=True, pretty_exceptions_enable=False)

Paths = Annotated[list[Path] | None, typer.Argument(help="Folders, files or .jsonl files with a text field.")]
Suffixes = Annotated[str, typer.Option(help="File names to read in folders, comma-separated endings.")]
HeldoutNames = Annotated[str, typer.Option(help="Packages to hold out, comma-separated; empty: some by hash.")]
SkipUnreadable = Annotated[bool, typer.Option(help="Count unreadable files instead of stopping.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Directory with a tokenizer to use instead of training one.")]

app.command()(medusa_tree)


@app.command()
def corpus(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Folder for tokens, tokenizer and corpus.json.")] = Path("runs/corpus"),
    installed: Annotated[bool, typer.Option(help="Use the Python source of all installed packages.")] = False,
    suffixes: Suffixes = ".py",
    heldout: HeldoutNames = "",
    vocab: Annotated[int, typer.Option(help="Tokens the tokenizer learns.")] = 8192,
    context: Annotated[int, typer.Option(help="Longest text the model reads, in tokens.")] = 2048,
    tokenizer: Tokenizer = None,
    workers: Annotated[int, typer.Option(help="Processes; 0: every core.")] = 0,
    skip_unreadable: SkipUnreadable = False,
    seconds: Annotated[float, typer.Option(help="Stop reading files after this long; 0: never.")] = 0.0,
) -> None:
    """Read, clean, deduplicate and encode text."""
    rules = CorpusRules(
        heldout=tuple(name for name in heldout.split(",") if name),
        skip_unreadable=skip_unreadable,
        workers=workers,
        seconds=seconds or None,
    )
    sources = installed_sources(suffixes.split(",")) if installed else find_sources(paths or [], suffixes.split(","))
    if not sources:
        raise InvalidParameter("corpus", f"no {suffixes} files found; pass folders, a .jsonl, or --installed")
    prepare(sources, PrepareOptions(vocab, context, tokenizer, corpus=rules), out, _log)


@app.command()
def lm(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Model directory to write.")] = Path("runs/model"),
    work: Annotated[Path | None, typer.Option(help="Tokens, checkpoint and metrics; default: OUT.work.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder that `corpus` made, instead of paths.")] = None,
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
    context: Annotated[int, typer.Option(help="Longest text, and tokens of a row; 0: 2,048 on a GPU, 512 on a CPU.")] = 0,
    tied: Annotated[bool, typer.Option(help="Share embedding and output matrix.")] = True,
    minutes: Annotated[float | None, typer.Option(help="Train this long; reading text and figures take extra time.")] = None,
    steps: Annotated[int | None, typer.Option(help="Or this many steps: deterministic, resumable.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of context tokens per step; 0: 64 on a GPU, 2,048 tokens on a CPU.")] = 0,
    micro_rows: Annotated[int, typer.Option(help="Rows per forward pass; 0: as many as fit the memory.")] = 0,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    lr: Annotated[float, typer.Option(help="Peak rate of matrices under Muon.")] = 0.012,
    adam_lr: Annotated[float, typer.Option(help="Peak rate of what AdamW trains.")] = 2.5e-3,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile. Default: on a GPU.")] = None,
    checkpoint_steps: Annotated[int, typer.Option(help="Also save a checkpoint every N steps.")] = 0,
) -> None:
    """Train a Llama-architecture model and its tokenizer from scratch. The same command resumes."""
    from outrider.train.loop import Budget, LoopOptions
    from outrider.train.optim import OptimOptions
    from outrider.train.shapes import DecoderShape
    from outrider.train.sizing import StepSize, pick_device, resolve_step, training_bytes, uses_compiler
    from recipes.pyrite.pretrain import Pretraining, PretrainOptions

    work = work or out.with_name(out.name + ".work")
    budget = Budget(steps, None if minutes is None else minutes * 60)
    torch_device = pick_device(device)
    full = DecoderShape(layers, hidden, heads, kv_heads, ffn, vocab, 2048, tied)
    token_bytes = training_bytes(full.config(0), vocab)
    step = resolve_step(torch_device, StepSize(context, rows, micro_rows), StepSize(full.context, 64), token_bytes)
    directory = data or work / "corpus"
    if data is None and not (directory / SUMMARY).exists():
        corpus(paths, directory, False, suffixes, heldout, vocab, step.context, tokenizer, 0, skip_unreadable, 0.0)
    tokens = TokenCorpus.open(directory)
    shape = replace(full, vocab=tokens.vocab, context=step.context)
    rates = OptimOptions(optimizer, lr, adam_lr)
    compiles = uses_compiler(torch_device, compile_)
    run = Pretraining(PretrainOptions(shape, rates, step.rows, step.micro_rows, seed, device, compiles, tokens.eos))
    _finish(run, tokens, LoopOptions(budget, work, step.rows, step.micro_rows, checkpoint_steps=checkpoint_steps), out)


def main() -> None:
    """Run the commands, with errors as one line."""
    try:
        app()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _finish(run: Pretraining, tokens: TokenCorpus, loop: LoopOptions, out: Path) -> None:
    """Train, export, and measure the export on held-out text."""
    from outrider.train.sizing import evaluation_rows

    _log(f"model: {run.decoder.spec.parameters / 1e6:.1f}M parameters on {run.device}")
    _log(f"steps of {loop.rows} rows of {run.options.shape.context} tokens, {loop.micro_rows} rows at a time")
    run.warm_up()
    run.train(tokens, loop)
    run.export(tokens.directory, out)
    _log("measuring the loss on held-out text, as exported")
    figures = run.evaluate(tokens, out, None if run.device.type == "cuda" else evaluation_rows(run.device, 96))
    (loop.directory / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    for name, figure in figures.items():
        _log(f"{name}: {figure['loss']:.4f} nats per token as exported ({figure['trained']:.4f} before int8)")


def _log(text: str) -> None:
    print(text, flush=True)
