"""Log probabilities of the raw logits, as reported to users."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Logprob", "logprobs_of"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability under the raw logits, and its rank (1 = most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def logprobs_of(logits: Tensor, token: int, top: int) -> dict[int, Logprob]:
    """The chosen token and the `top` most probable ones, most probable first. logits (V,) float32."""
    logs = torch.log_softmax(logits, -1)
    out: dict[int, Logprob] = {}
    if top:
        # ranked by logit, because rounding can make log probabilities equal; ties go to the lower id, as everywhere
        threshold = torch.topk(logits, min(top, logits.numel())).values[-1]
        ids = torch.nonzero(logits >= threshold).flatten()
        order = torch.sort(logits[ids], descending=True, stable=True).indices[:top]
        for rank, i in enumerate(ids[order].tolist(), 1):
            out[i] = Logprob(float(logs[i]), rank)
    if token not in out:
        logit = logits[token]
        rank = int((logits > logit).sum()) + int((logits[:token] == logit).sum()) + 1
        out[token] = Logprob(float(logs[token]), rank)
    return out
