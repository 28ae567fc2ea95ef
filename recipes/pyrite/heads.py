"""Train Pyrite's draft model, EAGLE-3 head and Medusa heads in one command of at most ten minutes on one GPU.

    PYTHONPATH=src:. python -m recipes.pyrite.heads --out OUT

The corpus is encoded with the target's tokenizer while everything compiles. Then the target writes text, and the drafters
named in a stage are trained on it and on the corpus: the target runs once for all of them. When a stage is done, each of its
drafters goes to OUT/NAME.tar, is loaded as stored, and is evaluated on held-out packages and on text that the target writes.
Metrics and figures go to OUT/heads.tar. A watchdog exports the drafters that exist before the time runs out.

    --stages eagle+draft+medusa              all at once (default)
    --stages eagle:3.5 draft:2.5 medusa:1    one after another, with shares of the time
    --stages eagle+eagle_kl+eagle_three      a comparison of variants
    --row-tokens 320                         rows of one text each: what the target wrote after function stubs
    --smoke                                  everything in small on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pyrite.clock import note, now, start_watchdog, write_tar
from recipes.pyrite.packages import ROOT, environment, start_corpus, start_small_corpus
from recipes.pyrite.variants import variants

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.train.corpus import TokenCorpus
    from outrider.train.data import TokenStore
    from outrider.train.distill import Distillation
    from outrider.train.frozen import FrozenTarget
    from outrider.train.networks import TrainableDrafter
    from recipes.pyrite.evaluation import EvaluationText

_FINISH_S = 34.0  # export and figures after training
_EVALUATED_TOKENS = 320  # of a text written after a held-out stub


@dataclass(frozen=True, slots=True)
class Stage:
    """Drafters trained together, and their share of the time."""

    names: tuple[str, ...]
    share: float

    @classmethod
    def parse(cls, text: str) -> Stage:
        names, _, share = text.partition(":")
        return cls(tuple(names.split("+")), float(share or 1))


@dataclass(slots=True)
class Shipment:
    """Writes results to OUT, from the main thread or from the watchdog."""

    out: Path
    work: Path
    model: Path
    open: dict[str, TrainableDrafter] = field(default_factory=dict)  # trained, not yet exported
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def export_all(self) -> None:
        """Export every network that is still open."""
        with self._lock:
            for name, network in list(self.open.items()):
                network.export(self.model, self.work / name)
                write_tar(
                    self.out / f"{name}.tar", [(file, f"{name}/{file.name}") for file in sorted((self.work / name).iterdir())]
                )
                del self.open[name]
                size = sum(file.stat().st_size for file in (self.work / name).glob("*.safetensors"))
                note(f"exported {name}: {size / 1e6:.2f} MB")

    def finish(self) -> int:
        """The watchdog's last step. Returns the exit code of the process."""
        self.export_all()
        self.bundle()
        return 0

    def bundle(self) -> None:
        """Write metrics and figures."""
        kept = sorted([*self.work.glob("*.json"), *self.work.glob("run-*/metrics.*")])
        write_tar(self.out / "heads.tar", [(file, str(file.relative_to(self.work)).replace("/", "-")) for file in kept])


