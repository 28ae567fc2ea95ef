"""Train Pyrite's target in one command of at most ten minutes on one GPU.

    PYTHONPATH=src:. python -m recipes.pyrite.target --out OUT

The corpus is prepared while the model compiles, and training runs until the time is up. The weights go to
OUT/pyrite/*.safetensors; held-out losses, the summary of the corpus and a few samples go to OUT/pyrite.tar. A watchdog exports
the weights that exist before the time runs out. `--smoke` does everything in small on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pyrite.clock import note, now, start_watchdog, write_tar
from recipes.pyrite.packages import CONTEXT, VOCAB, start_corpus, start_small_corpus

if TYPE_CHECKING:
    from outrider.train.corpus import TokenCorpus
    from recipes.pyrite.pretrain import Pretraining

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
    """Writes results to OUT, from the main thread or from the watchdog; files are replaced when there is more."""

    def __init__(self, out: Path, work: Path) -> None:
        self._out = out
        self._work = work
        self._lock = threading.Lock()
        self.exported = False

    def export(self, run: Pretraining) -> None:
        """Write the model directory and copy it to OUT."""
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
        """Write the small files again."""
        with self._lock:
            self._bundle()

    def _bundle(self) -> None:
        model = [file for file in sorted((self._work / "pyrite").iterdir()) if file.suffix != ".safetensors"]
        names = ("corpus/corpus.json", "metrics.jsonl", "metrics.html", "result.json", "samples.txt")
        figures = [self._work / name for name in names if (self._work / name).exists()]
        members = [(file, f"pyrite/{file.name}") for file in model] + [(file, file.name) for file in figures]
        write_tar(self._out / "pyrite.tar", members)


def main() -> None:
    args = _arguments()
    times = Times(args.minutes * 60 - _FINISH_S, args.minutes * 60 * (5 if args.smoke else 1))  # a smoke run may be late
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = _start_corpus(args)
    run = _build(args)
    shipment = Shipment(args.out, args.work)
    start_watchdog(times.watchdog, partial(_export_what_exists, run, shipment, args.work))
    run.warm_up()
    note("compiled")
    tokens = _wait(corpus, args.work / "corpus", times)
    note(f"corpus ready: {tokens.summary['tokens']}, bytes {tokens.summary['bytes']}")
    _train(run, tokens, args, times)
    shipment.export(run)
    note("exported")
    _evaluate(run, tokens, args.work)
    shipment.bundle()
    _sample(run, args.work, times)
    shipment.bundle()
    note("done")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/pyrite")))
    parser.add_argument("--work", type=Path, default=Path("runs/pyrite.work"))
    parser.add_argument("--minutes", type=float, default=9.35, help="of the whole command; the watchdog exports at this time")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.012)
    parser.add_argument("--adam-lr", type=float, default=2.5e-3)
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--micro-rows", type=int, default=0, help="rows of one forward; 0: all of them")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="everything in small, on a CPU")
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
    from outrider.train.optim import OptimOptions
    from outrider.train.shapes import DecoderShape
    from recipes.pyrite.pretrain import Pretraining, PretrainOptions

    shape = DecoderShape(args.layers, args.hidden, args.heads, args.kv_heads, args.ffn, VOCAB, CONTEXT)
    if args.smoke:
        shape = DecoderShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=512, context=128)
    rates = OptimOptions(kind=args.optimizer, lr=args.lr, adam_lr=args.adam_lr)
    run = Pretraining(PretrainOptions(shape, rates, args.rows, args.micro_rows, compile=not args.no_compile))
    note(f"{run.decoder.spec.parameters / 1e6:.1f}M parameters on {run.device}")
    return run


def _export_what_exists(run: Pretraining, shipment: Shipment, work: Path) -> int:
    """The watchdog's last step. Returns the exit code of the process."""
    if not shipment.exported and (work / "corpus" / "tokenizer.json").exists():
        shipment.export(run)
    return 0 if shipment.exported else 3


def _wait(corpus: subprocess.Popen[bytes], directory: Path, times: Times) -> TokenCorpus:
    from outrider.train.corpus import TokenCorpus

    if corpus.wait(timeout=max(times.stop - now(), 1)) != 0:
        sys.exit("the corpus could not be prepared; its error is above")
    return TokenCorpus.open(directory)


def _train(run: Pretraining, corpus: TokenCorpus, args: argparse.Namespace, times: Times) -> None:
    from outrider.train.loop import Budget, LoopOptions

    budget = Budget(seconds=max(times.stop - now(), 10.0 if args.smoke else 1.0))
    loop = LoopOptions(budget, args.work, args.rows, args.micro_rows, checkpoint_every_s=0.0, eval_every_s=60.0)
    outcome = run.train(corpus, loop)
    at = outcome.position
    note(f"trained {at.step} steps, {at.tokens / 1e6:.0f}M tokens in {at.seconds:.0f} s")


def _evaluate(run: Pretraining, corpus: TokenCorpus, work: Path) -> None:
    figures: dict[str, Any] = run.evaluate(corpus, work / "pyrite", max_rows=1500)
    (work / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    for name, figure in figures.items():
        note(f"{name}: {figure['loss']:.4f} nats per token, {figure['trained']:.4f} before int8, {figure['tokens']} tokens")
        worst = sorted(figure["by_group"].items(), key=lambda item: -item[1])[:20]
        note("  " + ", ".join(f"{group} {loss:.2f}" for group, loss in worst))


def _sample(run: Pretraining, work: Path, times: Times) -> None:
    from outrider.model import load_decoder
    from outrider.train.corpus import load_tokenizer
    from recipes.pyrite.lm import greedy

    decoder = load_decoder(work / "pyrite").to(run.device)
    tokenizer = load_tokenizer(work / "pyrite")
    with (work / "samples.txt").open("w") as file:
        for prompt in PROMPTS:
            if now() > times.watchdog - 8:
                return
            text = prompt + tokenizer.decode(greedy(decoder, tokenizer.encode(prompt).ids, 96))
            file.write(f"{text}\n{'-' * 40}\n")
            print(f"--- sample\n{text}", flush=True)


if __name__ == "__main__":
    main()
