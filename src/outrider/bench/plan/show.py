"""Plans as tables and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.conditions import conditions
from outrider.bench.plan.adviser import Advice
from outrider.bench.plan.formulas import FORMULAS
from outrider.bench.plan.planner import Row
from outrider.bench.plan.simulate import Outcome
from outrider.bench.plots import Series, legend, lines
from outrider.bench.report import page

__all__ = ["advice", "chain", "outcomes", "page_of", "ranking", "rows", "what_if"]

_BLOCKS = "▁▂▃▄▅▆▇█"
Curves = Mapping[float, Sequence[tuple[int, float]]]


def rows(found: Sequence[Row], context: int, console: Console) -> None:
    table = Table("drafter", "tokens/round", "speed-up", "best length", "then", "best tree", "break-even batch", "weights", "KV")
    for row in found:
        tree = f"{row.tree['nodes']} nodes: {row.tree['speedup']:.2f}" if row.tree else "-"
        table.add_row(
            row.method, f"{row.tokens_per_round:.2f}", f"{row.speedup:.2f}", str(row.best_length), f"{row.best_speedup:.2f}",
            tree, str(row.break_even_batch), _bytes(row.weights_bytes), _bytes(row.kv_bytes_per_token * context),
        )  # fmt: skip
    console.print(table)
    console.print(f"KV: of one sequence of {context} tokens. A best length of 0: plain decoding is quicker.", highlight=False)
    for row in found:
        if row.curve:
            told = " ".join(f"{k}:{value:.2f}" for k, value in row.curve)
            console.print(
                f"{_spark([value for _, value in row.curve])}  {row.method}  by length {told}", highlight=False, soft_wrap=True
            )


def what_if(curves: Curves, title: str, console: Console) -> None:
    lengths = [k for k, _ in next(iter(curves.values()))]
    table = Table("acceptance", *map(str, lengths), "", title=f"speed-up by acceptance and draft length, {title}")
    top = max(value for curve in curves.values() for _, value in curve)
    for chance, curve in curves.items():
        best = max(value for _, value in curve)
        cells = [f"[{_style(value, best)}]{value:.2f}[/]" for _, value in curve]
        table.add_row(f"{chance:.2f}", *cells, _spark([value for _, value in curve], top))
    console.print(table)


def chain(found: Mapping[str, Any], name: str, console: Console) -> None:
    best = found["best_length"]
    console.print(
        f"{name}, acceptance {found['acceptance']}, batch {found['batch']}: draft {best}, "
        f"{found['tokens'][best]:.2f} tokens a round, speed-up {found['best_speedup']:.2f}; "
        f"drafting pays up to batch {found['break_even_batch']}",
        highlight=False,
    )
    if found["closed_form_length"] is not None:
        console.print(f"closed form, with rows free: draft {found['closed_form_length']:.1f}", highlight=False)
    if "tree" in found:
        tree = found["tree"]
        console.print(
            f"best tree: {tree['nodes']} nodes, {tree['tokens']:.2f} tokens a round, speed-up {tree['speedup']:.2f}, "
            f"parents {tree['parents']}",
            highlight=False,
        )


def advice(found: Advice, console: Console) -> None:
    low, high = found.sizes
    console.print(
        f"{found.target}: {_count(found.parameters)} weights, a pass takes at least {found.pass_ms:.2f} ms here. "
        f"A draft model should have {_count(low)} to {_count(high)} weights and the same tokenizer.",
        highlight=False,
    )
    if found.family:
        named = ", ".join(f"{name} ({millions}M)" for name, millions in found.known.items()) or "none of a fitting size"
        console.print(f"by its vocabulary it is one of {found.family}; published: {named}", highlight=False)
    else:
        console.print("its vocabulary is of no family known here: train one with `outrider train draft`", highlight=False)
    if found.fits:
        table = Table("candidate", "weights", "smaller", "tokens", "speed-up (length) at acceptance 0.6, 0.7, 0.8, 0.9", "")
        for fit in found.fits:
            told = "  ".join(f"{speedup:.2f} ({length})" for length, speedup in fit.estimates.values())
            table.add_row(fit.path, _count(fit.parameters), f"{fit.times_smaller:.1f} x", fit.tokens, told, fit.says)
        console.print(table)


def ranking(ranked: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table("rank", "candidate", "speed-up", "at length", "tokens/round of 8", "accepted by position")
    for i, row in enumerate(ranked, 1):
        shares = " ".join(f"{share:.2f}" for share in row["by_position"])
        table.add_row(
            str(i), row["path"], f"{row['speedup']:.2f}", str(row["draft_tokens"]), f"{row['tokens_per_round']:.2f}", shares
        )
    console.print(table)


def outcomes(found: Sequence[Outcome], console: Console) -> None:
    plain = found[0]
    table = Table("policy", "tok/s", "speed-up", "tokens/round", "latency s", "drafted by")
    for own in found:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(own.drafted_by.items(), key=lambda item: -item[1]))
        table.add_row(
            own.policy,
            f"{own.tok_s:.1f}",
            f"{own.tok_s / plain.tok_s:.2f}",
            f"{own.tokens_per_round:.2f}",
            f"{own.latency_s:.3f}",
            shares,
        )
    console.print(table)


def page_of(found: Sequence[Row], curves: Curves, method: str) -> str:
    """The plots as a page of their own."""
    title, plots = "Speculation, planned", []
    if measured := {row.method: row.curve for row in found if row.curve}:
        plots.append(_plot("Predicted speed-up by draft length", measured, "drafted nodes"))
    guessed = {f"acceptance {chance:.2f}": curve for chance, curve in curves.items()}
    plots.append(_plot(f"What if: a chain at the costs of {method}", guessed, "drafted tokens"))
    notes = "".join(f"<pre>{escape(text)}</pre>" for text in (FORMULAS, json.dumps(conditions(), indent=1)))
    return page(title, f'<h1>{title}</h1><div class="plots">{"".join(plots)}</div>{notes}')


def _plot(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    series = [Series(name, i, curve) for i, (name, curve) in enumerate(curves.items())]
    return f"<section>{legend(list(curves))}{lines(title, series, (label, 'speed-up'), line_at=1.0)}</section>"


def _spark(values: Sequence[float], top: float | None = None) -> str:
    """One letter per value, from nothing to the top."""
    most = top or max(values, default=1.0) or 1.0
    return "".join(_BLOCKS[min(int(value / most * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in values)


def _style(value: float, best: float) -> str:
    return "bold green" if value == best and value > 1 else "red" if value < 1 else "default"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M" if number >= 1e5 else str(number)


def _bytes(number: int) -> str:
    return "-" if number == 0 else f"{number / 2**20:.1f} MiB"
