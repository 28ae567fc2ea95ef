"""How often guesses of each kind came true. Numbers alone: nothing of any text is kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq

from outrider.core import ROOT

__all__ = ["Calibration", "verified_nodes"]


class Calibration:
    """Measured chances by kind of guess, starting from a prior and fading with time.

    A prior counts as `weight` observations. A kind that was seen `memory` times has its counts halved,
    so what happened lately weighs more.
    """

    def __init__(self, weight: float = 4.0, memory: float = 400.0) -> None:
        self._weight = weight
        self._memory = memory
        self._seen: dict[Hashable, tuple[float, float]] = {}  # kind -> came true, tried

    def chance(self, kind: Hashable, prior: float) -> float:
        """The chance that a guess of this kind comes true."""
        true, tried = self._seen.get(kind, (0.0, 0.0))
        return (true + self._weight * prior) / (tried + self._weight)

    def record(self, kind: Hashable, true: bool) -> None:
        before, tried = self._seen.get(kind, (0.0, 0.0))
        if tried >= self._memory:
            before, tried = before / 2, tried / 2
        self._seen[kind] = (before + true, tried + 1)


def verified_nodes(tokens: Seq[int], parents: Seq[int], text: Seq[int]) -> Iterator[tuple[int, bool]]:
    """The nodes of a tree that the text which followed has judged, and how: those below a node it took.

    The text judges any tree, also one that was never verified.
    """
    reached = {ROOT: 0}  # nodes the text took, and how many of its tokens lead there
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        depth = reached.get(parent)
        if depth is not None and depth < len(text):
            taken = token == text[depth]
            if taken:
                reached[node] = depth + 1
            yield node, taken
