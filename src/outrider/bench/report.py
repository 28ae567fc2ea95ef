"""The report of a benchmark: one HTML file that needs nothing else, light and dark, every number also in a table."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import product
from typing import Any

from outrider.bench.suite import PLAIN
from outrider.charts import Series, bars, legend, lines, page, stacked

__all__ = ["render_report"]

Row = dict[str, Any]
Points = dict[str, list[tuple[float, float]]]  # by method
_PHASES = ("draft", "verify", "choose", "host")


def render_report(rows: Sequence[Row]) -> str:
    """The page for rows as `results.jsonl` holds them."""
    good = [row for row in rows if not row["failed"]]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    body = ""
    for name, (title, text, plots) in _SECTIONS.items():
        if drawn := "".join(plots(good, methods)) if good else "":
            colours = legend(_PHASES, "p") if name == "time" else legend(methods)
            body += f'<section id="{name}"><h2>{title}</h2><p>{text}</p>{colours}<div class="plots">{drawn}</div></section>'
    return page("Outrider bench", f"{_header(rows, good)}{body}{_table(rows)}{_notes(rows)}")


def _speedups(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    top = max((row["speedup_interval"][1] for row in rows), default=1.0)
    for (temperature, batch), facet in _facets(rows, "temperature", "batch"):
        groups = list(dict.fromkeys(_group(row) for row in facet))
        series = []
        for number, method in enumerate(methods):
            chosen = [row for row in facet if row["method"] == method and method != PLAIN]
            points = [(float(groups.index(_group(row))), row["speedup"]) for row in chosen]
            series.append(Series(method, number, points, [tuple(row["speedup_interval"]) for row in chosen]))
        if drawn := [line for line in series if line.points]:
            yield bars(f"temperature {temperature:g}, batch {batch}", groups, drawn, "\u00d7 plain", top)


def _acceptance(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    first = min(row["batch"] for row in rows)
    for (workload, temperature), facet in _facets(_whole(rows), "workload", "temperature"):
        shares = {row["method"]: row["accepted_by_position"][:16] for row in facet if row["batch"] == first}
        points = {method: [(i + 1.0, share) for i, share in enumerate(by_position)] for method, by_position in shares.items()}
        if series := _series(points, methods):
            yield lines(f"{workload}, temperature {temperature:g}", series, ("position", "accepted"), top=1.0)


def _breakdown(rows: Sequence[Row], _methods: Sequence[str]) -> Iterator[str]:
    measured = [row for row in _whole(rows) if row["ms_per_round"]]
    for (workload, temperature, batch), facet in _facets(measured, "workload", "temperature", "batch"):
        drawn = [
            (row["method"], [row["ms_per_round"][phase] for phase in _PHASES], f"{row['tokens_per_round'] or 0:.2f} tokens")
            for row in facet
        ]
        yield stacked(f"{workload}, temperature {temperature:g}, batch {batch}", drawn, _PHASES, "ms per round")


def _sweep(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    whole = _whole(rows)
    if len({row["batch"] for row in whole}) < 2:
        return
    for (workload, temperature), facet in _facets(whole, "workload", "temperature"):
        points: Points = defaultdict(list)
        for row in sorted(facet, key=lambda row: row["batch"]):
            if row["method"] != PLAIN:
                points[row["method"]].append((float(row["batch"]), row["speedup"]))
        if series := _series(points, methods):
            yield lines(f"{workload}, temperature {temperature:g}", series, ("batch", "\u00d7 plain"), line_at=1.0)


def _costs(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    for name, title, label in (("verify", "the target's forward", "rows"), ("propose", "a proposal", "nodes")):
        times: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            for size, ms in row.get("costs", {}).get(name, []):
                times[row["method"]][size].append(ms)
        points = {method: [(x, statistics.median(ms)) for x, ms in sorted(sizes.items())] for method, sizes in times.items()}
        if series := _series(points, methods):
            yield lines(title, series, (label, "ms"))


_SECTIONS: dict[str, tuple[str, str, Callable[[Sequence[Row], Sequence[str]], Iterator[str]]]] = {
    "speedup": (
        "Speed-up by method and category",
        "Tokens per second over those of plain decoding of the same requests; the line is plain decoding, whiskers are "
        "95 % intervals over requests.",
        _speedups,
    ),
    "acceptance": (
        "Acceptance by position",
        "Of the rounds that drafted at least this many tokens, the share whose draft was accepted up to this position.",
        _acceptance,
    ),
    "time": (
        "Where a round's time goes",
        "Milliseconds of a round that feeds no prompt, and the tokens it emits.",
        _breakdown,
    ),
    "batch": ("Batch sweep", "Speed-up by the number of requests that run together.", _sweep),
    "costs": (
        "Cost curves",
        "Medians of these runs: the target's forward by its rows, and a proposal by its drafted nodes.",
        _costs,
    ),
}


def _series(points: Points, methods: Sequence[str]) -> list[Series]:
    """The lines of the methods that have points, each in its method's colour."""
    return [Series(method, i, points[method]) for i, method in enumerate(methods) if points.get(method)]


