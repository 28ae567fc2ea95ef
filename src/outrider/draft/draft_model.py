"""An independent smaller model drafts a chain or a tree."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftTemperature, LogitsAt, logits_of_chain
from outrider.draft.growth import Growing, TreeShape, drafts_of, grow
from outrider.draft.options import WeightOptions, option
from outrider.draft.protocol import stack_q
from outrider.draft.reader import Chains, Reader, Text
from outrider.draft.retokenized import RetokenizedModel
from outrider.draft.vocabulary import WAYS, SameTokens, Vocabulary, load_related
from outrider.errors import DrafterFault
from outrider.model import Runner
from outrider.sampling import CORRUPTED, Key, Row, Stream, draw, probs_of, process

__all__ = ["DraftModel", "DraftModelOptions"]

T = TypeVar("T")


@dataclass(frozen=True)
class DraftModelOptions(TreeShape, WeightOptions):
    """The shape of the draft, and how the model and its tokens are read."""

    vocabulary: str = option("auto", "how another tokenizer's tokens become the target's", choices=WAYS)


class DraftModel:
    """Drafts with a smaller model.

    What it does: decodes ahead with a smaller model, ranking tokens by its own probabilities with the target's
        parameters and the target's noise, so that the two draws agree as often as the two
        distributions allow. q is divided by the draft temperature that would have guessed best so far. With
        `beam` or `branch` above 1 it grows a tree: the most valuable nodes are expanded, and the
        best nodes are kept. A model with another tokenizer drafts the tokens both have.
    When it helps: where a model 10 to 100 times smaller exists and decoding waits for memory.
    Cost: one forward of the small model per level; its own KV in the target's pages.
    Needs: KV beside the target's.
    Reference: Leviathan et al. 2211.17192; Chen et al. 2302.01318; coupling: Daliri et al. 2408.07978;
        trees: Li et al. 2406.16858; other tokenizers: Timor et al. 2502.05202.
    """

    Options = DraftModelOptions

    def __init__(self, runner: Runner, shape: TreeShape = TreeShape(), vocabulary: Vocabulary | None = None) -> None:  # noqa: B008 (frozen)
        self.needs = Needs(kv_bytes_per_token=runner.pool.token_bytes)
        self._vocabulary = vocabulary or SameTokens()
        self._reader = Reader(runner, self._vocabulary.foreign)
        self._shape = shape
        self._draft_temperature = DraftTemperature(tree=shape.branch > 1)
        self._is_chain = shape.is_chain and isinstance(self._vocabulary, SameTokens) and runner.drafts_chains > 0
        self._draft_logits: dict[Sequence, LogitsAt] = {}  # of the last draft

    @classmethod
    def build(cls, context: DraftContext) -> DraftModel | RetokenizedModel:
        options = context.options(DraftModelOptions)
        loaded = load_related(context, options.vocabulary)
        if loaded.vocabulary is not None:
            return cls(loaded.runner, options, loaded.vocabulary)
        assert context.tokenizer is not None
        assert loaded.tokenizer is not None
        return RetokenizedModel(loaded.runner, context.tokenizer, loaded.tokenizer)

    def begin(self, seq: Sequence) -> None:
        self._vocabulary.begin(seq)
        self._reader.begin(seq)

    def end(self, seq: Sequence) -> None:
        self._vocabulary.end(seq)
        self._reader.end(seq)
        self._draft_logits.pop(seq, None)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Compare both distributions at the nodes that became text."""
        for seq, verdict, root in zip(batch.sequences, verdicts, scores.roots, strict=True):
            logits_at = self._draft_logits.pop(seq, None)
            if logits_at is not None and seq.finish_reason is None:
                self._draft_temperature.learn(seq.request.params, logits_at, verdict, scores, root)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        texts = {seq: self._text(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True) if n}
        if plan.keep_q:
            return self._drawn(batch, plan, texts)
        if self._in_one_call(texts):
            return self._chains(batch, plan, texts)
        growing = []
        for seq, planned in zip(batch.sequences, plan.lengths, strict=True):
            text = texts.get(seq)
            size = 0 if text is None else len(text.ids)
            room = 0 if text is None else min(planned, self._reader.context - size)
            growing.append(Growing(seq, room, [] if text is None else self._reader.pages(seq), size))

        def start(active: Seq[Growing]) -> Tensor:
            return self._vocabulary.scores(self._reader.read([text for draft in active if (text := texts[draft.seq])]))

        shape = self._shape if plan.rule == "match" else TreeShape()  # the other rules verify chains
        grow(growing, shape, start, self._extend, self._draft_temperature)
        self._draft_logits = {draft.seq: draft.logits.get for draft in growing if draft.logits}
        return drafts_of(growing)

    def _in_one_call(self, texts: Mapping[Sequence, Text | None]) -> bool:
        """Whether the runner can draft whole chains: no tree, the target's ids, no penalties and the like."""
        return self._is_chain and (
            self._reader.runner.drafts_by_temperature or not any(seq.request.params.adjusts for seq in texts)
        )

    def _chains(self, batch: Batch, plan: Plan, texts: Mapping[Sequence, Text | None]) -> Drafts:
        """What `grow` gives for chains, by one call instead of one for each token."""
        planned = dict(zip(batch.sequences, plan.lengths, strict=True))
        readable = [text for text in texts.values() if text is not None]
        longest = self._reader.runner.drafts_chains
        lengths = [min(planned[text.seq], self._reader.context - len(text.ids), longest) for text in readable]
        self._draft_logits = {}
        if not readable:
            return Drafts.empty(len(batch.sequences))
        if plan.verify_all and self._reader.runner.overlaps_drafts:
            futures, wait = self._reader.draw(readable, lengths)

            def resolved() -> Drafts:
                drafts = _spread(batch, readable, *_sound(wait()))
                if batch.again:
                    self._reader.runner.launch_next_draft([batch.sequences.index(text.seq) for text in readable])
                return drafts

            return Drafts.promised(_of_all(batch, readable, futures), resolved)
        sharpness = [self._draft_temperature.temperature(text.seq.request.params) for text in readable]
        tokens, chances, logits = self._reader.draft(readable, lengths, sharpness, plan.confidence_threshold)
        for s, (text, chain) in enumerate(zip(readable, tokens, strict=True)):
            if logits is not None and not text.seq.request.params.greedy:
                self._draft_logits[text.seq] = logits_of_chain(chain, logits, s, Row.at(text.seq))
        return _spread(batch, readable, *_sound((tokens, chances)))

    def _text(self, seq: Sequence, planned: int) -> Text | None:
        """What the model reads before it drafts; None where it cannot."""
        text = self._vocabulary.text(seq)
        if text is None or len(text.ids) >= self._reader.context or not self._reader.room(seq, len(text.ids) + planned):
            return None
        return text

    def _extend(self, active: Seq[Growing]) -> Tensor:
        """The logits after every frontier node."""
        feeds = []
        for draft in active:
            feed = draft.feed()
            feeds.append(feed._replace(nodes=[self._vocabulary.own(token) for token in feed.nodes]))
            self._reader.extend(draft.seq, feeds[-1])
        runner, rows = self._reader.runner, sum(len(feed.nodes) for feed in feeds)
        return self._vocabulary.scores(runner.logits(runner.forward(feeds).last, range(rows)))

    def _drawn(self, batch: Batch, plan: Plan, texts: dict[Sequence, Text | None]) -> Drafts:
        """Chains drawn from q with noise of their own, and q: ratio tests must not share the target's noise."""
        chains: list[list[int]] = [[] for _ in batch.sequences]
        probs: list[list[Tensor]] = [[] for _ in batch.sequences]
        rooms = [
            0 if (text := texts.get(seq)) is None else min(n, self._reader.context - len(text.ids))
            for seq, n in zip(batch.sequences, plan.lengths, strict=True)
        ]
        while active := [b for b, room in enumerate(rooms) if len(chains[b]) < room]:
            longer = []
            for b in active:
                text = texts[batch.sequences[b]]
                assert text is not None
                longer.append(text._replace(ids=[*text.ids, *map(self._vocabulary.own, chains[b])]))
            for b, logits in zip(active, self._vocabulary.scores(self._reader.read(longer)), strict=True):
                seq = batch.sequences[b]
                row = Row.at(seq, chains[b])
                key = Key(row.seed, row.position, row.sample, Stream.DRAFT, seq.stats.rounds)
                picked = draw(process(logits, row)[None], None if row.params.greedy else [key])[0]
                if picked == CORRUPTED and row.allowed is not None:
                    rooms[b] = len(chains[b])  # it knows none of the tokens the grammar asks for
                    continue
                if picked == CORRUPTED:
                    raise DrafterFault("the draft's logits are not finite")
                chains[b].append(picked)
                probs[b].append(probs_of(logits, row))
        return Drafts(list(map(Tree.chain, chains)), stack_q(probs))


def _sound(drafted: Chains) -> Chains:
    """Chains and the chance that each token is reached."""
    tokens, chances = drafted
    if any(CORRUPTED in chain for chain in tokens):
        raise DrafterFault("the draft's logits are not finite")
    return tokens, [list(accumulate(chain, operator.mul)) for chain in chances]


def _spread(batch: Batch, texts: Seq[Text], tokens: Seq[list[int]], survival: Seq[list[float]]) -> Drafts:
    """Chains of some sequences as drafts of all."""
    return Drafts(list(map(Tree.chain, _of_all(batch, texts, tokens), _of_all(batch, texts, survival))))


def _of_all(batch: Batch, texts: Seq[Text], some: Seq[list[T]]) -> Seq[list[T]]:
    """A list for every sequence, empty where nothing was told."""
    if len(texts) == len(batch.sequences):
        return some
    places = {text.seq: row for text, row in zip(texts, some, strict=True)}
    return [places.get(seq, []) for seq in batch.sequences]
