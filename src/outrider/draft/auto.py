"""`auto`: everything a model has to draft with, as arms the controller chooses among round by round."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from outrider.config import SpeculationConfig
from outrider.core import Arm, Batch, Drafts, Plan, Scores, Sequence, Verdict
from outrider.draft.mixture import Member, MixtureDrafter
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
    return [
        Arm(own.method, (i,), min(own.draft_tokens, _MOST), on_gpu and own.method == "draft_model")
        for i, own in enumerate(members)
    ]


class AutoDrafter(MixtureDrafter):
    """A mixture in which the plan says who is asked about each sequence, so that nobody else costs anything.

    Members that read the target's hidden rows follow every round while they are in use. Not asked for a
    while, they sleep: their sequences end for them, as when a sequence gives way, and begin again when they are asked.
    """

    def __init__(self, members: Seq[Member], arms: Seq[Arm]) -> None:
        super().__init__(members)
        self._arms = [frozenset(arm.members) for arm in arms]
        self._reads = [bool(member.drafter.needs.taps) for member in members]
        self._follows: list[set[Sequence]] = [set() for _ in members]  # sequences begun, by member
        self._round = 0
        self._last_asked = [0] * len(members)  # in which round
        self._scorers = [m for m, member in enumerate(members) if member.drafter.needs.scores]
        self._asked: set[int] = set()
        self._awake = list(range(len(members)))
        self._readers = [m for m in self._awake if self._reads[m]]

    def begin(self, seq: Sequence) -> None:
        for m, last in enumerate(self._last_asked):
            if not self._reads[m] or self._round - last <= _DOZE:
                self._begin(m, seq)
        self._note_needs()

    def _begin(self, m: int, seq: Sequence) -> None:
        self._members[m].drafter.begin(seq)
        self._follows[m].add(seq)

    def end(self, seq: Sequence) -> None:
        self._last.pop(seq, None)
        for member, own in zip(self._members, self._follows, strict=True):
            if seq in own:
                own.remove(seq)
                member.drafter.end(seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        asked = self._asked = {m for arm, n in zip(plan.arms, plan.lengths, strict=True) if n for m in self._arms[arm]}
        for m in asked:
            self._last_asked[m] = self._round
            own = self._follows[m]
            new = [
                seq
                for seq, arm, n in zip(batch.sequences, plan.arms, plan.lengths, strict=True)
                if n and seq not in own and m in self._arms[arm]
            ]
            for seq in new:
                self._begin(m, seq)
            if new:
                self._note_needs()
        if len(asked) == 1:
            return self._ask(next(iter(asked)), batch, plan)
        return self._merged(
            batch, plan, [self._arms[arm] if n else frozenset() for arm, n in zip(plan.arms, plan.lengths, strict=True)]
        )

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._round += 1
        if not (self._asked or self._readers or self._scorers):
            return  # everybody rests
        if self._last:
            self._judge(batch, verdicts)
        for m in self._asked.union(self._readers, self._scorers):
            self._show(m, batch, drafts, verdicts, scores)
        self._asked = set()
        for m in self._readers:
            if self._round - self._last_asked[m] > _DOZE:
                for seq in self._follows[m]:
                    self._members[m].drafter.end(seq)
                self._follows[m].clear()
                self._note_needs()

    def _note_needs(self) -> None:
        """Ask the engine only for what those awake read."""
        awake = [m for m, own in enumerate(self._follows) if own or not self._reads[m]]
        if awake != self._awake:
            self._awake, self.needs = awake, self._needs_of(awake)
            self._readers = [m for m in awake if self._reads[m]]
