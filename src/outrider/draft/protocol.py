"""The seam every drafter lives behind, and the check that keeps the engine safe from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Literal, Protocol, cast

from torch import Tensor

from outrider.core import Batch, Drafts, Needs, PendingDrafts, Plan, Resume, Scores, Sequence, Tree, Verdict
from outrider.draft.shared_texts import Kept
from outrider.errors import DrafterFault

__all__ = ["Drafter", "Keeper", "Lookup", "Overlapping", "check_drafts", "check_kind", "kept_by"]


class Drafter(Protocol):
    """Guesses what the target will choose. Nothing it does can change the text, only the speed.

    `propose` may return fewer nodes than the plan allows, never more. Slots for the planned nodes
    are reserved before it is called. `commit` only records; a drafter that was left out catches up
    inside a later `propose`.
    """

    @property
    def needs(self) -> Needs:
        """What it wants from the engine; read every round."""

    def begin(self, seq: Sequence) -> None:
        """A sequence starts."""

    def propose(self, batch: Batch, plan: Plan) -> Drafts | PendingDrafts:
        """Guesses for every sequence of the batch whose planned length is not zero; pending only where `plan.verify_all`."""

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """What became of the guesses. Sequences already hold their new tokens."""

    def end(self, seq: Sequence) -> None:
        """A sequence is over, or preempted and begins again later (`finish_reason` is None); forget it."""


class Lookup(Drafter, Protocol):
    """A drafter (`needs.follows`) that can also guess after text that is not committed yet.

    That is what lets it draft for a drafter: below a model in a cascade, behind another's branches in a
    mixture.
    """

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        """At most this many nodes after a sequence and a path of guessed tokens. Nothing is recorded."""


class Overlapping(Drafter, Protocol):
    """A drafter (`needs.overlaps`) that drafts on the target's device, even before it is known what became of its last drafts."""

    def propose_next(self, batch: Batch, plan: Plan) -> PendingDrafts | None:
        """Guesses for the round after the one in flight, which verifies its drafts; None where it cannot.

        `batch.future` are the target's choices at the root and at every verified node of each sequence.
        """


class Keeper(Drafter, Protocol):
    """A drafter (`needs.keeps`) that searches texts of finished requests, those of the same owner alone."""

    def kept(self, owner: str) -> Kept:
        """How much text of an owner it keeps."""

    def remember(self, owner: str, tokens: Seq[int]) -> Kept:
        """Keep one more text of an owner, and say how much is kept now."""

    def forget(self, owner: str) -> Kept:
        """Drop an owner's texts, and say how much that was."""


def kept_by(drafters: Iterable[Drafter], verb: Literal["kept", "remember", "forget"], *arguments: Any) -> Kept:
    """What those of the drafters that keep texts keep or forget, in all. The arguments are those of the verb."""
    keepers = [cast(Keeper, drafter) for drafter in drafters if drafter.needs.keeps]
    return sum((getattr(keeper, verb)(*arguments) for keeper in keepers), start=Kept())


def check_kind(drafts: object) -> Drafts:
    """What `propose` returned, or DrafterFault where it is something else than drafts."""
    if not isinstance(drafts, Drafts) or not hasattr(drafts, "resume"):  # the second: made without its constructor
        kind = type(drafts).__name__
        raise DrafterFault(f"propose returned {kind}, not Drafts; make them with Drafts.chains, Drafts.trees or Drafts.empty")
    return drafts


def check_drafts(drafts: Drafts, plan: Plan, vocab: int) -> Drafts:
    """The drafts themselves, or DrafterFault where they break the contract."""
    trees, batch = drafts.per_sequence, len(plan.lengths)
    if len(trees) != batch:
        raise DrafterFault(f"drafts are of {len(trees)} sequences, not of {batch}")
    for tree, planned in zip(trees, plan.lengths, strict=True):
        _check_tree(tree, planned, vocab)
        if plan.rule != "match" and tree.parents != list(range(-1, len(tree.parents) - 1)):
            raise DrafterFault(f"rule {plan.rule!r} verifies chains, and the draft branches")
    if drafts.q is not None:
        _check_q(drafts.q, (batch, max(drafts.counts, default=0), vocab))
    if drafts.resume is not None:
        _check_resume(drafts.resume, drafts.counts)
    return drafts


def _check_tree(tree: Tree, planned: int, vocab: int) -> None:
    tokens, parents, survival = tree
    if len(tokens) > planned:
        raise DrafterFault(f"{len(tokens)} nodes were drafted where {planned} were planned")
    if len(parents) != len(tokens) or len(survival) != len(tokens):
        raise DrafterFault(f"{len(tokens)} nodes have {len(parents)} parents and {len(survival)} chances to survive")
    if not {int}.issuperset(map(type, tokens)) or not {int}.issuperset(map(type, parents)):
        raise DrafterFault("tokens and parents must be plain integers; Drafts.trees makes them")
    for i, (token, parent, chance) in enumerate(zip(tokens, parents, survival, strict=True)):
        if not 0 <= token < vocab:
            raise DrafterFault(f"token id {token} is outside the vocabulary of {vocab}")
        if not -1 <= parent < i:
            raise DrafterFault(f"node {i} has parent {parent}")
        if not math.isfinite(chance):
            raise DrafterFault(f"node {i} has survival {chance}")


def _check_q(q: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(q.shape) != shape or not q.is_floating_point() or not bool((q.isfinite() & (q >= 0)).all()):
        raise DrafterFault("the draft's probabilities have the wrong shape or type, are negative or not finite")


def _check_resume(resume: Resume, nodes: list[int]) -> None:
    if len(resume.counts) != len(nodes) or any(not 0 <= n <= 1 + count for n, count in zip(resume.counts, nodes, strict=True)):
        raise DrafterFault(f"rows to resume from, {list(resume.counts)}, do not fit drafts of {nodes} nodes")
    if resume.hidden.shape[0] != sum(resume.counts) or not bool(resume.hidden.isfinite().all()):
        raise DrafterFault("the rows to resume from are too few or not finite")
