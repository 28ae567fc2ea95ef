"""An independent smaller model drafts a chain or a tree."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outrider.core import Batch, Drafts, FutureTokens, Needs, PendingDrafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftTemperature, logits_of_chain
from outrider.draft.growth import Growing, TreeShape, chain_of, drafts_for, draw_apart, grow, stack_q
from outrider.draft.options import WeightOptions, option
from outrider.draft.reader import Chains, Reader, Text
from outrider.draft.related import load_related
from outrider.draft.retokenized import RetokenizedModel
from outrider.draft.vocabulary import WAYS, SameTokens, Vocabulary
from outrider.draft.window import limit_reason
from outrider.errors import DrafterFault
from outrider.model import Runner
from outrider.model.runner import PendingChains, TreeGrowth
from outrider.sampling import CORRUPTED, Row

__all__ = ["DraftModel", "DraftModelOptions"]

_DEEPEST = 32  # levels of a tree that a runner grows


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
        self.needs = Needs(kv_bytes_per_token=runner.pool.token_bytes, overlaps=runner.overlaps_drafts, branches=shape.branch > 1)
        self._vocabulary = vocabulary or SameTokens()
        self._reader = Reader(runner, self._vocabulary.foreign)
        self._shape = shape
        self._draft_temperature = DraftTemperature(tree=shape.branch > 1)
        self._is_chain = shape.is_chain and not self._vocabulary.foreign and runner.drafts_chains > 0

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
        self._reader.begin(seq)

    def end(self, seq: Sequence) -> None:
        self._vocabulary.end(seq)
        self._reader.end(seq)
        self._draft_temperature.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._draft_temperature.commit(batch, verdicts, scores)

    def propose(self, batch: Batch, plan: Plan) -> Drafts | PendingDrafts:
        texts, rooms = [], []
        for seq, planned in zip(batch.sequences, plan.lengths, strict=True):
            if planned and (text := self._text(seq, planned)):
                texts.append(text)
                rooms.append(min(planned, self._reader.positions - len(text.ids)))
        if not texts:
            return Drafts.empty(len(batch.sequences))
        if plan.keep_q:
            return self._drawn(batch, texts, rooms)
        if self._in_one_call(texts):
            return self._chains(batch, plan, texts, rooms)
        if self._grows_on_device(plan, texts):
            return self._grown(batch, texts, rooms)
        by_sequence = {text.seq: text for text in texts}

        def start(active: Seq[Growing]) -> Tensor:
            return self._vocabulary.scores(self._reader.read([by_sequence[draft.seq] for draft in active]))

        growing = [
            Growing(text.seq, room, self._reader.pages(text.seq), len(text.ids), self._reader.rotary_start(text.seq))
            for text, room in zip(texts, rooms, strict=True)
        ]
        for draft in growing:
            draft.state = self._reader.state(draft.seq)
        shape = self._shape if plan.rule == "match" else TreeShape()  # the other rules verify chains
        return drafts_for(batch, grow(growing, shape, start, self._extend, self._draft_temperature))

    def propose_next(self, batch: Batch, plan: Plan) -> PendingDrafts | None:
        planned = [b for b, length in enumerate(plan.lengths) if length]
        drafting = [batch.sequences[b] for b in planned]
        lengths = [min(plan.lengths[b], self._reader.runner.drafts_chains) for b in planned]
        drawn = self._reader.draw_next(drafting, [batch.future[b] for b in planned], lengths)
        if drawn is None:
            return None
        pending, wait = drawn

        def resolved() -> Drafts:
            texts = [text for seq in drafting if self._reader.knows(seq) and (text := self._vocabulary.text(seq))]
            return _chains_for(batch, texts, wait(texts))

        return _pending_for(batch, drafting, pending, resolved)

    def _text(self, seq: Sequence, planned: int) -> Text | None:
        """What the model reads before it drafts; None where it cannot."""
        text = self._vocabulary.text(seq)
        if text is not None and len(text.ids) >= self._reader.positions:
            seq.stats.limit = limit_reason("draft model", self._reader.context)
            return None
        if text is None or not self._reader.room(seq, len(text.ids) + planned):
            return None
        return text

    def _in_one_call(self, texts: Seq[Text]) -> bool:
        """Whether the runner can draft whole chains: no tree, the target's ids, no penalties and the like."""
        return self._is_chain and (
            self._reader.runner.drafts_by_temperature or not any(text.seq.request.params.adjusts for text in texts)
        )

    def _grows_on_device(self, plan: Plan, texts: Seq[Text]) -> bool:
        """Whether the runner can grow trees: of the target's ids, by temperature and noise."""
        runner = self._reader.runner
        if not runner.grows_trees or self._shape.branch == 1 or self._vocabulary.foreign or plan.rule != "match":
            return False
        return runner.drafts_by_temperature or not any(text.seq.request.params.adjusts for text in texts)

    def _grown(self, batch: Batch, texts: Seq[Text], rooms: Seq[int]) -> Drafts:
        """Trees of the likeliest nodes, of which the device sees all logits and the host some tokens and chances."""
        shape = self._shape
        growth = TreeGrowth(shape.depth or _DEEPEST, shape.branch, shape.beam if shape.beam > 1 else None)
        self._draft_temperature.last.clear()
        trees = self._reader.grow(texts, rooms, growth)
        if not trees:
            raise DrafterFault("the draft's logits are not finite")
        return drafts_for(batch, {text.seq: tree for text, tree in zip(texts, trees, strict=True)})

    def _chains(self, batch: Batch, plan: Plan, texts: Seq[Text], rooms: Seq[int]) -> Drafts | PendingDrafts:
        """What `grow` gives for chains, by one call instead of one for each token."""
        runner, last = self._reader.runner, self._draft_temperature.last
        lengths = [min(room, runner.drafts_chains) for room in rooms]
        last.clear()
        if plan.verify_all and runner.overlaps_drafts:
            pending, wait = self._reader.draw(texts, lengths)
            return _pending_for(batch, [text.seq for text in texts], pending, lambda: _chains_for(batch, texts, wait()))
        temperatures = [self._draft_temperature.temperature(text.seq.request.params) for text in texts]
        tokens, chances, logits = self._reader.draft(texts, lengths, temperatures, plan.confidence_threshold)
        for s, (text, chain) in enumerate(zip(texts, tokens, strict=True)):
            if logits is not None and not text.seq.request.params.greedy:
                last[text.seq] = logits_of_chain(chain, logits, s, Row.at(text.seq))
        return _chains_for(batch, texts, (tokens, chances))

    def _extend(self, active: Seq[Growing]) -> Tensor:
        """The logits after every frontier node."""
        feeds = []
        for draft in active:
            feed = draft.feed()
            nodes = [self._vocabulary.draft_id(token) for token in feed.nodes]
            feeds.append(feed._replace(nodes=nodes, first_key=self._reader.first_key(draft.seq)))
            self._reader.extend(draft.seq, feeds[-1])
        runner, rows = self._reader.runner, sum(len(feed.nodes) for feed in feeds)
        return self._vocabulary.scores(runner.logits(runner.forward(feeds).last, range(rows)))

    def _drawn(self, batch: Batch, texts: Seq[Text], rooms: Seq[int]) -> Drafts:
        """Chains drawn from q with separate noise, and q."""
        chains: dict[Sequence, list[int]] = {seq: [] for seq in batch.sequences}
        probs: dict[Sequence, list[Tensor]] = {seq: [] for seq in batch.sequences}
        active = list(zip(texts, rooms, strict=True))
        while active:
            longer = [text._replace(ids=[*text.ids, *map(self._vocabulary.draft_id, chains[text.seq])]) for text, _ in active]
            drawing, active = active, []
            for (text, room), logits in zip(drawing, self._vocabulary.scores(self._reader.read(longer)), strict=True):
                chain, row = chains[text.seq], Row.at(text.seq, chains[text.seq])
                token, q = draw_apart(logits, row, text.seq)
                if token == CORRUPTED and row.allowed is not None:
                    continue  # it knows none of the tokens that the grammar allows
                if token == CORRUPTED:
                    raise DrafterFault("the draft's logits are not finite")
                chain.append(token)
                probs[text.seq].append(q)
                if len(chain) < room:
                    active.append((text, room))
        return Drafts(list(map(Tree.chain, chains.values())), stack_q(list(probs.values())))


def _chains_for(batch: Batch, texts: Seq[Text], drafted: Chains) -> Drafts:
    """Chains after some sequences' texts as drafts of a batch."""
    rows = zip(texts, *drafted, strict=True)
    return drafts_for(batch, {text.seq: chain_of(tokens, chances) for text, tokens, chances in rows})


def _pending_for(batch: Batch, drafting: Seq[Sequence], pending: PendingChains, resolve: Callable[[], Drafts]) -> PendingDrafts:
    """Chains of some sequences, still on the device, as drafts of a batch."""
    future_of = dict(zip(drafting, pending.future, strict=True))
    chains = [future_of.get(seq, FutureTokens(0, 0)) for seq in batch.sequences]
    return PendingDrafts.chains(chains, resolve, pending.is_intact)
