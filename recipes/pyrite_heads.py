"""Train Pyrite's draft model, EAGLE-3 head and Medusa heads in one command of at most ten minutes on one GPU.

    PYTHONPATH=src python recipes/pyrite_heads.py --out OUT

The corpus is encoded again with the target's tokenizer while everything compiles. Then the target writes
text of its own for a while, and the drafters named in a stage learn from it and from the corpus together:
the target runs once for all of them. Every one goes to OUT/NAME.tar as soon as its stage is done, is
loaded again as stored, and is judged on held-out packages and on text the target writes; metrics and
figures go to OUT/heads.tar. A watchdog exports whatever exists before the time runs out.

    --stages eagle+draft+medusa              all at once (default)
    --stages eagle:3.5 draft:2.5 medusa:1    one after another, with shares of the time
    --stages eagle+eagle_kl+eagle_three      a comparison of variants
    --row-tokens 320                         rows of one text each: what the target wrote after function stubs
    --smoke                                  everything in miniature on a CPU
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # before torch is imported: the budget counts from here

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import sysconfig  # noqa: E402
import tarfile  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from pyrite_corpus import start_corpus, start_small_corpus  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.train.companions import Trial
    from outrider.train.data import TokenStore
    from outrider.train.distill import Distillation
    from outrider.train.frozen import FrozenTarget
    from outrider.train.prepare import Prepared
    from outrider.train.students import Student

_ROOT = Path(__file__).parents[1]
_FINISH_S = 34.0  # export and judgement after training
_JUDGED_TOKENS = 320  # of a text written after a held-out stub


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
    """Puts results where they are collected, from the main thread or from the watchdog."""

    out: Path
    work: Path
    model: Path
    open: dict[str, Student] = field(default_factory=dict)  # trained, not yet exported
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def export_all(self) -> None:
        """Write and ship every student that is still open."""
        from outrider.train.companions import export

        with self._lock:
            for name, student in list(self.open.items()):
                export(student, self.model, self.work / name)
                _tar(self.out / f"{name}.tar", [(file, f"{name}/{file.name}") for file in sorted((self.work / name).iterdir())])
                del self.open[name]
                size = sum(file.stat().st_size for file in (self.work / name).glob("*.safetensors"))
                _note(f"exported {name}: {size / 1e6:.2f} MB")

    def bundle(self) -> None:
        """Ship metrics and figures."""
        kept = sorted([*self.work.glob("*.json"), *self.work.glob("run-*/metrics.*")])
        _tar(self.out / "heads.tar", [(file, str(file.relative_to(self.work)).replace("/", "-")) for file in kept])


def variants(args: argparse.Namespace) -> dict[str, Callable[[FrozenTarget], Student]]:
    """Everything a stage can name."""
    from outrider.train.companions import EagleShape, MedusaShape, new_draft, new_eagle, new_medusa
    from outrider.train.lm import Shape

    def eagle(kind: str = args.loss, **fields: Any) -> Callable[[FrozenTarget], Student]:
        return lambda target: new_eagle(target, EagleShape(**fields), kind, args.seed, args.depths)

    def draft(layers: int, hidden: int, ffn: int, kind: str = args.loss) -> Callable[[FrozenTarget], Student]:
        heads = max(hidden // 64, 2)
        return lambda target: new_draft(
            target, Shape(layers, hidden, heads, heads // 2, ffn, context=target.config.context), kind, args.seed
        )

    def medusa(heads: int, blocks: int, kind: str = "kl") -> Callable[[FrozenTarget], Student]:
        return lambda target: new_medusa(target, MedusaShape(heads, blocks), kind)

    if args.smoke:
        return {"eagle": eagle(taps=(1, 2, 4)), "draft": draft(1, 32, 48), "medusa": medusa(2, 1)}
    taps = (2, 6, 9, 12)  # the published three and the stream that leaves the last layer
    return {
        "eagle": eagle(taps=taps),
        "eagle_kl": eagle("kl", taps=taps),
        "eagle_lk": eagle("lk", taps=taps),
        "eagle_three": eagle(),
        "eagle_late": eagle(taps=(4, 8, 12)),
        "eagle_wide": eagle(taps=taps, ffn=2048),
        "eagle_plain": eagle(taps=taps, fc_norm=False, norm_output=False),
        "eagle1": eagle(form="eagle1"),
        "draft": draft(2, 256, 704),
        "draft_kl": draft(2, 256, 704, "kl"),
        "draft_deep": draft(3, 256, 512),
        "draft_slim": draft(4, 192, 512),
        "medusa": medusa(4, 2),
        "medusa_mix": medusa(4, 2, "mix"),
        "medusa_deep": medusa(4, 4),
        "medusa_deep_mix": medusa(4, 4, "mix"),
        "medusa_deep_greedy": medusa(4, 4, "greedy"),
        "medusa_six": medusa(4, 6),
        "medusa_six_greedy": medusa(4, 6, "greedy"),
        "medusa_five": medusa(5, 5),
        "medusa_eight": medusa(3, 8),
    }


def main() -> None:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke and args.model is None:
        args.model = _tiny_target(args.work)
        args.minutes += _now() / 60
    shipment = Shipment(args.out, args.work, args.model)
    _start_watchdog(shipment, args.minutes * 60 * (5 if args.smoke else 1))  # a trial is late on a busy machine, not lost
    corpus = _start_corpus(args)
    target, stages = _target(args), [Stage.parse(text) for text in args.stages]
    known = variants(args)
    wrong = [name for stage in stages for name in stage.names if name not in known]
    if wrong:
        sys.exit(f"unknown drafter {wrong[0]!r}; known: {', '.join(known)}")
    first = _build(stages[0], known, target, args)
    prepared = _wait(corpus, args)
    store, trial = _text(target, prepared, args)
    figures: dict[str, Any] = {}
    for i, stage in enumerate(stages):
        run = first if i == 0 else _build(stage, known, target, args)
        share = stage.share / sum(later.share for later in stages[i:])
        budget = (args.minutes * 60 - _finish(args) - _now()) * share
        _train(run, stage, store, trial, args, budget, shipment)
        shipment.export_all()
        figures |= _judge(run, target, trial, args.work)
        (args.work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        shipment.bundle()
    _note("done")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/heads")))
    parser.add_argument("--work", type=Path, default=Path("runs/heads.work"))
    parser.add_argument("--model", type=Path, default=None, help="the target; default: the bundled one")
    parser.add_argument("--minutes", type=float, default=9.2, help="all of it: at this time everything is out in any case")
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
    parser.add_argument("--row-tokens", type=int, default=0, help="train on rows of one text of so many tokens; 0: packed rows")
    parser.add_argument("--corpus", type=Path, default=None, help="a corpus that another run is preparing, to be waited for")
    parser.add_argument("--begin-from", type=Path, default=None, help="folder with drafters exported before, to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="everything in miniature, on a CPU")
    args = parser.parse_args()
    if args.only:
        kept = [_only(stage, args.only.split(",")) for stage in args.stages]
        args.stages = [stage for stage in kept if stage]
    if args.smoke:
        args.minutes, args.rows, args.micro_rows = min(args.minutes, 1.8), 4, 4
        args.write_seconds, args.depths, args.write_rows = min(args.write_seconds, 1.0), 4, 16
    elif args.model is None:
        args.model = _ROOT / "src" / "outrider" / "models" / "pyrite"
    return args


def _only(stage: str, names: list[str]) -> str:
    parsed = Stage.parse(stage)
    kept = [name for name in parsed.names if name in names]
    return f"{'+'.join(kept)}:{parsed.share}" if kept else ""


def _finish(args: argparse.Namespace) -> float:
    return 12.0 if args.smoke else _FINISH_S


def _tiny_target(work: Path) -> Path:
    """A target for the trial on a CPU: two hundred steps of `train lm`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    command = [sys.executable, "-m", "outrider.train", "lm", *[str(library / name) for name in ("json", "email", "logging")]]
    size = "--layers 5 --hidden 64 --heads 4 --kv-heads 2 --ffn 128 --vocab 512 --context 128 --rows 4 --steps 200"
    subprocess.run([*command, "--out", str(work / "target"), *size.split(), "--no-compile"], check=True)
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
    from outrider.train.pretrain import pick_device

    torch.set_float32_matmul_precision("high")
    target = FrozenTarget.load(args.model, pick_device("auto"))
    _note(f"target: {target.config.parameters / 1e6:.1f}M parameters on {target.decoder.norm.device}")
    return target


