"""The round, the heart of the engine: plan, propose, select, score, verify, commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
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
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        drafter: Drafter,
        policy: Policy,
        config: EngineConfig,
        pages: PageTable | None = None,  # of another engine on the same runner
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.drafter = GuardedDrafter(drafter, runner.decoder.config.vocab)
        self.policy = policy
        self.context = config.max_model_len or runner.decoder.config.context
        self.pages = PageTable(runner.pool.pages - 1, config.page_size) if pages is None else pages
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
        plan = plan._replace(lengths=self.scheduler.reserve(batch, plan.lengths), whole=plan.whole and _known_law(batch))
        drafts = self.drafter.propose(batch, plan)
        batch.again = plan.again and self._may_go_on(batch, plan, drafts)
        proposed = perf_counter()
        drafts, heard = self._select(drafts, batch, plan, load)
        chosen = perf_counter()
        try:
            scores = self.runner.score(batch, drafts, self.drafter.needs.taps)
        except Exception as error:
            return self._forward_failed(batch, writers, error)
        scored = perf_counter()
        hearing = 0.0 if heard is None else heard.seconds
        drafts = drafts if heard is None else heard.drafts
        self._suspects.difference_update(batch.sequences)
        verdicts = verify(drafts, scores, batch, plan)
        settled = self._commit(batch, writers, drafts, verdicts, scores, plan)
        drafted = [own.drafted for own in settled]
        paths = [verdict.path[: own.accepted] for verdict, own in zip(verdicts, settled, strict=True)]
        ended = perf_counter()
        thought = planned - asked + chosen - proposed + self._learning
        proposal, forward = proposed - planned + hearing, scored - chosen - hearing
        rows = 0 if self.runner.prompts_apart and load.rows > len(writers) else load.rows + sum(drafted)
        stats = RoundStats(drafted, paths, rows, proposal, forward, ended - scored, thought)
        self.policy.observe(stats)
        self._learning = perf_counter() - ended
        return [writer for writer, own in zip(writers, settled, strict=True) if own.kept or writer.seq.finish_reason]

    def _select(self, drafts: Drafts, batch: Batch, plan: Plan, load: Load) -> tuple[Drafts, _Heard | None]:
        """What goes on to be verified. Drafts still being drawn go on whole, and are looked at while the forward runs."""
        if drafts.ahead is None:
            return self.policy.select(guided(drafts, batch, plan), load), None
        heard = _Heard(lambda: self.drafter.land(drafts, batch, plan), lambda landed: self.policy.select(landed, load))
        return Drafts.promised([tree.tokens for tree in drafts.on_host()], heard), heard

    def _may_go_on(self, batch: Batch, plan: Plan, drafts: Drafts) -> bool:
        """Whether the next round can start before this one's tokens are known here: nobody is to join, and nothing needs them
        or the logits behind them, which it may write over.
        """
        if not self.runner.runs_ahead or self.scheduler.waiting or (drafts.ahead is None and any(plan.lengths)):
            return False
        needs = self.drafter.needs
        if needs.taps or needs.scores or not _known_law(batch) or _tells_chances(batch):
            return False
        slots = tuple(2 * length + 1 for length in plan.lengths)
        return self.scheduler.reserve(batch, slots) == slots

    def _load(self, batch: Batch) -> Load:
        sequences = batch.sequences
        requests = [seq.request for seq in sequences]
        sizes = [len(seq.tokens) for seq in sequences]
        emitting = sum(seq.cached + fed == size for seq, fed, size in zip(sequences, batch.feeds, sizes, strict=True))
        methods = [own.method for own in requests]
        arms = [None if own is None else self.policy.arms_named(own) for own in methods] if any(methods) else ()
        kinds = [own.params.kind for own in requests]
        room = [0] * len(sizes) if self._suspects else list(map(self._room, sequences, requests, sizes))
        return Load(room, sequences, sum(batch.feeds), sum(sizes), emitting, arms, kinds)

    def _room(self, seq: Sequence, request: Request, size: int) -> int:
        """Draft nodes that could still be emitted: a round gives one token more than it accepts."""
        if seq.cached != size - 1 or not request.speculate or seq.stats.fallback_reason is not None:
            return 0
        left, room = len(request.prompt_ids) + request.max_tokens - size - 1, self.context - size
        if left < room:
            room = left
        if request.draft_tokens is not None and request.draft_tokens < room:
            room = request.draft_tokens
        return max(0, room)

    def _commit(
        self, batch: Batch, writers: list[Writer], drafts: Drafts, verdicts: list[Verdict], scores: Scores, plan: Plan
    ) -> list[Settled]:
        trees = drafts.on_host()
        settled = []
        now = perf_counter()
        gaps: dict[tuple[float, int], int] = {}  # sequences, by when their last tokens came and how many came now
        rows = zip(batch.sequences, writers, verdicts, trees, scores.roots, strict=True)
        for b, (seq, writer, verdict, tree, root) in enumerate(rows):
            if b in scores.prompt_logits:
                note_prompt(writer, seq.cached, scores.prompt_logits[b])
            if root < 0:
                seq.cached += batch.feeds[b]
                settled.append(Settled())
                continue
            path = verdict.path
            own = advance(writer, verdict.tokens, [root, *[root + 1 + node for node in path]] if path else (root,), scores)
            stats = seq.stats
            source = stats.method
            if tree.parents:
                depths = _depths(tree.parents)
                own.drafted = len(depths)
                stats.record(depths, own.accepted, own.kept)
                source = self.policy.arms[plan.arms[b]].name if plan.arms else source
                self.tally.record(source, depths, own.accepted)
            else:
                stats.rounds += 1
                stats.emitted += own.kept
            writer.runs.append(Run(source, own.accepted, own.kept))
            if own.kept:
                key = (writer.last_token, own.kept)
                gaps[key] = gaps.get(key, 0) + 1
            writer.last_token = now
            writer.first_token = writer.first_token or now
            settled.append(own)
        self._count(settled, scores.roots, gaps, now)
        settle_kv(self.runner.pool, batch, verdicts, settled)
        self.drafter.commit(batch, drafts, verdicts, scores)
        settle = self.scheduler.settle
        for seq in batch.sequences:
            if seq.finish_reason != "error":
                settle(seq, batch.again)
            if seq.finish_reason is not None:
                self._finish(seq)
        return settled

    def _count(self, settled: Seq[Settled], roots: Seq[int], gaps: Mapping[tuple[float, int], int], now: float) -> None:
        self.tally.rounds += sum(root >= 0 for root in roots)
        self.tally.emitted += sum(own.kept for own in settled)
        for (before, kept), sequences in gaps.items():
            if before:
                self.tally.note_gap((now - before) / kept, kept * sequences)

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


class _Heard:
    """Drafts that were under way when the forward was: what became of them, and how long the host waited for them.

    What it thinks of them then takes none of the round's time: the forward runs meanwhile.
    """

    def __init__(self, land: Callable[[], Drafts], select: Callable[[Drafts], Drafts]) -> None:
        self._land, self._select = land, select
        self.seconds = 0.0

    def __call__(self) -> Drafts:
        begun = perf_counter()
        landed = self._land()
        self.seconds = perf_counter() - begun
        self.drafts = self._select(landed)
        return self.drafts


def _known_law(batch: Batch) -> bool:
    """Whether the choice at a node can be told the device before the tokens above it are known here."""
    return not any(seq.request.params.adjusts for seq in batch.sequences)


def _tells_chances(batch: Batch) -> bool:
    return any(seq.request.params.logprobs is not None for seq in batch.sequences)


def _depths(parents: Seq[int]) -> Seq[int]:
    """Depth of every node, the root's children at 0."""
    if parents == _chain(len(parents)):
        return range(len(parents))
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@lru_cache(maxsize=256)
def _chain(nodes: int) -> list[int]:
    """Parents of a chain."""
    return list(range(-1, nodes - 1))
