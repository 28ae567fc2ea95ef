"""Which tokens may follow in one sequence's grammar.

The answer is a function of the grammar and the tokens alone, so it is the same with and without speculation. Other threads
compute it while the engine plans and runs the forward. A sequence whose mask takes long sits out rounds; no mask is ever
guessed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.sampling.matcher import Follower, Spec, Step
from outrider.sampling.sandbox import Sandbox, SandboxLost

__all__ = ["Compiled", "Guide", "MaskWorkers"]

MASK_S = 1.0  # processor time for one mask: a thousand times what common grammars take
REQUEST_S = 10.0  # processor time for all masks of a request that a sandbox computes
WAIT_S = 0.01  # longest wait of the engine for a mask; most take microseconds, so more means a busy machine or a heavy grammar
_REPLAY_S = 5.0  # processor time for a mask whose sandbox must first read the grammar and the text
# A token bucket of processor time for masks in the server's process, whose interpreter lock they hold: the burst, and the
# refill for each token of output. A grammar that needs more continues in a sandbox.
_BURST_S, _REFILL_S = 0.02, 0.001

_log = logging.getLogger("outrider")
_names = itertools.count()


class Compiled(NamedTuple):
    """A compiled grammar."""

    spec: Spec
    start: Any  # a matcher at the start of the output; None where only a sandbox may run the grammar


class MaskWorkers:
    """Threads that compute masks, and sandboxes for slow grammars. All guides of an engine share one."""

    def __init__(self, sandboxes: Sequence[Sandbox]) -> None:
        self.quick = ThreadPoolExecutor(2, "outrider-mask")
        self.sandboxes = sandboxes
        self._event = threading.Event()

    def notify(self) -> None:
        """Notify the engine that a mask or a compiled grammar is ready."""
        self._event.set()

    def wait(self) -> None:
        """Wait for the next `notify`, at most WAIT_S."""
        self._event.wait(WAIT_S)
        self._event.clear()


class _Question(NamedTuple):
    path: tuple[int, ...] = ()
    forced: bool = False  # asks for the tokens that must follow, not for the mask of those that may


_ROOT = _Question()
_Answer = Tensor | list[int] | None


class Guide:
    """The state of one sequence in its grammar, and the mask of the tokens that may follow. Answers hold until it grows."""

    def __init__(self, compiled: Future[Compiled], workers: MaskWorkers, vocab: int, ends: frozenset[int]) -> None:
        self.fault: str | None = None  # why the grammar can be followed no further
        self.slow = False  # a sandbox computes its masks
        self.too_slow = False  # the fault is that it took too long
        self._compiled = compiled
        self._workers = workers
        self._vocab = vocab
        self._ends = ends
        self._name = next(_names)
        self.nothing = torch.zeros(vocab, dtype=torch.bool)  # (V,)
        self._follower: Follower | None = None
        self._changed = threading.Condition()
        self._length = -1  # tokens of the sequence for which the answers hold
        self._used: dict[_Question, _Answer] = {}  # answers this round has read; it reads no others
        self._answers: dict[_Question, _Answer] = {}
        self._requested: set[_Question] = set()
        self._queue: deque[tuple[_Question, list[int]]] = deque()
        self._busy = False  # a worker serves the queue
        self._late = False  # a wait timed out, and the queue is not empty yet
        self._accepting = False
        self._cpu_budget_s = _BURST_S
        self._sandbox_s = 0.0  # processor seconds in the sandbox
        self._known_start = 0  # which process of the sandbox knows the text
        compiled.add_done_callback(lambda _: workers.notify())

    def ready(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the sequence can take part in a round: its mask is known, or will be before the forward is done.

        `tokens` are those of the sequence and only grow; its output begins at `start`.
        """
        with self._changed:
            self._reset_for(tokens)
            if not self._compiled.done():
                return False
            if _ROOT in self._answers:
                self._used[_ROOT] = self._answers[_ROOT]
                return True
            self._ask(_ROOT, tokens[start:])
            return not (self.slow or self._late)

    def allowed(self, tokens: Sequence[int], start: int, path: Sequence[int] = ()) -> Tensor | None:
        """Which tokens may follow the sequence and a path of drafted ones: (V,) bool.

        None where that is unknown: the path leaves the grammar, hits a limit of the parser, or takes too long. Nothing may
        be chosen there. Once the grammar is complete only end tokens may follow, and after an end token only end tokens.
        """
        mask = self._answer(_Question(tuple(path)), tokens, start)
        assert not isinstance(mask, list)
        return mask

    def forced(self, tokens: Sequence[int], start: int) -> list[int]:
        """Tokens that must follow, as far as is known in time."""
        forced = self._answer(_Question(forced=True), tokens, start)
        return forced if isinstance(forced, list) else []

    def complete(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the output so far matches the whole grammar."""
        return self.allowed(tokens, start) is not None and self._accepting

    def end(self) -> None:
        """Drop the queue: the sequence has ended."""
        with self._changed:
            self._queue.clear()

    def prefetch(self, tokens: Sequence[int], start: int, paths: Sequence[Sequence[int]]) -> None:
        """Start computing the masks after these drafted paths."""
        with self._changed:
            self._reset_for(tokens)
            if self._compiled.done() and not (self.slow or self._late):
                output = tokens[start:]
                for path in paths:
                    self._ask(_Question(tuple(path)), output)

    def _answer(self, question: _Question, tokens: Sequence[int], start: int) -> _Answer:
        with self._changed:
            self._reset_for(tokens)
            if question not in self._used:
                self._used[question] = self._wait_for(question, tokens[start:])
            return self._used[question]

    def _wait_for(self, question: _Question, output: Sequence[int]) -> _Answer:
        if self._compiled.done() and not (self.slow or self._late):
            self._ask(question, output)
            self._changed.wait_for(lambda: question in self._answers or self.slow, WAIT_S)
            self._late = question not in self._answers
        return self._answers.get(question)

    def _reset_for(self, tokens: Sequence[int]) -> None:
        grown = len(tokens) - self._length
        if grown:
            self._used.clear()
            self._answers.clear()
            self._requested.clear()
            self._queue.clear()
            self._length = len(tokens)
            self._cpu_budget_s = min(self._cpu_budget_s + grown * _REFILL_S, _BURST_S)

    def _ask(self, question: _Question, output: Sequence[int]) -> None:
        if question in self._requested:
            return
        self._requested.add(question)
        self._queue.append((question, list(output)))
        if not self._busy:
            self._busy = True
            self._send()

    def _send(self) -> None:
        """Give the queue to a worker."""
        if self.slow:
            sandbox = self._workers.sandboxes[self._name % len(self._workers.sandboxes)]
            sandbox.submit(lambda: self._work(sandbox))
        else:
            self._workers.quick.submit(self._work)

    def _work(self, sandbox: Sandbox | None = None) -> None:
        """Answer the queue in order, on a worker's thread."""
        while (taken := self._next(sandbox)) is not None:
            length, question, output = taken
            try:
                answer = self._quickly(question, output) if sandbox is None else self._sandboxed(output, sandbox)
            except Exception as error:
                if not isinstance(error, OutriderError):  # those say enough without a traceback
                    _log.exception("a grammar could not be followed")
                answer = self._failed(f"{type(error).__name__}: {error}") if question == _ROOT else None
            with self._changed:
                if length == self._length and (question != _ROOT or answer is not None):
                    self._answers[question] = answer
                elif length == self._length:  # this process cannot answer; a sandbox will
                    self._queue.appendleft((question, output))
                self._changed.notify_all()
            if question == _ROOT:
                self._workers.notify()

    def _next(self, sandbox: Sandbox | None) -> tuple[int, _Question, list[int]] | None:
        """The next question and the length it is for; None where another worker takes over or the queue is empty."""
        with self._changed:
            if self.slow:  # a sandbox does not follow drafted paths
                kept = [item for item in self._queue if item[0] == _ROOT]
                self._queue = deque(kept)
            if not self._queue:
                self._busy = self._late = False
                return None
            if self.slow and sandbox is None:
                self._send()
                return None
            return self._length, *self._queue.popleft()

    def _quickly(self, question: _Question, output: list[int]) -> _Answer:
        """Answer in this process and charge the time. None for the text itself means that a sandbox must answer."""
        if self._follower is None:
            compiled = self._compiled.result()
            if compiled.start is None:
                self.slow = True
                return None
            self._follower = Follower(compiled.start, self._ends)
        begun = time.thread_time()
        step = None if question.forced else self._follower.step(output, question.path)
        forced = self._follower.forced(output) if question.forced else None
        self._cpu_budget_s -= time.thread_time() - begun
        if self._cpu_budget_s < 0 or (step is not None and step.fault is not None):
            self.slow = True
        if step is None or step.fault is not None:
            return forced
        return self._mask(step, question)

    def _sandboxed(self, output: list[int], sandbox: Sandbox) -> _Answer:
        """The mask after the text itself, from a sandbox, which does not follow drafted paths."""
        spec = self._compiled.result().spec
        budget = MASK_S if self._known_start == sandbox.process.starts else _REPLAY_S
        try:
            step = Step(*sandbox.ask(["step", spec, self._name, sorted(self._ends), output], budget))
        except SandboxLost as lost:
            self.too_slow = True
            return self._failed(f"one token of it: {lost}")
        self._known_start = sandbox.process.starts
        self._sandbox_s += sandbox.process.used_s
        if self._sandbox_s > REQUEST_S:
            self.too_slow = True
            return self._failed(f"its tokens take more than {REQUEST_S:g} s of work")
        return self._mask(step, _ROOT)

    def _failed(self, fault: str) -> Tensor:
        self._accepting = False
        self.fault = fault
        return self.nothing

    def _mask(self, step: Step, question: _Question) -> Tensor:
        if question == _ROOT:
            self.fault, self._accepting = step.fault, step.accepting
        if step.bits is None:
            mask = self.nothing.clone()
        else:
            bits = np.unpackbits(np.frombuffer(step.bits, np.uint8), bitorder="little")[: self._vocab]
            mask = torch.from_numpy(bits).bool()
        if step.accepting and step.fault is None:
            mask[[token for token in self._ends if token < self._vocab]] = True
        return mask
