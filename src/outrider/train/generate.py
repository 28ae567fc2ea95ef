"""Text written by the target, many sequences at once. Drafters are trained and measured on it.

Every sequence of a batch has the same length, so one slab of keys and values per layer is enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.model import Decoder
from outrider.ops import Plain
from outrider.train.attention import causal_attend
from outrider.train.data import TokenStore

__all__ = ["Writing", "Written", "document_starts", "merged", "random_windows", "write_text", "write_until"]

_OPS = Plain()
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Written:
    """Prompts and what the target wrote after them."""

    tokens: Tensor  # (B, prompt + count)
    prompt: int
    noise: Tensor | None  # (B, count, V): the draw's noise, where it was kept; token prompt + i used row i

    def batches(self, rows: int) -> Iterator[Written]:
        """At most `rows` texts at a time."""
        for begin in range(0, len(self.tokens), rows):
            part = slice(begin, begin + rows)
            yield Written(self.tokens[part], self.prompt, None if self.noise is None else self.noise[part])


@torch.no_grad()
def write_text(
    decoder: Decoder,
    prompts: Tensor,
    count: int,
    temperatures: Tensor,
    seed: int,
    keep_noise: bool = False,
    lengths: Tensor | None = None,
) -> Written:
    """Continue (B, P) prompts by `count` tokens: Gumbel-max at each sequence's temperature, 0 greedy.

    With `lengths` (B,) prompt i has lengths[i] tokens, and the target continues it up to P as well.
    """
    device, (rows, prompt) = decoder.norm.device, prompts.shape
    tokens = torch.cat((prompts.to(device), torch.zeros(rows, count, dtype=torch.int64, device=device)), dim=1)
    slabs = _Slabs(decoder, rows, prompt + count)
    generator = torch.Generator(device).manual_seed(seed)
    temperature = temperatures.to(device)[:, None]
    sizes = torch.full((rows,), prompt, device=device) if lengths is None else lengths.to(device)
    first = int(sizes.min())
    kept: list[Tensor] = []
    last = slabs.read(tokens[:, :first])
    for place in range(first, prompt + count):
        logits = decoder.logits(last, _OPS)
        noise = _gumbel(logits.shape, generator)
        if keep_noise and place >= prompt:
            kept.append(noise)
        tokens[:, place] = torch.where(sizes > place, tokens[:, place], (logits + temperature * noise).argmax(-1))
        if place + 1 < prompt + count:
            last = slabs.step(tokens[:, place], place)
    return Written(tokens, prompt, torch.stack(kept, dim=1) if kept else None)


@dataclass(frozen=True, slots=True)
class Writing:
    """How much text the target writes, and after which prompts."""

    seconds: float = 0.0  # write for at least this long
    tokens: int = 0  # and at least this many tokens
    rows: int = 2048
    length: int = 512  # prompt and continuation; long greedy texts of small models loop
    prompts: tuple[int, ...] = (32, 96, 192)
    temperatures: tuple[float, ...] = (0.0, 0.4, 0.8, 0.8, 1.0)
    seed: int = 0


def write_until(decoder: Decoder, store: TokenStore, writing: Writing) -> TokenStore:
    """Batches of text until there is enough, as documents of a store in memory."""
    begin, turn, size = time.monotonic(), 0, 0
    documents: list[Ids] = []
    eos = decoder.spec.eos_ids[0]
    while not documents or time.monotonic() - begin < writing.seconds or size < writing.tokens:
        prompt = writing.prompts[turn % len(writing.prompts)]
        half = writing.rows // 2
        starts = document_starts(store, half, prompt, writing.seed + turn)
        prompts = np.concatenate((starts, random_windows(store, writing.rows - half, prompt, writing.seed + turn)))
        temperature = torch.tensor(writing.temperatures).repeat(-(-len(prompts) // len(writing.temperatures)))[: len(prompts)]
        written = write_text(decoder, torch.from_numpy(prompts), writing.length - prompt, temperature, writing.seed + turn)
        documents += [np.append(row[: _end(row, eos, prompt)], eos) for row in written.tokens.cpu().numpy()]
        size = sum(map(len, documents))
        turn += 1
    lengths = [len(document) for document in documents]
    return TokenStore(np.concatenate(documents), np.cumsum([0, *lengths]), ["written"] * len(documents))


def merged(store: TokenStore, other: TokenStore, share: float) -> TokenStore:
    """One store in memory of which `other`, repeated as often as needed, is about `share`."""
    times = max(round(share / (1 - share) * store.tokens / max(other.tokens, 1)), 1)
    ids = np.concatenate([store.ids, *[other.ids.astype(store.ids.dtype)] * times])
    lengths = np.concatenate([np.diff(store.starts), *[np.diff(other.starts)] * times])
    return TokenStore(ids, np.concatenate(([0], np.cumsum(lengths))), [*store.groups, *other.groups * times])


def document_starts(store: TokenStore, count: int, length: int, seed: int) -> Ids:
    """(count, length) first tokens of documents, drawn with replacement from those long enough."""
    long = np.flatnonzero(np.diff(store.starts) > length)
    if not len(long):
        return random_windows(store, count, length, seed)
    chosen = _generator(seed, 0).choice(long, count)
    return _windows(store, store.starts[chosen].tolist(), length)


def random_windows(store: TokenStore, count: int, length: int, seed: int) -> Ids:
    """(count, length) tokens from anywhere."""
    return _windows(store, _generator(seed, 1).integers(0, max(store.tokens - length, 1), count).tolist(), length)


class _Slabs:
    """Keys and values of equally long sequences, by layer."""

    def __init__(self, decoder: Decoder, rows: int, length: int) -> None:
        config, device = decoder.spec, decoder.norm.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = (config.depth, rows, config.kv_heads, length, config.head_dim)
        self._decoder = decoder
        self._rows = rows
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    def read(self, tokens: Tensor) -> Tensor:
        """Feed whole (B, P) prompts; the last hidden row of each."""
        length = tokens.shape[1]
        causal = causal_attend(self._rows, length)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for slab, x in ((self._keys, k), (self._values, v)):
                slab[layer, :, :, :length] = x.view(self._rows, length, *x.shape[1:]).transpose(1, 2)
            return causal(layer, q, k, v)

        positions = torch.arange(length, device=tokens.device).repeat(self._rows)
        hidden = self._decoder(tokens.reshape(-1), positions, attend, _OPS)
        last: Tensor = hidden.last.view(self._rows, length, -1)[:, -1]
        return last

    def step(self, tokens: Tensor, place: int) -> Tensor:
        """Feed one token per sequence, at `place`; its last hidden row."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[:, :, place], values[:, :, place] = k.to(keys.dtype), v.to(values.dtype)
            # queries of one KV head as rows of one small product; every key is in the past
            grouped = q.to(keys.dtype).view(self._rows, keys.shape[1], -1, q.shape[-1])
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():  # cuDNN would plan for every length
                mixed = F.scaled_dot_product_attention(grouped, keys[:, :, : place + 1], values[:, :, : place + 1])
            return mixed.reshape(q.shape).to(q.dtype)

        hidden = self._decoder(tokens, torch.full_like(tokens, place), attend, _OPS)
        last: Tensor = hidden.last
        return last


def _gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator, device=generator.device).clamp(1e-7, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


def _end(row: Ids, eos: int, prompt: int) -> int:
    """Where the written document ends: before its first end token after the prompt."""
    ends = np.flatnonzero(row[prompt:] == eos)
    return prompt + int(ends[0]) if len(ends) else len(row)


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, stream]))


def _windows(store: TokenStore, starts: Sequence[int], length: int) -> Ids:
    return np.stack([np.asarray(store.ids[start : start + length], dtype=np.int64) for start in starts])
