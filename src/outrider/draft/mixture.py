"""A mixture: several drafters guess for the same round, and the best of their guesses become one tree."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.lookup import AcceptanceRates, best_first, verified_nodes
from outrider.draft.options import WeightOptions, option
from outrider.draft.protocol import Drafter, Lookup, kept_by
from outrider.draft.shared_texts import Kept
from outrider.errors import InvalidParameter

__all__ = ["Member", "MixtureDrafter", "MixtureOptions", "needs_of", "scores_for"]

_SILENT, _DIFFERS, _AGREES = -99, -98, -97  # a member guesses nothing where a node is, or other tokens, or this one too
_MAX_LOG_ODDS = 6  # confidences are told apart up to odds of e^6
_MIN_SURVIVAL = 0.05  # below which no lookup is asked to go on


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
        branches=any(need.branches for need in needs),
        kv_bytes_per_token=sum(member.needs.kv_bytes_per_token for member in members),
        keeps=any(member.needs.keeps for member in members),
        overlaps=any(need.overlaps for need in needs),
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

    What it does: every member drafts, and nodes with the same path become one. Each member's confidence
        in a node (the chance that it follows its parent, or that it guesses nothing there, or other
        tokens) is looked up in a table of how often nodes of the same confidences were accepted, so members
        are weighed against each other by the record. The most likely nodes within the budget are the
        draft. Where a branch ends, lookup members are asked to go on from there (`splice`), so a short
        neural draft gets a long copied tail. After the round the text verifies the nodes of all members,
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
        self._options = options
        self.needs = needs_of([member.drafter for member in members], range(len(members)))
        self._rates = AcceptanceRates(weight=6.0, memory=600.0)
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

    def kept(self, owner: str) -> Kept:
        return kept_by((member.drafter for member in self._members), "kept", owner)

    def remember(self, owner: str, tokens: Seq[int]) -> Kept:
        return kept_by((member.drafter for member in self._members), "remember", owner, tokens)

    def forget(self, owner: str) -> Kept:
        return kept_by((member.drafter for member in self._members), "forget", owner)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Compare every member's guesses with the text that came, and let them see the round."""
        for seq, verdict in zip(batch.sequences, verdicts, strict=True):
            merged = self._last.pop(seq, None)
            if merged is not None and seq.finish_reason is None:
                for node, is_accepted in verified_nodes(merged.tokens, merged.parents, verdict.tokens):
                    for kind in merged.kinds(node):
                        self._rates.record(kind, is_accepted)
        for drafter, _ in self._members:
            drafter.commit(batch, drafts, verdicts, scores_for(drafter, scores, self.needs.taps))

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        if plan.rule != "match":
            return self._ask(0, batch, plan)
        merged = [_Merged(len(self._members), seq.request.params.greedy) for seq in batch.sequences]
        lengths, enough = list(plan.lengths), self._options.enough
        for m in range(len(self._members)):
            if any(lengths):
                drafts = self._ask(m, batch, plan._replace(lengths=tuple(lengths), verify_all=False))
                for nodes, tree in zip(merged, drafts.per_sequence, strict=True):
                    nodes.add(m, tree)
                if enough < math.inf:
                    lengths = [n if self._expected(nodes) < enough else 0 for nodes, n in zip(merged, lengths, strict=True)]
        picked = [self._pick(seq, nodes, n) for seq, nodes, n in zip(batch.sequences, merged, plan.lengths, strict=True)]
        self._last = {seq: nodes for seq, nodes in zip(batch.sequences, merged, strict=True) if nodes.tokens}
        return Drafts(picked)

    def _ask(self, m: int, batch: Batch, plan: Plan) -> Drafts:
        drafter, limit = self._members[m]
        drafts = drafter.propose(batch, plan._replace(lengths=tuple(min(n, limit) for n in plan.lengths)))
        assert isinstance(drafts, Drafts)
        return drafts

    def _pick(self, seq: Sequence, merged: _Merged, nodes: int) -> Tree:
        """The likeliest nodes, best first; a branch that ends is followed on by the lookups."""
        options, alone = self._options, None
        if not options.merge:
            alone = max(range(len(self._members)), key=lambda m: self._expected(merged, m))

        def below(node: int, survival: float, room: int) -> list[tuple[float, int, int]]:
            if node != ROOT and options.splice and options.merge and survival > _MIN_SURVIVAL and not merged.children(node):
                self._follow(seq, merged, node, room)
            children = [child for child in merged.children(node) if alone is None or merged.confidence[child][alone] is not None]
            guesses = [(survival * self._rate(merged, child), merged.tokens[child], child) for child in children]
            return sorted(guesses, key=lambda guess: -guess[0])

        return best_first(nodes, ROOT, below)

    def _follow(self, seq: Sequence, merged: _Merged, node: int, nodes: int) -> None:
        """Let the lookups go on from where a branch ends."""
        path = Tree(merged.tokens, merged.parents, []).path(node)
        for m, (drafter, limit) in enumerate(self._members):
            room = min(nodes, limit - len(path))
            if drafter.needs.follows and room > 0:
                merged.add(m, cast(Lookup, drafter).follow(seq, path, room), node)

    def _rate(self, merged: _Merged, node: int) -> float:
        """How often nodes of these confidences were accepted; before many were seen, nodes of roughly these."""
        exact, rough = merged.kinds(node)
        highest = max(chance for chance in merged.confidence[node] if chance is not None)
        return self._rates.rate(exact, self._rates.rate(rough, highest))

    def _expected(self, merged: _Merged, member: int | None = None) -> float:
        """Tokens that the nodes (of one member) should bring."""
        survival = {ROOT: 1.0}
        for node, parent in enumerate(merged.parents):
            if parent in survival and (member is None or merged.confidence[node][member] is not None):
                survival[node] = survival[parent] * self._rate(merged, node)
        return sum(survival.values()) - 1.0


