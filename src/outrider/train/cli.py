"""`outrider train`: one command for each kind of drafter."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outrider.errors import InvalidParameter, OutriderError
from outrider.options import add_moved, spread
from outrider.terminal import print_error
from outrider.train.task import TrainingTask

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train drafters for a model: a draft model, an EAGLE head, an MTP module, Medusa heads, a block drafter, an exit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
@spread
def draft(flags: TrainingTask, layers: int = 2, hidden: int = 256, heads: int = 4, kv_heads: int = 2, ffn: int = 704) -> None:
    """Distil a smaller model of the same vocabulary from a target. The same command resumes."""
    from outrider.train.run import run_task
    from outrider.train.shapes import DecoderShape, new_draft

    shape = DecoderShape(layers, hidden, heads, kv_heads, ffn)
    run_task(flags, "draft", lambda target: new_draft(target, shape, flags.loss or "mix", flags.seed))


@app.command()
@spread
def eagle(
    flags: TrainingTask,
    form: Annotated[str, typer.Option(help="eagle3 or eagle1.")] = "eagle3",
    taps: Annotated[str, typer.Option(help="Target layers to read, comma-separated; empty: 2, L/2, L-3.")] = "",
    depths: Annotated[int, typer.Option(help="Drafted tokens to unroll in training.")] = 6,
    ffn: Annotated[int, typer.Option(help="Width of the MLP; 0: the target's.")] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Output matrix over the N most frequent tokens; 0: the target's.")] = 0,
    own_output: Annotated[bool, typer.Option(help="Train an output matrix over all tokens.")] = False,
    fc_norm: Annotated[bool, typer.Option(help="Norm each tap (EAGLE-3.1).")] = True,
    norm_output: Annotated[bool, typer.Option(help="Feed back the normed output (EAGLE-3.1).")] = True,
    norm_before_residual: Annotated[bool, typer.Option(help="Residual of the normed feature.")] = False,
) -> None:
    """Train an EAGLE head on a frozen target. The same command resumes."""
    layers = _integers("taps", taps)
    from outrider.train.run import run_task
    from outrider.train.shapes import EagleShape, new_eagle

    shape = EagleShape(
        form=form,
        taps=layers,
        ffn=ffn,
        own_output=own_output,
        draft_vocab=draft_vocab,
        fc_norm=fc_norm,
        norm_output=norm_output,
        norm_before_residual=norm_before_residual,
    )
    run_task(flags, "eagle", lambda target: new_eagle(target, shape, flags.loss or "mix", flags.seed, depths))


@app.command()
@spread
def mtp(
    flags: TrainingTask,
    depths: Annotated[int, typer.Option(help="Drafted tokens to unroll in training; each weighs 0.6 times the one before.")] = 3,
    ffn: Annotated[int, typer.Option(help="Width of the MLP; 0: the target's.")] = 0,
) -> None:
    """Train an MTP module on a frozen target. The same command resumes."""
    from outrider.train.run import run_task
    from outrider.train.shapes import MtpShape, new_mtp

    run_task(flags, "mtp", lambda target: new_mtp(target, MtpShape(ffn), flags.loss or "mix", flags.seed, depths))


@app.command()
@spread
def medusa(
    flags: TrainingTask,
    heads: Annotated[int, typer.Option(help="Heads; head k drafts the k-th token.")] = 4,
    blocks: Annotated[int, typer.Option(help="Residual blocks per head.")] = 1,
) -> None:
    """Train Medusa heads on a frozen target. The same command resumes."""
    from outrider.train.run import run_task
    from outrider.train.shapes import MedusaShape, new_medusa

    run_task(flags, "medusa", lambda target: new_medusa(target, MedusaShape(heads, blocks), flags.loss or "kl"))


@app.command()
@spread
def dflash(
    flags: TrainingTask,
    layers: Annotated[int, typer.Option(help="Layers; they begin as copies of the target's last ones.")] = 2,
    block: Annotated[int, typer.Option(help="Rows of a block: the newest token and masks.")] = 12,
    blocks: Annotated[int, typer.Option(help="Blocks that start in each row of text.")] = 64,
    taps: Annotated[str, typer.Option(help="Target layers to read, comma-separated; empty: three, evenly.")] = "",
    ffn: Annotated[int, typer.Option(help="Width of the MLP; 0: the target's.")] = 0,
    markov: Annotated[int, typer.Option(help="Rank of the scores of neighbouring tokens (DSpark); 0: none.")] = 32,
    confidence: Annotated[bool, typer.Option(help="Learn how likely each guess is accepted (DSpark).")] = False,
    causal: Annotated[bool, typer.Option(help="Rows of a block see those before them alone, so shorter blocks agree.")] = True,
    from_anchor: Annotated[bool, typer.Option(help="The newest token's row guesses too (DSpark).")] = True,
    mask: Annotated[int, typer.Option(help="Token id in masked slots; -1: the last of the vocabulary.")] = -1,
    draft_vocab: Annotated[int, typer.Option(help="Output matrix over the N most frequent tokens; 0: the target's.")] = 0,
) -> None:
    """Train a block drafter (DFlash) on a frozen target. The same command resumes."""
    read = _integers("taps", taps)
    from outrider.train.run import run_task
    from outrider.train.shapes import BlockShape, new_block

    masked = None if mask < 0 else mask
    shape = BlockShape(layers, block, read, ffn, markov, confidence, causal, from_anchor, masked, draft_vocab)
    run_task(flags, "dflash", lambda target: new_block(target, shape, flags.loss or "mix", flags.seed, blocks))


@app.command(name="early-exit")
@spread
def early_exit(
    flags: TrainingTask,
    exits: Annotated[str, typer.Option(help="Layers to leave after, comma-separated; empty: L/4, L/3, L/2 and 2L/3.")] = "",
    ffn: Annotated[int, typer.Option(help="Width of an adapter's MLP; 0: the target's.")] = 0,
) -> None:
    """Train exit adapters on a frozen target, and keep the one whose exit pays most. The same command resumes."""
    layers = _integers("exits", exits)
    from outrider.train.early_exit import new_exits
    from outrider.train.run import run_task

    run_task(flags, "early_exit", lambda target: new_exits(target, layers, ffn, flags.loss or "mix", flags.seed))


for _name in ("lm", "corpus", "medusa-tree"):
    add_moved(app, _name, f"recipes.pyrite {_name}")


def main() -> None:
    """Run the commands, with errors as one line."""
    try:
        app()
    except OutriderError as error:
        print_error(error)
        sys.exit(1)


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidParameter(name, f"{text!r} is not a list of numbers like 2,6,9") from None
