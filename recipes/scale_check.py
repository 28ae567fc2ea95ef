"""Train a model of 120M to 300M parameters with every kind of drafter, and measure what each of them gives when it is served.

    PYTHONPATH=src:. python -m recipes.scale_check PROMPTS.jsonl --out results/scale_check.json

Pyrite is so small that its drafters cost a large part of it. Here the target has 24 layers, so that a head is a small part, as in
models that people run. Three parts, each with its share of --minutes, each in a process of its own; --parts names those to do:

    target    the target, on the Python source of installed packages
    drafters  a draft model, an EAGLE head, Medusa heads, a block drafter and exit adapters, off one forward
    serve     tokens per second of every method beside plain decoding: batch 1, greedy, on outputs that do not loop

Half an hour on one H200. Every figure is written when it is known; what failed is a row with its reason. --smoke does everything
in small on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recipes.pyrite.packages import environment

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import CompletionOutput

PARTS = ("target", "drafters", "serve")
SHARES = {"target": 0.36, "drafters": 0.42, "serve": 0.22}  # of --minutes
SHAPE = ("--layers=24", "--hidden=768", "--heads=12", "--kv-heads=4", "--ffn=2048", "--micro-rows=16")  # 157M parameters
STAGE = ("scale_draft", "scale_eagle", "scale_medusa", "scale_block", "scale_exit")
WRITING = ("--row-tokens=416", "--rows=64", "--micro-rows=64", "--blocks=40", "--skip=48", "--fade=14", "--survival=0.5")
TEXTS = ("--write-rows=2048", "--write-share=0.7", "--leads", "0", "0", "64")
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Method:
    """A method to serve, and the drafter that it reads."""

    name: str
    settings: dict[str, Any]
    drafter: str | None = None

    def speculation(self, work: Path) -> dict[str, Any]:
        """The settings with the path of the weights; a cascade's model is its last level."""
        if self.drafter is None:
            return self.settings
        model = {"model": str(work / "drafters" / self.drafter)}
        levels = [*self.settings.get("levels", ()), {"method": "draft_model"} | model]
        return self.settings | ({"levels": levels} if "levels" in self.settings else model)


METHODS = (
    Method("draft model", {"method": "draft_model", "draft_tokens": 12}, "scale_draft"),
    Method("EAGLE-3 chain", {"method": "eagle", "draft_tokens": 5}, "scale_eagle"),
    Method("EAGLE-3 tree", {"method": "eagle", "draft_tokens": 32, "beam": 4, "branch": 6, "depth": 8}, "scale_eagle"),
    Method("Medusa", {"method": "medusa", "draft_tokens": 32}, "scale_medusa"),
    Method("block", {"method": "dflash", "draft_tokens": 15, "candidates": 1}, "scale_block"),
    Method("block tree", {"method": "dflash", "draft_tokens": 32}, "scale_block"),
    Method("early exit", {"method": "early_exit", "draft_tokens": 6}, "scale_exit"),
    Method("lookahead", {"method": "lookahead", "draft_tokens": 24}),
    Method("n-gram", {"method": "ngram", "draft_tokens": 12}),
    Method("cascade", {"method": "cascade", "draft_tokens": 12, "levels": ["ngram"]}, "scale_draft"),
)


@dataclass(slots=True)
class Report:
    """What is known so far, on disk at every moment."""

    path: Path
    data: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, printed and written."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        from outrider.bench.environment import environment as machine

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data | machine() | {"rows": self.rows}, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    args = _arguments(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    what = (
        "a target trained from nothing with its drafters, served: batch 1, greedy, over outputs in which no 8-gram occurs more "
        "than three times; speedup is over plain decoding of the same prompts, conversion is speedup / tokens_per_round, equal "
        "is the share of outputs with plain decoding's token ids"
    )
    report = Report(
        args.out, {"what": what, "command": " ".join(["python -m recipes.scale_check", *(arguments or sys.argv[1:])])}
    )
    for part in args.parts:
        begun = time.monotonic()
        failed = _serve(args, report) if part == "serve" else _train(part, args)
        note = {"part": part, "seconds": round(time.monotonic() - begun, 1)}
        report.add(note | ({} if failed is None else {"failed": failed}))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="JSONL, as `outrider bench acceptance` reads it")
    parser.add_argument("--out", type=Path, default=Path("results/scale_check.json"), help="JSON file to write")
    parser.add_argument("--work", type=Path, default=Path("runs/scale"), help="folder for the target and its drafters")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--minutes", type=float, default=29.0, help="of all parts together")
    parser.add_argument("--methods", nargs="+", default=[method.name for method in METHODS], help="methods to serve")
    parser.add_argument("--limit", type=int, default=24, help="prompts to serve")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="everything in small, on a CPU")
    args = parser.parse_args(arguments)
    if wrong := [name for name in args.methods if name not in {method.name for method in METHODS}]:
        parser.error(f"unknown method {wrong[0]!r}; known: {', '.join(method.name for method in METHODS)}")
    return args