def _build(
    stage: Stage, known: dict[str, Callable[[FrozenTarget], Student]], target: FrozenTarget, args: argparse.Namespace
) -> Distillation:
    from outrider.train.companions import begin_from
    from outrider.train.distill import Distillation

    run = Distillation(target, {name: known[name](target) for name in stage.names})
    for name, student in run.students.items():
        if args.begin_from is not None and (args.begin_from / name).is_dir():
            begin_from(student, target, args.begin_from / name)
            _note(f"{name}: goes on from {args.begin_from / name}")
        _note(f"{name}: {sum(p.numel() for p in student.module.parameters()) / 1e6:.2f}M parameters")
    if not args.no_compile:
        run.warm_up(args.micro_rows, args.row_tokens or target.config.context)
        _free_memory()
        _note("compiled")
    return run


def _wait(corpus: subprocess.Popen[bytes] | None, args: argparse.Namespace) -> Prepared:
    from outrider.train.frozen import require_same_tokenizer
    from outrider.train.prepare import Prepared

    if args.corpus is not None:
        while not (args.corpus / "corpus.json").exists():
            time.sleep(0.5)
        return Prepared.open(args.corpus)
    if corpus is None:
        return Prepared.open(args.work / "target.work" / "corpus")
    if corpus.wait(timeout=max(args.minutes * 60 - _now(), 1)) != 0:
        sys.exit("the corpus could not be prepared; its error is above")
    prepared = Prepared.open(args.work / "corpus")
    require_same_tokenizer(args.model, prepared)
    _note(f"corpus ready: {prepared.summary['tokens']}")
    return prepared