def _whole(rows: Sequence[Row]) -> list[Row]:
    """Rows about whole workloads, not about one category."""
    return [row for row in rows if row["category"] is None]


def _facets(rows: Sequence[Row], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    values = [list(dict.fromkeys(row[name] for row in rows)) for name in names]
    for wanted in product(*values):
        facet = [row for row in rows if tuple(row[name] for name in names) == wanted]
        if facet:
            yield wanted, facet


def _group(row: Row) -> str:
    return str(row["category"] or row["workload"])


def _header(rows: Sequence[Row], good: Sequence[Row]) -> str:
    run = rows[0]["conditions"]
    whole, failed = _whole(good), len(rows) - len(good)
    best = max(whole, key=lambda row: row["speedup"], default=None)
    compared = sum(row["compared"] for row in whole)
    equal = sum(row["equal"] * row["compared"] for row in whole)
    cards = [
        ("best speed-up", f"{best['speedup']:.2f}\u00d7" if best else "\u2013", _where(best) if best else ""),
        ("outputs equal to plain decoding", f"{equal:.0f} of {compared}", "token ids compared one by one"),
        ("cases failed", str(failed), "see the table" if failed else "none"),
    ]
    drawn = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in cards
    )
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"<header><h1>Outrider bench</h1><p>{escape(run['model'])} on {escape(run['device'])}, {escape(run['core'])}; "
        f"{escape(versions)}; {escape(run['begun'])}</p><pre>{escape(run['command'])}</pre></header>"
        f'<div class="cards">{drawn}</div>'
    )


def _where(row: Row) -> str:
    return f"{row['method']} on {row['workload']}, temperature {row['temperature']:g}, batch {row['batch']}"


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("tok/s", lambda row: f"{row['tok_s']:.0f}"),
    ("quartiles", lambda row: "\u2013".join(f"{value:.0f}" for value in row["tok_s_quartiles"])),
    ("speed-up", lambda row: f"{row['speedup']:.2f}"),
    ("95 %", lambda row: "\u2013".join(f"{value:.2f}" for value in row["speedup_interval"])),
    ("no loops", lambda row: _number(row["speedup_steady"])),
    ("tokens / round", lambda row: _number(row["tokens_per_round"])),
    ("no loops", lambda row: _number(row["tokens_per_round_steady"])),
    ("acceptance length", lambda row: _number(row.get("mean_acceptance_length"))),
    ("acceptance rate", lambda row: _number(row.get("acceptance_rate"))),
    *((f"{phase} ms", lambda row, phase=phase: _number(row["ms_per_round"].get(phase))) for phase in _PHASES),
    ("TTFT ms", lambda row: _number((row["ttft_ms"] or {}).get("median"))),
    ("ITL ms", lambda row: _number((row["itl_ms"] or {}).get("median"))),
    ("TPOT ms", lambda row: _number((row["tpot_ms"] or {}).get("median"))),
    ("conversion", lambda row: _number(row.get("conversion"))),
    ("efficiency", lambda row: _number(row["efficiency"])),
    ("looping", lambda row: f"{row['looping']:.0%}"),
    ("valid", lambda row: _number(row.get("valid"))),
    ("equal", lambda row: f"{row['equal']:.0%}"),
)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(
        f"<th>{escape(name)}</th>" for name in ("workload", "category", "T", "batch", "method", *(name for name, _ in _COLUMNS))
    )
    body = []
    for row in rows:
        cells = [row["workload"], row["category"] or "all", f"{row['temperature']:g}", str(row["batch"]), row["method"]]
        drawn = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        if row["failed"]:
            drawn += f'<td class="bad" colspan="{len(_COLUMNS)}">failed: {escape(row["failed"])}</td>'
        else:
            wrong = ' class="bad"' if row["equal"] < 1.0 else ""
            drawn += "".join(f"<td{wrong if name == 'equal' else ''}>{escape(cell(row))}</td>" for name, cell in _COLUMNS)
        body.append(f"<tr>{drawn}</tr>")
    return (
        '<section id="rows"><h2>All rows</h2><div class="wide"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _notes(rows: Sequence[Row]) -> str:
    lines_ = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows[0]["conditions"]["meaning"].items())
    return f'<section id="meaning"><h2>What the numbers mean</h2><dl>{lines_}</dl></section>'


def _number(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.2f}"
