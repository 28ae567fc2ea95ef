"""Engines that run the same requests in turns of a round, so that what else the machine does falls on each of them alike."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from outrider.core import Request
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.ops import one_torch_thread

__all__ = ["Contestant", "run_in_turns"]

_TURN_ON_GPU = 0.1  # seconds, about: rounds run ahead there, and would do so into the next one's turn


class Contestant:
    """One of those that run the same requests: how far it is, and what that took."""

    def __init__(self, engine: Engine, requests: Iterable[tuple[Request, str]], on_gpu: bool = False) -> None:
        self.engine = engine
        self.engine.reset_counts()
        self.seconds = 0.0
        self.first_token_s = 0.0  # of them, until every request had a token
        self._turn = _TURN_ON_GPU if on_gpu else 0.0
        self.processors: list[OutputProcessor] = [engine.submit(request, method) for request, method in requests]

    @property
    def emitted(self) -> int:
        return self.engine.tally.emitted

    @property
    def rounds(self) -> int:
        return self.engine.tally.rounds

    def turn(self) -> None:
        begun = now = time.perf_counter()
        while self.engine.has_work and now - begun <= self._turn:
            self.engine.round()
            now = time.perf_counter()
        self.seconds += now - begun
        if not self.first_token_s and all(processor.first_token for processor in self.processors):
            self.first_token_s = self.seconds


def run_in_turns(contestants: Sequence[Contestant]) -> None:
    """Run all of them to the end, whoever is behind first.

    Of two equal engines one was 5 % quicker in one pair and slower in the next with turns of 0.1 s, and 1.3 % with turns of a
    round. They should share weights and KV memory: where those happen to lie makes two engines of one kind differ by several
    per cent.
    """
    with one_torch_thread(contestants[0].engine.runner.ops):
        while behind := [contestant for contestant in contestants if contestant.engine.has_work]:
            min(behind, key=lambda contestant: (contestant.emitted, contestant.seconds)).turn()