def _train(part: str, args: argparse.Namespace) -> str | None:
    """Run a part's recipe in a process; why it failed, or None."""
    minutes = f"--minutes={args.minutes * SHARES[part]:.2f}"
    small = ("--smoke", "--no-compile") if args.smoke else ()
    if part == "target":
        places = ("--out", str(args.work / "target.out"), "--work", str(args.work / "target"))
        command = ["recipes.pyrite.target", minutes, *places, *(small or SHAPE)]
    else:
        target = ("--model", str(args.work / "target" / "pyrite"), "--corpus", str(args.work / "target" / "corpus"))
        places = ("--out", str(args.work / "drafters.out"), "--work", str(args.work / "drafters"))
        rows = ("--row-tokens=96", "--blocks=8") if args.smoke else (*WRITING, *TEXTS)
        command = ["recipes.pyrite.heads", minutes, *target, *places, "--stages", "+".join(STAGE), *rows, *small]
    code = subprocess.run([sys.executable, "-m", *command], env=environment(), check=False).returncode
    return f"its process ended with {code}" if code else None


def _serve(args: argparse.Namespace, report: Report) -> str | None:
    """Serve every method beside plain decoding, until the time of this part is up."""
    from outrider.engine.acceptance import read_prompts

    prompts = read_prompts(args.prompts, args.limit)
    deadline = time.monotonic() + args.minutes * 60 * SHARES["serve"]
    plain, skipped = _outputs(Method(PLAIN, {"method": PLAIN}), prompts, args), []
    report.add({"method": PLAIN} | _figures(plain, plain))
    for method in METHODS:
        if method.name not in args.methods:
            continue
        if time.monotonic() > deadline:
            skipped.append(method.name)
            continue
        try:
            report.add({"method": method.name} | _figures(_outputs(method, prompts, args), plain))
        except Exception as error:  # one method must not cost the others their rows; the row says what happened
            report.add({"method": method.name, "failed": f"{type(error).__name__}: {error}"})
    return f"out of time before {', '.join(skipped)}" if skipped else None


def _outputs(method: Method, prompts: Sequence[str], args: argparse.Namespace) -> list[CompletionOutput]:
    """Outputs of one prompt at a time, after two that warm up."""
    from outrider import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    llm: LLM = LLM(args.work / "target" / "pyrite", speculation=method.speculation(args.work), share=False)
    try:
        for prompt in prompts[:2]:
            llm.generate([prompt], params)
        return [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    finally:
        llm.close()


def _figures(outputs: Sequence[CompletionOutput], plain: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Speed beside plain decoding, on outputs that do not loop where there are any."""
    from outrider.engine.acceptance import loops, summarise

    steady = [i for i, output in enumerate(plain) if not loops(output.token_ids)] or list(range(len(plain)))
    seconds, alone = (sum(1 / some[i].timings.decode_tokens_per_s for i in steady) for some in (outputs, plain))
    row = summarise([outputs[i] for i in steady], 0.0)
    speedup = alone / seconds
    rounds = row.tokens_per_round or row.tokens_per_round_all or 1.0
    reasons = [reason for output in outputs if (reason := output.speculation["fallback_reason"])]
    return {
        "tok_s": round(median(outputs[i].timings.decode_tokens_per_s for i in steady), 1),
        "speedup": round(speedup, 3),
        "tokens_per_round": round(rounds, 3),
        "conversion": round(speedup / rounds, 3),
        "outputs": len(steady),
        "looping": round(1 - len(steady) / len(plain), 3),
        "equal": sum(a.token_ids == b.token_ids for a, b in zip(outputs, plain, strict=True)) / len(plain),
        "fallbacks": reasons[:1],
    }


if __name__ == "__main__":
    main()
