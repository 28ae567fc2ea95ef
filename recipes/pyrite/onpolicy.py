"""On-policy text: what the target writes after function stubs, in rows of one text each.

A text is written from position 0, as in serving, and all texts have one length, so that a training row is exactly one text.
In a row packed with other texts the target's choices would differ at some places from what it wrote.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.model import Decoder
from outrider.train.data import TokenStore
from outrider.train.generate import Ids, Written, random_windows, write_text
from recipes.pyrite.stubs import Stubs

__all__ = ["StubWriting", "looping", "steady", "with_windows", "write_after_stubs", "written_after"]

_GRAM, _TIMES = 8, 3  # a text loops where some 8-gram occurs more than three times, as in served figures


@dataclass(frozen=True, slots=True)
class StubWriting:
    """How much text the target writes after stubs."""

    length: int = 320  # of a text, its stub included
    seconds: float = 60.0
    rows: int = 4096
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.3, 0.3, 0.3, 0.8, 0.8)  # drawn from this list; many greedy texts loop
    leads: tuple[int, ...] = (0,)  # tokens of the file before a stub, drawn from this list
    max_body: int = 24  # tokens of a function's body in its prompt, at most
    seed: int = 0


def write_after_stubs(decoder: Decoder, store: TokenStore, stubs: Stubs, writing: StubWriting) -> TokenStore:
    """Write until the time is up, without texts that loop or end early. All documents have the same length."""
    generator = np.random.Generator(np.random.Philox(key=[writing.seed, 3]))
    begin, documents = time.monotonic(), []
    for turn, (first, more, lead) in enumerate(_turns(len(stubs.starts), writing, generator)):
        prompts, lengths = stubs.cut(store, first, first + writing.rows, more, lead)
        temperature = torch.from_numpy(generator.choice(writing.temperatures, len(prompts))).float()
        seed = writing.seed * 1000 + turn
        written = _write(decoder, (prompts, lengths), writing.length, temperature, seed)
        documents.append(written.tokens[steady(written, decoder.spec.eos_ids[0])].cpu().numpy())
        if time.monotonic() - begin > writing.seconds:
            break
    texts = np.concatenate(documents)
    if not len(texts):
        raise InvalidParameter("corpus", "everything the target wrote loops; let it write longer, or from other text")
    return _texts(texts, ["written"] * len(texts))


def written_after(
    decoder: Decoder, store: TokenStore, stubs: Stubs, at: slice, length: int, temperature: float, seed: int
) -> Written:
    """What the target writes after some of the stubs, with the noise of the draws at a temperature above 0."""
    prompts = stubs.cut(store, at.start, at.stop)
    return _write(decoder, prompts, length, torch.full((len(prompts[0]),), temperature), seed, keep_noise=temperature > 0)


def with_windows(written: TokenStore, corpus: TokenStore, share: float, seed: int) -> TokenStore:
    """Written texts and equally long windows of a corpus; about `share` of them are written."""
    length = int(written.starts[1])
    count = round(written.documents * (1 - share) / share)
    windows = random_windows(corpus, count, length, seed) if count else np.zeros((0, length), np.int64)
    texts = np.concatenate((written.ids.reshape(-1, length).astype(np.int64), windows))
    return _texts(texts, [*written.groups, *["corpus"] * count])


def steady(written: Written, eos: int) -> Tensor:
    """(B,) whether a text neither loops nor ends before its last token."""
    tokens = written.tokens[:, written.prompt :]
    return ~looping(tokens) & (tokens != eos).all(-1)


def looping(tokens: Tensor) -> Tensor:
    """(B,) whether some 8-gram of a row of (B, n) occurs more than three times."""
    if tokens.shape[1] < _GRAM + _TIMES:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    grams = tokens.unfold(1, _GRAM, 1)
    factors = torch.tensor([0x9E3779B97F4A7C15 * (2 * i + 1) % 2**61 | 1 for i in range(_GRAM)], device=tokens.device)
    hashed = ((grams + 1) * factors).sum(-1).sort(dim=1).values  # integer overflow is harmless here
    return (hashed[:, _TIMES:] == hashed[:, :-_TIMES]).any(-1)


def _turns(count: int, writing: StubWriting, generator: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    """(first stub, tokens to add, tokens before) of batches of neighbours in length, in endless passes.

    Greedy text is the same in every pass, so each prompt continues into the function's body by another length.
    """
    if not count:
        raise InvalidParameter("corpus", "it holds no documented functions to write after; add Python source")
    while True:
        for first in generator.permutation(range(0, count, writing.rows)).tolist():
            yield first, int(generator.integers(writing.max_body + 1)), int(generator.choice(writing.leads))


def _write(
    decoder: Decoder, prompts: tuple[Ids, Ids], length: int, temperature: Tensor, seed: int, keep_noise: bool = False
) -> Written:
    tokens, lengths = (torch.from_numpy(part) for part in prompts)
    return write_text(decoder, tokens, length - tokens.shape[1], temperature, seed, keep_noise, lengths)


def _texts(texts: Ids, groups: list[str]) -> TokenStore:
    rows, length = texts.shape
    return TokenStore(texts.reshape(-1).astype(np.uint32), np.arange(rows + 1, dtype=np.int64) * length, groups)
