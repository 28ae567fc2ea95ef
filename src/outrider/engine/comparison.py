"""The same request decoded plainly and speculatively, side by side, and what the command line shows of outputs."""

from __future__ import annotations

import re
import secrets
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.sampling import SamplingParams
from outrider.terminal import PlainConsole

__all__ = ["Comparison", "compare_runs", "print_comparison", "print_summary"]

_DRAFTED = "black on green3"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs of one request, and the speeds they came at."""

    plain: CompletionOutput
    fast: CompletionOutput
    plain_tok_s: float
    fast_tok_s: float
    identical: bool

    @property
    def speedup(self) -> float:
        return self.fast_tok_s / self.plain_tok_s if self.plain_tok_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "speedup": self.speedup,
            "plain": {"tok_s": self.plain_tok_s, "token_ids": self.plain.token_ids},
            "speculative": {"tok_s": self.fast_tok_s, "token_ids": self.fast.token_ids} | self.fast.speculation,
            "text": self.fast.text,
            "seed": self.fast.seed,
            "finish_reason": self.fast.finish_reason,
        }


def compare_runs(llm: LLM, prompt: str, params: SamplingParams, repeats: int) -> Comparison:
    """Run both ways `repeats` times, interleaved after one warm-up; speeds are medians of decoding."""
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    warm_up = replace(params, max_tokens=min(4, params.max_tokens or 4), min_tokens=0)
    llm.generate(prompt, warm_up, speculation={"remember": False})
    speeds: dict[bool, list[float]] = {False: [], True: []}
    outputs: dict[bool, list[CompletionOutput]] = {False: [], True: []}
    for _ in range(repeats):
        for speculate in (False, True):
            output = llm.generate(prompt, params, speculation={"enabled": speculate, "remember": False})[0].outputs[0]
            outputs[speculate].append(output)
            speeds[speculate].append(output.timings.decode_tokens_per_s)
    every = [*outputs[False], *outputs[True]]
    identical = all(o.token_ids == every[0].token_ids and o.text == every[0].text for o in every)
    plain, fast = (statistics.median(speeds[speculate]) for speculate in (False, True))
    return Comparison(outputs[False][0], outputs[True][0], plain, fast, identical)


def print_summary(output: CompletionOutput) -> None:
    """One line about a generation, on standard error."""
    stats, speed = output.speculation, output.timings.decode_tokens_per_s
    line = f"{len(output.token_ids)} tokens, {speed:.1f} tok/s, {output.finish_reason}, seed {output.seed}"
    if stats["method"] != "none":
        line += f"; {stats['method']}: {stats['tokens_per_round']:.2f} tokens per round, acceptance rate {_share(stats)}"
    if stats["fallback_reason"]:
        line += f"; speculation was set aside: {stats['fallback_reason']}"
    PlainConsole(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def print_comparison(result: Comparison, llm: LLM, svg: Path | None = None) -> None:
    """Show the text with drafted tokens marked, and both speeds. With `svg`, save the screen as a picture too."""
    console = PlainConsole(record=svg is not None)
    console.print(
        Panel(
            _coloured(result.fast, llm),
            title=Text.assemble("text (", ("drafted", _DRAFTED), " tokens marked)"),
            title_align="left",
        )
    )
    stats = result.fast.speculation
    table = Table("", "plain", stats["method"])
    table.add_row("tokens", str(len(result.plain.token_ids)), str(len(result.fast.token_ids)))
    table.add_row("tokens per second", f"{result.plain_tok_s:.1f}", f"{result.fast_tok_s:.1f}")
    table.add_row("tokens per round", "1.00", f"{stats['tokens_per_round']:.2f}")
    table.add_row("drafted / accepted", "-", f"{stats['drafted']} / {stats['accepted']}")
    table.add_row("acceptance rate", "-", _share(stats))
    table.add_row("finish", str(result.plain.finish_reason), str(result.fast.finish_reason))
    console.print(table)
    console.print(Text.assemble("speed-up: ", (f"{result.speedup:.2f}x", "bold"), f"   seed: {result.fast.seed}"))
    if stats["fallback_reason"]:
        console.print(Text.assemble(("speculation was set aside:", "yellow"), " ", stats["fallback_reason"]))
    console.print(Text.assemble("identical: ", ("yes", "bold green") if result.identical else ("NO", "bold red")))
    if svg is not None:
        _save_svg(console, svg)


def _share(stats: Mapping[str, Any]) -> str:
    """The acceptance rate as a text."""
    return "-" if stats["acceptance_rate"] is None else f"{stats['acceptance_rate']:.0%}"


def _save_svg(console: PlainConsole, path: Path) -> None:
    """Write the recorded screen as an SVG without external resources: the links to web fonts that rich adds are removed."""
    picture = console.export_svg(title="outrider compare")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL).replace("Fira Code", "monospace"))


def _coloured(output: CompletionOutput, llm: LLM) -> Text:
    text = Text()
    if llm.tokenizer is None:
        for token, guessed in zip(output.token_ids, output.from_draft, strict=True):
            text.append(f"{token}", style=_DRAFTED if guessed else "").append(" ")
        return text
    done = ""
    for i, guessed in enumerate(output.from_draft):
        decoded = llm.tokenizer.decode(output.token_ids[: i + 1])
        if not decoded.endswith("\ufffd"):
            text.append(decoded[len(done) :], style=_DRAFTED if guessed else "")
            done = decoded
    return text
