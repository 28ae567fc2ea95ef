"""The target's choice: argmax over tokens of processed logit plus Gumbel noise (the Gumbel-max trick).

The choice is a pure function of a row's logits, parameters, history, seed and position. So plain decoding and
verification emit the same tokens whatever was drafted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.ops import Core, Shape, serving_ops
from outrider.sampling.distribution import Row, adjust, process
from outrider.sampling.noise import Key, bits, gumbel, token_words_at, words_of
from outrider.sampling.params import SamplingParams

__all__ = ["CORRUPTED", "Ranked", "choose", "draw", "noise_along", "rank"]

CORRUPTED = -1  # returned where the logits hold NaN or leave nothing to choose
_Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
_GREEDY: Shape
_AS_IS: Shape
_GREEDY, _AS_IS = (0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)  # shapes of rows whose logits are processed already


def choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The chosen token of every row. `logits` are raw, (N, V) float32 on the CPU, and stay unchanged."""
    return _draw_prepared(_prepared(logits, rows), [Key(row.seed, row.position, row.sample) for row in rows])


def draw(logits: Tensor, keys: Sequence[Key] | None) -> list[int]:
    """Gumbel-max over processed logits (N, V). Without keys there is no noise. Ties go to the lowest id."""
    return _draw_prepared(_Prepared(logits, [_GREEDY if keys is None else _AS_IS] * len(logits)), keys or ())


class Ranked(NamedTuple):
    """The most probable choices of each row, best first, and the probability of each to be the choice."""

    tokens: npt.NDArray[np.int64]  # (N, k); CORRUPTED where the row leaves nothing to choose
    chances: npt.NDArray[np.float64]  # (N, k)


def rank(logits: Tensor, rows: Sequence[Row], count: int, draft_temperatures: Sequence[float] | None = None) -> Ranked:
    """What a drafter should guess: the `count` largest of log q plus the noise of the target.

    The draft temperature of a sampled row divides its log q before the noise is added. The chances are the softmax of
    the noisy scores: the noise is known, so only the distance between q and p is uncertain.
    """
    adjusted, shapes = _prepared(logits, rows)
    if any(row.allowed is not None for row in rows):  # a draft may have no probability for any token the grammar allows
        adjusted = torch.where(adjusted.amax(-1, keepdim=True).isfinite(), adjusted, logits)
    scales = [1.0] * len(rows) if draft_temperatures is None else draft_temperatures
    count = min(count, adjusted.shape[1])
    words = _words([Key(row.seed, row.position, row.sample) for row in rows], shapes)
    core = native_core()
    if core is None or adjusted.dtype != torch.float32:
        divisors = [shape[0] * scale for shape, scale in zip(shapes, scales, strict=True)]
        return _rank_in_numpy(adjusted, np.array(divisors, np.float32), _word_pairs(words), count)
    return Ranked(*core.rank(adjusted, shapes, scales, words, token_words_at(adjusted.shape[1]), count))


@lru_cache(maxsize=1)
def native_core() -> Core | None:
    """The native core, or None where torch serves."""
    return serving_ops().core


class _Prepared(NamedTuple):
    """Logits after penalties, and the shapes (temperature and filters) that are still to be applied."""

    logits: Tensor
    shapes: list[Shape]


def shape_of(params: SamplingParams) -> Shape:
    """The parameters that the core applies itself: temperature (0 is greedy), top_k, top_p, min_p."""
    return _GREEDY if params.greedy else (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)


def _prepared(logits: Tensor, rows: Sequence[Row]) -> _Prepared:
    """Apply what the core does not: penalties, biases and bans; without a core the filters too."""
    shapes = [shape_of(row.params) for row in rows]
    native = native_core() is not None
    special = [i for i, row in enumerate(rows) if row.params.adjusts or (row.params.truncates and not native)]
    if special:
        raw, logits = logits, logits.clone()
        for i in special:
            if native:
                logits[i] = adjust(raw[i], rows[i])
            else:
                logits[i], shapes[i] = process(raw[i], rows[i]), _GREEDY if rows[i].params.greedy else _AS_IS
    return _Prepared(logits, shapes)


def _words(keys: Sequence[Key], shapes: Sequence[Shape]) -> list[int]:
    """The keys' words side by side, or zeros where no row needs noise. Plain Python: after a forward numpy's caches are cold."""
    if not any(shape[0] for shape in shapes):
        return [0] * (2 * len(shapes))
    return [word for key in keys for word in words_of(key)]


def noise_along(rows: Sequence[Row], steps: int) -> array[int]:
    """Words of the noise at each row's position and those after it: (steps, rows, 2), zero where a row needs none."""
    words = array("I", bytes(8 * steps * len(rows)))
    for i, row in enumerate(rows):
        for step in range(0 if row.params.greedy else steps):
            at = 2 * (step * len(rows) + i)
            words[at : at + 2] = array("I", words_of(Key(row.seed, row.position + step, row.sample)))
    return words


def _word_pairs(words: Sequence[int]) -> Words:
    return np.array(words, np.uint32).reshape(-1, 2)


def _draw_prepared(prepared: _Prepared, keys: Sequence[Key]) -> list[int]:
    logits, shapes = prepared
    words, core = _words(keys, shapes), native_core()
    if core is not None and logits.dtype == torch.float32:
        return core.draw(logits, shapes, words, token_words_at(logits.shape[1]))
    return _draw_in_numpy(logits, np.array([shape[0] for shape in shapes], np.float32), _word_pairs(words))


def _draw_in_numpy(logits: Tensor, divisors: _Floats, words: Words) -> list[int]:
    """The numpy reference of the core's `draw`: both give the same tokens."""
    array, noisy = logits.numpy(), divisors > 0
    if (divisors[noisy] != 1.0).any():
        array = array / np.where(noisy, divisors, np.float32(1.0))[:, None]
    best = array.argmax(axis=1)  # numpy promises the first of equals; a NaN counts as largest
    finite = np.isfinite(array[np.arange(len(best)), best])
    drawn = noisy & finite
    if drawn.any():
        best[drawn] = (array[drawn] + gumbel(bits(words[drawn], array.shape[1]))).argmax(axis=1)
    return [int(token) if is_finite else CORRUPTED for token, is_finite in zip(best, finite, strict=True)]


def _rank_in_numpy(logits: Tensor, divisors: _Floats, words: Words, count: int) -> Ranked:
    """The numpy reference of the core's `rank`. exp(logit + g) is exp(logit) / -log1p(-v), v the uniform number behind g."""
    array, noisy = logits.numpy(), divisors > 0
    scaled = array / np.where(noisy, divisors, np.float32(1.0))[:, None]
    with np.errstate(invalid="ignore"):
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    if noisy.any():
        v = np.minimum((bits(words[noisy], array.shape[1]) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))
        weights[noisy] /= -np.log1p(-v)
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    chances = np.take_along_axis(weights, order, 1).astype(np.float64) / weights.sum(axis=1, keepdims=True)
    finite = np.isfinite(array.max(axis=1, keepdims=True))
    return Ranked(np.where(finite, order, CORRUPTED), chances)
