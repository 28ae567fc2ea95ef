"""The fixed sizes of trees that grow on a GPU. What is here needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAX_BRANCH", "MAX_CHILDREN", "MAX_KEPT", "MAX_LEVELS", "TreeSizes"]

MAX_LEVELS = 16
MAX_BRANCH = 32
MAX_CHILDREN = 256  # that a level adds to a tree
MAX_KEPT = 256  # nodes of a finished tree


class TreeSizes(NamedTuple):
    """At each of `levels` the `beam` best nodes of a sequence get `branch` children each."""

    batch: int
    levels: int
    beam: int
    branch: int

    @property
    def nodes(self) -> int:
        """Numbers of a sequence's nodes."""
        return self.branch + (self.levels - 1) * self.beam * self.branch

    @property
    def kept(self) -> int:
        """Nodes of a finished tree, at most."""
        return min(self.nodes, MAX_KEPT)
