"""The static tree of Medusa heads: the paths of ranks that were right most often on text the target wrote."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import torch

from outrider.train.acceptance import drafted_logits
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written
from outrider.train.networks import DraftNetwork

__all__ = ["Ranks", "expected", "static_tree", "token_ranks", "tree_rounds"]

Ranks = npt.NDArray[np.int64]
Paths = tuple[tuple[int, ...], ...]
_BATCH = 8
_WIDTH = 16  # children a node may have


@torch.no_grad()
def token_ranks(network: DraftNetwork, target: FrozenTarget, written: Written, temperature: float = 0.0) -> Ranks:
    """(B, starts, depths): the rank, at every depth of every draft, of the token the target wrote.

    Where the draw's noise was kept, ranks count it, as serving at that temperature does.
    """
    parts: list[Ranks] = []
    for batch in written.batches(_BATCH):
        drafted = drafted_logits(network, target, batch, temperature, network.reach)
        ranks = [(logits > logits.gather(1, tokens.reshape(-1, 1))).sum(-1).view(tokens.shape) for logits, tokens in drafted]
        parts.append(torch.stack(ranks, dim=-1).cpu().numpy())
    return np.concatenate(parts)


def static_tree(ranks: Ranks, nodes: int) -> Paths:
    """The `nodes` paths of ranks that were right most often, best first. ranks (..., depths).

    A path becomes a candidate when its parent is chosen, and is right at most as often as its parent. So every
    prefix of the result is a tree, and no tree of as many nodes was right more often.
    """
    flat = ranks.reshape(-1, ranks.shape[-1])
    frontier: list[tuple[int, int, tuple[int, ...]]] = []
    members: dict[tuple[int, ...], npt.NDArray[np.intp]] = {(): np.arange(len(flat))}

    def open_below(path: tuple[int, ...]) -> None:
        if len(path) == flat.shape[1]:
            return
        rows = members[path]
        for rank in range(_WIDTH):
            child = (*path, rank)
            members[child] = rows[flat[rows, len(path)] == rank]
            heapq.heappush(frontier, (-len(members[child]), len(child), child))

    open_below(())
    chosen: list[tuple[int, ...]] = []
    while frontier and len(chosen) < nodes:
        path = heapq.heappop(frontier)[2]
        chosen.append(path)
        open_below(path)
    return tuple(chosen)


def expected(ranks: Ranks, choices: Paths) -> float:
    """Tokens per round of a tree if every place is equally likely to begin a round."""
    return 1.0 + float(_accepted(ranks.reshape(-1, ranks.shape[-1]), choices).mean())


def tree_rounds(ranks: Ranks, choices: Paths) -> tuple[int, int]:
    """(tokens, rounds) of walking through texts (B, starts, depths) with a tree."""
    tokens = rounds = 0
    for text in ranks:
        accepted = _accepted(text, choices)
        at = 0
        while at < len(accepted):
            tokens += int(accepted[at]) + 1
            rounds += 1
            at += int(accepted[at]) + 1
    return tokens, rounds


def _accepted(ranks: Ranks, choices: Paths) -> npt.NDArray[np.int64]:
    """(starts,) how deep a tree follows each row of (starts, depths)."""
    accepted = np.zeros(len(ranks), dtype=np.int64)
    for path in choices:
        accepted[np.all(ranks[:, : len(path)] == path, axis=1)] += 1  # one node per depth at most
    return accepted
