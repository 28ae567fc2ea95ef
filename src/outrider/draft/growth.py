"""Growing a draft: guesses under the best nodes, level by level, ranked by the chance of their path.

Whoever predicts the next token (a draft model, an EAGLE head) grows its chains and trees here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from outrider.core import ROOT, Drafts, Resume, Sequence
from outrider.draft.protocol import path_to
from outrider.draft.sharpen import Law, Sharpener
from outrider.errors import DrafterFault, InvalidParameter
from outrider.model import Feed
from outrider.sampling import Row, rank

__all__ = ["Growing", "TreeShape", "drafts_of", "grow"]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a draft grows: at each of `depth` levels the `beam` best nodes get `branch` children each.

    A chain is beam 1, branch 1, and as deep as the plan allows.
    """

    beam: int = 1
    branch: int = 1
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("beam", "branch", "depth"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 64:
                raise InvalidParameter(name, f"must be in [1, 64], got {value}")


@dataclass(slots=True)
class Growing:
    """One sequence's draft while it grows. Nodes are in the order they were thought of."""

    seq: Sequence
    room: int  # nodes it may keep, and slots it may feed
    pages: Seq[int]
    size: int  # slots taken by the text; nodes come after them
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)  # chance that the whole path is accepted
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes to put children under
    fed: list[int] = field(default_factory=list)  # nodes in the order of their slots
    laws: dict[tuple[int, ...], Law] = field(default_factory=dict)  # path -> the draft's law after it
    _slot_of: dict[int, int] = field(default_factory=dict)

    def path(self, node: int) -> list[int]:
        """Tokens from the root down to a node."""
        return path_to(self.tokens, self.parents, node)

    def put(self, node: int, token: int, chance: float) -> None:
        """A child under a node."""
        self.frontier.append(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(node)
        self.value.append(chance if node == ROOT else self.value[node] * chance)

    def kept(self) -> list[int]:
        """The `room` nodes of most value. A parent is never worth less than its child, so the tree stays whole."""
        return sorted(sorted(range(len(self.tokens)), key=self._worth)[: self.room])

    def narrow(self, beam: int) -> None:
        """Leave on the frontier the best nodes whose children could still be kept, as many as slots allow."""
        alive = set(self.kept()) if len(self.tokens) > self.room else None
        able = [node for node in self.frontier if alive is None or node in alive]
        full = alive is None and len(self.tokens) == self.room and beam == 1
        self.frontier = [] if full else sorted(able, key=self._worth)[: min(beam, self.room - len(self.fed))]

    def feed(self) -> Feed:
        """The frontier's rows; the nodes fed before lie in their slots."""
        known = len(self.fed)
        for node in self.frontier:
            self._slot_of[node] = len(self.fed)
            self.fed.append(node)
        nodes = [self.tokens[node] for node in self.frontier]
        return Feed(self.pages, self.size, (), nodes, self._slot_parents(), known)

    def _slot_parents(self) -> list[int]:
        """Of every node fed, the slot of its parent among them, or ROOT."""
        return [self._slot_of.get(self.parents[node], ROOT) for node in self.fed]

    def _worth(self, node: int) -> tuple[float, int]:
        return -self.value[node], node


Network = Callable[[Seq[Growing]], Tensor]  # logits (places, V) after the frontier nodes of everyone, in order


def grow(growing: Seq[Growing], shape: TreeShape, start: Network, extend: Network, sharpener: Sharpener) -> None:
    """Fill drafts from a network: `start` reads the text and speaks for the roots, `extend` for new nodes.

    Guesses of a node are the largest of log q plus the target's own noise, q sharpened by what served
    before. A node that cannot be among the kept ones any more gets no children.
    """
    active = [own for own in growing if own.room > 0]
    deepest = shape.depth or max((own.room for own in active), default=0)
    for level in range(deepest):
        if not active:
            return
        logits = (extend if level else start)(active)
        _branch(active, logits, shape.branch, sharpener)
        for own in active:
            own.narrow(shape.beam)
        active = [own for own in active if own.frontier]


def _branch(active: Seq[Growing], logits: Tensor, branch: int, sharpener: Sharpener) -> None:
    """Put children under every frontier node, best guesses first."""
    places = [(own, node, own.path(node)) for own in active for node in own.frontier]
    rows = [Row.at(own.seq, path) for own, _, path in places]
    ranked = rank(logits, rows, branch, [sharpener.temperature(row.params) for row in rows])
    if ranked.tokens[:, 0].min() < 0:
        raise DrafterFault("the draft's logits are not finite")
    for own in active:
        own.frontier = []
    for i, (own, node, path) in enumerate(places):
        if not rows[i].params.greedy:
            own.laws[tuple(path)] = Law(logits[i], rows[i])
        for token, chance in zip(ranked.tokens[i].tolist(), ranked.chances[i].tolist(), strict=True):
            if chance > 0.0:  # a grammar may leave fewer guesses than branches
                own.put(node, token, chance)


def drafts_of(growing: Seq[Growing], resume: Resume | None = None) -> Drafts:
    """The best nodes of everyone, with their chances as survival."""
    trees, values = [], []
    for own in growing:
        kept = own.kept()
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        trees.append(([own.tokens[node] for node in kept], [place[own.parents[node]] for node in kept]))
        values.append([own.value[node] for node in kept])
    return Drafts.trees(trees, survival=values, resume=resume)
