"""The round, the heart of the engine: plan, propose, select, score, verify, commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeVar

from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.control import Load, Policy, RoundStats
from outrider.core import Batch, Drafts, Plan, Request, Scores, Sequence, Verdict
from outrider.draft import Drafter, check_drafts
from outrider.engine.commit import Settled, Writer, advance, note_prompt, settle_kv
from outrider.engine.scheduler import Scheduler
from outrider.model import Runner
from outrider.text import Tokenizer
from outrider.verify import verify

__all__ = ["Engine"]

_log = logging.getLogger("outrider")
T = TypeVar("T")


class Engine:
    """Runs requests to their end, one round at a time."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer | None, drafter: Drafter, policy: Policy, config: EngineConfig
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.policy = policy
        self.context = config.max_model_len or runner.decoder.config.context
        self.pages = PageTable(runner.pool.pages - 1, config.page_size)
        self.scheduler = Scheduler(self.pages, config)
        self._writers: dict[Sequence, Writer] = {}
        self._warned = False

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, method: str) -> Writer:
        """Queue a request; its Writer grows with every round."""
        seq = Sequence(request)
        seq.stats.method = method
        self._writers[seq] = writer = Writer(seq, self.tokenizer)
        self.scheduler.submit(seq)
        return writer

    def abort(self, writer: Writer) -> None:
        """End a request now; its pages are free at once."""
        if writer.seq.finish_reason is None:
            writer.seq.finish_reason = "abort"
            self._finish(writer.seq)

    def round(self) -> list[Writer]:
        """Advance every running sequence; the writers that changed."""
        batch, started, stopped = self.scheduler.next()
        for seq in stopped:
            self._guarded([seq], "end", partial(self.drafter.end, seq))
        for seq in started:
            self._guarded([seq], "begin", partial(self.drafter.begin, seq))
        writers = [self._writers[seq] for seq in batch.sequences]
        load = Load([self._room(seq) for seq in batch.sequences])
        plan = self.policy.plan(load)
        plan = plan._replace(lengths=self.scheduler.reserve(batch, plan.lengths))
        drafts = self.policy.select(self._propose(batch, plan), load)
        scores = self.runner.score(batch, drafts, self.drafter.needs.taps)
        verdicts = verify(drafts, scores, batch, plan)
        settled = self._commit(batch, writers, drafts, verdicts, scores)
        self.policy.observe(RoundStats([own.drafted for own in settled], [own.accepted for own in settled]))
        return [writer for writer, own in zip(writers, settled, strict=True) if own.kept or writer.seq.finish_reason]

    def _room(self, seq: Sequence) -> int:
        """Draft nodes that could still be emitted: a round gives one token more than it accepts."""
        if not (seq.decoding and seq.request.speculate) or seq.stats.fallback_reason is not None:
            return 0
        return max(min(seq.remaining - 1, self.context - len(seq.tokens)), 0)

    def _propose(self, batch: Batch, plan: Plan) -> Drafts:
        """The drafter's guesses, or none where it breaks: speed is lost, never the text."""
        empty = Drafts.empty(len(batch.sequences))
        if not any(plan.lengths):
            return empty
        vocab = self.runner.decoder.config.vocab
        planned = [seq for seq, n in zip(batch.sequences, plan.lengths, strict=True) if n]
        propose = lambda: check_drafts(self.drafter.propose(batch, plan), plan, vocab)  # noqa: E731
        return self._guarded(planned, "propose", propose) or empty

    def _commit(
        self, batch: Batch, writers: list[Writer], drafts: Drafts, verdicts: list[Verdict], scores: Scores
    ) -> list[Settled]:
        trees = drafts.on_host()
        settled = []
        for b, (seq, writer) in enumerate(zip(batch.sequences, writers, strict=True)):
            if b in scores.prompt_logits:
                note_prompt(writer, seq.cached, scores.prompt_logits[b])
            root = scores.roots[b]
            if root < 0:
                seq.cached += batch.feeds[b]
                settled.append(Settled())
                continue
            rows = [root, *(root + 1 + node for node in verdicts[b].path)]
            own = advance(writer, verdicts[b].tokens, rows, scores)
            own.drafted = len(trees[b].parents)
            seq.stats.record(_depths(trees[b].parents), own.accepted, own.kept)
            settled.append(own)
        settle_kv(self.runner.pool, batch, verdicts, settled)
        self._guarded(batch.sequences, "commit", lambda: self.drafter.commit(batch, drafts, verdicts, scores))
        for seq in batch.sequences:
            if seq.finish_reason != "error":
                self.scheduler.settle(seq)
            if seq.finish_reason is not None:
                self._finish(seq)
        return settled

    def _finish(self, seq: Sequence) -> None:
        if seq.finish_reason == "error":
            self.runner.pool.clear(self.pages.disown(seq.pages))
        self._writers.pop(seq, None)
        if self.scheduler.remove(seq):
            self._guarded([seq], "end", partial(self.drafter.end, seq))

    def _guarded(self, sequences: list[Sequence], verb: str, call: Callable[[], T]) -> T | None:
        """Run a drafter's verb; a fault sends these sequences on by plain decoding."""
        try:
            return call()
        except Exception as error:
            reason = f"{type(self.drafter).__name__}.{verb}: {type(error).__name__}: {error}"
            for seq in sequences:
                seq.stats.fallback_reason = seq.stats.fallback_reason or reason
            if not self._warned:
                self._warned = True
                _log.warning("the drafter failed and is set aside; tokens stay the same, only slower (%s)", reason)
            return None


def _depths(parents: Seq[int]) -> list[int]:
    """Depth of every node, the root's children at 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
