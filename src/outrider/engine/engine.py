"""The round, the heart of the engine: plan, propose, select, score, verify, commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from time import perf_counter

from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.control import Load, Policy, RoundStats
from outrider.core import Batch, Drafts, Plan, Request, Scores, Sequence, Verdict
from outrider.draft import Drafter
from outrider.engine.commit import Settled, Writer, advance, note_prompt, settle_kv
from outrider.engine.guard import GuardedDrafter
from outrider.engine.outputs import Run
from outrider.engine.scheduler import Scheduler
from outrider.engine.tally import Tally
from outrider.model import Runner
from outrider.sampling import Grammars
from outrider.text import Tokenizer
from outrider.verify import guided, verify

__all__ = ["Engine"]

_log = logging.getLogger("outrider")


class Engine:
    """Runs requests to their end, one round at a time."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer | None, drafter: Drafter, policy: Policy, config: EngineConfig
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.drafter = GuardedDrafter(drafter, runner.decoder.config.vocab)
        self.policy = policy
        self.context = config.max_model_len or runner.decoder.config.context
        self.pages = PageTable(runner.pool.pages - 1, config.page_size)
        self.scheduler = Scheduler(self.pages, config)
        self.tally = Tally()
        vocab = runner.decoder.config.vocab
        self.grammars = Grammars(None, vocab, None) if tokenizer is None else Grammars(tokenizer.to_json, vocab, tokenizer.eos_id)
        self._writers: dict[Sequence, Writer] = {}
        self._suspects: set[Sequence] = set()  # sequences whose forward failed once
        self._learning = 0.0  # seconds the policy thought about the last round: part of what the next one costs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, method: str) -> Writer:
        """Queue a request; its Writer grows with every round."""
        seq = Sequence(request)
        seq.stats.method = method
        if request.params.structured is not None:
            seq.guide = self.grammars.guide(request.params.structured, request.stop_ids)
        self.scheduler.submit(seq)  # may refuse it
        self._writers[seq] = writer = Writer(seq, self.tokenizer)
        return writer

    def abort(self, writer: Writer) -> None:
        """End a request now; its pages are free at once."""
        if writer.seq.finish_reason is None:
            writer.seq.finish_reason = "abort"
            self._finish(writer.seq)

    def reset_counts(self) -> None:
        """Forget what was counted so far, such as a survey's own work."""
        self.tally = Tally()
        self.scheduler.preemptions = self.scheduler.prefix_queries = self.scheduler.prefix_hits = 0

    def round(self) -> list[Writer]:
        """Advance every running sequence; the writers that changed."""
        batch, started, stopped = self.scheduler.next()
        for seq in stopped:
            self.drafter.end(seq)
        for seq in started:
            self._writers[seq].start()
            self.drafter.begin(seq)
        if self._suspects:
            batch = self._one_suspect(batch)
        writers = [self._writers[seq] for seq in batch.sequences]
        load = self._load(batch)
        asked = perf_counter()
        plan = self.policy.plan(load)
        planned = perf_counter()
        plan = plan._replace(lengths=self.scheduler.reserve(batch, plan.lengths))
        drafts = guided(self.drafter.propose(batch, plan), batch, plan)
        proposed = perf_counter()
        drafts = self.policy.select(drafts, load)
        chosen = perf_counter()
        try:
            scores = self.runner.score(batch, drafts, self.drafter.needs.taps)
        except Exception as error:
            return self._forward_failed(batch, writers, error)
        scored = perf_counter()
        self._suspects.difference_update(batch.sequences)
        verdicts = verify(drafts, scores, batch, plan)
        settled = self._commit(batch, writers, drafts, verdicts, scores, plan)
        drafted = [own.drafted for own in settled]
        paths = [verdict.path[: own.accepted] for verdict, own in zip(verdicts, settled, strict=True)]
        ended = perf_counter()
        thought = planned - asked + chosen - proposed + self._learning
        stats = RoundStats(drafted, paths, load.rows + sum(drafted), proposed - planned, scored - chosen, ended - scored, thought)
        self.policy.observe(stats)
        self._learning = perf_counter() - ended
        return [writer for writer, own in zip(writers, settled, strict=True) if own.kept or writer.seq.finish_reason]

    def _load(self, batch: Batch) -> Load:
        sequences = batch.sequences
        emitting = sum(map(batch.samples, range(len(sequences))))
        context = sum(len(seq.tokens) for seq in sequences)
        methods = [seq.request.method for seq in sequences]
        arms = [None if own is None else self.policy.arms_named(own) for own in methods] if any(methods) else ()
        kinds = [seq.request.params.kind for seq in sequences]
        return Load([self._room(seq) for seq in sequences], sequences, sum(batch.feeds), context, emitting, arms, kinds)

    def _room(self, seq: Sequence) -> int:
        """Draft nodes that could still be emitted: a round gives one token more than it accepts."""
        if not (seq.decoding and seq.request.speculate) or seq.stats.fallback_reason is not None:
            return 0
        room = min(seq.remaining - 1, self.context - len(seq.tokens))
        if seq.request.draft_tokens is not None:
            room = min(room, seq.request.draft_tokens)
        return 0 if self._suspects else max(room, 0)

    def _commit(
        self, batch: Batch, writers: list[Writer], drafts: Drafts, verdicts: list[Verdict], scores: Scores, plan: Plan
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
            before = writer.last_token
            own = advance(writer, verdicts[b].tokens, rows, scores)
            own.drafted = len(trees[b].parents)
            depths = _depths(trees[b].parents)
            seq.stats.record(depths, own.accepted, own.kept)
            source = self.policy.arms[plan.arms[b]].name if depths and plan.arms else seq.stats.method
            writer.runs.append(Run(source, own.accepted, own.kept))
            self.tally.record(source, depths, own.accepted, own.kept)
            if before and own.kept:
                self.tally.note_gap((writer.last_token - before) / own.kept, own.kept)
            settled.append(own)
        settle_kv(self.runner.pool, batch, verdicts, settled)
        self.drafter.commit(batch, drafts, verdicts, scores)
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
        self._suspects.discard(seq)
        self.policy.forget(seq)
        if self.scheduler.remove(seq):
            self.drafter.end(seq)

    def _one_suspect(self, batch: Batch) -> Batch:
        """Those whose forward failed run one at a time, plainly, until the culprit is found."""
        for seq, fed in zip(batch.sequences, batch.feeds, strict=True):
            if seq in self._suspects:
                return Batch([seq], [fed])
        return batch

    def _forward_failed(self, batch: Batch, writers: list[Writer], error: Exception) -> list[Writer]:
        """Nothing was committed, so everything can be tried again; what fails alone has failed."""
        reason = f"{type(error).__name__}: {error}"
        _log.error("the target's forward failed for %d sequences (%s)", len(writers), reason)
        alone = batch.sequences[0]
        if alone not in self._suspects:
            self._suspects.update(batch.sequences)
            return []
        alone.finish_reason, alone.stop_reason = "error", f"the model's forward failed: {reason}"
        self._finish(alone)
        return writers


def _depths(parents: Seq[int]) -> list[int]:
    """Depth of every node, the root's children at 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
