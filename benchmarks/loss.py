"""`python -m benchmarks.loss`: what a dtype costs in quality, as mean loss per token by the runner that serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import run
from outrider.bench.environment import environment
from outrider.cache import KVPool
from outrider.engine.acceptance import read_prompts
from outrider.errors import ModelError
from outrider.model import Feed, LoadOptions, Runner, locate, open_decoder
from outrider.model.bundled import bundled_model
from outrider.options import Model
from outrider.text import Tokenizer

__all__ = ["bench_loss"]

_PAGE = 64


def bench_loss(data: Path, model: str | None, dtypes: Sequence[str], limit: int | None, longest: int) -> list[dict[str, Any]]:
    """One row per dtype; `change` is against the first of them."""
    directory = locate(model or str(bundled_model()))
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise ModelError(f"{directory} holds no tokenizer")
    texts = [tokenizer.encode(text)[:longest] for text in read_prompts(data, limit)]
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        loss, tokens = _loss(directory, dtype, [ids for ids in texts if len(ids) > 1])
        change = loss / rows[0]["loss"] - 1 if rows else 0.0
        rows.append({"dtype": dtype, "loss": round(loss, 5), "change": round(change, 6), "tokens": tokens})
    return rows


def _loss(directory: Path, dtype: str, texts: Sequence[Sequence[int]]) -> tuple[float, int]:
    decoder = open_decoder(directory, LoadOptions(dtype))
    c, pages = decoder.spec, -(-max(map(len, texts)) // _PAGE)
    runner = Runner(decoder, KVPool(c.depth, pages + 1, c.kv_heads, _PAGE, c.head_dim))
    total, tokens = 0.0, 0
    for ids in texts:
        logits = runner.logits(runner.forward([Feed(range(pages), 0, ids)]).last, range(len(ids)))
        total += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum"))
        tokens += len(ids) - 1
    return total / tokens, tokens


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
