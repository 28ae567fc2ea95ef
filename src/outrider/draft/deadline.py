"""A stranger's drafter, kept at arm's length: it runs in a thread of its own and has a deadline."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from outrider.core import Batch, Drafts, Plan, Scores, Sequence, Verdict
from outrider.draft.protocol import Drafter
from outrider.errors import DrafterFault

__all__ = ["DEADLINE_S", "Deadline"]

DEADLINE_S = 1.0


class Deadline:
    """The same drafter, except that a call that takes too long raises and is the last one ever made.

    A call that hangs cannot be stopped, so the drafter is quarantined: its thread is left behind and
    nothing is asked of it again. A call that merely raises does so here.
    """

    def __init__(self, drafter: Drafter, seconds: float = DEADLINE_S) -> None:
        self.needs = drafter.needs
        self._drafter = drafter
        self._seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._quarantined = ""
        threading.Thread(target=self._serve, name=f"outrider-{type(drafter).__name__}", daemon=True).start()

    def begin(self, seq: Sequence) -> None:
        self._call("begin", seq)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        return self._call("propose", batch, plan)  # type: ignore[no-any-return]

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        self._call("commit", batch, drafts, verdicts, scores)

    def end(self, seq: Sequence) -> None:
        self._call("end", seq)

    def _call(self, verb: str, *args: Any) -> Any:
        if self._quarantined:
            raise DrafterFault(self._quarantined)
        self._calls.put(lambda: getattr(self._drafter, verb)(*args))
        try:
            answer, error = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            name = type(self._drafter).__name__
            self._quarantined = f"{name}.{verb} took more than {self._seconds:g} s and is not asked again"
            raise DrafterFault(self._quarantined) from None
        if error is not None:
            raise error
        return answer

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._answers.put((call(), None))
            except Exception as error:
                self._answers.put((None, error))
