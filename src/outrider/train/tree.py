"""The static tree of Medusa heads, from what the target took on text it wrote."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import torch

from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written
from outrider.train.students import Student

__all__ = ["static_tree", "token_ranks"]

Ranks = npt.NDArray[np.int64]
_BATCH = 8
_WIDTH = 16  # children a node may have


@torch.no_grad()
def token_ranks(student: Student, target: FrozenTarget, written: Written) -> Ranks:
    """(starts, depths): the rank, at every depth of every draft, of the token the target wrote."""
    found: list[Ranks] = []
    for chunk in torch.split(written.tokens, _BATCH):
        features = target.features(chunk)
        rows, span = len(chunk), features.span(student.reach)
        first, end = written.prompt - 1, min(span, chunk.shape[1] - student.reach - 1)
        ranks = []
        for depth, hidden in enumerate(student.chain(features, student.reach)):
            wanted = hidden.view(rows, span, -1)[:, first:end]
            logits = student.logits(wanted.reshape(-1, wanted.shape[-1]), depth)
            truth = chunk[:, first + depth + 2 : end + depth + 2].reshape(-1, 1)
            ranks.append((logits > logits.gather(1, truth)).sum(-1))
        found.append(torch.stack(ranks, dim=-1).cpu().numpy())
    return np.concatenate(found)


def static_tree(ranks: Ranks, nodes: int) -> tuple[tuple[int, ...], ...]:
    """The `nodes` paths of ranks that were right most often, best first.

    A path is right at most as often as its parent, and of equals the shallower comes first, so every
    prefix of the result is a tree.
    """
    everyone = np.ones(len(ranks), dtype=bool)
    frontier: list[tuple[int, int, tuple[int, ...]]] = []
    members: dict[tuple[int, ...], npt.NDArray[np.bool_]] = {(): everyone}

    def open_below(path: tuple[int, ...]) -> None:
        if len(path) == ranks.shape[1]:
            return
        for rank in range(_WIDTH):
            child = (*path, rank)
            members[child] = members[path] & (ranks[:, len(path)] == rank)
            heapq.heappush(frontier, (-int(members[child].sum()), len(child), child))

    open_below(())
    chosen: list[tuple[int, ...]] = []
    while frontier and len(chosen) < nodes:
        path = heapq.heappop(frontier)[2]
        chosen.append(path)
        open_below(path)
    return tuple(chosen)
