"""The seam every drafter lives behind, and the check that keeps the engine safe from it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from outrider.core import ROOT, Batch, Drafts, Needs, Plan, Resume, Scores, Sequence, Verdict
from outrider.errors import DrafterFault

__all__ = ["Drafter", "Guess", "Lookup", "check_drafts", "path_to"]


class Drafter(Protocol):
    """Guesses what the target will choose. Nothing it does can change the text, only the speed.

    `propose` may return fewer nodes than the plan allows, never more. Slots for the planned nodes
    are reserved before it is called. `commit` only records; a drafter that was not asked catches up
    inside a later `propose`.
    """

    @property
    def needs(self) -> Needs:
        """What it wants from the engine; asked every round."""

    def begin(self, seq: Sequence) -> None:
        """A sequence starts."""

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        """Guesses for every sequence of the batch whose planned length is not zero."""

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """What became of the guesses. Sequences already hold their new tokens."""

    def end(self, seq: Sequence) -> None:
        """A sequence is over, or gives way and begins again later (`finish_reason` is None); forget it."""


class Guess(NamedTuple):
    """One sequence's draft: a tree, parents first, and how likely each node is to be accepted."""

    tokens: list[int]
    parents: list[int]
    survival: list[float]


def path_to(tokens: Seq[int], parents: Seq[int], node: int) -> list[int]:
    """Tokens of a tree from the root down to a node."""
    out: list[int] = []
    while node != ROOT:
        out.append(tokens[node])
        node = parents[node]
    return out[::-1]


class Lookup(Drafter, Protocol):
    """A drafter (`needs.follows`) that can also guess after text that is not committed yet.

    That is what lets it draft for a drafter: below a model in a cascade, behind another's branches in a
    mixture.
    """

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Guess:
        """At most this many nodes after a sequence and a path of guessed tokens. Nothing is recorded."""


def check_drafts(drafts: Drafts, plan: Plan, vocab: int) -> Drafts:
    """The drafts themselves, or DrafterFault where they break the contract."""
    batch = len(plan.lengths)
    shape = tuple(drafts.tokens.shape)
    if len(shape) != 2 or shape[0] != batch or tuple(drafts.parents.shape) != shape or tuple(drafts.counts.shape) != (batch,):
        raise DrafterFault(f"drafts have shape {shape} for {batch} sequences")
    if tuple(drafts.survival.shape) != shape or drafts.tokens.is_floating_point() or drafts.parents.is_floating_point():
        raise DrafterFault("drafts have fields of the wrong shape or type")
    rows = zip(drafts.counts.tolist(), drafts.tokens.tolist(), drafts.parents.tolist(), drafts.survival.tolist(), strict=True)
    for b, (count, tokens, parents, survival) in enumerate(rows):
        if not 0 <= count <= min(plan.lengths[b], shape[1]):
            raise DrafterFault(f"{count} nodes were drafted where {plan.lengths[b]} were planned")
        for i in range(count):
            if not 0 <= tokens[i] < vocab:
                raise DrafterFault(f"token id {tokens[i]} is outside the vocabulary of {vocab}")
            if not -1 <= parents[i] < i:
                raise DrafterFault(f"node {i} has parent {parents[i]}")
            if plan.rule != "match" and parents[i] != i - 1:
                raise DrafterFault(f"rule {plan.rule!r} verifies chains, and node {i} branches")
            if not math.isfinite(survival[i]):
                raise DrafterFault(f"node {i} has survival {survival[i]}")
    if drafts.q is not None and (tuple(drafts.q.shape) != (*shape, vocab) or not bool(drafts.q.isfinite().all())):
        raise DrafterFault("the draft's probabilities have the wrong shape or are not finite")
    if drafts.resume is not None:
        _check_resume(drafts.resume, drafts.counts.tolist())
    return drafts


def _check_resume(resume: Resume, nodes: list[int]) -> None:
    if len(resume.counts) != len(nodes) or any(not 0 <= n <= 1 + own for n, own in zip(resume.counts, nodes, strict=True)):
        raise DrafterFault(f"rows to resume from, {list(resume.counts)}, do not fit drafts of {nodes} nodes")
    if resume.hidden.shape[0] != sum(resume.counts) or not bool(resume.hidden.isfinite().all()):
        raise DrafterFault("the rows to resume from are too few or not finite")
