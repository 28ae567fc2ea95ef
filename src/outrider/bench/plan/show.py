"""Plans as tables and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.bench.environment import environment
from outrider.bench.plan.formulas import FORMULAS
from outrider.bench.plan.planner import PlanRow
from outrider.bench.plan.recommend import Recommendation
from outrider.bench.plan.simulate import SimulatedRun
from outrider.charts import Series, legend, lines, page

__all__ = ["chain", "outcomes", "page_of", "ranking", "recommendation", "rows", "what_if"]

_BLOCKS = "▁▂▃▄▅▆▇█"
Curves = Mapping[float, Sequence[tuple[int, float]]]


def rows(planned: Sequence[PlanRow], context: int, console: Console) -> None:
    mixture = ["experts/round"] if any(row.experts for row in planned) else []
    sizes = ("break-even batch", "weights", "KV", *mixture)
    table = Table("drafter", "tokens/round", "speed-up", "best length", "then", "best tree", *sizes)
    for row in planned:
        tree = f"{row.tree['nodes']} nodes: {row.tree['speedup']:.2f}" if row.tree else "-"
        table.add_row(
            row.method, f"{row.tokens_per_round:.2f}", f"{row.speedup:.2f}", str(row.best_length), f"{row.best_speedup:.2f}",
            tree, str(row.break_even_batch), _bytes(row.weights_bytes), _bytes(row.kv_bytes_per_token * context),
            *(f"{row.experts:.1f}" for _ in mixture),
        )  # fmt: skip
    console.print(table)
    console.print(f"KV: of one sequence of {context} tokens. A best length of 0: plain decoding is quicker.", highlight=False)
    for row in planned:
        if row.curve:
            values = " ".join(f"{k}:{value:.2f}" for k, value in row.curve)
            console.print(
                f"{_spark([value for _, value in row.curve])}  {row.method}  by length {values}", highlight=False, soft_wrap=True
            )


def what_if(curves: Curves, title: str, console: Console) -> None:
    lengths = [k for k, _ in next(iter(curves.values()))]
    table = Table("acceptance", *map(str, lengths), "", title=f"speed-up by acceptance and draft length, {title}")
    top = max(value for curve in curves.values() for _, value in curve)
    for chance, curve in curves.items():
        best = max(value for _, value in curve)
        cells = [Text(f"{value:.2f}", style=_style(value, best)) for _, value in curve]
        table.add_row(f"{chance:.2f}", *cells, _spark([value for _, value in curve], top))
    console.print(table)


def chain(result: Mapping[str, Any], name: str, console: Console) -> None:
    best = result["best_length"]
    console.print(
        f"{name}, acceptance {result['acceptance']}, batch {result['batch']}: draft {best}, "
        f"{result['tokens'][best]:.2f} tokens a round, speed-up {result['best_speedup']:.2f}; "
        f"drafting pays up to batch {result['break_even_batch']}",
        highlight=False,
    )
    if result["closed_form_length"] is not None:
        console.print(f"closed form, with rows free: draft {result['closed_form_length']:.1f}", highlight=False)
    if "tree" in result:
        tree = result["tree"]
        console.print(
            f"best tree: {tree['nodes']} nodes, {tree['tokens']:.2f} tokens a round, speed-up {tree['speedup']:.2f}, "
            f"parents {tree['parents']}",
            highlight=False,
        )


def recommendation(result: Recommendation, console: Console) -> None:
    low, high = result.sizes
    pass_ms = "" if result.pass_ms is None else f", a pass takes at least {result.pass_ms:.2f} ms here"
    console.print(
        f"{result.target}: {_count(result.parameters)} weights{pass_ms}; beside them in bfloat16 there is room for "
        f"{result.concurrency} sequences of 4,096 tokens. A draft model should have {_count(low)} to {_count(high)} weights and "
        "the same tokenizer.",
        highlight=False,
        soft_wrap=True,
    )
    _show_drafts(result, console)
    lookups = ", ".join(result.lookups)
    without = "" if result.drafts else "; or train a draft model or head with `outrider train`"
    console.print(f"without weights: --method {lookups}{without}", highlight=False)
    if result.fits:
        table = Table("candidate", "weights", "smaller", "tokens", "speed-up (length) at acceptance 0.6, 0.7, 0.8, 0.9", "")
        for fit in result.fits:
            estimates = "  ".join(f"{speedup:.2f} ({length})" for length, speedup in fit.estimates.values())
            table.add_row(fit.path, _count(fit.parameters), f"{fit.times_smaller:.1f} x", fit.tokens, estimates, fit.says)
        console.print(table)


def _show_drafts(result: Recommendation, console: Console) -> None:
    """Published siblings and heads, and where their acceptance comes from."""
    if result.family is None:
        console.print("its tokenizer is of no family known here", highlight=False)
        return
    if not result.drafts:
        console.print(f"no smaller model with the tokenizer of {result.family} is in the table", highlight=False)
        return
    table = Table()
    for name in ("draft", "method", "smaller", "chance", "speed-up\n(length)", "pays at\nbatch", "weights\nof both",
                 "KV per\ntoken", "concur-\nrency"):  # fmt: skip
        table.add_column(name, no_wrap=True)
    for option in result.drafts:
        first, last = option.pays
        table.add_row(
            option.name, option.method, f"{option.times_smaller:g} x", f"{option.chance:.2f}{' (guess)' * option.is_guess}",
            f"{option.speedup:.2f} ({option.best_length})", f"{first} to {last}" if first else "none",
            f"{option.weights_bytes / 1e9:.1f} GB", f"{option.kv_bytes_per_token / 1024:.0f} KiB", str(option.concurrency),
        )  # fmt: skip
    console.print(table)
    for option in result.drafts:
        if not option.is_guess:
            console.print(f"{option.name}: {option.basis}", highlight=False, markup=False, soft_wrap=True)


def ranking(ranked: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table("rank", "candidate", "speed-up", "at length", "tokens/round of 8", "accepted by position")
    for i, row in enumerate(ranked, 1):
        shares = " ".join(f"{share:.2f}" for share in row["by_position"])
        table.add_row(
            str(i), row["path"], f"{row['speedup']:.2f}", str(row["draft_tokens"]), f"{row['tokens_per_round']:.2f}", shares
        )
    console.print(table)


def outcomes(runs: Sequence[SimulatedRun], console: Console) -> None:
    plain = runs[0]
    table = Table("policy", "tok/s", "speed-up", "tokens/round", "latency s", "drafted by")
    for run in runs:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(run.drafted_by.items(), key=lambda item: -item[1]))
        table.add_row(
            run.policy,
            f"{run.tok_s:.1f}",
            f"{run.tok_s / plain.tok_s:.2f}",
            f"{run.tokens_per_round:.2f}",
            f"{run.latency_s:.3f}",
            shares,
        )
    console.print(table)


def page_of(rows: Sequence[PlanRow], curves: Curves, method: str) -> str:
    """The plots as a page."""
    title, plots = "Speculation, planned", []
    if measured := {row.method: row.curve for row in rows if row.curve}:
        plots.append(_plot("Predicted speed-up by draft length", measured, "drafted nodes"))
    supposed = {f"acceptance {chance:.2f}": curve for chance, curve in curves.items()}
    plots.append(_plot(f"What if: a chain at the costs of {method}", supposed, "drafted tokens"))
    notes = "".join(f"<pre>{escape(text)}</pre>" for text in (FORMULAS, json.dumps(environment(), indent=1)))
    return page(title, f'<h1>{title}</h1><div class="plots">{"".join(plots)}</div>{notes}')


def _plot(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    series = [Series(name, i, curve) for i, (name, curve) in enumerate(curves.items())]
    return f"<section>{legend(list(curves))}{lines(title, series, (label, 'speed-up'), line_at=1.0)}</section>"


def _spark(values: Sequence[float], top: float | None = None) -> str:
    """One letter per value, from nothing to the top."""
    highest = top or max(values, default=1.0) or 1.0
    return "".join(_BLOCKS[min(int(value / highest * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in values)


def _style(value: float, best: float) -> str:
    return "bold green" if value == best and value > 1 else "red" if value < 1 else "default"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M" if number >= 1e5 else str(number)


def _bytes(number: int) -> str:
    return "-" if number == 0 else f"{number / 2**20:.1f} MiB"
