"""The mean loss of a model on texts, by the runner that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.bench.workloads import find_prompts
from outrider.cache import KVPool
from outrider.engine.acceptance import read_prompts
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Feed, LoadOptions, Runner, open_decoder
from outrider.text import Tokenizer

__all__ = ["encoded", "mean_loss", "read_texts"]

_PAGE = 64
_HELD_OUT = ("code", "editing")  # bundled prompts
_ROWS_OF = (".jsonl", ".gz", ".parquet")  # endings of files that have a text in each row


def read_texts(path: Path | None) -> list[str]:
    """The texts of a file: rows of JSONL, or all of it; without one the bundled prompts."""
    if path is None:
        return [text for name in _HELD_OUT for text in read_prompts(find_prompts(name))]
    if path.suffix in _ROWS_OF:
        return read_prompts(path)
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("text", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def encoded(directory: Path, texts: Sequence[str], longest: int, most: int | None = None) -> list[list[int]]:
    """Token ids of texts in pieces of at most `longest`, and at most that many in all. Single tokens are left out."""
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise ModelError(f"{directory} holds no tokenizer")
    pieces: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text)
        for begin in range(0, len(ids), longest):
            if most is not None and most < 2:
                return pieces
            piece = ids[begin : begin + min(longest, most or longest)]
            most = None if most is None else most - len(piece)
            pieces += [piece] if len(piece) > 1 else []
    return pieces


def mean_loss(directory: Path, texts: Sequence[Sequence[int]], dtype: str = "auto") -> float:
    """Nats per token after the first of each text."""
    decoder = open_decoder(directory, LoadOptions(dtype))
    c, pages = decoder.spec, -(-max(map(len, texts)) // _PAGE)
    runner = Runner(decoder, KVPool(c.depth, pages + 1, c.kv_heads, _PAGE, c.head_dim))
    total, tokens = 0.0, 0
    for ids in texts:
        logits = runner.logits(runner.forward([Feed(range(pages), 0, ids)]).last, range(len(ids)))
        total += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum"))
        tokens += len(ids) - 1
    return total / tokens
