"""Medusa: several heads guess several tokens ahead at once; a static tree combines their best guesses."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from functools import lru_cache

import torch
from torch import Tensor

from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.errors import DrafterFault
from outrider.heads import MedusaHeads
from outrider.ops import BLOCK, Ops
from outrider.sampling import Row, rank

__all__ = ["MedusaDrafter", "StaticTree", "static_tree"]

StaticTree = tuple[tuple[int, int, int], ...]  # (parent, head, rank) per node, in topological order

# How often a head's guess of each rank is right, where nobody has measured it: a better guess
# is worth more than a deeper one.
_TYPICAL = tuple(tuple(0.55 * 0.8**head * 0.35**place for place in range(8)) for head in range(8))


class MedusaDrafter:
    """Drafts with Medusa heads.

    What it does: head k reads the target's last hidden row and guesses the token k places after the
        next; the best guesses of all heads form a tree chosen once from how often each rank is right.
    When it helps: where drafting must cost next to nothing; guesses do not know of each other, so
        long runs are rarer than with EAGLE.
    Cost: one small product per head, and the output matrix per head.
    Needs: the target's last hidden row.
    Reference: Cai et al. 2401.10774.
    """

    def __init__(self, heads: MedusaHeads, ops: Ops, accuracy: Seq[Seq[float]] | None = None) -> None:
        self.needs = Needs(taps=heads.config.taps)
        self._heads = heads
        self._ops = ops
        self._accuracy = tuple(map(tuple, accuracy or _TYPICAL))[: heads.config.heads]
        self._last: dict[Sequence, Tensor | None] = {}  # the tap of the newest committed token but one

    def begin(self, seq: Sequence) -> None:
        self._last[seq] = None

    def end(self, seq: Sequence) -> None:
        self._last.pop(seq, None)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the hidden row that chose the newest token."""
        assert scores.taps is not None
        for seq, fed, first, verdict in zip(batch.sequences, batch.feeds, scores.first_rows, verdicts, strict=True):
            if seq in self._last:
                row = first + fed + verdict.path[-1] if verdict.path else first + fed - 1
                self._last[seq] = scores.taps[row]

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        active = [b for b, n in enumerate(plan.lengths) if n and self._last[batch.sequences[b]] is not None]
        trees: list[tuple[list[int], list[int]]] = [([], []) for _ in batch.sequences]
        if active:
            guesses = self._guesses([batch.sequences[b] for b in active])
            for b, own in zip(active, guesses, strict=True):
                tree = static_tree(self._accuracy, plan.lengths[b])
                trees[b] = ([own[head][place] for _, head, place in tree], [parent for parent, _, _ in tree])
        return Drafts.trees(trees)

    def _guesses(self, sequences: Seq[Sequence]) -> list[list[list[int]]]:
        """For each sequence, each head's best tokens in order."""
        taps = torch.stack([tap for seq in sequences if (tap := self._last[seq]) is not None])
        padded = torch.cat((taps, taps.new_zeros(-len(taps) % BLOCK, taps.shape[1])))
        logits = self._heads(self._heads.fuse(padded, self._ops), self._ops)[:, : len(taps)]
        if not bool(logits.isfinite().all()):
            raise DrafterFault("the heads' logits are not finite")
        width = max(map(len, self._accuracy))
        out: list[list[list[int]]] = [[] for _ in sequences]
        for head, scores in enumerate(logits):
            # the path in between is not known yet; penalties see the text so far
            rows = [Row.at(seq)._replace(position=len(seq.tokens) + head) for seq in sequences]
            for own, tokens in zip(out, rank(scores, rows, width).tokens.tolist(), strict=True):
                own.append(tokens)
        return out


@lru_cache(maxsize=64)
def static_tree(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> StaticTree:
    """The `nodes` most probable combinations of ranks, heads taken as independent.

    Best first: a node's children and its next sibling are never worth more than it is, so a heap
    gives the nodes in order of worth, parents before children.
    """
    chosen: list[tuple[int, int, int]] = []
    waiting = [(-accuracy[0][0], 0, (ROOT, 0, 0))]
    order = 1
    while waiting and len(chosen) < nodes:
        worth, _, (parent, head, place) = heapq.heappop(waiting)
        chosen.append((parent, head, place))
        above = worth / accuracy[head][place]
        following = []
        if place + 1 < len(accuracy[head]):
            following.append((above * accuracy[head][place + 1], (parent, head, place + 1)))
        if head + 1 < len(accuracy):
            following.append((worth * accuracy[head + 1][0], (len(chosen) - 1, head + 1, 0)))
        for value, node in following:
            heapq.heappush(waiting, (value, order, node))
            order += 1
    return tuple(chosen)
