"""EAGLE: a one-layer head on the target's own features drafts a chain or a dynamic tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.core import ROOT, Batch, Drafts, FutureTokens, Needs, PendingDrafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.draft_temperature import DraftTemperature, logits_of_tree
from outrider.draft.growth import Growing, TreeShape, chain_of, drafts_for, grow
from outrider.draft.options import DtypeOptions
from outrider.draft.reader import PageBook, committed_rows
from outrider.draft.window import AHEAD, limit_reason, log_context
from outrider.errors import DrafterFault
from outrider.heads import EagleHead, EagleNetwork, EagleRunner, eagle_network, load_eagle
from outrider.model import Feed
from outrider.ops import Ops
from outrider.ops.cuda.tree_sizes import MAX_KEPT
from outrider.sampling import Row

__all__ = ["EagleDrafter", "EagleOptions"]


@dataclass(slots=True)
class _Features:
    """Rows whose KV rests on the target's features, and the features waiting to become rows."""

    done: int = 0  # rows up to done-1; row i joins feature i and token i + 1
    first: int = 0  # the first row; those before were never fed, because nobody kept their features
    taps: list[Tensor] = field(default_factory=list)  # of positions done, done + 1, ...
    hidden: dict[int, Tensor] = field(default_factory=dict)  # of the draft: node (or ROOT) -> the head's output there


