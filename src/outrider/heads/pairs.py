"""What a block drafter knows of neighbouring guesses: scores of pairs of tokens, and how likely a guess is accepted.

A block's rows are computed at once, so a row does not know which token stands before it. The score of token b after token a
is added to b's logit: <left[a], right[b]>, of DSpark's Markov head; in DFlash 2's selector left[a] is first multiplied by a
projection of the row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.ops import Ops

__all__ = ["Confidence", "PairScores"]


class PairScores(nn.Module):
    """Low-rank scores of pairs of tokens. With a width of rows, `projection` makes them depend on the row."""

    def __init__(self, vocab: int, outputs: int, rank: int, hidden: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(vocab, rank, dtype=dtype))  # of the token before
        self.right = nn.Parameter(torch.empty(outputs, rank, dtype=dtype))
        self.projection = None if hidden is None else nn.Parameter(torch.empty(rank, hidden, dtype=dtype))

    def before(self, tokens: Tensor, rows: Tensor, ops: Ops) -> Tensor:
        """(..., rank) of the tokens before the rows (..., hidden); tokens may have one more dimension, of candidates."""
        left = F.embedding(tokens, self.left).float()
        if self.projection is None:
            return left
        gate = ops.linear(rows.reshape(-1, rows.shape[-1]), self.projection).float().view(*rows.shape[:-1], -1)
        return left * (gate.unsqueeze(-2) if tokens.dim() == rows.dim() else gate)

    def of_all(self, before: Tensor, ops: Ops) -> Tensor:
        """(N, outputs) of every token after `before` (N, rank)."""
        return ops.linear(before, self.right).float()

    def of_candidates(self, before: Tensor, candidates: Tensor) -> Tensor:
        """(..., A, C) of candidates (..., C), numbers of outputs, after each of `before` (..., A, rank)."""
        return before @ F.embedding(candidates, self.right).float().transpose(-1, -2)


class Confidence(nn.Module):
    """How likely the guess of a row is accepted, where those before it were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        """(...,) of rows (..., width)."""
        return torch.sigmoid(F.linear(rows.float(), self.weight.float(), self.bias.float())[..., 0])
