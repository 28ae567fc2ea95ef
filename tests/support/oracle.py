"""Drafters that know the plain text: right for as long as a test wants, in trees of every shape."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from tests.support.models import VOCAB

SPOILED = VOCAB - 1  # no plain text holds it


@dataclass
class Oracle:
    """Knows the plain output and corrupts it, so that accepted runs of every length occur.

    Drafts are right for a length that has not yet been accepted, the longest that fits, and then for
    random lengths. With `branches`, wrong siblings hang from random nodes and the order of nodes is
    shuffled within what trees allow.
    """

    answers: dict[str, list[int]]  # request id -> prompt and plain output
    length: int
    branches: int = 0
    seed: int = 0
    needs: Needs = field(default_factory=Needs)
    vocab: int = VOCAB

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.accepted: set[int] = set()

    def begin(self, seq: Sequence) -> None: ...

    def end(self, seq: Sequence) -> None: ...

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        counts = drafts.counts
        self.accepted |= {len(verdict.path) for b, verdict in enumerate(verdicts) if counts[b]}

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self._trying: set[int] = set()
        return Drafts.trees([self._draft(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True)])

    def _draft(self, seq: Sequence, room: int) -> tuple[list[int], list[int]]:
        if room == 0:
            return [], []
        trunk = max(room - self.branches, 1)
        missing = [n for n in range(trunk + 1) if n <= self.length and n not in self.accepted | self._trying]
        right = missing[-1] if missing else self._random.randint(0, trunk)
        self._trying.add(right)
        truth = self.answers[seq.request.id][len(seq.tokens) : len(seq.tokens) + trunk]
        tokens = [t if i < right else self._wrong(t) for i, t in enumerate(truth)]
        parents = list(range(-1, len(tokens) - 1))
        for _ in range(min(self.branches, room - len(tokens))):
            parent = self._random.randrange(-1, len(tokens))
            tokens.append(self._random.randrange(self.vocab))
            parents.append(parent)
        return self._shuffled(tokens, parents) if self.branches else (tokens, parents)

    def _wrong(self, token: int) -> int:
        return (token + self._random.randrange(1, self.vocab)) % self.vocab

    def _shuffled(self, tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
        """Another topological order of the same tree."""
        new_index: dict[int, int] = {-1: -1}
        left = list(range(len(tokens)))
        out: list[int] = []
        while left:
            ready = [node for node in left if parents[node] in new_index]
            node = self._random.choice(ready)
            left.remove(node)
            new_index[node] = len(out)
            out.append(node)
        return [tokens[n] for n in out], [new_index[parents[n]] for n in out]


class Shapes(Oracle):
    """Trees of one shape that hold the plain text on one branch and wrong guesses on the others."""

    shape = "chain"

    def _draft(self, seq: Sequence, room: int) -> tuple[list[int], list[int]]:
        if room == 0:
            return [], []
        parents = tree_of(self.shape, room)
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        answer, at = self.answers[seq.request.id], len(seq.tokens)
        last = max(range(room), key=lambda node: (depths[node], node))
        trunk = set()
        while last >= 0:
            trunk.add(last)
            last = parents[last]
        right = self._random.randint(0, max(depths) + 1)
        tokens = []
        for node, depth in enumerate(depths):
            truth = answer[at + depth] if at + depth < len(answer) else 0
            tokens.append(truth if node in trunk and depth < right else self._wrong(truth))
        return tokens, parents


def tree_of(shape: str, nodes: int) -> list[int]:
    """Parents of a tree with so many nodes."""
    if shape == "chain":
        return list(range(-1, nodes - 1))
    if shape == "two chains":  # side by side, their nodes in turn
        return [max(node - 2, -1) for node in range(nodes)]
    if shape == "comb":  # a trunk with a leaf at every joint
        return [-1 if node < 2 else node - 1 - node % 2 for node in range(nodes)]
    if shape == "late":  # siblings first, then one deep chain
        return [-1] * (nodes // 3) + [-1 if node == nodes // 3 else node - 1 for node in range(nodes // 3, nodes)]
    return [(node - 1) // 3 if node > 2 else -1 for node in range(nodes)]  # bushy


class Spoiled(Oracle):
    """Trees whose wrong guesses are all the spoiled token."""

    def _wrong(self, token: int) -> int:
        return SPOILED

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        drafts = super().propose(batch, plan)
        answers = [self.answers[seq.request.id][len(seq.tokens) :] for seq in batch.sequences]
        return Drafts.trees([_only_truth(tree, answer) for tree, answer in zip(drafts.per_sequence, answers, strict=True)])


def _only_truth(tree: Tree, answer: list[int]) -> tuple[list[int], list[int]]:
    """The tree with the spoiled token wherever a guess is not the text's."""
    right = [depth < len(answer) and token == answer[depth] for token, depth in zip(tree.tokens, tree.depths, strict=True)]
    return [token if fits else SPOILED for token, fits in zip(tree.tokens, right, strict=True)], tree.parents
