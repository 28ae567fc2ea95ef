"""`auto`: everything a model has to draft with, as arms the controller chooses among round by round."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from outrider.config import SpeculationConfig
from outrider.core import Arm, Batch, Drafts, Plan, Scores, Sequence, Verdict
from outrider.draft.mixture import needs_of, scores_for
from outrider.draft.protocol import Drafter
from outrider.errors import InvalidParameter

__all__ = ["AutoDrafter", "arms_of", "resolve_auto"]

_COMPANIONS = {  # what may come with a target, in the folder of that name
    "draft": SpeculationConfig("draft_model", draft_tokens=12),
    "eagle": SpeculationConfig("eagle", draft_tokens=32, options={"beam": 3, "branch": 6, "depth": 8}),
    "medusa": SpeculationConfig("medusa", draft_tokens=32),
}
_MOST = 32  # nodes of an arm
_DOZE = 24  # rounds after which a member that nobody asked no longer follows the text


def resolve_auto(config: SpeculationConfig, directory: Path, on_gpu: bool = False) -> SpeculationConfig:
    """The same settings with the members named: those given, or whatever there is for the model."""
    if config.rule != "match":
        raise InvalidParameter("rule", f"method 'auto' verifies by 'match'; name a drafter to verify by {config.rule!r}")
    if config.nested():
        return config
    able = {"draft": _COMPANIONS["draft"]} if on_gpu else _COMPANIONS  # an EAGLE head there gave less than a draft model
    found = tuple(own for name, own in able.items() if (directory / name / "config.json").exists())
    names = ("suffix",) if found else ("suffix", "recycle")
    lookups = tuple(SpeculationConfig(name, draft_tokens=_MOST) for name in names)
    members = tuple(replace(own, draft_tokens=min(own.draft_tokens, config.draft_tokens)) for own in (*lookups, *found))
    return replace(config, options={**config.options, "members": members})


def arms_of(members: Seq[SpeculationConfig], on_gpu: bool = False) -> list[Arm]:
    """Each member. Two of them beside each other on one sequence gave no more tokens a second than the better one."""
    return [Arm(own.method, min(own.draft_tokens, _MOST), on_gpu and own.method == "draft_model") for own in members]


class AutoDrafter:
    """Several drafters, of which the plan says who guesses for each sequence, so that nobody else costs anything.

    Members that read the target's hidden rows follow every round while they are in use. Not asked for a
    while, they sleep: their sequences end for them, as when a sequence gives way, and begin again when they are asked.
    """

    def __init__(self, members: Seq[Drafter]) -> None:
        self._members = members
        self._reads = [bool(member.needs.taps) for member in members]
        self._follows: list[set[Sequence]] = [set() for _ in members]  # sequences begun, by member
        self._round = 0
        self._last_asked = [0] * len(members)  # in which round
        self._scorers = [m for m, member in enumerate(members) if member.needs.scores]
        self._asked: set[int] = set()
        self._awake = list(range(len(members)))
        self._readers = [m for m in self._awake if self._reads[m]]
        self.needs = needs_of(members, self._awake)

    def begin(self, seq: Sequence) -> None:
        for m, last in enumerate(self._last_asked):
            if not self._reads[m] or self._round - last <= _DOZE:
                self._begin(m, seq)
        self._note_needs()

    def _begin(self, m: int, seq: Sequence) -> None:
        self._members[m].begin(seq)
        self._follows[m].add(seq)

    def end(self, seq: Sequence) -> None:
        for member, own in zip(self._members, self._follows, strict=True):
            if seq in own:
                own.remove(seq)
                member.end(seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        asked = self._asked = {m for m, n in zip(plan.arms, plan.lengths, strict=True) if n}
        for m in asked:
            self._last_asked[m] = self._round
            self._wake(m, batch, plan)
        if len(asked) == 1:
            return self._members[next(iter(asked))].propose(batch, plan)
        none = Drafts.empty(len(batch.sequences))
        trees, says = list(none.on_host()), list(none.says())
        for m in asked:
            lengths = tuple(n if own == m else 0 for own, n in zip(plan.arms, plan.lengths, strict=True))
            drafts = self._members[m].propose(batch, plan._replace(lengths=lengths, whole=False))
            for b, (tree, chances) in enumerate(zip(drafts.on_host(), drafts.says(), strict=True)):
                if lengths[b]:
                    trees[b], says[b] = tree, chances
        return Drafts.trees(trees, survival=says)

    def _wake(self, m: int, batch: Batch, plan: Plan) -> None:
        """Begin the sequences that a member is asked about and has not followed."""
        own, rows = self._follows[m], zip(batch.sequences, plan.arms, plan.lengths, strict=True)
        if new := [seq for seq, arm, n in rows if n and arm == m and seq not in own]:
            for seq in new:
                self._begin(m, seq)
            self._note_needs()

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._round += 1
        if not (self._asked or self._readers or self._scorers):
            return  # everybody rests
        for m in self._asked.union(self._readers, self._scorers):
            member = self._members[m]
            member.commit(batch, drafts, verdicts, scores_for(member, scores, self.needs.taps))
        self._asked = set()
        for m in self._readers:
            if self._round - self._last_asked[m] > _DOZE:
                for seq in self._follows[m]:
                    self._members[m].end(seq)
                self._follows[m].clear()
                self._note_needs()

    def _note_needs(self) -> None:
        """Ask the engine only for what those awake read."""
        awake = [m for m, own in enumerate(self._follows) if own or not self._reads[m]]
        if awake != self._awake:
            self._awake, self.needs = awake, needs_of(self._members, awake)
            self._readers = [m for m in awake if self._reads[m]]