@dataclass(frozen=True)
class EagleOptions(TreeShape, DtypeOptions):
    """The shape of the draft, and how the head is read."""


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

    Options = EagleOptions

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
        context = c.shape.context
        self._sight = context - min(AHEAD, context // 4) if self._runner.positions > context else context  # slots that rows see
        self._shape = shape
        self._draft_temperature = DraftTemperature(tree=shape.branch > 1)
        self._book = PageBook(pool.page_size)
        self._states: dict[Sequence, _Features] = {}

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        directory = context.head_weights("eagle")
        return cls.serving(load_eagle(directory, context.target.decoder, context.weight_options(directory)), context)

    @classmethod
    def serving(cls, head: EagleHead, context: DraftContext) -> Self:
        """A drafter with this head."""
        target, shape = context.target, context.options(EagleOptions)
        if target.device_name != "cpu":
            shape.require_device()
        c, pages = head.config.shape, target.pool.pages
        pool = KVPool(1, pages, c.kv_heads, target.pool.page_size, c.head_dim)  # one layer, under the target's page ids
        network = eagle_network(head, pool, target, context.max_length)
        log_context(f"{context.config.method} head", c.context, network.positions, context.max_length)
        return cls(head, pool, target.ops, shape, network)

    def begin(self, seq: Sequence) -> None:
        """Start a sequence. Where its pages are filled already, the last feature in them is enough to go on."""
        held = self._book.begin(seq)
        if held.feature is not None and held.tokens == seq.cached:
            self._states[seq] = _Features(held.tokens - 1, taps=[held.feature[None]])
        else:
            self._states[seq] = _Features(seq.cached, seq.cached)

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
        self._book.end(seq)
        self._draft_temperature.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the target's features of every token that became part of the text, and compare both distributions there."""
        assert scores.taps is not None
        for seq, verdict, first, fed in zip(batch.sequences, verdicts, scores.first_rows, batch.feeds, strict=True):
            state = self._states.get(seq)
            if state is not None:
                state.taps.append(scores.taps[committed_rows(first, fed, verdict)])
                state.hidden = {}
        self._draft_temperature.commit(batch, verdicts, scores)

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts | PendingDrafts:
        growing = [self._sprout(seq, n) for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        if self._runner.drafts_chains and self._shape.is_chain and plan.rule == "match":
            active = [draft for draft in growing if draft.room > 0]
            if plan.verify_all and active and self._runner.launches_chains(len(active)):
                return self._pending_chains(batch, active)
            return drafts_for(batch, self._chains([draft for draft in growing if draft.room > 0]))
        shape = self._shape if plan.rule == "match" else TreeShape()  # the other rules verify chains
        adjusted = self._runner.applies_parameters and any(draft.seq.request.params.adjusts for draft in growing)
        if self._runner.grows_trees and not adjusted:
            active = [draft for draft in growing if draft.room > 0]
            if plan.verify_all and (pending := self._pending(batch, active, shape)):
                return pending
            return drafts_for(batch, self._in_one_call(active, shape, plan.confidence_threshold))
        return drafts_for(batch, grow(growing, shape, self._catch_up, self._extend, self._draft_temperature))

    def _sprout(self, seq: Sequence, planned: int) -> Growing:
        """An empty draft; without room where the newest token has no feature before it, or no position is left."""
        size = len(seq.tokens)
        room = self._runner.positions - size
        if room <= 0:
            seq.stats.limit = limit_reason("head", self._head.config.shape.context)
        able = planned > 0 and size - 1 > self._states[seq].first
        return Growing(seq, min(planned, room) if able else 0, seq.pages, size)

    def _first_key(self, state: _Features, size: int) -> int:
        """The first slot that rows after a text of this size see."""
        return max(state.first + 1, size - self._sight)

    def _chains(self, active: Seq[Growing]) -> dict[Sequence, Tree]:
        """Chains by one call instead of one for each token, drawn by temperature and noise alone."""
        if not active:
            return {}
        length = min(max(draft.room for draft in active), self._runner.drafts_chains)
        feeds, taps = self._waiting(active)
        drawn = self._runner.draft(feeds, taps, [Row.at(draft.seq) for draft in active], length)
        rows = zip(active, drawn.tokens.tolist(), drawn.chances.tolist(), strict=True)
        return {draft.seq: chain_of(tokens[: draft.room], chances[: draft.room]) for draft, tokens, chances in rows}

    def _pending_chains(self, batch: Batch, active: Seq[Growing]) -> PendingDrafts:
        """Chains that the target's forward reads on the device."""
        length = min(max(draft.room for draft in active), self._runner.drafts_chains)
        feeds, taps = self._waiting(active)
        future, resolve, is_intact = self._runner.launch_chains(feeds, taps, [Row.at(draft.seq) for draft in active], length)

        def resolved() -> Drafts:
            rows = zip(active, *resolve(), strict=True)
            return drafts_for(batch, {d.seq: chain_of(tokens[: d.room], chances[: d.room]) for d, tokens, chances in rows})

        future_of = {
            draft.seq: replace(tokens, count=min(tokens.count, draft.room))
            for draft, tokens in zip(active, future, strict=True)
        }  # fmt: skip
        chains = [future_of.get(seq, FutureTokens(0, 0)) for seq in batch.sequences]
        return PendingDrafts.chains(chains, resolved, is_intact)

    def _in_one_call(self, active: Seq[Growing], shape: TreeShape, floor: float) -> dict[Sequence, Tree]:
        """What `grow` gives, by one call of the head's runner."""
        if not active:
            return {}
        feeds, taps = self._waiting(active)
        rows, rooms = [Row.at(draft.seq) for draft in active], [draft.room for draft in active]
        temperatures = [self._draft_temperature.temperature(row.params) for row in rows]
        growth = shape.growth(rooms, floor)
        grown, logits = self._runner.grow(feeds, taps, rows, rooms, temperatures, growth)
        if not grown:
            raise DrafterFault("the draft's logits are not finite")
        trees = {draft.seq: Tree(*nodes[:3]) for draft, nodes in zip(active, grown, strict=True)}
        if logits is not None:
            self._draft_temperature.last = {
                draft.seq: logits_of_tree(
                    trees[draft.seq], i, grown[i].places, lambda place: self._over_target(logits[place]), rows[i]
                )
                for i, draft in enumerate(active)
                if not rows[i].params.greedy
            }
        return trees

    def _pending(self, batch: Batch, active: Seq[Growing], shape: TreeShape) -> PendingDrafts | None:
        """Trees that the target's forward reads on the device; None where the forward or the head's runner cannot do it."""
        decoding = all(fed == 1 and batch.samples(b) for b, fed in enumerate(batch.feeds))
        rooms = {draft.seq: min(draft.room, MAX_KEPT) for draft in active}
        growth, rows_verified = shape.growth([*rooms.values(), 1]), len(batch.sequences) + sum(rooms.values())
        if not active or not decoding or not self._runner.launches_trees(rows_verified, len(active), growth):
            return None
        firsts = accumulate((1 + rooms.get(seq, 0) for seq in batch.sequences), initial=0)
        root_of = dict(zip(batch.sequences, firsts, strict=False))
        feeds, taps = self._waiting(active)
        rows = [Row.at(draft.seq) for draft in active]
        places = [(rooms[draft.seq], root_of[draft.seq]) for draft in active]
        launched = self._runner.launch_trees(feeds, taps, rows, places, growth)

        def resolved() -> Drafts:
            grown = launched.resolve()
            if not grown:
                raise DrafterFault("the draft's logits are not finite")
            return drafts_for(batch, {draft.seq: Tree(*tree[:3]) for draft, tree in zip(active, grown, strict=True)})

        trees = [Tree.chain([0] * rooms.get(seq, 0)) for seq in batch.sequences]
        return PendingDrafts(trees, resolved, launched.is_intact, launched.place)

    def _waiting(self, active: Seq[Growing]) -> tuple[list[Feed], list[Tensor]]:
        """Rows for all features the target has given since the last draft, and those; the last sees the newest token."""
        feeds, features = [], []
        for draft in active:
            state, tokens = self._states[draft.seq], draft.seq.tokens
            taps = torch.cat(state.taps)[: len(tokens) - 1 - state.done]
            if state.done + len(taps) != len(tokens) - 1:
                raise DrafterFault(f"features for {state.done + len(taps)} of {len(tokens) - 1} tokens")
            if (unseen := len(tokens) - 1 - self._sight - state.done) > 0:  # rows that none will see
                taps = taps[unseen:]
                state.first = state.done = state.done + unseen
            first_key = self._first_key(state, len(tokens))
            feeds.append(Feed(draft.pages, state.done + 1, tokens[state.done + 1 :], first_key=first_key))
            features.append(taps)
            self._book.overwrite(draft.pages, state.done + 1)
            if not state.first:  # else its pages lack the rows before
                # Slot i + 1 holds row i, so a page's last feature has no row yet.
                self._book.fill(draft.seq, state.done, len(tokens) - 1, taps)
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

    def _extend(self, active: Seq[Growing]) -> Tensor:
        """Run the head on every frontier node."""
        feeds, features, grown = [], [], []
        for draft in active:
            state = self._states[draft.seq]
            feeds.append(draft.feed()._replace(first_key=self._first_key(state, draft.size)))
            features += [state.hidden[draft.tree.parents[node]] for node in draft.frontier]
            grown += [(state, node) for node in draft.frontier]
        hidden = self._runner.forward(feeds, torch.stack(features))
        for row, (state, node) in enumerate(grown):
            state.hidden[node] = hidden[row]
        return self._logits(hidden[: len(grown)])

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._over_target(self._runner.logits(hidden))

    def _over_target(self, logits: Tensor) -> Tensor:
        """Scores over the target's vocabulary, -inf for tokens the head does not have."""
        ids = self._head.vocab_ids
        if ids is None:
            return logits
        over_target = torch.full((*logits.shape[:-1], self._head.config.shape.vocab), float("-inf"))
        over_target[..., ids] = logits
        return over_target
