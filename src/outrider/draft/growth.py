"""Growing a draft: guesses under the best nodes, level by level, ranked by the chance of their path.

Whoever predicts the next token (a draft model, an EAGLE head) grows its chains and trees here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core import ROOT, Drafts, Resume, Sequence, Tree
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature
from outrider.draft.options import option
from outrider.errors import DrafterFault
from outrider.model import Feed
from outrider.sampling import Row, rank

__all__ = ["Growing", "TreeShape", "drafts_of", "grow"]


@dataclass(frozen=True)
class TreeShape:
    """How a draft grows: at each of `depth` levels the `beam` best nodes get `branch` children each.

    A chain is beam 1, branch 1, and as deep as the plan allows.
    """

    beam: int = option(1, "nodes expanded at each level", 1, 64)
    branch: int = option(1, "children of each of them", 1, 64)
    depth: int | None = option(None, "levels; as deep as the plan allows where it is not set", 1, 64)

    @property
    def is_chain(self) -> bool:
        return self.beam == self.branch == 1 and self.depth is None


@dataclass(slots=True)
class Growing:
    """One sequence's draft while it grows. Nodes are in the order they were thought of."""

    seq: Sequence
    room: int  # nodes it may keep, and slots it may feed
    pages: Seq[int]
    size: int  # slots taken by the text; nodes come after them
    tree: Tree = field(default_factory=lambda: Tree([], [], []))  # survival: chance that the whole path is accepted
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes to put children under
    fed: list[int] = field(default_factory=list)  # nodes in the order of their slots
    logits: dict[tuple[int, ...], DraftLogits] = field(default_factory=dict)  # path -> the draft's logits after it
    _slot_of: dict[int, int] = field(default_factory=dict)

    def put(self, node: int, token: int, chance: float) -> None:
        """A child under a node."""
        tokens, parents, survival = self.tree
        self.frontier.append(len(tokens))
        tokens.append(token)
        parents.append(node)
        survival.append(chance if node == ROOT else survival[node] * chance)

    def kept(self) -> list[int]:
        """The `room` nodes of most value. A parent is never worth less than its child, so the tree stays whole."""
        return sorted(sorted(range(len(self.tree.tokens)), key=self._worth)[: self.room])

    def narrow(self, beam: int) -> None:
        """Leave on the frontier the best nodes whose children could still be kept, as many as slots allow."""
        alive = set(self.kept()) if len(self.tree.tokens) > self.room else None
        able = [node for node in self.frontier if alive is None or node in alive]
        full = alive is None and len(self.tree.tokens) == self.room and beam == 1
        self.frontier = [] if full else sorted(able, key=self._worth)[: min(beam, self.room - len(self.fed))]

    def feed(self) -> Feed:
        """The frontier's rows; the nodes fed before lie in their slots."""
        known = len(self.fed)
        for node in self.frontier:
            self._slot_of[node] = len(self.fed)
            self.fed.append(node)
        nodes = [self.tree.tokens[node] for node in self.frontier]
        return Feed(self.pages, self.size, (), nodes, self._slot_parents(), known)

    def _slot_parents(self) -> list[int]:
        """Of every node fed, the slot of its parent among them, or ROOT."""
        return [self._slot_of.get(self.tree.parents[node], ROOT) for node in self.fed]

    def _worth(self, node: int) -> tuple[float, int]:
        return -self.tree.survival[node], node


Network = Callable[[Seq[Growing]], Tensor]  # logits (places, V) after the frontier nodes of everyone, in order


def grow(growing: Seq[Growing], shape: TreeShape, start: Network, extend: Network, draft_temperature: DraftTemperature) -> None:
    """Fill drafts from a network: `start` reads the text and speaks for the roots, `extend` for new nodes.

    Guesses of a node are the largest of log q plus the target's own noise, q sharpened by what served
    before. A node that cannot be among the kept ones any more gets no children.
    """
    active = [draft for draft in growing if draft.room > 0]
    deepest = shape.depth or max((draft.room for draft in active), default=0)
    for level in range(deepest):
        if not active:
            return
        logits = (extend if level else start)(active)
        _branch(active, logits, shape.branch, draft_temperature)
        for draft in active:
            draft.narrow(shape.beam)
        active = [draft for draft in active if draft.frontier]


def _branch(active: Seq[Growing], logits: Tensor, branch: int, draft_temperature: DraftTemperature) -> None:
    """Put children under every frontier node, best guesses first."""
    places = [(draft, node, draft.tree.path(node)) for draft in active for node in draft.frontier]
    rows = [Row.at(draft.seq, path) for draft, _, path in places]
    ranked = rank(logits, rows, branch, [draft_temperature.temperature(row.params) for row in rows])
    if ranked.tokens[:, 0].min() < 0:
        raise DrafterFault("the draft's logits are not finite")
    for draft in active:
        draft.frontier = []
    for i, (draft, node, path) in enumerate(places):
        if not rows[i].params.greedy:
            draft.logits[tuple(path)] = DraftLogits(logits[i], rows[i])
        for token, chance in zip(ranked.tokens[i].tolist(), ranked.chances[i].tolist(), strict=True):
            if chance > 0.0:  # a grammar may leave fewer guesses than branches
                draft.put(node, token, chance)


def drafts_of(growing: Seq[Growing], resume: Resume | None = None) -> Drafts:
    """The best nodes of everyone, with their chances as survival."""
    return Drafts([draft.tree.subset(draft.kept()) for draft in growing], resume=resume)
