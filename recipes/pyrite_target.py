"""Train Pyrite's target in one command of at most ten minutes on one GPU.

    PYTHONPATH=src python recipes/pyrite_target.py --out OUT

The corpus is prepared while the model compiles; training then runs until the time is up; the int8 model,
its held-out losses, the account of the corpus and a few samples go to OUT: weights as OUT/pyrite/*.safetensors,
every small file in OUT/pyrite.tar. A watchdog exports whatever weights exist before the time runs out.
`--smoke` does all of it in miniature on a CPU.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # before torch is imported: the budget counts from here

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import sysconfig  # noqa: E402
import tarfile  # noqa: E402
import threading  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from pyrite_corpus import CONTEXT, VOCAB, start_corpus, start_small_corpus  # noqa: E402

if TYPE_CHECKING:
    from outrider.train.prepare import Prepared
    from outrider.train.pretrain import Pretraining

_FINISH_S = 34.0  # export, held-out losses and samples after training

PROMPTS = (
    "def fibonacci(n: int) -> int:\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "import json\nfrom pathlib import Path\n\n\ndef load_config(path: Path) -> dict:\n",
    "class Stack:\n    \"\"\"A last-in first-out stack.\"\"\"\n\n    def __init__(self):\n",
    "from typing import List\n\n\ndef has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
    '    """Check if any two numbers are closer to each other than the threshold.\n    """\n',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the start: when training stops, and when the watchdog exports and ends the process."""

    stop: float
    watchdog: float


class Shipment:
    """Puts results where they are collected, once from either thread and again when there is more."""

    def __init__(self, out: Path, work: Path) -> None:
        self._out = out
        self._work = work
        self._lock = threading.Lock()
        self.exported = False

    def export(self, run: Pretraining) -> None:
        """Write the model directory and ship it."""
        with self._lock:
            run.export(self._work / "corpus", self._work / "pyrite")
            target = self._out / "pyrite"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for shard in sorted((self._work / "pyrite").glob("*.safetensors")):
                shutil.copyfile(shard, target / shard.name)
            self._bundle()
            self.exported = True

    def bundle(self) -> None:
        """Ship the small files again."""
        with self._lock:
            self._bundle()

    def _bundle(self) -> None:
        with tarfile.open(self._out / "pyrite.tar.part", "w") as tar:
            for file in sorted((self._work / "pyrite").iterdir()):
                if file.suffix != ".safetensors":
                    tar.add(file, f"pyrite/{file.name}")
            for name in ("corpus/corpus.json", "metrics.jsonl", "metrics.png", "result.json", "samples.txt"):
                if (self._work / name).exists():
                    tar.add(self._work / name, Path(name).name)
        os.replace(self._out / "pyrite.tar.part", self._out / "pyrite.tar")


def main() -> None:
    args = _arguments()
    times = Times(args.minutes * 60 - _FINISH_S, args.minutes * 60 * (5 if args.smoke else 1))  # a trial may be late
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = _start_corpus(args)
    run = _build(args)
    shipment = Shipment(args.out, args.work)
    _start_watchdog(run, shipment, times, args.work)
    run.warm_up()
    _note("compiled")
    prepared = _wait(corpus, args.work / "corpus", times)
    _note(f"corpus ready: {prepared.summary['tokens']}, bytes {prepared.summary['bytes']}")
    _train(run, prepared, args, times)
    shipment.export(run)
    _note("exported")
    _judge(run, prepared, args.work)
    shipment.bundle()
    _sample(run, args.work, times)
    shipment.bundle()
    _note("done")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/pyrite")))
    parser.add_argument("--work", type=Path, default=Path("runs/pyrite.work"))
    parser.add_argument("--minutes", type=float, default=9.35, help="all of it: at this time weights are out in any case")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.012)
    parser.add_argument("--adam-lr", type=float, default=2.5e-3)
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="everything in miniature, on a CPU")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.rows = min(args.minutes, 1.2), 4
    return args


def _start_corpus(args: argparse.Namespace) -> subprocess.Popen[bytes]:
    if not args.smoke:
        return start_corpus(args.work / "corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    return start_small_corpus(args.work / "corpus", [library / name for name in ("json", "email", "logging")], 512, 128)


def _build(args: argparse.Namespace) -> Pretraining:
    from outrider.train.lm import Shape
    from outrider.train.optim import OptimOptions
    from outrider.train.pretrain import Pretraining, PretrainOptions

    shape = Shape(layers=args.layers, vocab=VOCAB, context=CONTEXT)
    if args.smoke:
        shape = Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=512, context=128)
    rates = OptimOptions(kind=args.optimizer, lr=args.lr, adam_lr=args.adam_lr)
    run = Pretraining(PretrainOptions(shape, rates, args.rows, compile=not args.no_compile))
    _note(f"{run.decoder.config.parameters / 1e6:.1f}M parameters on {run.device}")
    return run


def _start_watchdog(run: Pretraining, shipment: Shipment, times: Times, work: Path) -> None:
    def watch() -> None:
        time.sleep(max(times.watchdog - _now(), 0))
        _note("watchdog: time is up")  # normal work ends before
        if not shipment.exported and (work / "corpus" / "tokenizer.json").exists():
            shipment.export(run)
        sys.stdout.flush()
        os._exit(0 if shipment.exported else 3)

    threading.Thread(target=watch, daemon=True, name="watchdog").start()


def _wait(corpus: subprocess.Popen[bytes], directory: Path, times: Times) -> Prepared:
    from outrider.train.prepare import Prepared

    if corpus.wait(timeout=max(times.stop - _now(), 1)) != 0:
        sys.exit("the corpus could not be prepared; its error is above")
    return Prepared.open(directory)


def _train(run: Pretraining, prepared: Prepared, args: argparse.Namespace, times: Times) -> None:
    from outrider.train.loop import Budget, LoopOptions

    budget = Budget(seconds=max(times.stop - _now(), 10.0 if args.smoke else 1.0))
    loop = LoopOptions(budget, args.work, args.rows, checkpoint_every_s=0.0, eval_every_s=60.0)
    outcome = run.train(prepared, loop)
    at = outcome.position
    _note(f"trained {at.step} steps, {at.tokens / 1e6:.0f}M tokens in {at.seconds:.0f} s")


def _judge(run: Pretraining, prepared: Prepared, work: Path) -> None:
    figures: dict[str, Any] = run.judge(prepared, work / "pyrite", most_rows=1500)
    (work / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    for name, figure in figures.items():
        _note(f"{name}: {figure['loss']:.4f} nats per token, {figure['trained']:.4f} before int8, {figure['tokens']} tokens")
        worst = sorted(figure["by_group"].items(), key=lambda item: -item[1])[:20]
        _note("  " + ", ".join(f"{group} {loss:.2f}" for group, loss in worst))


def _sample(run: Pretraining, work: Path, times: Times) -> None:
    from outrider.model import load_decoder
    from outrider.train.lm import greedy
    from outrider.train.tokenizer import load_tokenizer

    decoder = load_decoder(work / "pyrite").to(run.device)
    tokenizer = load_tokenizer(work / "pyrite")
    with (work / "samples.txt").open("w") as file:
        for prompt in PROMPTS:
            if _now() > times.watchdog - 8:
                return
            text = prompt + tokenizer.decode(greedy(decoder, tokenizer.encode(prompt).ids, 96))
            file.write(f"{text}\n{'-' * 40}\n")
            print(f"--- sample\n{text}", flush=True)


def _now() -> float:
    return time.monotonic() - STARTED


def _note(text: str) -> None:
    print(f"[{_now():6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