def main() -> None:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke and args.model is None:
        args.model = _tiny_target(args.work)
        args.minutes += now() / 60
    shipment = Shipment(args.out, args.work, args.model)
    start_watchdog(max(args.minutes * 60, 300.0 if args.smoke else 0.0), shipment.finish)  # a smoke run may be late
    corpus = _start_corpus(args)
    target, stages = _target(args), [Stage.parse(text) for text in args.stages]
    known = variants(args)
    wrong = [name for stage in stages for name in stage.names if name not in known]
    if wrong:
        sys.exit(f"unknown drafter {wrong[0]!r}; known: {', '.join(known)}")
    first = _build(stages[0], known, target, args)
    tokens = _wait(corpus, args)
    store, text = _text(target, tokens, args)
    figures: dict[str, Any] = {}
    for i, stage in enumerate(stages):
        run = first if i == 0 else _build(stage, known, target, args)
        share = stage.share / sum(later.share for later in stages[i:])
        budget = (args.minutes * 60 - _finish(args) - now()) * share
        _train(run, stage, store, text, args, budget, shipment)
        shipment.export_all()
        figures |= _evaluate(run, target, text, args.work)
        (args.work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        shipment.bundle()
    note("done")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/heads")))
    parser.add_argument("--work", type=Path, default=Path("runs/heads.work"))
    parser.add_argument("--model", type=Path, default=None, help="the target; default: the bundled one")
    parser.add_argument("--minutes", type=float, default=9.2, help="of the whole command; the watchdog exports at this time")
    parser.add_argument("--stages", nargs="+", default=["eagle+draft+medusa"])
    parser.add_argument("--only", default="", help="of the stages, only these drafters (comma-separated)")
    parser.add_argument("--loss", default="mix", choices=("kl", "mix", "lk"))
    parser.add_argument("--depths", type=int, default=6, help="unrolled depths of EAGLE")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--micro-rows", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--write-seconds", type=float, default=25.0, help="time the target writes text to train on; 0: none")
    parser.add_argument("--write-share", type=float, default=0.35, help="of the training text")
    parser.add_argument("--write-rows", type=int, default=4096, help="texts written side by side, with --row-tokens")
    parser.add_argument("--row-tokens", type=int, default=0, help="train on rows of one text of this many tokens; 0: packed rows")
    parser.add_argument("--leads", type=int, nargs="+", default=[0], help="tokens of the file before a stub, drawn from these")
    parser.add_argument("--blocks", type=int, default=64, help="of a row of text, for block drafters")
    parser.add_argument("--skip", type=int, default=0, help="first positions of a row where no block starts")
    parser.add_argument("--fade", type=float, default=7.0, help="guess j of a block weighs exp(-j / FADE)")
    parser.add_argument("--survival", type=float, default=0.0, help="and the chance that it is reached, to this power")
    parser.add_argument("--corpus", type=Path, default=None, help="a corpus that another run is preparing; waits for it")
    parser.add_argument("--begin-from", type=Path, default=None, help="folder with exported drafters to begin from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="everything in small, on a CPU")
    args = parser.parse_args()
    if args.only:
        kept = [_only(stage, args.only.split(",")) for stage in args.stages]
        args.stages = [stage for stage in kept if stage]
    if args.smoke:
        args.minutes, args.rows, args.micro_rows = min(args.minutes, 1.8), 4, 4
        args.write_seconds, args.depths, args.write_rows = min(args.write_seconds, 1.0), 4, 16
    elif args.model is None:
        args.model = ROOT / "src" / "outrider" / "models" / "pyrite"
    return args


def _only(stage: str, names: list[str]) -> str:
    parsed = Stage.parse(stage)
    kept = [name for name in parsed.names if name in names]
    return f"{'+'.join(kept)}:{parsed.share}" if kept else ""


def _finish(args: argparse.Namespace) -> float:
    return 12.0 if args.smoke else _FINISH_S


def _tiny_target(work: Path) -> Path:
    """A target for a smoke run on a CPU: two hundred steps of `recipes.pyrite lm`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    command = [sys.executable, "-m", "recipes.pyrite", "lm", *[str(library / name) for name in ("json", "email", "logging")]]
    size = "--layers 5 --hidden 64 --heads 4 --kv-heads 2 --ffn 128 --vocab 512 --context 128 --rows 4 --steps 200"
    subprocess.run([*command, "--out", str(work / "target"), *size.split(), "--no-compile"], check=True, env=environment())
    return work / "target"


def _start_corpus(args: argparse.Namespace) -> subprocess.Popen[bytes] | None:
    if args.corpus is not None:
        return None
    if not args.smoke:
        return start_corpus(args.work / "corpus", args.model)
    made = args.work / "target.work" / "corpus"
    if made.exists():
        return None
    library = Path(sysconfig.get_paths()["stdlib"])
    return start_small_corpus(args.work / "corpus", [library / "json", library / "email"], 512, 128)


def _target(args: argparse.Namespace) -> FrozenTarget:
    import torch

    from outrider.train.frozen import FrozenTarget
    from outrider.train.sizing import pick_device

    torch.set_float32_matmul_precision("high")
    target = FrozenTarget.load(args.model, pick_device("auto"))
    note(f"target: {target.config.parameters / 1e6:.1f}M parameters on {target.decoder.norm.device}")
    return target


def _build(
    stage: Stage, known: dict[str, Callable[[FrozenTarget], TrainableDrafter]], target: FrozenTarget, args: argparse.Namespace
) -> Distillation:
    from outrider.train.distill import Distillation

    run = Distillation(target, {name: known[name](target) for name in stage.names})
    for name, network in run.networks.items():
        if args.begin_from is not None and (args.begin_from / name).is_dir():
            begin_from(network, target, args.begin_from / name)
            note(f"{name}: begins from {args.begin_from / name}")
        note(f"{name}: {sum(p.numel() for p in network.module.parameters()) / 1e6:.2f}M parameters")
    if not args.no_compile:
        run.warm_up(args.micro_rows, args.row_tokens or target.config.context)
        _free_memory()
        note("compiled")
    return run


def begin_from(network: TrainableDrafter, target: FrozenTarget, directory: Path) -> None:
    """Copy the weights of an exported drafter into a fresh network of the same shape."""
    from outrider.errors import ModelError

    saved = network.loaded(directory, target).module.state_dict()
    try:
        network.module.load_state_dict(saved)
    except RuntimeError as error:
        raise ModelError(f"{directory} holds a drafter of another shape: {error}") from None


def _wait(corpus: subprocess.Popen[bytes] | None, args: argparse.Namespace) -> TokenCorpus:
    from outrider.train.corpus import TokenCorpus, require_same_tokenizer

    if args.corpus is not None:
        while not (args.corpus / "corpus.json").exists():
            time.sleep(0.5)
        return TokenCorpus.open(args.corpus)
    if corpus is None:
        return TokenCorpus.open(args.work / "target.work" / "corpus")
    if corpus.wait(timeout=max(args.minutes * 60 - now(), 1)) != 0:
        sys.exit("the corpus could not be prepared; its error is above")
    tokens = TokenCorpus.open(args.work / "corpus")
    require_same_tokenizer(args.model, tokens)
    note(f"corpus ready: {tokens.summary['tokens']}")
    return tokens


def _text(target: FrozenTarget, corpus: TokenCorpus, args: argparse.Namespace) -> tuple[TokenStore, EvaluationText]:
    """The text to train on and the text to evaluate on."""
    from outrider.train.acceptance import heldout_rows, written_for
    from outrider.train.generate import Writing, merged, write_until
    from recipes.pyrite.evaluation import EvaluationText

    store, heldout = corpus.store("train"), corpus.store("heldout_packages")
    rows, count = (8, 48) if args.smoke else (64, 200)
    text = heldout_rows(heldout, args.row_tokens or target.config.context, rows)
    if args.row_tokens:
        return _after_stubs(target, corpus, args, text)
    written = {temperature: written_for(target, heldout, rows, count, temperature) for temperature in (0.0, 0.8)}
    note("written to evaluate on")
    if args.write_seconds:
        size: dict[str, Any] = {"rows": 8, "length": 96, "prompts": (24,)} if args.smoke else {}
        written_text = write_until(target.decoder, store, Writing(args.write_seconds, **size))
        note(f"written to train on: {written_text.tokens} tokens beside {store.tokens}")
        store = merged(store, written_text, args.write_share)
    return store, EvaluationText(text, written)


def _after_stubs(
    target: FrozenTarget, corpus: TokenCorpus, args: argparse.Namespace, text: Tensor
) -> tuple[TokenStore, EvaluationText]:
    """Both texts from what the target writes after stubs. Static trees are chosen on one text and evaluated on another."""
    from outrider.train.corpus import load_tokenizer
    from recipes.pyrite.evaluation import EvaluationText
    from recipes.pyrite.onpolicy import StubWriting, with_windows, write_after_stubs, written_after
    from recipes.pyrite.parallel import cores
    from recipes.pyrite.stubs import find_stubs

    store, heldout = corpus.store("train"), corpus.store("heldout_packages")
    tokenizer, longest = load_tokenizer(args.model), args.row_tokens * 5 // 8
    known, unknown = (find_stubs(part, tokenizer, 12, longest, 1 if args.smoke else cores()) for part in (store, heldout))
    note(f"stubs: {len(known.starts)} to train on, {len(unknown.starts)} held out")
    rows, decoder = min(8 if args.smoke else 256, len(known.starts), len(unknown.starts)), target.decoder
    middle, other = (
        slice(half - rows // 2, half - rows // 2 + rows) for half in (len(known.starts) // 2, len(unknown.starts) // 2)
    )
    written, fit, length = {}, {}, args.row_tokens if args.smoke else _EVALUATED_TOKENS
    for temperature in (0.0, 0.8):
        written[temperature] = written_after(decoder, heldout, unknown, other, length, temperature, 7)
        fit[temperature] = written_after(decoder, store, known, middle, length, temperature, 8)
    note("written to evaluate on")
    writing = StubWriting(args.row_tokens, args.write_seconds, args.write_rows, leads=tuple(args.leads), seed=args.seed)
    texts = write_after_stubs(decoder, store, known, writing)
    _free_memory()
    note(f"written to train on: {texts.tokens} tokens in {texts.documents} texts that do not loop")
    return with_windows(texts, store, args.write_share, args.seed), EvaluationText(text, written, fit)


def _train(
    run: Distillation,
    stage: Stage,
    store: TokenStore,
    text: EvaluationText,
    args: argparse.Namespace,
    seconds: float,
    shipment: Shipment,
) -> None:
    from outrider.train.acceptance import agreement
    from outrider.train.data import TrainingRows
    from outrider.train.loop import Budget, LoopOptions
    from outrider.train.networks import TrainableMedusa
    from outrider.train.optim import OptimOptions
    from outrider.train.tree import fit_tree

    shipment.open = dict(run.networks)
    run.heldout = text.rows[:: max(len(text.rows) // 16, 1)]
    context = args.row_tokens or run.target.config.context
    rows = TrainingRows(store, context, args.seed)
    place = args.work / "-".join(("run", *stage.names))  # no drafter has this name
    loop = LoopOptions(Budget(seconds=max(seconds, 1.0)), place, args.rows, args.micro_rows, checkpoint_every_s=0.0)
    at = run.train(rows, OptimOptions(lr=args.lr, adam_lr=args.adam_lr), loop).position
    note(f"trained {'+'.join(stage.names)}: {at.step} steps, {at.tokens / 1e6:.0f}M tokens in {at.seconds:.0f} s")
    for name, network in run.networks.items():
        network.settle(lambda one: agreement(one, run.target.reading(one.taps), text.rows).by_position[0])
        if isinstance(network, TrainableMedusa):
            expected = fit_tree(network, run.target, text.fit or text.written)
            note(f"{name}: its static tree gives {expected:.2f} tokens per round on the text it was fitted to")


def _evaluate(run: Distillation, target: FrozenTarget, text: EvaluationText, work: Path) -> dict[str, Any]:
    from recipes.pyrite.evaluation import describe, evaluate_drafter

    figures = {}
    for name, network in run.networks.items():
        figures[name] = evaluate_drafter(network.loaded(work / name, target), target, text)
        note(name)
        describe(figures[name], note)
    return figures


def _free_memory() -> None:
    """Release cached memory: another process may share the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
