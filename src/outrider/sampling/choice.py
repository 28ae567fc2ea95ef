"""The target's choice: argmax over tokens of processed logit plus Gumbel noise.

It is a pure function of a row's logits, parameters, history, seed and position, so plain
decoding and verification emit the same tokens whatever was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.sampling.distribution import Row, process
from outrider.sampling.noise import Key, bits, bits_at, gumbel, keys_of

__all__ = ["CORRUPTED", "Ranked", "choose", "draw", "rank"]

_CONSIDERED = 128  # tokens a drafter's ranking looks at
CORRUPTED = -1  # returned where the logits hold NaN or leave nothing to choose


def choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The chosen token of every row. logits (N, V) float32 on the CPU, raw; they are not changed."""
    out = [CORRUPTED] * len(rows)
    greedy = [i for i, row in enumerate(rows) if row.params.greedy]
    sampled = [i for i, row in enumerate(rows) if not row.params.greedy]
    for group, with_noise in ((greedy, False), (sampled, True)):
        if not group:
            continue
        law = _processed(logits, rows, group)
        keys = [Key(rows[i].seed, rows[i].position, rows[i].sample) for i in group] if with_noise else None
        for i, token in zip(group, draw(law, keys), strict=True):
            out[i] = token
    return out


def draw(law: Tensor, keys: Sequence[Key] | None) -> list[int]:
    """Gumbel-max over processed logits (N, V); no keys means no noise. Ties go to the lowest id."""
    array = law.numpy()
    best = array.argmax(axis=1)  # numpy promises the first of equals; a NaN counts as largest
    top = array[np.arange(len(best)), best]
    sound = np.isfinite(top)
    if keys is not None and sound.all():
        best = _noisy_argmax(array, best, top, keys)
    elif keys is not None:
        kept = [key for key, good in zip(keys, sound, strict=True) if good]
        best[sound] = _noisy_argmax(array[sound], best[sound], top[sound], kept)
    return [int(token) if good else CORRUPTED for token, good in zip(best, sound, strict=True)]


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest choices of each row, best first, and how likely each is to be the choice."""

    tokens: npt.NDArray[np.int64]  # (N, k)
    chances: npt.NDArray[np.float64]  # (N, k)
    ids: npt.NDArray[np.int64]  # (N, m) the tokens looked at, most probable first
    logq: npt.NDArray[np.float64]  # (N, m) their log probabilities before sharpening


def rank(logits: Tensor, rows: Sequence[Row], count: int, temperatures: Sequence[float] | None = None) -> Ranked:
    """What a drafter should guess: the `count` largest of log q + the target's own noise.

    `temperatures` sharpen (or flatten) the q of each row that is sampled before the noise comes in.

    Looked at are the most probable tokens of each row and the one that wins among all: the others are
    rarely the choice. The chances are the softmax of the noisy scores: the noise is known, so what is
    left in doubt is how far q is from the target's law.
    """
    law = _processed(logits, rows, list(range(len(rows)))) if _alike(rows) else _one_by_one(logits, rows)
    if any(row.allowed is not None for row in rows):  # a draft may know none of the tokens a grammar asks for
        law = torch.where(law.amax(-1, keepdim=True).isfinite(), law, logits)
    law = torch.log_softmax(law, -1)
    noisy = [i for i, row in enumerate(rows) if not row.params.greedy]
    kept, ids = torch.topk(law, min(max(_CONSIDERED if noisy else 1, count), law.shape[1]), dim=-1)
    tokens, logq = ids.numpy(), kept.double().numpy()
    if not noisy:  # the most probable is the choice, if q is the target's law
        return Ranked(tokens[:, :count], np.exp(logq[:, :count]), tokens, logq)
    divisors = np.array([1.0 if temperatures is None else temperatures[i] for i in noisy])
    candidates, scores = _with_noise(law, (tokens, logq.copy()), noisy, divisors, rows)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances = weights / weights.sum(axis=1, keepdims=True)
    return Ranked(np.take_along_axis(candidates, order, 1), np.take_along_axis(chances, order, 1), tokens, logq)


_Scored = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


def _with_noise(law: Tensor, best: _Scored, noisy: list[int], divisors: npt.NDArray[np.float64], rows: Sequence[Row]) -> _Scored:
    """Candidates and scores with noise in the noisy rows, and one column more: the winner among all tokens.

    A winner that is a candidate already scores -inf there.
    """
    keys = [Key(rows[i].seed, rows[i].position, rows[i].sample) for i in noisy]
    words, vocab = keys_of(keys), law.shape[1]
    own = law if len(noisy) == len(rows) else law[noisy]
    sharp = own if (divisors == 1.0).all() else own / torch.from_numpy(divisors).float()[:, None]
    winners = np.array(draw(sharp, keys))[:, None].clip(0)
    tokens = np.concatenate((best[0], best[0][:, :1]), 1)
    scores = np.concatenate((best[1], np.full((len(rows), 1), -np.inf)), 1)
    fresh = ~(best[0][noisy] == winners).any(1)
    tokens[noisy, -1] = winners[:, 0]
    scores[noisy, -1] = np.where(fresh, np.take_along_axis(own.numpy(), winners, 1)[:, 0], -np.inf)
    scores[noisy] = scores[noisy] / divisors[:, None] + gumbel(bits_at(words, tokens[noisy], vocab))
    return tokens, scores


def _alike(rows: Sequence[Row]) -> bool:
    return all(row.params.greedy == rows[0].params.greedy for row in rows)


def _one_by_one(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    return torch.stack([process(own, row) for own, row in zip(logits, rows, strict=True)])


def _processed(logits: Tensor, rows: Sequence[Row], group: list[int]) -> Tensor:
    """Rows of the group, processed; rows of equal plain parameters are handled in one sweep."""
    picked = logits if len(group) == len(rows) else logits[group]
    special = [j for j, i in enumerate(group) if rows[i].params.adjusts or rows[i].params.truncates]
    if not special and rows[group[0]].params.greedy:
        return picked
    if rows[group[0]].params.greedy:
        out = picked.clone()
    else:
        temperature = torch.tensor([rows[i].params.temperature for i in group])
        out = picked / temperature[:, None]
    for j in special:
        out[j] = process(picked[j], rows[group[j]])
    return out


_Floats = npt.NDArray[np.float32]
_LOG_2_32_AND_MARGIN = math.log(2.0**32 * 1.001)


def _noisy_argmax(law: _Floats, best: npt.NDArray[np.int64], top: _Floats, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
    """argmax of law + noise, evaluating the noise only where it can matter.

    The most probable token scores top + g(best). Another token i beats that only if
    g_i > top - law_i + g(best), and g_i > x implies v_i < exp(-x). That needs one comparison
    with the raw bits and leaves a handful of tokens per row, whose scores are then exact.
    """
    words = bits(keys_of(keys), law.shape[1])
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
