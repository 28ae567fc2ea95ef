"""`match`, the default rule: the target chooses, and a draft is right where it guessed the choice."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["walk"]


def walk(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Nodes accepted, from the root down: step into the child that carries the chosen token.

    `choices[0]` is the choice at the root and `choices[1 + i]` the one at node i. Of siblings with
    equal tokens the first counts.
    """
    path: list[int] = []
    here = -1
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        # topological order: a child of the current node always comes after it
        if parent == here and token == choices[here + 1]:
            path.append(node)
            here = node
    return path
