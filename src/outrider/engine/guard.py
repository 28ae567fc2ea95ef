"""The engine's side of a drafter: whatever it does costs speed, never the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Verdict
from outrider.core import Sequence as Generation
from outrider.draft import Drafter, check_drafts

__all__ = ["GuardedDrafter"]

_log = logging.getLogger("outrider")
_PATIENCE = 3  # faults in a row before the drafter is set aside for everybody
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096  # rounds
T = TypeVar("T")


class GuardedDrafter:
    """A drafter behind a breaker.

    A fault sends the sequences it was asked about on by plain decoding for the rest of their lives,
    since their drafting state may be torn. After several faults in a row the breaker opens: whoever
    runs in the next rounds decodes plainly, and then the first proposal for a newcomer is a probe that
    closes it or opens it for twice as long.
    """

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter = drafter
        self._vocab = vocab
        self._faults = 0
        self._pause = _FIRST_PAUSE
        self._resting = 0  # rounds left
        self._said: set[str] = set()  # each kind of fault is told once

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    def begin(self, seq: Generation) -> None:
        self._call([seq], "begin", lambda: self.drafter.begin(seq))

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        """The drafter's guesses where it is sound, none where it is not. Those still being drawn are looked at when they land."""
        empty = Drafts.empty(len(batch.sequences))
        if self._resting:
            self._resting -= 1
            _set_aside(batch.sequences, "the drafter rests after repeated faults")
            return empty
        if not any(plan.lengths):
            return empty
        drafts = self._call(_planned(batch, plan), "propose", lambda: self.drafter.propose(batch, plan))
        if drafts is None or drafts.ahead is not None:
            return drafts or empty
        return self._checked(drafts, batch, plan)

    def land(self, drafts: Drafts, batch: Batch, plan: Plan) -> Drafts:
        """Guesses that were still being drawn, now that they are."""
        assert drafts.ahead is not None
        found = self._call(_planned(batch, plan), "propose", drafts.ahead)
        return Drafts.empty(len(batch.sequences)) if found is None else self._checked(found, batch, plan)

    def _checked(self, drafts: Drafts, batch: Batch, plan: Plan) -> Drafts:
        sound = self._call(_planned(batch, plan), "propose", lambda: check_drafts(drafts, plan, self._vocab))
        if sound is None:
            return Drafts.empty(len(batch.sequences))
        self._faults, self._pause = 0, _FIRST_PAUSE
        return sound

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        if any(seq.request.speculate and seq.stats.fallback_reason is None for seq in batch.sequences):
            self._call(batch.sequences, "commit", lambda: self.drafter.commit(batch, drafts, verdicts, scores))

    def end(self, seq: Generation) -> None:
        self._call([seq], "end", lambda: self.drafter.end(seq))

    def _call(self, sequences: Sequence[Generation], verb: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            kind = f"{type(self.drafter).__name__}.{verb}: {type(error).__name__}"
            self._note(sequences, kind, f"{kind}: {error}")
            return None

    def _note(self, sequences: Sequence[Generation], kind: str, reason: str) -> None:
        _set_aside(sequences, reason)
        self._faults += 1
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("the drafter failed; tokens stay the same, only slower (%s)", reason)
        if self._faults == _PATIENCE:
            self._faults, self._resting = _PATIENCE - 1, self._pause  # one more fault opens it again
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            _log.warning("the drafter failed %d times in a row and rests for %d rounds (%s)", _PATIENCE, self._resting, reason)


def _planned(batch: Batch, plan: Plan) -> list[Generation]:
    return [seq for seq, n in zip(batch.sequences, plan.lengths, strict=True) if n]


def _set_aside(sequences: Sequence[Generation], reason: str) -> None:
    for seq in sequences:
        if seq.request.speculate:
            seq.stats.fallback_reason = seq.stats.fallback_reason or reason
