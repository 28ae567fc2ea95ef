"""EAGLE: a one-layer head on the target's own features drafts a chain or a dynamic tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft.protocol import Guess
from outrider.errors import DrafterFault, InvalidParameter
from outrider.heads import EagleHead, EagleRunner
from outrider.model import Feed
from outrider.ops import Ops
from outrider.sampling import Row, rank

__all__ = ["EagleDrafter", "TreeShape"]


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
class _State:
    """Rows whose KV rests on the target's features, and the features waiting to become rows."""

    done: int = 0  # rows 0..done-1; row i joins feature i and token i + 1
    taps: list[Tensor] = field(default_factory=list)  # of positions done, done + 1, ...


@dataclass(slots=True)
class _Growing:
    """One sequence's draft while it grows. Nodes are in the order they were thought of."""

    seq: Sequence
    room: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)  # chance that the whole path is accepted
    slot_of: dict[int, int] = field(default_factory=dict)  # node -> its place among the nodes fed so far
    fed: list[int] = field(default_factory=list)
    hidden: dict[int, Tensor] = field(default_factory=dict)  # node (or ROOT) -> the head's output there
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes to put children under

    def path(self, node: int) -> list[int]:
        """Tokens from the root down to a node."""
        out: list[int] = []
        while node != ROOT:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]

    def best(self) -> Guess:
        """The `room` nodes of most value. A parent is never worth less than its child, so the tree stays whole."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.value[node], node))[: self.room]
        kept = sorted(order)
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        return Guess(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [self.value[node] for node in kept],
        )


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

    def __init__(self, head: EagleHead, pool: KVPool, ops: Ops, shape: TreeShape = TreeShape()) -> None:  # noqa: B008 (frozen)
        c = head.config
        self.needs = Needs(taps=c.taps, kv_bytes_per_token=KVPool.bytes_per_token(1, c.shape.kv_heads, c.shape.head_dim))
        self._head = head
        self._runner = EagleRunner(head, pool, ops)
        self._shape = shape
        self._states: dict[Sequence, _State] = {}

    def begin(self, seq: Sequence) -> None:
        self._states[seq] = _State()

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Keep the target's features of every token that became part of the text."""
        assert scores.taps is not None
        for seq, fed, first, verdict in zip(batch.sequences, batch.feeds, scores.first_rows, verdicts, strict=True):
            rows = [*range(first, first + fed), *(first + fed + node for node in verdict.path)]
            if seq in self._states:
                self._states[seq].taps.append(scores.taps[rows])

    @torch.inference_mode()
    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        context = self._head.config.shape.context
        growing = [_Growing(seq, min(n, context - len(seq.tokens))) for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        active = [own for own in growing if own.room > 0 and len(own.seq.tokens) > 1]  # a first token has no feature before it
        if active:
            self._catch_up(active)
        for level in range(1, (self._shape.depth or max(plan.lengths)) + 1):
            active = [own for own in active if own.frontier and (self._shape.beam > 1 or len(own.tokens) < own.room)]
            if not active:
                break
            self._branch(active)
            if level < (self._shape.depth or max(plan.lengths)):
                self._expand(active)
        best = [own.best() for own in growing]
        return Drafts.trees([(own.tokens, own.parents) for own in best], survival=[own.survival for own in best])

    def _catch_up(self, active: Seq[_Growing]) -> None:
        """Rows for all features the target has given since the last draft; the last one sees the newest token."""
        feeds, features = [], []
        for own in active:
            state, tokens = self._states[own.seq], own.seq.tokens
            taps = torch.cat(state.taps)[: len(tokens) - 1 - state.done]
            if state.done + len(taps) != len(tokens) - 1:
                raise DrafterFault(f"features for {state.done + len(taps)} of {len(tokens) - 1} tokens")
            feeds.append(Feed(own.seq.pages, state.done + 1, tokens[state.done + 1 :]))
            features.append(self._runner.fuse(taps))
            state.done, state.taps = len(tokens) - 1, []
        hidden, row = self._runner.forward(feeds, torch.cat(features)), -1
        for own, feed in zip(active, feeds, strict=True):
            row += len(feed.tokens)
            own.hidden[ROOT] = hidden[row]

    def _branch(self, active: Seq[_Growing]) -> None:
        """Put children under every frontier node, best guesses first."""
        places = [(own, node) for own in active for node in own.frontier]
        hidden = torch.stack([own.hidden[node] for own, node in places])
        logits = self._logits(hidden)
        ranked = rank(logits, [Row.at(own.seq, own.path(node)) for own, node in places], self._shape.branch)
        for own in active:
            own.frontier = []
        for (own, node), tokens, chances in zip(places, ranked.tokens.tolist(), ranked.chances.tolist(), strict=True):
            above = 1.0 if node == ROOT else own.value[node]
            for token, chance in zip(tokens, chances, strict=True):
                own.frontier.append(len(own.tokens))
                own.tokens.append(token)
                own.parents.append(node)
                own.value.append(above * chance)

    def _expand(self, active: Seq[_Growing]) -> None:
        """Run the head on the most valuable new nodes, as many as the beam and the slots allow."""
        feeds, features, grown = [], [], []
        for own in active:
            own.frontier.sort(key=lambda node: (-own.value[node], node))
            own.frontier = own.frontier[: min(self._shape.beam, own.room - len(own.fed))]
            if not own.frontier:
                continue
            known = len(own.fed)
            for node in own.frontier:
                own.slot_of[node] = len(own.fed)
                own.fed.append(node)
            parents = [own.slot_of.get(own.parents[node], ROOT) for node in own.fed]
            nodes = [own.tokens[node] for node in own.frontier]
            feeds.append(Feed(own.seq.pages, len(own.seq.tokens), (), nodes, parents, known))
            features += [own.hidden[own.parents[node]] for node in own.frontier]
            grown += [(own, node) for node in own.frontier]
        if grown:
            hidden = self._runner.forward(feeds, torch.stack(features))
            for row, (own, node) in enumerate(grown):
                own.hidden[node] = hidden[row]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Scores over the target's vocabulary, -inf where the head has no say."""
        own = self._runner.logits(hidden)
        if not bool(own.isfinite().all()):
            raise DrafterFault("the head's logits are not finite")
        ids = self._head.vocab_ids
        if ids is None:
            return own
        whole = torch.full((len(hidden), self._head.config.shape.vocab), float("-inf"))
        whole[:, ids] = own
        return whole
