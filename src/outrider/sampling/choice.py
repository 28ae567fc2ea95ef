"""The target's choice: argmax over tokens of processed logit plus Gumbel noise.

It is a pure function of a row's logits, parameters, history, seed and position, so plain
decoding and verification emit the same tokens whatever was drafted.
"""

from __future__ import annotations

import math
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

__all__ = ["CORRUPTED", "Ranked", "choose", "draw", "rank"]

CORRUPTED = -1  # returned where the logits hold NaN or leave nothing to choose
_Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
_GREEDY: Shape
_AS_IS: Shape
_GREEDY, _AS_IS = (0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)  # shapes of rows whose law is ready


def choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The chosen token of every row. logits (N, V) float32 on the CPU, raw; they are not changed."""
    return _drawn(_prepared(logits, rows), [Key(row.seed, row.position, row.sample) for row in rows])


def draw(law: Tensor, keys: Sequence[Key] | None) -> list[int]:
    """Gumbel-max over processed logits (N, V); no keys means no noise. Ties go to the lowest id."""
    return _drawn(_Prepared(law, [_GREEDY if keys is None else _AS_IS] * len(law)), keys or ())


class Ranked(NamedTuple):
    """The likeliest choices of each row, best first, and how likely each is to be the choice."""

    tokens: npt.NDArray[np.int64]  # (N, k); CORRUPTED where the row leaves nothing to choose
    chances: npt.NDArray[np.float64]  # (N, k)


def rank(logits: Tensor, rows: Sequence[Row], count: int, sharpness: Sequence[float] | None = None) -> Ranked:
    """What a drafter should guess: the `count` largest of log q + the target's own noise.

    `sharpness` divides the log q of each row that is sampled before the noise comes in.

    The chances are the softmax of the noisy scores: the noise is known, so what is left in doubt is how
    far q is from the target's law.
    """
    law, shapes = _prepared(logits, rows)
    if any(row.allowed is not None for row in rows):  # a draft may know none of the tokens a grammar asks for
        law = torch.where(law.amax(-1, keepdim=True).isfinite(), law, logits)
    sharp = [1.0] * len(rows) if sharpness is None else sharpness
    count = min(count, law.shape[1])
    words = _words([Key(row.seed, row.position, row.sample) for row in rows], shapes)
    core = choosing_core()
    if core is None or law.dtype != torch.float32:
        divisors = [shape[0] * own for shape, own in zip(shapes, sharp, strict=True)]
        return _rank_slowly(law, np.array(divisors, np.float32), _pairs(words), count)
    return Ranked(*core.rank(law, shapes, sharp, words, token_words_at(law.shape[1]), count))


@lru_cache(maxsize=1)
def choosing_core() -> Core | None:
    """The native core, where it serves."""
    return serving_ops().core


class _Prepared(NamedTuple):
    """What is left to do: divide by the temperature, filter, add noise."""

    logits: Tensor
    shapes: list[Shape]


def shape_of(params: SamplingParams) -> Shape:
    """What the core applies itself: temperature (0: greedy), top_k, top_p, min_p."""
    return _GREEDY if params.greedy else (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)


def _prepared(logits: Tensor, rows: Sequence[Row]) -> _Prepared:
    """Logits with what the core does not do: penalties and the like; without a core all but a temperature alone."""
    shapes = [shape_of(row.params) for row in rows]
    native = choosing_core() is not None
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
    """The keys' words side by side; where no row needs noise, none are computed. No numpy: after a forward it is cold."""
    if not any(shape[0] for shape in shapes):
        return [0] * (2 * len(shapes))
    return [word for key in keys for word in words_of(key)]


def _pairs(words: Sequence[int]) -> Words:
    return np.array(words, np.uint32).reshape(-1, 2)


def _drawn(prepared: _Prepared, keys: Sequence[Key]) -> list[int]:
    logits, shapes = prepared
    words, core = _words(keys, shapes), choosing_core()
    if core is not None and logits.dtype == torch.float32:
        return core.draw(logits, shapes, words, token_words_at(logits.shape[1]))
    return _draw_slowly(logits, np.array([shape[0] for shape in shapes], np.float32), _pairs(words))


def _draw_slowly(logits: Tensor, divisors: _Floats, words: Words) -> list[int]:
    """Without the native core; the core gives the same tokens."""
    array, noisy = logits.numpy(), divisors > 0
    if (divisors[noisy] != 1.0).any():
        array = array / np.where(noisy, divisors, np.float32(1.0))[:, None]
    best = array.argmax(axis=1)  # numpy promises the first of equals; a NaN counts as largest
    top = array[np.arange(len(best)), best]
    sound = np.isfinite(top)
    drawn = noisy & sound
    if drawn.any():
        best[drawn] = _noisy_argmax(array[drawn], best[drawn], top[drawn], words[drawn])
    return [int(token) if good else CORRUPTED for token, good in zip(best, sound, strict=True)]


def _rank_slowly(logits: Tensor, divisors: _Floats, words: Words, count: int) -> Ranked:
    """Without the native core. exp(law + g) is exp(law) / -log1p(-v), v the uniform number behind the noise g."""
    array, noisy = logits.numpy(), divisors > 0
    scaled = array / np.where(noisy, divisors, np.float32(1.0))[:, None]
    with np.errstate(invalid="ignore"):
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    if noisy.any():
        v = np.minimum((bits(words[noisy], array.shape[1]) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))
        weights[noisy] /= -np.log1p(-v)
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    chances = np.take_along_axis(weights, order, 1).astype(np.float64) / weights.sum(axis=1, keepdims=True)
    sound = np.isfinite(array.max(axis=1, keepdims=True))
    return Ranked(np.where(sound, order, CORRUPTED), chances)


_LOG_2_32_AND_MARGIN = math.log(2.0**32 * 1.001)


def _noisy_argmax(law: _Floats, best: npt.NDArray[np.int64], top: _Floats, keys: Words) -> npt.NDArray[np.int64]:
    """argmax of law + noise, evaluating the noise only where it can matter.

    The most probable token scores top + g(best). Another token i beats that only if
    g_i > top - law_i + g(best), and g_i > x implies v_i < exp(-x). That needs one comparison
    with the raw bits and leaves a handful of tokens per row, whose scores are then exact.
    """
    words = bits(keys, law.shape[1])
    index = np.arange(len(best))
    floor = gumbel(words[index, best])
    # bits < 2^32 exp(law - top - floor), with a margin for the rounding of exp, of the float32 bits and of the shift
    shift = top + floor - _LOG_2_32_AND_MARGIN
    shift = (shift - np.abs(shift) * 2.0**-22).astype(np.float32)
    bound = law - shift[:, None]
    with np.errstate(over="ignore"):
        np.exp(bound, out=bound)
    row, token = np.divmod(np.flatnonzero(words.astype(np.float32) <= bound), law.shape[1])
    score = law[row, token].astype(np.float64) + gumbel(words[row, token])
    order = np.lexsort((token, -score, row))
    first = np.searchsorted(row[order], index)
    return token[order][first]
