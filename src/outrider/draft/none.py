"""No drafter: plain decoding through the same code."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft.context import DraftContext

__all__ = ["NoDrafter"]


@dataclass(frozen=True)
class NoOptions:
    """There is nothing to set."""


class NoDrafter:
    """Drafts nothing.

    What it does: every round emits one token.
    When it helps: as the baseline, and where nothing can be guessed.
    Cost: none.
    Needs: nothing.
    Reference: -
    """

    Options = NoOptions
    needs = Needs()

    @classmethod
    def build(cls, context: DraftContext) -> NoDrafter:  # noqa: ARG003
        return cls()

    def begin(self, seq: Sequence) -> None:
        pass

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        return Drafts.empty(len(batch.sequences))

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass
