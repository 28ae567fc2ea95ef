"""The commands `train draft`, `train eagle` and `train medusa`: options, and the student they describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.errors import InvalidParameter
from outrider.train.corpus import CorpusOptions
from outrider.train.prepare import Prepared, PrepareOptions, prepare
from outrider.train.sources import find_sources

if TYPE_CHECKING:
    from outrider.train.frozen import FrozenTarget
    from outrider.train.students import Student

__all__ = ["draft", "eagle", "medusa"]

Paths = Annotated[list[Path] | None, typer.Argument(help="Folders, files or .jsonl files with a text field.")]
Target = Annotated[Path | None, typer.Option(help="Model directory to draft for; default: the bundled model.")]
Data = Annotated[Path | None, typer.Option(help="A folder that `train corpus --tokenizer TARGET` made, instead of paths.")]
Work = Annotated[Path | None, typer.Option(help="Tokens, checkpoint and metrics; default: OUT.work.")]
Suffixes = Annotated[str, typer.Option(help="File names to read in folders, comma-separated endings.")]
HeldoutNames = Annotated[str, typer.Option(help="Packages to hold out, comma-separated; empty: some by hash.")]
SkipUnreadable = Annotated[bool, typer.Option(help="Count unreadable files instead of stopping.")]
Context = Annotated[int, typer.Option(help="Tokens per row; 0: the target's context.")]
Minutes = Annotated[float | None, typer.Option(help="Train this long.")]
Steps = Annotated[int | None, typer.Option(help="Or this many steps: deterministic, resumable.")]
RowsOption = Annotated[int, typer.Option(help="Rows of context tokens per step.")]
MicroRows = Annotated[int, typer.Option(help="Rows per forward pass; 0: all.")]
LossKind = Annotated[str, typer.Option(help="kl, mix (KL, then total variation), lk (-log acceptance) or greedy.")]
Rate = Annotated[float, typer.Option(help="Peak rate of matrices (Muon).")]
AdamRate = Annotated[float, typer.Option(help="Peak rate of what AdamW trains.")]
WriteTokens = Annotated[int, typer.Option(help="Tokens the target writes first, to train on beside the corpus.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")]
CheckpointSteps = Annotated[int, typer.Option(help="Also save every so many steps.")]


@dataclass(frozen=True, slots=True)
class _Common:
    """What the three commands share."""

    name: str
    paths: list[Path] | None
    target: Path | None
    out: Path
    work: Path | None
    data: Path | None
    suffixes: str
    heldout: str
    skip_unreadable: bool
    context: int
    minutes: float | None
    steps: int | None
    rows: int
    micro_rows: int
    lr: float
    adam_lr: float
    write_tokens: int
    seed: int
    device: str
    compile: bool
    checkpoint_steps: int


def draft(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Model directory to write.")] = Path("runs/draft"),
    target: Target = None,
    data: Data = None,
    work: Work = None,
    suffixes: Suffixes = ".py,.txt,.md",
    heldout: HeldoutNames = "",
    skip_unreadable: SkipUnreadable = False,
    layers: int = 2,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 704,
    loss: LossKind = "mix",
    context: Context = 0,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: RowsOption = 32,
    micro_rows: MicroRows = 0,
    lr: Rate = 0.01,
    adam_lr: AdamRate = 2e-3,
    write_tokens: WriteTokens = 0,
    seed: int = 0,
    device: Device = "auto",
    compile_: Compile = True,
    checkpoint_steps: CheckpointSteps = 0,
) -> None:
    """Distil a smaller model of the same vocabulary from a target. The same command resumes."""

    def make(frozen: FrozenTarget) -> Student:
        from outrider.train.companions import new_draft
        from outrider.train.lm import Shape

        shape = Shape(layers, hidden, heads, kv_heads, ffn, frozen.config.vocab, frozen.config.context)
        return new_draft(frozen, shape, loss, seed)

    _run(
        _Common(
            "draft", paths, target, out, work, data, suffixes, heldout, skip_unreadable, context, minutes, steps, rows,
            micro_rows, lr, adam_lr, write_tokens, seed, device, compile_, checkpoint_steps,
        ),
        make,
    )  # fmt: skip


def eagle(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Folder of the head to write.")] = Path("runs/eagle"),
    target: Target = None,
    data: Data = None,
    work: Work = None,
    suffixes: Suffixes = ".py,.txt,.md",
    heldout: HeldoutNames = "",
    skip_unreadable: SkipUnreadable = False,
    form: Annotated[str, typer.Option(help="eagle3 or eagle1.")] = "eagle3",
    taps: Annotated[str, typer.Option(help="Target layers to read, comma-separated; empty: 2, L/2, L-3.")] = "",
    depths: Annotated[int, typer.Option(help="Drafted tokens to unroll in training.")] = 6,
    ffn: Annotated[int, typer.Option(help="Width of the MLP; 0: the target's.")] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Own output matrix over so many frequent tokens; 0: the target's.")] = 0,
    own_output: Annotated[bool, typer.Option(help="Train an own output matrix over all tokens.")] = False,
    fc_norm: Annotated[bool, typer.Option(help="Norm each tap (EAGLE-3.1).")] = True,
    norm_output: Annotated[bool, typer.Option(help="Feed back the normed output (EAGLE-3.1).")] = True,
    norm_before_residual: Annotated[bool, typer.Option(help="Residual of the normed feature.")] = False,
    loss: LossKind = "mix",
    context: Context = 0,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: RowsOption = 32,
    micro_rows: MicroRows = 0,
    lr: Rate = 0.01,
    adam_lr: AdamRate = 2e-3,
    write_tokens: WriteTokens = 0,
    seed: int = 0,
    device: Device = "auto",
    compile_: Compile = True,
    checkpoint_steps: CheckpointSteps = 0,
) -> None:
    """Train an EAGLE head on a frozen target. The same command resumes."""
    read = _integers("taps", taps)

    def make(frozen: FrozenTarget) -> Student:
        from outrider.train.companions import EagleShape, new_eagle

        shape = EagleShape(
            form=form,
            taps=read,
            ffn=ffn,
            own_output=own_output,
            draft_vocab=draft_vocab,
            fc_norm=fc_norm,
            norm_output=norm_output,
            norm_before_residual=norm_before_residual,
        )
        return new_eagle(frozen, shape, loss, seed, depths)

    _run(
        _Common(
            "eagle", paths, target, out, work, data, suffixes, heldout, skip_unreadable, context, minutes, steps, rows,
            micro_rows, lr, adam_lr, write_tokens, seed, device, compile_, checkpoint_steps,
        ),
        make,
    )  # fmt: skip


def medusa(
    paths: Paths = None,
    out: Annotated[Path, typer.Option(help="Folder of the heads to write.")] = Path("runs/medusa"),
    target: Target = None,
    data: Data = None,
    work: Work = None,
    suffixes: Suffixes = ".py,.txt,.md",
    heldout: HeldoutNames = "",
    skip_unreadable: SkipUnreadable = False,
    heads: Annotated[int, typer.Option(help="Tokens ahead.")] = 4,
    blocks: Annotated[int, typer.Option(help="Residual blocks per head.")] = 1,
    loss: LossKind = "kl",
    context: Context = 0,
    minutes: Minutes = None,
    steps: Steps = None,
    rows: RowsOption = 32,
    micro_rows: MicroRows = 0,
    lr: Rate = 0.01,
    adam_lr: AdamRate = 2e-3,
    write_tokens: WriteTokens = 0,
    seed: int = 0,
    device: Device = "auto",
    compile_: Compile = True,
    checkpoint_steps: CheckpointSteps = 0,
) -> None:
    """Train Medusa heads on a frozen target. The same command resumes."""

    def make(frozen: FrozenTarget) -> Student:
        from outrider.train.companions import MedusaShape, new_medusa

        return new_medusa(frozen, MedusaShape(heads, blocks), loss)

    _run(
        _Common(
            "medusa", paths, target, out, work, data, suffixes, heldout, skip_unreadable, context, minutes, steps, rows,
            micro_rows, lr, adam_lr, write_tokens, seed, device, compile_, checkpoint_steps,
        ),
        make,
    )  # fmt: skip


def _run(common: _Common, make: Callable[[FrozenTarget], Student]) -> None:
    from outrider.model import ModelConfig
    from outrider.model.bundled import bundled_model
    from outrider.train.distill import DistillOptions
    from outrider.train.learn import LearnOptions, learn
    from outrider.train.loop import Budget, LoopOptions
    from outrider.train.optim import OptimOptions

    budget = Budget(common.steps, None if common.minutes is None else common.minutes * 60)
    target = common.target or bundled_model()
    most = ModelConfig.read(target).context
    context = common.context or most
    if not 0 < context <= most:
        raise InvalidParameter("context", f"{context} is not between 1 and the target's {most}")
    work = common.work or common.out.with_name(common.out.name + ".work")
    rates = OptimOptions(lr=common.lr, adam_lr=common.adam_lr)
    distill = DistillOptions(context, rates, common.seed)
    options = LearnOptions(target, common.out, distill, common.device, common.compile, common.write_tokens)
    loop = LoopOptions(budget, work, common.rows, common.micro_rows, checkpoint_steps=common.checkpoint_steps)
    learn(make, common.name, _corpus(common, target, work / "corpus", context), options, loop, _say)


def _corpus(common: _Common, target: Path, own: Path, context: int) -> Prepared:
    """A corpus given, left by the run that is being resumed, or made now with the target's tokenizer."""
    if common.data is not None:
        return Prepared.open(common.data)
    if (own / "corpus.json").exists():
        return Prepared.open(own)
    sources = find_sources(common.paths or [], common.suffixes.split(","))
    if not sources:
        raise InvalidParameter("corpus", f"no {common.suffixes} files found; pass folders, a .jsonl, or --data")
    names = tuple(name for name in common.heldout.split(",") if name)
    rules = CorpusOptions(heldout=names, skip_unreadable=common.skip_unreadable)
    return prepare(sources, PrepareOptions(context=context, tokenizer=target, corpus=rules), own, _say)


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidParameter(name, f"{text!r} is not a list of numbers like 2,6,9") from None


def _say(text: str) -> None:
    print(text, flush=True)
