"""The report of a benchmark: one HTML file that needs nothing else, light and dark, every number also in a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import product
from typing import Any

from outrider.bench.suite import PLAIN
from outrider.charts import Series, bars, legend, lines, page, stacked

__all__ = ["render_report"]

Row = dict[str, Any]
_PHASES = ("draft", "verify", "choose", "host")


def render_report(rows: Sequence[Row]) -> str:
    """The page for rows as `results.jsonl` holds them."""
    good = [row for row in rows if not row["failed"]]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    sections = [*_sections(good, methods)] if good else []
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2><p>{text}</p>{content}</section>' for name, title, text, content in sections
    )
    return page("Outrider bench", f"{_header(rows, good)}{body}{_table(rows)}{_notes(rows)}")


def _sections(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Anchor, heading, one line of explanation, and plots; those with nothing to show are left out."""
    fast = [method for method in methods if method != PLAIN]
    key = legend(methods)
    parts: list[tuple[str, str, str, str, list[str]]] = [
        (
            "speedup",
            "Speed-up by method and category",
            "Tokens per second over those of plain decoding of the same requests; the line is plain decoding, whiskers are "
            "95 % intervals over requests.",
            key,
            [*_speedups(rows, methods)],
        ),
        (
            "acceptance",
            "Acceptance by position",
            "Of the rounds that drafted so far ahead, the share whose draft was right up to there.",
            key,
            [*_acceptance(rows, methods)],
        ),
        (
            "time",
            "Where a round's time goes",
            "Milliseconds of a round in which nobody reads a prompt, and the tokens it brings.",
            legend(_PHASES, "p"),
            [*_breakdown(rows)],
        ),
        ("batch", "Batch sweep", "Speed-up by the number of requests that run together.", key, [*_sweep(rows, fast, methods)]),
        (
            "costs",
            "Cost curves",
            "Medians seen in these runs: the target's forward by its rows, and a proposal by the nodes it drafted.",
            key,
            [*_costs(rows, methods)],
        ),
    ]
    for name, title, text, colours, plots in parts:
        if plots:
            yield name, title, text, f'{colours}<div class="plots">{"".join(plots)}</div>'


def _speedups(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    top = max((row["speedup_interval"][1] for row in rows), default=1.0)
    for (temperature, batch), facet in _facets(rows, "temperature", "batch"):
        groups = list(dict.fromkeys(_group(row) for row in facet))
        series = []
        for method in methods:
            mine = [row for row in facet if row["method"] == method and method != PLAIN]
            points = [(float(groups.index(_group(row))), row["speedup"]) for row in mine]
            if points:
                series.append(Series(method, methods.index(method), points, [tuple(row["speedup_interval"]) for row in mine]))
        if series:
            yield bars(f"temperature {temperature:g}, batch {batch}", groups, series, "\u00d7 plain", top)


def _acceptance(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    first = min(row["batch"] for row in rows)
    whole = [row for row in rows if row["category"] is None and row["batch"] == first]
    for (workload, temperature), facet in _facets(whole, "workload", "temperature"):
        series = [
            Series(
                row["method"],
                methods.index(row["method"]),
                [(i + 1.0, y) for i, y in enumerate(row["accepted_by_position"][:16])],
            )
            for row in facet
            if row["accepted_by_position"]
        ]
        if series:
            yield lines(f"{workload}, temperature {temperature:g}", series, ("position", "accepted"), top=1.0)


def _breakdown(rows: Sequence[Row]) -> Iterator[str]:
    whole = [row for row in rows if row["category"] is None and row["ms_per_round"]]
    for (workload, temperature, batch), facet in _facets(whole, "workload", "temperature", "batch"):
        drawn = [
            (row["method"], [row["ms_per_round"][phase] for phase in _PHASES], f"{row['tokens_per_round'] or 0:.2f} tokens")
            for row in facet
        ]
        yield stacked(f"{workload}, temperature {temperature:g}, batch {batch}", drawn, _PHASES, "ms per round")


def _sweep(rows: Sequence[Row], fast: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    whole = [row for row in rows if row["category"] is None]
    if len({row["batch"] for row in whole}) < 2:
        return
    for (workload, temperature), facet in _facets(whole, "workload", "temperature"):
        series = []
        for method in fast:
            points = sorted((float(row["batch"]), row["speedup"]) for row in facet if row["method"] == method)
            if points:
                series.append(Series(method, methods.index(method), points))
        if series:
            yield lines(f"{workload}, temperature {temperature:g}", series, ("batch", "\u00d7 plain"), line_at=1.0)


def _costs(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    for name, title, label in (("verify", "the target's forward", "rows"), ("propose", "a proposal", "nodes")):
        series = []
        for method in methods:
            by_size: dict[float, list[float]] = {}
            for row in rows:
                for size, ms in row.get("costs", {}).get(name, []) if row["method"] == method else []:
                    by_size.setdefault(size, []).append(ms)
            if by_size:
                points = [(size, statistics.median(times)) for size, times in sorted(by_size.items())]
                series.append(Series(method, methods.index(method), points))
        if series:
            yield lines(title, series, (label, "ms"))


def _facets(rows: Sequence[Row], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    values = [list(dict.fromkeys(row[name] for row in rows)) for name in names]
    for wanted in product(*values):
        facet = [row for row in rows if tuple(row[name] for name in names) == wanted]
        if facet:
            yield wanted, facet


def _group(row: Row) -> str:
    return str(row["category"] or row["workload"])


def _header(rows: Sequence[Row], good: Sequence[Row]) -> str:
    marks = rows[0]["conditions"]
    best = max((row for row in good if row["category"] is None), key=lambda row: row["speedup"], default=None)
    compared = sum(row["compared"] for row in good if row["category"] is None)
    equal = sum(row["equal"] * row["compared"] for row in good if row["category"] is None)
    failed = len(rows) - len(good)
    cards = [
        (
            "best speed-up",
            f"{best['speedup']:.2f}\u00d7" if best else "\u2013",
            _where(best) if best else "",
        ),
        ("outputs equal to plain decoding", f"{equal:.0f} of {compared}", "token ids compared one by one"),
        ("cases failed", str(failed), "see the table" if failed else "none"),
    ]
    drawn = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in cards
    )
    versions = ", ".join(f"{name} {version}" for name, version in marks["versions"].items())
    return (
        f"<header><h1>Outrider bench</h1><p>{escape(marks['model'])} on {escape(marks['device'])}, {escape(marks['core'])}; "
        f"{escape(versions)}; {escape(marks['begun'])}</p><pre>{escape(marks['command'])}</pre></header>"
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
    *((f"{phase} ms", lambda row, phase=phase: _number(row["ms_per_round"].get(phase))) for phase in _PHASES),
    ("TTFT ms", lambda row: _number((row["ttft_ms"] or {}).get("median"))),
    ("ITL ms", lambda row: _number((row["itl_ms"] or {}).get("median"))),
    ("TPOT ms", lambda row: _number((row["tpot_ms"] or {}).get("median"))),
    ("efficiency", lambda row: _number(row["efficiency"])),
    ("looping", lambda row: f"{row['looping']:.0%}"),
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
