"""Trees over blocks: the likeliest paths through a lattice of candidates, some for each slot of a block.

Slots are guessed at once. Without scores of pairs they are independent, and the best tree of n nodes is that of the n most
probable paths (DDTree, 2604.12989). With such scores the chance of a candidate depends on the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core import Tree
from outrider.draft.lookup import best_first

__all__ = ["Lattice"]


@dataclass(frozen=True, slots=True)
class Lattice:
    """Candidates of a block's slots, and how likely each follows each of the slot before."""

    tokens: npt.NDArray[np.int64]  # (slots, candidates)
    chances: npt.NDArray[np.float64]  # (slots, candidates before, candidates); of the first slot and without pairs all rows agree

    @classmethod
    def independent(cls, tokens: npt.NDArray[np.int64], chances: npt.NDArray[np.float64]) -> Lattice:
        """Slots that know nothing of each other."""
        return cls(tokens, np.broadcast_to(chances[:, None], (*chances.shape, chances.shape[1])))

    def joined(self, scores: npt.NDArray[np.float64]) -> Lattice:
        """With scores (slots, candidates before, candidates) added to the logarithms; a slot's candidates keep their sum."""
        weights = self.chances * np.exp(scores - scores.max(-1, keepdims=True))
        total = np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
        return Lattice(self.tokens, weights * (self.chances.sum(-1, keepdims=True) / total))

    def trusted(self, confidence: npt.NDArray[np.float64]) -> Lattice:
        """With the best chance after each candidate (slots, candidates before) set to a confidence, the others in proportion."""
        top = np.maximum(self.chances.max(-1), np.finfo(np.float64).tiny)
        return Lattice(self.tokens, self.chances * np.minimum(confidence / top, 1.0 / self.chances.sum(-1))[..., None])

    def tree(self, nodes: int) -> Tree:
        """The best tree of at most that many nodes."""
        order = np.argsort(-self.chances, axis=-1, kind="stable")
        sorted_chances = np.take_along_axis(self.chances, order, -1).tolist()
        tokens, ranked, slots = self.tokens.tolist(), order.tolist(), len(self.tokens)

        def below(state: tuple[int, int], survival: float, _room: int) -> Iterable[tuple[float, int, tuple[int, int]]]:
            slot, before = state
            if slot < slots:
                for candidate, chance in zip(ranked[slot][before], sorted_chances[slot][before], strict=True):
                    if chance > 0.0 and tokens[slot][candidate] >= 0:
                        yield survival * chance, tokens[slot][candidate], (slot + 1, candidate)

        return best_first(nodes, (0, 0), below)
