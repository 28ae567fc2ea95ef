"""The round, the heart of the engine: plan, propose, select, score, verify, commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter

import torch

from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.control import Load, Policy
from outrider.core import (
    Batch,
    Drafts,
    InFlight,
    Listener,
    PendingDrafts,
    Request,
    RoundProfile,
    RoundReport,
    Sequence,
    SequenceReport,
)
from outrider.draft import Drafter, Kept
from outrider.engine.adapters import Adapters
from outrider.engine.commit import OutputProcessor, emit, note_prompt, settle_kv
from outrider.engine.guard import GuardedDrafter
from outrider.engine.rounds import Round, Verified, depends_on_no_text, has_mask, phases_of, stats_of
from outrider.engine.scheduler import Scheduler
from outrider.engine.tally import Tally
from outrider.errors import EngineDead
from outrider.model import Runner
from outrider.sampling import Grammars, Guide, ReasoningGuide
from outrider.text import Tokenizer
from outrider.verify import guided, verify

__all__ = ["Engine"]

_log = logging.getLogger("outrider")


class Engine:
    """Runs requests to their end, one round at a time. One thread at a time may call it; see EngineThread.

    What raises inside a round fails the request that caused it and no other. An exception that leaves the engine in
    the middle of something, such as KeyboardInterrupt, costs the next call a restart of every sequence, never a token.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        drafter: Drafter,
        policy: Policy,
        config: EngineConfig,
        pages: PageTable | None = None,  # of another engine on the same runner
        adapters: Adapters | None = None,  # that requests may name
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.drafter = GuardedDrafter(drafter, runner.decoder.spec.vocab)
        self.policy = policy
        self.context = config.max_model_len or runner.decoder.spec.context
        self.pages = PageTable(runner.pool.pages - 1, config.page_size) if pages is None else pages
        self.adapters = adapters or Adapters(runner, config)
        self.scheduler = Scheduler(self.pages, config, runner.states)
        self.tally = Tally()
        vocab = runner.decoder.spec.vocab
        self.grammars = Grammars(None, vocab, None) if tokenizer is None else Grammars(tokenizer.to_json, vocab, tokenizer.eos_id)
        self._processors: dict[Sequence, OutputProcessor] = {}
        self._epoch = self.pages.epoch
        self._drafting: set[Sequence] = set()  # sequences the drafter knows
        self._current: list[OutputProcessor] = []  # of the sequences of this round, once they are known
        self._following: Round | None = None  # the next round, planned while this one ran
        self._mid_change = False  # True while pages, queues or tokens change; still True at the next call after an interruption
        self._unexplained = 0  # rounds in a row that failed before anybody took part in them
        self._suspects: set[Sequence] = set()  # sequences of a round that failed; each runs alone until it has emitted
        self._learning = 0.0  # seconds the controller took to learn from the last round: part of what the next one costs
        self._bus_bytes = runner.bus_bytes
        self._listeners: tuple[Listener, ...] = ()
        self._profile: RoundProfile | None = None
        self._clock: Callable[[], float] = perf_counter

    @property
    def has_work(self) -> bool:
        """Whether a round has something to do, be it to clear up after an interruption."""
        return self._mid_change or self.scheduler.has_work

    def submit(self, request: Request, method: str) -> OutputProcessor:
        """Queue a request; its OutputProcessor grows with every round."""
        processor = self.prepare(request, method)
        self.admit([processor])
        return processor

    def prepare(self, request: Request, method: str) -> OutputProcessor:
        """The OutputProcessor of a request that is not queued yet. Nothing in the engine changes."""
        seq = Sequence(request)
        seq.stats.method, seq.stats.guarantee = method, self.runner.guarantee
        seq.rotary_start = self.runner.decoder.rotary_start(seq.max_length)
        seq.guide = self._guide(request)
        return OutputProcessor(seq, self.tokenizer)

    def admit(self, processors: Seq[OutputProcessor]) -> None:
        """Queue all of them, or raise and queue none."""
        self._restart_if_interrupted()
        self.scheduler.check_queue(len(processors))
        self.adapters.acquire([processor.seq for processor in processors])
        self._mid_change = True
        for processor in processors:
            self.scheduler.submit(processor.seq)
        self._processors.update({processor.seq: processor for processor in processors})
        self._mid_change = False

    def abort(self, processor: OutputProcessor) -> None:
        """End a request now, queued or not; its pages are free at once."""
        self._restart_if_interrupted()
        if processor.seq.finish_reason is None:
            self._mid_change = True
            processor.seq.finish_reason = "abort"
            self._finish(processor.seq)
            self._mid_change = False

    def kept(self, owner: str) -> Kept:
        """How much text of an owner drafters keep to look up."""
        return self.drafter.kept(owner)

    def remember(self, owner: str, texts: Seq[Seq[int]]) -> Kept:
        """Have drafters keep texts of an owner, and say how much they keep now."""
        for tokens in texts:
            self.drafter.remember(owner, tokens)
        return self.drafter.kept(owner)

    def forget(self, owner: str) -> Kept:
        """Drop the texts that drafters keep for an owner, and say how much that was."""
        return self.drafter.forget(owner)

    def reset_counts(self) -> None:
        """Forget what was counted so far, such as a calibration's rounds."""
        self.tally = Tally()
        self.scheduler.preemptions = self.scheduler.prefix_queries = self.scheduler.prefix_hits = 0

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell a listener of every round from the next one on; call what is returned to stop."""
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return stop

    def profile(self, profile: RoundProfile | None) -> None:
        """Run the following rounds inside a profile, which sees every forward and keeps the clock; None: no longer."""
        self._profile = profile
        self._clock = perf_counter if profile is None else profile.clock

    def round(self) -> list[OutputProcessor]:
        """Advance every running sequence, and return the output processors that changed."""
        self._restart_if_interrupted()
        try:
            changed = self._round() if self._profile is None else self._profile.around(self._round)
        except EngineDead:  # no request is to blame, and none can go on
            raise
        except torch.OutOfMemoryError as error:
            changed = self._shrink(error)
        except Exception as error:
            changed = self._blame(error)
        else:
            self._unexplained = 0
        self._current = []
        return changed

    def _round(self) -> list[OutputProcessor]:
        marks = [self._clock()]  # when the round began, and when each of its phases ended
        self._current = []
        round_ = self._continue(marks) or self._begin(marks)
        if round_ is None:
            return []
        self._current = round_.processors
        in_flight = round_.in_flight or self._launch(round_)
        drafts, waited = self._resolve(round_)
        self._following = self._launch_following(round_, in_flight)
        scores = round_.scores_of(in_flight.wait())
        if self._profile is not None:
            self._profile.scored()
        marks.append(self._clock())
        batch, plan, load = round_.batch, round_.plan, round_.load
        verdicts = verify(drafts, scores, batch, plan)
        marks.append(self._clock())
        tokens_at = perf_counter()
        reports = self._commit(Verified(round_, drafts, verdicts, scores, tokens_at, self._following is not None), marks)
        rows = load.rows + sum([len(seq.depths) for seq in reports])
        phases = phases_of(marks, waited, self._learning)
        self._publish(RoundReport(
            batch, plan, drafts, verdicts, reports, round_.room, rows, load.rows > len(load.keys), phases, marks[0], tokens_at,
            scores.experts, self._moved(),
        ), round_)  # fmt: skip
        return [p for p, seq in zip(round_.processors, reports, strict=True) if seq.kept or p.seq.finish_reason]

    def _moved(self) -> int:
        """Bytes of weights that crossed the bus since the last round. Those of a forward count when it is launched."""
        before, self._bus_bytes = self._bus_bytes, self.runner.bus_bytes
        return self._bus_bytes - before

    def _begin(self, marks: list[float]) -> Round | None:
        """Choose who runs, plan and draft; None where nobody can run now."""
        batch = self._next_batch()
        if not batch.sequences:
            return None
        self._current = [self._processors[seq] for seq in batch.sequences]
        load = self._load(batch)
        marks.append(self._clock())
        plan = self.policy.plan(load)
        marks.append(self._clock())
        verify_all = plan.verify_all and depends_on_no_text(batch)
        plan = plan._replace(lengths=self._reserve(batch, plan.lengths), verify_all=verify_all)
        drafts = self.drafter.propose(batch, plan)
        marks.append(self._clock())
        if isinstance(drafts, Drafts):
            drafts = self.policy.select(guided(drafts, batch, plan), load)
        marks.append(self._clock())
        return Round(batch, self._current, load, plan, drafts)

    def _continue(self, marks: list[float]) -> Round | None:
        """The round that was planned while the last one ran, of those who have not ended; None where there is none."""
        round_, self._following = self._following, None
        if round_ is None or not round_.drop_ended():
            return None
        if round_.in_flight is None:  # its drafts were launched, and now it is known how far they may go
            batch = round_.batch
            room = [self._room(seq, seq.request, len(seq.tokens)) for seq in batch.sequences]
            lengths = self._reserve(batch, tuple(map(min, round_.plan.lengths, room)))
            round_.shorten(lengths)
        marks += [self._clock()] * 4
        return round_

    def _resolve(self, round_: Round) -> tuple[Drafts, float]:
        """The drafts as the host knows them, and how long it waited for those that the device still drew."""
        pending = round_.drafts
        if isinstance(pending, Drafts):
            return pending, 0.0
        began = perf_counter()
        drafts = self.drafter.resolve(pending, *round_.proposed)
        waited = perf_counter() - began
        return round_.cut(self.policy.select(drafts, round_.load)), waited

    def _launch(self, round_: Round) -> InFlight:
        if isinstance(round_.drafts, PendingDrafts) and not round_.drafts.is_intact():  # another engine has drawn meanwhile
            round_.drafts, _ = self._resolve(round_)
        return self.runner.launch(round_.batch, round_.drafts, self.drafter.needs.taps)

    def _launch_following(self, round_: Round, in_flight: InFlight) -> Round | None:
        """Plan the round after the one in flight, and launch what does not need to wait for its tokens; None where all does.

        It is planned where nobody is to join and nothing but the target's choices decides who runs. A sequence that ends
        in between is dropped from it: what its row has written lies behind the text.
        """
        choices, pending = in_flight.choices, round_.drew_on_device
        if not choices or self._suspects or self.drafter.needs.scores or self.scheduler.may_admit:
            return None
        if any(round_.plan.lengths) and not (pending and self.drafter.needs.overlaps):
            return None
        if not round_.can_be_followed(len(self.scheduler.running)):
            return None
        batch = round_.following(choices, self.context)
        load = self._load(batch)
        plan = self.policy.plan_next(load) if batch.sequences else None
        if plan is None or any(plan.lengths) != pending:
            return None
        slots = tuple(2 * length + 1 for length in plan.lengths)
        if self._reserve(batch, slots) != slots:
            return None
        processors = [self._processors[seq] for seq in batch.sequences]
        if pending:
            drafts = self.drafter.propose_next(batch, plan)
            return None if drafts is None else Round(batch, processors, load, plan, drafts)
        following = Round(batch, processors, load, plan, Drafts.empty(len(processors)))
        following.in_flight = self._launch(following)
        return following

    def _publish(self, report: RoundReport, round_: Round) -> None:
        """Report a round to those who listen, and to the controller in the form it takes."""
        self.tally.observe(report)
        for listener in self._listeners:
            listener.observe(report)
        began = self._clock()
        self.policy.observe(stats_of(report, round_, self.runner.separate_prefill))
        self._learning = self._clock() - began

    def _next_batch(self) -> Batch:
        """Who runs now, without sequences that wait for a grammar mask.

        The suspects of a failed round run one at a time, plainly, until the culprit is known.
        """
        self._mid_change = True
        batch, started, stopped = self.scheduler.next()
        for seq in stopped:
            self._end_drafting(seq)
        for seq in started:
            self._processors[seq].start()
            self._drafting.add(seq)
            self.drafter.begin(seq)
        self._mid_change = False
        suspect = next((seq for seq in batch.sequences if seq in self._suspects), None) if self._suspects else None
        if suspect is not None:
            batch = batch.where(lambda seq, _: seq is suspect)
        if all(seq.guide is None for seq in batch.sequences):
            return batch
        ready = batch.where(has_mask)
        if not ready.sequences:
            self.grammars.masks.wait()
        return ready

    def _reserve(self, batch: Batch, lengths: tuple[int, ...]) -> tuple[int, ...]:
        self._mid_change = True
        lengths = self.scheduler.reserve(batch, lengths)
        self._mid_change = False
        return lengths

    def _load(self, batch: Batch) -> Load:
        sequences = batch.sequences
        requests = [seq.request for seq in sequences]
        sizes = [len(seq.tokens) + bool(batch.future) for seq in sequences]
        emitting = sum(map(batch.samples, range(len(sequences))))
        methods = [request.method for request in requests]
        arms = [None if method is None else self.policy.arms_named(method) for method in methods] if any(methods) else ()
        buckets = [request.params.temperature_bucket for request in requests]
        remaining = [len(r.prompt_ids) + r.max_tokens - size for r, size in zip(requests, sizes, strict=True)]
        room = [0] * len(sizes) if self._suspects else list(map(self._room, sequences, requests, sizes))
        return Load(room, sequences, sum(batch.feeds), sum(sizes), emitting, arms, buckets, remaining)

    def _room(self, seq: Sequence, request: Request, size: int) -> int:
        """Draft nodes that could still be emitted: a round gives one token more than it accepts."""
        if seq.cached < len(seq.tokens) - 1 or not request.speculate or seq.stats.fallback_reason is not None:
            return 0
        if seq.guide is not None and seq.guide.slow:
            return 0
        left, room = len(request.prompt_ids) + request.max_tokens - size - 1, self.context - size
        if left < room and not (self.drafter.needs.branches and left > 0):
            room = left
        if request.draft_tokens is not None and request.draft_tokens < room:
            room = request.draft_tokens
        return max(0, room)

    def _commit(self, verified: Verified, marks: list[float]) -> list[SequenceReport]:
        """Make the verdicts permanent."""
        round_, drafts, verdicts, scores = verified[:4]
        batch, processors, plan = round_.batch, round_.processors, round_.plan
        reports: list[SequenceReport] = []
        undecided: list[Sequence] = []
        self._mid_change = True
        rows = zip(batch.sequences, processors, verdicts, drafts.per_sequence, scores.roots, strict=True)
        for b, (seq, processor, verdict, tree, root) in enumerate(rows):
            if b in scores.prompt_logits:
                note_prompt(processor, seq.cached, scores.prompt_logits[b])
            if root < 0 or not verdict.tokens:
                seq.cached += batch.feeds[b]
                reports.append(SequenceReport())
                if root >= 0:  # without a mask there is no choice, as in the middle of a prompt
                    scores.roots[b] = -1
                    undecided.append(seq)
                continue
            drafter = self.policy.arms[plan.arms[b]].name if plan.arms and tree.parents else seq.stats.method
            reports.append(emit(processor, verdict, tree, root, scores, drafter))
        settle_kv(self.runner.pool, batch, verdicts, reports)
        marks.append(self._clock())
        self.drafter.commit(batch, drafts, verdicts, scores)
        marks.append(self._clock())
        if undecided:  # the next round was launched as if they had a token
            self._following = None
        for seq in undecided:  # give the last row back, to have its logits when the mask is there
            seq.cached -= 1
            self.drafter.end(seq)  # it forgets that it saw the row
            self.drafter.begin(seq)
        self._settle(verified, reports)
        self._mid_change = False
        marks.append(self._clock())
        return reports

    def _settle(self, verified: Verified, reports: Seq[SequenceReport]) -> None:
        """Give pages back, and end what has ended."""
        settle, now = self.scheduler.settle, verified.tokens_at
        for processor, report in zip(verified.round.processors, reports, strict=True):
            seq = processor.seq
            if report.emits:
                processor.last_token = now
                processor.first_token = processor.first_token or now
            if seq.finish_reason != "error":
                settle(seq, verified.goes_on)
            if report.kept and self._suspects:
                self._suspects.discard(seq)
            if seq.finish_reason is None:
                processor.keep()
            else:
                self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        queued = self._processors.pop(seq, None) is not None  # from here on a restart leaves it out
        if seq.finish_reason == "error":
            self.runner.pool.clear(self.pages.disown(seq.pages))
            self.runner.states.forget(seq.keys)
        if seq.guide is not None:
            seq.guide.end()
        self._suspects.discard(seq)
        self.policy.forget(seq)
        if queued and self.scheduler.remove(seq):
            self._end_drafting(seq)
        self.adapters.release(seq)

    def _end_drafting(self, seq: Sequence) -> None:
        self._drafting.discard(seq)
        self.drafter.end(seq)

    def _guide(self, request: Request) -> Guide | ReasoningGuide | None:
        structured = request.params.structured
        return None if structured is None else self.grammars.guide(structured, request.stop_ids)

    def _shrink(self, error: torch.OutOfMemoryError) -> list[OutputProcessor]:
        """A round had no memory. Half of the sequences go on; one that has none alone has failed."""
        self._restart_if_interrupted()
        if len(self.scheduler.running) < 2:
            return self._blame(error)
        self._following = None
        self.runner.free_memory()
        for seq in self.scheduler.shrink():
            self._end_drafting(seq)
        _log.warning("a round had no memory; %d sequences go on and the others wait (%s)", len(self.scheduler.running), error)
        return [processor for processor in self._current if processor.seq not in self._processors]

    def _blame(self, error: Exception) -> list[OutputProcessor]:
        """A round raised. Its sequences run again, one at a time; one that makes a round raise alone has failed."""
        self._following = None
        current, ended = self._current, [processor for processor in self._current if processor.seq not in self._processors]
        self._restart_if_interrupted()
        reason = f"{type(error).__name__}: {error}"
        _log.error("a round of %d sequences failed (%s)", len(current), reason, exc_info=error)
        if not current:
            self._unexplained += 1
            if self._unexplained > 1:
                raise error
        elif current[0].seq in self._suspects:
            seq = current[0].seq
            seq.finish_reason, seq.stop_reason = "error", f"the request's round failed: {reason}"
            self._finish(seq)
            return current
        self._suspects.update(processor.seq for processor in current if processor.seq in self._processors)
        return ended

    def _restart_if_interrupted(self) -> None:
        if self._mid_change or self._epoch != self.pages.epoch:
            self._restart()

    def _restart(self) -> None:
        """Begin every live sequence anew, as after a preemption, from the tokens of its last complete round."""
        self._mid_change, self._following = True, None
        if self._epoch == self.pages.epoch:  # else an engine that shares them has done this
            self.runner.pool.clear(self.pages.clear())
            self.runner.states.clear()
        self._epoch = self.pages.epoch
        while self._drafting:
            self.drafter.end(self._drafting.pop())
        self.scheduler.forget_all()
        for seq, processor in sorted(self._processors.items(), key=lambda item: item[0].order):
            processor.rewind()
            if seq.guide is not None:
                seq.guide.end()
                seq.guide = self._guide(seq.request)
            self.scheduler.submit(seq, limited=False)
        self._mid_change = False
