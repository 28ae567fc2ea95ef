"""A mixture: several drafters guess for the same round, and the best of what they say becomes one tree."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.calibration import Calibration, verified_nodes
from outrider.draft.context import DraftContext
from outrider.draft.options import WeightOptions, option
from outrider.draft.protocol import Drafter, Lookup
from outrider.errors import InvalidParameter

__all__ = ["Member", "MixtureDrafter", "MixtureOptions", "needs_of", "scores_for"]

_SILENT, _OTHERWISE, _AGREES = -99, -98, -97  # a member guesses nothing where a node is, or other tokens, or this one too
_SURE = 6  # claims are told apart up to odds of e^6
_WORTH_FOLLOWING = 0.05  # survival below which no lookup is asked to go on


class Member(NamedTuple):
    """A drafter of the mixture and the most nodes it is asked for."""

    drafter: Drafter
    draft_tokens: int = 256


def needs_of(members: Seq[Drafter], attached: Iterable[int]) -> Needs:
    """What some of several drafters need, and the KV of all."""
    needs = [members[m].needs for m in attached]
    return Needs(
        taps=tuple(sorted({tap for need in needs for tap in need.taps})),
        scores=any(need.scores for need in needs),
        kv_bytes_per_token=sum(member.needs.kv_bytes_per_token for member in members),
    )


def scores_for(member: Drafter, scores: Scores, taps: tuple[int, ...]) -> Scores:
    """Scores with only those of the taps that a drafter asked for."""
    wanted = member.needs.taps
    return scores if wanted == taps else replace(scores, taps=_columns(scores.taps, taps, wanted) if wanted else None)


@dataclass(frozen=True)
class MixtureOptions(WeightOptions):
    """The members, and how their guesses become one draft."""

    members: tuple[SpeculationConfig, ...] = option((), "drafters whose guesses are merged")
    merge: bool = option(True, "0: the member that expects most drafts alone")
    splice: bool = option(True, "lookups go on where a branch ends")
    enough: float = option(math.inf, "later members do not draft where earlier ones expect this many tokens", 0)

    def __post_init__(self) -> None:
        if not self.enough > 0:
            raise InvalidParameter("enough", f"must be positive, got {self.enough}")


class MixtureDrafter:
    """Merges the guesses of several drafters.

    What it does: every member drafts, and nodes with the same path become one. What each member claims
        about a node (the chance that it follows its parent, or silence, or that it guesses otherwise)
        is looked up in a table of how often nodes of which the same was claimed came true, so members
        are weighed against each other by the record. The most likely nodes within the budget are the
        draft. Where a branch ends, lookup members are asked to go on from there (`splice`), so a short
        neural draft gets a long copied tail. After the round the text judges the nodes of all members,
        also those that were not drafted. With `merge=0` the member whose draft is expected to bring most
        tokens drafts alone.
    When it helps: whenever one drafter knows what another does not: a lookup's long copies beside a
        head's good short guesses.
    Cost: the members' proposals, one after the other, and a few microseconds per node. With `enough`,
        members later in the list are not asked where those before them expect that many tokens.
    Needs: what its members need.
    Reference: Hu et al. 2411.10666 (lookup beside EAGLE); full information: 2510.20064.

    Under rules other than `match` the first member drafts alone: to choose among drawn tokens would
    bias a ratio test.
    """

    Options = MixtureOptions

    def __init__(self, members: Seq[Member], options: MixtureOptions = MixtureOptions()) -> None:
        if not members:
            raise InvalidParameter("members", "a mixture needs at least one")
        self._members = members
        self.needs = needs_of([member.drafter for member in members], range(len(members)))
        self._merge = options.merge
        self._splice = options.splice and options.merge
        self._enough = options.enough
        self._record = Calibration(weight=6.0, memory=600.0)
        self._last: dict[Sequence, _Merged] = {}

    @classmethod
    def build(cls, context: DraftContext) -> MixtureDrafter:
        options = context.options(MixtureOptions)
        return cls([Member(context.build(config), config.draft_tokens) for config in options.members], options)

    def begin(self, seq: Sequence) -> None:
        for member in self._members:
            member.drafter.begin(seq)

    def end(self, seq: Sequence) -> None:
        self._last.pop(seq, None)
        for member in self._members:
            member.drafter.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Judge what every member said by the text that came, and let them see the round."""
        self._judge(batch, verdicts)
        for drafter, _ in self._members:
            drafter.commit(batch, drafts, verdicts, scores_for(drafter, scores, self.needs.taps))

    def _judge(self, batch: Batch, verdicts: list[Verdict]) -> None:
        if not self._last:
            return
        for seq, verdict in zip(batch.sequences, verdicts, strict=True):
            merged = self._last.pop(seq, None)
            if merged is not None and seq.finish_reason is None:
                for node, true in verified_nodes(merged.tokens, merged.parents, verdict.tokens):
                    self._record.record(merged.kind(node), true)
                    self._record.record(merged.stance(node), true)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        if plan.rule != "match":
            return self._ask(0, batch, plan)
        merged = [_Merged(len(self._members), seq.request.params.greedy) for seq in batch.sequences]
        open_ = list(plan.lengths)
        for m in range(len(self._members)):
            if any(open_):
                drafts = self._ask(m, batch, plan._replace(lengths=tuple(open_), verify_all=False))
                for nodes, tree in zip(merged, drafts.per_sequence, strict=True):
                    nodes.add(m, tree)
                if self._enough < math.inf:
                    open_ = [n if self._expected(nodes) < self._enough else 0 for nodes, n in zip(merged, open_, strict=True)]
        picked = [self._pick(seq, nodes, n) for seq, nodes, n in zip(batch.sequences, merged, plan.lengths, strict=True)]
        self._last = {seq: nodes for seq, nodes in zip(batch.sequences, merged, strict=True) if nodes.tokens}
        return Drafts(picked)

    def _ask(self, m: int, batch: Batch, plan: Plan) -> Drafts:
        drafter, limit = self._members[m]
        return drafter.propose(batch, plan._replace(lengths=tuple(min(n, limit) for n in plan.lengths)))

    def _pick(self, seq: Sequence, merged: _Merged, nodes: int) -> Tree:
        """The likeliest nodes, best first; a branch that ends is followed on by the lookups."""
        allowed = None if self._merge else self._best_member(merged)
        guess = Tree([], [], [])
        place = {ROOT: ROOT}
        waiting: list[tuple[float, int]] = []

        def open_below(node: int, survival: float) -> None:
            for child in merged.children(node):
                if allowed is None or merged.claims[child][allowed] is not None:
                    heapq.heappush(waiting, (-survival * self._chance(merged, child), child))

        open_below(ROOT, 1.0)
        while waiting and len(guess.tokens) < nodes:
            value, node = heapq.heappop(waiting)
            place[node] = len(guess.tokens)
            guess.tokens.append(merged.tokens[node])
            guess.parents.append(place[merged.parents[node]])
            guess.survival.append(-value)
            if self._splice and -value > _WORTH_FOLLOWING and not merged.children(node):
                self._follow(seq, merged, node, nodes - len(guess.tokens))
            open_below(node, -value)
        return guess

    def _follow(self, seq: Sequence, merged: _Merged, node: int, nodes: int) -> None:
        """Let the lookups go on from where a branch ends."""
        path = merged.path(node)
        for m, (drafter, limit) in enumerate(self._members):
            room = min(nodes, limit - len(path))
            if drafter.needs.follows and room > 0:
                merged.add(m, cast(Lookup, drafter).follow(seq, path, room), node)

    def _chance(self, merged: _Merged, node: int) -> float:
        """How often a node of which this was claimed came true; before much was seen, of which roughly this was."""
        bold = max(claim for claim in merged.claims[node] if claim is not None)
        return self._record.chance(merged.kind(node), self._record.chance(merged.stance(node), bold))

    def _expected(self, merged: _Merged, member: int | None = None) -> float:
        """Tokens that the nodes (of one member) should bring."""
        survival = {ROOT: 1.0}
        for node, parent in enumerate(merged.parents):
            if parent in survival and (member is None or merged.claims[node][member] is not None):
                survival[node] = survival[parent] * self._chance(merged, node)
        return sum(survival.values()) - 1.0

    def _best_member(self, merged: _Merged) -> int:
        return max(range(len(self._members)), key=lambda m: self._expected(merged, m))


