"""DFlash: a small network guesses a whole block of tokens in one pass; a tree takes the likeliest paths through it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.chains_only import best_chain
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature, LogitsAt
from outrider.draft.growth import drafts_for
from outrider.draft.lattice import Lattice
from outrider.draft.options import DtypeOptions, option
from outrider.draft.reader import PageBook, committed_rows
from outrider.draft.window import limit_reason, log_context
from outrider.errors import DrafterFault
from outrider.heads import BlockCandidates, BlockHead, BlockRanker, BlockRows, BlockRunner, load_block
from outrider.heads.block_runner import divisors_of
from outrider.model import Feed
from outrider.ops import Ops
from outrider.sampling import Row, rank

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["BlockDrafter", "BlockOptions"]


@dataclass(frozen=True)
class BlockOptions(DtypeOptions):
    """The size of a block, and how the head is read."""

    block: int | None = option(None, "rows of a block, at most those it was trained with", 2, 64)
    candidates: int = option(12, "tokens of each slot that a tree chooses among", 1, 64)


@dataclass(slots=True)
class _Text:
    """What the head has read of a sequence, and the target's features that wait."""

    done: int = 0  # slots up to done - 1 hold what is made of the features there
    first: int = 0  # the first slot; those before were never filled, because nobody kept their features
    taps: list[Tensor] = field(default_factory=list)  # of positions done, done + 1, ...


