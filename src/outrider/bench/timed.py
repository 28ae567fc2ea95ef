"""A drafter that counts the time spent in it."""

from __future__ import annotations

import time

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft import Drafter

__all__ = ["TimedDrafter"]


class TimedDrafter:
    """Another drafter, and the seconds of each proposal and of each commit after one."""

    def __init__(self, drafter: Drafter) -> None:
        self.proposals: list[float] = []
        self.commits: list[float] = []
        self._drafter = drafter

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    def begin(self, seq: Sequence) -> None:
        self._drafter.begin(seq)

    def end(self, seq: Sequence) -> None:
        self._drafter.end(seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        start = time.perf_counter()
        drafts = self._drafter.propose(batch, plan)
        self.proposals.append(time.perf_counter() - start)
        return drafts

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        start = time.perf_counter()
        self._drafter.commit(batch, drafts, verdicts, scores)
        self.commits.append(time.perf_counter() - start)
