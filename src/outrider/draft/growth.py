"""Growing a draft: guesses under the best nodes, level by level, ranked by the chance of their path.

Whoever predicts the next token (a draft model, an EAGLE head) grows its chains and trees here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from outrider.cache import SequenceState
from outrider.core import ROOT, Batch, Drafts, Sequence, Tree
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature
from outrider.draft.options import option
from outrider.errors import DrafterFault, InvalidParameter
from outrider.model import Feed, Growth
from outrider.ops.cuda.tree_sizes import MAX_BRANCH, MAX_CHILDREN, MAX_LEVELS
from outrider.sampling import CORRUPTED, Key, Row, Stream, draw, probs_of, process, rank

__all__ = ["Growing", "TreeShape", "chain_of", "drafts_for", "draw_apart", "grow", "stack_q"]


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

    def growth(self, rooms: Seq[int], floor: float = 0.0) -> Growth:
        """How a runner grows trees of at most so many nodes."""
        return Growth(self.depth or max(rooms), self.beam, self.branch, floor, self.depth is not None)

    def require_device(self) -> None:
        """Refuse what does not grow on a GPU."""
        if self.branch > MAX_BRANCH or self.beam * self.branch > MAX_CHILDREN or (self.depth or 0) > MAX_LEVELS:
            raise InvalidParameter(
                "beam",
                f"on a GPU a tree grows by at most {MAX_CHILDREN} nodes a level (beam times branch), {MAX_BRANCH} under a node "
                f"and {MAX_LEVELS} levels; choose a smaller beam, branch or depth",
            )


@dataclass(slots=True)
class Growing:
    """One sequence's draft while it grows. Nodes are in the order they were added."""

    seq: Sequence
    room: int  # nodes it may keep, and slots it may feed
    pages: Seq[int]
    size: int  # slots taken by the text; nodes come after them
    rotary_start: int = 0  # see Feed
    adapter: int = 0  # of the network that drafts; see Feed
    state: SequenceState | None = None  # of its recurrent layers
    tree: Tree = field(default_factory=lambda: Tree([], [], []))  # survival: chance that the whole path is accepted
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes to put children under
    logits: dict[tuple[int, ...], DraftLogits] = field(default_factory=dict)  # path -> the draft's logits after it
    _slot_of: dict[int, int] = field(default_factory=dict)  # nodes fed so far, in the order of their slots

    def put(self, node: int, token: int, chance: float) -> None:
        """A child under a node."""
        tokens, parents, survival = self.tree
        self.frontier.append(len(tokens))
        tokens.append(token)
        parents.append(node)
        survival.append(chance if node == ROOT else survival[node] * chance)

    def kept(self) -> list[int]:
        """The `room` likeliest nodes. A parent is never less likely than its child, so the tree stays whole."""
        return sorted(sorted(range(len(self.tree.tokens)), key=self._rank_key)[: self.room])

    def narrow(self, beam: int) -> None:
        """Leave on the frontier the best nodes whose children could still be kept, as many as slots allow."""
        alive = set(self.kept()) if len(self.tree.tokens) > self.room else None
        able = [node for node in self.frontier if alive is None or node in alive]
        full = alive is None and len(self.tree.tokens) == self.room and beam == 1
        self.frontier = [] if full else sorted(able, key=self._rank_key)[: min(beam, self.room - len(self._slot_of))]

    def feed(self) -> Feed:
        """The frontier's rows; the nodes fed before lie in their slots."""
        tokens, parents, _ = self.tree
        known = len(self._slot_of)
        for slot, node in enumerate(self.frontier, known):
            self._slot_of[node] = slot
        slot_parents = [self._slot_of.get(parents[node], ROOT) for node in self._slot_of]
        nodes = [tokens[node] for node in self.frontier]
        return Feed(self.pages, self.size, (), nodes, slot_parents, known, 0, self.rotary_start, self.adapter, self.state)

    def _rank_key(self, node: int) -> tuple[float, int]:
        return -self.tree.survival[node], node


Network = Callable[[Seq[Growing]], Tensor]  # logits (places, V) after the frontier nodes of everyone, in order


def grow(
    growing: Seq[Growing], shape: TreeShape, start: Network, extend: Network, draft_temperature: DraftTemperature
) -> dict[Sequence, Tree]:
    """Grow trees by a network and keep their best nodes: `start` gives the logits of the roots, `extend` those of new nodes.

    Guesses of a node are the largest of log q plus the target's noise, q divided by the draft temperature. A node that
    cannot be among the kept ones any more gets no children.
    """
    active = [draft for draft in growing if draft.room > 0]
    deepest = shape.depth or max((draft.room for draft in active), default=0)
    for level in range(deepest):
        if not active:
            break
        logits = (extend if level else start)(active)
        _branch(active, logits, shape.branch, draft_temperature)
        for draft in active:
            draft.narrow(shape.beam)
        active = [draft for draft in active if draft.frontier]
    draft_temperature.last = {draft.seq: draft.logits.get for draft in growing if draft.logits}
    return {draft.seq: draft.tree.subset(draft.kept()) for draft in growing}


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


def drafts_for(batch: Batch, trees: Mapping[Sequence, Tree]) -> Drafts:
    """Trees of some sequences as drafts of a batch."""
    none = Tree([], [], [])
    return Drafts([trees.get(seq, none) for seq in batch.sequences])


def chain_of(tokens: list[int], chances: Seq[float]) -> Tree:
    """A chain whose tokens each have this chance after the one before."""
    if CORRUPTED in tokens:
        raise DrafterFault("the draft's logits are not finite")
    return Tree.chain(tokens, list(accumulate(chances, operator.mul)))


def draw_apart(logits: Tensor, row: Row, seq: Sequence) -> tuple[int, Tensor]:
    """A token drawn from q, and q (V,). Its noise is not the target's: ratio tests must not share that."""
    key = Key(row.seed, row.position, row.sample, Stream.DRAFT, seq.stats.rounds)
    return draw(process(logits, row)[None], None if row.params.greedy else [key])[0], probs_of(logits, row)


def stack_q(probs: Seq[Seq[Tensor]]) -> Tensor | None:
    """(B, D, V) from the distributions (V,) that each sequence's tokens were drawn from, zero where nothing was drafted."""
    if not any(probs):
        return None
    vocab = next(rows[0] for rows in probs if rows).shape[0]
    out = torch.zeros(len(probs), max(map(len, probs)), vocab, dtype=torch.float64)
    for b, rows in enumerate(probs):
        if rows:
            out[b, : len(rows)] = torch.stack(list(rows))
    return out
