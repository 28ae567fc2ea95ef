"""EAGLE: a one-layer head on the target's own features drafts a chain or a dynamic tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftLogits, DraftTemperature
from outrider.draft.growth import Growing, TreeShape, drafts_of, grow
from outrider.draft.pagebook import PageBook
from outrider.errors import DrafterFault
from outrider.heads import EagleHead, EagleNetwork, EagleRunner, eagle_network, load_eagle
from outrider.model import Feed
from outrider.ops import Ops
from outrider.sampling import Row

__all__ = ["EagleDrafter"]


@dataclass(slots=True)
class _State:
    """Rows whose KV rests on the target's features, and the features waiting to become rows."""

    done: int = 0  # rows up to done-1; row i joins feature i and token i + 1
    first: int = 0  # the first row; those before were never fed, because nobody kept their features
    taps: list[Tensor] = field(default_factory=list)  # of positions done, done + 1, ...
    hidden: dict[int, Tensor] = field(default_factory=dict)  # of the draft: node (or ROOT) -> the head's output there
    logits: dict[tuple[int, ...], DraftLogits] = field(default_factory=dict)  # of the draft, by path


class EagleDrafter:
    """Drafts with an EAGLE head.

    What it does: a single decoder layer reads the target's hidden states (three layers fused under
        EAGLE-3, the last one under EAGLE-1) beside the next token's embedding and predicts the token
        after; its own output stands in for the features of drafted tokens. With `beam` or `branch`
        above 1 it grows a dynamic tree: the most valuable nodes are expanded, all nodes are ranked
        by the chance of their path, and the best are kept (EAGLE-2).
    When it helps: almost always, where a head for the model exists; it costs far less than a model.
    Cost: one forward of one layer and an output matrix per level.
    Needs: the target's hidden states of a few layers; one layer of KV in the target's pages.
    Reference: Li et al. 2401.15077, 2406.16858, 2503.01840.
    """

    Options = TreeShape

    def __init__(
        self,
        head: EagleHead,
        pool: KVPool,
        ops: Ops,
        shape: TreeShape = TreeShape(),  # noqa: B008 (frozen)
        runner: EagleNetwork | None = None,  # where another device runs the head
    ) -> None:
        c = head.config
        self._head = head
        self._runner = runner or EagleRunner(head, pool, ops)
        self.needs = Needs(taps=c.taps, kv_bytes_per_token=pool.token_bytes)
        self._shape = shape
        self._draft_temperature = DraftTemperature(tree=shape.branch > 1)
        self._book = PageBook(pool.page_size)
        self._states: dict[Sequence, _State] = {}

    @classmethod
    def build(cls, context: DraftContext) -> EagleDrafter:
        target = context.target
        head = load_eagle(context.weights("eagle"), target.decoder, context.load_options)
        pool = context.pool_like_the_target(head.config.shape.kv_heads, head.config.shape.head_dim)
        return cls(head, pool, target.ops, context.options(TreeShape), eagle_network(head, pool, target))

    def begin(self, seq: Sequence) -> None:
        """Start a sequence. Where its pages are filled already, the last feature in them is enough to go on."""
        held = self._book.begin(seq)
        if held.feature is not None and held.tokens == seq.cached:
            self._states[seq] = _State(held.tokens - 1, taps=[held.feature[None]])
        else:
            self._states[seq] = _State(seq.cached, seq.cached)

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
        self._book.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the target's features of every token that became part of the text, and compare both distributions there."""
        assert scores.taps is not None
        for b, (seq, verdict) in enumerate(zip(batch.sequences, verdicts, strict=True)):
            state, after = self._states.get(seq), scores.first_rows[b] + batch.feeds[b]
            if state is None:
                continue
            whole = verdict.path == list(range(len(verdict.path)))  # a chain's rows lie side by side
            rows = (
                slice(scores.first_rows[b], after + len(verdict.path)) if whole else _rows(scores.first_rows[b], after, verdict)
            )
            state.taps.append(scores.taps[rows])
            if state.logits and seq.finish_reason is None:
                self._draft_temperature.learn(seq.request.params, state.logits.get, verdict, scores, scores.roots[b])
            state.hidden, state.logits = {}, {}

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        growing = [self._sprout(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        if self._runner.drafts_chains and self._shape.is_chain and plan.rule == "match":
            return self._chains(growing)
        shape = self._shape if plan.rule == "match" else TreeShape()  # the other rules verify chains
        grow(growing, shape, self._catch_up, self._extend, self._draft_temperature)
        for draft in growing:
            if draft.logits:
                self._states[draft.seq].logits = draft.logits
        return drafts_of(growing)

    def _sprout(self, seq: Sequence, planned: int) -> Growing:
        """An empty draft; without room where the newest token has no feature before it."""
        size = len(seq.tokens)
        able = planned > 0 and size - 1 > self._states[seq].first
        return Growing(seq, min(planned, self._head.config.shape.context - size) if able else 0, seq.pages, size)

    def _chains(self, growing: Seq[Growing]) -> Drafts:
        """Chains by one call instead of one for each token, drawn by temperature and noise alone."""
        active = [draft for draft in growing if draft.room > 0]
        if active:
            length = min(max(draft.room for draft in active), self._runner.drafts_chains)
            feeds, taps = self._waiting(active)
            drawn = self._runner.draft(feeds, taps, [Row.at(draft.seq) for draft in active], length)
            if int(drawn.tokens[:, :length].min()) < 0:
                raise DrafterFault("the draft's logits are not finite")
            for draft, tokens, chances in zip(active, drawn.tokens.tolist(), drawn.chances.tolist(), strict=True):
                for i in range(min(draft.room, length)):
                    draft.put(i - 1, tokens[i], chances[i])
        return drafts_of(growing)

    def _waiting(self, active: Seq[Growing]) -> tuple[list[Feed], list[Tensor]]:
        """Rows for all features the target has given since the last draft, and those; the last sees the newest token."""
        feeds, features = [], []
        for draft in active:
            state, tokens = self._states[draft.seq], draft.seq.tokens
            taps = torch.cat(state.taps)[: len(tokens) - 1 - state.done]
            if state.done + len(taps) != len(tokens) - 1:
                raise DrafterFault(f"features for {state.done + len(taps)} of {len(tokens) - 1} tokens")
            feeds.append(Feed(draft.pages, state.done + 1, tokens[state.done + 1 :], first_key=state.first + 1))
            features.append(taps)
            self._note(draft.seq, state, taps)
            state.done, state.taps = len(tokens) - 1, []
        return feeds, features

    def _catch_up(self, active: Seq[Growing]) -> Tensor:
        """Those rows through the head; logits after the newest tokens."""
        feeds, features = self._waiting(active)
        hidden, row = self._runner.forward(feeds, self._runner.fuse(torch.cat(features))), -1
        for draft, feed in zip(active, feeds, strict=True):
            row += len(feed.tokens)
            self._states[draft.seq].hidden[ROOT] = hidden[row]
        return self._logits(torch.stack([self._states[draft.seq].hidden[ROOT] for draft in active]))

    def _note(self, seq: Sequence, state: _State, taps: Tensor) -> None:
        """Book the pages that are full with these rows. Slot i + 1 holds row i, so a page's last feature has no row yet."""
        size = self._book.page_size
        self._book.overwrite(seq.pages, state.done + 1)
        if state.first:
            return  # its pages lack the rows before
        for index in range(state.done // size, (state.done + len(taps)) // size):
            self._book.fill(seq, index, taps[(index + 1) * size - 1 - state.done].clone())

    def _extend(self, active: Seq[Growing]) -> Tensor:
        """Run the head on every frontier node."""
        feeds, features, grown = [], [], []
        for draft in active:
            state = self._states[draft.seq]
            feeds.append(draft.feed()._replace(first_key=state.first + 1))
            features += [state.hidden[draft.tree.parents[node]] for node in draft.frontier]
            grown += [(state, node) for node in draft.frontier]
        hidden = self._runner.forward(feeds, torch.stack(features))
        for row, (state, node) in enumerate(grown):
            state.hidden[node] = hidden[row]
        return self._logits(hidden[: len(grown)])

    def _logits(self, hidden: Tensor) -> Tensor:
        """Scores over the target's vocabulary, -inf where the head has no say."""
        logits = self._runner.logits(hidden)
        ids = self._head.vocab_ids
        if ids is None:
            return logits
        whole = torch.full((len(hidden), self._head.config.shape.vocab), float("-inf"))
        whole[:, ids] = logits
        return whole


def _rows(first: int, after: int, verdict: Verdict) -> list[int]:
    """Rows of the tokens that were fed and of the nodes that were accepted."""
    return [*range(first, after), *(after + node for node in verdict.path)]
