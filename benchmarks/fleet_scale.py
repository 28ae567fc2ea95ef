"""`python -m benchmarks.fleet_scale`: 1 to 1,000 replicas, ten of them for an hour, and a day of a million requests, on paper.

Every case is one simulation with the bundled costs (or --costs). Its row in the result is replaced, so that cases can be run
one by one and at the same time: `--only r1000`.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import errors, run
from outrider import charts
from outrider.bench.environment import environment
from outrider.bench.plan.fleet.load import LoadShape
from outrider.bench.plan.fleet.replica_costs import read_replica
from outrider.bench.plan.fleet.simulate import simulate
from outrider.bench.plan.fleet.summary import Slo, summarise
from outrider.charts import Series, lines
from outrider.errors import UnknownMethod

__all__ = ["CASES", "main", "markdown", "picture"]

_DAY, _MILLION = 86_400.0, 1_000_000
_PER_REPLICA = 0.5  # conversations' requests a second of each replica
_LOAD = LoadShape(_PER_REPLICA, 60.0, prompt=64, output=64, shared=128, turns=3.0, pause=10.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet and its load."""

    replicas: int
    load: LoadShape
    speculation: str = "auto"


def _sized(replicas: int, seconds: float, speculation: str = "auto") -> Case:
    return Case(replicas, replace(_LOAD, rate=_PER_REPLICA * replicas, seconds=seconds), speculation)


def _chosen(per_replica: float, day_share: float) -> dict[str, Case]:
    """The cases at another load of each replica, and with a part of the day."""
    scale = per_replica / _PER_REPLICA
    cases = {name: replace(case, load=replace(case.load, rate=case.load.rate * scale)) for name, case in CASES.items()}
    return cases | {"day": _day(day_share)}


def _day(share: float) -> Case:
    """A day of a million requests on ten replicas; with a share below 1 the day passes that much quicker, at the same rates."""
    return Case(10, replace(_LOAD, rate=_MILLION / _DAY, seconds=share * _DAY, period=share * _DAY, swing=0.6))


CASES: Mapping[str, Case] = {
    **{f"r{n}": _sized(n, seconds) for n, seconds in ((1, 600.0), (3, 300.0), (10, 120.0), (30, 60.0), (100, 60.0), (300, 60.0))},
    "r1000": _sized(1000, 60.0),
    "r10plain": _sized(10, 120.0, "none"),
    "hour": _sized(10, 3600.0),
    "day": _day(1.0),
}


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The cases as a table."""
    names = ("case", "replicas", "drafting", "load", "requests", "tok/s", "TTFT p50 / p99", "TPOT p50 / p99", "prefix hits",
             "rounds that draft", "busy", "rounds", "rounds/s", "took")  # fmt: skip
    out = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name in (name for name in CASES if name in rows):
        row = rows[name]
        out.append(
            f"| `{name}` | {row['replicas']:,} | {row['speculation']} | {row['load']['rate']:.4g}/s, {row['seconds']:,.0f} s "
            f"| {row['requests']:,} | {row['output_tok_s']:,.0f} | {row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f} ms | "
            f"{row['tpot_p50_ms']:.2f} / {row['tpot_p99_ms']:.2f} ms | {row['prefix_hit_rate']:.1%} | {row['drafting']:.1%} | "
            f"{row['busy']:.1%} | {row['rounds']:,} | {row['rounds_per_s']:,.0f} | {row['wall_s']:,.0f} s |"
        )
    return "\n".join(out)


def picture(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Tail latency, prefix hits and drafting by the number of replicas, as one SVG file."""
    sizes = sorted((row["replicas"], row) for name, row in rows.items() if name.startswith("r") and row["speculation"] == "auto")
    where = "replicas, as a power of ten"

    def series(name: str, colour: int, field: str, scale: float) -> Series:
        return Series(
            name, colour, [(len(str(n)) - 1 + (0.48 if str(n)[0] == "3" else 0.0), scale * row[field]) for n, row in sizes]
        )

    figures = [
        lines("TTFT p99", [series("TTFT p99", 1, "ttft_p99_ms", 1.0)], (where, "ms to the first token, p99")),
        lines("TPOT p99", [series("TPOT p99", 2, "tpot_p99_ms", 1.0)], (where, "ms a token, p99")),
        lines("shares", [series("prefix hits", 3, "prefix_hit_rate", 100.0), series("rounds that draft", 4, "drafting", 100.0)],
              (where, "% prefix hits (green), rounds that draft (violet)")),
    ]  # fmt: skip
    drawn = [re.sub(r"<svg [^>]*>", "", figure[figure.index("<svg") : figure.index("</svg>")]) for figure in figures]
    parts = "".join(f'<g transform="translate(0 {260 * i})">{part}</g>' for i, part in enumerate(drawn))
    style = Path(charts.__file__).with_suffix(".css").read_text(encoding="utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 470 {260 * len(drawn)}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="var(--sheet)"/>{parts}</svg>\n'
    )


def main(
    only: Annotated[str | None, typer.Option(help="Comma-separated cases. Default: all.")] = None,
    per_replica: Annotated[float, typer.Option(help="Requests a second of each replica; the day has its own.")] = _PER_REPLICA,
    day_share: Annotated[float, typer.Option(min=0.001, max=1, help="Of the day's million requests, at the same rates.")] = 1.0,
    costs: Annotated[Path | None, typer.Option(help="Costs of a replica. Default: the bundled ones.")] = None,
    output: Annotated[Path, typer.Option(help="File for the result, as JSON.")] = Path("results/fleet_scale.json"),
    plot: Annotated[Path | None, typer.Option(help="Draw the plot of the result into this SVG file.")] = None,
) -> None:
    """Simulate the cases, and print the table of all there are."""
    cases = _chosen(per_replica, day_share)
    names = list(cases) if only is None else [name for name in only.split(",") if name]
    replica = read_replica(costs)
    for name in names:
        if name not in cases:
            raise UnknownMethod("--only", name, list(cases))
        case = cases[name]
        errors.print(f"{name}: {case.replicas} replicas, {case.load.rate:.4g} requests a second for {case.load.seconds:g} s")
        done = simulate(case.load.requests(), replica.drafting(case.speculation), case.replicas)
        row = summarise(done, replica.sizes.max_num_seqs, case.speculation, Slo()).as_dict()
        load = {field: getattr(case.load, field) for field in ("rate", "prompt", "output", "shared", "turns", "pause", "swing")}
        _keep(output, name, row | {"load": load, "wall_s": done.wall_s} | environment(), dict(replica.measured))
        errors.print(f"{name}: {done.rounds} rounds in {done.wall_s:.1f} s, {done.rounds / done.wall_s:.0f} rounds/s")
    rows = json.loads(output.read_text(encoding="utf-8"))["cases"]
    print(markdown(rows))
    if plot is not None:
        plot.write_text(picture(rows), encoding="utf-8")


def _keep(path: Path, name: str, row: dict[str, Any], costs: dict[str, Any]) -> None:
    """Replace one case in the result; other processes may do the same."""
    path.touch()
    with path.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        cases = json.loads(text)["cases"] if text.strip() else {}
        data = {"what": "simulated fleets: outrider plan --fleet at several sizes", "costs": costs, "cases": cases | {name: row}}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
