"""The seam every drafter lives behind, and the check that keeps the engine safe from it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from torch import Tensor

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
    if drafts.arrays is not None:
        _check_arrays(drafts.arrays, batch)
    trees, says = drafts.on_host(), drafts.says()
    if len(trees) != batch or len(says) != batch:
        raise DrafterFault(f"drafts are of {len(trees)} sequences, not of {batch}")
    for (tokens, parents), survival, planned in zip(trees, says, plan.lengths, strict=True):
        if len(tokens) > planned:
            raise DrafterFault(f"{len(tokens)} nodes were drafted where {planned} were planned")
        if len(parents) != len(tokens) or len(survival) != len(tokens):
            raise DrafterFault(f"{len(tokens)} nodes have {len(parents)} parents and {len(survival)} chances to survive")
        for i, (token, parent, chance) in enumerate(zip(tokens, parents, survival, strict=True)):
            if not 0 <= token < vocab:
                raise DrafterFault(f"token id {token} is outside the vocabulary of {vocab}")
            if not -1 <= parent < i:
                raise DrafterFault(f"node {i} has parent {parent}")
            if plan.rule != "match" and parent != i - 1:
                raise DrafterFault(f"rule {plan.rule!r} verifies chains, and node {i} branches")
            if not math.isfinite(chance):
                raise DrafterFault(f"node {i} has survival {chance}")
    if drafts.q is not None and (tuple(drafts.q.shape) != (*drafts.tokens.shape, vocab) or not bool(drafts.q.isfinite().all())):
        raise DrafterFault("the draft's probabilities have the wrong shape or are not finite")
    if drafts.resume is not None:
        _check_resume(drafts.resume, [len(tree.tokens) for tree in trees])
    return drafts


def _check_arrays(arrays: tuple[Tensor, Tensor, Tensor, Tensor], batch: int) -> None:
    tokens, parents, survival, counts = arrays
    shape = tuple(tokens.shape)
    if len(shape) != 2 or shape[0] != batch or tuple(parents.shape) != shape or tuple(counts.shape) != (batch,):
        raise DrafterFault(f"drafts have shape {shape} for {batch} sequences")
    if tuple(survival.shape) != shape or any(own.is_floating_point() for own in (tokens, parents, counts)):
        raise DrafterFault("drafts have fields of the wrong shape or type")
    if not all(0 <= count <= shape[1] for count in counts.tolist()):
        raise DrafterFault(f"drafts of {shape[1]} nodes count {counts.tolist()}")


def _check_resume(resume: Resume, nodes: list[int]) -> None:
    if len(resume.counts) != len(nodes) or any(not 0 <= n <= 1 + own for n, own in zip(resume.counts, nodes, strict=True)):
        raise DrafterFault(f"rows to resume from, {list(resume.counts)}, do not fit drafts of {nodes} nodes")
    if resume.hidden.shape[0] != sum(resume.counts) or not bool(resume.hidden.isfinite().all()):
        raise DrafterFault("the rows to resume from are too few or not finite")
