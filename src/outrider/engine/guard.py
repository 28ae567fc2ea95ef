"""A circuit breaker around a drafter: its faults cost speed, never the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from outrider.core import Batch, Drafts, Needs, PendingDrafts, Plan, Scores, Verdict
from outrider.core import Sequence as Generation
from outrider.draft import Drafter, Kept, check_drafts
from outrider.draft.deadline import Deadline
from outrider.draft.protocol import Overlapping, check_kind, kept_by
from outrider.errors import EngineDead

__all__ = ["GuardedDrafter"]

_log = logging.getLogger("outrider")
_MAX_FAULTS = 3  # consecutive faults before the breaker opens for all sequences
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096  # rounds
T = TypeVar("T")


class GuardedDrafter:
    """A drafter behind a circuit breaker.

    After a fault, the sequences of that call are decoded plainly until they end, because their drafting
    state may be inconsistent. After several consecutive faults the breaker opens, and all sequences of the next
    rounds are decoded plainly. Then the first proposal for a new sequence closes the breaker, or opens it
    for twice as long.
    """

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter = drafter
        self._vocab = vocab
        self._faults = 0
        self._pause = _FIRST_PAUSE
        self._pause_left = 0  # rounds until the breaker lets a proposal through
        self._logged: set[str] = set()  # kinds of fault that were already logged

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    def begin(self, seq: Generation) -> None:
        self._call([seq], "begin", lambda: self.drafter.begin(seq))

    def propose(self, batch: Batch, plan: Plan) -> Drafts | PendingDrafts:
        """The drafter's checked drafts, or empty drafts after a fault. Drafts still on the device are checked in `resolve`."""
        empty = Drafts.empty(len(batch.sequences))
        if self._pause_left:
            self._pause_left -= 1
            _set_aside(batch.sequences, "the drafter rests after repeated faults")
            return empty
        if not any(plan.lengths):
            return empty

        def draw() -> Drafts | PendingDrafts:
            drafts = self.drafter.propose(batch, plan)
            return drafts if isinstance(drafts, PendingDrafts) else self._checked(drafts, plan)

        return self._call(_planned(batch, plan), "propose", draw) or empty

    def propose_next(self, batch: Batch, plan: Plan) -> PendingDrafts | None:
        """Drafts for the round after the one in flight; None where the drafter cannot tell or failed."""
        if not self.drafter.needs.overlaps:
            return None
        overlapping = cast(Overlapping, self.drafter)
        return self._call(_planned(batch, plan), "propose", lambda: overlapping.propose_next(batch, plan))

    def resolve(self, drafts: PendingDrafts, batch: Batch, plan: Plan) -> Drafts:
        """Wait for drafts that were still on the device, and check them."""
        resolved = self._call(_planned(batch, plan), "propose", lambda: self._checked(drafts.resolve(), plan))
        return resolved or Drafts.empty(len(batch.sequences))

    def _checked(self, drafts: Drafts, plan: Plan) -> Drafts:
        checked = check_drafts(check_kind(drafts), plan, self._vocab)
        self._faults, self._pause = 0, _FIRST_PAUSE
        return checked

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        if any(seq.request.speculate and seq.stats.fallback_reason is None for seq in batch.sequences):
            self._call(batch.sequences, "commit", lambda: self.drafter.commit(batch, drafts, verdicts, scores))

    def end(self, seq: Generation) -> None:
        self._call([seq], "end", lambda: self.drafter.end(seq))

    def kept(self, owner: str) -> Kept:
        return kept_by([self.drafter], "kept", owner)

    def remember(self, owner: str, tokens: Sequence[int]) -> Kept:
        return kept_by([self.drafter], "remember", owner, tokens)

    def forget(self, owner: str) -> Kept:
        return kept_by([self.drafter], "forget", owner)

    def _call(self, sequences: Sequence[Generation], verb: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except EngineDead:  # the target's, not the drafter's fault
            raise
        except Exception as error:
            self._note(sequences, f"{self._name}.{verb}: {type(error).__name__}", error)
            return None

    @property
    def _name(self) -> str:
        """The name of the drafter's class, also where the drafter runs behind a deadline."""
        return self.drafter.name if isinstance(self.drafter, Deadline) else type(self.drafter).__name__

    def _note(self, sequences: Sequence[Generation], kind: str, error: Exception) -> None:
        reason = f"{kind}: {error}"
        _set_aside(sequences, reason)
        self._faults += 1
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("the drafter failed; tokens stay the same, only slower (%s)", reason, exc_info=error)
        if self._faults == _MAX_FAULTS:
            self._faults, self._pause_left = _MAX_FAULTS - 1, self._pause  # the next fault opens the breaker again
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            _log.warning(
                "the drafter failed %d times in a row and rests for %d rounds (%s)", _MAX_FAULTS, self._pause_left, reason
            )


def _planned(batch: Batch, plan: Plan) -> list[Generation]:
    """The sequences that may draft."""
    return [seq for seq, n in zip(batch.sequences, plan.lengths, strict=True) if n]


def _set_aside(sequences: Sequence[Generation], reason: str) -> None:
    for seq in sequences:
        if seq.request.speculate:
            seq.stats.fallback_reason = seq.stats.fallback_reason or reason
