"""The published cards: rendered from their numbers, and summarised truly in docs/audit.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.audit.card import html_card, markdown_card
from outrider.bench.audit.verdict import judge

ROOT = Path(__file__).parents[3]
CARDS = sorted((ROOT / "results" / "audit").glob("*/audit.json"))


def summary(folder: str, card: dict[str, Any]) -> str:
    """A card's row of the table in docs/audit.md."""
    greedy = [row for name, row in card["kinds"].items() if name in ("greedy", "short", "concurrent", "stop", "logprobs")]
    compared, equal = (sum(row.get(name, 0) for row in greedy) for name in ("compared", "equal"))
    margins = [d["margin_nats"] for row in greedy for d in row.get("divergences", ()) if d["margin_nats"] is not None]
    chi = card["sampling"].get("first_tokens_speculative")
    acceptance = card["acceptance"]
    cells = [
        f"[{card['name']}](../results/audit/{folder}/audit.md)",
        card["verdict"],
        f"{equal} of {compared}",
        f"{max(margins):.3f}" if margins else "-",
        "-" if chi is None else f"p = {chi['p_value']:.2g}",
        "not reported" if acceptance is None else f"{acceptance['rate']:.0%}",
        f"{card['speed']['greedy']['speedup']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_a_card_says_what_its_numbers_say(path: Path) -> None:
    card = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == markdown_card(card)
    assert path.with_suffix(".html").read_text(encoding="utf-8") == html_card(card)
    verdict = judge(card["kinds"], card["sampling"], card["near_tie_nats"])
    assert (verdict.word, list(verdict.reasons)) == (card["verdict"], card["reasons"])
    assert summary(path.parent.name, card) in (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


def test_three_engines_have_a_card() -> None:
    assert {"outrider", "transformers", "llama_cpp"} <= {path.parent.name for path in CARDS}