def _text(target: FrozenTarget, prepared: Prepared, args: argparse.Namespace) -> tuple[TokenStore, Trial]:
    """What to train on and what to judge on."""
    from outrider.train.acceptance import heldout_rows, written_for
    from outrider.train.companions import Trial
    from outrider.train.generate import Writing, merged, write_until

    store, heldout = prepared.store("train"), prepared.store("heldout_packages")
    rows, count = (8, 48) if args.smoke else (64, 200)
    text = heldout_rows(heldout, target.config.context, rows)
    if args.row_tokens:
        return _after_stubs(target, prepared, args, text)
    written = {heat: written_for(target, heldout, rows, count, heat) for heat in (0.0, 0.8)}
    _note("written to judge on")
    if args.write_seconds:
        size = {"rows": 8, "length": 96, "prompts": (24,)} if args.smoke else {}
        own = write_until(target.decoder, store, Writing(args.write_seconds, **size))
        _note(f"written to train on: {own.tokens} tokens beside {store.tokens}")
        store = merged(store, own, args.write_share)
    return store, Trial(text, written)


def _after_stubs(target: FrozenTarget, prepared: Prepared, args: argparse.Namespace, text: Tensor) -> tuple[TokenStore, Trial]:
    """The same from what the target writes after stubs. Trees are chosen by other texts than they are judged on."""
    from outrider.train.companions import Trial
    from outrider.train.onpolicy import StubWriting, with_windows, write_after_stubs, written_after
    from outrider.train.parallel import cores
    from outrider.train.stubs import find_stubs
    from outrider.train.tokenizer import load_tokenizer

    store, heldout = prepared.store("train"), prepared.store("heldout_packages")
    tokenizer, longest = load_tokenizer(args.model), args.row_tokens * 5 // 8
    known, unknown = (find_stubs(part, tokenizer, 12, longest, 1 if args.smoke else cores()) for part in (store, heldout))
    _note(f"stubs: {len(known.starts)} to train on, {len(unknown.starts)} held out")
    rows, decoder = min(8 if args.smoke else 256, len(known.starts), len(unknown.starts)), target.decoder
    middle, other = (
        slice(half - rows // 2, half - rows // 2 + rows) for half in (len(known.starts) // 2, len(unknown.starts) // 2)
    )
    written, fit, length = {}, {}, args.row_tokens if args.smoke else _JUDGED_TOKENS
    for heat in (0.0, 0.8):
        written[heat] = written_after(decoder, heldout, unknown, other, length, heat, 7)
        fit[heat] = written_after(decoder, store, known, middle, length, heat, 8)
    _note("written to judge on")
    writing = StubWriting(args.row_tokens, args.write_seconds, args.write_rows, seed=args.seed)
    own = write_after_stubs(decoder, store, known, writing)
    _free_memory()
    _note(f"written to train on: {own.tokens} tokens in {own.documents} texts that do not loop")
    return with_windows(own, store, args.write_share, args.seed), Trial(text, written, fit)


def _train(
    run: Distillation, stage: Stage, store: TokenStore, trial: Trial, args: argparse.Namespace, seconds: float, shipment: Shipment
) -> None:
    from outrider.train.companions import measure_tree
    from outrider.train.distill import DistillOptions
    from outrider.train.loop import Budget, LoopOptions
    from outrider.train.optim import OptimOptions

    shipment.open = dict(run.students)
    run.heldout = trial.rows[:: max(len(trial.rows) // 16, 1)]
    context = args.row_tokens or run.target.config.context
    options = DistillOptions(context, OptimOptions(lr=args.lr, adam_lr=args.adam_lr), args.seed)
    place = args.work / "-".join(("run", *stage.names))  # not where a student goes
    loop = LoopOptions(Budget(seconds=max(seconds, 1.0)), place, args.rows, args.micro_rows, checkpoint_every_s=0.0)
    at = run.train(store, options, loop).position
    _note(f"trained {'+'.join(stage.names)}: {at.step} steps, {at.tokens / 1e6:.0f}M tokens in {at.seconds:.0f} s")
    for name, student in run.students.items():
        expected = measure_tree(student, run.target, trial)
        if expected is not None:
            _note(f"{name}: its static tree gives {expected:.2f} tokens per round on the text it was fitted to")


def _judge(run: Distillation, target: FrozenTarget, trial: Trial, work: Path) -> dict[str, Any]:
    from outrider.train.companions import describe, judge, load_student

    figures = {}
    for name, student in run.students.items():
        figures[name] = judge(load_student(student, target, work / name), target, trial)
        _note(name)
        describe(figures[name], _note)
    return figures


def _free_memory() -> None:
    """Give cached memory back: another process may share the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _start_watchdog(shipment: Shipment, limit: float) -> None:
    def watch() -> None:
        time.sleep(max(limit - _now(), 0))
        _note("watchdog: time is up")  # normal work ends before
        shipment.export_all()
        shipment.bundle()
        sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="watchdog").start()


def _tar(path: Path, files: list[tuple[Path, str]]) -> None:
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as tar:
        for file, name in files:
            tar.add(file, name)
    os.replace(part, path)


def _now() -> float:
    return time.monotonic() - STARTED


def _note(text: str) -> None:
    print(f"[{_now():6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
