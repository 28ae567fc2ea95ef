"""What the command line draws: summaries, comparisons, the doctor's report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.engine.comparison import Comparison
from outrider.engine.outputs import CompletionOutput

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = ["print_comparison", "print_findings", "print_summary"]

_GUESSED = "black on green3"


def print_summary(output: CompletionOutput) -> None:
    """One line about a generation, on standard error."""
    stats, speed = output.speculation, output.timings.decode_tokens_per_s
    line = f"{len(output.token_ids)} tokens, {speed:.1f} tok/s, {output.finish_reason}, seed {output.seed}"
    if stats["method"] != "none":
        line += f"; {stats['method']}: {stats['tokens_per_round']:.2f} tokens per round"
    if stats["fallback_reason"]:
        line += f"; speculation was set aside: {stats['fallback_reason']}"
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def print_comparison(result: Comparison, llm: LLM) -> None:
    """The text with guessed tokens marked, and both speeds."""
    console = Console()
    console.print(
        Panel(_coloured(result.fast, llm), title="text ([black on green3]guessed[/] tokens marked)", title_align="left")
    )
    stats = result.fast.speculation
    table = Table("", "plain", stats["method"])
    table.add_row("tokens", str(len(result.plain.token_ids)), str(len(result.fast.token_ids)))
    table.add_row("tokens per second", f"{result.plain_tok_s:.1f}", f"{result.fast_tok_s:.1f}")
    table.add_row("tokens per round", "1.00", f"{stats['tokens_per_round']:.2f}")
    table.add_row("guessed / accepted", "-", f"{stats['drafted']} / {stats['accepted']}")
    table.add_row("finish", str(result.plain.finish_reason), str(result.fast.finish_reason))
    console.print(table)
    console.print(f"speed-up: [bold]{result.speedup:.2f}x[/]   seed: {result.fast.seed}", highlight=False)
    if stats["fallback_reason"]:
        console.print(f"[yellow]speculation was set aside:[/] {stats['fallback_reason']}")
    console.print("identical: [bold green]yes[/]" if result.identical else "identical: [bold red]NO[/]")


def print_findings(findings: Sequence[tuple[str, str, str, bool]]) -> None:
    """The doctor's report as one table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    section = ""
    for group, name, value, good in findings:
        if group != section:
            section = group
            table.add_row(Text(group, style="bold"), "", "")
        table.add_row("", name, Text(value, style="" if good else "bold red"))
    Console().print(table)


def _coloured(output: CompletionOutput, llm: LLM) -> Text:
    text = Text()
    if llm.tokenizer is None:
        for token, guessed in zip(output.token_ids, output.from_draft, strict=True):
            text.append(f"{token}", style=_GUESSED if guessed else "").append(" ")
        return text
    done = ""
    for i, guessed in enumerate(output.from_draft):
        whole = llm.tokenizer.decode(output.token_ids[: i + 1])
        if not whole.endswith("\ufffd"):
            text.append(whole[len(done) :], style=_GUESSED if guessed else "")
            done = whole
    return text
