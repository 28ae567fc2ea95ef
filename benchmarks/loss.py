"""`python -m benchmarks.loss`: what a dtype costs in quality, as mean loss per token by the runner that serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from outrider.bench.environment import environment
from outrider.engine.acceptance import read_prompts
from outrider.model import locate
from outrider.model.bundled import bundled_model
from outrider.options import Model
from outrider.quantize.loss import encoded, mean_loss

__all__ = ["bench_loss"]


def bench_loss(data: Path, model: str | None, dtypes: Sequence[str], limit: int | None, longest: int) -> list[dict[str, Any]]:
    """One row per dtype; `change` is against the first of them."""
    directory = locate(model or str(bundled_model()))
    texts = [pieces[0] for text in read_prompts(data, limit) if (pieces := encoded(directory, [text], longest))]
    tokens, rows = sum(map(len, texts)) - len(texts), list[dict[str, Any]]()
    for dtype in dtypes:
        loss = mean_loss(directory, texts, dtype)
        change = loss / rows[0]["loss"] - 1 if rows else 0.0
        rows.append({"dtype": dtype, "loss": round(loss, 5), "change": round(change, 6), "tokens": tokens})
    return rows


def main(
    data: Annotated[Path, typer.Argument(help="JSONL of texts: turns, prompt or text.")],
    model: Model = None,
    dtypes: Annotated[str, typer.Option(help="Comma-separated; the first is what the others are compared with.")] = (
        "float32,bfloat16,int8,int4"
    ),
    limit: Annotated[int | None, typer.Option(help="Use only this many texts.")] = None,
    longest: Annotated[int, typer.Option(min=2, help="Tokens read of each text.")] = 512,
) -> None:
    """What a dtype costs in quality: mean loss per token of some texts."""
    print(json.dumps(environment() | {"rows": bench_loss(data, model, dtypes.split(","), limit, longest)}))


if __name__ == "__main__":
    run(main)
