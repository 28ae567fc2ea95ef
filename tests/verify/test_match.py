"""`match`: whatever is drafted, chain or tree, the emitted text has the law of the choices."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from outrider.sampling import Key, draw
from outrider.verify.match import walk
from tests.support.enumeration import PARAMS, continued, dirichlet, joint, processed


def paths(tree):
    """The text of every node, the root's first."""
    out = [()]
    for parent, token in zip(*tree, strict=True):
        out.append((*out[parent + 1], token))
    return out


def error(walk, tree, target, vocab):
    """Enumerate the choices at every node, each of law p there, and compare with the target's law."""
    texts = paths(tree)
    laws = [target(text).tolist() for text in texts]
    found = {}
    for choices in product(range(vocab), repeat=len(texts)):
        weight = prod(law[choice] for law, choice in zip(laws, choices, strict=True))
        if weight == 0:
            continue
        path = walk(*tree, list(choices))
        text = (*(tree[1][node] for node in path), choices[path[-1] + 1 if path else 0])
        found[text] = found.get(text, 0.0) + weight
    length = max(map(len, texts)) + 1
    return np.abs(continued(found, target, length) - joint(target, length)).max()


def random_tree(vocab, nodes, seed):
    """Arbitrary (parents, tokens): duplicate siblings, tokens of no chance and bare roots included."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, i)) for i in range(nodes)], rng.integers(0, vocab, size=nodes).tolist()


def chain(*tokens):
    return list(range(-1, len(tokens) - 1)), list(tokens)


TREES = {
    "none": (2, ([], [])),
    "chain": (3, chain(1, 0, 2)),
    "other chain": (4, chain(3, 3, 0)),
    "long chain": (2, chain(0, 1, 1, 0, 1)),
    "star": (3, ([-1, -1, -1], [0, 1, 2])),
    "duplicate siblings": (3, ([-1, -1, 0, 1], [1, 1, 0, 2])),
    "binary": (2, ([-1, -1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1])),
    "two branches, interleaved": (3, ([-1, -1, 1, 0, 3], [2, 0, 1, 1, 0])),
    **{f"random {seed}": (2 + seed % 2, random_tree(2 + seed % 2, 5, seed)) for seed in range(12)},
}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", TREES)
def test_the_text_has_the_target_s_law(name, params):
    vocab, tree = TREES[name]
    assert error(walk, tree, processed(dirichlet(vocab, seed=3), PARAMS[params]), vocab) < 1e-12


def _first_child(parents, _tokens, _choices):
    """Steps into the first child, chosen or not."""
    path, here = [], -1
    for node, parent in enumerate(parents):
        if parent == here:
            path.append(node)
            here = node
    return path


def _parents_choice(parents, tokens, choices):
    """Reads each node's choice one row early."""
    return walk(parents, tokens, [choices[0], *choices[:-1]])


def _any_node(_parents, tokens, choices):
    """Forgets whose child a node is: takes any later node that carries the chosen token."""
    path, here = [], -1
    for node, token in enumerate(tokens):
        if token == choices[here + 1]:
            path.append(node)
            here = node
    return path


def _never_refuses_all(parents, tokens, choices):
    """Accepts the first drafted token although it was not chosen."""
    path = walk(parents, tokens, choices)
    return path or ([0] if tokens else [])


MUTANTS = [_first_child, _parents_choice, _any_node, _never_refuses_all]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_wrong_walks_are_found(mutant):
    target = processed(dirichlet(3, seed=3), PARAMS["plain"])
    worst = max(error(mutant, tree, target, vocab) for vocab, tree in TREES.values() if vocab == 3)
    assert worst > 1e-3


def test_walks_by_hand():
    assert walk([], [], [4]) == []
    assert walk(*chain(5, 6, 7), [5, 6, 7, 8]) == [0, 1, 2]
    assert walk(*chain(5, 6, 7), [5, 9, 7, 8]) == [0]
    assert walk(*chain(5, 6, 7), [6, 6, 7, 8]) == []
    tree = [-1, -1, 0, 1, 1, 3], [5, 6, 6, 5, 7, 8]
    assert walk(*tree, [6, 0, 5, 0, 8, 0, 0]) == [1, 3, 5]
    assert walk(*tree, [5, 6, 0, 0, 0, 0, 0]) == [0, 2]
    assert walk([-1, -1, 0, 1], [4, 4, 1, 2], [4, 2, 2, 0, 0]) == [0]


def coupled(p, q):
    """Chance that two argmaxes with the same Gumbel noise agree (Daliri et al. 2408.07978)."""
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both)


@pytest.mark.parametrize("case", range(6))
def test_coupled_drafts_agree_as_often_as_theory_says(case):
    rng, samples = np.random.default_rng(case), 20_000
    p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    if case % 2:
        p[case // 2] = 0.0
        p /= p.sum()
    keys = [Key(seed, case) for seed in range(samples)]
    chosen, guessed = (draw(torch.from_numpy(law).log().expand(samples, -1), keys) for law in (p, q))
    rate = np.mean(np.array(chosen) == np.array(guessed))
    chance, distance = coupled(p, q), np.abs(p - q).sum() / 2
    assert abs(rate - chance) < 4 * np.sqrt(chance * (1 - chance) / samples)
    assert (1 - distance) / (1 + distance) - 1e-12 <= chance <= 1 - distance + 1e-12
