"""Drafters that fail, to force a fault in the benchmark."""

from __future__ import annotations

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict


class Raises:
    """Never drafts anything: every proposal raises."""

    needs = Needs()

    def begin(self, seq: Sequence) -> None:
        pass

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        raise RuntimeError("planted")

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass
