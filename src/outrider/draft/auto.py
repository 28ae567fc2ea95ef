"""`auto`: everything a model has to draft with, as arms the controller chooses among round by round."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from outrider.config import MAX_DRAFT_TOKENS, MAX_TREE_TOKENS, SpeculationConfig
from outrider.core import Arm, Batch, Drafts, PendingDrafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.context import DraftContext
from outrider.draft.mixture import needs_of, scores_for
from outrider.draft.options import WeightOptions, option
from outrider.draft.protocol import Drafter, Overlapping, kept_by
from outrider.draft.shared_texts import Kept
from outrider.errors import InvalidParameter
from outrider.gguf import find_gguf
from outrider.heads import drafts_by_mtp
from outrider.model import locate
from outrider.model.fields import read_json

__all__ = ["AutoDrafter", "AutoOptions", "arms_of", "method_of_weights", "resolve_auto", "with_large_trees"]

_BESIDE_TARGET = {  # what may come with a target, in the folder of that name
    "draft": SpeculationConfig("draft_model", draft_tokens=12),
    "eagle": SpeculationConfig("eagle", draft_tokens=32, options={"beam": 3, "branch": 6, "depth": 8}),
    "mtp": SpeculationConfig("mtp", draft_tokens=4),
    "medusa": SpeculationConfig("medusa", draft_tokens=32),
    "dflash": SpeculationConfig("dflash", draft_tokens=32),
}
_TREES_ON_GPU = {"eagle": SpeculationConfig("eagle", draft_tokens=32, options={"beam": 8, "branch": 8, "depth": 6})}
_MANY_ROWS = "medusa"  # few of its drafts are accepted: on a CPU, a member where nothing else is beside the target
_HEADS_ON_GPU = ("dflash", "eagle", "mtp", "medusa")  # the first there is: every set of tapped layers takes graphs of its own
# what the name of a head's architecture contains, and its method
_NAMED = {"eagle": "eagle", "mtp": "mtp", "medusa": "medusa", "dflash": "dflash", "dspark": "dflash", "assistant": "dflash"}
_MAX_NODES = 32  # nodes of an arm
_BRANCH = 8  # candidates of a node in large trees
_TREE_UNIT = 32  # nodes by which the sizes of large trees differ
_SHARED_TOKENS = 65536  # of earlier texts, 30 MB
_SUFFIX = SpeculationConfig(
    "suffix", draft_tokens=_MAX_NODES, options={"shared_tokens": _SHARED_TOKENS, "shared_prompts": True, "edits": True}
)
_RECYCLE = SpeculationConfig("recycle", draft_tokens=_MAX_NODES)
_DETACH_AFTER = 24  # rounds without a draft after which a member no longer follows the text


def resolve_auto(config: SpeculationConfig, directory: Path, on_gpu: bool = False) -> SpeculationConfig:
    """The same settings with the members named: those given, or whatever there is for the model."""
    if config.rule != "match":
        raise InvalidParameter("rule", f"method 'auto' verifies by 'match'; name a drafter to verify by {config.rule!r}")
    if config.nested():
        return config
    given = _given(config)
    able = _BESIDE_TARGET | (_TREES_ON_GPU if on_gpu else {})
    beside = [name for name in able if (directory / name / "config.json").exists()]
    if "mtp" not in beside and drafts_by_mtp(directory):  # among the model's own weights
        beside.append("mtp")
    if on_gpu:
        heads = [name for name in _HEADS_ON_GPU if name in beside]
        beside = [name for name in beside if name not in heads[1:]]
    elif len(beside) > 1:
        beside = [name for name in beside if name != _MANY_ROWS]
    available = {able[name].method: able[name] for name in beside} | given
    lookups = (_SUFFIX, _RECYCLE) if on_gpu and not available else (_SUFFIX,)  # its drafts need rows that cost next to nothing
    members = tuple(
        replace(member, draft_tokens=min(member.draft_tokens, config.draft_tokens)) for member in (*lookups, *available.values())
    )
    return replace(config, options={**config.options, "members": members})


def with_large_trees(config: SpeculationConfig) -> SpeculationConfig:
    """The same choice for a target whose forward costs the same for one row and for hundreds: a draft model grows trees."""
    most = MAX_TREE_TOKENS if config.draft_tokens >= MAX_DRAFT_TOKENS else config.draft_tokens
    members = tuple(
        replace(member, draft_tokens=most, options={**member.options, "branch": _BRANCH})
        if member.method == "draft_model" and not member.grows_trees
        else member
        for member in config.nested()
    )
    return replace(config, options={**config.options, "members": members})


def _given(config: SpeculationConfig) -> dict[str, SpeculationConfig]:
    """The draft model or head that the settings name, by its method: what its configuration says it is."""
    if config.model is None:
        return {}
    method = method_of_weights(config.model)
    member = next(member for member in _BESIDE_TARGET.values() if member.method == method)
    return {method: replace(member, model=config.model)}


def method_of_weights(model: str) -> str:
    """The method that a directory of weights is for: a head's, where its configuration says so, else a draft model's."""
    path = locate(model)
    data = {} if find_gguf(path) is not None else read_json(path / "config.json")
    architecture = str(data.get("architectures") or "").lower()
    return next((method for name, method in _NAMED.items() if name in architecture), "draft_model")


def arms_of(members: Seq[SpeculationConfig], on_gpu: bool = False) -> list[Arm]:
    """An arm for each member. Two of them beside each other on one sequence gave no more tokens a second than the better one."""
    return [
        Arm(
            member.method,
            member.draft_tokens if member.grows_trees else min(member.draft_tokens, _MAX_NODES),
            on_gpu and member.method == "draft_model" and not member.grows_trees,
            _TREE_UNIT if member.grows_trees and member.draft_tokens > _MAX_NODES else 1,
        )
        for member in members
    ]


@dataclass(frozen=True)
class AutoOptions(WeightOptions):
    """What it chooses from."""

    members: tuple[SpeculationConfig, ...] = option((), "drafters to choose from; whatever the model has where it is not set")


class AutoDrafter:
    """Several drafters, of which the plan says who guesses for each sequence, so that nobody else costs anything.

    Members that read the target's hidden rows follow every round while they are in use. After a
    while without drafts they are detached: their sequences end for them, as in a preemption, and begin again with the next draft.
    """

    Options = AutoOptions

    def __init__(self, members: Seq[Drafter]) -> None:
        self._members = members
        self._reads = [bool(member.needs.taps) for member in members]
        self._follows: list[set[Sequence]] = [set() for _ in members]  # sequences begun, by member
        self._round = 0
        self._last_active = [0] * len(members)  # in which round
        self._scorers = [m for m, member in enumerate(members) if member.needs.scores]
        self._active: set[int] = set()  # members that draft in this round
        self._active_next: set[int] = set()  # and in the next one already
        self._attached = list(range(len(members)))
        self._readers = [m for m in self._attached if self._reads[m]]
        self.needs = needs_of(members, self._attached)

    @classmethod
    def build(cls, context: DraftContext) -> AutoDrafter:
        return cls(context.nested())

    def begin(self, seq: Sequence) -> None:
        for m, last in enumerate(self._last_active):
            if not self._reads[m] or self._round - last <= _DETACH_AFTER:
                self._begin(m, seq)
        self._note_needs()

    def _begin(self, m: int, seq: Sequence) -> None:
        self._members[m].begin(seq)
        self._follows[m].add(seq)

    def end(self, seq: Sequence) -> None:
        for member, followed in zip(self._members, self._follows, strict=True):
            if seq in followed:
                followed.remove(seq)
                member.end(seq)

    def kept(self, owner: str) -> Kept:
        return kept_by(self._members, "kept", owner)

    def remember(self, owner: str, tokens: Seq[int]) -> Kept:
        return kept_by(self._members, "remember", owner, tokens)

    def forget(self, owner: str) -> Kept:
        return kept_by(self._members, "forget", owner)

    def propose(self, batch: Batch, plan: Plan) -> Drafts | PendingDrafts:
        active = self._active = _active(plan)
        for m in active:
            self._last_active[m] = self._round
            self._attach(m, batch, plan)
        if len(active) == 1:
            return self._members[next(iter(active))].propose(batch, plan)
        trees = [Tree([], [], [])] * len(batch.sequences)
        for m in active:
            lengths = tuple(n if arm == m else 0 for arm, n in zip(plan.arms, plan.lengths, strict=True))
            drafts = self._members[m].propose(batch, plan._replace(lengths=lengths, verify_all=False))
            assert isinstance(drafts, Drafts)
            trees = [new if n else tree for tree, new, n in zip(trees, drafts.per_sequence, lengths, strict=True)]
        return Drafts(trees)

    def propose_next(self, batch: Batch, plan: Plan) -> PendingDrafts | None:
        active = _active(plan)
        if active != self._active or len(active) != 1:
            return None
        (m,) = active
        member = self._members[m]
        drafts = cast(Overlapping, member).propose_next(batch, plan) if member.needs.overlaps else None
        self._active_next = set() if drafts is None else active
        return drafts

    def _attach(self, m: int, batch: Batch, plan: Plan) -> None:
        """Begin the sequences that a member drafts for and has not followed."""
        followed, rows = self._follows[m], zip(batch.sequences, plan.arms, plan.lengths, strict=True)
        if new := [seq for seq, arm, n in rows if n and arm == m and seq not in followed]:
            for seq in new:
                self._begin(m, seq)
            self._note_needs()

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._round += 1
        if not (self._active or self._active_next or self._readers or self._scorers):
            return  # nobody drafted or reads
        for m in self._active.union(self._readers, self._scorers):
            member = self._members[m]
            member.commit(batch, drafts, verdicts, scores_for(member, scores, self.needs.taps))
        self._active, self._active_next = self._active_next, set()
        for m in self._active:
            self._last_active[m] = self._round
        for m in self._readers:
            if self._round - self._last_active[m] > _DETACH_AFTER:
                for seq in self._follows[m]:
                    self._members[m].end(seq)
                self._follows[m].clear()
                self._note_needs()

    def _note_needs(self) -> None:
        """Need only what the attached members read."""
        attached = [m for m, followed in enumerate(self._follows) if followed or not self._reads[m]]
        if attached != self._attached:
            self._attached, self.needs = attached, needs_of(self._members, attached)
            self._readers = [m for m in attached if self._reads[m]]


def _active(plan: Plan) -> set[int]:
    """Members that draft in a round."""
    return {m for m, n in zip(plan.arms, plan.lengths, strict=True) if n}
