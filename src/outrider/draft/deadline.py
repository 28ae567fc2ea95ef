"""A user's drafter behind a boundary: it runs in a separate thread, has a deadline, and sees only copies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, cast

import torch

from outrider.core import Batch, Drafts, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.protocol import Drafter, Lookup, check_drafts, check_kind
from outrider.errors import DrafterFault
from outrider.ops import set_torch_threads_here

__all__ = ["DEADLINE_S", "Deadline"]

DEADLINE_S = 1.0
_Answers = queue.SimpleQueue[tuple[Any, Exception | None]]


class Deadline:
    """A drafter whose calls have a deadline: one that takes too long raises and is the last one ever made.

    A call that hangs cannot be stopped, so the drafter is quarantined: its thread is left behind and nothing is asked of
    it again. A call that merely raises does so here. Whatever it is shown is a copy, so that nothing it changes, now or
    after its deadline, reaches the text; a sequence has one copy from its begin to its end.
    """

    def __init__(self, drafter: Drafter, seconds: float = DEADLINE_S, vocab: int = 0) -> None:
        self.needs = replace(drafter.needs, keeps=False)
        self.name = type(drafter).__name__
        self._drafter = drafter
        self._seconds = seconds
        self._vocab = vocab  # of the target, for guesses that drafters feed to their models
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], _Answers]] = queue.SimpleQueue()
        self._quarantined = ""
        self._started = False
        self._copies: dict[Sequence, Sequence] = {}

    def begin(self, seq: Sequence) -> None:
        self._copies[seq] = Sequence.__new__(Sequence)
        copy = self._copy(seq)
        try:
            self._call("begin", lambda: self._drafter.begin(copy))
        except BaseException:
            del self._copies[seq]
            raise

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        shown = self._batch(batch)
        drafts: Drafts = self._call("propose", lambda: _proposed(self._drafter.propose(shown, plan)))
        return drafts

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        copies = [Verdict(*map(list, verdict)) for verdict in verdicts]
        shown = self._batch(batch), _copied(drafts), copies, _copied_scores(scores)
        self._call("commit", lambda: self._drafter.commit(*shown))

    def end(self, seq: Sequence) -> None:
        copy = self._copy(seq)
        self._copies.pop(seq, None)
        self._call("end", lambda: self._drafter.end(copy))

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        """A lookup's guess after a path, checked here: in a cascade a model reads it before the engine sees it."""
        copy, before, drafter = self._copy(seq), list(path), cast(Lookup, self._drafter)
        drafts: Drafts = self._call("follow", lambda: _followed(drafter.follow(copy, before, nodes)))
        check_drafts(drafts, Plan((nodes,)), self._vocab)
        return drafts.per_sequence[0]

    def _batch(self, batch: Batch) -> Batch:
        return Batch([self._copy(seq) for seq in batch.sequences], list(batch.feeds))

    def _copy(self, seq: Sequence) -> Sequence:
        """The drafter's copy of a sequence, as the sequence is now; one that it has not begun is copied anew every time."""
        copy = self._copies.get(seq) or Sequence.__new__(Sequence)
        for name in Sequence.__slots__:
            setattr(copy, name, getattr(seq, name))
        copy.tokens, copy.pages, copy.keys = list(seq.tokens), list(seq.pages), list(seq.keys)
        drafted, accepted = list(seq.stats.drafted_by_position), list(seq.stats.accepted_by_position)
        copy.stats = replace(seq.stats, drafted_by_position=drafted, accepted_by_position=accepted)
        return copy

    def _call(self, verb: str, call: Callable[[], Any]) -> Any:
        if self._quarantined:
            raise DrafterFault(self._quarantined)
        if not self._started:
            self._started, threads = True, torch.get_num_threads()  # torch has as many there as on the engine's thread
            name = f"outrider-{self.name}"
            threading.Thread(target=_serve, args=(self._calls, threads), name=name, daemon=True).start()
        answers: _Answers = queue.SimpleQueue()  # one for each call: a call that was interrupted leaves nothing for the next
        self._calls.put((call, answers))
        try:
            answer, error = answers.get(timeout=self._seconds)
        except queue.Empty:
            self._quarantined = f"{self.name}.{verb} took more than {self._seconds:g} s and is not asked again"
            raise DrafterFault(self._quarantined) from None
        if error is not None:
            raise error
        return answer


def _proposed(answer: object) -> Drafts:
    return _copied(check_kind(answer))


def _followed(tree: Tree) -> Drafts:
    tokens, parents, survival = tree
    return Drafts.trees([(tokens, parents)], survival=[survival])


def _copied(drafts: Drafts) -> Drafts:
    """A copy of the guesses, which a user's code can change no more, and nothing but guesses: no rows of the target."""
    q = None if drafts.q is None else drafts.q.clone()
    return Drafts.trees([tree[:2] for tree in drafts.per_sequence], q, drafts.survival)


def _copied_scores(scores: Scores) -> Scores:
    prompts = {b: logits.clone() for b, logits in scores.prompt_logits.items()}
    taps = None if scores.taps is None else scores.taps.clone()
    choices = None if scores.choices is None else list(scores.choices)
    return Scores(scores.logits.clone(), list(scores.roots), list(scores.first_rows), taps, prompts, choices)


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], _Answers]], threads: int) -> None:
    set_torch_threads_here(threads)
    while True:
        call, answers = calls.get()
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))
        except BaseException as error:  # it may leave its own call, and nothing else
            answers.put((None, DrafterFault(f"{type(error).__name__}: {error}")))
