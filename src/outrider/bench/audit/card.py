"""The card of an audit: JSON, Markdown, and an HTML page with pictures that needs no other file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outrider.charts import Series, bars, page

__all__ = ["html_card", "markdown_card", "write_card"]

Card = Mapping[str, Any]
_NUMBER = re.compile(r"\d+ of \d+|(at least )?-?[\d.]+|\u2013|unknown")
_HEAD = ("requests", "equal", "with margin above the limit", "largest margin, nats", "remarks")


def write_card(card: Card, folder: Path, stem: str = "audit") -> list[Path]:
    """Write the three files; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(card, indent=1) + "\n", ".md": markdown_card(card), ".html": html_card(card)}
    paths = [folder / f"{stem}{ending}" for ending in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def markdown_card(card: Card) -> str:
    """The card as Markdown."""
    lines = [f"# Audit: {card['name']}", "", f"**{card['verdict']}**", ""]
    lines += [f"- {text}" for text in (*card["reasons"], *_facts(card))]
    lines += ["", f"| kind | {' | '.join(_HEAD)} |", f"|---|{'---|' * len(_HEAD)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in _rows(card)]
    lines += ["", "| sampled tokens | result |", "|---|---|", *(f"| {name} | {text} |" for name, text in _tests(card))]
    lines += ["", "| speed, tok/s | plain | speculative | speed-up |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in _speeds(card)]
    if shown := list(_divergences(card)):
        lines += ["", "| kind | after character | plain | speculative | margin, nats |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(_cell(text) for text in cells)} |" for cells in shown]
    about = card["about"]
    lines += ["", f"{about['device']}; {_versions(about)}. Sides: {card['sides']['plain']}; {card['sides']['speculative']}."]
    return "\n".join([*lines, "", f"    {about['command']}", ""])


def html_card(card: Card) -> str:
    """The card as a page."""
    title = f"Audit: {card['name']}"
    cards = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in _headlines(card)
    )
    about = card["about"]
    sides = f"{card['sides']['plain']}; {card['sides']['speculative']}"
    header = (
        f"<header><h1>{escape(title)}</h1><p>{escape(sides)}; {escape(about['device'])}; {escape(_versions(about))}</p>"
        f"<pre>{escape(about['command'])}</pre></header>"
    )
    said = "".join(f"<li>{escape(text)}</li>" for text in (*card["reasons"], *_facts(card)))
    tables = [
        _table("Requests", ("kind", *_HEAD), [(name, *cells) for name, cells in _rows(card)]),
        _table("Sampled tokens", ("test", "result"), list(_tests(card))),
        _table("Speed, tokens per second", ("requests", "plain", "speculative", "speed-up"), list(_speeds(card))),
    ]
    if shown := list(_divergences(card)):
        tables.append(_table("Where texts part", ("kind", "character", "plain", "speculative", "margin, nats"), shown))
    return page(title, f'{header}<div class="cards">{cards}</div><ul>{said}</ul>{_pictures(card)}{"".join(tables)}')


def _pictures(card: Card) -> str:
    """Equal texts by kind and speed by load, each beside what it is compared with."""
    drawn, names = [], ("equal texts", "speed-up")
    compared = [(name, row["equal"] / row["compared"]) for name, row in card["kinds"].items() if row["compared"]]
    if compared:
        points = [(float(i), share) for i, (_, share) in enumerate(compared)]
        drawn.append(bars("Share of equal texts", [name for name, _ in compared], [Series(names[0], 1, points)], "", 1.0))
    speeds = [(name, row["speedup"]) for name, row in card["speed"].items() if row["speedup"]]
    if speeds:
        points = [(float(i), value) for i, (_, value) in enumerate(speeds)]
        top = max(value for _, value in speeds)
        series = [Series(names[1], 3, points)]
        drawn.append(bars("Speed-up over plain decoding", [name for name, _ in speeds], series, "\u00d7 plain", top))
    return f'<section><h2>At a glance</h2><div class="plots">{"".join(drawn)}</div></section>'


def _headlines(card: Card) -> Iterator[tuple[str, str, str]]:
    yield "verdict", card["verdict"], (card["cut_short"] and f"cut short: {card['cut_short']}") or "all requests were sent"
    compared = sum(row["compared"] for row in card["kinds"].values())
    equal = sum(row.get("equal", 0) for row in card["kinds"].values())
    yield "equal texts", f"{equal} of {compared}", "greedy and seeded"
    acceptance = card["acceptance"]
    if acceptance and acceptance["rate"] is not None:
        length = acceptance["mean_length"]
        yield "acceptance rate", f"{acceptance['rate']:.0%}", "" if length is None else f"{length:.2f} tokens a round"
    if speed := card["speed"].get("greedy"):
        yield "speed-up", f"{speed['speedup']:.2f}\u00d7", "greedy, one request at a time"


def _facts(card: Card) -> Iterator[str]:
    yield from card["notes"]
    if rate := card["fault_rate_seen_with_95_percent"]:
        yield (
            f"{card['tokens_compared']} greedy tokens were equal: wrong tokens at a rate of 1 in {1 / rate:.0f} or more "
            "would have shown with a probability of 95 %"
        )
    acceptance = card["acceptance"]
    if acceptance is None:
        yield "the engine does not report acceptance"
    elif acceptance["rate"] is not None:
        length = "" if acceptance["mean_length"] is None else f", {acceptance['mean_length']:.2f} tokens a round"
        yield f"acceptance rate {acceptance['rate']:.1%} (accepted over drafted tokens, from {acceptance['source']}){length}"
    if card["cut_short"]:
        yield f"cut short: {card['cut_short']}"


def _rows(card: Card) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, row in card["kinds"].items():
        if not row["compared"]:
            yield name, ("0", "\u2013", "\u2013", "\u2013", _remarks(row))
            continue
        margins = [d["margin_nats"] for d in row["divergences"] if d["margin_nats"] is not None]
        above = sum(margin > card["near_tie_nats"] for margin in margins)
        cells = (str(row["requests"]), f"{row['equal']} of {row['compared']}", str(above))
        yield name, (*cells, f"{max(margins):.3f}" if margins else "\u2013", _remarks(row))


def _remarks(row: Mapping[str, Any]) -> str:
    """What a kind shows beyond equality."""
    parts = []
    for key in ("not_supported", "not_with_speculation", "failed"):
        if reasons := row.get(key):
            text = reasons if isinstance(reasons, str) else "; ".join(reasons)
            parts.append(f"{key.replace('_', ' ')}: {text[:160]}")
    if "ended" in row:
        parts.append(f"valid {row['valid_speculative']} of {row['ended']}, plainly {row['valid_plain']}")
    if "largest_logprob_gap" in row:
        parts.append(f"log probabilities differ by at most {row['largest_logprob_gap']:.3g} nats ({row['logprobs_compared']})")
    if row.get("sent_again"):
        parts.append(f"plain repeats {row['differs_where_plain_repeats']} of {row['sent_again']} that differ")
    return "; ".join(parts) or "\u2013"


def _tests(card: Card) -> Iterator[tuple[str, str]]:
    result = card["sampling"]
    if not result:
        yield "none", "not run"
        return
    yield "samples of each side", f"{result['samples']} after {result['prompts']} prompts, temperature 1"
    for name, test in result.items():
        if isinstance(test, dict) and "chi_square" in test:
            yield name.replace("_", " "), f"chi-square {test['chi_square']:.1f}, {test['df']} df, p = {test['p_value']:.2g}"
        elif isinstance(test, dict):
            yield name.replace("_", " "), f"{test['value']:.3f} \u00b1 {test['error']:.3f}, p = {test['p_value']:.2g}"
    yield "significance of each test", f"{result['significance']:g}"


def _speeds(card: Card) -> Iterator[tuple[str, str, str, str]]:
    for name, row in card["speed"].items():
        yield name, f"{row['plain_tok_s']:.1f}", f"{row['speculative_tok_s']:.1f}", f"{row['speedup']:.2f}"


def _divergences(card: Card) -> Iterator[tuple[str, str, str, str, str]]:
    for name, row in card["kinds"].items():
        for d in row.get("shown", ()):
            margin = "unknown" if d["margin_nats"] is None else f"{'at least ' if d['at_least'] else ''}{d['margin_nats']:.3f}"
            yield name, str(d["character"]), repr(d["plain"]), repr(d["speculative"]), margin


def _versions(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in about["versions"].items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers stand on the right; texts on the left, and are wrapped."""
    kinds = ["" if all(_NUMBER.fullmatch(row[i]) for row in rows) else ' class="text"' for i in range(len(head))]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, kinds, strict=True))
    lines = ("".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<section><h2>{escape(title)}</h2><div class="wide"><table class="mixed"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )
