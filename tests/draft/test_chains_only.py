"""Trees cut to the chain that goes from each node to its likeliest child."""

from __future__ import annotations

from outrider.core import Tree
from outrider.draft.chains_only import best_chain


def test_the_likeliest_child_goes_on() -> None:
    tree = Tree([10, 11, 12, 13, 14], [-1, -1, 1, 1, 3], [0.3, 0.6, 0.2, 0.4, 0.4])
    assert best_chain(tree) == [1, 3, 4]
    assert tree.subset(best_chain(tree)).parents == [-1, 0, 1]


def test_a_chain_stays_and_ties_go_to_the_first() -> None:
    assert best_chain(Tree.chain([5, 6, 7])) == [0, 1, 2]
    assert best_chain(Tree([5, 6], [-1, -1], [1.0, 1.0])) == [0]
    assert best_chain(Tree([], [], [])) == []
