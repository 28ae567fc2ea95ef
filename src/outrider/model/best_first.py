"""The best nodes of a draft tree by the chance of their paths, found some at a time. No torch.

A child is never likelier than its parent, so a node that is not among the best so far will never be, nor will what hangs from
it. Each step expands the likeliest nodes that have no children yet, at whatever depth they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROOT_NODE", "BestFirst"]

ROOT_NODE = -1
Ints = NDArray[np.int64]


class BestFirst:
    """One sequence's tree while it grows. `frontier` are the nodes whose children are wanted next, at first the root."""

    def __init__(self, room: int, levels: int, beam: int) -> None:
        """It keeps `room` nodes and expands as many, at most `beam` in a step and none deeper than `levels`."""
        self._room, self._levels, self._beam = room, levels, beam
        self._tokens, self._parents, self._depths = (np.empty(0, np.int64) for _ in range(3))
        self._survival = np.empty(0)
        self._places = np.empty(0, np.int64)  # in which the nodes were expanded, in order; -1: not yet
        self._paths = np.zeros((room, levels), np.int64)  # by place: the places from the root's child down to the node itself
        self._expanded = 0
        self.frontier: Ints = np.array([ROOT_NODE])

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Ints:
        """Of the frontier's nodes."""
        return self._tokens[self.frontier]

    @property
    def depths(self) -> Ints:
        """Of the frontier's nodes; the root's children have depth 1."""
        return self._depths[self.frontier]

    @property
    def paths(self) -> Ints:
        """Of the frontier's nodes: as many places as they are deep, then anything."""
        return self._paths[self._places[self.frontier]]

    def add(self, tokens: NDArray[Any], chances: NDArray[Any]) -> None:
        """The children (frontier, branch) of the frontier's nodes with their chances; those that cannot be kept are left out."""
        is_root, branch = self.frontier[0] == ROOT_NODE, tokens.shape[1]
        above = np.ones(1) if is_root else self._survival[self.frontier]
        survival = (above[:, None] * chances.astype(np.float64)).ravel()
        order = np.argsort(-survival, kind="stable")[: self._room]
        order = order[survival[order] > 0.0]
        parents = self.frontier[order // branch]
        self._tokens = np.concatenate((self._tokens, tokens.ravel()[order]))
        self._parents = np.concatenate((self._parents, parents))
        depths = np.ones(len(order), np.int64) if is_root else self._depths[parents] + 1
        self._depths = np.concatenate((self._depths, depths))
        self._survival = np.concatenate((self._survival, survival[order]))
        self._places = np.concatenate((self._places, np.full(len(order), -1)))
        self._expand()

    def _expand(self) -> None:
        """The likeliest nodes without children become the frontier, as far as there is room for them."""
        best = self._best()
        able = best[(self._places[best] < 0) & (self._depths[best] < self._levels)]
        self.frontier = able[: min(self._beam, self._room - self._expanded)]
        count = len(self.frontier)
        places = np.arange(self._expanded, self._expanded + count)
        self._places[self.frontier] = places
        parents, depths = self._parents[self.frontier], self._depths[self.frontier]
        inner = parents != ROOT_NODE
        self._paths[places[inner]] = self._paths[self._places[parents[inner]]]
        self._paths[places, depths - 1] = places
        self._expanded += count

    def _best(self) -> Ints:
        """The nodes that would be kept now, the likeliest first."""
        return np.argsort(-self._survival, kind="stable")[: self._room]

    def finish(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and survival of the best nodes, parents before children."""
        kept = np.sort(self._best())
        numbers = np.full(len(self._tokens) + 1, ROOT_NODE)
        numbers[kept] = np.arange(len(kept))
        return self._tokens[kept].tolist(), numbers[self._parents[kept]].tolist(), self._survival[kept].tolist()
