"""Medusa: several heads guess several tokens ahead at once; a tree combines their best guesses."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature
from outrider.draft.options import option
from outrider.draft.pagebook import PageBook
from outrider.errors import DrafterFault
from outrider.heads import MedusaHeads, MedusaNetwork, MedusaRunner, load_medusa, medusa_network
from outrider.ops import Ops
from outrider.sampling import Row, rank

__all__ = ["MedusaDrafter", "MedusaOptions", "best_paths"]

Paths = tuple[tuple[int, ...], ...]  # a node is the path of ranks that leads to it, parents first
_WIDEST = 16  # children a node may have


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """How the tree is made."""

    dynamic: bool = option(True, "0: a static tree, chosen once from how often each rank was right")


class MedusaDrafter:
    """Drafts with Medusa heads.

    What it does: head k reads the target's last hidden row and guesses the token k places after the
        next. The guesses form the tree of the most probable combinations by the heads' own
        probabilities, or with `dynamic=0` a static tree chosen once from how often each rank was right.
    When it helps: where drafting must cost next to nothing; guesses do not know of each other, so
        long runs are rarer than with EAGLE.
    Cost: one small product per head, and the output matrix per head.
    Needs: the target's last hidden row.
    Reference: Cai et al. 2401.10774.
    """

    Options = MedusaOptions

    def __init__(
        self,
        heads: MedusaHeads,
        ops: Ops,
        dynamic: bool = True,
        page_size: int = 64,
        runner: MedusaNetwork | None = None,  # where another device runs the heads
    ) -> None:
        self.needs = Needs(taps=heads.config.taps)
        self._heads = heads
        self._runner = runner or MedusaRunner(heads, ops)
        self._dynamic = dynamic
        self._trees: dict[int, Paths] = {}  # by number of nodes
        self._last: dict[Sequence, Tensor | None] = {}  # the tap of the token before the newest
        self._book = PageBook(page_size)  # keeps the last tap of each page
        self._draft_temperature = DraftTemperature(tree=True, by_depth=True)
        self._draft_logits: dict[Sequence, list[DraftLogits]] = {}  # of the last draft, by head

    @classmethod
    def build(cls, context: DraftContext) -> MedusaDrafter:
        target, options = context.target, context.options(MedusaOptions)
        heads = load_medusa(context.weights("medusa"), target.decoder, context.load_options)
        return cls(heads, target.ops, options.dynamic, target.pool.page_size, medusa_network(heads, target))

    def begin(self, seq: Sequence) -> None:
        """Start a sequence. Where its pages are filled up to the newest token, their last tap drafts at once."""
        held = self._book.begin(seq)
        self._last[seq] = held.feature if held.tokens == len(seq.tokens) - 1 else None

    def end(self, seq: Sequence) -> None:
        self._last.pop(seq, None)
        self._draft_logits.pop(seq, None)
        self._book.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the hidden row that chose the newest token, and the last of each page."""
        assert scores.taps is not None
        for b, (seq, verdict) in enumerate(zip(batch.sequences, verdicts, strict=True)):
            after = scores.first_rows[b] + batch.feeds[b]
            rows = [*range(scores.first_rows[b], after), *(after + node for node in verdict.path)]
            by_head = self._draft_logits.pop(seq, [])
            if seq in self._last and seq.finish_reason is None:
                self._last[seq] = scores.taps[rows[-1]]
                size, start = self._book.page_size, seq.cached - len(rows)
                for index in range(start // size, seq.cached // size):
                    self._book.fill(seq, index, scores.taps[rows[(index + 1) * size - 1 - start]])
                by_path = {tuple(verdict.tokens[:depth]): logits for depth, logits in enumerate(by_head)}
                self._draft_temperature.learn(seq.request.params, by_path.get, verdict, scores, scores.roots[b])

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        active = [b for b, n in enumerate(plan.lengths) if n and self._last[batch.sequences[b]] is not None]
        trees = [Tree([], [], [])] * len(batch.sequences)
        if active:
            lengths = [plan.lengths[b] for b in active]
            width = min(max(lengths), _WIDEST) if self._dynamic else 1 + max(max(path) for n in lengths for path in self._tree(n))
            for b, guesses in zip(active, self._guesses([batch.sequences[b] for b in active], width), strict=True):
                chances = [guess.chances for guess in guesses]
                tree = best_paths(chances, plan.lengths[b]) if self._dynamic else self._tree(plan.lengths[b])
                place = {path: i for i, path in enumerate(tree)} | {(): ROOT}
                trees[b] = Tree(
                    [guesses[len(path) - 1].tokens[path[-1]] for path in tree],
                    [place[path[:-1]] for path in tree],
                    [math.prod(head[rank] for head, rank in zip(chances, path, strict=False)) for path in tree],
                )
        return Drafts(trees)

    def _tree(self, nodes: int) -> Paths:
        if nodes not in self._trees:
            self._trees[nodes] = self._heads.config.tree(nodes)
        return self._trees[nodes]

    def _guesses(self, sequences: Seq[Sequence], width: int) -> list[list[_Guess]]:
        """For each sequence, each head's best tokens in order."""
        taps = torch.stack([tap for seq in sequences if (tap := self._last[seq]) is not None])
        logits = self._runner.logits(taps)
        if not bool(logits.isfinite().all()):
            raise DrafterFault("the heads' logits are not finite")
        out: list[list[_Guess]] = [[] for _ in sequences]
        for head, scores in enumerate(logits):
            # the path in between is not known yet; penalties see the text so far, a grammar speaks for the first head
            rows = [Row.at(seq)._replace(position=len(seq.tokens) + head) for seq in sequences]
            rows = rows if head == 0 else [row._replace(allowed=None) for row in rows]
            ranked = rank(scores, rows, width, [self._draft_temperature.temperature(row.params, head) for row in rows])
            for i, (guesses, tokens, chances) in enumerate(
                zip(out, ranked.tokens.tolist(), ranked.chances.tolist(), strict=True)
            ):
                guesses.append(_Guess(tokens, chances))
                self._draft_logits.setdefault(sequences[i], []).append(DraftLogits(scores[i], rows[i]))
        return out


class _Guess(NamedTuple):
    """One head's best tokens and their chances."""

    tokens: list[int]
    chances: list[float]


def best_paths(chances: Seq[Seq[float]], nodes: int) -> Paths:
    """The `nodes` most probable paths of ranks, heads taken as independent, parents before children.

    Best first: a path's next sibling and its first child are never worth more than it is.
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chances[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < nodes:
        value, path = heapq.heappop(waiting)
        chosen.append(path)
        head = chances[len(path) - 1]
        if path[-1] + 1 < len(head) and head[path[-1]] > 0:
            heapq.heappush(waiting, (value / head[path[-1]] * head[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < len(chances):
            heapq.heappush(waiting, (value * chances[len(path)][0], (*path, 0)))
    return tuple(chosen)
