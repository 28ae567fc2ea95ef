"""Medusa: several heads guess several tokens ahead at once; a tree combines their best guesses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature, LogitsAt
from outrider.draft.growth import drafts_for
from outrider.draft.lookup import best_first
from outrider.draft.options import option
from outrider.draft.reader import PageBook, committed_rows
from outrider.errors import DrafterFault
from outrider.heads import MedusaHeads, MedusaNetwork, MedusaRunner, load_medusa, medusa_network
from outrider.ops import Ops
from outrider.sampling import Row, rank

__all__ = ["MedusaDrafter", "MedusaOptions"]

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
        self._runner = runner or MedusaRunner(heads, ops)
        self._dynamic = dynamic
        self._static_paths = lru_cache(heads.config.tree)  # by number of nodes
        self._last: dict[Sequence, Tensor | None] = {}  # the tap of the token before the newest
        self._book = PageBook(page_size)  # keeps the last tap of each page
        self._draft_temperature = DraftTemperature(tree=True, by_depth=True)

    @classmethod
    def build(cls, context: DraftContext) -> MedusaDrafter:
        target, options = context.target, context.options(MedusaOptions)
        directory = context.head_weights("medusa")
        heads = load_medusa(directory, target.decoder, context.weight_options(directory))
        return cls(heads, target.ops, options.dynamic, target.pool.page_size, medusa_network(heads, target))

    def begin(self, seq: Sequence) -> None:
        """Start a sequence. Where its pages are filled up to the newest token, their last tap drafts at once."""
        held = self._book.begin(seq)
        self._last[seq] = held.feature if held.tokens == len(seq.tokens) - 1 else None

    def end(self, seq: Sequence) -> None:
        self._last.pop(seq, None)
        self._draft_temperature.end(seq)
        self._book.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the hidden row that chose the newest token, and the last of each page."""
        assert scores.taps is not None
        for seq, verdict, first, fed in zip(batch.sequences, verdicts, scores.first_rows, batch.feeds, strict=True):
            if seq in self._last and seq.finish_reason is None:
                taps = scores.taps[committed_rows(first, fed, verdict)]
                self._last[seq] = taps[-1]
                self._book.fill(seq, seq.cached - len(taps), seq.cached, taps)
        self._draft_temperature.commit(batch, verdicts, scores)

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        planned = zip(batch.sequences, plan.lengths, strict=True)
        active = [(seq, n) for seq, n in planned if n and self._last[seq] is not None]
        if not active:
            return Drafts.empty(len(batch.sequences))
        is_tree, nodes = plan.rule == "match", max(n for _, n in active)  # the other rules verify chains: each head's best guess
        make = _dynamic_tree if self._dynamic or not is_tree else self._static_tree
        width = min(nodes, _WIDEST) if self._dynamic else 1 + max(map(max, self._static_paths(nodes)))
        width = width if is_tree else 1
        guesses = self._guesses([seq for seq, _ in active], width)
        return drafts_for(batch, {seq: make(ranked, n) for (seq, n), ranked in zip(active, guesses, strict=True)})

    def _static_tree(self, guesses: Seq[_Guesses], nodes: int) -> Tree:
        paths = self._static_paths(nodes)
        place = {path: i for i, path in enumerate(paths)} | {(): ROOT}
        return Tree(
            [guesses[len(path) - 1].tokens[path[-1]] for path in paths],
            [place[path[:-1]] for path in paths],
            [math.prod(head.chances[rank] for head, rank in zip(guesses, path, strict=False)) for path in paths],
        )

    def _guesses(self, sequences: Seq[Sequence], width: int) -> list[list[_Guesses]]:
        """For each sequence, each head's best tokens in order."""
        taps = torch.stack([tap for seq in sequences if (tap := self._last[seq]) is not None])
        logits = self._runner.logits(taps)
        if not bool(logits.isfinite().all()):
            raise DrafterFault("the heads' logits are not finite")
        out: list[list[_Guesses]] = [[] for _ in sequences]
        by_head: list[list[DraftLogits]] = [[] for _ in sequences]
        for head, scores in enumerate(logits):
            # the path in between is not known yet; penalties see the text so far, a grammar speaks for the first head
            rows = [Row.at(seq)._replace(position=len(seq.tokens) + head) for seq in sequences]
            rows = rows if head == 0 else [row._replace(allowed=None) for row in rows]
            ranked = rank(scores, rows, width, [self._draft_temperature.temperature(row.params, head) for row in rows])
            for i, row in enumerate(rows):
                out[i].append(_Guesses(ranked.tokens[i].tolist(), ranked.chances[i].tolist()))
                by_head[i].append(DraftLogits(scores[i], row))
        self._draft_temperature.last = {seq: _by_depth(heads) for seq, heads in zip(sequences, by_head, strict=True)}
        return out


class _Guesses(NamedTuple):
    """One head's best tokens and their chances."""

    tokens: list[int]
    chances: list[float]


def _by_depth(heads: Seq[DraftLogits]) -> LogitsAt:
    """Look logits up by the depth of a path alone: a head does not know which tokens lead to it."""
    return lambda path: heads[len(path)] if len(path) < len(heads) else None


def _dynamic_tree(guesses: Seq[_Guesses], nodes: int) -> Tree:
    """The most probable combinations of the heads' guesses, heads taken as independent."""

    def below(depth: int, survival: float, _room: int) -> Iterable[tuple[float, int, int]]:
        if depth < len(guesses):
            for token, chance in zip(*guesses[depth], strict=True):
                if chance > 0:
                    yield survival * chance, token, depth + 1

    return best_first(nodes, 0, below)