@dataclass(slots=True)
class _Merged:
    """All nodes that members guessed for one sequence, parents first, and each member's confidence in each."""

    members: int
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[list[float | None]] = field(default_factory=list)  # chance after the parent; None: not guessed
    _below: dict[int, dict[int, int]] = field(default_factory=dict)  # node -> token -> child
    _guessed: set[tuple[int, int]] = field(default_factory=set)  # (node, member) where the member guesses something below

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
                self.confidence.append([None] * self.members)
            node = place[i] = below[token]
            before = guess.survival[parent] if parent >= 0 else 1.0
            chance = guess.survival[i] / before if before > 0 else 0.0
            self.confidence[node][member] = min(max(chance, 1e-3), 1 - 1e-3)
            self._guessed.add((above, member))

    def children(self, node: int) -> list[int]:
        return list(self._below.get(node, {}).values())

    def kinds(self, node: int) -> tuple[Hashable, Hashable]:
        """A node's kind by the confidence of every member, and by the highest and whether each of the others agrees."""
        above, chances = self.parents[node], self.confidence[node]
        absent = [_DIFFERS if (above, m) in self._guessed else _SILENT for m in range(self.members)]
        levels = [_log_odds(chance) if chance else none for chance, none in zip(chances, absent, strict=True)]
        highest = max(range(self.members), key=lambda m: chances[m] or 0.0)
        agrees = tuple(_AGREES if chance else none for chance, none in zip(chances, absent, strict=True))
        return (self.greedy, *levels), (self.greedy, highest, levels[highest], agrees)


def _log_odds(chance: float) -> int:
    """A confidence's log odds, to the nearest whole number."""
    return max(-_MAX_LOG_ODDS, min(_MAX_LOG_ODDS, round(math.log(chance / (1 - chance)))))


def _columns(taps: Tensor | None, all_taps: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor | None:
    """The taps one member asked for, in its order; a view where they lie side by side."""
    if taps is None or wanted == all_taps:
        return taps
    width, places = taps.shape[1] // len(all_taps), [all_taps.index(tap) for tap in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return taps[:, places[0] * width : (places[-1] + 1) * width]
    return taps.reshape(len(taps), len(all_taps), width)[:, places].reshape(len(taps), -1)