class BlockDrafter:
    """Drafts with a block drafter (DFlash, DSpark, DFlash 2).

    What it does: a few layers read the newest token and masked slots after it, attend to features of the target at every
        position of the text, and guess all slots in one pass. The draft is the tree of the likeliest paths through the
        best tokens of the slots; scores of neighbouring tokens, where the head has them, keep its paths consistent.
    When it helps: where a head for the model exists; long drafts cost no more passes than short ones.
    Cost: one forward of a few layers over a block of rows, and the output matrix.
    Needs: the target's hidden states of a few layers; the head's layers of KV in the target's pages.
    Reference: DFlash 2602.06036, DSpark 2607.05147, DDTree 2604.12989.
    """

    Options = BlockOptions

    def __init__(
        self,
        head: BlockHead,
        pool: KVPool,
        ops: Ops,
        options: BlockOptions = BlockOptions(),
        runner: BlockRunner | None = None,
        ranker: BlockRanker | None = None,  # where another device runs the head
    ) -> None:
        config = head.config
        self._head = head
        self._ranker = ranker
        self._runner = runner or (None if ranker else BlockRunner(head, pool, ops))
        self._ops = ops
        self._block = min(options.block or config.block, config.block)
        self._candidates = config.selector.candidates if config.selector else options.candidates
        self.needs = Needs(taps=config.taps, kv_bytes_per_token=pool.token_bytes)
        self._draft_temperature = DraftTemperature(tree=True, by_depth=True)
        self._book = PageBook(pool.page_size)
        self._texts: dict[Sequence, _Text] = {}

    @classmethod
    def build(cls, context: DraftContext) -> BlockDrafter:
        target = context.target
        directory = context.head_weights("dflash")
        head = load_block(directory, target.decoder, context.weight_options(directory))
        shape = head.config.shape
        head.stretch(context.max_length)
        log_context("block drafter", shape.context, head.positions, context.max_length)
        options = context.options(BlockOptions)
        pool = KVPool(shape.depth, target.pool.pages, shape.kv_heads, target.pool.page_size, shape.head_dim)
        if target.device_name != "cpu":
            from outrider.heads.cuda_block import CudaBlockRunner

            return cls(head, pool, target.ops, options, ranker=CudaBlockRunner(head, cast("CudaRunner", target)))
        shared = None if target.stack is None or head.config.own_embedding else target.stack.embedding
        runner = BlockRunner(head, pool, target.ops, shared)
        return cls(head, pool, target.ops, options, runner)

    def begin(self, seq: Sequence) -> None:
        """Start a sequence. Where the head filled all pages that it begins with, nothing is missing."""
        held = self._book.begin(seq).tokens
        self._texts[seq] = _Text(seq.cached, 0 if held == seq.cached else seq.cached)

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)
        self._book.end(seq)
        self._draft_temperature.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the target's features of every token that became part of the text, and compare both distributions there."""
        assert scores.taps is not None
        for seq, verdict, first, fed in zip(batch.sequences, verdicts, scores.first_rows, batch.feeds, strict=True):
            if seq in self._texts:
                self._texts[seq].taps.append(scores.taps[committed_rows(first, fed, verdict)])
        self._draft_temperature.commit(batch, verdicts, scores)

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        active = [
            (self._length(seq, planned), seq, planned)
            for seq, planned in zip(batch.sequences, plan.lengths, strict=True)
            if planned and len(seq.tokens) - 1 > self._texts[seq].first and self._length(seq, planned) >= self._least
        ]
        if not active:
            return Drafts.empty(len(batch.sequences))
        reads = self._unread([seq for _, seq, _ in active])
        trees: dict[Sequence, Tree] = {}
        for length, group in groupby(sorted(active, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
            entries = [(seq, planned) for _, seq, planned in group]
            rooms = [planned for _, planned in entries]
            drawn = self._trees([seq for seq, _ in entries], length, rooms, reads)
            reads = (), None
            for (seq, _), tree in zip(entries, drawn, strict=True):
                trees[seq] = tree if plan.rule == "match" else tree.subset(best_chain(tree))
        return drafts_for(batch, trees)

    @property
    def _least(self) -> int:
        """Rows of a block that guesses one token."""
        return 1 if self._head.config.from_anchor else 2

    def _length(self, seq: Sequence, planned: int) -> int:
        """Rows of a block: as many as the plan has slots for, within the head's positions."""
        room = self._head.positions - len(seq.tokens) + 1
        if room < self._least:
            seq.stats.limit = limit_reason("block drafter", self._head.config.shape.context)
        return min(self._block, planned + 1, room)

    def _first_key(self, seq: Sequence, length: int) -> int:
        """The first slot that a block of that length sees: no farther back than the head's context reaches."""
        return max(self._texts[seq].first, len(seq.tokens) - 1 + length - self._head.config.shape.context)

    def _unread(self, sequences: Seq[Sequence]) -> tuple[Seq[Feed], Tensor | None]:
        """All features that the target has given since the last draft, and their places."""
        feeds, features = [], []
        for seq in sequences:
            text, end = self._texts[seq], len(seq.tokens) - 1
            taps = torch.cat(text.taps)[: end - text.done] if text.taps else torch.empty(0)
            if text.done + len(taps) != end:
                raise DrafterFault(f"features for {text.done + len(taps)} of {end} tokens")
            self._book.overwrite(seq.pages, text.done)
            if end > text.done:
                feeds.append(Feed(seq.pages, text.done, seq.tokens[text.done : end], first_key=text.first))
                features.append(taps)
            if not text.first:  # else its pages lack the slots before
                self._book.fill(seq, text.done, end)
            text.done, text.taps = end, []
        return feeds, torch.cat(features) if features else None

    def _trees(
        self, sequences: Seq[Sequence], length: int, rooms: Seq[int], reads: tuple[Seq[Feed], Tensor | None]
    ) -> list[Tree]:  # fmt: skip
        """Take in the features of `reads`, then draw the best tree over each sequence's block."""
        masks, slots = [self._head.config.mask] * (length - 1), length - self._least + 1
        feeds = [
            Feed(seq.pages, len(seq.tokens) - 1, (seq.tokens[-1], *masks), first_key=self._first_key(seq, length))
            for seq in sequences
        ]
        # the path in between is not known yet; penalties see the text so far, a grammar speaks for the first slot
        rows = [Row.at(seq)._replace(position=len(seq.tokens) + slot) for seq in sequences for slot in range(slots)]
        rows = [row if i % slots == 0 else row._replace(allowed=None) for i, row in enumerate(rows)]
        if self._ranker is not None:
            lattices = _lattices_of(self._ranker.candidates(feeds, rows, self._candidates, reads), len(sequences))
            return [lattice.tree(room) for lattice, room in zip(lattices, rooms, strict=True)]
        assert self._runner is not None
        if reads[1] is not None:
            self._runner.read(reads[0], reads[1])
        temperatures = [self._draft_temperature.temperature(row.params, i % slots) for i, row in enumerate(rows)]
        if self._runner.draws_trees and not any(seq.request.params.adjusts for seq in sequences):
            drawn = self._runner.trees(feeds, rows, rooms, temperatures, self._candidates)
            if len(drawn.trees) < len(sequences):
                raise DrafterFault("the head's logits are not finite")
            trees, logits = [Tree(*tree) for tree in drawn.trees], drawn.logits
        else:
            guesses = self._led(self._runner.guess(feeds), [seq.tokens[-1] for seq in sequences], rows, temperatures)
            lattices = self._lattices(sequences, guesses, rows, temperatures)
            trees, logits = [lattice.tree(room) for lattice, room in zip(lattices, rooms, strict=True)], guesses.logits
        for i, seq in enumerate(sequences):
            if not seq.request.params.greedy:
                part = slice(i * slots, (i + 1) * slots)
                self._draft_temperature.last[seq] = self._logits_at(logits[part], rows[part])
        return trees

    def _lattices(self, sequences: Seq[Sequence], guesses: BlockRows, rows: Seq[Row], temperatures: Seq[float]) -> list[Lattice]:
        """The best tokens of each sequence's slots and how they follow each other."""
        if not bool(guesses.logits.isfinite().all()):
            raise DrafterFault("the head's logits are not finite")
        ranked = rank(self._over_target(guesses.logits), rows, self._candidates, temperatures)
        made, slots = [], len(rows) // len(sequences)
        for i, seq in enumerate(sequences):
            part = slice(i * slots, (i + 1) * slots)
            lattice = Lattice.independent(ranked.tokens[part], ranked.chances[part])
            if self._head.pairs is not None:
                divisors = np.array(divisors_of(rows[part], temperatures[part]))
                lattice = self._joined(lattice, seq, guesses.rows[part], divisors)
            made.append(lattice)
        return made

    def _led(self, guesses: BlockRows, newest: Seq[int], rows: Seq[Row], temperatures: Seq[float]) -> BlockRows:
        """With the scores of pairs, each slot after the best token of the slot before; the first after the newest token.

        A selector (DFlash 2) scores the candidates that logits alone choose.
        """
        pairs, slots = self._head.pairs, len(rows) // len(newest)
        if pairs is None or pairs.projection is not None:
            return guesses
        led, before, right = guesses.logits.clone(), torch.tensor(newest), pairs.right.float().T
        for slot in range(slots):
            led[slot::slots] += pairs.before(before, guesses.rows[slot::slots], self._ops) @ right
            best = rank(self._over_target(led[slot::slots]), rows[slot::slots], 1, temperatures[slot::slots]).tokens[:, 0]
            before = torch.from_numpy(best).clamp_min(0)
        return guesses._replace(logits=led)

    def _joined(self, lattice: Lattice, seq: Sequence, rows: Tensor, divisors: npt.NDArray[np.float64]) -> Lattice:
        """The lattice with the head's scores of pairs, and its confidence."""
        pairs, confidence = self._head.pairs, self._head.confidence
        assert pairs is not None
        tokens = torch.from_numpy(lattice.tokens).clamp_min(0)
        newest = torch.full_like(tokens[:1], seq.tokens[-1])
        before = pairs.before(torch.cat((newest, tokens[:-1])), rows, self._ops)  # (slots, candidates, rank)
        scores = pairs.of_candidates(before, self._outputs(tokens)).double().numpy() / divisors[:, None, None]
        if pairs.projection is None:
            scores = scores - scores[:, :1]  # logits have the scores after the best token of the slot before
        lattice = lattice.joined(scores)
        if confidence is None:
            return lattice
        read = rows[:, None].expand(-1, tokens.shape[1], -1)
        read = torch.cat((read, before), -1) if self._head.config.confidence_of_pair else read
        return lattice.trusted(confidence(read).double().numpy())

    def _logits_at(self, logits: Tensor, rows: Seq[Row]) -> LogitsAt:
        """A slot's logits by the depth of a path; what pairs add to them is the same before and after any temperature."""

        def at(path: tuple[int, ...]) -> DraftLogits | None:
            return DraftLogits(self._over_target(logits[len(path)]), rows[len(path)]) if len(path) < len(logits) else None

        return at

    def _over_target(self, logits: Tensor) -> Tensor:
        """Scores over the target's vocabulary, -inf for tokens the head does not have."""
        ids = self._head.vocab_ids
        if ids is None:
            return logits
        over_target = torch.full((*logits.shape[:-1], self._head.config.shape.vocab), float("-inf"))
        over_target[..., ids] = logits
        return over_target

    def _outputs(self, tokens: Tensor) -> Tensor:
        """Numbers of the head's outputs for target ids."""
        ids = self._head.vocab_ids
        return tokens if ids is None else torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)


def _lattices_of(candidates: BlockCandidates, sequences: int) -> list[Lattice]:
    """The lattice of each of some sequences' blocks."""
    tokens, chances, scores, confidence = candidates
    if tokens[:, 0].min() < 0:
        raise DrafterFault("the head's logits are not finite")
    made, slots = [], len(tokens) // sequences
    for i in range(sequences):
        part = slice(i * slots, (i + 1) * slots)
        lattice = Lattice.independent(tokens[part], chances[part])
        if scores is not None:
            lattice = lattice.joined(scores[part])
        made.append(lattice if confidence is None else lattice.trusted(confidence[part]))
    return made
