"""Trees of the best nodes, against all nodes that there are."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.model.best_first import BestFirst

LADDER = np.array([0.70, 0.12, 0.05, 0.03])


def chances_of(path: tuple[int, ...], seed: int, branch: int) -> NDArray[Any]:
    """What follows a path: the children's chances, the largest first; the same for the same path."""
    if seed < 0:
        return LADDER[:branch]
    generator = np.random.default_rng([seed, *path])
    return np.sort(generator.dirichlet(np.full(branch + 2, 0.3)))[::-1][:branch]


def best_nodes(room: int, levels: int, seed: int, branch: int) -> list[tuple[float, tuple[int, ...]]]:
    """The likeliest paths, found one by one."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    best: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(best) <= room:
        survival, path = heapq.heappop(heap)
        best.append((-survival, path))
        if len(path) < levels:
            for token, chance in enumerate(chances_of(path, seed, branch)):
                heapq.heappush(heap, (survival * chance, (*path, token)))
    return best[1:]


def grown(room: int, levels: int, seed: int, branch: int, beam: int) -> tuple[dict[tuple[int, ...], float], int]:
    """The paths that a tree holds with their survival, and the steps it took; it expands no more nodes than it has room for."""
    tree, expanded, steps = BestFirst(room, levels, beam), 0, 0
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    where: dict[int, tuple[int, ...]] = {}  # by place
    while len(tree.frontier):
        before, frontier = len(tree), [paths[node] for node in tree.frontier.tolist()]
        if before:
            for path, places, depth in zip(frontier, tree.paths.tolist(), tree.depths.tolist(), strict=True):
                assert depth == len(path) <= levels - 1
                where[expanded] = path
                assert [where[place] for place in places[:depth]] == [path[: n + 1] for n in range(depth)], "places"
                expanded += 1
        tokens = np.tile(np.arange(branch), (len(frontier), 1))
        tree.add(tokens, np.array([chances_of(path, seed, branch) for path in frontier]))
        for node in range(before, len(tree)):
            paths[node] = (*paths[int(tree._parents[node])], int(tree._tokens[node]))
        steps += 1
    assert expanded <= room
    tokens_kept, parents, survival = tree.finish()
    kept: list[tuple[int, ...]] = []
    for token, parent in zip(tokens_kept, parents, strict=True):
        assert parent < len(kept), "parents come first"
        kept.append((*(kept[parent] if parent >= 0 else ()), token))
    assert len(set(kept)) == len(kept)
    return dict(zip(kept, survival, strict=True)), steps


@pytest.mark.parametrize("seed", [-1, 0, 1, 2])
@pytest.mark.parametrize(
    ("room", "levels", "branch", "beam"), [(1, 9, 4, 4), (24, 32, 4, 4), (256, 32, 4, 16), (1024, 32, 3, 64), (7, 1, 4, 4)]
)
def test_trees_hold_the_best_nodes(room: int, levels: int, branch: int, beam: int, seed: int) -> None:
    """Nearly: what is expanded side by side is not always what would have been, one by one."""
    tree, steps = grown(room, levels, seed, branch, beam)
    best = sum(survival for survival, _ in best_nodes(room, levels, seed, branch))
    assert len(tree) <= room
    assert 0.97 * best <= sum(tree.values()) <= 1.000001 * best
    assert steps <= room // beam + 8


def test_one_at_a_time_they_are_the_best_nodes() -> None:
    best = best_nodes(40, 32, 1, 4)
    tree, _ = grown(40, 32, 1, 4, 1)
    assert sorted(tree.values()) == pytest.approx(sorted(survival for survival, _ in best))


def test_the_planted_ladder_brings_so_many_tokens() -> None:
    """With the target's choice among the first four candidates with these chances, 256 nodes bring 4.6 accepted tokens."""
    assert sum(grown(256, 32, -1, 4, 16)[0].values()) == pytest.approx(4.6, abs=0.15)


def test_what_has_no_chance_is_left_out() -> None:
    tree = BestFirst(10, 4, 100)
    tree.add(np.array([[5, 6, 7]]), np.array([[0.5, 0.0, 0.0]]))
    assert tree.tokens.tolist() == [5]
    tree.add(np.array([[1, 2, 3]]), np.zeros((1, 3)))
    assert not len(tree.frontier)
    assert tree.finish() == ([5], [-1], [0.5])
