"""Terminal output of the command line: summaries, comparisons, the doctor's report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.engine.comparison import Comparison
from outrider.engine.outputs import CompletionOutput
from outrider.terminal import PlainConsole

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = ["print_checks", "print_comparison", "print_summary"]

_DRAFTED = "black on green3"


def print_summary(output: CompletionOutput) -> None:
    """One line about a generation, on standard error."""
    stats, speed = output.speculation, output.timings.decode_tokens_per_s
    line = f"{len(output.token_ids)} tokens, {speed:.1f} tok/s, {output.finish_reason}, seed {output.seed}"
    if stats["method"] != "none":
        line += f"; {stats['method']}: {stats['tokens_per_round']:.2f} tokens per round"
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
    table.add_row("finish", str(result.plain.finish_reason), str(result.fast.finish_reason))
    console.print(table)
    console.print(Text.assemble("speed-up: ", (f"{result.speedup:.2f}x", "bold"), f"   seed: {result.fast.seed}"))
    if stats["fallback_reason"]:
        console.print(Text.assemble(("speculation was set aside:", "yellow"), " ", stats["fallback_reason"]))
    console.print(Text.assemble("identical: ", ("yes", "bold green") if result.identical else ("NO", "bold red")))
    if svg is not None:
        _save_svg(console, svg)


def _save_svg(console: PlainConsole, path: Path) -> None:
    """Write the recorded screen as an SVG without external resources: the links to web fonts that rich adds are removed."""
    picture = console.export_svg(title="outrider compare")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL).replace("Fira Code", "monospace"))


def print_checks(checks: Sequence[tuple[str, str, str, bool]]) -> None:
    """The doctor's report as one table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    section = ""
    for group, name, value, good in checks:
        if group != section:
            section = group
            table.add_row(Text(group, style="bold"), "", "")
        table.add_row("", name, Text(value, style="" if good else "bold red"))
    PlainConsole().print(table)


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
