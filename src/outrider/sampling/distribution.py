"""The one definition of the target's distribution: raw logits in, processed logits out. And the raw log probabilities.

The order is vLLM's: the grammar, allowed ids, bad words, min_tokens, logit bias, penalties; then temperature, min_p,
top_k, top_p. Removed tokens are -inf. Ties are broken by logit, descending, then by id, ascending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import Sequence as Generation
from outrider.core import paths
from outrider.sampling.params import SamplingParams

__all__ = ["Logprob", "Row", "adjust", "logprobs_of", "probs_of", "process", "rows_of", "truncate"]

NEG_INF = float("-inf")
_SHORTLIST = 256


class Row(NamedTuple):
    """One position whose next token is to be chosen."""

    params: SamplingParams
    seed: int
    sample: int
    position: int  # absolute, over prompt and output
    prompt_len: int
    history: Sequence[int]  # prompt, output and draft path before the position; empty when unused
    stop_ids: frozenset[int]
    allowed: Tensor | None = None  # (V,) bool: what the grammar lets follow

    @classmethod
    def at(cls, seq: Generation, path: Sequence[int] = ()) -> Row:
        """The position after a sequence's tokens and a path of drafted ones."""
        request = seq.request
        history = [*seq.tokens, *path] if request.params.uses_history else ()
        position = len(seq.tokens) + len(path)
        allowed = None
        if seq.guide is not None:
            allowed = seq.guide.allowed(seq.tokens, seq.prompt_len, path)
            if allowed is None:  # an unknown mask allows nothing
                allowed = seq.guide.nothing
        return cls(request.params, request.seed, request.index, position, seq.prompt_len, history, request.stop_ids, allowed)


def rows_of(seq: Generation, nodes: Sequence[int], parents: Sequence[int]) -> list[Row]:
    """The position after the root, and then the one after every node of a draft tree."""
    if not nodes:
        return [Row.at(seq)]
    return [Row.at(seq, path) for path in paths(nodes, parents)]


def probs_of(logits: Tensor, row: Row) -> Tensor:
    """Probabilities of the next token, (V,) float64. A point mass at temperature 0; NaN where no token can be chosen."""
    out = process(logits, row)
    if row.params.greedy:
        best = out.argmax()
        point = torch.nn.functional.one_hot(best, out.numel()).double()
        return point if out[best].isfinite() else torch.full_like(point, float("nan"))
    return torch.softmax(out.double(), -1)


def process(logits: Tensor, row: Row) -> Tensor:
    """Processed logits of one row. The token is drawn from the softmax of the result.

    At temperature 0 the result is the adjusted logits, and the choice is their argmax.
    """
    out = adjust(logits, row) if row.params.adjusts else logits
    if row.params.greedy:
        return out
    out = out / row.params.temperature
    return truncate(out, row.params) if row.params.truncates else out


def adjust(logits: Tensor, row: Row) -> Tensor:
    """Apply everything that can move the argmax. (V,) float32 in and out."""
    params = row.params
    out = logits.clone() if row.allowed is None else torch.where(row.allowed.to(logits.device), logits, NEG_INF)
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=out.device)
        kept = torch.full_like(out, NEG_INF)
        kept[allowed] = out[allowed]
        out = kept
    output = list(row.history[row.prompt_len :]) if params.bad_word_ids else []
    for word in params.bad_word_ids:
        head = list(word[:-1])
        if output[len(output) - len(head) :] == head:
            out[word[-1]] = NEG_INF
    if row.position - row.prompt_len < params.min_tokens and not _must_stop(row):
        out[sorted(row.stop_ids)] = NEG_INF
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=out.device)
        out[ids] += torch.tensor(list(params.logit_bias.values()), device=out.device)
    return _penalise(out, row)


def _must_stop(row: Row) -> bool:
    """Whether the grammar allows stop tokens only. Then min_tokens is not enforced."""
    return row.allowed is not None and int(row.allowed.sum()) == int(row.allowed[sorted(row.stop_ids)].sum())


def _penalise(out: Tensor, row: Row) -> Tensor:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.history)), dtype=torch.int64, device=out.device)
        values = out[seen]
        out[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.history[row.prompt_len :])
        if counts:
            ids = torch.tensor(list(counts), device=out.device)
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=out.device)
            out[ids] -= params.frequency_penalty * times
            out[ids] -= params.presence_penalty
    return out


def truncate(scaled: Tensor, params: SamplingParams) -> Tensor:
    """min_p, then top_k, then top_p, on logits already divided by temperature. (V,) in and out."""
    out = scaled
    if params.min_p > 0.0:
        weights = torch.exp(out - out.max())  # p / max p
        out = out.masked_fill(weights < params.min_p, NEG_INF)
    limit = params.top_k if params.top_k > 0 else out.numel()
    if limit >= out.numel() and params.top_p >= 1.0:
        return out
    keep = _kept(out, limit, params.top_p)
    kept = torch.full_like(out, NEG_INF)
    kept[keep] = out[keep]
    return kept


def _kept(logits: Tensor, limit: int, top_p: float) -> Tensor:
    """Ids that top_k and top_p keep: those with less than top_p of the mass before them."""
    size = min(max(_SHORTLIST, limit if limit < logits.numel() else 0), logits.numel())
    while True:
        ids, ranked = _rank(logits, size)
        complete, values = size == logits.numel(), ranked[:limit]
        if top_p >= 1.0:
            return ids[:limit]
        weights = torch.exp(values - ranked[0]).double()
        total_mass = weights.sum() if limit <= ranked.numel() or complete else torch.exp(logits - ranked[0]).double().sum()
        mass_before = weights.cumsum(0) - weights
        inside = int((mass_before < top_p * total_mass).sum())
        if inside < values.numel() or complete or limit <= values.numel():
            return ids[: max(inside, 1)]
        size = min(size * 8, logits.numel())


def _rank(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """At least `size` best tokens and their logits, in order: logit descending, then id ascending."""
    if size >= logits.numel():
        ids = torch.arange(logits.numel(), device=logits.device)
    else:
        threshold = torch.topk(logits, size).values[-1]
        ids = torch.nonzero(~(logits < threshold)).flatten()  # ascending; all ties, and NaN so that it is seen
    values, order = torch.sort(logits[ids], descending=True, stable=True)
    return ids[order], values


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability under the raw logits, and its rank (1 = most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def logprobs_of(logits: Tensor, token: int, top: int) -> dict[int, Logprob]:
    """The chosen token and the `top` most probable ones, most probable first. logits (V,) float32.

    Ranks are by logit, because rounding can make log probabilities equal.
    """
    logs = torch.log_softmax(logits, -1)
    best = _rank(logits, top)[0][:top] if top else torch.empty(0, dtype=torch.int64)
    values = zip(best.tolist(), logs[best].tolist(), strict=True)
    out = {i: Logprob(log, rank) for rank, (i, log) in enumerate(values, 1)}
    if token not in out:
        logit = logits[token]
        rank = int((logits > logit).sum()) + int((logits[:token] == logit).sum()) + 1
        out[token] = Logprob(float(logs[token]), rank)
    return out
