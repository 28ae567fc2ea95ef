"""What happens inside an engine while it runs, seen from outside: the phases of every round and the gaps between tokens.

Calls are wrapped for the time of a run and unwrapped after it; a wrapped call costs well under a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from outrider.core import Batch, Drafts, Scores
from outrider.core import Sequence as Generation
from outrider.engine import engine as engine_module
from outrider.engine.commit import Writer
from outrider.engine.llm import LLM
from outrider.heads.runners import EagleRunner, MedusaRunner
from outrider.model import Runner

__all__ = ["Round", "Watch", "decode_rounds", "watching"]

_FORWARDS: tuple[tuple[type, str], ...] = (
    (Runner, "run"),
    (Runner, "logits"),
    (EagleRunner, "fuse"),
    (EagleRunner, "forward"),
    (EagleRunner, "logits"),
    (MedusaRunner, "logits"),
)


@dataclass(slots=True)
class Round:
    """Seconds of one round: proposing and the drafter's commit, the target's forward, the choices, and all of it."""

    wall: float = 0.0
    propose: float = 0.0
    record: float = 0.0  # the drafter's commit
    verify: float = 0.0
    choose: float = 0.0
    alone: float = 0.0  # the same forwards run again with nothing between them
    rows: int = 0  # of the target's forward
    nodes: int = 0  # drafted
    decoding: bool = False  # nobody read a prompt

    @property
    def draft(self) -> float:
        return self.propose + self.record

    @property
    def host(self) -> float:
        """What is left: scheduling, planning, laying out, commit, text."""
        return self.wall - self.draft - self.verify - self.choose


@dataclass(slots=True)
class Watch:
    """Every round of a run, and the seconds between the rounds that brought a sequence tokens."""

    rounds: list[Round] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    _now: Round = field(default_factory=Round)
    _last: dict[Generation, float] = field(default_factory=dict)
    _forwards: list[Callable[[], Any]] = field(default_factory=list)
    _paused: float = 0.0

    def around_round(self, call: Callable[[], list[Writer]]) -> Callable[[], list[Writer]]:
        def timed() -> list[Writer]:
            self._now, self._paused = Round(), 0.0
            self._forwards.clear()
            begun = perf_counter()
            writers = call()
            ended = perf_counter()
            self._now.wall = ended - begun - self._paused
            self.rounds.append(self._now)
            for writer in writers:
                if writer.seq in self._last:
                    self.gaps.append(ended - self._last[writer.seq])
                self._last[writer.seq] = ended
            return writers

        return timed

    def around(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = perf_counter()
            try:
                return call(*args)
            finally:
                setattr(self._now, phase, getattr(self._now, phase) + perf_counter() - begun)

        return timed

    def around_score(self, call: Callable[..., Scores], again: bool) -> Callable[..., Scores]:
        timed = self.around("verify", call)

        def scored(batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:
            now = self._now
            now.nodes = sum(len(tree.tokens) for tree in drafts.on_host())
            now.rows = sum(batch.feeds) + now.nodes
            now.decoding = all(seq.output_len for seq in batch.sequences)
            scores: Scores = timed(batch, drafts, taps)
            if again:
                self._run_alone()
            return scores

        return scored

    def around_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._forwards.append(lambda: call(*args, **kwargs))
            return call(*args, **kwargs)

        return noted

    def _run_alone(self) -> None:
        """The round's forwards once more, back to back, on the inputs they had: the same rows write the same KV."""
        begun = _settled()
        for forward in self._forwards:
            forward()
        self._now.alone = self._paused = _settled() - begun


@contextmanager
def watching(llm: LLM, alone: bool = False) -> Iterator[Watch]:
    """Watch an engine; with `alone`, every round's forwards are also timed by themselves, outside the round's time."""
    watch, engine = Watch(), llm.engine
    with ExitStack() as stack:

        def wrap(owner: object, name: str, wrapper: Callable[[Any], Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))

        wrap(engine, "round", watch.around_round)
        wrap(engine.drafter, "propose", lambda call: watch.around("propose", call))
        wrap(engine.drafter, "commit", lambda call: watch.around("record", call))
        wrap(engine.runner, "score", lambda call: watch.around_score(call, alone))
        wrap(engine_module, "verify", lambda call: watch.around("choose", call))
        for owner, name in _FORWARDS if alone else ():
            wrap(owner, name, watch.around_forward)
        yield watch


def _settled() -> float:
    """The time when everything asked of a GPU is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()


def decode_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Those in which nobody read a prompt."""
    return [own for own in rounds if own.decoding]
