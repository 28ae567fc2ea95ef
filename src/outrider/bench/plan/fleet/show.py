"""A simulated fleet as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from outrider.bench.plan.fleet.sizing import stops_paying
from outrider.bench.plan.fleet.summary import FleetRow, Slo

__all__ = ["show_by_load", "show_fleets"]


def show_fleets(rows: Sequence[FleetRow], slo: Slo, console: Console) -> None:
    """One line for each fleet."""
    columns = ("fleet", "drafting", "req/s", "tok/s", "TTFT ms\np50/p99", "TPOT ms\np50/p99", "in SLO", "busy", "batch",
               "prefix\nhits", "rounds\nthat draft", "tokens\n/round", "cost of\n1M tokens")  # fmt: skip
    table = Table(*columns, title=f"{_percent(slo.share)} within {1e3 * slo.ttft_s:g} ms to the first token and "
                  f"{1e3 * slo.tpot_s:g} ms a token", title_justify="left")  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.replicas} x {row.batch}", row.speculation, f"{row.requests_per_s:.4g}", f"{row.output_tok_s:.0f}",
            f"{row.ttft_p50_ms:.0f}/{row.ttft_p99_ms:.0f}", f"{row.tpot_p50_ms:.2f}/{row.tpot_p99_ms:.2f}",
            f"{_percent(row.within_slo)} {'yes' if row.meets_slo else 'NO'}", _percent(row.busy), f"{row.mean_batch:.1f}",
            _percent(row.prefix_hit_rate), _percent(row.drafting), f"{row.tokens_per_round:.2f}",
            "-" if row.cost_per_million is None else f"{row.cost_per_million:.2f}",
        )  # fmt: skip
    console.print(table)
    for row in rows:
        name = f"{row.replicas} x {row.batch}, {row.speculation}"
        if row.overloaded:
            console.print(f"{name}: OVERLOADED, {row.refused} of {row.requests} requests refused; add replicas", highlight=False)
        console.print(
            f"{name}: {row.requests} requests in {row.seconds:.1f} s; {row.rounds} rounds simulated at {row.rounds_per_s:.0f} "
            "rounds/s", highlight=False,
        )  # fmt: skip


def show_by_load(rows: Sequence[tuple[float, FleetRow, FleetRow]], console: Console) -> None:
    """What speculation is worth on one replica as the load grows, and where it stops paying."""
    table = Table("req/s of\na replica", "batch", "TPOT ms\nwith", "TPOT ms\nwithout", "speed-up", "rounds\nthat draft", "by",
                  title="what speculation is worth by load", title_justify="left")  # fmt: skip
    for rate, with_, without in rows:
        by = ", ".join(
            f"{name} {_percent(share)}" for name, share in sorted(with_.drafted_by.items(), key=lambda one: -one[1])[:2]
        )
        speedup = without.tpot_p50_ms / with_.tpot_p50_ms if with_.tpot_p50_ms else 1.0
        table.add_row(f"{rate:.3g}", f"{with_.mean_batch:.1f}", f"{with_.tpot_p50_ms:.2f}", f"{without.tpot_p50_ms:.2f}",
                      f"{speedup:.2f}", _percent(with_.drafting), by)  # fmt: skip
    console.print(table)
    rate_or_none = stops_paying(rows)
    console.print(
        "speculation pays at every load tried" if rate_or_none is None
        else f"speculation stops paying at about {rate_or_none:.3g} requests a second on a replica", highlight=False,
    )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
