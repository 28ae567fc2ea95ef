"""The static tree of Medusa heads, from what the target took on text it wrote."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written
from outrider.train.students import Student

__all__ = ["Ranks", "expected", "static_tree", "token_ranks", "tree_rounds"]

Ranks = npt.NDArray[np.int64]
Paths = tuple[tuple[int, ...], ...]
_BATCH = 8
_WIDTH = 16  # children a node may have


@torch.no_grad()
def token_ranks(student: Student, target: FrozenTarget, written: Written, temperature: float = 0.0) -> Ranks:
    """(B, starts, depths): the rank, at every depth of every draft, of the token the target wrote.

    Where the draw's noise was kept, ranks count it, as serving at that temperature does.
    """
    found: list[Ranks] = []
    for begin in range(0, len(written.tokens), _BATCH):
        chunk = written.tokens[begin : begin + _BATCH]
        noise = None if written.noise is None else written.noise[begin : begin + _BATCH]
        found.append(_ranks(student, target, Written(chunk, written.prompt, noise), temperature))
    return np.concatenate(found)


def _ranks(student: Student, target: FrozenTarget, written: Written, temperature: float) -> Ranks:
    features, text = target.features(written.tokens), written.tokens
    rows, span = len(text), features.span(student.reach)
    first, end = written.prompt - 1, min(span, text.shape[1] - student.reach - 1)
    ranks: list[Tensor] = []
    with torch.autocast("cuda", torch.bfloat16, enabled=text.is_cuda):
        chain = student.chain(features, student.reach)
    for depth, hidden in enumerate(chain):
        wanted = hidden.view(rows, span, -1)[:, first:end]
        logits = student.logits(wanted.reshape(-1, wanted.shape[-1]), depth)
        if written.noise is not None:
            begin = first + depth + 2 - written.prompt
            logits = logits / temperature + written.noise[:, begin : begin + end - first].reshape(len(logits), -1)
        truth = text[:, first + depth + 2 : end + depth + 2].reshape(-1, 1)
        ranks.append((logits > logits.gather(1, truth)).sum(-1).view(rows, -1))
    return torch.stack(ranks, dim=-1).cpu().numpy()


def static_tree(ranks: Ranks, nodes: int) -> Paths:
    """The `nodes` paths of ranks that were right most often, best first. ranks (..., depths).

    A path is looked at once its parent is chosen, and is right at most as often: every prefix of the
    result is a tree, and no tree of as many nodes was right more often.
    """
    flat = ranks.reshape(-1, ranks.shape[-1])
    frontier: list[tuple[int, int, tuple[int, ...]]] = []
    members: dict[tuple[int, ...], npt.NDArray[np.intp]] = {(): np.arange(len(flat))}

    def open_below(path: tuple[int, ...]) -> None:
        if len(path) == flat.shape[1]:
            return
        own = members[path]
        for rank in range(_WIDTH):
            child = (*path, rank)
            members[child] = own[flat[own, len(path)] == rank]
            heapq.heappush(frontier, (-len(members[child]), len(child), child))

    open_below(())
    chosen: list[tuple[int, ...]] = []
    while frontier and len(chosen) < nodes:
        path = heapq.heappop(frontier)[2]
        chosen.append(path)
        open_below(path)
    return tuple(chosen)


def expected(ranks: Ranks, choices: Paths) -> float:
    """Tokens per round of a tree, were every place as likely to begin a round."""
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