@dataclass(slots=True)
class _Merged:
    """All nodes that members thought of for one sequence, parents first, and what each claims about each."""

    members: int
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    claims: list[list[float | None]] = field(default_factory=list)  # chance after the parent; None: not guessed
    _below: dict[int, dict[int, int]] = field(default_factory=dict)  # node -> token -> child
    _speaks: set[tuple[int, int]] = field(default_factory=set)  # (node, member) where the member guesses something below

    def add(self, member: int, guess: Tree, start: int = ROOT) -> None:
        """A member's guess below a node."""
        place = {ROOT: start}
        for i, (token, parent) in enumerate(zip(guess.tokens, guess.parents, strict=True)):
            above = place[parent]
            below = self._below.setdefault(above, {})
            if token not in below:
                below[token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.claims.append([None] * self.members)
            node = place[i] = below[token]
            before = guess.survival[parent] if parent >= 0 else 1.0
            chance = guess.survival[i] / before if before > 0 else 0.0
            self.claims[node][member] = min(max(chance, 1e-3), 1 - 1e-3)
            self._speaks.add((above, member))

    def children(self, node: int) -> list[int]:
        return list(self._below.get(node, {}).values())

    def path(self, node: int) -> list[int]:
        """Tokens from the root down to a node."""
        return Tree(self.tokens, self.parents, []).path(node)

    def kind(self, node: int) -> Hashable:
        """What is claimed about a node, roughly, by everyone."""
        return self.greedy, *(absent if claim is None else _level(claim) for claim, absent in self._said(node))

    def stance(self, node: int) -> Hashable:
        """Who is boldest about a node and how bold, and whether each of the others agrees."""
        claims = self._said(node)
        boldest = max(range(self.members), key=lambda m: claims[m][0] or 0.0)
        return (
            self.greedy,
            boldest,
            _level(claims[boldest][0] or 0.0),
            tuple(_AGREES if claim else absent for claim, absent in claims),
        )

    def _said(self, node: int) -> list[tuple[float | None, int]]:
        """Each member's claim about a node, and what its having none would mean."""
        above = self.parents[node]
        return [(claim, _OTHERWISE if (above, m) in self._speaks else _SILENT) for m, claim in enumerate(self.claims[node])]


def _level(chance: float) -> int:
    """A claim's log odds, to the nearest whole number."""
    return max(-_SURE, min(_SURE, round(math.log(chance / (1 - chance)))))


def _columns(taps: Tensor | None, all_taps: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor | None:
    """The taps one member asked for, in its order; a view where they lie side by side."""
    if taps is None or wanted == all_taps:
        return taps
    width, places = taps.shape[1] // len(all_taps), [all_taps.index(tap) for tap in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return taps[:, places[0] * width : (places[-1] + 1) * width]
    return taps.reshape(len(taps), len(all_taps), width)[:, places].reshape(len(taps), -1)
