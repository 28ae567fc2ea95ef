"""Writes docs/claims.md: the speed-ups that are quoted for methods, beside what results/ says was measured here.

python recipes/claims_page.py            # write the page
python recipes/claims_page.py --check    # fail where the page is not what the files say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "claims.md"
Row = dict[str, Any]

_HEAD = """# Quoted speed-ups, and ours

Written by `python recipes/claims_page.py` from `results/`. A quoted speed-up is of one method on one model, device and text, over
plain decoding in the authors' code. It does not carry over: it falls with the cost of drafting beside a forward of the target,
with the cost of verifying more rows, with text that is harder to guess, and with a faster plain decoding to compare with.
"""


class Claim(NamedTuple):
    """What is quoted for a method, the rows of ours that belong to it, and why they differ."""

    name: str
    quoted: str
    where: str  # whose figures, on what
    small: tuple[str, ...]  # beginnings of methods in plan_check.json
    large: tuple[str, ...]  # methods in scale_check.json
    reason: str


_TIMES = "\u00d7"
_ROWS = "Two cores without AMX compute 8 rows in about the time of one, and no more"
CLAIMS = (
    Claim(
        "draft model", "2 to 3", "Leviathan 2211.17192, Chen 2302.01318; T5-XXL, Chinchilla 70B; TPU", ("draft_model:",),
        ("draft model",),
        "Pyrite's draft model has a tenth of its parameters, and each of its forwards an overhead of its own; a draft for a 70B "
        "model costs a hundredth of a forward.",
    ),
    Claim(
        "cascade", "2.5 to 3.5", "Chen 2312.11462, staged 2308.04623, Polybasic; 7B and larger; GPU", ("cascade:",),
        ("cascade",),
        "A lookup below a draft model saves forwards of a draft model that is cheap already.",
    ),
    Claim(
        "Medusa", "2.2 to 3.6", "2401.10774; Vicuna 7B to 33B; A100, batch 1", ("medusa:",), ("Medusa",),
        f"Its tree needs many rows for few accepted tokens. {_ROWS}; on an A100 64 rows of a 7B model cost about what one does.",
    ),
    Claim(
        "EAGLE, EAGLE-2", "2.7 to 3.5", "2401.15077; LLaMA2-Chat 70B; A100, batch 1", ("eagle:5",), ("EAGLE-3 chain",),
        "Its acceptance is about as published. A layer of Pyrite is a twelfth of it and the output matrix as much again, where a "
        "layer of a 70B model is an eightieth.",
    ),
    Claim(
        "EAGLE-3", "3.0 to 6.5", "2503.01840; Vicuna 13B, LLaMA 3 8B to 70B; batch 1", ("eagle:24",), ("EAGLE-3 tree",),
        f"Its trees have 60 nodes. {_ROWS}.",
    ),
    Claim(
        "block drafters (DFlash)", "4 to 6", "2602.06036; Qwen3 4B to 397B; B200, batch 1", ("dflash:",),
        ("block", "block tree"),
        "The block of 16 rows is one pass of two layers of twelve, and as many rows to verify.",
    ),
    Claim(
        "lookahead", "1.5 to 2.3", "2402.02057; LLaMA2-Chat 7B; A100, batch 1", ("lookahead:",), ("lookahead",),
        f"It computes rows that draft nothing beside those it verifies. {_ROWS}.",
    ),
    Claim(
        "LayerSkip", "1.8 to 2.2", "2404.16710; LLaMA trained with layer dropout and exit losses", ("early_exit:",),
        ("early exit",),
        "Pyrite was not trained to leave early: no exit agrees often enough to pay for its layers, so nothing is drafted.",
    ),
    Claim(
        "n-gram lookup", "", "as much as the output repeats the text", ("ngram:",), ("n-gram",),
        "Drafts cost nothing, so it is what the text allows.",
    ),
)  # fmt: skip


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_small(), *_large()]).rstrip() + "\n"


def _small() -> Iterator[str]:
    data = _read("plan_check.json")
    assert data is not None
    yield "## Pyrite, 40M parameters, two processor cores\n"
    yield (
        f"Batch 1, greedy, outputs that loop left out, prompts included in the time; {data['device']} "
        "([plan_check.json](../results/plan_check.json)).\n"
    )
    yield _table([
        (claim, _shown([r for r in data["rows"] if r["method"].startswith(claim.small)], "measured", "tokens_per_round_measured"))
        for claim in CLAIMS
    ])  # fmt: skip
    yield "What makes the difference:\n"
    yield from (f"- **{claim.name}.** {claim.reason}" for claim in CLAIMS)
    yield ""


def _large() -> Iterator[str]:
    yield "## At a size where heads pay\n"
    data = _read("scale_check.json")
    if data is None:
        yield (
            "Not measured yet. `python -m recipes.scale_check PROMPTS.jsonl` trains a target of 157M parameters in 24 layers "
            "with its drafters in half an hour on one H200, serves them, and writes `results/scale_check.json`; then run this "
            "script.\n"
        )
        return
    rows = {row["method"]: row for row in data["rows"] if "speedup" in row}
    yield f"`{data['command']}`; {data['device']}: {data['what']} ([scale_check.json](../results/scale_check.json)).\n"
    yield _table([
        (claim, _shown([rows[name] for name in claim.large if name in rows], "speedup", "tokens_per_round")) for claim in CLAIMS
    ])  # fmt: skip
    failed = [row for row in data["rows"] if "failed" in row]
    yield from (f"- {row.get('method', row.get('part'))}: {row['failed']}" for row in failed)


def _shown(rows: list[Row], speedup: str, rate: str) -> tuple[str, str, str]:
    """The fastest of some rows: its name, speed-up and tokens per round."""
    best = max(rows, key=lambda row: row[speedup], default=None)
    return ("-", "-", "-") if best is None else (f"`{best['method']}`", f"{best[speedup]:.2f} {_TIMES}", f"{best[rate]:.2f}")


def _table(rows: list[tuple[Claim, tuple[str, str, str]]]) -> str:
    head = "| method | quoted | by whom, on what | ours | speed-up | tokens per round |\n|---|---|---|---|---|---|"
    cells = ((claim.name, f"{claim.quoted} {_TIMES}" if claim.quoted else "-", claim.where, *shown) for claim, shown in rows)
    return "\n".join([head, *("| " + " | ".join(row) + " |" for row in cells)]) + "\n"


def _read(name: str) -> Row | None:
    path = ROOT / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


if __name__ == "__main__":
    if "--check" in sys.argv:
        same = PAGE.read_text(encoding="utf-8") == page()
        sys.exit(0 if same else "docs/claims.md is not what results/ says; run this script")
    PAGE.write_text(page(), encoding="utf-8")
