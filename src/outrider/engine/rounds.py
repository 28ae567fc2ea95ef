"""A round between its plan and its report, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from outrider.control import Load, RoundStats
from outrider.core import (
    Batch,
    Drafts,
    FutureTokens,
    InFlight,
    PendingDrafts,
    Phases,
    Plan,
    RoundReport,
    Scores,
    Sequence,
    Tree,
    Verdict,
)
from outrider.engine.commit import OutputProcessor

__all__ = ["Round", "Verified", "depends_on_no_text", "has_mask", "phases_of", "stats_of"]


@dataclass(slots=True)
class Round:
    """A round that was planned, as far as it has come.

    Of a round that was planned while the one before it ran, sequences that ended there are dropped. `kept` are the places of
    the others in the load, `launched` their places in the forward.
    """

    batch: Batch
    processors: list[OutputProcessor]
    load: Load
    plan: Plan
    drafts: Drafts | PendingDrafts
    in_flight: InFlight | None = None
    proposed: tuple[Batch, Plan] = field(init=False)  # what the drafter was asked for
    drew_on_device: bool = field(init=False)
    kept: list[int] = field(init=False)
    launched: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.proposed = self.batch, self.plan
        self.drew_on_device = isinstance(self.drafts, PendingDrafts)
        self.kept = list(range(len(self.batch.sequences)))
        self.launched = self.kept

    @property
    def room(self) -> Seq[int]:
        return [self.load.room[place] for place in self.kept]

    def drop_ended(self) -> bool:
        """Leave out sequences that have ended since it was planned. Returns whether any is left."""
        self.batch.future = ()
        alive = [b for b, seq in enumerate(self.batch.sequences) if seq.finish_reason is None]
        if len(alive) < len(self.batch.sequences):
            self.batch = Batch([self.batch.sequences[b] for b in alive], [1] * len(alive))
            self.processors = [self.processors[b] for b in alive]
            self.kept = self.launched = [self.kept[b] for b in alive]
            lengths, arms = self.plan.lengths, self.plan.arms
            self.plan = self.plan._replace(
                lengths=tuple(lengths[b] for b in alive), arms=tuple(arms[b] for b in alive) if arms else arms
            )
            self.drafts.per_sequence = [self.drafts.per_sequence[b] for b in alive]
        if self.in_flight is None:
            self.launched = list(range(len(alive)))
        return bool(alive)

    def shorten(self, lengths: tuple[int, ...]) -> None:
        """Draft no more nodes than these."""
        self.plan = self.plan._replace(lengths=lengths)
        trees = zip(self.drafts.per_sequence, lengths, strict=True)
        self.drafts.per_sequence = [Tree.chain(tree.tokens[:length]) for tree, length in trees]

    def cut(self, drafts: Drafts) -> Drafts:
        """Of drafts as they were proposed, the sequences and nodes that are verified."""
        trees = [drafts.per_sequence[place] for place in self.kept]
        sizes = [min(len(tree.tokens), n) for tree, n in zip(trees, map(len, _tokens(self.drafts)), strict=True)]
        return Drafts([tree.subset(range(n)) if n < len(tree.tokens) else tree for tree, n in zip(trees, sizes, strict=True)])

    def scores_of(self, scores: Scores) -> Scores:
        """The scores of the sequences that are left."""
        if len(self.launched) < len(scores.roots):
            scores.roots = [scores.roots[place] for place in self.launched]
            scores.first_rows = [scores.first_rows[place] for place in self.launched]
        return scores

    def can_be_followed(self, running: int) -> bool:
        """Whether the next round's rows are known but for tokens that the target chooses: no text or mask decides more."""
        if self.plan.rule != "match" or len(self.batch.sequences) != running or self.load.emitting != self.load.rows:
            return False
        return all(map(_depends_on_choices_alone, self.batch.sequences))

    def following(self, choices: Seq[FutureTokens], context: int) -> Batch:
        """The sequences that this round does not end by their length, each with the choices at its root and nodes."""
        rows = [
            (seq, choices[place])
            for seq, place in zip(self.batch.sequences, self.launched, strict=True)
            if len(seq.tokens) + 1 < min(seq.max_length, context)
        ]
        return Batch([seq for seq, _ in rows], [1] * len(rows), [future for _, future in rows])


class Verified(NamedTuple):
    """A round before its commit."""

    round: Round
    drafts: Drafts
    verdicts: list[Verdict]
    scores: Scores
    tokens_at: float  # when the tokens came
    goes_on: bool  # the next round is planned and has its pages


def phases_of(marks: list[float], waited: float, learning: float) -> Phases:
    """The seconds of each phase. While the forward ran the host `waited` for drafts, which counts as proposing them."""
    schedule, plan, propose, select, forward, verifying, commit, record, settle = [b - a for a, b in pairwise(marks)]
    return Phases(schedule, plan, propose + waited, select, forward - waited, verifying, commit + settle, record, learning)


def stats_of(report: RoundReport, round_: Round, separate_prefill: bool) -> RoundStats:
    """A round as the controller learns from it: of every sequence it was planned for. Where prompts run through other kernels,
    such a round has no row count (0).
    """
    phases, planned = report.phases, len(round_.load.keys)
    drafted: list[int] = [0] * planned
    paths: list[Seq[int]] = [[]] * planned
    for place, verdict, seq in zip(round_.kept, report.verdicts, report.sequences, strict=True):
        drafted[place], paths[place] = len(seq.depths), verdict.path[: seq.accepted]
    return RoundStats(
        drafted,
        paths,
        0 if separate_prefill and report.prefill else report.rows,
        phases.propose,
        phases.forward,
        phases.verify + phases.commit + phases.record,
        phases.plan + phases.select + phases.learn,
        report.experts,
    )


def has_mask(seq: Sequence, fed: int) -> bool:
    """Whether a sequence can take part in a round: it needs no grammar mask, or has one."""
    return seq.guide is None or seq.cached + fed < len(seq.tokens) or seq.guide.ready(seq.tokens, seq.prompt_len)


def depends_on_no_text(batch: Batch) -> bool:
    """Whether sampling needs no tokens of the text, so that the device can choose before the host knows them."""
    return not any(seq.request.params.adjusts for seq in batch.sequences)


def _depends_on_choices_alone(seq: Sequence) -> bool:
    params = seq.request.params
    return not params.adjusts and params.logprobs is None and seq.guide is None


def _tokens(drafts: Drafts | PendingDrafts) -> list[list[int]]:
    return [tree.tokens for tree in drafts.per_sequence]
