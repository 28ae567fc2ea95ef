"""No drafter: plain decoding through the same code."""

from __future__ import annotations

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict

__all__ = ["NoDrafter"]


class NoDrafter:
    """Drafts nothing.

    What it does: every round emits one token.
    When it helps: as the baseline, and where nothing can be guessed.
    Cost: none.
    Needs: nothing.
    Reference: -
    """

    needs = Needs()

    def begin(self, seq: Sequence) -> None:
        pass

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        return Drafts.empty(len(batch.sequences))

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass
