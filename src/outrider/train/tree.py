"""The static tree of Medusa heads: the paths of ranks that were right most often on text the target wrote."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.acceptance import loops
from outrider.train.acceptance import drafted_logits
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written
from outrider.train.networks import TrainableDrafter, TrainableMedusa

__all__ = ["Ranks", "accepted_depths", "expected", "fit_tree", "static_tree", "steady_ranks", "token_ranks"]

Ranks = npt.NDArray[np.int64]
Paths = tuple[tuple[int, ...], ...]
_BATCH = 8
_WIDTH = 16  # children a node may have
_NODES = 64  # of a tree that is fitted


def fit_tree(network: TrainableMedusa, target: FrozenTarget, texts: Mapping[float, Written]) -> float:
    """Give Medusa heads the tree that suits texts the target wrote, by temperature; tokens per round expected of it there."""
    target = target.reading(network.taps)
    ranks = [steady_ranks(network, target, written, temperature) for temperature, written in texts.items()]
    joined = np.concatenate([part.reshape(-1, part.shape[-1]) for part in ranks])
    choices = static_tree(joined, _NODES)
    network.module.config = replace(network.module.config, choices=choices)
    return expected(joined, choices)


def steady_ranks(network: TrainableMedusa, target: FrozenTarget, written: Written, temperature: float) -> Ranks:
    """Ranks on the texts that neither loop nor end early, or on all where none is left."""
    eos, texts = target.config.eos_ids[0], written.tokens[:, written.prompt :].tolist()
    kept = [i for i, text in enumerate(texts) if eos not in text and not loops(text)] or list(range(len(texts)))
    noise = None if written.noise is None else written.noise[kept]
    return token_ranks(network, target, Written(written.tokens[kept], written.prompt, noise), temperature)


@torch.no_grad()
def token_ranks(network: TrainableDrafter, target: FrozenTarget, written: Written, temperature: float = 0.0) -> Ranks:
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
    return 1.0 + float(accepted_depths(ranks.reshape(-1, ranks.shape[-1]), choices).mean())


def accepted_depths(ranks: Ranks, choices: Paths) -> npt.NDArray[np.int64]:
    """(starts,) how deep a tree follows each row of (starts, depths)."""
    accepted = np.zeros(len(ranks), dtype=np.int64)
    for path in choices:
        accepted[np.all(ranks[:, : len(path)] == path, axis=1)] += 1  # one node per depth at most
    return accepted
